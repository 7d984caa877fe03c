// SPDX-License-Identifier: Apache-2.0
//
// What the sanitizers and the tests must not let pass.
#include <climits>
#include <memory>
#include <thread>
#include <vector>

#include "engine/profile.h"
#include "test.h"

namespace hipsim {
namespace {

// Read at run time, so that the compiler does not see what is wrong.
volatile int zero = 0;

SELF_TEST(data_race) {
  int value = zero;
  std::thread other([&] { ++value; });
  ++value;
  other.join();
}

SELF_TEST(use_after_free) {
  auto owner = std::make_unique<int>(zero);
  const volatile int* pointer = owner.get();
  owner.reset();
  zero = *pointer;
}

SELF_TEST(memory_leak) {
  auto* leaked = new std::vector<int>(1000);
  zero = leaked->front();
  leaked = nullptr;
}

SELF_TEST(signed_overflow) {
  const int most = INT_MAX - zero;
  zero = most + 1;
}

SELF_TEST(failed_check) { CHECK(zero == 1); }

SELF_TEST(wrong_error) {
  const auto number = static_cast<Error>(zero);
  CHECK_ERROR(number, kInvalidValue);
}

}  // namespace
}  // namespace hipsim
