// SPDX-License-Identifier: Apache-2.0
//
// Virtual memory for cases: reservations, chunks and mappings that clean up after
// themselves.
#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "contract.h"

namespace contract {

// A multiple of every granularity that is known.
constexpr size_t kChunk = size_t{2} << 20;

void need_virtual_memory();

// Sources from before 7.2 follow a null pointer where nothing is mapped, and leave
// other arguments unchecked; sources from before 7.12 do so where nothing is reserved.
void need_checked_mappings();
void need_checked_reservations();

// The properties of ordinary memory of a device.
hipMemAllocationProp device_memory(int device = 0);

hipMemAccessDesc device_access(hipMemAccessFlags flags, int device = 0);
hipMemAccessDesc host_access(hipMemAccessFlags flags);

hipError_t set_access(void* address, size_t bytes, hipMemAccessFlags flags,
                      int device = 0);

// What hipMemGetAccess says.
unsigned long long access_at(void* address, int device = 0);
bool is_mapped(void* address);

// Of the current device, as hipMemGetInfo says.
size_t free_memory();

class Reservation : Counted {
 public:
  explicit Reservation(size_t bytes, void* wish = nullptr);
  ~Reservation() { reset(); }

  unsigned char* at(size_t offset) const;
  size_t size() const { return size_; }
  void reset();

 private:
  void* base_ = nullptr;
  size_t size_;
};

// Memory of the current device.
class Chunk : public Holder<hipMemGenericAllocationHandle_t, &hipMemRelease> {
 public:
  Chunk() = default;
  explicit Chunk(size_t bytes, int device = 0);
};

// Without access for anybody.
class Mapping : Counted {
 public:
  Mapping(void* address, size_t bytes, hipMemGenericAllocationHandle_t handle);
  Mapping(Mapping&& other) noexcept
      : address_(std::exchange(other.address_, nullptr)), size_(other.size_) {}
  ~Mapping() { reset(); }

  void reset();

  // The caller unmaps it.
  void forget() { address_ = nullptr; }

 private:
  void* address_;
  size_t size_;
};

// Chunks of the current device one after the other in a reservation, and access for
// one device. Their handles are released.
class MappedMemory {
 public:
  explicit MappedMemory(std::vector<size_t> sizes = {kChunk},
                        hipMemAccessFlags flags = hipMemAccessFlagsProtReadWrite,
                        int device = 0);

  void* get() const { return at(0); }
  unsigned char* at(size_t offset) const { return range_.at(offset); }
  size_t size() const { return range_.size(); }
  Mapping& mapping(size_t index) { return mappings_[index]; }
  void unmap() { mappings_.clear(); }

 private:
  Reservation range_;
  std::vector<Mapping> mappings_;
};

}  // namespace contract
