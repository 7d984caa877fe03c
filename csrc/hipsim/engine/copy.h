// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

#include "engine/address_space.h"

namespace hipsim {

// What moves the bytes: a copy engine, a kernel on the compute units, or the CPU.
enum class CopyEngine { kSdma, kBlit, kHost };
constexpr int kCopyEngines = 3;

enum class Direction { kHostToDevice, kDeviceToHost, kDeviceToDevice, kHostToHost };
constexpr int kDirections = 4;

// Whose the host's side of a copy over the link is: nobody's that the runtime knows,
// memory that was registered, or memory that the runtime has allocated.
enum class HostMemory { kPageable, kRegistered, kAllocated };
constexpr int kHostMemories = 3;

// The largest distance of rows that devices of both vendors tell.
constexpr size_t kMaxPitch = 0x7FFFFFFF;

// How this process's runtime chooses an engine.
struct EngineRule {
  // GPU_FORCE_BLIT_COPY_SIZE, in bytes: a copy of at most this size is a kernel.
  size_t blit_bytes = 16 * 1024;

  // HSA_ENABLE_SDMA.
  bool sdma = true;

  // The release's Profile::max_row_copies.
  size_t max_row_copies = 0;
};

// `width` bytes in each of `height` rows in each of `depth` slices.
struct Shape {
  size_t width;
  size_t height = 1;
  size_t depth = 1;

  size_t bytes() const { return width * height * depth; }
};

// The distances in bytes from row to row and from slice to slice.
struct Pitch {
  size_t row = 0;
  size_t slice = 0;
};

// One end of a copy: the address as the caller named it, and where that is.
struct Side {
  uintptr_t address = 0;
  Pitch pitch = {};
  Place place = {};

  // The ends of virtual memory that it may run over.
  Crossing crossing = Crossing::kMappings;

  // How far the copy reaches, from its first byte past its last.
  size_t extent(const Shape& shape) const {
    return (shape.depth - 1) * pitch.slice + (shape.height - 1) * pitch.row +
           shape.width;
  }
};

struct Copy {
  Side to;
  Side from;
  Shape shape;
  bool pitched;
  Direction direction;
  CopyEngine engine;

  // One side is pageable host memory, so the bytes take a detour through a
  // page-locked buffer of the runtime, and the caller waits.
  bool staged;

  // That a copy engine takes for a pitched copy.
  size_t packets = 0;

  // What the source held when the call was made, if it was read then.
  std::shared_ptr<const std::vector<unsigned char>> taken = nullptr;
};

Direction direction_of(const Place& destination, const Place& source);

// None where both sides are on a device or on the host.
std::optional<HostMemory> host_memory_of(const Copy& copy);

// Where a box begins, x bytes into row y of slice z; none where that, or the distance
// of slices, cannot be counted. `rows` is the number of rows from slice to slice.
std::optional<uintptr_t> box_address(uintptr_t base, size_t pitch, size_t rows,
                                     size_t x, size_t y, size_t z);

// Note [Packets of pitched copies]
//
// From ROCr's amd_blit_sdma.cpp of 2025 and clr's rocblit.cpp of 2024. A rectangle
// packet before gfx12 counts in elements of 1 to 16 bytes: the largest that both
// sides' distances and the width are multiples of. A distance of rows has 19 bits, one
// of slices 28; a packet holds 2^14 elements of a row, 2^14 rows and 2^11 slices, and
// what is larger takes several. A plane with a distance of rows above 2^19 bytes, on
// either side, goes as slices of one row.
//
// Addresses are multiples of 4. Where a distance is not, clr queues a linear copy for
// each row, newer releases only up to a number of rows. Packets of gfx12 have wider
// fields and are not modelled.

// How many packets a copy engine takes for the shape; 0 where none hold it, so that the
// runtime falls back to its kernel.
size_t count_packets(const Side& to, const Side& from, const Shape& shape);

// `prefer_sdma` is the caller's word, which passes over the size, but makes no packet
// hold what none does. Copies between two addresses of one device, and between two
// devices, are accounted to the kernel.
Copy plan_copy(const EngineRule& rule, const Side& to, const Side& from,
               const Shape& shape, bool pitched, bool prefer_sdma);

// Reads the source now, so that it may change while the copy is still queued.
void take_source(Copy* copy);

// Moves the bytes; with `corrupt_loads` what goes from host to device is inverted.
// False, and the copy incomplete, once `abandoned` is set.
bool perform(const Copy& copy, bool corrupt_loads, const std::atomic<bool>& abandoned);

}  // namespace hipsim
