// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "contract.h"

namespace contract {
namespace {

constexpr size_t kMiB = size_t{1} << 20;

struct MemoryInfo {
  size_t free = 0;
  size_t total = 0;
};

MemoryInfo memory_info() {
  MemoryInfo info;
  REQUIRE_OK(hipMemGetInfo(&info.free, &info.total));
  return info;
}

// --- device memory -------------------------------------------------------------------

CASE(memory, allocated_and_freed, "hip-tests memory/hipMalloc.cc", hipMalloc, hipFree) {
  void* first = nullptr;
  void* second = nullptr;
  REQUIRE_OK(hipMalloc(&first, 100));
  REQUIRE_OK(hipMalloc(&second, 100));
  EXPECT(first != nullptr && second != nullptr && first != second);
  const Bytes bytes = random_bytes(100, 1);
  upload(first, bytes);
  upload(second, random_bytes(100, 2));
  EXPECT_BYTES(download(first, 100).data(), bytes);
  EXPECT_OK(hipFree(first));
  EXPECT_OK(hipFree(second));
}

CASE(memory, allocations_of_nothing, "hip-tests memory/hipMalloc.cc", hipMalloc,
     hipFree) {
  void* pointer = &pointer;
  EXPECT_OK(hipMalloc(&pointer, 0));
  EXPECT(pointer == nullptr);
  EXPECT_ERROR(hipMalloc(nullptr, 100), hipErrorInvalidValue);
  EXPECT_OK(hipFree(nullptr));
}

CASE(memory, more_than_there_is, "clr hip_memory.cpp", hipMalloc, hipMemGetInfo) {
  const MemoryInfo before = memory_info();
  void* pointer = nullptr;
  EXPECT_ERROR(hipMalloc(&pointer, before.total + kMiB), hipErrorOutOfMemory);
  EXPECT_ERROR(hipMalloc(&pointer, ~size_t{0}), hipErrorOutOfMemory);
  EXPECT(memory_info().free + 64 * kMiB >= before.free);
  DeviceMemory works(kMiB);
}

CASE(memory, what_is_free_goes_down_and_up, "HIP docs, hipMemGetInfo", hipMemGetInfo,
     hipMalloc, hipFree) {
  const MemoryInfo before = memory_info();
  EXPECT(before.free <= before.total);
  EXPECT(before.free > 0);
  {
    DeviceMemory memory(256 * kMiB);
    const MemoryInfo during = memory_info();
    EXPECT_EQ(during.total, before.total);
    EXPECT(during.free + 256 * kMiB <= before.free);
  }
  EXPECT(memory_info().free + 64 * kMiB >= before.free);
}

CASE(memory, info_goes_where_it_is_wanted, "clr hip_memory.cpp", hipMemGetInfo) {
  const MemoryInfo info = memory_info();
  size_t total = 0;
  EXPECT_OK(hipMemGetInfo(nullptr, &total));
  EXPECT_EQ(total, info.total);
  size_t free = 0;
  EXPECT_OK(hipMemGetInfo(&free, nullptr));
  EXPECT(free > 0);
  EXPECT_OK(hipMemGetInfo(nullptr, nullptr));
}

CASE(memory, each_device_has_its_own, "HIP docs, Multi-device management",
     hipMemGetInfo, hipSetDevice) {
  need_devices(2);
  DeviceMemory memory(256 * kMiB);
  const size_t free = memory_info().free;
  CurrentDevice other(1);
  const size_t other_free = memory_info().free;
  DeviceMemory theirs(256 * kMiB);
  EXPECT(memory_info().free + 256 * kMiB <= other_free);
  CurrentDevice back(0);
  EXPECT(memory_info().free + kMiB >= free);
}

CASE(memory, freed_twice, "hip-tests memory/hipFree.cc", hipFree) {
  void* pointer = nullptr;
  REQUIRE_OK(hipMalloc(&pointer, 64));
  EXPECT_OK(hipFree(pointer));
  EXPECT_ERROR(hipFree(pointer), hipErrorInvalidValue);
}

CASE(memory, freed_and_never_allocated, "hip-tests memory/hipFree.cc", hipFree) {
  Pages pages(4096);
  EXPECT_ERROR(hipFree(pages.get()), hipErrorInvalidValue);
}

CASE(memory, free_waits_for_the_device,
     "clr hip_memory.cpp; hip-tests memory/hipFree.cc", hipFree) {
  Stream stream;
  DeviceMemory memory(64);
  const Busy busy(stream);
  EXPECT_ERROR(hipStreamQuery(stream), hipErrorNotReady);
  EXPECT_OK(hipFree(memory.release()));
  EXPECT_OK(hipStreamQuery(stream));
}

CASE(memory, address_range_of_device_memory,
     "hip-tests memory/hipMemGetAddressRange.cc", hipMemGetAddressRange) {
  DeviceMemory memory(5000);
  for (const size_t offset : {0, 1, 80, 4999}) {
    hipDeviceptr_t base = nullptr;
    size_t size = 0;
    EXPECT_OK(hipMemGetAddressRange(&base, &size, memory.at(offset)));
    EXPECT_EQ(base, memory.get());
    EXPECT_EQ(size, memory.size());
  }
}

CASE(memory, address_range_of_host_memory, "hip-tests memory/hipMemGetAddressRange.cc",
     hipMemGetAddressRange) {
  HostMemory memory(5000);
  hipDeviceptr_t base = nullptr;
  size_t size = 0;
  EXPECT_OK(hipMemGetAddressRange(&base, &size, memory.at(80)));
  EXPECT_EQ(base, memory.get());
  EXPECT_EQ(size, memory.size());
}

CASE(memory, address_range_of_nothing, "hip-tests memory/hipMemGetAddressRange.cc",
     hipMemGetAddressRange) {
  DeviceMemory memory(4096);
  Pages pages(4096);
  hipDeviceptr_t base = nullptr;
  size_t size = 0;
  EXPECT_ERROR(hipMemGetAddressRange(&base, &size, memory.at(2 * kMiB)),
               hipErrorNotFound);
  EXPECT_ERROR(hipMemGetAddressRange(&base, &size, pages.get()), hipErrorNotFound);
  EXPECT_ERROR(hipMemGetAddressRange(&base, &size, nullptr), hipErrorNotFound);
}

// --- host memory ---------------------------------------------------------------------

CASE(memory, host_memory_is_the_hosts_and_the_devices,
     "hip-tests memory/hipHostMalloc.cc", hipHostMalloc, hipHostFree) {
  for (const unsigned flags : {hipHostMallocDefault, hipHostMallocPortable,
                               hipHostMallocMapped, hipHostMallocCoherent}) {
    HostMemory host(4096, flags);
    DeviceMemory device(4096);
    const Bytes bytes = random_bytes(4096, flags);
    std::copy(bytes.begin(), bytes.end(), host.at(0));
    EXPECT_OK(hipMemcpy(device, host, 4096, hipMemcpyHostToDevice));
    EXPECT_BYTES(download(device, 4096).data(), bytes);
  }
}

CASE(memory, host_allocations_of_nothing, "hip-tests memory/hipHostMalloc.cc",
     hipHostMalloc, hipHostFree) {
  void* pointer = &pointer;
  EXPECT_OK(hipHostMalloc(&pointer, 0, 0));
  EXPECT(pointer == nullptr);
  EXPECT_ERROR(hipHostMalloc(nullptr, 100, 0), hipErrorInvalidValue);
  EXPECT_OK(hipHostFree(nullptr));
}

CASE(memory, host_memory_freed_twice, "hip-tests memory/hipFree.cc", hipHostFree) {
  void* pointer = nullptr;
  REQUIRE_OK(hipHostMalloc(&pointer, 64, 0));
  EXPECT_OK(hipHostFree(pointer));
  EXPECT_ERROR(hipHostFree(pointer), hipErrorInvalidValue);
  Pages pages(4096);
  EXPECT_ERROR(hipHostFree(pages.get()), hipErrorInvalidValue);
}

CASE(memory, registered_memory_is_not_freed, "hip-tests memory/hipFree.cc", hipHostFree,
     hipHostRegister) {
  RegisteredMemory registered(4096);
  EXPECT_ERROR(hipHostFree(registered.get()), hipErrorInvalidValue);
}

CASE(memory, host_free_waits_for_the_null_stream, "hip-tests memory/hipFree.cc",
     hipHostFree) {
  HostMemory memory(64);
  const Busy busy(nullptr);
  EXPECT_ERROR(hipStreamQuery(nullptr), hipErrorNotReady);
  EXPECT_OK(hipHostFree(memory.release()));
  EXPECT_OK(hipStreamQuery(nullptr));
}

CASE(memory, locked_memory_can_have_a_limit, "none: the simulator's own", hipHostMalloc,
     hipHostRegister) {
  if (!simulated()) SKIP("needs the simulator's switch");
  Pages pages(2 * 4096);
  void* pointer = nullptr;
  set_switch("max_locked_bytes", 2 * 4096);
  {
    HostMemory host(4096, hipHostMallocPortable);
    EXPECT_ERROR(hipHostMalloc(&pointer, 2 * 4096, hipHostMallocPortable),
                 hipErrorOutOfMemory);
    EXPECT_ERROR(hipHostRegister(pages.get(), 2 * 4096, hipHostRegisterPortable),
                 hipErrorOutOfMemory);
    EXPECT_OK(hipHostRegister(pages.get(), 4096, hipHostRegisterPortable));
    EXPECT_ERROR(hipHostMalloc(&pointer, 1, hipHostMallocPortable),
                 hipErrorOutOfMemory);
  }
  HostMemory again(4096, hipHostMallocPortable);
  EXPECT_OK(hipHostUnregister(pages.get()));
}

// --- registration --------------------------------------------------------------------

CASE(memory, registered_with_every_flag, "hip-tests memory/hipHostRegister.cc",
     hipHostRegister, hipHostUnregister) {
  Pages pages(4096);
  for (const unsigned flags :
       {hipHostRegisterDefault, hipHostRegisterPortable, hipHostRegisterMapped,
        hipHostRegisterPortable | hipHostRegisterMapped,
        hipExtHostRegisterCoarseGrained, hipExtHostRegisterUncached}) {
    EXPECT_OK(hipHostRegister(pages.get(), pages.size(), flags));
    EXPECT_OK(hipHostUnregister(pages.get()));
  }
}

CASE(memory, registrations_that_are_refused, "hip-tests memory/hipHostRegister.cc",
     hipHostRegister) {
  Pages pages(4096);
  EXPECT_ERROR(hipHostRegister(nullptr, 4096, 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipHostRegister(pages.get(), 0, 0), hipErrorInvalidValue);
  for (const unsigned flags : {0xF0u, 0xFFF2u, ~0u}) {
    EXPECT_ERROR(hipHostRegister(pages.get(), 4096, flags), hipErrorInvalidValue);
  }
}

CASE(memory, unregistered_once, "hip-tests memory/hipHostUnregister.cc",
     hipHostRegister, hipHostUnregister) {
  Pages pages(4096);
  EXPECT_ERROR(hipHostUnregister(nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipHostUnregister(pages.get()), hipErrorHostMemoryNotRegistered);
  EXPECT_OK(hipHostRegister(pages.get(), pages.size(), 0));
  EXPECT_OK(hipHostUnregister(pages.get()));
  EXPECT_ERROR(hipHostUnregister(pages.get()), hipErrorHostMemoryNotRegistered);
}

CASE(memory, registered_again_after_it_was_unregistered,
     "hip-tests memory/hipHostRegister.cc", hipHostRegister, hipHostUnregister) {
  Pages pages(64 * 1024);
  DeviceMemory device(64 * 1024);
  for (unsigned round = 0; round < 5; ++round) {
    const Bytes bytes = random_bytes(pages.size(), round);
    std::copy(bytes.begin(), bytes.end(), pages.at(0));
    EXPECT_OK(hipHostRegister(pages.get(), pages.size(), 0));
    upload(device, bytes);
    EXPECT_OK(hipHostUnregister(pages.get()));
    EXPECT_BYTES(download(device, pages.size()).data(), bytes);
  }
}

CASE(memory, neighbouring_pieces_are_registered_one_by_one,
     "hip-tests memory/hipHostRegister.cc", hipHostRegister, hipHostUnregister) {
  constexpr size_t kPiece = 16 * 4096;
  Pages pages(4 * kPiece);
  for (size_t begin = 0; begin < pages.size(); begin += kPiece) {
    EXPECT_OK(hipHostRegister(pages.at(begin), kPiece, 0));
  }
  DeviceMemory device(kPiece);
  for (size_t begin = 0; begin < pages.size(); begin += kPiece) {
    const Bytes bytes = random_bytes(kPiece, static_cast<unsigned>(begin));
    std::copy(bytes.begin(), bytes.end(), pages.at(begin));
    EXPECT_OK(hipMemcpy(device, pages.at(begin), kPiece, hipMemcpyHostToDevice));
    EXPECT_BYTES(download(device, kPiece).data(), bytes);
  }
  for (size_t begin = 0; begin < pages.size(); begin += kPiece) {
    EXPECT_OK(hipHostUnregister(pages.at(begin)));
  }
}

CASE(memory, a_copy_stays_in_one_registration, "clr hip_memory.cpp", hipMemcpy,
     hipMemcpyAsync, hipMemcpyBatchAsync) {
  constexpr size_t kPiece = 4 * 4096;
  Pages pages(2 * kPiece);
  REQUIRE_OK(hipHostRegister(pages.at(0), kPiece, 0));
  const Holder<void*, &hipHostUnregister> first(pages.at(0));
  REQUIRE_OK(hipHostRegister(pages.at(kPiece), kPiece, 0));
  const Holder<void*, &hipHostUnregister> second(pages.at(kPiece));
  DeviceMemory device(2 * kPiece);
  Stream stream;
  const auto batch = [&](void* to, void* from, size_t bytes) {
    size_t fail_index = 0;
    return hipMemcpyBatchAsync(&to, &from, &bytes, 1, nullptr, nullptr, 0, &fail_index,
                               stream);
  };
  // Up to the end of the first, and one byte beyond.
  for (const size_t begin : {size_t{0}, size_t{1}, kPiece - 1}) {
    unsigned char* const host = pages.at(begin);
    for (const bool crosses : {false, true}) {
      const size_t bytes = kPiece - begin + (crosses ? 1 : 0);
      const hipError_t expected = crosses ? hipErrorInvalidValue : hipSuccess;
      EXPECT_ERROR(hipMemcpy(device, host, bytes, hipMemcpyHostToDevice), expected);
      EXPECT_ERROR(hipMemcpy(host, device, bytes, hipMemcpyDefault), expected);
      EXPECT_ERROR(hipMemcpyAsync(host, device, bytes, hipMemcpyDeviceToHost, stream),
                   expected);
      EXPECT_ERROR(batch(device, host, bytes), expected);
      EXPECT_ERROR(batch(host, device, bytes), expected);
      EXPECT_OK(hipStreamSynchronize(stream));
    }
  }
}

CASE(memory, unregister_waits_for_the_device, "clr hip_memory.cpp", hipHostUnregister) {
  Stream stream;
  Pages pages(4096);
  REQUIRE_OK(hipHostRegister(pages.get(), pages.size(), 0));
  const Busy busy(stream);
  EXPECT_ERROR(hipStreamQuery(stream), hipErrorNotReady);
  EXPECT_OK(hipHostUnregister(pages.get()));
  EXPECT_OK(hipStreamQuery(stream));
}

// --- device pointers of host memory --------------------------------------------------

void* device_pointer(void* host) {
  void* device = nullptr;
  REQUIRE_OK(hipHostGetDevicePointer(&device, host, 0));
  REQUIRE(device != nullptr);
  return device;
}

// Both ways through the device pointer of `host`, which has two pages or more.
void expect_copies_through(void* device, unsigned char* host) {
  constexpr size_t kBytes = 4096;
  DeviceMemory memory(kBytes);
  const Bytes there = random_bytes(kBytes, 1);
  std::copy(there.begin(), there.end(), host);
  EXPECT_OK(hipMemcpy(memory, device, kBytes, hipMemcpyDefault));
  EXPECT_OK(hipDeviceSynchronize());
  EXPECT_BYTES(download(memory, kBytes).data(), there);
  const Bytes back = random_bytes(kBytes, 2);
  upload(memory, back);
  Stream stream;
  EXPECT_OK(hipMemcpyAsync(static_cast<unsigned char*>(device) + kBytes, memory, kBytes,
                           hipMemcpyDefault, stream));
  EXPECT_OK(hipStreamSynchronize(stream));
  EXPECT_BYTES(host + kBytes, back);
  EXPECT_BYTES(host, there);
}

CASE(memory, registered_memory_has_a_device_pointer,
     "HIP docs, hipHostGetDevicePointer; hip-tests memory/hipHostRegister.cc",
     hipHostGetDevicePointer, hipHostRegister) {
  RegisteredMemory host(4 * 4096);
  unsigned char* device = static_cast<unsigned char*>(device_pointer(host.get()));
  EXPECT_EQ(static_cast<void*>(device + 5000), device_pointer(host.at(5000)));
  expect_copies_through(device, host.at(0));
  expect_copies_through(device + 4096, host.at(4096));
}

CASE(memory, the_device_pointer_can_differ_from_the_hosts,
     "HIP docs, hipHostGetDevicePointer", hipHostGetDevicePointer, hipHostRegister) {
  set_switch("host_device_pointers", 1);
  RegisteredMemory host(4 * 4096);
  unsigned char* device = static_cast<unsigned char*>(device_pointer(host.get()));
  if (simulated()) EXPECT(static_cast<void*>(device) != host.get());
  EXPECT_EQ(static_cast<void*>(device + 5000), device_pointer(host.at(5000)));
  expect_copies_through(device, host.at(0));
  expect_copies_through(host.get(), host.at(0));
}

CASE(memory, the_device_says_whether_the_pointers_are_the_same,
     "HIP 7.1 header, hipDeviceAttribute_t", hipHostGetDevicePointer,
     hipDeviceGetAttribute) {
  for (const int differs : {0, 1}) {
    set_switch("host_device_pointers", differs);
    RegisteredMemory host(4096);
    int same = -1;
    EXPECT_OK(hipDeviceGetAttribute(
        &same, hipDeviceAttributeCanUseHostPointerForRegisteredMem, 0));
    if (simulated()) EXPECT_EQ(same, 1 - differs);
    if (same == 1) EXPECT_EQ(device_pointer(host.get()), host.get());
  }
}

CASE(memory, allocated_host_memory_has_a_device_pointer,
     "hip-tests memory/hipHostGetDevicePointer.cc", hipHostGetDevicePointer,
     hipHostMalloc) {
  HostMemory host(4 * 4096);
  unsigned char* device = static_cast<unsigned char*>(device_pointer(host.get()));
  EXPECT_EQ(static_cast<void*>(device + 5000), device_pointer(host.at(5000)));
  expect_copies_through(device, host.at(0));
}

CASE(memory, device_pointers_that_are_refused,
     "hip-tests memory/hipHostGetDevicePointer.cc, hipHostUnregister.cc",
     hipHostGetDevicePointer) {
  Pages pages(4096);
  void* device = nullptr;
  EXPECT_ERROR(hipHostGetDevicePointer(&device, pages.get(), 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipHostGetDevicePointer(&device, nullptr, 0), hipErrorInvalidValue);
  REQUIRE_OK(hipHostRegister(pages.get(), pages.size(), 0));
  EXPECT_ERROR(hipHostGetDevicePointer(nullptr, pages.get(), 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipHostGetDevicePointer(&device, pages.get(), 1), hipErrorInvalidValue);
  EXPECT_OK(hipHostUnregister(pages.get()));
  EXPECT_ERROR(hipHostGetDevicePointer(&device, pages.get(), 0), hipErrorInvalidValue);
}

}  // namespace
}  // namespace contract
