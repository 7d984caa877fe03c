// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>

#include "contract.h"

namespace contract {
namespace {

constexpr size_t kBytes = 4096;

// On both sides of 16 KiB, the size up to which a copy is a kernel.
constexpr size_t kSizes[] = {1,    3,     4,     7,     64,    4095,
                             4096, 16383, 16384, 16385, 65537, (1 << 20) + 3};
constexpr size_t kMostBytes = (1 << 20) + 16;

constexpr std::pair<size_t, size_t> kOffsets[] = {{0, 0}, {1, 0}, {0, 1}, {3, 2}};

void fill_host(unsigned char* host, const Bytes& bytes) {
  std::copy(bytes.begin(), bytes.end(), host);
}

// There and back again through two pieces of device memory, at every size and offset.
void expect_round_trips(unsigned char* there, unsigned char* back) {
  DeviceMemory first(kMostBytes);
  DeviceMemory second(kMostBytes);
  Stream stream;
  unsigned seed = 0;
  for (const size_t size : kSizes) {
    for (const auto& [from, to] : kOffsets) {
      const Bytes bytes = random_bytes(size, ++seed);
      fill_host(there + from, bytes);
      std::fill_n(back, size + 8, static_cast<unsigned char>(0xA5));
      REQUIRE_OK(hipMemcpyAsync(first.at(to), there + from, size, hipMemcpyHostToDevice,
                                stream));
      REQUIRE_OK(hipMemcpyAsync(second.at(from), first.at(to), size,
                                hipMemcpyDeviceToDevice, stream));
      REQUIRE_OK(hipMemcpyAsync(back + to, second.at(from), size, hipMemcpyDeviceToHost,
                                stream));
      REQUIRE_OK(hipStreamSynchronize(stream));
      if (!EXPECT_BYTES(back + to, bytes)) return;
      EXPECT_EQ(static_cast<int>(back[to + size]), 0xA5);
      if (to > 0) EXPECT_EQ(static_cast<int>(back[to - 1]), 0xA5);
    }
  }
}

CASE(copies, exact_from_and_to_allocated_host_memory,
     "clr rocblit.cpp (GPU_FORCE_BLIT_COPY_SIZE)", hipMemcpyAsync) {
  HostMemory there(kMostBytes);
  HostMemory back(kMostBytes);
  expect_round_trips(there.at(0), back.at(0));
}

CASE(copies, exact_from_and_to_registered_memory,
     "clr rocblit.cpp (GPU_FORCE_BLIT_COPY_SIZE)", hipMemcpyAsync) {
  RegisteredMemory there(kMostBytes);
  RegisteredMemory back(kMostBytes);
  expect_round_trips(there.at(0), back.at(0));
}

CASE(copies, exact_from_and_to_pageable_memory, "clr rocblit.cpp (staging)",
     hipMemcpyAsync) {
  Pages there(kMostBytes);
  Pages back(kMostBytes);
  expect_round_trips(there.at(0), back.at(0));
}

CASE(copies, blocking_copies_are_exact, "HIP docs, hipMemcpy", hipMemcpy) {
  DeviceMemory first(kMostBytes);
  DeviceMemory second(kMostBytes);
  for (const size_t size : kSizes) {
    const Bytes bytes = random_bytes(size, static_cast<unsigned>(size));
    Bytes back(size);
    EXPECT_OK(hipMemcpy(first, bytes.data(), size, hipMemcpyHostToDevice));
    EXPECT_OK(hipMemcpy(second, first, size, hipMemcpyDeviceToDevice));
    EXPECT_OK(hipMemcpy(back.data(), second, size, hipMemcpyDeviceToHost));
    if (!EXPECT_BYTES(back.data(), bytes)) return;
  }
}

CASE(copies, the_default_kind_asks_the_addresses, "HIP docs, hipMemcpyKind",
     hipMemcpy) {
  DeviceMemory first(kBytes);
  DeviceMemory second(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  Bytes back(kBytes);
  EXPECT_OK(hipMemcpy(first, bytes.data(), kBytes, hipMemcpyDefault));
  EXPECT_OK(hipMemcpy(second, first, kBytes, hipMemcpyDefault));
  EXPECT_OK(hipMemcpy(back.data(), second, kBytes, hipMemcpyDefault));
  EXPECT_BYTES(back.data(), bytes);
}

CASE(copies, the_kind_without_compute_units, "hip-tests memory/hipMemcpyAsync.cc",
     hipMemcpy, hipMemcpyAsync) {
  DeviceMemory first(kBytes);
  DeviceMemory second(2 * kBytes);
  Stream stream;
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(first, bytes);
  EXPECT_OK(hipMemcpy(second, first, kBytes, hipMemcpyDeviceToDeviceNoCU));
  EXPECT_OK(hipMemcpyAsync(second.at(kBytes), first, kBytes,
                           hipMemcpyDeviceToDeviceNoCU, stream));
  EXPECT_OK(hipDeviceSynchronize());
  EXPECT_BYTES(download(second, kBytes).data(), bytes);
  EXPECT_BYTES(download(second.at(kBytes), kBytes).data(), bytes);
}

CASE(copies, between_host_addresses, "clr hip_memory.cpp", hipMemcpy, hipMemcpyAsync) {
  Stream stream;
  HostMemory pinned(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  Bytes back(kBytes);
  for (const hipMemcpyKind kind : {hipMemcpyHostToHost, hipMemcpyDefault}) {
    EXPECT_OK(hipMemcpy(back.data(), bytes.data(), kBytes, kind));
    EXPECT_BYTES(back.data(), bytes);
    EXPECT_OK(hipMemcpy(pinned, bytes.data(), kBytes, kind));
    EXPECT_BYTES(pinned.at(0), bytes);
    back.assign(kBytes, 0);
    EXPECT_OK(hipMemcpyAsync(back.data(), pinned, kBytes, kind, stream));
    EXPECT_OK(hipStreamSynchronize(stream));
    EXPECT_BYTES(back.data(), bytes);
  }
}

CASE(copies, a_device_kind_for_two_unknown_addresses, "clr hip_memory.cpp", hipMemcpy) {
  if (device_reads_pageable_memory()) SKIP("the device reads pageable memory");
  Pages pages(2 * kBytes);
  for (const hipMemcpyKind kind :
       {hipMemcpyHostToDevice, hipMemcpyDeviceToHost, hipMemcpyDeviceToDevice}) {
    EXPECT_ERROR(hipMemcpy(pages.get(), pages.at(kBytes), kBytes, kind),
                 hipErrorInvalidValue);
  }
}

CASE(copies, kinds_that_do_not_exist, "hip-tests memory/hipMemcpyAsync.cc", hipMemcpy,
     hipMemcpyAsync) {
  DeviceMemory memory(2 * kBytes);
  Stream stream;
  for (const unsigned number : {5u, 1023u, 1025u, ~0u}) {
    const auto kind = static_cast<hipMemcpyKind>(number);
    EXPECT_ERROR(hipMemcpy(memory, memory.at(kBytes), kBytes, kind),
                 hipErrorInvalidMemcpyDirection);
    EXPECT_ERROR(hipMemcpyAsync(memory, memory.at(kBytes), kBytes, kind, stream),
                 hipErrorInvalidMemcpyDirection);
  }
}

CASE(copies, of_nothing, "clr hip_memory.cpp", hipMemcpy, hipMemcpyAsync) {
  DeviceMemory memory(kBytes);
  Stream stream;
  EXPECT_OK(hipMemcpy(nullptr, nullptr, 0, hipMemcpyDefault));
  EXPECT_OK(hipMemcpy(memory, nullptr, 0, hipMemcpyHostToDevice));
  EXPECT_OK(hipMemcpyAsync(nullptr, memory, 0, hipMemcpyDeviceToHost, stream));
  if (!since(7, 12)) return;  // the order of these checks is known from there on
  constexpr auto kNoKind = static_cast<hipMemcpyKind>(5);
  EXPECT_OK(hipMemcpy(nullptr, nullptr, 0, kNoKind));
  EXPECT_ERROR(hipMemcpyAsync(nullptr, nullptr, 0, kNoKind, stream),
               hipErrorInvalidMemcpyDirection);
}

CASE(copies, from_or_to_nowhere, "hip-tests memory/hipMemcpyAsync.cc", hipMemcpy,
     hipMemcpyAsync) {
  DeviceMemory memory(kBytes);
  Stream stream;
  EXPECT_ERROR(hipMemcpy(nullptr, memory, 1, hipMemcpyDefault), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy(memory, nullptr, 1, hipMemcpyDefault), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpyAsync(nullptr, memory, 1, hipMemcpyDefault, stream),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpyAsync(memory, nullptr, 1, hipMemcpyDefault, stream),
               hipErrorInvalidValue);
}

CASE(copies, beyond_the_end_of_device_memory, "clr hip_memory.cpp", hipMemcpy,
     hipMemcpyAsync) {
  DeviceMemory memory(kBytes);
  HostMemory host(2 * kBytes);
  Stream stream;
  const auto refused = [&](unsigned char* device, size_t size) {
    EXPECT_ERROR(hipMemcpy(device, host, size, hipMemcpyHostToDevice),
                 hipErrorInvalidValue);
    EXPECT_ERROR(hipMemcpy(host, device, size, hipMemcpyDeviceToHost),
                 hipErrorInvalidValue);
    EXPECT_ERROR(hipMemcpyAsync(device, host, size, hipMemcpyHostToDevice, stream),
                 hipErrorInvalidValue);
    EXPECT_ERROR(hipMemcpyAsync(host, device, size, hipMemcpyDeviceToHost, stream),
                 hipErrorInvalidValue);
  };
  refused(memory.at(0), kBytes + 1);
  refused(memory.at(1), kBytes);
  refused(memory.at(kBytes - 1), 2);
  EXPECT_OK(hipMemcpy(memory.at(kBytes - 1), host, 1, hipMemcpyHostToDevice));
}

CASE(copies, onto_itself, "clr hip_memory.cpp", hipMemcpy) {
  DeviceMemory memory(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(memory, bytes);
  EXPECT_OK(hipMemcpy(memory, memory, kBytes, hipMemcpyDefault));
  EXPECT_BYTES(download(memory, kBytes).data(), bytes);
}

// --- when a call returns -------------------------------------------------------------

// Everything that a copy can have on its two sides.
struct Sides {
  DeviceMemory device{kBytes};
  DeviceMemory other{kBytes};
  RegisteredMemory pinned{kBytes};
  Pages pageable{kBytes};
  Pages plain{kBytes};
};

// Does the call return only when the stream has nothing left to do?
bool waits(hipStream_t stream, const std::function<hipError_t()>& call) {
  REQUIRE_OK(hipDeviceSynchronize());
  const Busy busy(stream);
  EXPECT_OK(call());
  const bool idle = hipStreamQuery(stream) == hipSuccess;
  EXPECT_OK(hipDeviceSynchronize());
  return idle;
}

CASE(copies, async_copies_of_pinned_memory_return_at_once,
     "hip-tests memory/hipMemcpyAsync.cc", hipMemcpyAsync) {
  Sides to;
  Stream stream;
  EXPECT(!waits(stream, [&] {
    return hipMemcpyAsync(to.device, to.pinned.get(), kBytes, hipMemcpyHostToDevice,
                          stream);
  }));
  EXPECT(!waits(stream, [&] {
    return hipMemcpyAsync(to.pinned.get(), to.device, kBytes, hipMemcpyDeviceToHost,
                          stream);
  }));
  EXPECT(!waits(stream, [&] {
    return hipMemcpyAsync(to.other, to.device, kBytes, hipMemcpyDeviceToDevice, stream);
  }));
}

CASE(copies, async_copies_of_pageable_memory_wait, "hip-tests memory/hipMemcpyAsync.cc",
     hipMemcpyAsync) {
  Sides to;
  Stream stream;
  EXPECT(waits(stream, [&] {
    return hipMemcpyAsync(to.device, to.pageable.get(), kBytes, hipMemcpyHostToDevice,
                          stream);
  }));
  EXPECT(waits(stream, [&] {
    return hipMemcpyAsync(to.pageable.get(), to.device, kBytes, hipMemcpyDeviceToHost,
                          stream);
  }));
}

CASE(copies, async_copies_within_the_host_wait, "hip-tests memory/hipMemcpyAsync.cc",
     hipMemcpyAsync) {
  Sides to;
  Stream stream;
  EXPECT(waits(stream, [&] {
    return hipMemcpyAsync(to.plain.get(), to.pageable.get(), kBytes,
                          hipMemcpyHostToHost, stream);
  }));
}

CASE(copies, blocking_copies_between_host_and_device_wait, "HIP docs, hipMemcpy",
     hipMemcpy) {
  Sides to;
  for (void* host : {to.pinned.get(), to.pageable.get()}) {
    EXPECT(waits(nullptr, [&] {
      return hipMemcpy(to.device, host, kBytes, hipMemcpyHostToDevice);
    }));
    EXPECT(waits(nullptr, [&] {
      return hipMemcpy(host, to.device, kBytes, hipMemcpyDeviceToHost);
    }));
  }
}

CASE(copies, blocking_copies_wait_for_blocking_streams,
     "HIP docs, Asynchronous execution (null stream)", hipMemcpy) {
  Sides to;
  Stream stream(hipStreamDefault);
  EXPECT(waits(stream, [&] {
    return hipMemcpy(to.device, to.pinned.get(), kBytes, hipMemcpyHostToDevice);
  }));
}

CASE(copies, blocking_copies_do_not_wait_for_non_blocking_streams,
     "HIP docs, Asynchronous execution (null stream)", hipMemcpy) {
  Sides to;
  Stream stream(hipStreamNonBlocking);
  EXPECT(!waits(stream, [&] {
    return hipMemcpy(to.device, to.pinned.get(), kBytes, hipMemcpyHostToDevice);
  }));
}

CASE(copies, an_async_copy_reads_its_source_when_it_runs,
     "HIP docs, Asynchronous execution", hipMemcpyAsync) {
  Sides to;
  Stream stream;
  const Bytes late = random_bytes(kBytes, 2);
  fill_host(to.pinned.at(0), random_bytes(kBytes, 1));
  const Busy busy(stream);
  EXPECT_OK(hipMemcpyAsync(to.device, to.pinned.get(), kBytes, hipMemcpyHostToDevice,
                           stream));
  fill_host(to.pinned.at(0), late);
  EXPECT_OK(hipStreamSynchronize(stream));
  EXPECT_BYTES(download(to.device, kBytes).data(), late);
}

CASE(copies, between_two_devices, "HIP docs, Multi-device management", hipMemcpy,
     hipMemcpyAsync, hipSetDevice) {
  need_devices(2);
  DeviceMemory here(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(here, bytes);
  CurrentDevice other(1);
  DeviceMemory there(2 * kBytes);
  Stream stream;
  EXPECT_OK(hipMemcpy(there, here, kBytes, hipMemcpyDefault));
  EXPECT_OK(
      hipMemcpyAsync(there.at(kBytes), here, kBytes, hipMemcpyDeviceToDevice, stream));
  EXPECT_OK(hipDeviceSynchronize());
  EXPECT_BYTES(download(there, kBytes).data(), bytes);
  EXPECT_BYTES(download(there.at(kBytes), kBytes).data(), bytes);
}

}  // namespace
}  // namespace contract
