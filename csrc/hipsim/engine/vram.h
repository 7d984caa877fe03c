// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "engine/error.h"

namespace hipsim {

constexpr size_t kPage = 4096;

inline size_t whole_pages(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// What is in the pages that an allocation gets: zeroes, what their last owner left in
// them, or kPoison in every byte.
enum class StalePages { kClean, kAsLeft, kPoisoned };

// Makes a NaN of every floating-point format.
constexpr unsigned char kPoison = 0xFF;

// A piece of a device's memory: an offset into its file.
struct Extent {
  size_t offset;
  size_t bytes;
};

class Vram;

// Memory that an allocation or a handle owns. It goes back with the last owner, unless
// it is another process's.
struct Physical {
  Physical(int device, size_t bytes) : device(device), bytes(bytes) {}
  Physical(const Physical&) = delete;
  Physical& operator=(const Physical&) = delete;
  ~Physical();

  const int device;
  const size_t bytes;

  // What the caller of a virtual allocation asked for, in the vendor's numbers: the
  // type, the device that it named, the kinds of handle that the memory may be exported
  // as, and whether a network card may reach it.
  unsigned type = 0;
  int location = 0;
  unsigned handle_types = 0;
  bool for_network = false;

  int file = -1;
  std::vector<Extent> extents;
  Vram* owner = nullptr;
};
using PhysicalRef = std::shared_ptr<Physical>;

// Note [Device memory is a file]
//
// The memory of a device is one sparse memfd of its size, and an allocation is a list
// of pieces of it. Out of memory is therefore exact and does not depend on
// fragmentation, pages come back as their last owner left them if that is wanted, and
// another process can map them. The lowest free pages that suit are given first, so
// that what was freed is soon met again.
//
// Not thread-safe: its owner locks.
class Vram {
 public:
  Vram(int device, size_t bytes);
  Vram(const Vram&) = delete;
  Vram& operator=(const Vram&) = delete;
  ~Vram();

  // Whole pages. kOutOfMemory when the device has less left, or the machine.
  Error allocate(size_t bytes, PhysicalRef* memory);

  // Memory of the runtime itself: charged, never mapped.
  bool charge(size_t bytes);
  void refund(size_t bytes) { free_bytes_ += bytes; }

  // Holds for what is allocated from now on; what is freed keeps its bytes from the
  // first time that they are wanted.
  void set_stale_pages(StalePages stale);

  // For a forked child, to which the memory does not belong: it gets its own at its
  // first allocation.
  void forget_file();

  size_t bytes() const { return bytes_; }
  size_t free_bytes() const { return free_bytes_; }

 private:
  friend struct Physical;

  bool open_file();
  std::vector<Extent> choose(size_t bytes) const;
  void take(const std::vector<Extent>& extents);
  void give_back(const std::vector<Extent>& extents);
  void wipe(const Extent& extent);
  bool poison(const Extent& extent);

  const int device_;
  const size_t bytes_;
  size_t free_bytes_;
  int file_ = -1;
  StalePages stale_ = StalePages::kClean;
  std::map<size_t, size_t> free_;
};

}  // namespace hipsim
