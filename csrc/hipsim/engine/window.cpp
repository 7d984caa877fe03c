// SPDX-License-Identifier: Apache-2.0
#include "engine/window.h"

#include <sys/mman.h>

#include <cstdio>
#include <cstdlib>

namespace hipsim {
namespace {

void* as_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

void* map_nothing(void* where, size_t bytes, int flags) {
  return mmap(where, bytes, PROT_NONE,
              MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

bool map_extent(uintptr_t address, int file, const Extent& extent, int protection) {
  void* mapped = mmap(as_pointer(address), extent.bytes, protection,
                      MAP_SHARED | MAP_FIXED, file, static_cast<off_t>(extent.offset));
  if (mapped == MAP_FAILED) return false;
  madvise(mapped, extent.bytes, MADV_DONTFORK);
  return true;
}

uintptr_t round_up(uintptr_t address, size_t alignment) {
  return (address + alignment - 1) / alignment * alignment;
}

}  // namespace

Window::~Window() {
  if (base_ != 0) munmap(as_pointer(base_), 2 * bytes_);
}

bool Window::reserve() {
  if (base_ != 0) return true;
  void* window = map_nothing(nullptr, 2 * bytes_, 0);
  if (window == MAP_FAILED) return false;
  base_ = next_ = reinterpret_cast<uintptr_t>(window);
  return true;
}

bool Window::is_free(uintptr_t address, size_t bytes) const {
  if (address < base_ || bytes > bytes_ || address - base_ > bytes_ - bytes) {
    return false;
  }
  const auto after = taken_.upper_bound(address);
  if (after != taken_.end() && after->first - address < bytes) return false;
  if (after == taken_.begin()) return true;
  const auto before = std::prev(after);
  return address - before->first >= before->second;
}

std::optional<uintptr_t> Window::take(size_t bytes, size_t alignment, uintptr_t wish) {
  if (bytes > bytes_ || alignment > bytes_ || !reserve()) return std::nullopt;
  bytes = whole_pages(bytes);
  if (wish != 0 && wish % alignment == 0 && is_free(wish, bytes)) {
    taken_[wish] = bytes;
    return wish;
  }
  for (const uintptr_t start : {next_, base_}) {
    uintptr_t candidate = round_up(start, alignment);
    for (auto it = taken_.lower_bound(start);; ++it) {
      if (is_free(candidate, bytes)) {
        taken_[candidate] = bytes;
        next_ = candidate + bytes;
        return candidate;
      }
      if (it == taken_.end()) break;
      candidate = round_up(it->first + it->second, alignment);
    }
  }
  return std::nullopt;
}

void Window::give_back(uintptr_t address) { taken_.erase(address); }

bool Window::map(uintptr_t address, const Physical& memory, int protection) {
  size_t done = 0;
  for (const Extent& extent : memory.extents) {
    if (!map_extent(address + done, memory.file, extent, protection) ||
        !map_extent(reach(address) + done, memory.file, extent,
                    PROT_READ | PROT_WRITE)) {
      unmap(address, memory.bytes);
      return false;
    }
    done += extent.bytes;
  }
  return true;
}

bool Window::protect(uintptr_t address, size_t bytes, int protection) {
  return mprotect(as_pointer(address), bytes, protection) == 0;
}

void Window::unmap(uintptr_t address, size_t bytes) {
  for (const uintptr_t each : {address, reach(address)}) {
    if (map_nothing(as_pointer(each), bytes, MAP_FIXED) != MAP_FAILED) continue;
    // The machine has no room for another mapping. What matters is that nobody reaches
    // the pages, which may soon be somebody else's.
    if (mprotect(as_pointer(each), bytes, PROT_NONE) == 0) continue;
    std::fprintf(stderr, "hipsim: cannot take memory away: see vm.max_map_count\n");
    std::abort();
  }
}

}  // namespace hipsim
