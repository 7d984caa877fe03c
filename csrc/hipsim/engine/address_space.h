// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "engine/error.h"

namespace hipsim {

// Note [Memories kept apart]
//
// All device memory lies in one window of address space that is reserved at first
// use and holds nothing else. An allocation maps a memfd into it; what is free is
// PROT_NONE. So an address alone says which memory it names: inside the window it
// is a device address, valid only within a live allocation; outside it is the
// host's, registered or pageable. The window is larger than all devices together
// and its addresses are handed out in turn, so that a pointer to freed memory stays
// an error for long instead of naming somebody else's allocation.
//
// The mappings are not inherited over fork(), as those of a real device are not.

enum class MemoryKind { kDevice, kRegisteredHost, kPageableHost };

// Where an address lies. `device` is -1 for host memory.
struct Place {
  MemoryKind kind = MemoryKind::kPageableHost;
  int device = -1;
  uintptr_t base = 0;
  size_t bytes = 0;
};

struct Usage {
  uint64_t device_allocations = 0;
  uint64_t device_bytes = 0;
  uint64_t registered_ranges = 0;
  uint64_t registered_bytes = 0;
  uint64_t host_allocations = 0;
  uint64_t host_allocation_bytes = 0;
};

// Not thread-safe: its owner locks.
class AddressSpace {
 public:
  AddressSpace(int devices, size_t vram_bytes);
  AddressSpace(const AddressSpace&) = delete;
  AddressSpace& operator=(const AddressSpace&) = delete;
  ~AddressSpace();

  // kOutOfMemory when the device has less than `bytes`, in whole pages, left.
  Error allocate(int device, size_t bytes, void** pointer);

  // Page-locked host memory.
  Error allocate_host(size_t bytes, void** pointer);

  // Only whole ranges, and none that touches a range already known.
  Error register_host(void* pointer, size_t bytes);

  // forget_*: no later look-up finds the range that begins at `pointer`; its memory
  // is there until unmap(). Between the two the owner waits for the work that still
  // uses it.
  std::optional<Place> forget_device(const void* pointer);
  std::optional<Place> forget_host_allocation(const void* pointer);
  bool unregister_host(const void* pointer);
  void unmap(const Place& place);

  // The memory that holds the first byte; kInvalidValue when [pointer, pointer +
  // bytes) runs past its end, or begins in the window but in no allocation.
  Error locate(const void* pointer, size_t bytes, Place* place) const;

  size_t free_bytes(int device) const { return free_bytes_[device]; }
  size_t vram_bytes() const { return vram_bytes_; }
  const Usage& usage() const { return usage_; }

 private:
  struct Range {
    size_t bytes;
    int device;
    bool owned;
    // Forgotten, but still mapped: its addresses are not free yet.
    bool dying = false;
  };
  using Ranges = std::map<uintptr_t, Range>;

  bool reserve_window();
  std::optional<uintptr_t> find_gap(size_t bytes) const;
  bool touches_host_range(uintptr_t begin, size_t bytes) const;
  static Ranges::const_iterator holder(const Ranges& ranges, uintptr_t address);

  const size_t vram_bytes_;
  std::vector<size_t> free_bytes_;
  size_t window_bytes_;
  uintptr_t window_ = 0;
  uintptr_t next_ = 0;
  Ranges device_ranges_;
  Ranges host_ranges_;
  Usage usage_;
};

}  // namespace hipsim
