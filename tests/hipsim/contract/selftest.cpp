// SPDX-License-Identifier: Apache-2.0
//
// What the harness must notice. Every case here fails, and none runs unless its group
// or its name is asked for.
#include <csignal>
#include <cstdlib>

#include "contract.h"

namespace contract {
namespace {

constexpr const char* kSource = "none: wrong on purpose";

CASE(selftest, wrong_expectation, kSource, hipGetDevice) {
  int device = -1;
  EXPECT_OK(hipGetDevice(&device));
  EXPECT_EQ(device, 12345);
}

CASE(selftest, wrong_requirement, kSource, hipGetDevice) {
  REQUIRE_OK(hipGetDevice(nullptr));
  std::abort();
}

CASE(selftest, wrong_bytes, kSource, hipMemset) {
  DeviceMemory memory(4);
  EXPECT_OK(hipMemset(memory, 1, 4));
  EXPECT_BYTES(download(memory, 4).data(), Bytes({1, 1, 2, 1}));
}

CASE(selftest, leaked_memory, kSource, hipMalloc) {
  void* leaked = nullptr;
  EXPECT_OK(hipMalloc(&leaked, 64));
}

CASE(selftest, leaked_holder, kSource, hipStreamCreateWithFlags) { new Stream; }

CASE(selftest, claimed_and_not_called, kSource, hipGetDevice, hipMemset) {
  int device = -1;
  EXPECT_OK(hipGetDevice(&device));
}

CASE(selftest, claimed_and_not_called_infallible, kSource, hipGetErrorName) {
  EXPECT_EQ(device_count() > 0, true);
}

CASE(selftest, function_that_is_not_there, kSource, hipNoSuchFunction) {}

CASE(selftest, switch_that_is_not_there, kSource, hipGetDevice) {
  set_switch("no_such_switch", 1);
}

CASE(selftest, child_with_a_wrong_expectation, kSource, hipGetDevice) {
  int device = -1;
  EXPECT_OK(hipGetDevice(&device));
  EXPECT_EQ(run_child("selftest_wrong"), 0);
}

CASE(selftest, child_that_takes_too_long, kSource, hipGetDevice) {
  int device = -1;
  EXPECT_OK(hipGetDevice(&device));
  EXPECT_EQ(run_child("selftest_hangs", {}, Seconds(0.3)), 0);
}

CASE(selftest, child_that_dies, kSource, hipGetDevice) {
  int device = -1;
  EXPECT_OK(hipGetDevice(&device));
  EXPECT_EQ(run_child("selftest_dies"), 0);
}

CASE(selftest, dies, kSource, hipGetDevice) { std::raise(SIGSEGV); }

CASE(selftest, hangs, kSource, hipGetDevice) {
  wait_until([] { return false; }, Seconds(60));
}

CHILD(selftest_wrong) {
  EXPECT_EQ(1, 2);
  return 0;
}

CHILD(selftest_hangs) {
  wait_until([] { return false; }, Seconds(60));
  return 0;
}

CHILD(selftest_dies) {
  std::raise(SIGKILL);
  return 0;
}

}  // namespace
}  // namespace contract
