// SPDX-License-Identifier: Apache-2.0
#include "engine/virtual_memory.h"

#include <sys/mman.h>

#include <algorithm>
#include <iterator>
#include <new>
#include <utility>

namespace hipsim {
namespace {

constexpr Handle kHandleStep = 16;

bool allows(Access access, bool write) {
  return access == Access::kReadWrite || (access == Access::kRead && !write);
}

}  // namespace

Error VirtualMemory::reserve(size_t bytes, size_t alignment, uintptr_t wish,
                             uintptr_t* address) {
  std::map<uintptr_t, Reservation> made;
  made[0].bytes = bytes;
  const std::optional<uintptr_t> found = window_.take(bytes, alignment, wish);
  if (!found) return Error::kOutOfMemory;
  auto node = made.extract(0);
  node.key() = *found;
  reservations_.insert(std::move(node));
  usage_.reservations += 1;
  usage_.reserved_bytes += bytes;
  *address = *found;
  return Error::kSuccess;
}

Error VirtualMemory::free_addresses(uintptr_t address) {
  const auto it = reservations_.find(address);
  if (it == reservations_.end()) return Error::kInvalidValue;
  if (!it->second.mappings.empty()) return Error::kUnknown;
  usage_.reservations -= 1;
  usage_.reserved_bytes -= it->second.bytes;
  reservations_.erase(it);
  window_.give_back(address);
  return Error::kSuccess;
}

size_t VirtualMemory::reserved_bytes(uintptr_t address) const {
  const auto it = reservations_.find(address);
  return it == reservations_.end() ? 0 : it->second.bytes;
}

Handle VirtualMemory::add_handle(PhysicalRef memory) {
  const Handle handle = next_handle_ += kHandleStep;
  const size_t bytes = memory->bytes;
  handles_[handle] = {std::move(memory), 1};
  usage_.handles += 1;
  usage_.handle_bytes += bytes;
  return handle;
}

Error VirtualMemory::release_handle(Handle handle) {
  const auto it = handles_.find(handle);
  if (it == handles_.end()) return Error::kInvalidValue;
  if (--it->second.count == 0) {
    usage_.handles -= 1;
    usage_.handle_bytes -= it->second.memory->bytes;
    handles_.erase(it);
  }
  return Error::kSuccess;
}

Error VirtualMemory::retain_handle(uintptr_t address, bool add_reference,
                                   Handle* handle) {
  const std::optional<Found> found = find(address);
  if (!found) return Error::kInvalidValue;
  for (auto& [name, references] : handles_) {
    if (references.memory != found->mapping->memory) continue;
    if (add_reference) references.count += 1;
    *handle = name;
    return Error::kSuccess;
  }
  if (!add_reference) return Error::kInvalidValue;
  *handle = add_handle(found->mapping->memory);
  return Error::kSuccess;
}

PhysicalRef VirtualMemory::memory_of(Handle handle) const {
  const auto it = handles_.find(handle);
  return it == handles_.end() ? nullptr : it->second.memory;
}

Error VirtualMemory::map(uintptr_t address, size_t bytes, Handle handle) {
  const PhysicalRef memory = memory_of(handle);
  const auto holder = reservation_at(address);
  if (!memory || bytes != memory->bytes || address % kPage != 0 ||
      holder == reservations_.end() ||
      bytes > holder->second.bytes - (address - holder->first)) {
    return Error::kInvalidValue;
  }
  Mappings& mappings = holder->second.mappings;
  const auto after = mappings.lower_bound(address);
  const bool hits_next = after != mappings.end() && after->first - address < bytes;
  if (hits_next || find(address)) return Error::kInvalidValue;
  mappings[address] = {bytes, memory, {}};
  if (!window_.map(address, *memory, PROT_NONE)) {
    mappings.erase(address);
    return Error::kOutOfMemory;
  }
  usage_.mappings += 1;
  usage_.mapped_bytes += bytes;
  return Error::kSuccess;
}

Error VirtualMemory::unmap(uintptr_t address, size_t bytes, bool hold) {
  const auto holder = reservation_at(address);
  if (holder == reservations_.end()) return Error::kInvalidValue;
  const auto range = whole(holder->second, address, bytes);
  if (!range) return Error::kInvalidValue;
  std::vector<PhysicalRef>& held = holder->second.held;
  const size_t held_before = held.size();
  try {
    for (auto it = range->first; hold && it != range->second; ++it) {
      held.push_back(it->second.memory);
    }
  } catch (const std::bad_alloc&) {
    held.resize(held_before);
    return Error::kOutOfMemory;
  }
  for (auto it = range->first; it != range->second; ++it) {
    window_.unmap(it->first, it->second.bytes);
    usage_.mappings -= 1;
    usage_.mapped_bytes -= it->second.bytes;
  }
  holder->second.mappings.erase(range->first, range->second);
  return Error::kSuccess;
}

Error VirtualMemory::set_access(uintptr_t address, size_t bytes,
                                const std::vector<AccessGrant>& grants) {
  const auto holder = reservation_at(address);
  if (holder == reservations_.end()) return Error::kInvalidValue;
  const auto range = whole(holder->second, address, bytes);
  if (!range) return Error::kInvalidValue;
  for (auto it = range->first; it != range->second; ++it) {
    for (const AccessGrant& grant : grants) {
      it->second.access[grant.device] = grant.access;
    }
    if (!window_.protect(it->first, it->second.bytes, host_protection(it->second))) {
      return Error::kOutOfMemory;
    }
  }
  return Error::kSuccess;
}

int VirtualMemory::host_protection(const Mapping& mapping) const {
  const auto opens = [&](bool write) {
    return std::any_of(
        mapping.access.begin(), mapping.access.end(), [&](const auto& each) {
          const auto& [device, access] = each;
          return (device == kHostLocation || host_may_access_) && allows(access, write);
        });
  };
  return (opens(false) ? PROT_READ : PROT_NONE) |
         (opens(true) ? PROT_WRITE : PROT_NONE);
}

std::optional<Access> VirtualMemory::access_of(uintptr_t address, int device) const {
  const std::optional<Found> found = find(address);
  if (!found) return std::nullopt;
  const auto it = found->mapping->access.find(device);
  return it == found->mapping->access.end() ? Access::kNone : it->second;
}

std::optional<VirtualMemory::Found> VirtualMemory::find(uintptr_t address) const {
  const auto holder = reservation_at(address);
  if (holder == reservations_.end()) return std::nullopt;
  auto it = holder->second.mappings.upper_bound(address);
  if (it == holder->second.mappings.begin()) return std::nullopt;
  --it;
  if (address - it->first >= it->second.bytes) return std::nullopt;
  return Found{it->first, &it->second};
}

template <typename Visit>
bool VirtualMemory::each_mapping(uintptr_t address, size_t bytes, Crossing crossing,
                                 Visit visit) const {
  const auto holder = reservation_at(address);
  for (size_t done = 0; done < bytes;) {
    if (done > 0 && crossing == Crossing::kNothing) return false;
    const std::optional<Found> found = find(address + done);
    if (!found) return false;
    const bool left = reservation_at(address + done) != holder;
    if (left && crossing != Crossing::kReservations) return false;
    if (!visit(*found->mapping)) return false;
    done = found->base + found->mapping->bytes - address;
  }
  return true;
}

bool VirtualMemory::covers(uintptr_t address, size_t bytes, Crossing crossing) const {
  return each_mapping(address, bytes, crossing, [](const Mapping&) { return true; });
}

bool VirtualMemory::permits(uintptr_t address, size_t bytes, int device, bool write,
                            Crossing crossing) const {
  return each_mapping(address, bytes, crossing, [&](const Mapping& mapping) {
    const auto it = mapping.access.find(device);
    return it != mapping.access.end() && allows(it->second, write);
  });
}

std::set<int> VirtualMemory::users(uintptr_t address, size_t bytes) const {
  std::set<int> devices;
  each_mapping(address, bytes, Crossing::kMappings, [&](const Mapping& mapping) {
    devices.insert(mapping.memory->device);
    for (const auto& [device, access] : mapping.access) {
      if (device != kHostLocation && access != Access::kNone) devices.insert(device);
    }
    return true;
  });
  return devices;
}

VirtualMemory::Reservations::iterator VirtualMemory::reservation_at(uintptr_t address) {
  auto it = reservations_.upper_bound(address);
  if (it == reservations_.begin()) return reservations_.end();
  --it;
  return address - it->first < it->second.bytes ? it : reservations_.end();
}

VirtualMemory::Reservations::const_iterator VirtualMemory::reservation_at(
    uintptr_t address) const {
  return const_cast<VirtualMemory*>(this)->reservation_at(address);
}

std::optional<
    std::pair<VirtualMemory::Mappings::iterator, VirtualMemory::Mappings::iterator>>
VirtualMemory::whole(Reservation& reservation, uintptr_t address, size_t bytes) {
  Mappings& mappings = reservation.mappings;
  const auto first = mappings.find(address);
  auto it = first;
  size_t covered = 0;
  while (covered < bytes && it != mappings.end() && it->first == address + covered) {
    covered += it->second.bytes;
    ++it;
  }
  if (first == mappings.end() || covered != bytes) return std::nullopt;
  return std::make_pair(first, it);
}

}  // namespace hipsim
