// SPDX-License-Identifier: Apache-2.0
#include "engine/address_space.h"

#include <sys/mman.h>
#include <sys/resource.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace hipsim {
namespace {

// Room for reservations that are never filled, on devices of any size.
constexpr size_t kLeastWindow = size_t{256} << 30;
constexpr size_t kWindowPerVram = 4;

uintptr_t as_number(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

void* as_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

// Can every page be touched, so that it could be pinned?
bool is_mapped(uintptr_t begin, size_t bytes) {
  const size_t lead = begin % kPage;
  return msync(as_pointer(begin - lead), lead + bytes, MS_ASYNC) == 0;
}

// The range that holds the address.
template <typename Ranges>
auto holder(const Ranges& ranges, uintptr_t address) {
  auto it = ranges.upper_bound(address);
  if (it == ranges.begin()) return ranges.end();
  --it;
  return address - it->first < it->second.bytes ? it : ranges.end();
}

}  // namespace

AddressSpace::AddressSpace(int devices, size_t vram_bytes)
    : window_(std::max(kLeastWindow, kWindowPerVram * devices * vram_bytes)) {
  for (int device = 0; device < devices; ++device) {
    vrams_.push_back(std::make_unique<Vram>(device, vram_bytes));
  }
}

AddressSpace::~AddressSpace() {
  for (const auto& [base, range] : host_ranges_) {
    if (range.owned) munmap(as_pointer(base), whole_pages(range.bytes));
  }
}

Error AddressSpace::allocate(int device, size_t bytes, void** pointer) {
  PhysicalRef memory;
  Error error = vrams_[device]->allocate(bytes, &memory);
  if (error != Error::kSuccess) return error;
  error = add_device_range(RangeKind::kAllocation, bytes, std::move(memory), pointer);
  if (error != Error::kSuccess) return error;
  usage_.device_allocations += 1;
  usage_.device_bytes += bytes;
  return Error::kSuccess;
}

Error AddressSpace::import(PhysicalRef memory, size_t bytes, void** pointer) {
  const Error error =
      add_device_range(RangeKind::kImport, bytes, std::move(memory), pointer);
  if (error != Error::kSuccess) return error;
  usage_.imports += 1;
  usage_.imported_bytes += bytes;
  return Error::kSuccess;
}

Error AddressSpace::add_device_range(RangeKind kind, size_t bytes, PhysicalRef memory,
                                     void** pointer) {
  const std::optional<uintptr_t> base = window_.take(bytes);
  if (!base) return Error::kOutOfMemory;
  const int protection = host_may_access_ ? PROT_READ | PROT_WRITE : PROT_NONE;
  device_ranges_[*base] = {kind, bytes, ++last_id_, memory};
  if (!window_.map(*base, *memory, protection)) {
    device_ranges_.erase(*base);
    window_.give_back(*base);
    return Error::kOutOfMemory;
  }
  *pointer = as_pointer(*base);
  return Error::kSuccess;
}

Error AddressSpace::allocate_host(size_t bytes, void** pointer) {
  if (bytes > std::numeric_limits<size_t>::max() - kPage) return Error::kOutOfMemory;
  if (!may_lock(bytes)) return Error::kOutOfMemory;
  void* mapped = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return Error::kOutOfMemory;
  host_ranges_[as_number(mapped)] = {bytes, ++last_id_, true, 0};
  locked_bytes_ += bytes;
  usage_.host_allocations += 1;
  usage_.host_allocation_bytes += bytes;
  *pointer = mapped;
  return Error::kSuccess;
}

bool AddressSpace::touches_host_range(uintptr_t begin, size_t bytes) const {
  const auto next = host_ranges_.lower_bound(begin);
  return holder(host_ranges_, begin) != host_ranges_.end() ||
         (next != host_ranges_.end() && next->first - begin < bytes);
}

bool AddressSpace::may_lock(size_t bytes) const {
  const auto fits = [&](size_t most) {
    return locked_bytes_ <= most && bytes <= most - locked_bytes_;
  };
  if (most_locked_ && !fits(*most_locked_)) return false;
  rlimit limit{};
  return !by_rlimit_ || getrlimit(RLIMIT_MEMLOCK, &limit) != 0 ||
         limit.rlim_cur == RLIM_INFINITY || fits(limit.rlim_cur);
}

Error AddressSpace::register_host(void* pointer, size_t bytes, bool aliased) {
  const uintptr_t begin = as_number(pointer);
  if (begin == 0 || bytes == 0 || begin + bytes < begin) return Error::kInvalidValue;
  if (window_.touches(begin, bytes)) return Error::kInvalidValue;
  if (touches_host_range(begin, bytes)) return Error::kHostMemoryAlreadyRegistered;
  if (!is_mapped(begin, bytes)) return Error::kInvalidValue;
  if (most_registered_ && bytes > *most_registered_) return Error::kOutOfMemory;
  if (!may_lock(bytes)) return Error::kOutOfMemory;
  const uint64_t id = ++last_id_;
  uintptr_t alias = 0;
  if (aliased) {
    // An alias keeps the offset in the page, as hardware mappings do.
    const size_t lead = begin % kPage;
    const std::optional<uintptr_t> base = window_.take(lead + bytes);
    if (!base) return Error::kOutOfMemory;
    alias = *base + lead;
    DeviceRange range{RangeKind::kHostAlias, bytes, id, nullptr};
    range.host = begin;
    device_ranges_[alias] = std::move(range);
  }
  host_ranges_[begin] = {bytes, id, false, alias};
  locked_bytes_ += bytes;
  usage_.registered_ranges += 1;
  usage_.registered_bytes += bytes;
  return Error::kSuccess;
}

Error AddressSpace::device_pointer(const void* host, void** pointer) const {
  const auto it = holder(host_ranges_, as_number(host));
  if (it == host_ranges_.end() || it->second.dying) return Error::kInvalidValue;
  const uintptr_t base = it->second.alias != 0 ? it->second.alias : it->first;
  *pointer = as_pointer(base + (as_number(host) - it->first));
  return Error::kSuccess;
}

std::optional<Place> AddressSpace::forget_range(RangeKind kind, const void* pointer) {
  const auto it = device_ranges_.find(as_number(pointer));
  if (it == device_ranges_.end() || it->second.kind != kind || it->second.dying) {
    return std::nullopt;
  }
  it->second.dying = true;
  return Place{MemoryKind::kDevice, it->second.memory->device, it->first,
               it->second.bytes, window_.reach(it->first)};
}

std::optional<Place> AddressSpace::forget_device(const void* pointer) {
  const std::optional<Place> place = forget_range(RangeKind::kAllocation, pointer);
  if (place) {
    usage_.device_allocations -= 1;
    usage_.device_bytes -= place->bytes;
  }
  return place;
}

std::optional<Place> AddressSpace::forget_import(const void* pointer) {
  const std::optional<Place> place = forget_range(RangeKind::kImport, pointer);
  if (place) {
    usage_.imports -= 1;
    usage_.imported_bytes -= place->bytes;
  }
  return place;
}

std::optional<Place> AddressSpace::forget_host_allocation(const void* pointer) {
  const auto it = host_ranges_.find(as_number(pointer));
  if (it == host_ranges_.end() || !it->second.owned || it->second.dying) {
    return std::nullopt;
  }
  const Place place{MemoryKind::kRegisteredHost, -1, it->first, it->second.bytes,
                    it->first};
  it->second.dying = true;
  usage_.host_allocations -= 1;
  usage_.host_allocation_bytes -= place.bytes;
  return place;
}

std::optional<Place> AddressSpace::forget_registration(const void* pointer) {
  const auto it = host_ranges_.find(as_number(pointer));
  if (it == host_ranges_.end() || it->second.owned || it->second.dying) {
    return std::nullopt;
  }
  const Place place{MemoryKind::kRegisteredHost, -1, it->first, it->second.bytes,
                    it->first};
  it->second.dying = true;
  if (it->second.alias != 0) device_ranges_.at(it->second.alias).dying = true;
  usage_.registered_ranges -= 1;
  usage_.registered_bytes -= place.bytes;
  return place;
}

void AddressSpace::unmap(const Place& place) {
  if (place.kind == MemoryKind::kDevice) {
    window_.unmap(place.base, whole_pages(place.bytes));
    device_ranges_.erase(place.base);
    window_.give_back(place.base);
    return;
  }
  const auto it = host_ranges_.find(place.base);
  if (it->second.owned) munmap(as_pointer(place.base), whole_pages(place.bytes));
  if (const uintptr_t alias = it->second.alias; alias != 0) {
    device_ranges_.erase(alias);
    window_.give_back(alias / kPage * kPage);
  }
  locked_bytes_ -= it->second.bytes;
  host_ranges_.erase(it);
}

bool AddressSpace::still_holds(const Place& place) const {
  if (place.kind == MemoryKind::kPageableHost) return true;
  const auto device = device_ranges_.find(place.base);
  if (device != device_ranges_.end()) return device->second.id == place.id;
  const auto host = host_ranges_.find(place.base);
  return host != host_ranges_.end() && host->second.id == place.id;
}

Error AddressSpace::locate(const void* pointer, size_t bytes, Crossing crossing,
                           Place* place) const {
  const uintptr_t address = as_number(pointer);
  return window_.touches(address, 1) ? locate_device(address, bytes, crossing, place)
                                     : locate_host(address, bytes, place);
}

Error AddressSpace::locate_host(uintptr_t address, size_t bytes, Place* place) const {
  *place = {};
  place->reach = address;
  const auto it = holder(host_ranges_, address);
  if (it == host_ranges_.end() || it->second.dying) return Error::kSuccess;
  *place = {MemoryKind::kRegisteredHost,
            -1,
            it->first,
            it->second.bytes,
            address,
            it->second.id,
            it->second.owned};
  return bytes <= it->second.bytes - (address - it->first) ? Error::kSuccess
                                                           : Error::kInvalidValue;
}

Error AddressSpace::locate_device(uintptr_t address, size_t bytes, Crossing crossing,
                                  Place* place) const {
  *place = {};
  if (const auto it = holder(device_ranges_, address); it != device_ranges_.end()) {
    const auto& [base, range] = *it;
    if (range.dying) return Error::kInvalidValue;
    const size_t offset = address - base;
    if (range.kind == RangeKind::kHostAlias) {
      *place = {MemoryKind::kRegisteredHost, -1,      base, range.bytes,
                range.host + offset,         range.id};
    } else {
      *place = {MemoryKind::kDevice, range.memory->device,   base,
                range.bytes,         window_.reach(address), range.id};
    }
    return bytes <= range.bytes - offset ? Error::kSuccess : Error::kInvalidValue;
  }
  const std::optional<VirtualMemory::Found> found = virtual_memory_.find(address);
  if (!found) return Error::kInvalidValue;
  *place = {MemoryKind::kVirtual,  found->mapping->memory->device, found->base,
            found->mapping->bytes, window_.reach(address),         0};
  return virtual_memory_.covers(address, bytes, crossing) ? Error::kSuccess
                                                          : Error::kInvalidValue;
}

PhysicalRef AddressSpace::allocation_memory(const Place& place) const {
  const auto it = device_ranges_.find(place.base);
  const bool found = it != device_ranges_.end() &&
                     it->second.kind == RangeKind::kAllocation && !it->second.dying;
  return found ? it->second.memory : nullptr;
}

}  // namespace hipsim
