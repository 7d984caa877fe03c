// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <map>
#include <memory>
#include <vector>

#include "gpu/driver_api.h"
#include "memory/host_arena.h"
#include "memory/vmm_range.h"

namespace memory {

// A part of a mapped range, and where it is or goes on the host.
struct Span {
  const VmmRange* range;
  size_t offset;
  size_t bytes;
  char* host;  // not used by fills
};

enum class Direction { kOut, kIn };

// What one call of the driver may copy.
struct Part {
  int device;
  gpu::Address address;
  char* host;
  size_t bytes;
  HostArena* arena;  // null: host memory that is in none
  size_t piece;      // of the arena
};

// The arenas of a transfer, each in use until the end of this object.
class ArenasInUse {
 public:
  // What of the spans one call may move, in their order and with no part longer than
  // `most` bytes. No part crosses the end of a piece, nor of a mapping where the driver
  // does not copy across; neighbours are one part where it does.
  std::vector<Part> split(const gpu::Driver& driver, const std::vector<Span>& spans,
                          size_t most);

  // The arenas live on, and are in use no more.
  void end() { uses_.clear(); }

 private:
  // In the order in which everybody uses several, since whoever releases waits.
  std::map<HostArena*, std::shared_ptr<HostArena>> arenas_;
  std::vector<HostArena::Use> uses_;
};

// `split` of what has no host memory.
std::vector<Part> split_fills(const gpu::Driver& driver,
                              const std::vector<Span>& spans);

}  // namespace memory
