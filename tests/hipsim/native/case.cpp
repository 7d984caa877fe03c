// SPDX-License-Identifier: Apache-2.0
#include "case.h"

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

namespace test {
namespace {

// A case that hangs ends here, and not with the patience of whoever runs it.
constexpr unsigned kWatchdogSeconds = 90;

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

thread_local int current_seed = -1;

void bite(int) {
  constexpr char kMessage[] = "the case does not end\n";
  if (write(STDERR_FILENO, kMessage, sizeof kMessage - 1) < 0) _exit(2);
  _exit(1);
}

}  // namespace

Registration::Registration(const Case& made) { cases().push_back(made); }

void fail(const char* file, int line, const std::string& what) {
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what.c_str());
  if (current_seed >= 0) std::fprintf(stderr, "the seed is %d\n", current_seed);
  std::_Exit(1);
}

void expect(const char* file, int line, const char* what, uint64_t value,
            uint64_t expected) {
  if (value == expected) return;
  fail(file, line,
       std::string(what) + " is " + std::to_string(value) + ", not " +
           std::to_string(expected));
}

void with_seed(unsigned seed) { current_seed = static_cast<int>(seed); }

// The system calls themselves, because a sanitizer looks into the bytes before write()
// and read() do.
bool is_readable(const void* byte) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const bool done = syscall(SYS_write, ends[1], byte, 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return done;
}

// Writes back what is there; a byte that can only be written becomes 0.
bool is_writable(void* byte) {
  int ends[2];
  CHECK(pipe(ends) == 0);
  const char zero = 0;
  if (syscall(SYS_write, ends[1], byte, 1) != 1) {
    CHECK(syscall(SYS_write, ends[1], &zero, 1) == 1);
  }
  const bool done = syscall(SYS_read, ends[0], byte, 1) == 1;
  close(ends[0]);
  close(ends[1]);
  return done;
}

int in_child(int (*body)(const void*), const void* argument) {
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) _exit(body(argument));
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  return WEXITSTATUS(status);
}

void list_cases() {
  for (const Case& each : cases()) {
    if (each.listed) std::puts(each.name);
  }
}

int run_case(const std::string& name) {
  std::vector<Case>& all = cases();
  const auto found = std::find_if(all.begin(), all.end(),
                                  [&](const Case& each) { return each.name == name; });
  if (found == all.end()) return 2;
  std::signal(SIGALRM, bite);
  alarm(kWatchdogSeconds);
  found->body();
  return 0;
}

}  // namespace test
