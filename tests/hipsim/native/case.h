// SPDX-License-Identifier: Apache-2.0
//
// What C++ tests share that know nothing of what they test. Each case runs in a process
// of its own and fails by ending it, so that a case needs no clean-up after a failure.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <random>
#include <string>

namespace test {

// No wait of a case that works lasts this long.
constexpr auto kDeadline = std::chrono::seconds(20);

// Long enough for what is wrong to happen, where it would happen at once.
constexpr auto kMoment = std::chrono::milliseconds(50);

struct Case {
  const char* name;
  void (*body)();
  bool listed;
};

struct Registration {
  explicit Registration(const Case& made);
};

#define TEST(name) TEST_IN_LIST(name, true)

// Wrong on purpose, and run only by who names it.
#define SELF_TEST(name) TEST_IN_LIST(name, false)

#define TEST_IN_LIST(name, listed)                                                 \
  void name();                                                                     \
  const ::test::Registration registered_##name{::test::Case{#name, name, listed}}; \
  void name()

[[noreturn]] void fail(const char* file, int line, const std::string& what);

#define CHECK(condition) \
  ((condition) ? void() : ::test::fail(__FILE__, __LINE__, "not so: " #condition))

void expect(const char* file, int line, const char* what, uint64_t value,
            uint64_t expected);

#define CHECK_EQ(value, expected) \
  ::test::expect(__FILE__, __LINE__, #value, static_cast<uint64_t>(value), expected)

// Runs the body with each of the seeds; a failure names the one.
void with_seed(unsigned seed);
template <typename Body>
void for_seeds(unsigned count, Body body) {
  for (unsigned seed = 0; seed < count; ++seed) {
    with_seed(seed);
    std::mt19937 random(seed);
    body(random);
  }
}

// Closed at first; whoever waits at it goes on when it is opened.
class Latch {
 public:
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  bool wait(std::chrono::milliseconds limit = kDeadline) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

inline char* at(void* base, size_t offset) { return static_cast<char*>(base) + offset; }

// May this process read or write the byte? Asked of the kernel, so that the answer no
// is not a signal.
bool is_readable(const void* byte);
bool is_writable(void* byte);

// What a child of this process that runs the body exits with.
int in_child(int (*body)(const void*), const void* argument);

// The names of the cases that are not wrong on purpose, a line each.
void list_cases();

// Runs a case, which ends well where this returns: 0, or 2 where there is none of the
// name.
int run_case(const std::string& name);

}  // namespace test
