// SPDX-License-Identifier: Apache-2.0
//
// Note [The contract]
//
// A case is a statement about a vendor's runtime, with the source of the statement
// beside it. The program is linked against whatever library of the vendor's there is,
// the simulator or a real one. Nothing of the simulator is linked: its controls are
// looked up, and where they are missing the runtime is a real one.
//
// On the simulator a case must also leave nothing behind and must have called every
// function that it says it covers. What is meant to end the process runs in a child;
// a case that ends it all the same is a failure, and a new process goes on behind it.
//
//   #include "contract.h"
//
//   namespace contract {
//   namespace {
//
//   CASE(memory, freed_twice, "clr hipamd/src/hip_memory.cpp", hipMalloc, hipFree) {
//     if (!since(7, 2)) SKIP("the statement is about 7.2 and later");
//     void* pointer = nullptr;
//     REQUIRE_OK(hipMalloc(&pointer, 64));
//     EXPECT_OK(hipFree(pointer));
//     EXPECT_ERROR(hipFree(pointer), hipErrorInvalidValue);
//   }
//
//   }  // namespace
//   }  // namespace contract
//
// This header knows no vendor. A vendor's contract.h declares how its errors are
// described, then includes it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

namespace contract {

// --- the runtime under test ----------------------------------------------------------

// What the harness is told of it; each program defines one.
struct Vendor {
  // What its release is called.
  std::string (*release)();
  int (*count_devices)();

  // Makes the calling thread ready for a case.
  void (*begin)();

  // Does a case on a real device need a process of its own?
  bool alone;
};
extern const Vendor kVendor;

// Is the runtime the simulator?
bool simulated();

// Does the runtime export the function?
bool exported(const char* function);

// On a real runtime set_switch() does nothing and stat() is 0. A name that the
// simulator does not know fails the case.
void set_switch(const char* name, int64_t value);
uint64_t stat(const std::string& name);

// Ends the case as skipped when there are fewer.
void need_devices(int count);

// --- cases ---------------------------------------------------------------------------

// Group that only runs when it is asked for by name: wrong on purpose.
constexpr std::string_view kSelfTest = "selftest";

struct Case {
  const char* group;
  const char* name;
  const char* source;
  const char* covers;  // names with commas between them
  void (*body)();
};

struct Registration {
  explicit Registration(const Case& made);
};

#define CASE(group, name, source, ...)                                               \
  void case_##group##_##name();                                                      \
  const ::contract::Registration registered_##group##_##name(                        \
      ::contract::Case{#group, #name, source, #__VA_ARGS__, case_##group##_##name}); \
  void case_##group##_##name()

// For functions that the simulator does not count.
void called(const char* function);

// --- expectations --------------------------------------------------------------------

struct Skipped {
  std::string reason;
};
struct Ended {};

struct Where {
  const char* file;
  int line;
};
#define CONTRACT_HERE (::contract::Where{__FILE__, __LINE__})

// Fails the case. Any thread may call it.
void report(Where where, const std::string& what);

// Goes before every failure of its scope.
class About {
 public:
  explicit About(const std::string& what);
  About(const About&) = delete;
  About& operator=(const About&) = delete;
  ~About();
};

std::string describe(bool value);
std::string describe(double value);
std::string describe(const void* value);
std::string describe(const char* value);
std::string describe(const std::string& value);
std::string describe(const std::vector<unsigned char>& value);
template <typename T,
          std::enable_if_t<std::is_integral_v<T> || std::is_enum_v<T>, int> = 0>
std::string describe(T value) {
  if constexpr (std::is_enum_v<T>) {
    return std::to_string(static_cast<std::underlying_type_t<T>>(value));
  } else {
    return std::to_string(value);
  }
}

template <typename Actual, typename Expected>
bool expect_equal(Where where, const char* text, const Actual& actual,
                  const Expected& expected) {
  if (actual == expected) return true;
  report(where,
         std::string(text) + " is " + describe(actual) + ", not " + describe(expected));
  return false;
}

// Names the first byte that differs.
bool expect_bytes(Where where, const char* text, const void* actual,
                  const std::vector<unsigned char>& expected);

#define EXPECT(condition)                                                       \
  do {                                                                          \
    if (!(condition)) ::contract::report(CONTRACT_HERE, "not so: " #condition); \
  } while (false)
#define REQUIRE(condition)                                      \
  do {                                                          \
    if (!(condition)) {                                         \
      ::contract::report(CONTRACT_HERE, "not so: " #condition); \
      throw ::contract::Ended{};                                \
    }                                                           \
  } while (false)

#define EXPECT_EQ(actual, expected) \
  ::contract::expect_equal(CONTRACT_HERE, #actual, actual, expected)
#define REQUIRE_EQ(actual, expected)                             \
  do {                                                           \
    if (!EXPECT_EQ(actual, expected)) throw ::contract::Ended{}; \
  } while (false)

#define EXPECT_ERROR(call, error) EXPECT_EQ(call, error)
#define REQUIRE_ERROR(call, error) REQUIRE_EQ(call, error)

// `expected` is a std::vector<unsigned char>; as many bytes are compared.
#define EXPECT_BYTES(actual, expected) \
  ::contract::expect_bytes(CONTRACT_HERE, #actual, actual, expected)

#define SKIP(why) \
  throw ::contract::Skipped { why }

// --- things that clean up after themselves -------------------------------------------

// Live holders; one that outlives its case fails it, on a real runtime too.
class Counted {
 protected:
  Counted();
  Counted(const Counted&) = delete;
  Counted& operator=(const Counted&) = delete;
  ~Counted();
};

// Owns a value that `drop` ends; a failing `drop` fails the case.
template <typename T, auto drop>
class Holder : Counted {
 public:
  Holder() = default;
  explicit Holder(T value) : value_(value) {}
  Holder(Holder&& other) noexcept : value_(other.release()) {}
  Holder& operator=(Holder&& other) noexcept {
    std::swap(value_, other.value_);
    return *this;
  }
  ~Holder() { reset(); }

  T get() const { return value_; }
  operator T() const { return value_; }

  // The caller ends it.
  T release() { return std::exchange(value_, T{}); }
  void reset() {
    const T value = release();
    if (value == T{}) return;
    using Result = decltype(drop(value));
    if (const Result result = drop(value); result != Result{}) {
      report(CONTRACT_HERE, "what was made ends with " + describe(result));
    }
  }

 private:
  T value_{};
};

// Whole pages of the process's own memory, all zero and not registered.
class Pages {
 public:
  explicit Pages(size_t bytes);
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  ~Pages();

  void* get() const { return base_; }
  unsigned char* at(size_t offset) const;
  size_t size() const { return size_; }

 private:
  void* base_;
  size_t size_;
};

// --- bytes ---------------------------------------------------------------------------

using Bytes = std::vector<unsigned char>;

// The same for the same seed, and no two seeds alike.
Bytes random_bytes(size_t count, unsigned seed);

std::string to_hex(const void* bytes, size_t count);
Bytes from_hex(const std::string& text);

// --- time ----------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

constexpr Seconds kPatience{20};

// Asks again until the answer is yes; false when there was none in time.
bool wait_until(const std::function<bool()>& answer, Seconds patience = kPatience);

// --- children ------------------------------------------------------------------------

struct Ending {
  bool in_time = false;  // else it was killed
  int status = -1;       // of exit; -1 when a signal ended it
  int signal = 0;
};

std::string describe(const Ending& ending);
inline bool operator==(const Ending& ending, int status) {
  return ending.in_time && ending.status == status;
}

using Arguments = std::vector<std::string>;

// This program again, in a role that CHILD names, with the same release. Its standard
// input and output are pipes. What it called counts as called by the case when it
// ends by itself.
class Child {
 public:
  // `environment` is added, as NAME=value.
  explicit Child(const std::string& role, const Arguments& arguments = {},
                 const std::vector<std::string>& environment = {});
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child();

  pid_t pid() const { return pid_; }
  void write_line(const std::string& line);

  // Ends the case when no line comes in time.
  std::string read_line(Seconds patience = kPatience);

  // Closes the child's input first.
  Ending wait(Seconds patience = kPatience);

 private:
  pid_t pid_ = -1;
  int input_ = -1;
  int output_ = -1;
  int calls_ = -1;
  std::string pending_;
};

Ending run_child(const std::string& role, const Arguments& arguments = {},
                 Seconds patience = kPatience,
                 const std::vector<std::string>& environment = {});

// The environment of a child that a signal is meant to end, whatever sanitizer the
// program has.
extern const std::vector<std::string> kNoSignalHandlers;

// In the child: a line from the parent (empty at the end of its input), and one to it.
std::string read_from_parent();
void write_to_parent(const std::string& line);

struct Role {
  const char* name;
  int (*body)(const Arguments& arguments);
};

struct RoleRegistration {
  explicit RoleRegistration(const Role& made);
};

// The child's exit status is what the body returns, or 99 when an expectation failed.
// The runtime is as the process finds it: nothing was called yet.
constexpr int kExpectationFailed = 99;

// Makes what outlives its process, in which nothing may work any more in the end.
template <typename T, typename... Arguments>
T& make_immortal(Arguments&&... arguments) {
  static auto* const all = new std::vector<T*>;
  return *all->emplace_back(new T(std::forward<Arguments>(arguments)...));
}

#define CHILD(role)                                           \
  int child_##role(const ::contract::Arguments& arguments);   \
  const ::contract::RoleRegistration registered_child_##role( \
      ::contract::Role{#role, child_##role});                 \
  int child_##role([[maybe_unused]] const ::contract::Arguments& arguments)

}  // namespace contract
