// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "engine/error.h"
#include "engine/vram.h"
#include "engine/window.h"

namespace hipsim {

using Handle = uintptr_t;

// HIP's numbers for them, and CUDA's.
enum class Access : unsigned { kNone = 0, kRead = 1, kReadWrite = 3 };

constexpr int kHostLocation = -1;

// `device` may be kHostLocation.
struct AccessGrant {
  int device;
  Access access;
};

struct VirtualUsage {
  uint64_t reservations = 0;
  uint64_t reserved_bytes = 0;
  uint64_t handles = 0;
  uint64_t handle_bytes = 0;
  uint64_t mappings = 0;
  uint64_t mapped_bytes = 0;
};

// The ends that a range of virtual memory may run over.
enum class Crossing { kNothing, kMappings, kReservations };

// Reservations of address space, handles of physical memory, and mappings of the one
// into the other. Memory lives as long as a handle or a mapping names it.
//
// Not thread-safe: its owner locks, and sees to it that no copy runs in what a call
// takes away.
class VirtualMemory {
 public:
  struct Mapping {
    size_t bytes = 0;
    PhysicalRef memory;
    std::map<int, Access> access;
  };
  struct Found {
    uintptr_t base;
    const Mapping* mapping;
  };

  explicit VirtualMemory(Window& window) : window_(window) {}

  // Whether host access follows from device access, as it must where kernels are host
  // code. Counts for grants from now on.
  void let_host_in(bool allowed) { host_may_access_ = allowed; }

  Error reserve(size_t bytes, size_t alignment, uintptr_t wish, uintptr_t* address);

  // kInvalidValue unless a reservation begins there; kUnknown while a part is mapped.
  // A caller that wants the size to be right asks reserved_bytes().
  Error free_addresses(uintptr_t address);
  size_t reserved_bytes(uintptr_t address) const;

  Handle add_handle(PhysicalRef memory);
  Error release_handle(Handle handle);

  // The handle of the memory that is mapped at the address, with one more reference if
  // that is wanted; without, kInvalidValue when nobody has one.
  Error retain_handle(uintptr_t address, bool add_reference, Handle* handle);
  PhysicalRef memory_of(Handle handle) const;

  Error map(uintptr_t address, size_t bytes, Handle handle);

  // Of whole mappings without a gap. With `hold` their memory is given back when the
  // reservation is freed, and not before.
  Error unmap(uintptr_t address, size_t bytes, bool hold);
  Error set_access(uintptr_t address, size_t bytes,
                   const std::vector<AccessGrant>& grants);
  std::optional<Access> access_of(uintptr_t address, int device) const;

  // The mapping that holds the byte.
  std::optional<Found> find(uintptr_t address) const;

  // The devices whose memory is mapped in the range, and those that may access it.
  std::set<int> users(uintptr_t address, size_t bytes) const;

  // Is every byte mapped, and does the range run over no other ends?
  bool covers(uintptr_t address, size_t bytes,
              Crossing crossing = Crossing::kMappings) const;

  // The same, and the device may read, or write, every byte.
  bool permits(uintptr_t address, size_t bytes, int device, bool write,
               Crossing crossing = Crossing::kMappings) const;

  const VirtualUsage& usage() const { return usage_; }

 private:
  struct Reservation {
    size_t bytes;
    std::map<uintptr_t, Mapping> mappings;
    std::vector<PhysicalRef> held;
  };
  struct References {
    PhysicalRef memory;
    size_t count;
  };
  using Mappings = std::map<uintptr_t, Mapping>;
  using Reservations = std::map<uintptr_t, Reservation>;

  Reservations::iterator reservation_at(uintptr_t address);
  Reservations::const_iterator reservation_at(uintptr_t address) const;

  // False when the range leaves what is mapped or may not go on, or `visit` is.
  template <typename Visit>
  bool each_mapping(uintptr_t address, size_t bytes, Crossing crossing,
                    Visit visit) const;

  // The first mapping and the one past the last, if whole mappings fill the range.
  static std::optional<std::pair<Mappings::iterator, Mappings::iterator>> whole(
      Reservation& reservation, uintptr_t address, size_t bytes);
  int host_protection(const Mapping& mapping) const;

  Window& window_;
  bool host_may_access_ = false;
  Handle next_handle_ = 0x7000'0000;
  Reservations reservations_;
  std::map<Handle, References> handles_;
  VirtualUsage usage_;
};

}  // namespace hipsim
