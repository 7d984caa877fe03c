// SPDX-License-Identifier: Apache-2.0
#include "engine/address_space.h"

#include <sys/mman.h>
#include <unistd.h>

#include <limits>

namespace hipsim {
namespace {

constexpr size_t kPage = 4096;
constexpr size_t kWindowPerVram = 4;

size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

void* as_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

bool map_fresh_memory(uintptr_t address, size_t bytes) {
  const int file = memfd_create("hipsim", MFD_CLOEXEC);
  if (file < 0) return false;
  void* mapped = MAP_FAILED;
  if (ftruncate(file, static_cast<off_t>(bytes)) == 0) {
    mapped = mmap(as_pointer(address), bytes, PROT_READ | PROT_WRITE,
                  MAP_SHARED | MAP_FIXED, file, 0);
  }
  close(file);
  if (mapped == MAP_FAILED) return false;
  madvise(mapped, bytes, MADV_DONTFORK);
  return true;
}

void* reserve(void* hint, size_t bytes, int flags) {
  return mmap(hint, bytes, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

}  // namespace

AddressSpace::AddressSpace(int devices, size_t vram_bytes)
    : vram_bytes_(vram_bytes / kPage * kPage),
      free_bytes_(devices, vram_bytes_),
      window_bytes_(kWindowPerVram * devices * vram_bytes_) {}

AddressSpace::~AddressSpace() {
  if (window_ != 0) munmap(as_pointer(window_), window_bytes_);
  for (const auto& [base, range] : host_ranges_) {
    if (range.owned) munmap(as_pointer(base), whole_pages(range.bytes));
  }
}

bool AddressSpace::reserve_window() {
  if (window_ != 0) return true;
  void* window = reserve(nullptr, window_bytes_, 0);
  if (window == MAP_FAILED) return false;
  window_ = next_ = reinterpret_cast<uintptr_t>(window);
  return true;
}

std::optional<uintptr_t> AddressSpace::find_gap(size_t bytes) const {
  const uintptr_t end = window_ + window_bytes_;
  for (const uintptr_t start : {next_, window_}) {
    uintptr_t candidate = start;
    for (auto it = device_ranges_.lower_bound(start);; ++it) {
      const uintptr_t limit = it == device_ranges_.end() ? end : it->first;
      if (limit - candidate >= bytes) return candidate;
      if (it == device_ranges_.end()) break;
      candidate = it->first + whole_pages(it->second.bytes);
    }
  }
  return std::nullopt;
}

Error AddressSpace::allocate(int device, size_t bytes, void** pointer) {
  if (bytes > free_bytes_[device]) return Error::kOutOfMemory;
  const size_t charged = whole_pages(bytes);
  if (charged > free_bytes_[device] || !reserve_window()) return Error::kOutOfMemory;
  const std::optional<uintptr_t> base = find_gap(charged);
  if (!base || !map_fresh_memory(*base, charged)) return Error::kOutOfMemory;

  device_ranges_[*base] = {bytes, device, true, false};
  next_ = *base + charged;
  free_bytes_[device] -= charged;
  usage_.device_allocations += 1;
  usage_.device_bytes += bytes;
  *pointer = as_pointer(*base);
  return Error::kSuccess;
}

Error AddressSpace::allocate_host(size_t bytes, void** pointer) {
  if (bytes > std::numeric_limits<size_t>::max() - kPage) return Error::kOutOfMemory;
  void* mapped = mmap(nullptr, whole_pages(bytes), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped == MAP_FAILED) return Error::kOutOfMemory;
  host_ranges_[reinterpret_cast<uintptr_t>(mapped)] = {bytes, -1, true, false};
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

Error AddressSpace::register_host(void* pointer, size_t bytes) {
  const auto begin = reinterpret_cast<uintptr_t>(pointer);
  if (begin == 0 || bytes == 0 || begin + bytes < begin) return Error::kInvalidValue;
  if (window_ != 0 && begin < window_ + window_bytes_ && begin + bytes > window_) {
    return Error::kInvalidValue;
  }
  if (touches_host_range(begin, bytes)) return Error::kHostMemoryAlreadyRegistered;
  host_ranges_[begin] = {bytes, -1, false, false};
  usage_.registered_ranges += 1;
  usage_.registered_bytes += bytes;
  return Error::kSuccess;
}

std::optional<Place> AddressSpace::forget_device(const void* pointer) {
  const auto it = device_ranges_.find(reinterpret_cast<uintptr_t>(pointer));
  if (it == device_ranges_.end() || it->second.dying) return std::nullopt;
  const Place place{MemoryKind::kDevice, it->second.device, it->first,
                    it->second.bytes};
  it->second.dying = true;
  usage_.device_allocations -= 1;
  usage_.device_bytes -= place.bytes;
  return place;
}

std::optional<Place> AddressSpace::forget_host_allocation(const void* pointer) {
  const auto it = host_ranges_.find(reinterpret_cast<uintptr_t>(pointer));
  if (it == host_ranges_.end() || !it->second.owned) return std::nullopt;
  const Place place{MemoryKind::kRegisteredHost, -1, it->first, it->second.bytes};
  host_ranges_.erase(it);
  usage_.host_allocations -= 1;
  usage_.host_allocation_bytes -= place.bytes;
  return place;
}

bool AddressSpace::unregister_host(const void* pointer) {
  const auto it = host_ranges_.find(reinterpret_cast<uintptr_t>(pointer));
  if (it == host_ranges_.end() || it->second.owned) return false;
  usage_.registered_ranges -= 1;
  usage_.registered_bytes -= it->second.bytes;
  host_ranges_.erase(it);
  return true;
}

void AddressSpace::unmap(const Place& place) {
  const size_t charged = whole_pages(place.bytes);
  if (place.kind == MemoryKind::kDevice) {
    reserve(as_pointer(place.base), charged, MAP_FIXED);
    device_ranges_.erase(place.base);
    free_bytes_[place.device] += charged;
  } else {
    munmap(as_pointer(place.base), charged);
  }
}

AddressSpace::Ranges::const_iterator AddressSpace::holder(const Ranges& ranges,
                                                          uintptr_t address) {
  auto it = ranges.upper_bound(address);
  if (it == ranges.begin()) return ranges.end();
  --it;
  return address - it->first < it->second.bytes ? it : ranges.end();
}

Error AddressSpace::locate(const void* pointer, size_t bytes, Place* place) const {
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  const bool in_window = window_ != 0 && address - window_ < window_bytes_;
  const Ranges& ranges = in_window ? device_ranges_ : host_ranges_;
  const auto it = holder(ranges, address);
  if (it == ranges.end() || it->second.dying) {
    *place = {};
    return in_window ? Error::kInvalidValue : Error::kSuccess;
  }
  const auto& [base, range] = *it;
  *place = {in_window ? MemoryKind::kDevice : MemoryKind::kRegisteredHost, range.device,
            base, range.bytes};
  return bytes <= range.bytes - (address - base) ? Error::kSuccess
                                                 : Error::kInvalidValue;
}

}  // namespace hipsim
