// SPDX-License-Identifier: Apache-2.0
//
// Note [Staging]
// Memory that the driver has not registered is copied at less than a third of the
// link's rate (16 GB/s out and 8 in, of 55, on an H200), since the driver takes it
// through buffers of its own, one after the other, in the calling thread. So what goes
// to and from such pieces of an arena is taken through buffers of ours: a few slots
// that the driver has allocated, and a thread for each of them, which copies a slot's
// worth on a stream, waits, and moves it by memcpy. While one moves, others copy. All
// that is locked at any time are the slots, and a machine that locks little has smaller
// ones. They end at 64 KiB, of which the copy takes a microsecond and the wait for it
// several: where not even one of these is had, the driver copies by itself.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "gpu/driver_api.h"
#include "memory/copy_parts.h"
#include "memory/device_stream.h"
#include "memory/progress.h"

namespace memory {

// Copies of one device that take the detour, from its beginning on. Ends when none is
// under way any more, and without what had not been begun.
class Staging {
 public:
  static constexpr size_t kSlotBytes = size_t{16} << 20;
  static constexpr size_t kSmallestSlot = size_t{64} << 10;  // unless all is smaller
  static constexpr size_t kSlots = 8;

  // The scope is that of the thread in which this begins and ends. Throws DriverError.
  Staging(gpu::Driver& driver, gpu::DeviceScope& scope, Direction direction, int device,
          std::vector<Part> parts, Progress* progress);
  ~Staging();
  Staging(const Staging&) = delete;
  Staging& operator=(const Staging&) = delete;

  // The driver had no memory for a single slot, and nothing will be copied.
  bool is_refused() const { return slots_.empty(); }
  const std::vector<Part>& parts() const { return parts_; }

  // Waits until everything is copied. Throws what a copy has met with first.
  void finish();

 private:
  class Slot;

  void make_slots();
  void work(Slot& slot, gpu::DeviceScope& scope);
  bool take(size_t most, Part* part);
  void copy(Slot& slot, gpu::DeviceScope& scope, const Part& part);
  void join();

  gpu::Driver& driver_;
  gpu::DeviceScope& scope_;
  const Direction direction_;
  const int device_;
  const std::vector<Part> parts_;
  Progress* const progress_;
  std::vector<std::unique_ptr<Slot>> slots_;

  std::mutex mutex_;  // of what follows
  size_t next_ = 0;   // of the parts
  size_t taken_ = 0;  // bytes of it
  bool is_over_ = false;
  gpu::Failure failure_;

  std::vector<std::thread> threads_;
};

}  // namespace memory
