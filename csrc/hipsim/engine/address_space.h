// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "engine/error.h"
#include "engine/virtual_memory.h"
#include "engine/vram.h"
#include "engine/window.h"

namespace hipsim {

enum class MemoryKind { kDevice, kVirtual, kRegisteredHost, kPageableHost };

// Where an address lies: in which memory, on which device (-1 for the host's), and
// through which address the simulator reaches the byte. `base` and `bytes` are those
// of the allocation, or of the one mapping of virtual memory.
struct Place {
  MemoryKind kind = MemoryKind::kPageableHost;
  int device = -1;
  uintptr_t base = 0;
  size_t bytes = 0;
  uintptr_t reach = 0;

  // Of the allocation or registration: its address may be another's later.
  uint64_t id = 0;

  // Host memory that the runtime has allocated, and not the caller.
  bool allocated = false;

  bool on_device() const {
    return kind == MemoryKind::kDevice || kind == MemoryKind::kVirtual;
  }
};

struct Usage {
  uint64_t device_allocations = 0;
  uint64_t device_bytes = 0;
  uint64_t registered_ranges = 0;
  uint64_t registered_bytes = 0;
  uint64_t host_allocations = 0;
  uint64_t host_allocation_bytes = 0;
  uint64_t imports = 0;
  uint64_t imported_bytes = 0;
};

// The memory of all devices and what the runtime knows of the host's.
//
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

  // Only whole ranges, and none that touches a range already known. With `aliased` a
  // device knows the range by another address than the host does.
  Error register_host(void* pointer, size_t bytes, bool aliased);

  // A registration of more is kOutOfMemory. Counts for what is made from now on.
  void limit_registrations(std::optional<size_t> bytes) { most_registered_ = bytes; }

  // What would make registrations and host allocations more than this in all is
  // kOutOfMemory. With `by_rlimit` the process's RLIMIT_MEMLOCK of that moment counts
  // too, whoever the process is. Both count for what is made from now on.
  void limit_locked_memory(std::optional<size_t> bytes) { most_locked_ = bytes; }
  void limit_locked_memory_by_rlimit(bool by_rlimit) { by_rlimit_ = by_rlimit; }

  // What a device calls the byte of registered or allocated host memory.
  Error device_pointer(const void* host, void** pointer) const;

  // Memory of another process, as its export describes it; the first `bytes` of it.
  Error import(PhysicalRef memory, size_t bytes, void** pointer);

  // Whether the host may touch allocations and imports of device memory, as through a
  // large BAR. Counts for what is made from now on.
  void let_host_in(bool allowed) { host_may_access_ = allowed; }

  // forget_*: no later look-up finds the range that begins at `pointer`; its memory
  // is there until unmap(). Between the two the owner waits for the work that still
  // uses it.
  std::optional<Place> forget_device(const void* pointer);
  std::optional<Place> forget_host_allocation(const void* pointer);
  std::optional<Place> forget_import(const void* pointer);
  std::optional<Place> forget_registration(const void* pointer);
  void unmap(const Place& place);

  // The memory that holds the first byte; kInvalidValue when [pointer, pointer +
  // bytes) runs past the end of it, or begins in the window but in no memory.
  // Virtual memory may go on over the ends that `crossing` says.
  Error locate(const void* pointer, size_t bytes, Crossing crossing,
               Place* place) const;

  // Does anything of this process, or of its peers, have an address?
  bool is_empty() const { return device_ranges_.empty() && host_ranges_.empty(); }

  // Is what was found there still that? What is forgotten and not unmapped is.
  bool still_holds(const Place& place) const;

  // The memory of an allocation of this process; null for anything else.
  PhysicalRef allocation_memory(const Place& place) const;

  Vram& vram(int device) { return *vrams_[device]; }
  const Vram& vram(int device) const { return *vrams_[device]; }
  VirtualMemory& virtual_memory() { return virtual_memory_; }
  const VirtualMemory& virtual_memory() const { return virtual_memory_; }
  const Usage& usage() const { return usage_; }

 private:
  enum class RangeKind { kAllocation, kImport, kHostAlias };
  struct DeviceRange {
    RangeKind kind;
    size_t bytes;
    uint64_t id;
    PhysicalRef memory;  // of an allocation or an import
    uintptr_t host = 0;  // of an alias
    bool dying = false;  // forgotten, but still mapped: its addresses are not free yet
  };
  struct HostRange {
    size_t bytes;
    uint64_t id;
    bool owned;
    uintptr_t alias;  // 0: the device knows it by the host's address
    bool dying = false;
  };

  Error add_device_range(RangeKind kind, size_t bytes, PhysicalRef memory,
                         void** pointer);
  std::optional<Place> forget_range(RangeKind kind, const void* pointer);
  bool touches_host_range(uintptr_t begin, size_t bytes) const;
  bool may_lock(size_t bytes) const;
  Error locate_device(uintptr_t address, size_t bytes, Crossing crossing,
                      Place* place) const;
  Error locate_host(uintptr_t address, size_t bytes, Place* place) const;

  bool host_may_access_ = true;
  std::optional<size_t> most_registered_;
  std::optional<size_t> most_locked_;
  bool by_rlimit_ = false;

  // Of all in host_ranges_: what is forgotten is locked until it is unmapped.
  size_t locked_bytes_ = 0;
  uint64_t last_id_ = 0;
  Window window_;
  std::vector<std::unique_ptr<Vram>> vrams_;
  VirtualMemory virtual_memory_{window_};
  std::map<uintptr_t, DeviceRange> device_ranges_;
  std::map<uintptr_t, HostRange> host_ranges_;
  Usage usage_;
};

}  // namespace hipsim
