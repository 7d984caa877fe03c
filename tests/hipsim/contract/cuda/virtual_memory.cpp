// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <csignal>

#include "contract.h"

namespace contract {
namespace {

constexpr const char* kDriver = DRIVER;
constexpr const char* kReference =
    DRIVER "; CUDA Driver API, Virtual Memory Management";
constexpr const char* kOwn = "none: the simulator's own";
using Open = VirtualMemory::Open;

constexpr CUresult kInvalid = CUDA_ERROR_INVALID_VALUE;

// --- granularity ---------------------------------------------------------------------

// It is the same for all memory, and for what is none.
CASE(virtual_memory, granularity, kDriver, cuMemGetAllocationGranularity) {
  CUmemAllocationProp properties = device_memory_properties();
  size_t bytes = 0;
  const auto get = [&](CUmemAllocationGranularity_flags option) {
    return cuMemGetAllocationGranularity(&bytes, &properties, option);
  };
  EXPECT_OK(get(CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  EXPECT_EQ(bytes, size_t{2} << 20);
  EXPECT_OK(get(CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
  EXPECT_EQ(bytes, size_t{2} << 20);
  EXPECT_ERROR(get(static_cast<CUmemAllocationGranularity_flags>(2)), kInvalid);
  EXPECT_ERROR(cuMemGetAllocationGranularity(nullptr, &properties,
                                             CU_MEM_ALLOC_GRANULARITY_MINIMUM),
               kInvalid);
  EXPECT_ERROR(
      cuMemGetAllocationGranularity(&bytes, nullptr, CU_MEM_ALLOC_GRANULARITY_MINIMUM),
      kInvalid);
  properties.type = CU_MEM_ALLOCATION_TYPE_INVALID;
  EXPECT_OK(get(CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  for (const CUdevice device : {kVendor.count_devices(), -1}) {
    properties = device_memory_properties(device);
    EXPECT_OK(get(CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  }
  properties = device_memory_properties();
  properties.location.type = CU_MEM_LOCATION_TYPE_INVALID;
  EXPECT_OK(get(CU_MEM_ALLOC_GRANULARITY_MINIMUM));
}

// --- reservations --------------------------------------------------------------------

CASE(virtual_memory, reserved_and_freed, kReference, cuMemAddressReserve,
     cuMemAddressFree) {
  const size_t piece = granularity();
  CUdeviceptr first = 0;
  CUdeviceptr second = 0;
  EXPECT_OK(cuMemAddressReserve(&first, 3 * piece, 0, 0, 0));
  EXPECT_OK(cuMemAddressReserve(&second, piece, 0, 0, 0));
  EXPECT_EQ(first % piece, CUdeviceptr{0});
  EXPECT(second >= first + 3 * piece || second + piece <= first);
  EXPECT_OK(cuMemAddressFree(first, 3 * piece));
  EXPECT_OK(cuMemAddressFree(second, piece));
}

CASE(virtual_memory, sizes_of_reservations, kReference, cuMemAddressReserve) {
  const size_t piece = granularity();
  CUdeviceptr pointer = 0;
  EXPECT_ERROR(cuMemAddressReserve(nullptr, piece, 0, 0, 0), kInvalid);
  EXPECT_ERROR(cuMemAddressReserve(&pointer, 0, 0, 0, 0), kInvalid);
  EXPECT_ERROR(cuMemAddressReserve(&pointer, piece, 0, 0, 1), kInvalid);
  for (const size_t bytes : {size_t{1}, size_t{4096}, size_t{65536}, piece - 1,
                             piece + 4096, piece + 65536}) {
    const About about(describe(bytes) + " bytes");
    const CUresult result = cuMemAddressReserve(&pointer, bytes, 0, 0, 0);
    EXPECT_ERROR(result, kInvalid);
    if (result == CUDA_SUCCESS) EXPECT_OK(cuMemAddressFree(pointer, bytes));
  }
  const About about("too many bytes");
  EXPECT_ERROR(cuMemAddressReserve(&pointer, size_t{1} << 62, 0, 0, 0),
               CUDA_ERROR_OUT_OF_MEMORY);
}

CASE(virtual_memory, alignments_of_reservations, kReference, cuMemAddressReserve) {
  const size_t piece = granularity();
  struct Alignment {
    size_t bytes;
    CUresult result;
  };
  const Alignment alignments[] = {
      {1, CUDA_SUCCESS},           {3, kInvalid},
      {4096, CUDA_SUCCESS},        {65536, CUDA_SUCCESS},
      {piece, CUDA_SUCCESS},       {8 * piece, CUDA_SUCCESS},
      {512 * piece, CUDA_SUCCESS}, {piece + 4096, kInvalid},
      {3 * piece, kInvalid},
  };
  for (const Alignment& alignment : alignments) {
    const About about("alignment " + describe(alignment.bytes));
    CUdeviceptr pointer = 0;
    const CUresult result = cuMemAddressReserve(&pointer, piece, alignment.bytes, 0, 0);
    EXPECT_ERROR(result, alignment.result);
    if (result != CUDA_SUCCESS) continue;
    EXPECT_EQ(pointer % alignment.bytes, CUdeviceptr{0});
    EXPECT_OK(cuMemAddressFree(pointer, piece));
  }
}

CASE(virtual_memory, a_hint_is_met_when_it_can_be, kReference, cuMemAddressReserve) {
  const size_t piece = granularity();
  Reservation first(2 * piece);
  const CUdeviceptr address = first.get();
  REQUIRE_OK(cuMemAddressFree(first.release(), 2 * piece));
  Reservation again(2 * piece, 0, address);
  EXPECT(again.get() == address);
  Reservation taken(2 * piece, 0, address);
  EXPECT(taken.get() != address);
  Reservation overlapping(2 * piece, 0, address + piece);
  EXPECT(overlapping.get() != address + piece);
}

CASE(virtual_memory, hints_that_are_not_aligned, kDriver, cuMemAddressReserve) {
  const size_t piece = granularity();
  for (const CUdeviceptr hint :
       {CUdeviceptr{1}, CUdeviceptr{0xdead0000beef}, CUdeviceptr{piece + 65536}}) {
    CUdeviceptr pointer = 0;
    EXPECT_ERROR(cuMemAddressReserve(&pointer, piece, 0, hint, 0), kInvalid);
  }
}

CASE(virtual_memory, a_hint_where_the_host_has_something, kReference,
     cuMemAddressReserve) {
  const size_t piece = granularity();
  const Pages pages(2 * piece);
  const CUdeviceptr hint = (as_device(pages.get()) + piece - 1) / piece * piece;
  Reservation elsewhere(piece, 0, hint);
  EXPECT(elsewhere.get() != hint);
}

CASE(virtual_memory, frees_of_addresses_that_are_refused, kReference,
     cuMemAddressFree) {
  const size_t piece = granularity();
  Reservation addresses(4 * piece);
  EXPECT_ERROR(cuMemAddressFree(0, piece), kInvalid);
  EXPECT_ERROR(cuMemAddressFree(addresses.get(), 0), kInvalid);
  EXPECT_ERROR(cuMemAddressFree(addresses.get(), 2 * piece), kInvalid);
  EXPECT_ERROR(cuMemAddressFree(addresses.get(), 8 * piece), kInvalid);
  EXPECT_ERROR(cuMemAddressFree(addresses.get(), 4 * piece - 4096), kInvalid);
  EXPECT_ERROR(cuMemAddressFree(addresses.at(piece), 3 * piece), kInvalid);
  EXPECT_ERROR(cuMemAddressFree(addresses.at(piece), 4 * piece), kInvalid);
  const CUdeviceptr gone = addresses.release();
  EXPECT_OK(cuMemAddressFree(gone, 4 * piece));
  EXPECT_ERROR(cuMemAddressFree(gone, 4 * piece), kInvalid);
}

CASE(virtual_memory, addresses_freed_while_they_are_mapped, kReference,
     cuMemAddressFree) {
  const size_t piece = granularity();
  Physical memory(piece);
  Reservation addresses(2 * piece);
  REQUIRE_OK(cuMemMap(addresses.get(), piece, 0, memory, 0));
  EXPECT_ERROR(cuMemAddressFree(addresses.get(), 2 * piece), kInvalid);
  EXPECT_OK(cuMemUnmap(addresses.get(), piece));
}

// --- handles -------------------------------------------------------------------------

CASE(virtual_memory, created_and_released, kReference, cuMemCreate, cuMemRelease) {
  const size_t piece = granularity();
  const CUmemAllocationProp properties = device_memory_properties();
  CUmemGenericAllocationHandle first = 0;
  CUmemGenericAllocationHandle second = 0;
  EXPECT_OK(cuMemCreate(&first, piece, &properties, 0));
  EXPECT_OK(cuMemCreate(&second, 3 * piece, &properties, 0));
  EXPECT(first != second);
  EXPECT_OK(cuMemRelease(first));
  EXPECT_OK(cuMemRelease(second));
}

CASE(virtual_memory, creations_that_are_refused, kReference, cuMemCreate) {
  const size_t piece = granularity();
  const CUmemAllocationProp good = device_memory_properties();
  CUmemGenericAllocationHandle handle = 0;
  const auto create = [&](size_t bytes, const CUmemAllocationProp& properties) {
    return cuMemCreate(&handle, bytes, &properties, 0);
  };
  EXPECT_ERROR(cuMemCreate(nullptr, piece, &good, 0), kInvalid);
  EXPECT_ERROR(cuMemCreate(&handle, piece, nullptr, 0), kInvalid);
  EXPECT_ERROR(cuMemCreate(&handle, piece, &good, 1), kInvalid);
  EXPECT_ERROR(create(0, good), kInvalid);
  EXPECT_ERROR(create(piece - 1, good), kInvalid);
  EXPECT_ERROR(create(piece + 65536, good), kInvalid);
  CUmemAllocationProp bad = good;
  bad.type = CU_MEM_ALLOCATION_TYPE_INVALID;
  EXPECT_ERROR(create(piece, bad), kInvalid);
  bad = good;
  bad.location.type = CU_MEM_LOCATION_TYPE_INVALID;
  const About about("bad locations");
  EXPECT_ERROR(create(piece, bad), kInvalid);
  bad = device_memory_properties(kVendor.count_devices());
  EXPECT_ERROR(create(piece, bad), CUDA_ERROR_INVALID_DEVICE);
  bad = device_memory_properties(-1);
  EXPECT_ERROR(create(piece, bad), CUDA_ERROR_INVALID_DEVICE);
}

CASE(virtual_memory, more_memory_than_there_is, kReference, cuMemCreate) {
  size_t free = 0;
  size_t total = 0;
  REQUIRE_OK(cuMemGetInfo_v2(&free, &total));
  const CUmemAllocationProp properties = device_memory_properties();
  const size_t piece = granularity();
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_ERROR(cuMemCreate(&handle, (total / piece + 64) * piece, &properties, 0),
               CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_ERROR(cuMemCreate(&handle, size_t{1} << 62, &properties, 0),
               CUDA_ERROR_OUT_OF_MEMORY);
  EXPECT_OK(cuCtxSynchronize());
}

// A bit without a meaning is taken. The fabric is for who may use it.
CASE(virtual_memory, memory_that_can_be_shared, kDriver, cuMemCreate) {
  const size_t piece = granularity();
  const auto create = [&](CUmemAllocationHandleType types) {
    CUmemAllocationProp properties = device_memory_properties();
    properties.requestedHandleTypes = types;
    CUmemGenericAllocationHandle handle = 0;
    const CUresult result = cuMemCreate(&handle, piece, &properties, 0);
    if (result == CUDA_SUCCESS) EXPECT_OK(cuMemRelease(handle));
    return result;
  };
  EXPECT_OK(create(CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR));
  EXPECT_ERROR(create(CU_MEM_HANDLE_TYPE_WIN32), kInvalid);
  EXPECT_ERROR(create(CU_MEM_HANDLE_TYPE_WIN32_KMT), kInvalid);
  EXPECT_OK(create(static_cast<CUmemAllocationHandleType>(0x100)));
  const auto both = static_cast<CUmemAllocationHandleType>(
      CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC);
  for (const CUmemAllocationHandleType types : {CU_MEM_HANDLE_TYPE_FABRIC, both}) {
    const CUresult result = create(types);
    EXPECT(result == CUDA_SUCCESS || result == CUDA_ERROR_NOT_PERMITTED);
  }
}

CASE(virtual_memory, memory_for_the_network, kReference, cuMemCreate) {
  CUmemAllocationProp properties = device_memory_properties();
  properties.allocFlags.gpuDirectRDMACapable = 1;
  CUmemGenericAllocationHandle handle = 0;
  if (attribute(CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED) == 0) {
    SKIP("the device has no such memory");
  }
  REQUIRE_OK(cuMemCreate(&handle, granularity(), &properties, 0));
  CUmemAllocationProp found = {};
  EXPECT_OK(cuMemGetAllocationPropertiesFromHandle(&found, handle));
  EXPECT_EQ(static_cast<int>(found.allocFlags.gpuDirectRDMACapable), 1);
  EXPECT_OK(cuMemRelease(handle));
}

CASE(virtual_memory, memory_of_the_host, kDriver, cuMemCreate) {
  if (simulated()) SKIP("the simulator has no such memory");
  CUmemAllocationProp properties = device_memory_properties();
  CUmemGenericAllocationHandle handle = 0;
  for (const CUmemLocationType type :
       {CU_MEM_LOCATION_TYPE_HOST, CU_MEM_LOCATION_TYPE_HOST_NUMA}) {
    const About about("location type " + describe(type));
    properties.location = {type, 0};
    REQUIRE_OK(cuMemCreate(&handle, granularity(), &properties, 0));
    EXPECT_OK(cuMemRelease(handle));
  }
  properties.location = {CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT, 0};
  EXPECT_ERROR(cuMemCreate(&handle, granularity(), &properties, 0), kInvalid);
}

CASE(virtual_memory, released_and_never_made, kReference, cuMemRelease) {
  EXPECT_ERROR(cuMemRelease(0), kInvalid);
}

CASE(virtual_memory, stale_handles, kOwn, cuMemRelease, cuMemMap) {
  if (!simulated()) SKIP("the driver may fault");
  const size_t piece = granularity();
  Reservation addresses(piece);
  const CUmemGenericAllocationHandle gone = Physical(piece).get();
  for (const CUmemGenericAllocationHandle handle :
       {gone, CUmemGenericAllocationHandle{12345}}) {
    EXPECT_ERROR(cuMemRelease(handle), kInvalid);
    EXPECT_ERROR(cuMemMap(addresses.get(), piece, 0, handle, 0), kInvalid);
  }
}

CASE(virtual_memory, properties_of_a_handle, kReference,
     cuMemGetAllocationPropertiesFromHandle) {
  CUmemAllocationProp properties = device_memory_properties();
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle handle = 0;
  REQUIRE_OK(cuMemCreate(&handle, granularity(), &properties, 0));
  CUmemAllocationProp found = {};
  EXPECT_OK(cuMemGetAllocationPropertiesFromHandle(&found, handle));
  EXPECT_EQ(found.type, CU_MEM_ALLOCATION_TYPE_PINNED);
  EXPECT_EQ(found.requestedHandleTypes, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  EXPECT_EQ(found.location.type, CU_MEM_LOCATION_TYPE_DEVICE);
  EXPECT_EQ(found.location.id, 0);
  EXPECT_ERROR(cuMemGetAllocationPropertiesFromHandle(nullptr, handle), kInvalid);
  EXPECT_OK(cuMemRelease(handle));
}

// --- memory --------------------------------------------------------------------------

CASE(virtual_memory, memory_lives_as_long_as_a_handle_or_a_mapping, kReference,
     cuMemCreate, cuMemRelease, cuMemMap, cuMemUnmap) {
  const size_t bytes = 128 * granularity();
  const auto free_bytes = [] {
    size_t free = 0;
    size_t total = 0;
    REQUIRE_OK(cuMemGetInfo_v2(&free, &total));
    return free;
  };
  const size_t before = free_bytes();
  Reservation addresses(bytes);
  EXPECT_EQ(before - free_bytes(), size_t{0});
  Physical memory(bytes);
  EXPECT_EQ(before - free_bytes(), bytes);
  REQUIRE_OK(cuMemMap(addresses.get(), bytes, 0, memory, 0));
  EXPECT_EQ(before - free_bytes(), bytes);
  EXPECT_OK(cuMemRelease(memory.release()));
  EXPECT_EQ(before - free_bytes(), bytes);
  EXPECT_OK(set_access(addresses.get(), bytes, access(0)));
  upload(addresses.get(), random_bytes(1000, 1));
  EXPECT_OK(cuMemUnmap(addresses.get(), bytes));
  EXPECT_EQ(before - free_bytes(), size_t{0});
  Physical again(bytes);
  REQUIRE_OK(cuMemMap(addresses.get(), bytes, 0, again, 0));
  EXPECT_OK(cuMemUnmap(addresses.get(), bytes));
  EXPECT_EQ(before - free_bytes(), bytes);
}

// --- mappings ------------------------------------------------------------------------

CASE(virtual_memory, mapped_and_used, kReference, cuMemMap, cuMemSetAccess) {
  VirtualMemory memory(3, granularity());
  const Bytes bytes = random_bytes(memory.size(), 1);
  upload(memory.get(), bytes);
  EXPECT_BYTES(download(memory.get(), memory.size()).data(), bytes);
}

// "Not supported" is for a size or an offset that is not that of the whole handle.
CASE(virtual_memory, mappings_that_are_refused, kDriver, cuMemMap) {
  const size_t piece = granularity();
  Reservation addresses(4 * piece);
  Physical memory(2 * piece);
  const auto map = [&](size_t at, size_t bytes, size_t offset) {
    const CUresult result = cuMemMap(addresses.at(at), bytes, offset, memory, 0);
    if (result == CUDA_SUCCESS) EXPECT_OK(cuMemUnmap(addresses.at(at), bytes));
    return result;
  };
  EXPECT_OK(map(0, 2 * piece, 0));
  EXPECT_OK(map(2 * piece, 2 * piece, 0));
  EXPECT_ERROR(map(0, piece, 0), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_ERROR(map(0, piece, piece), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_ERROR(map(0, 3 * piece, 0), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_ERROR(map(0, 4096, 0), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_ERROR(map(0, 2 * piece, 4096), CUDA_ERROR_NOT_SUPPORTED);
  EXPECT_ERROR(map(0, 0, 0), kInvalid);
  EXPECT_ERROR(map(4096, 2 * piece, 0), kInvalid);
  EXPECT_ERROR(map(65536, 2 * piece, 0), kInvalid);
  // A real driver was seen to map past the end of the reservation.
  if (simulated()) EXPECT_ERROR(map(3 * piece, 2 * piece, 0), kInvalid);
  EXPECT_ERROR(cuMemMap(0, 2 * piece, 0, memory, 0), kInvalid);
  EXPECT_ERROR(cuMemMap(addresses.get(), 2 * piece, 0, memory, 1), kInvalid);
  DeviceMemory ordinary(2 * piece);
  EXPECT_ERROR(cuMemMap(ordinary, 2 * piece, 0, memory, 0), kInvalid);
}

CASE(virtual_memory, mapped_without_a_handle, kReference, cuMemMap) {
  const size_t piece = granularity();
  Reservation addresses(piece);
  EXPECT_ERROR(cuMemMap(addresses.get(), piece, 0, 0, 0), kInvalid);
}

CASE(virtual_memory, mapped_twice_at_one_address, kReference, cuMemMap) {
  const size_t piece = granularity();
  Reservation addresses(3 * piece);
  Physical memory(piece);
  Physical other(piece);
  Physical large(2 * piece);
  REQUIRE_OK(cuMemMap(addresses.at(piece), piece, 0, memory, 0));
  EXPECT_ERROR(cuMemMap(addresses.at(piece), piece, 0, memory, 0), kInvalid);
  EXPECT_ERROR(cuMemMap(addresses.at(piece), piece, 0, other, 0), kInvalid);
  EXPECT_ERROR(cuMemMap(addresses.get(), 2 * piece, 0, large, 0), kInvalid);
  EXPECT_ERROR(cuMemMap(addresses.at(piece), 2 * piece, 0, large, 0), kInvalid);
  EXPECT_OK(cuMemUnmap(addresses.at(piece), piece));
}

CASE(virtual_memory, one_handle_at_two_addresses, kReference, cuMemMap) {
  const size_t piece = granularity();
  Reservation addresses(2 * piece);
  Physical memory(piece);
  REQUIRE_OK(cuMemMap(addresses.get(), piece, 0, memory, 0));
  REQUIRE_OK(cuMemMap(addresses.at(piece), piece, 0, memory, 0));
  REQUIRE_OK(set_access(addresses.get(), 2 * piece, access(0)));
  const Bytes bytes = random_bytes(4096, 1);
  upload(addresses.get(), bytes);
  EXPECT_BYTES(download(addresses.at(piece), 4096).data(), bytes);
  EXPECT_OK(cuMemUnmap(addresses.get(), 2 * piece));
}

CASE(virtual_memory, a_mapping_across_two_reservations, kReference, cuMemMap) {
  const size_t piece = granularity();
  Reservation first(piece);
  Reservation second(piece, 0, first.get() + piece);
  if (second.get() != first.get() + piece) SKIP("the hint was not met");
  Physical memory(2 * piece);
  const CUresult result = cuMemMap(first.get(), 2 * piece, 0, memory, 0);
  EXPECT_ERROR(result, kInvalid);
  if (result == CUDA_SUCCESS) EXPECT_OK(cuMemUnmap(first.get(), 2 * piece));
}

// Each with memory of its own, side by side.
CASE(virtual_memory, a_copy_across_two_reservations, kDriver, cuMemcpyHtoDAsync_v2,
     cuMemcpyDtoHAsync_v2, cuMemsetD8Async) {
  const size_t piece = granularity();
  Reservation first(piece);
  Reservation second(piece, 0, first.get() + piece);
  if (second.get() != first.get() + piece) SKIP("the hint was not met");
  Physical memory(piece);
  Physical other(piece);
  REQUIRE_OK(cuMemMap(first.get(), piece, 0, memory, 0));
  REQUIRE_OK(cuMemMap(second.get(), piece, 0, other, 0));
  EXPECT_OK(set_access(first.get(), piece, access(0)));
  EXPECT_OK(set_access(second.get(), piece, access(0)));
  RegisteredMemory host(2 * piece);
  const Bytes bytes = random_bytes(2 * piece, 1);
  std::copy(bytes.begin(), bytes.end(), host.at(0));
  Stream stream;
  EXPECT_OK(cuMemcpyHtoDAsync_v2(first.get(), host.get(), 2 * piece, stream));
  EXPECT_OK(cuStreamSynchronize(stream));
  std::fill_n(host.at(0), 2 * piece, 0);
  EXPECT_OK(cuMemcpyDtoHAsync_v2(host.get(), first.get(), 2 * piece, stream));
  EXPECT_OK(cuStreamSynchronize(stream));
  EXPECT_BYTES(host.at(0), bytes);
  EXPECT_OK(cuMemsetD8Async(first.at(piece - 64), 7, 128, stream));
  EXPECT_OK(cuMemcpyDtoHAsync_v2(host.get(), first.at(piece - 64), 128, stream));
  EXPECT_OK(cuStreamSynchronize(stream));
  EXPECT_BYTES(host.at(0), Bytes(128, 7));
  set_switch("one_mapping_copies", 1);
  if (simulated()) {
    EXPECT_ERROR(cuMemcpyHtoDAsync_v2(first.get(), host.get(), 2 * piece, stream),
                 kInvalid);
    EXPECT_ERROR(cuMemsetD8Async(first.at(piece - 64), 7, 128, stream), kInvalid);
  }
  EXPECT_OK(cuMemUnmap(first.get(), piece));
  EXPECT_OK(cuMemUnmap(second.get(), piece));
}

CASE(virtual_memory, unmapped_in_part, kReference, cuMemUnmap) {
  const size_t piece = granularity();
  VirtualMemory memory(3, 2 * piece);
  EXPECT_ERROR(cuMemUnmap(memory.get(), piece), kInvalid);
  EXPECT_ERROR(cuMemUnmap(memory.get(), 4096), kInvalid);
  EXPECT_ERROR(cuMemUnmap(memory.at(piece), piece), kInvalid);
  EXPECT_ERROR(cuMemUnmap(memory.at(piece), 2 * piece), kInvalid);
  EXPECT_ERROR(cuMemUnmap(memory.get(), 3 * piece), kInvalid);
  EXPECT_ERROR(cuMemUnmap(memory.get(), 0), kInvalid);
  EXPECT_ERROR(cuMemUnmap(0, 2 * piece), kInvalid);
  // All is still there.
  upload(memory.get(), random_bytes(memory.size(), 1));
  EXPECT_OK(cuMemUnmap(memory.at(2 * piece), 2 * piece));
  EXPECT_OK(cuMemUnmap(memory.get(), 2 * piece));
  EXPECT_OK(cuMemUnmap(memory.at(4 * piece), 2 * piece));
  memory.forget_mappings();
}

// The driver takes away what is mapped in the range; the simulator wants it to be full.
CASE(virtual_memory, unmapped_with_what_is_not_mapped, kDriver, cuMemUnmap) {
  const size_t piece = granularity();
  const CUresult expected = simulated() ? kInvalid : CUDA_SUCCESS;
  {
    const About about("a hole");
    VirtualMemory memory(3, piece);
    REQUIRE_OK(cuMemUnmap(memory.at(piece), piece));
    memory.forget_mappings();
    EXPECT_ERROR(cuMemUnmap(memory.at(piece), piece), expected);
    EXPECT_ERROR(cuMemUnmap(memory.get(), memory.size()), expected);
    if (simulated()) {
      REQUIRE_OK(cuMemUnmap(memory.get(), piece));
      REQUIRE_OK(cuMemUnmap(memory.at(2 * piece), piece));
    }
  }
  const About about("past the end");
  Physical memory(piece);
  Reservation addresses(2 * piece);
  REQUIRE_OK(cuMemMap(addresses.get(), piece, 0, memory, 0));
  EXPECT_ERROR(cuMemUnmap(addresses.get(), 2 * piece), expected);
  if (simulated()) EXPECT_OK(cuMemUnmap(addresses.get(), piece));
}

CASE(virtual_memory, several_unmapped_at_once, kReference, cuMemUnmap) {
  const size_t piece = granularity();
  VirtualMemory memory(4, piece);
  EXPECT_OK(cuMemUnmap(memory.at(piece), 2 * piece));
  EXPECT_OK(cuMemUnmap(memory.get(), piece));
  EXPECT_OK(cuMemUnmap(memory.at(3 * piece), piece));
  memory.forget_mappings();
}

CASE(virtual_memory, unmapped_while_streams_are_busy, kReference, cuMemUnmap) {
  for (const bool blocking : {false, true}) {
    const About about(blocking ? "blocking stream" : "non-blocking stream");
    Stream stream(blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING);
    VirtualMemory memory(1, granularity());
    memory.forget_mappings();
    const std::string when = when_it_returns(
        [&] { return cuMemUnmap(memory.get(), memory.size()); }, stream);
    EXPECT_EQ(when, std::string(kAsynchronous));
  }
}

CASE(virtual_memory, calls_while_streams_are_busy, kReference, cuMemMap,
     cuMemSetAccess) {
  const size_t piece = granularity();
  const std::string async = kAsynchronous;
  Stream stream;
  const CUmemAllocationProp properties = device_memory_properties();
  Reservation addresses(piece);
  CUdeviceptr more = 0;
  CUmemGenericAllocationHandle handle = 0;
  const auto ask = [&](const std::function<CUresult()>& call) {
    return when_it_returns(call, stream);
  };
  const auto reserve = ask([&] { return cuMemAddressReserve(&more, piece, 0, 0, 0); });
  EXPECT_EQ(reserve, async);
  const auto free = ask([&] { return cuMemAddressFree(more, piece); });
  EXPECT_EQ(free, async);
  const auto create = ask([&] { return cuMemCreate(&handle, piece, &properties, 0); });
  EXPECT_EQ(create, async);
  const auto map = ask([&] { return cuMemMap(addresses.get(), piece, 0, handle, 0); });
  EXPECT_EQ(map, async);
  const auto open = ask([&] { return set_access(addresses.get(), piece, access(0)); });
  EXPECT_EQ(open, async);
  const auto close = ask([&] {
    return set_access(addresses.get(), piece, access(0, CU_MEM_ACCESS_FLAGS_PROT_NONE));
  });
  EXPECT_EQ(close, async);
  REQUIRE_OK(cuMemUnmap(addresses.get(), piece));
  const auto release = ask([&] { return cuMemRelease(handle); });
  EXPECT_EQ(release, async);
}

CASE(virtual_memory, memory_comes_back_with_its_bytes, kReference, cuMemMap) {
  const size_t piece = granularity();
  VirtualMemory memory(1, piece);
  const Bytes bytes = random_bytes(4096, 1);
  upload(memory.get(), bytes);
  REQUIRE_OK(cuMemUnmap(memory.get(), piece));
  REQUIRE_OK(cuMemMap(memory.get(), piece, 0, memory.handle(0), 0));
  unsigned long long flags = 99;
  const CUmemLocation location = access(0).location;
  EXPECT_OK(cuMemGetAccess(&flags, &location, memory.get()));
  EXPECT_EQ(flags, 0ull);
  REQUIRE_OK(set_access(memory.get(), piece, access(0)));
  EXPECT_BYTES(download(memory.get(), 4096).data(), bytes);
}

CASE(virtual_memory, new_memory_is_zero, kDriver, cuMemCreate) {
  const size_t piece = granularity();
  {
    VirtualMemory memory(1, piece);
    upload(memory.get(), Bytes(piece, 0xAB));
  }
  VirtualMemory memory(1, piece);
  EXPECT(download(memory.get(), piece) == Bytes(piece, 0));
}

// --- access --------------------------------------------------------------------------

CASE(virtual_memory, access_that_is_refused, kDriver, cuMemSetAccess) {
  const size_t piece = granularity();
  VirtualMemory memory(2, 2 * piece, Open::kNo);
  const CUmemAccessDesc good = access(0);
  EXPECT_ERROR(cuMemSetAccess(0, 2 * piece, &good, 1), kInvalid);
  EXPECT_ERROR(cuMemSetAccess(memory.get(), 0, &good, 1), kInvalid);
  EXPECT_ERROR(cuMemSetAccess(memory.get(), 2 * piece, nullptr, 1), kInvalid);
  EXPECT_ERROR(cuMemSetAccess(memory.get(), 2 * piece, &good, 0), kInvalid);
  EXPECT_ERROR(cuMemSetAccess(memory.get(), 8 * piece, &good, 1), kInvalid);
  const auto set = [&](CUmemAccessDesc desc) {
    return set_access(memory.get(), 2 * piece, desc);
  };
  EXPECT_ERROR(set(access(kVendor.count_devices())), kInvalid);
  EXPECT_ERROR(set(access(-1)), kInvalid);
  EXPECT_ERROR(set(access(0, static_cast<CUmemAccess_flags>(2))), kInvalid);
  EXPECT_ERROR(set(access(0, static_cast<CUmemAccess_flags>(7))), kInvalid);
  CUmemAccessDesc desc = good;
  desc.location.type = CU_MEM_LOCATION_TYPE_INVALID;
  const About about("no location");
  EXPECT_ERROR(set(desc), kInvalid);
}

CASE(virtual_memory, access_to_a_part_of_a_mapping, kReference, cuMemSetAccess) {
  const size_t piece = granularity();
  VirtualMemory memory(2, 2 * piece, Open::kNo);
  EXPECT_ERROR(set_access(memory.get(), piece, access(0)), kInvalid);
  EXPECT_ERROR(set_access(memory.at(piece), piece, access(0)), kInvalid);
  EXPECT_ERROR(set_access(memory.at(piece), 2 * piece, access(0)), kInvalid);
  EXPECT_ERROR(set_access(memory.get(), 3 * piece, access(0)), kInvalid);
  EXPECT_ERROR(set_access(memory.get(), 4096, access(0)), kInvalid);
  EXPECT_OK(set_access(memory.at(2 * piece), 2 * piece, access(0)));
  EXPECT_OK(set_access(memory.get(), 4 * piece, access(0)));
}

CASE(virtual_memory, access_to_what_is_not_mapped, kReference, cuMemSetAccess) {
  const size_t piece = granularity();
  Reservation empty(2 * piece);
  Physical memory(piece);
  EXPECT_ERROR(set_access(empty.get(), piece, access(0)), kInvalid);
  REQUIRE_OK(cuMemMap(empty.get(), piece, 0, memory, 0));
  EXPECT_ERROR(set_access(empty.get(), 2 * piece, access(0)), kInvalid);
  EXPECT_OK(cuMemUnmap(empty.get(), piece));
  DeviceMemory ordinary(2 * piece);
  EXPECT_ERROR(set_access(ordinary, 2 * piece, access(0)), kInvalid);
}

CASE(virtual_memory, access_of_the_host, kDriver, cuMemSetAccess) {
  const size_t piece = granularity();
  VirtualMemory memory(1, piece, Open::kNo);
  CUmemAccessDesc desc = access(0);
  for (const CUmemLocationType type :
       {CU_MEM_LOCATION_TYPE_HOST, CU_MEM_LOCATION_TYPE_HOST_NUMA}) {
    const About about("location type " + describe(type));
    desc.location = {type, 0};
    EXPECT_ERROR(set_access(memory.get(), piece, desc), CUDA_ERROR_NOT_SUPPORTED);
  }
}

CASE(virtual_memory, access_is_told, kDriver, cuMemGetAccess, cuMemSetAccess) {
  const size_t piece = granularity();
  VirtualMemory memory(1, piece, Open::kNo);
  CUmemLocation location = access(0).location;
  unsigned long long flags = 99;
  EXPECT_OK(cuMemGetAccess(&flags, &location, memory.get()));
  EXPECT_EQ(flags, 0ull);
  for (const CUmemAccess_flags each :
       {CU_MEM_ACCESS_FLAGS_PROT_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READ,
        CU_MEM_ACCESS_FLAGS_PROT_NONE}) {
    REQUIRE_OK(set_access(memory.get(), piece, access(0, each)));
    EXPECT_OK(cuMemGetAccess(&flags, &location, memory.at(100)));
    EXPECT_EQ(flags, static_cast<unsigned long long>(each));
  }
  EXPECT_ERROR(cuMemGetAccess(nullptr, &location, memory.get()), kInvalid);
  EXPECT_ERROR(cuMemGetAccess(&flags, nullptr, memory.get()), kInvalid);
  EXPECT_ERROR(cuMemGetAccess(&flags, &location, 0), kInvalid);
  Reservation empty(piece);
  EXPECT_ERROR(cuMemGetAccess(&flags, &location, empty.get()), kInvalid);
  DeviceMemory ordinary(piece);
  EXPECT_OK(cuMemGetAccess(&flags, &location, ordinary.get()));
  EXPECT_EQ(flags, 0ull);
  location.id = kVendor.count_devices();
  const About about("bad locations");
  EXPECT_ERROR(cuMemGetAccess(&flags, &location, memory.get()),
               CUDA_ERROR_INVALID_DEVICE);
  location = {CU_MEM_LOCATION_TYPE_HOST, 0};
  flags = 99;
  EXPECT_OK(cuMemGetAccess(&flags, &location, memory.get()));
  EXPECT_EQ(flags, 0ull);
}

CASE(virtual_memory, access_of_several_devices, kReference, cuMemSetAccess) {
  need_devices(2);
  const size_t piece = granularity();
  VirtualMemory memory(1, piece, Open::kNo);
  const CUmemAccessDesc both[] = {access(0), access(1, CU_MEM_ACCESS_FLAGS_PROT_READ)};
  EXPECT_OK(cuMemSetAccess(memory.get(), piece, both, 2));
  unsigned long long flags = 99;
  EXPECT_OK(cuMemGetAccess(&flags, &both[1].location, memory.get()));
  EXPECT_EQ(flags, 1ull);
  const CUmemAccessDesc twice[] = {access(0, CU_MEM_ACCESS_FLAGS_PROT_READ), access(0)};
  EXPECT_OK(cuMemSetAccess(memory.get(), piece, twice, 2));
  EXPECT_OK(cuMemGetAccess(&flags, &both[0].location, memory.get()));
  EXPECT_EQ(flags, 3ull);
}

CASE(virtual_memory, memory_of_another_device, kReference, cuMemCreate) {
  need_devices(2);
  const size_t piece = granularity();
  Physical memory(piece, 1);
  Reservation addresses(piece);
  REQUIRE_OK(cuMemMap(addresses.get(), piece, 0, memory, 0));
  EXPECT_OK(set_access(addresses.get(), piece, access(0)));
  const Bytes bytes = random_bytes(4096, 1);
  upload(addresses.get(), bytes);
  EXPECT_BYTES(download(addresses.get(), 4096).data(), bytes);
  EXPECT_OK(cuMemUnmap(addresses.get(), piece));
}

CASE(virtual_memory, calls_of_the_other_kind_of_memory, kReference, cuMemFree_v2,
     cuMemAddressFree, cuMemUnmap) {
  const size_t piece = granularity();
  VirtualMemory memory(1, piece);
  DeviceMemory ordinary(piece);
  EXPECT_ERROR(cuMemFree_v2(memory.get()), kInvalid);
  EXPECT_ERROR(cuMemAddressFree(ordinary, piece), kInvalid);
  EXPECT_ERROR(cuMemUnmap(ordinary, piece), kInvalid);
}

// --- handles of what is mapped -------------------------------------------------------

CASE(virtual_memory, the_handle_of_a_mapping, kReference, cuMemRetainAllocationHandle) {
  const size_t piece = granularity();
  VirtualMemory memory(2, piece);
  CUmemGenericAllocationHandle handle = 0;
  const auto at = [](CUdeviceptr address) { return reinterpret_cast<void*>(address); };
  EXPECT_OK(cuMemRetainAllocationHandle(&handle, at(memory.at(piece + 100))));
  EXPECT(handle == memory.handle(1));
  EXPECT_OK(cuMemRelease(handle));
  EXPECT_ERROR(cuMemRetainAllocationHandle(nullptr, at(memory.get())), kInvalid);
  EXPECT_ERROR(cuMemRetainAllocationHandle(&handle, nullptr), kInvalid);
  Reservation empty(piece);
  EXPECT_ERROR(cuMemRetainAllocationHandle(&handle, at(empty.get())), kInvalid);
  DeviceMemory ordinary(piece);
  EXPECT_ERROR(cuMemRetainAllocationHandle(&handle, at(ordinary)), kInvalid);
  const Pages pages(4096);
  EXPECT_ERROR(cuMemRetainAllocationHandle(&handle, pages.get()), kInvalid);
}

CASE(virtual_memory, the_handle_of_a_mapping_that_outlives_it, kReference,
     cuMemRetainAllocationHandle) {
  const size_t piece = granularity();
  Reservation addresses(piece);
  Physical memory(piece);
  REQUIRE_OK(cuMemMap(addresses.get(), piece, 0, memory, 0));
  REQUIRE_OK(cuMemRelease(memory.release()));
  CUmemGenericAllocationHandle handle = 0;
  EXPECT_OK(
      cuMemRetainAllocationHandle(&handle, reinterpret_cast<void*>(addresses.get())));
  EXPECT_OK(cuMemUnmap(addresses.get(), piece));
  REQUIRE_OK(cuMemMap(addresses.get(), piece, 0, handle, 0));
  EXPECT_OK(cuMemUnmap(addresses.get(), piece));
  EXPECT_OK(cuMemRelease(handle));
}

// --- the host ------------------------------------------------------------------------

CHILD(reads_device_memory) {
  make_ready();
  const CUdeviceptr address = arguments.at(0) == "virtual"
                                  ? make_immortal<VirtualMemory>(1, granularity()).get()
                                  : make_immortal<DeviceMemory>(4096).get();
  return *reinterpret_cast<volatile unsigned char*>(address) & 0;
}

CASE(virtual_memory, read_by_the_host, kDriver, cuMemMap) {
  const VirtualMemory memory(1, granularity());
  for (const char* kind : {"virtual", "ordinary"}) {
    const About about(kind);
    const Ending ending =
        run_child("reads_device_memory", {kind}, kPatience, kNoSignalHandlers);
    EXPECT_EQ(ending.signal, SIGSEGV);
  }
}

// --- copies without access -----------------------------------------------------------

struct Attempt {
  const char* name;
  std::function<CUresult(CUdeviceptr address, void* pageable, CUdeviceptr device,
                         CUstream stream)>
      make;
  bool writes;

  // Does the call say that the address is a device's? Else a driver takes one that it
  // does not know for the host's.
  bool says_device = true;
};

constexpr size_t kBytes = 4096;

const std::vector<Attempt>& attempts() {
  static const std::vector<Attempt> all = {
      {"cuMemcpyHtoD",
       [](CUdeviceptr at, void* host, CUdeviceptr, CUstream) {
         return cuMemcpyHtoD_v2(at, host, kBytes);
       },
       true},
      {"cuMemcpyDtoH",
       [](CUdeviceptr at, void* host, CUdeviceptr, CUstream) {
         return cuMemcpyDtoH_v2(host, at, kBytes);
       },
       false},
      {"cuMemcpy to it",
       [](CUdeviceptr at, void*, CUdeviceptr device, CUstream) {
         return cuMemcpy(at, device, kBytes);
       },
       true, false},
      {"cuMemcpyHtoDAsync",
       [](CUdeviceptr at, void* host, CUdeviceptr, CUstream stream) {
         return cuMemcpyHtoDAsync_v2(at, host, kBytes, stream);
       },
       true},
      {"cuMemcpyDtoHAsync",
       [](CUdeviceptr at, void* host, CUdeviceptr, CUstream stream) {
         return cuMemcpyDtoHAsync_v2(host, at, kBytes, stream);
       },
       false},
      {"cuMemcpyDtoDAsync from it",
       [](CUdeviceptr at, void*, CUdeviceptr device, CUstream stream) {
         return cuMemcpyDtoDAsync_v2(device, at, kBytes, stream);
       },
       false},
      {"cuMemcpyAsync to it",
       [](CUdeviceptr at, void*, CUdeviceptr device, CUstream stream) {
         return cuMemcpyAsync(at, device, kBytes, stream);
       },
       true, false},
      {"cuMemcpyAsync to it from pinned memory",
       [](CUdeviceptr at, void*, CUdeviceptr, CUstream stream) {
         const HostMemory& pinned = make_immortal<HostMemory>(kBytes);
         return cuMemcpyAsync(at, as_device(pinned.get()), kBytes, stream);
       },
       true, false},
      {"cuMemcpyAsync from it to pinned memory",
       [](CUdeviceptr at, void*, CUdeviceptr, CUstream stream) {
         const HostMemory& pinned = make_immortal<HostMemory>(kBytes);
         return cuMemcpyAsync(as_device(pinned.get()), at, kBytes, stream);
       },
       false, false},
      {"cuMemsetD8",
       [](CUdeviceptr at, void*, CUdeviceptr, CUstream) {
         return cuMemsetD8_v2(at, 1, kBytes);
       },
       true},
      {"cuMemsetD8Async",
       [](CUdeviceptr at, void*, CUdeviceptr, CUstream stream) {
         return cuMemsetD8Async(at, 1, kBytes, stream);
       },
       true},
      {"cuMemcpy2DAsync to it",
       [](CUdeviceptr at, void*, CUdeviceptr device, CUstream stream) {
         CUDA_MEMCPY2D copy = {};
         copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
         copy.srcDevice = device;
         copy.dstDevice = at;
         copy.srcPitch = copy.dstPitch = 128;
         copy.WidthInBytes = 64;
         copy.Height = 16;
         return cuMemcpy2DAsync_v2(&copy, stream);
       },
       true},
      {"cuMemcpyBatchAsync to it",
       [](CUdeviceptr at, void*, CUdeviceptr device, CUstream stream) {
         if (!exported("cuMemcpyBatchAsync")) return CUDA_ERROR_NOT_SUPPORTED;
         size_t bytes = kBytes;
         size_t first = 0;
         size_t failed = 0;
         CUmemcpyAttributes attributes = {};
         attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
         return cuMemcpyBatchAsync(&at, &device, &bytes, 1, &attributes, &first, 1,
                                   &failed, stream);
       },
       true, false},
  };
  return all;
}

enum Place { kUnopened, kReadOnly, kReserved, kPastTheEnd, kFreed, kForAnother };
// Prints what the call and the wait for it return; both matter, since one of them may
// end the context.
CHILD(copies_where_it_may_not) {
  make_ready();
  const auto& attempt = attempts().at(std::stoul(arguments.at(0)));
  const auto where = static_cast<Place>(std::stoi(arguments.at(1)));
  const size_t piece = granularity();
  const auto map = [&](Open open) -> VirtualMemory& {
    return make_immortal<VirtualMemory>(1, piece, open);
  };
  const Stream& stream = make_immortal<Stream>();
  const Pages& pageable = make_immortal<Pages>(kBytes);
  const DeviceMemory& device = make_immortal<DeviceMemory>(kBytes);
  CUdeviceptr address = 0;
  switch (where) {
    case kUnopened:
      address = map(Open::kNo).get();
      break;
    case kReadOnly:
      address = map(Open::kReadOnly).get();
      break;
    case kForAnother:
      address = map(Open::kNo).get();
      REQUIRE_OK(set_access(address, piece, access(1)));
      break;
    case kReserved:
      address = make_immortal<Reservation>(piece).get();
      break;
    case kPastTheEnd:
      address = make_immortal<DeviceMemory>(100).get();
      break;
    case kFreed:
      address = DeviceMemory(piece).get();
      break;
  }
  const CUresult call = attempt.make(address, pageable.get(), device, stream);
  const CUresult wait = cuStreamSynchronize(stream);
  const CUresult everything = cuCtxSynchronize();
  CUdeviceptr more = 0;
  const CUresult after = cuMemAlloc_v2(&more, 64);
  const auto number = [](CUresult result) {
    return std::to_string(static_cast<int>(result));
  };
  write_to_parent("call " + number(call) + ", stream " + number(wait) + ", context " +
                  number(everything) + ", next " + number(after));
  return 0;
}

constexpr const char* kRefusedAtOnce = "call 1, stream 0, context 0, next 0";
constexpr const char* kAllowed = "call 0, stream 0, context 0, next 0";

void ask_everywhere(Place where) {
  const bool unknown = where == kReserved || where == kFreed;
  for (size_t i = 0; i < attempts().size(); ++i) {
    if (unknown && !attempts()[i].says_device && !simulated()) continue;
    const About about(attempts()[i].name);
    Child child("copies_where_it_may_not",
                {std::to_string(i), std::to_string(static_cast<int>(where))});
    const std::string said = child.read_line();
    const bool allowed = where == kReadOnly && !attempts()[i].writes;
    EXPECT_EQ(said, std::string(allowed ? kAllowed : kRefusedAtOnce));
    EXPECT_EQ(child.wait(), 0);
  }
}

CASE(virtual_memory, copies_where_access_was_never_set, kReference, cuMemcpyHtoD_v2) {
  ask_everywhere(kUnopened);
}

CASE(virtual_memory, copies_where_access_is_to_read, kReference, cuMemcpyHtoD_v2) {
  ask_everywhere(kReadOnly);
}

CASE(virtual_memory, copies_where_nothing_is_mapped, kReference, cuMemcpyHtoD_v2) {
  ask_everywhere(kReserved);
}

CASE(virtual_memory, copies_past_the_end_of_an_allocation, kReference,
     cuMemcpyHtoD_v2) {
  ask_everywhere(kPastTheEnd);
}

CASE(virtual_memory, copies_where_memory_was_freed, kReference, cuMemcpyHtoD_v2) {
  ask_everywhere(kFreed);
}

CASE(virtual_memory, copies_where_access_is_another_devices, kReference,
     cuMemcpyHtoD_v2) {
  need_devices(2);
  ask_everywhere(kForAnother);
}

CASE(virtual_memory, copies_across_mappings, kReference, cuMemcpyHtoD_v2,
     cuMemcpyDtoH_v2, cuMemsetD8_v2, cuMemcpy2D_v2) {
  const size_t piece = granularity();
  VirtualMemory memory(2, piece);
  const CUdeviceptr middle = memory.at(piece - 2048);
  const Bytes bytes = random_bytes(4096, 1);
  EXPECT_OK(cuMemcpyHtoD_v2(middle, bytes.data(), 4096));
  EXPECT_BYTES(download(middle, 4096).data(), bytes);
  CUDA_MEMCPY2D copy = {};
  Bytes rows(4096);
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcDevice = middle;
  copy.dstHost = rows.data();
  copy.srcPitch = copy.dstPitch = copy.WidthInBytes = 512;
  copy.Height = 8;
  EXPECT_OK(cuMemcpy2D_v2(&copy));
  EXPECT_BYTES(rows.data(), bytes);
  EXPECT_OK(cuMemsetD8_v2(middle, 9, 4096));
  EXPECT_BYTES(download(middle, 4096).data(), Bytes(4096, 9));
}

CASE(virtual_memory, copies_across_a_mapping_without_access, kReference,
     cuMemcpyHtoD_v2) {
  const size_t piece = granularity();
  VirtualMemory memory(2, piece, Open::kNo);
  REQUIRE_OK(set_access(memory.get(), piece, access(0)));
  const Bytes bytes = random_bytes(4096, 1);
  EXPECT_ERROR(cuMemcpyHtoD_v2(memory.at(piece - 2048), bytes.data(), 4096), kInvalid);
}

// What is unmapped under queued work that names it.
CHILD(unmaps_under_work) {
  make_ready();
  const Stream& stream = make_immortal<Stream>();
  const VirtualMemory& memory = make_immortal<VirtualMemory>(1, granularity());
  const HostMemory& pinned = make_immortal<HostMemory>(4096);
  const Event& done = make_immortal<Event>();
  make_immortal<Busy>(stream);
  const std::string& work = arguments.at(0);
  if (work == "fill") {
    REQUIRE_OK(cuMemsetD8Async(memory.get(), 1, 4096, stream));
  } else if (work == "load") {
    REQUIRE_OK(cuMemcpyHtoDAsync_v2(memory.get(), pinned, 4096, stream));
  } else {
    REQUIRE_OK(cuMemcpyDtoHAsync_v2(pinned, memory.get(), 4096, stream));
  }
  REQUIRE_OK(cuEventRecord(done, stream));
  const auto say = [](CUresult result) { write_to_parent(describe(result)); };
  say(cuMemUnmap(memory.get(), memory.size()));
  say(cuEventQuery(done));
  say(cuStreamSynchronize(stream));
  say(cuCtxSynchronize());
  CUdeviceptr more = 0;
  say(cuMemAlloc_v2(&more, 64));
  say(cuEventQuery(done));
  say(cuMemsetD8Async(memory.get(), 1, 4096, stream));
  CUdeviceptr reserved = 0;
  say(cuMemAddressReserve(&reserved, granularity(), 0, 0, 0));
  say(cuMemRelease(memory.handle(0)));
  int count = 0;
  say(cuDeviceGetCount(&count));
  return 0;
}

CASE(virtual_memory, unmapped_under_queued_work, kDriver, cuMemUnmap) {
  for (const char* work : {"fill", "load", "store"}) {
    const About about_work(work);
    Child child("unmaps_under_work", {work});
    const auto expect = [&](const char* what, CUresult expected) {
      const About about(what);
      const std::string said = child.read_line();
      EXPECT_EQ(said, describe(expected));
    };
    expect("unmap", CUDA_SUCCESS);
    expect("the work then", CUDA_ERROR_NOT_READY);
    expect("its stream", CUDA_ERROR_LAUNCH_FAILED);
    expect("the context", CUDA_ERROR_LAUNCH_FAILED);
    expect("an allocation", CUDA_ERROR_LAUNCH_FAILED);
    expect("its event", CUDA_ERROR_LAUNCH_FAILED);
    expect("more work", CUDA_ERROR_LAUNCH_FAILED);
    expect("a reservation", CUDA_SUCCESS);
    expect("its memory released", CUDA_SUCCESS);
    expect("a question to the driver", CUDA_SUCCESS);
    EXPECT_EQ(child.wait(), 0);
  }
}

}  // namespace
}  // namespace contract
