// SPDX-License-Identifier: Apache-2.0
#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <optional>
#include <system_error>

#include "harness/internal.h"

extern char** environ;

namespace contract {

// --- processes -----------------------------------------------------------------------

namespace {

[[noreturn]] void fail(int error, const char* what) {
  throw std::system_error(error, std::generic_category(), what);
}

std::vector<char*> pointers_to(std::vector<std::string>& words) {
  std::vector<char*> pointers;
  for (std::string& word : words) pointers.push_back(word.data());
  return pointers;
}

std::optional<std::string> take_line(std::string* text) {
  const size_t end = text->find('\n');
  if (end == std::string::npos) return std::nullopt;
  std::string line = text->substr(0, end);
  text->erase(0, end + 1);
  return line;
}

}  // namespace

Pipe::Pipe() {
  if (pipe2(ends_, O_CLOEXEC) != 0) fail(errno, "pipe2");
}

Pipe::~Pipe() {
  for (const int end : ends_) {
    if (end >= 0) close(end);
  }
}

int Pipe::release_out() { return std::exchange(ends_[0], -1); }
int Pipe::release_in() { return std::exchange(ends_[1], -1); }

pid_t start(std::vector<std::string> words, std::vector<std::string> environment,
            const std::vector<std::pair<int, int>>& redirections) {
  words.insert(words.begin(), "/proc/self/exe");
  std::vector<char*> arguments = pointers_to(words);
  arguments.push_back(nullptr);
  std::vector<char*> variables = pointers_to(environment);
  for (char** variable = environ; *variable != nullptr; ++variable) {
    variables.push_back(*variable);
  }
  variables.push_back(nullptr);

  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  for (const auto& [ours, its] : redirections) {
    posix_spawn_file_actions_adddup2(&actions, ours, its);
  }
  pid_t process = -1;
  const int error = posix_spawn(&process, arguments[0], &actions, nullptr,
                                arguments.data(), variables.data());
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) fail(error, "posix_spawn");
  return process;
}

Ending await(pid_t process, Seconds patience) {
  int status = 0;
  Ending ending;
  ending.in_time =
      wait_until([&] { return waitpid(process, &status, WNOHANG) != 0; }, patience);
  if (!ending.in_time) {
    kill(process, SIGKILL);
    waitpid(process, &status, 0);
  }
  if (WIFSIGNALED(status)) ending.signal = WTERMSIG(status);
  if (WIFEXITED(status)) ending.status = WEXITSTATUS(status);
  return ending;
}

bool read_some(int descriptor, std::string* text, Seconds patience) {
  pollfd ready = {descriptor, POLLIN, 0};
  const auto milliseconds = static_cast<int>(std::max(0.0, patience.count() * 1000));
  if (poll(&ready, 1, milliseconds) <= 0) return false;
  char buffer[4096];
  const ssize_t count = read(descriptor, buffer, sizeof(buffer));
  if (count <= 0) return false;
  text->append(buffer, static_cast<size_t>(count));
  return true;
}

bool write_all(int descriptor, const std::string& text) {
  for (size_t done = 0; done < text.size();) {
    const ssize_t count = write(descriptor, text.data() + done, text.size() - done);
    if (count <= 0) return false;
    done += static_cast<size_t>(count);
  }
  return true;
}

void forbid_core_files() {
  const rlimit none = {0, 0};
  setrlimit(RLIMIT_CORE, &none);
}

// --- children ------------------------------------------------------------------------

std::vector<Role>& roles() {
  static std::vector<Role> all;
  return all;
}

RoleRegistration::RoleRegistration(const Role& made) { roles().push_back(made); }

Child::Child(const std::string& role, const Arguments& arguments,
             const std::vector<std::string>& environment) {
  std::vector<std::string> words;
  if (simulated()) words = {"--profile", simulator().profile()};
  words.insert(words.end(), {"--child", role});
  words.insert(words.end(), arguments.begin(), arguments.end());
  Pipe input;
  Pipe output;
  Pipe calls;
  pid_ = start(words, environment,
               {{input.out(), STDIN_FILENO},
                {output.in(), STDOUT_FILENO},
                {calls.in(), kReportDescriptor}});
  input_ = input.release_in();
  output_ = output.release_out();
  calls_ = calls.release_out();
}

Child::~Child() {
  if (pid_ > 0) wait(Seconds(0));
}

void Child::write_line(const std::string& line) {
  REQUIRE(write_all(input_, line + "\n"));
}

std::string Child::read_line(Seconds patience) {
  const auto deadline = Clock::now() + patience;
  for (;;) {
    if (const auto line = take_line(&pending_)) return *line;
    if (!read_some(output_, &pending_, deadline - Clock::now())) {
      report(CONTRACT_HERE, "no line from the child");
      throw Ended{};
    }
  }
}

Ending Child::wait(Seconds patience) {
  close(input_);
  const Ending ending = await(std::exchange(pid_, -1), patience);
  std::string text;
  while (read_some(calls_, &text, Seconds(0))) {
  }
  for (const std::string& function : split(text, "\n")) called(function.c_str());
  close(output_);
  close(calls_);
  return ending;
}

Ending run_child(const std::string& role, const Arguments& arguments, Seconds patience,
                 const std::vector<std::string>& environment) {
  return Child(role, arguments, environment).wait(patience);
}

const std::vector<std::string> kNoSignalHandlers = {"ASAN_OPTIONS=handle_segv=0",
                                                    "TSAN_OPTIONS=handle_segv=0",
                                                    "UBSAN_OPTIONS=handle_segv=0"};

std::string read_from_parent() {
  static std::string pending;
  for (;;) {
    if (auto line = take_line(&pending)) return *line;
    if (!read_some(STDIN_FILENO, &pending, kPatience)) return {};
  }
}

void write_to_parent(const std::string& line) {
  REQUIRE(write_all(STDOUT_FILENO, line + "\n"));
}

}  // namespace contract
