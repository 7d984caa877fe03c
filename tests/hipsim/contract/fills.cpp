// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>

#include "contract.h"

namespace contract {
namespace {

constexpr size_t kBytes = 4096;

constexpr const char* kLate =
    "clr hip_memory.cpp (hipMemset); HIP docs, Asynchronous execution (null stream)";

CASE(fills, with_the_low_byte, "HIP docs, hipMemset", hipMemset, hipMemsetAsync) {
  DeviceMemory memory(2 * kBytes);
  Stream stream;
  EXPECT_OK(hipMemset(memory, 0x1FE, kBytes));
  EXPECT_OK(hipMemsetAsync(memory.at(kBytes), -3, kBytes, stream));
  EXPECT_OK(hipDeviceSynchronize());
  EXPECT_BYTES(download(memory, kBytes).data(), Bytes(kBytes, 0xFE));
  EXPECT_BYTES(download(memory.at(kBytes), kBytes).data(), Bytes(kBytes, 0xFD));
}

CASE(fills, exactly_what_was_asked_for, "hip-tests memory/hipMemset.cc", hipMemset,
     hipMemsetAsync) {
  DeviceMemory memory(1 << 20);
  Stream stream;
  for (const size_t size : {1, 3, 4, 7, 8, 4095, 4097, 65537, 1 << 19}) {
    for (const size_t offset : {0, 1, 2, 5, 8, 4097}) {
      Bytes expected = random_bytes(offset + size + 16, static_cast<unsigned>(size));
      upload(memory, expected);
      if (offset % 2 == 0) {
        EXPECT_OK(hipMemset(memory.at(offset), 7, size));
      } else {
        EXPECT_OK(hipMemsetAsync(memory.at(offset), 7, size, stream));
      }
      EXPECT_OK(hipDeviceSynchronize());
      std::fill_n(expected.begin() + offset, size, static_cast<unsigned char>(7));
      if (!EXPECT_BYTES(download(memory, expected.size()).data(), expected)) return;
    }
  }
}

CASE(fills, of_host_memory, "hip-tests memory/hipHostRegister.cc", hipMemset,
     hipMemsetAsync) {
  RegisteredMemory registered(kBytes);
  HostMemory allocated(kBytes);
  Stream stream;
  for (unsigned char* host : {registered.at(0), allocated.at(0)}) {
    EXPECT_OK(hipMemset(host, 9, kBytes));
    EXPECT_BYTES(host, Bytes(kBytes, 9));
    EXPECT_OK(hipMemsetAsync(host + 1, 5, 100, stream));
    EXPECT_OK(hipStreamSynchronize(stream));
    EXPECT_BYTES(host + 1, Bytes(100, 5));
  }
}

CASE(fills, of_nothing, "clr hip_memory.cpp", hipMemset, hipMemsetAsync) {
  Stream stream;
  EXPECT_OK(hipMemset(nullptr, 0, 0));
  EXPECT_OK(hipMemsetAsync(nullptr, 0, 0, stream));
}

CASE(fills, that_are_refused, "clr hip_memory.cpp", hipMemset, hipMemsetAsync) {
  DeviceMemory memory(kBytes);
  Pages pageable(kBytes);
  Stream stream;
  const auto refused = [&](void* destination, size_t size) {
    EXPECT_ERROR(hipMemset(destination, 0, size), hipErrorInvalidValue);
    EXPECT_ERROR(hipMemsetAsync(destination, 0, size, stream), hipErrorInvalidValue);
  };
  refused(nullptr, 1);
  refused(pageable.get(), kBytes);
  refused(memory, kBytes + 1);
  refused(memory.at(1), kBytes);
}

// --- when a fill runs ----------------------------------------------------------------

// Is the stream idle when the call returns?
bool waits(hipStream_t stream, const std::function<hipError_t()>& call) {
  REQUIRE_OK(hipDeviceSynchronize());
  const Busy busy(stream);
  EXPECT_OK(call());
  const bool idle = hipStreamQuery(stream) == hipSuccess;
  EXPECT_OK(hipDeviceSynchronize());
  return idle;
}

CASE(fills, at_the_base_of_an_allocation_return_before_they_have_run,
     "clr hip_memory.cpp (hipMemset)", hipMemset) {
  DeviceMemory memory(kBytes);
  EXPECT(!waits(nullptr, [&] { return hipMemset(memory, 1, kBytes); }));
  EXPECT(!waits(nullptr, [&] { return hipMemset(memory, 1, 100); }));
}

CASE(fills, elsewhere_wait, "clr hip_memory.cpp", hipMemset) {
  DeviceMemory memory(kBytes);
  RegisteredMemory registered(kBytes);
  HostMemory allocated(kBytes);
  EXPECT(waits(nullptr, [&] { return hipMemset(memory.at(256), 1, 100); }));
  EXPECT(waits(nullptr, [&] { return hipMemset(registered.get(), 1, 100); }));
  EXPECT(waits(nullptr, [&] { return hipMemset(allocated, 1, 100); }));
}

CASE(fills, async_ones_never_wait, "clr hip_memory.cpp", hipMemsetAsync) {
  DeviceMemory memory(kBytes);
  RegisteredMemory registered(kBytes);
  Stream stream;
  for (void* destination :
       {memory.get(), static_cast<void*>(memory.at(256)), registered.get()}) {
    EXPECT(!waits(stream, [&] { return hipMemsetAsync(destination, 1, 100, stream); }));
  }
}

CASE(fills, ordered_with_blocking_streams,
     "HIP docs, Asynchronous execution (null stream)", hipMemset, hipMemsetAsync) {
  DeviceMemory memory(kBytes);
  Stream stream(hipStreamDefault);
  const Busy busy(nullptr);
  EXPECT_OK(hipMemset(memory, 1, kBytes));
  EXPECT_OK(hipMemsetAsync(memory, 2, kBytes, stream));
  EXPECT_OK(hipStreamSynchronize(stream));
  EXPECT_BYTES(download(memory, kBytes).data(), Bytes(kBytes, 2));
}

// --- the late fill -------------------------------------------------------------------

enum class Wait { kNone, kDevice, kNullStream };

// Clears 200 pieces of memory with hipMemset, waits as told, and copies data into them
// on a non-blocking stream. In how many has the fill come last, so that the data is
// gone?
int count_late_fills(Wait wait) {
  constexpr int kPieces = 200;
  constexpr size_t kPiece = 64;
  std::vector<DeviceMemory> pieces;
  for (int i = 0; i < kPieces; ++i) pieces.emplace_back(kPiece);
  RegisteredMemory data(kPieces * kPiece);
  const Bytes bytes = random_bytes(data.size(), 1);
  std::copy(bytes.begin(), bytes.end(), data.at(0));

  Stream stream(hipStreamNonBlocking);
  {
    const Busy busy(nullptr);
    for (DeviceMemory& piece : pieces) REQUIRE_OK(hipMemset(piece, 0, kPiece));
    if (wait == Wait::kDevice) REQUIRE_OK(hipDeviceSynchronize());
    if (wait == Wait::kNullStream) REQUIRE_OK(hipStreamSynchronize(nullptr));
    for (int i = 0; i < kPieces; ++i) {
      REQUIRE_OK(hipMemcpyAsync(pieces[i], data.at(i * kPiece), kPiece,
                                hipMemcpyHostToDevice, stream));
    }
    REQUIRE_OK(hipStreamSynchronize(stream));
    REQUIRE_OK(hipDeviceSynchronize());
  }
  int late = 0;
  for (DeviceMemory& piece : pieces) {
    if (download(piece, kPiece) == Bytes(kPiece, 0)) ++late;
  }
  return late;
}

CASE(fills, come_late_for_a_non_blocking_stream, kLate, hipMemset, hipMemcpyAsync) {
  EXPECT_EQ(count_late_fills(Wait::kNone), 200);
}

CASE(fills, do_not_come_late_after_the_device_was_waited_for, kLate, hipMemset,
     hipDeviceSynchronize) {
  EXPECT_EQ(count_late_fills(Wait::kDevice), 0);
}

CASE(fills, do_not_come_late_after_the_null_stream_was_waited_for, kLate, hipMemset,
     hipStreamSynchronize) {
  EXPECT_EQ(count_late_fills(Wait::kNullStream), 0);
}

// The same with one fill after the other, each of which takes its time.
CASE(fills, come_late_one_by_one, kLate, hipMemset, hipMemcpyAsync) {
  if (!simulated()) SKIP("needs fills that take their time");
  constexpr size_t kPiece = 64;
  DeviceMemory memory(kPiece);
  RegisteredMemory data(kPiece);
  const Bytes bytes = random_bytes(kPiece, 1);
  std::copy(bytes.begin(), bytes.end(), data.at(0));
  Stream stream(hipStreamNonBlocking);
  set_switch("fill_latency_us", 100'000);
  for (int round = 0; round < 5; ++round) {
    for (const bool wait : {false, true}) {
      EXPECT_OK(hipMemset(memory, 0, kPiece));
      if (wait) EXPECT_OK(hipStreamSynchronize(nullptr));
      EXPECT_OK(
          hipMemcpyAsync(memory, data.get(), kPiece, hipMemcpyHostToDevice, stream));
      EXPECT_OK(hipStreamSynchronize(stream));
      EXPECT_OK(hipDeviceSynchronize());
      EXPECT_BYTES(download(memory, kPiece).data(), wait ? bytes : Bytes(kPiece, 0));
    }
  }
}

}  // namespace
}  // namespace contract
