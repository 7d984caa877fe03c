// SPDX-License-Identifier: Apache-2.0
#include "virtual_memory.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <map>
#include <numeric>
#include <string>

namespace contract {

// --- for every group -----------------------------------------------------------------

void need_virtual_memory() {
  int supported = 0;
  REQUIRE_OK(hipDeviceGetAttribute(
      &supported, hipDeviceAttributeVirtualMemoryManagementSupported, 0));
  if (supported == 0) SKIP("the device has no virtual memory management");
}

void need_checked_mappings() {
  if (!simulated() && !since(7, 2)) SKIP("sources before 7.2 do not check it");
}

void need_checked_reservations() {
  if (!simulated() && !since(7, 12)) SKIP("sources before 7.12 may not check it");
}

hipMemAllocationProp device_memory(int device) {
  hipMemAllocationProp properties = {};
  properties.type = hipMemAllocationTypePinned;
  properties.location = {hipMemLocationTypeDevice, device};
  return properties;
}

hipMemAccessDesc device_access(hipMemAccessFlags flags, int device) {
  return {{hipMemLocationTypeDevice, device}, flags};
}

hipMemAccessDesc host_access(hipMemAccessFlags flags) {
  return {{hipMemLocationTypeHost, 0}, flags};
}

unsigned long long access_at(void* address, int device) {
  const hipMemLocation location = {hipMemLocationTypeDevice, device};
  unsigned long long flags = ~0ull;
  EXPECT_OK(hipMemGetAccess(&flags, &location, address));
  return flags;
}

hipError_t set_access(void* address, size_t bytes, hipMemAccessFlags flags,
                      int device) {
  const hipMemAccessDesc access = device_access(flags, device);
  return hipMemSetAccess(address, bytes, &access, 1);
}

bool is_mapped(void* address) {
  const hipMemLocation location = {hipMemLocationTypeDevice, 0};
  unsigned long long flags = 0;
  const hipError_t error = hipMemGetAccess(&flags, &location, address);
  if (error != hipSuccess) EXPECT_ERROR(error, hipErrorInvalidValue);
  return error == hipSuccess;
}

size_t free_memory() {
  size_t free = 0;
  size_t total = 0;
  REQUIRE_OK(hipMemGetInfo(&free, &total));
  return free;
}

Reservation::Reservation(size_t bytes, void* wish) : size_(bytes) {
  need_virtual_memory();
  REQUIRE_OK(hipMemAddressReserve(&base_, bytes, 0, wish, 0));
}

unsigned char* Reservation::at(size_t offset) const {
  return static_cast<unsigned char*>(base_) + offset;
}

void Reservation::reset() {
  if (void* const base = std::exchange(base_, nullptr)) {
    EXPECT_OK(hipMemAddressFree(base, size_));
  }
}

namespace {

hipMemGenericAllocationHandle_t create_chunk(size_t bytes, int device) {
  need_virtual_memory();
  const hipMemAllocationProp properties = device_memory(device);
  hipMemGenericAllocationHandle_t handle = nullptr;
  REQUIRE_OK(hipMemCreate(&handle, bytes, &properties, 0));
  return handle;
}

}  // namespace

Chunk::Chunk(size_t bytes, int device) : Holder(create_chunk(bytes, device)) {}

Mapping::Mapping(void* address, size_t bytes, hipMemGenericAllocationHandle_t handle)
    : address_(nullptr), size_(bytes) {
  REQUIRE_OK(hipMemMap(address, bytes, 0, handle, 0));
  address_ = address;
}

void Mapping::reset() {
  if (void* const address = std::exchange(address_, nullptr)) {
    EXPECT_OK(hipMemUnmap(address, size_));
  }
}

MappedMemory::MappedMemory(std::vector<size_t> sizes, hipMemAccessFlags flags,
                           int device)
    : range_(std::accumulate(sizes.begin(), sizes.end(), size_t{0})) {
  int current = 0;
  REQUIRE_OK(hipGetDevice(&current));
  const hipMemAccessDesc access = device_access(flags, device);
  size_t offset = 0;
  for (const size_t size : sizes) {
    mappings_.emplace_back(at(offset), size, Chunk(size, current));
    if (flags != hipMemAccessFlagsProtNone) {
      REQUIRE_OK(hipMemSetAccess(at(offset), size, &access, 1));
    }
    offset += size;
  }
}

namespace {

constexpr const char* kSource = "clr hip_vm.cpp";

constexpr auto kRead = hipMemAccessFlagsProtRead;
constexpr auto kReadWrite = hipMemAccessFlagsProtReadWrite;

constexpr size_t kBytes = 4096;

// Large enough that hipMemGetInfo shows it, whatever else the machine does.
constexpr size_t kLarge = size_t{256} << 20;

// Is a piece of kLarge missing from what was free before?
bool is_taken(size_t free_before) { return free_memory() + kLarge / 2 < free_before; }

// --- granularity ---------------------------------------------------------------------

size_t granularity(hipMemAllocationGranularity_flags option, int device = 0) {
  const hipMemAllocationProp properties = device_memory(device);
  size_t size = 0;
  REQUIRE_OK(hipMemGetAllocationGranularity(&size, &properties, option));
  return size;
}

CASE(virtual_memory, granularity_of_every_device, "clr CHANGELOG 7.11",
     hipMemGetAllocationGranularity) {
  need_virtual_memory();
  for (int device = 0; device < device_count(); ++device) {
    const size_t least = granularity(hipMemAllocationGranularityMinimum, device);
    const size_t advised = granularity(hipMemAllocationGranularityRecommended, device);
    REQUIRE(least > 0);
    EXPECT_EQ(least & (least - 1), size_t{0});
    EXPECT_EQ(kChunk % least, size_t{0});
    if (since(7, 11)) {
      EXPECT(advised > least);
      EXPECT_EQ(advised % least, size_t{0});
    } else {
      EXPECT_EQ(advised, least);
    }
    if (simulated()) EXPECT_EQ(least, size_t{4} << 10);
    if (simulated() && since(7, 11)) EXPECT_EQ(advised, size_t{2} << 20);
  }
}

CASE(virtual_memory, granularity_of_what_does_not_exist,
     "hip-tests virtualMemoryManagement/hipMemGetAllocationGranularity.cc",
     hipMemGetAllocationGranularity) {
  need_virtual_memory();
  const auto ask = [](const hipMemAllocationProp& properties,
                      hipMemAllocationGranularity_flags option =
                          hipMemAllocationGranularityMinimum) {
    size_t size = 0;
    return hipMemGetAllocationGranularity(&size, &properties, option);
  };
  size_t size = 0;
  hipMemAllocationProp properties = device_memory();
  EXPECT_OK(ask(properties));
  EXPECT_ERROR(hipMemGetAllocationGranularity(nullptr, &properties,
                                              hipMemAllocationGranularityMinimum),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemGetAllocationGranularity(&size, nullptr,
                                              hipMemAllocationGranularityMinimum),
               hipErrorInvalidValue);
  for (const unsigned option : {2u, 0xFFu}) {
    EXPECT_ERROR(
        ask(properties, static_cast<hipMemAllocationGranularity_flags>(option)),
        hipErrorInvalidValue);
  }
  properties.type = hipMemAllocationTypeInvalid;
  EXPECT_ERROR(ask(properties), hipErrorInvalidValue);
  properties = device_memory();
  properties.location.type = hipMemLocationTypeInvalid;
  EXPECT_ERROR(ask(properties), hipErrorInvalidValue);
  for (const int device : {-1, device_count()}) {
    EXPECT_ERROR(ask(device_memory(device)), hipErrorInvalidValue);
  }
}

// --- reservations --------------------------------------------------------------------

CASE(virtual_memory, reserved_and_freed,
     "hip-tests virtualMemoryManagement/hipMemAddressReserve.cc, hipMemAddressFree.cc",
     hipMemAddressReserve, hipMemAddressFree) {
  need_virtual_memory();
  void* first = nullptr;
  void* second = nullptr;
  REQUIRE_OK(hipMemAddressReserve(&first, 4 * kChunk, 0, nullptr, 0));
  REQUIRE_OK(hipMemAddressReserve(&second, 4 * kChunk, 0, nullptr, 0));
  const auto distance = static_cast<char*>(second) - static_cast<char*>(first);
  EXPECT(first != nullptr && second != nullptr);
  EXPECT(std::abs(distance) >= static_cast<ptrdiff_t>(4 * kChunk));
  EXPECT_OK(hipMemAddressFree(first, 4 * kChunk));
  EXPECT_OK(hipMemAddressFree(second, 4 * kChunk));
}

CASE(virtual_memory, a_reservation_takes_no_memory, kSource, hipMemAddressReserve,
     hipMemGetInfo) {
  const size_t before = free_memory();
  Reservation range(kLarge);
  EXPECT(!is_taken(before));
}

CASE(virtual_memory, alignments_up_to_a_page_are_kept,
     "hip-tests virtualMemoryManagement/hipMemAddressReserve.cc",
     hipMemAddressReserve) {
  need_virtual_memory();
  for (size_t alignment = 2; alignment <= 4096; alignment *= 2) {
    void* base = nullptr;
    REQUIRE_OK(hipMemAddressReserve(&base, kChunk, alignment, nullptr, 0));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(base) % alignment, uintptr_t{0});
    EXPECT_OK(hipMemAddressFree(base, kChunk));
  }
}

CASE(virtual_memory, a_large_alignment_is_checked_and_not_forwarded, kSource,
     hipMemAddressReserve) {
  constexpr size_t kAlignment = size_t{1} << 30;
  need_virtual_memory();
  const size_t least = granularity(hipMemAllocationGranularityMinimum);
  Reservation shift(least);
  void* base = nullptr;
  REQUIRE_OK(hipMemAddressReserve(&base, least, kAlignment, nullptr, 0));
  if (simulated()) EXPECT(reinterpret_cast<uintptr_t>(base) % kAlignment != 0);
  EXPECT_OK(hipMemAddressFree(base, least));
}

CASE(virtual_memory, reservations_that_are_refused,
     "hip-tests virtualMemoryManagement/hipMemAddressReserve.cc; clr hip_vm.cpp",
     hipMemAddressReserve) {
  need_virtual_memory();
  need_checked_mappings();
  void* base = nullptr;
  const size_t least = granularity(hipMemAllocationGranularityMinimum);
  EXPECT_ERROR(hipMemAddressReserve(nullptr, kChunk, 0, nullptr, 0),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemAddressReserve(&base, 0, 0, nullptr, 0), hipErrorInvalidValue);
  for (const size_t size : {size_t{1}, least - 1, least + 1, kChunk + least / 2}) {
    EXPECT_ERROR(hipMemAddressReserve(&base, size, 0, nullptr, 0),
                 hipErrorInvalidValue);
  }
  for (const size_t alignment : {3, 6, 4095, 4097}) {
    EXPECT_ERROR(hipMemAddressReserve(&base, kChunk, alignment, nullptr, 0),
                 hipErrorInvalidValue);
  }
  for (const unsigned long long flags : {1ull, 2ull, ~0ull}) {
    EXPECT_ERROR(hipMemAddressReserve(&base, kChunk, 0, nullptr, flags),
                 hipErrorInvalidValue);
  }
}

CASE(virtual_memory, more_address_space_than_there_is, kSource, hipMemAddressReserve) {
  need_virtual_memory();
  constexpr size_t kMoreThanAnyAddress = size_t{1} << 62;
  void* base = nullptr;
  EXPECT_ERROR(hipMemAddressReserve(&base, kMoreThanAnyAddress, 0, nullptr, 0),
               hipErrorOutOfMemory);
}

CASE(virtual_memory, freed_address_ranges_that_are_refused,
     "hip-tests virtualMemoryManagement/hipMemAddressFree.cc", hipMemAddressFree) {
  Reservation range(kChunk);
  EXPECT_ERROR(hipMemAddressFree(nullptr, kChunk), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemAddressFree(range.at(0), 0), hipErrorInvalidValue);
}

CASE(virtual_memory, address_ranges_that_nobody_reserved, kSource, hipMemAddressFree) {
  need_virtual_memory();
  need_checked_reservations();
  DeviceMemory memory(kChunk);
  Pages pages(kBytes);
  EXPECT_ERROR(hipMemAddressFree(pages.get(), kBytes), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemAddressFree(memory.get(), kChunk), hipErrorInvalidValue);
  void* base = nullptr;
  REQUIRE_OK(hipMemAddressReserve(&base, kChunk, 0, nullptr, 0));
  EXPECT_OK(hipMemAddressFree(base, kChunk));
  EXPECT_ERROR(hipMemAddressFree(base, kChunk), hipErrorInvalidValue);
}

CASE(virtual_memory, the_size_of_a_freed_range_is_not_looked_at, kSource,
     hipMemAddressFree) {
  need_virtual_memory();
  void* base = nullptr;
  REQUIRE_OK(hipMemAddressReserve(&base, 4 * kChunk, 0, nullptr, 0));
  EXPECT_OK(hipMemAddressFree(base, kChunk));
  need_checked_reservations();
  EXPECT_ERROR(hipMemAddressFree(base, 4 * kChunk), hipErrorInvalidValue);
}

// What HIP does about such a range after the refusal is better not asked for.
CHILD(frees_a_mapped_range) {
  MappedMemory memory;
  EXPECT_ERROR(hipMemAddressFree(memory.get(), memory.size()), hipErrorUnknown);
  if (!simulated()) std::_Exit(0);
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(memory.get(), bytes);
  EXPECT_BYTES(download(memory.get(), kBytes).data(), bytes);
  return 0;
}

CASE(virtual_memory, a_range_with_a_mapping_cannot_be_freed, kSource,
     hipMemAddressFree) {
  need_virtual_memory();
  need_checked_mappings();
  EXPECT_EQ(run_child("frees_a_mapped_range"), 0);
}

CASE(virtual_memory, a_wish_that_is_free_is_met, kSource, hipMemAddressReserve) {
  void* address = nullptr;
  {
    Reservation range(4 * kChunk);
    address = range.at(0);
  }
  Reservation again(4 * kChunk, address);
  if (!simulated() && again.at(0) != address) {
    SKIP("the runtime promises nothing, and chose another address");
  }
  EXPECT_EQ(static_cast<void*>(again.at(0)), address);
}

CASE(virtual_memory, a_wish_that_is_taken_gives_another_address_silently, kSource,
     hipMemAddressReserve) {
  Reservation range(4 * kChunk);
  for (const size_t offset : {size_t{0}, kChunk, 3 * kChunk}) {
    Reservation other(2 * kChunk, range.at(offset));
    EXPECT(other.at(0) != range.at(offset));
    const bool apart = other.at(0) + other.size() <= range.at(0) ||
                       range.at(0) + range.size() <= other.at(0);
    EXPECT(apart);
  }
}

CASE(virtual_memory, wishes_can_be_ignored, kSource, hipMemAddressReserve) {
  if (!simulated()) SKIP("needs the simulator's switch");
  void* address = nullptr;
  {
    Reservation range(kChunk);
    address = range.at(0);
  }
  set_switch("ignore_address_hints", 1);
  {
    Reservation other(kChunk, address);
    EXPECT(other.at(0) != address);
  }
  set_switch("ignore_address_hints", 0);
  Reservation again(kChunk, address);
  EXPECT_EQ(static_cast<void*>(again.at(0)), address);
}

// --- physical memory -----------------------------------------------------------------

CASE(virtual_memory, created_and_released,
     "hip-tests virtualMemoryManagement/hipMemCreate.cc, hipMemRelease.cc",
     hipMemCreate, hipMemRelease) {
  need_virtual_memory();
  const hipMemAllocationProp properties = device_memory();
  const size_t before = free_memory();
  hipMemGenericAllocationHandle_t first = nullptr;
  hipMemGenericAllocationHandle_t second = nullptr;
  REQUIRE_OK(hipMemCreate(&first, kLarge, &properties, 0));
  EXPECT(is_taken(before));
  REQUIRE_OK(hipMemCreate(&second, kChunk, &properties, 0));
  EXPECT(first != nullptr && second != nullptr && first != second);
  EXPECT_OK(hipMemRelease(first));
  EXPECT_OK(hipMemRelease(second));
  EXPECT(!is_taken(before));
}

CASE(virtual_memory, memory_that_cannot_be_created,
     "hip-tests virtualMemoryManagement/hipMemCreate.cc; clr hip_vm.cpp",
     hipMemCreate) {
  need_virtual_memory();
  const auto create = [](const hipMemAllocationProp& properties, size_t bytes = kChunk,
                         unsigned long long flags = 0) {
    hipMemGenericAllocationHandle_t handle = nullptr;
    return hipMemCreate(&handle, bytes, &properties, flags);
  };
  hipMemGenericAllocationHandle_t handle = nullptr;
  hipMemAllocationProp properties = device_memory();
  EXPECT_ERROR(hipMemCreate(nullptr, kChunk, &properties, 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemCreate(&handle, kChunk, nullptr, 0), hipErrorInvalidValue);
  EXPECT_ERROR(create(properties, 0), hipErrorInvalidValue);
  EXPECT_ERROR(create(properties, kChunk, 1), hipErrorInvalidValue);
  EXPECT_ERROR(create(properties, granularity(hipMemAllocationGranularityMinimum) - 1),
               hipErrorInvalidValue);
  for (const auto type : {hipMemAllocationTypeInvalid, hipMemAllocationTypeManaged}) {
    properties.type = type;
    EXPECT_ERROR(create(properties), hipErrorInvalidValue);
  }
  properties = device_memory();
  properties.location.type = hipMemLocationTypeInvalid;
  EXPECT_ERROR(create(properties), hipErrorInvalidValue);
}

CASE(virtual_memory, a_device_that_does_not_exist_is_an_invalid_device,
     "hip-tests "
     "virtualMemoryManagement/hipMemCreate.cc",
     hipMemCreate) {
  need_virtual_memory();
  need_checked_mappings();
  for (const int device : {-1, device_count(), device_count() + 7}) {
    const hipMemAllocationProp properties = device_memory(device);
    hipMemGenericAllocationHandle_t handle = nullptr;
    EXPECT_ERROR(hipMemCreate(&handle, kChunk, &properties, 0), hipErrorInvalidDevice);
  }
}

CASE(virtual_memory, kinds_of_handle, kSource, hipMemCreate, hipMemRelease) {
  need_virtual_memory();
  hipMemAllocationProp properties = device_memory();
  hipMemGenericAllocationHandle_t handle = nullptr;
  for (const auto kind : {hipMemHandleTypeWin32, hipMemHandleTypeWin32Kmt}) {
    properties.requestedHandleTypes = kind;
    EXPECT_ERROR(hipMemCreate(&handle, kChunk, &properties, 0), hipErrorNotSupported);
  }
  need_checked_mappings();
  properties.requestedHandleTypes = hipMemHandleTypePosixFileDescriptor;
  REQUIRE_OK(hipMemCreate(&handle, kChunk, &properties, 0));
  EXPECT_OK(hipMemRelease(handle));
}

CASE(virtual_memory, more_memory_than_there_is, kSource, hipMemCreate) {
  size_t free = 0;
  size_t total = 0;
  REQUIRE_OK(hipMemGetInfo(&free, &total));
  Chunk some(kChunk);
  const hipMemAllocationProp properties = device_memory();
  for (const size_t bytes : {total / kChunk * kChunk, 2 * (total / kChunk * kChunk)}) {
    hipMemGenericAllocationHandle_t handle = nullptr;
    EXPECT_ERROR(hipMemCreate(&handle, bytes, &properties, 0), hipErrorOutOfMemory);
  }
  Chunk works(kChunk);
}

CASE(virtual_memory, memory_is_the_current_devices_whatever_device_is_named, kSource,
     hipMemCreate, hipMemGetAllocationPropertiesFromHandle, hipSetDevice) {
  need_devices(2);
  need_checked_mappings();
  const size_t here = free_memory();
  size_t there = 0;
  {
    CurrentDevice other(1);
    there = free_memory();
  }
  Chunk chunk(kLarge, 1);
  EXPECT(is_taken(here));
  hipMemAllocationProp properties = {};
  EXPECT_OK(hipMemGetAllocationPropertiesFromHandle(&properties, chunk));
  EXPECT_EQ(properties.location.id, 1);
  CurrentDevice other(1);
  EXPECT(!is_taken(there));
  Chunk other_chunk(kLarge, 1);
  EXPECT(is_taken(there));
}

CASE(virtual_memory, handles_tell_what_they_were_asked_for,
     "hip-tests virtualMemoryManagement/hipMemGetAllocationPropertiesFromHandle.cc",
     hipMemGetAllocationPropertiesFromHandle) {
  Chunk chunk(kChunk);
  hipMemAllocationProp properties = {};
  EXPECT_OK(hipMemGetAllocationPropertiesFromHandle(&properties, chunk));
  EXPECT_EQ(properties.type, hipMemAllocationTypePinned);
  EXPECT_EQ(properties.location.type, hipMemLocationTypeDevice);
  EXPECT_EQ(properties.location.id, 0);
  EXPECT_EQ(properties.requestedHandleTypes, hipMemHandleTypeNone);
  EXPECT_ERROR(hipMemGetAllocationPropertiesFromHandle(nullptr, chunk),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemGetAllocationPropertiesFromHandle(&properties, nullptr),
               hipErrorInvalidValue);
}

CASE(virtual_memory, no_handle_is_released, kSource, hipMemRelease) {
  need_virtual_memory();
  EXPECT_ERROR(hipMemRelease(nullptr), hipErrorInvalidValue);
}

CASE(virtual_memory, handles_that_are_gone_are_refused,
     "docs/hipsim.md, Where it is stricter", hipMemRelease, hipMemMap,
     hipMemGetAllocationPropertiesFromHandle) {
  if (!simulated()) SKIP("HIP does not check a handle");
  Reservation range(kChunk);
  Chunk chunk(kChunk);
  hipMemGenericAllocationHandle_t gone = chunk.release();
  EXPECT_OK(hipMemRelease(gone));
  hipMemAllocationProp properties = {};
  EXPECT_ERROR(hipMemRelease(gone), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemMap(range.at(0), kChunk, 0, gone, 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemGetAllocationPropertiesFromHandle(&properties, gone),
               hipErrorInvalidValue);
}

// --- mappings ------------------------------------------------------------------------

CASE(virtual_memory, mapped_memory_holds_bytes,
     "hip-tests virtualMemoryManagement/hipMemMap.cc", hipMemMap, hipMemSetAccess,
     hipMemUnmap) {
  MappedMemory memory;
  const Bytes bytes = random_bytes(memory.size(), 1);
  upload(memory.get(), bytes);
  EXPECT_BYTES(download(memory.get(), memory.size()).data(), bytes);
}

CASE(virtual_memory, mappings_that_are_refused,
     "hip-tests virtualMemoryManagement/hipMemMap.cc; clr hip_vm.cpp", hipMemMap) {
  Reservation range(kChunk);
  Chunk chunk(kChunk);
  EXPECT_ERROR(hipMemMap(nullptr, kChunk, 0, chunk, 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemMap(range.at(0), 0, 0, chunk, 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemMap(range.at(0), kChunk, kBytes, chunk, 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemMap(range.at(0), kChunk, 0, nullptr, 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemMap(range.at(0), kChunk, 0, chunk, 1), hipErrorInvalidValue);
  EXPECT(!is_mapped(range.at(0)));
}

// What a mapping says that could not be made: nothing before 7.2, and from 7.14 on a
// number that the sources do not settle.
void expect_map_failure(hipError_t error) {
  if (!since(7, 2)) {
    EXPECT_OK(error);
  } else if (!since(7, 14)) {
    EXPECT_ERROR(error, hipErrorOutOfMemory);
  } else {
    EXPECT(error != hipSuccess);
  }
}

CASE(virtual_memory, mappings_outside_of_a_reservation_fail_silently_before_7_2,
     kSource, hipMemMap) {
  Reservation range(kChunk);
  Chunk small(kChunk);
  Chunk large(2 * kChunk);
  void* nowhere = nullptr;
  {
    Reservation freed(kChunk);
    nowhere = freed.at(0);
  }
  expect_map_failure(hipMemMap(nowhere, kChunk, 0, small, 0));
  EXPECT(!is_mapped(nowhere));
  expect_map_failure(hipMemMap(range.at(0), 2 * kChunk, 0, large, 0));
  EXPECT(!is_mapped(range.at(0)));
  Mapping works(range.at(0), kChunk, small);
}

CASE(virtual_memory, mappings_over_a_mapping_fail_silently_before_7_2, kSource,
     hipMemMap) {
  need_checked_mappings();
  MappedMemory memory({kChunk, kChunk, kChunk, kChunk});
  const Bytes bytes = random_bytes(kChunk, 1);
  upload(memory.get(), bytes);
  Chunk other(2 * kChunk);
  for (const size_t offset : {size_t{0}, kChunk, 2 * kChunk}) {
    expect_map_failure(hipMemMap(memory.at(offset), 2 * kChunk, 0, other, 0));
  }
  memory.mapping(1).reset();
  expect_map_failure(hipMemMap(memory.at(kChunk), 2 * kChunk, 0, other, 0));
  EXPECT(!is_mapped(memory.at(kChunk)));
  EXPECT_BYTES(download(memory.get(), kChunk).data(), bytes);
}

CASE(virtual_memory, a_mapping_has_the_size_of_its_handle,
     "docs/hipsim.md, Where it is stricter", hipMemMap) {
  if (!simulated()) SKIP("HIP maps the first bytes of a larger handle");
  Reservation range(4 * kChunk);
  Chunk chunk(2 * kChunk);
  for (const size_t size : {kChunk, 2 * kChunk - kBytes, 3 * kChunk}) {
    EXPECT_ERROR(hipMemMap(range.at(0), size, 0, chunk, 0), hipErrorInvalidValue);
  }
  EXPECT(!is_mapped(range.at(0)));
}

CASE(virtual_memory, one_handle_at_two_addresses_is_the_same_memory,
     "hip-tests virtualMemoryManagement/hipMemMap.cc", hipMemMap) {
  Reservation range(4 * kChunk);
  Chunk chunk(kChunk);
  Mapping first(range.at(0), kChunk, chunk);
  Mapping second(range.at(2 * kChunk), kChunk, chunk);
  REQUIRE_OK(set_access(range.at(0), kChunk, kReadWrite));
  REQUIRE_OK(set_access(range.at(2 * kChunk), kChunk, kReadWrite));
  const Bytes bytes = random_bytes(kChunk, 1);
  upload(range.at(0), bytes);
  EXPECT_BYTES(download(range.at(2 * kChunk), kChunk).data(), bytes);
  const Bytes others = random_bytes(kChunk, 2);
  upload(range.at(2 * kChunk), others);
  EXPECT_BYTES(download(range.at(0), kChunk).data(), others);
  first.reset();
  EXPECT_BYTES(download(range.at(2 * kChunk), kChunk).data(), others);
}

CASE(virtual_memory, bytes_move_with_their_handle,
     "hip-tests virtualMemoryManagement/hipMemMap.cc", hipMemMap, hipMemUnmap) {
  Chunk chunk(kChunk);
  const Bytes bytes = random_bytes(kChunk, 1);
  for (int round = 0; round < 3; ++round) {
    Reservation range(kChunk);
    Mapping mapping(range.at(0), kChunk, chunk);
    REQUIRE_OK(set_access(range.at(0), kChunk, kReadWrite));
    if (round == 0) upload(range.at(0), bytes);
    EXPECT_BYTES(download(range.at(0), kChunk).data(), bytes);
  }
}

CASE(virtual_memory, a_released_handle_leaves_the_memory_to_its_mapping, kSource,
     hipMemRelease, hipMemMap) {
  const size_t before = free_memory();
  Reservation range(kLarge);
  Chunk chunk(kLarge);
  Mapping mapping(range.at(0), kLarge, chunk);
  REQUIRE_OK(set_access(range.at(0), kLarge, kReadWrite));
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(range.at(kLarge - kBytes), bytes);
  chunk.reset();
  EXPECT(is_taken(before));
  EXPECT_BYTES(download(range.at(kLarge - kBytes), kBytes).data(), bytes);
}

CASE(virtual_memory, an_unmapped_handle_keeps_the_memory, kSource, hipMemUnmap,
     hipMemRelease) {
  const size_t before = free_memory();
  Reservation range(kLarge);
  Chunk chunk(kLarge);
  {
    Mapping mapping(range.at(0), kLarge, chunk);
  }
  EXPECT(is_taken(before));
}

CASE(virtual_memory, memory_comes_back_at_unmap_or_with_the_range,
     "legacy-rocm-build#6021; RS#4363", hipMemUnmap, hipMemAddressFree, hipMemGetInfo) {
  if (!simulated() && !since(7, 2)) SKIP("not known before 7.2");
  const size_t before = free_memory();
  Reservation range(kLarge);
  {
    Chunk chunk(kLarge);
    Mapping mapping(range.at(0), kLarge, chunk);
    chunk.reset();
    EXPECT(is_taken(before));
  }
  const bool is_kept = since(7, 2) && !since(7, 13);
  EXPECT_EQ(is_taken(before), is_kept);
  range.reset();
  EXPECT(!is_taken(before));
}

CASE(virtual_memory, memory_piles_up_in_a_range_that_is_never_freed,
     "legacy-rocm-build#6021; RS#4363", hipMemUnmap, hipMemCreate) {
  if (!simulated()) SKIP("needs a small device");
  const bool is_kept = since(7, 2) && !since(7, 13);
  const size_t half = free_memory() / 2 / kChunk * kChunk + kChunk;
  Reservation range(half);
  {
    Chunk chunk(half);
    Mapping mapping(range.at(0), half, chunk);
  }
  const hipMemAllocationProp properties = device_memory();
  hipMemGenericAllocationHandle_t handle = nullptr;
  EXPECT_ERROR(hipMemCreate(&handle, half, &properties, 0),
               is_kept ? hipErrorOutOfMemory : hipSuccess);
  if (handle != nullptr) EXPECT_OK(hipMemRelease(handle));
  range.reset();
  Chunk works(half);
}

// The remedy where unmapping gives nothing back: free the range as well, and have it
// again.
CASE(virtual_memory, a_range_is_freed_and_had_again_at_its_address,
     "legacy-rocm-build#6021", hipMemAddressFree, hipMemAddressReserve) {
  const size_t before = free_memory();
  void* address = nullptr;
  {
    MappedMemory memory({kLarge});
    address = memory.get();
    EXPECT(is_taken(before));
  }
  EXPECT(!is_taken(before));
  Reservation range(kLarge, address);
  if (!simulated() && range.at(0) != address) {
    SKIP("the runtime promises nothing, and chose another address");
  }
  REQUIRE_EQ(static_cast<void*>(range.at(0)), address);
  Chunk chunk(kLarge);
  Mapping mapping(address, kLarge, chunk);
  REQUIRE_OK(set_access(address, kLarge, kReadWrite));
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(range.at(kLarge - kBytes), bytes);
  EXPECT_BYTES(download(range.at(kLarge - kBytes), kBytes).data(), bytes);
}

CASE(virtual_memory, unmapped_ranges_that_are_refused,
     "hip-tests virtualMemoryManagement/hipMemUnmap.cc", hipMemUnmap) {
  MappedMemory memory;
  EXPECT_ERROR(hipMemUnmap(nullptr, kChunk), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemUnmap(memory.get(), 0), hipErrorInvalidValue);
  EXPECT(is_mapped(memory.get()));
  need_checked_mappings();
  EXPECT_ERROR(hipMemUnmap(memory.get(), kChunk - 1), hipErrorInvalidValue);
  EXPECT(is_mapped(memory.get()));
  memory.unmap();
  EXPECT_ERROR(hipMemUnmap(memory.get(), kChunk), hipErrorInvalidValue);
}

CASE(virtual_memory, only_whole_mappings_are_unmapped, kSource, hipMemUnmap) {
  need_checked_mappings();
  MappedMemory memory({kChunk, 2 * kChunk, kChunk});
  const size_t wrong[][2] = {{0, kChunk / 2}, {0, 2 * kChunk}, {0, 5 * kChunk},
                             {1, kChunk},     {1, 4 * kChunk}, {3, 2 * kChunk}};
  for (const auto& [first, size] : wrong) {
    EXPECT_ERROR(hipMemUnmap(memory.at(first * kChunk), size), hipErrorInvalidValue);
  }
  for (const size_t chunk : {0, 1, 2, 3}) EXPECT(is_mapped(memory.at(chunk * kChunk)));
}

CASE(virtual_memory, several_mappings_are_unmapped_at_once, kSource, hipMemUnmap) {
  need_checked_mappings();
  MappedMemory memory({kChunk, 2 * kChunk, kChunk});
  memory.mapping(1).forget();
  memory.mapping(2).forget();
  EXPECT_OK(hipMemUnmap(memory.at(kChunk), 3 * kChunk));
  EXPECT(is_mapped(memory.at(0)));
  for (const size_t chunk : {1, 2, 3}) EXPECT(!is_mapped(memory.at(chunk * kChunk)));
}

CASE(virtual_memory, nothing_is_unmapped_around_a_hole, kSource, hipMemUnmap) {
  need_checked_mappings();
  MappedMemory memory({kChunk, kChunk, kChunk});
  memory.mapping(1).reset();
  EXPECT_ERROR(hipMemUnmap(memory.get(), 3 * kChunk), hipErrorInvalidValue);
  EXPECT(is_mapped(memory.at(0)));
  EXPECT(is_mapped(memory.at(2 * kChunk)));
}

CASE(virtual_memory, ranges_begin_where_a_mapping_does,
     "docs/hipsim.md, Where it is stricter", hipMemUnmap, hipMemSetAccess,
     hipMemAddressFree) {
  if (!simulated()) SKIP("HIP finds mappings and reservations by any address in them");
  MappedMemory memory({2 * kChunk});
  EXPECT_ERROR(hipMemUnmap(memory.at(kChunk), 2 * kChunk), hipErrorInvalidValue);
  EXPECT_ERROR(set_access(memory.at(kChunk), 2 * kChunk, kRead), hipErrorInvalidValue);
  memory.unmap();
  EXPECT_ERROR(hipMemAddressFree(memory.at(kChunk), 2 * kChunk), hipErrorInvalidValue);
}

// --- unmapping under work ------------------------------------------------------------

CASE(virtual_memory, unmap_waits_for_blocking_streams, kSource, hipMemUnmap,
     hipMemsetAsync) {
  MappedMemory memory;
  Stream stream(hipStreamDefault);
  const Busy busy(stream);
  EXPECT_OK(hipMemsetAsync(memory.get(), 1, kBytes, stream));
  memory.unmap();
  EXPECT_OK(hipStreamQuery(stream));
  EXPECT_EQ(stat("memory_faults"), uint64_t{0});
}

constexpr int kFaulted = 70;

CHILD(unmaps_under_work) {
  MappedMemory memory;
  Stream stream;
  const Busy busy(stream);
  REQUIRE_OK(hipMemsetAsync(memory.get(), 1, kBytes, stream));
  memory.unmap();
  const hipError_t error = hipStreamSynchronize(stream);
  if (error == hipSuccess) return stat("memory_faults") == 0 ? 0 : 1;
  void* pointer = nullptr;
  const bool every_call_fails = error == hipErrorIllegalAddress &&
                                hipMalloc(&pointer, 64) == error &&
                                hipStreamQuery(stream) == error;
  std::_Exit(every_call_fails && stat("memory_faults") == 1 ? kFaulted : 1);
}

CASE(virtual_memory, unmap_waits_for_other_streams_from_7_14_on, "RS#6982",
     hipDeviceGetAttribute) {
  if (!simulated()) SKIP("a fault would end a real process");
  need_virtual_memory();
  EXPECT_EQ(run_child("unmaps_under_work"), since(7, 14) ? 0 : kFaulted);
}

CASE(virtual_memory, unmap_waits_for_every_device_with_access_from_7_14_on, "RS#6982",
     hipMemUnmap, hipMemSetAccess, hipSetDevice) {
  if (!simulated()) SKIP("how long work takes is not known");
  for (const bool has_access : {true, false}) {
    MappedMemory memory;
    if (has_access) REQUIRE_OK(set_access(memory.get(), kChunk, kRead, 1));
    CurrentDevice other(1);
    Stream stream;
    const Busy busy(stream);
    CurrentDevice back(0);
    memory.unmap();
    EXPECT_ERROR(hipStreamQuery(stream),
                 has_access && since(7, 14) ? hipSuccess : hipErrorNotReady);
    EXPECT_OK(hipStreamSynchronize(stream));
  }
}

// --- handles of mapped memory --------------------------------------------------------

CASE(virtual_memory, the_handle_of_a_mapping_is_the_one_that_was_mapped,
     "hip-tests virtualMemoryManagement/hipMemRetainAllocationHandle.cc; clr CHANGELOG "
     "7.12",
     hipMemRetainAllocationHandle, hipMemRelease) {
  Reservation range(2 * kChunk);
  Chunk chunk(kChunk);
  Mapping mapping(range.at(0), kChunk, chunk);
  hipMemGenericAllocationHandle_t retained = nullptr;
  REQUIRE_OK(hipMemRetainAllocationHandle(&retained, range.at(0)));
  EXPECT_EQ(retained, chunk.get());
  // Before 7.12 it is no reference of its own.
  if (!since(7, 12)) return;
  chunk.reset();
  {
    Mapping second(range.at(kChunk), kChunk, retained);
    REQUIRE_OK(set_access(range.at(0), kChunk, kReadWrite));
    REQUIRE_OK(set_access(range.at(kChunk), kChunk, kReadWrite));
    const Bytes bytes = random_bytes(kBytes, 1);
    upload(range.at(0), bytes);
    EXPECT_BYTES(download(range.at(kChunk), kBytes).data(), bytes);
  }
  EXPECT_OK(hipMemRelease(retained));
}

CASE(virtual_memory, retaining_takes_a_reference_from_7_12_on, "clr CHANGELOG 7.12",
     hipMemRetainAllocationHandle, hipMemRelease) {
  if (!simulated()) SKIP("HIP counts references and does not check them");
  Reservation range(kChunk);
  Chunk chunk(kChunk);
  Mapping mapping(range.at(0), kChunk, chunk);
  hipMemGenericAllocationHandle_t retained = nullptr;
  REQUIRE_OK(hipMemRetainAllocationHandle(&retained, range.at(0)));
  chunk.reset();
  EXPECT_ERROR(hipMemRelease(retained),
               since(7, 12) ? hipSuccess : hipErrorInvalidValue);
  EXPECT_ERROR(hipMemRelease(retained), hipErrorInvalidValue);
}

CASE(virtual_memory, what_is_not_mapped_has_no_handle,
     "hip-tests virtualMemoryManagement/hipMemRetainAllocationHandle.cc",
     hipMemRetainAllocationHandle) {
  MappedMemory memory;
  Reservation empty(kChunk);
  hipMemGenericAllocationHandle_t handle = nullptr;
  EXPECT_ERROR(hipMemRetainAllocationHandle(nullptr, memory.get()),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemRetainAllocationHandle(&handle, nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemRetainAllocationHandle(&handle, empty.at(0)),
               hipErrorInvalidValue);
  memory.unmap();
  EXPECT_ERROR(hipMemRetainAllocationHandle(&handle, memory.get()),
               hipErrorInvalidValue);
}

CASE(virtual_memory, allocated_memory_has_no_handle, "clr CHANGELOG 7.14",
     hipMemRetainAllocationHandle) {
  if (!simulated() && !since(7, 14)) SKIP("ends the process before 7.14");
  DeviceMemory memory(kChunk);
  hipMemGenericAllocationHandle_t handle = nullptr;
  EXPECT_ERROR(hipMemRetainAllocationHandle(&handle, memory.get()),
               hipErrorInvalidValue);
}

// --- accounts ------------------------------------------------------------------------

CASE(virtual_memory, what_is_live_is_counted, "hipsim_control.h", hipMemAddressReserve,
     hipMemCreate, hipMemMap) {
  if (!simulated()) SKIP("needs the simulator");
  const std::string names[] = {"reservations", "reserved_bytes", "handles",
                               "handle_bytes", "mappings",       "mapped_bytes"};
  std::map<std::string, uint64_t> before;
  for (const std::string& name : names) before[name] = stat(name);
  const auto expect_live = [&](uint64_t reservations, uint64_t handles,
                               uint64_t mappings) {
    const uint64_t expected[] = {reservations, reservations * 4 * kChunk,
                                 handles,      handles * kChunk,
                                 mappings,     mappings * kChunk};
    for (size_t i = 0; i < std::size(names); ++i) {
      EXPECT_EQ(stat(names[i]) - before[names[i]], expected[i]);
    }
  };
  expect_live(0, 0, 0);
  {
    Reservation range(4 * kChunk);
    expect_live(1, 0, 0);
    Chunk chunk(kChunk);
    expect_live(1, 1, 0);
    Mapping first(range.at(0), kChunk, chunk);
    Mapping second(range.at(kChunk), kChunk, chunk);
    expect_live(1, 1, 2);
    chunk.reset();
    expect_live(1, 0, 2);
    first.reset();
    expect_live(1, 0, 1);
  }
  expect_live(0, 0, 0);
}

}  // namespace
}  // namespace contract
