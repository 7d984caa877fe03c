// SPDX-License-Identifier: Apache-2.0
//
// Note [Ranges]
// A range is a piece of address space of one device, with physical memory behind all of
// it or none. It says what it ought to be (its goal) beside what it is: what each chunk
// still holds, and whether the addresses are its own. An operation that fails sets the
// goal to what can be had, and settle() works towards it as far as the driver lets it.
// What the driver refuses stays on record, chunk by chunk, and settle() may be called
// again at any time; so a failing roll-back loses nothing, and no handle is released
// twice. Nothing here waits for work on the device, and a range is one thread's at a
// time; what never changes of it may be read by any.
#pragma once

#include <cstddef>
#include <memory>
#include <vector>

#include "gpu/driver_api.h"

namespace memory {

using gpu::Address;
using gpu::DeviceScope;
using gpu::Driver;
using gpu::Failure;
using gpu::Handle;

class VmmRange {
 public:
  // Reserves `bytes` of address space, in chunks of `chunk_bytes` of which the last may
  // be smaller; both are multiples of `granularity`. Throws gpu::DriverError.
  VmmRange(Driver& driver, DeviceScope& scope, int device, size_t bytes,
           size_t chunk_bytes, size_t granularity);
  ~VmmRange();
  VmmRange(const VmmRange&) = delete;
  VmmRange& operator=(const VmmRange&) = delete;

  int device() const { return device_; }
  size_t bytes() const { return bytes_; }
  Address address() const { return address_; }
  size_t chunk_count() const { return chunks_.size(); }
  size_t chunk_bytes(size_t index) const { return chunks_[index].bytes; }
  // Where the handle of a chunk lies; 0 while it has no physical memory.
  const Handle* slot(size_t index) const { return &handles_[index]; }
  // Of the chunk that has the byte at `offset`: the offset at which it ends.
  size_t chunk_end(size_t offset) const;

  bool is_mapped() const { return goal_ == Goal::kMapped; }
  // Something is left of what it ought not to be.
  bool is_unsettled() const;
  // Nothing is left of it at all.
  bool is_gone() const { return goal_ == Goal::kFreed && !is_unsettled(); }

  // New physical memory for a range that has none. All of it, or as before.
  Failure map(DeviceScope& scope);

  // Takes the mappings away and keeps the memory. All of them, or as before; a range
  // whose mappings cannot be put back has lost its memory.
  Failure unmap(DeviceScope& scope);

  // Puts back what unmap() took away. Where that fails the memory is lost.
  Failure remap(DeviceScope& scope);

  // After unmap(): gives the memory back and keeps the addresses.
  Failure release(DeviceScope& scope);

  // Gives everything back.
  Failure free(DeviceScope& scope);

  // Tries again what has failed; the first error of this time.
  Failure settle(DeviceScope& scope);

 private:
  enum class Goal { kMapped, kReserved, kFreed };

  struct Chunk {
    size_t offset;
    size_t bytes;
    bool is_mapped;
  };

  Failure failure(gpu::Status status, size_t bytes) const;
  Failure reserve(Address wish);
  Failure reserve_again();
  Failure give_back_address();
  Failure map_chunks();
  bool has_mappings() const;
  bool has_handles() const;

  Driver& driver_;
  const int device_;
  const size_t bytes_;
  const size_t granularity_;
  Address address_ = 0;
  bool is_reserved_ = false;
  // The addresses hold on to memory that was unmapped, and must be freed for it.
  bool is_stale_ = false;
  Goal goal_ = Goal::kReserved;
  std::vector<Chunk> chunks_;
  std::unique_ptr<Handle[]> handles_;
  // Reservations that came in the wrong place and could not be freed.
  std::vector<Address> strays_;
};

}  // namespace memory
