// SPDX-License-Identifier: Apache-2.0
#include <sys/mman.h>

#include <algorithm>

#include "contract.h"

namespace contract {
namespace {

constexpr const char* kDriver = DRIVER;
constexpr const char* kReference = DRIVER "; CUDA Driver API, Memory Management";
constexpr CUresult kInvalid = CUDA_ERROR_INVALID_VALUE;

// --- device memory -------------------------------------------------------------------

CASE(memory, allocated_and_freed, kReference, cuMemAlloc_v2, cuMemFree_v2) {
  CUdeviceptr first = 0;
  CUdeviceptr second = 0;
  EXPECT_OK(cuMemAlloc_v2(&first, 1000));
  EXPECT_OK(cuMemAlloc_v2(&second, 1));
  EXPECT(first != second);
  EXPECT_EQ(first % 256, CUdeviceptr{0});
  EXPECT_OK(cuMemFree_v2(first));
  EXPECT_OK(cuMemFree_v2(second));
}

CASE(memory, allocations_that_are_refused, kReference, cuMemAlloc_v2) {
  CUdeviceptr pointer = 0;
  size_t free = 0;
  size_t total = 0;
  REQUIRE_OK(cuMemGetInfo_v2(&free, &total));
  EXPECT_ERROR(cuMemAlloc_v2(nullptr, 64), kInvalid);
  EXPECT_ERROR(cuMemAlloc_v2(&pointer, 0), kInvalid);
  EXPECT_ERROR(cuMemAlloc_v2(&pointer, total + (size_t{64} << 20)),
               CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_ERROR(cuMemAlloc_v2(&pointer, ~size_t{0}), CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_EQ(pointer, CUdeviceptr{0});
}

CASE(memory, frees_that_are_refused, kReference, cuMemFree_v2) {
  DeviceMemory memory(4096);
  EXPECT_OK(cuMemFree_v2(0));
  EXPECT_ERROR(cuMemFree_v2(memory.at(256)), kInvalid);
  const Pages pages(4096);
  EXPECT_ERROR(cuMemFree_v2(as_device(pages.get())), kInvalid);
  const CUdeviceptr gone = memory.release();
  EXPECT_OK(cuMemFree_v2(gone));
  EXPECT_ERROR(cuMemFree_v2(gone), kInvalid);
}

CASE(memory, free_waits_for_work, kReference, cuMemFree_v2) {
  Stream stream;
  DeviceMemory memory(4096);
  const std::string when =
      when_it_returns([&] { return cuMemFree_v2(memory.release()); }, stream);
  EXPECT_EQ(when, std::string(kSynchronous));
}

CASE(memory, info, kReference, cuMemGetInfo_v2) {
  constexpr size_t kBytes = size_t{256} << 20;
  size_t before = 0;
  size_t after = 0;
  size_t total = 0;
  EXPECT_OK(cuMemGetInfo_v2(&before, &total));
  EXPECT(before <= total);
  DeviceMemory memory(kBytes);
  EXPECT_OK(cuMemGetInfo_v2(&after, nullptr));
  EXPECT_EQ(before - after, kBytes);
  EXPECT_OK(cuMemGetInfo_v2(nullptr, &total));
  EXPECT_OK(cuMemGetInfo_v2(nullptr, nullptr));
}

CASE(memory, address_range, kReference, cuMemGetAddressRange_v2) {
  DeviceMemory memory(5000);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  EXPECT_OK(cuMemGetAddressRange_v2(&base, &bytes, memory.at(4999)));
  EXPECT_EQ(base == memory, true);
  EXPECT_EQ(bytes, size_t{5000});
  EXPECT_OK(cuMemGetAddressRange_v2(nullptr, &bytes, memory));
  EXPECT_OK(cuMemGetAddressRange_v2(&base, nullptr, memory));
  EXPECT_OK(cuMemGetAddressRange_v2(nullptr, nullptr, memory));
  EXPECT_ERROR(cuMemGetAddressRange_v2(&base, &bytes, 0), CUDA_ERROR_NOT_FOUND);
  const Pages pages(4096);
  EXPECT_ERROR(cuMemGetAddressRange_v2(&base, &bytes, as_device(pages.get())),
               CUDA_ERROR_NOT_FOUND);
  const CUdeviceptr gone = memory.release();
  EXPECT_OK(cuMemFree_v2(gone));
  EXPECT_ERROR(cuMemGetAddressRange_v2(&base, &bytes, gone), CUDA_ERROR_NOT_FOUND);
}

CASE(memory, address_range_of_host_memory, kReference, cuMemGetAddressRange_v2) {
  HostMemory host(8192);
  RegisteredMemory registered(8192);
  CUdeviceptr base = 0;
  size_t bytes = 0;
  EXPECT_OK(cuMemGetAddressRange_v2(&base, &bytes, as_device(host.at(5000))));
  EXPECT_EQ(base == as_device(host.get()), true);
  EXPECT_EQ(bytes, size_t{8192});
  EXPECT_OK(cuMemGetAddressRange_v2(&base, &bytes, as_device(registered.at(5000))));
  EXPECT_EQ(base == as_device(registered.get()), true);
  EXPECT_EQ(bytes, size_t{8192});
}

CASE(memory, address_range_of_virtual_memory, kReference, cuMemGetAddressRange_v2) {
  VirtualMemory memory(2, granularity());
  CUdeviceptr base = 0;
  size_t bytes = 0;
  EXPECT_OK(cuMemGetAddressRange_v2(&base, &bytes, memory.at(memory.piece() + 100)));
  EXPECT_EQ((base - memory.get()) / memory.piece(), size_t{1});
  EXPECT_EQ(bytes / memory.piece(), size_t{1});
  Reservation empty(granularity());
  EXPECT_ERROR(cuMemGetAddressRange_v2(&base, &bytes, empty.get()),
               CUDA_ERROR_NOT_FOUND);
}

CASE(memory, calls_while_streams_are_busy, kReference, cuMemAlloc_v2, cuMemHostAlloc,
     cuMemHostRegister_v2) {
  const std::string async = kAsynchronous;
  Stream stream;
  Pages pages(4096);
  CUdeviceptr device = 0;
  void* host = nullptr;
  const auto ask = [&](const std::function<CUresult()>& call) {
    return when_it_returns(call, stream);
  };
  const auto allocate = ask([&] { return cuMemAlloc_v2(&device, 4096); });
  EXPECT_EQ(allocate, async);
  const auto allocate_host = ask([&] { return cuMemHostAlloc(&host, 4096, 0); });
  EXPECT_EQ(allocate_host, async);
  const auto registers =
      ask([&] { return cuMemHostRegister_v2(pages.get(), 4096, 0); });
  EXPECT_EQ(registers, async);
  REQUIRE_OK(cuMemHostUnregister(pages.get()));
  REQUIRE_OK(cuMemFreeHost(host));
  REQUIRE_OK(cuMemFree_v2(device));
}

// --- host memory ---------------------------------------------------------------------

CASE(memory, host_allocations, kReference, cuMemHostAlloc, cuMemFreeHost) {
  for (const unsigned flags : {0u, 1u, 2u, 3u, 4u, 7u}) {
    const About about("flags " + describe(flags));
    void* pointer = nullptr;
    EXPECT_OK(cuMemHostAlloc(&pointer, 5000, flags));
    std::fill_n(static_cast<unsigned char*>(pointer), 5000, 7);
    EXPECT_OK(cuMemFreeHost(pointer));
  }
  void* pointer = nullptr;
  EXPECT_ERROR(cuMemHostAlloc(nullptr, 64, 0), kInvalid);
  EXPECT_OK(cuMemHostAlloc(&pointer, 0, 0));
  EXPECT_ERROR(cuMemHostAlloc(&pointer, 64, 8), kInvalid);
  EXPECT_ERROR(cuMemHostAlloc(&pointer, size_t{1} << 60, 0), CUDA_ERROR_OUT_OF_MEMORY);
}

CASE(memory, locked_memory_can_have_a_limit, "none: the simulator's own",
     cuMemHostAlloc, cuMemHostRegister_v2) {
  if (!simulated()) SKIP("a switch of the simulator");
  const Pages pages(2 * 4096);
  void* pointer = nullptr;
  set_switch("max_locked_bytes", 2 * 4096);
  {
    HostMemory host(4096, CU_MEMHOSTALLOC_PORTABLE);
    EXPECT_ERROR(cuMemHostAlloc(&pointer, 2 * 4096, CU_MEMHOSTALLOC_PORTABLE),
                 CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_ERROR(
        cuMemHostRegister_v2(pages.get(), 2 * 4096, CU_MEMHOSTREGISTER_PORTABLE),
        CUDA_ERROR_OUT_OF_MEMORY);
    EXPECT_OK(cuMemHostRegister_v2(pages.get(), 4096, CU_MEMHOSTREGISTER_PORTABLE));
    EXPECT_ERROR(cuMemHostAlloc(&pointer, 1, CU_MEMHOSTALLOC_PORTABLE),
                 CUDA_ERROR_OUT_OF_MEMORY);
  }
  HostMemory again(4096, CU_MEMHOSTALLOC_PORTABLE);
  EXPECT_OK(cuMemHostUnregister(pages.get()));
}

CASE(memory, host_frees_that_are_refused, kReference, cuMemFreeHost) {
  EXPECT_OK(cuMemFreeHost(nullptr));
  HostMemory host(8192);
  EXPECT_ERROR(cuMemFreeHost(host.at(4096)), kInvalid);
  RegisteredMemory registered(4096);
  EXPECT_ERROR(cuMemFreeHost(registered.get()), kInvalid);
  const Pages pages(4096);
  EXPECT_ERROR(cuMemFreeHost(pages.get()), kInvalid);
}

CASE(memory, host_memory_freed_while_it_is_copied, kReference, cuMemFreeHost) {
  Stream stream;
  HostMemory host(4096);
  const std::string when =
      when_it_returns([&] { return cuMemFreeHost(host.release()); }, stream);
  EXPECT_EQ(when, std::string(kSynchronous));
}

CASE(memory, registered, kReference, cuMemHostRegister_v2, cuMemHostUnregister) {
  const Pages pages(16384);
  for (const unsigned flags : {0u, 1u, 2u, 3u}) {
    const About about("flags " + describe(flags));
    EXPECT_OK(cuMemHostRegister_v2(pages.get(), 16384, flags));
    EXPECT_OK(cuMemHostUnregister(pages.get()));
  }
  const About about("odd");
  EXPECT_OK(cuMemHostRegister_v2(pages.at(100), 5000, 0));
  EXPECT_OK(cuMemHostUnregister(pages.at(100)));
}

CASE(memory, registrations_that_are_refused, kReference, cuMemHostRegister_v2) {
  const Pages pages(4096);
  EXPECT_ERROR(cuMemHostRegister_v2(nullptr, 4096, 0), kInvalid);
  EXPECT_ERROR(cuMemHostRegister_v2(pages.get(), 0, 0), kInvalid);
  EXPECT_ERROR(cuMemHostRegister_v2(pages.get(), 4096, 0x10), kInvalid);
  EXPECT_ERROR(cuMemHostRegister_v2(pages.get(), 4096, 0x80000000u), kInvalid);
  DeviceMemory device(4096);
  EXPECT_ERROR(cuMemHostRegister_v2(reinterpret_cast<void*>(device.get()), 4096, 0),
               kInvalid);
}

CASE(memory, registrations_of_other_kinds, kDriver, cuMemHostRegister_v2) {
  const Pages pages(4096);
  EXPECT_ERROR(cuMemHostRegister_v2(pages.get(), 4096, CU_MEMHOSTREGISTER_IOMEMORY),
               kInvalid);
  EXPECT_OK(cuMemHostRegister_v2(pages.get(), 4096, CU_MEMHOSTREGISTER_READ_ONLY));
  EXPECT_OK(cuMemHostUnregister(pages.get()));
}

CASE(memory, registered_and_not_there, kDriver, cuMemHostRegister_v2) {
  void* gone = Pages(4096).get();
  EXPECT_ERROR(cuMemHostRegister_v2(gone, 4096, 0), kInvalid);
}

CASE(memory, registered_and_read_only, kDriver, cuMemHostRegister_v2) {
  if (simulated()) SKIP("the simulator does not look at protections");
  const Pages pages(4096);
  REQUIRE(mprotect(pages.get(), 4096, PROT_READ) == 0);
  EXPECT_ERROR(cuMemHostRegister_v2(pages.get(), 4096, 0), kInvalid);
}

CASE(memory, registered_twice, kReference, cuMemHostRegister_v2) {
  const Pages pages(16384);
  REQUIRE_OK(cuMemHostRegister_v2(pages.at(4096), 8192, 0));
  const auto again = [&](size_t offset, size_t bytes) {
    return cuMemHostRegister_v2(pages.at(offset), bytes, 0);
  };
  EXPECT_ERROR(again(4096, 8192), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_ERROR(again(8192, 4096), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_ERROR(again(0, 8192), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_ERROR(again(0, 16384), CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED);
  EXPECT_OK(again(0, 4096));
  EXPECT_OK(cuMemHostUnregister(pages.at(0)));
  EXPECT_OK(cuMemHostUnregister(pages.at(4096)));
}

CASE(memory, registered_twice_in_one_page, kDriver, cuMemHostRegister_v2) {
  const Pages pages(4096);
  REQUIRE_OK(cuMemHostRegister_v2(pages.at(0), 1000, 0));
  EXPECT_OK(cuMemHostRegister_v2(pages.at(2000), 1000, 0));
  EXPECT_OK(cuMemHostUnregister(pages.at(2000)));
  EXPECT_OK(cuMemHostUnregister(pages.at(0)));
}

CASE(memory, unregistered_without_need, kDriver, cuMemHostUnregister) {
  const Pages pages(8192);
  EXPECT_ERROR(cuMemHostUnregister(nullptr), kInvalid);
  EXPECT_ERROR(cuMemHostUnregister(pages.get()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  REQUIRE_OK(cuMemHostRegister_v2(pages.get(), 8192, 0));
  EXPECT_ERROR(cuMemHostUnregister(pages.at(4096)), kInvalid);
  EXPECT_OK(cuMemHostUnregister(pages.get()));
  EXPECT_ERROR(cuMemHostUnregister(pages.get()), CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED);
  HostMemory host(4096);
  EXPECT_ERROR(cuMemHostUnregister(host.get()), kInvalid);
}

CASE(memory, unregistered_while_it_is_copied, kReference, cuMemHostUnregister) {
  Stream stream;
  const Pages pages(4096);
  REQUIRE_OK(cuMemHostRegister_v2(pages.get(), 4096, 0));
  const std::string when =
      when_it_returns([&] { return cuMemHostUnregister(pages.get()); }, stream);
  EXPECT_EQ(when, std::string(kSynchronous));
}

CASE(memory, device_pointers_of_host_memory, kReference, cuMemHostGetDevicePointer_v2) {
  HostMemory host(8192);
  RegisteredMemory registered(8192);
  CUdeviceptr pointer = 0;
  EXPECT_OK(cuMemHostGetDevicePointer_v2(&pointer, host.at(5000), 0));
  EXPECT_EQ(pointer == as_device(host.at(5000)), true);
  EXPECT_OK(cuMemHostGetDevicePointer_v2(&pointer, registered.at(5000), 0));
  EXPECT_EQ(pointer == as_device(registered.at(5000)), true);
  EXPECT_ERROR(cuMemHostGetDevicePointer_v2(nullptr, host.get(), 0), kInvalid);
  EXPECT_ERROR(cuMemHostGetDevicePointer_v2(&pointer, nullptr, 0), kInvalid);
  EXPECT_ERROR(cuMemHostGetDevicePointer_v2(&pointer, host.get(), 1), kInvalid);
  const Pages pages(4096);
  EXPECT_ERROR(cuMemHostGetDevicePointer_v2(&pointer, pages.get(), 0), kInvalid);
}

CASE(memory, devices_that_know_host_memory_by_another_name, "none: the simulator's own",
     cuMemHostGetDevicePointer_v2) {
  if (!simulated()) SKIP("a switch of the simulator");
  set_switch("host_device_pointers", 1);
  EXPECT_EQ(attribute(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM), 0);
  RegisteredMemory registered(8192);
  CUdeviceptr pointer = 0;
  EXPECT_OK(cuMemHostGetDevicePointer_v2(&pointer, registered.at(5000), 0));
  EXPECT(pointer != as_device(registered.at(5000)));
}

}  // namespace
}  // namespace contract
