// SPDX-License-Identifier: Apache-2.0
#include "engine/copy.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

namespace hipsim {
namespace {

constexpr size_t kAlignment = 4;
constexpr size_t kMostElement = 16;
constexpr int kRowPitchBits = 19;
constexpr int kSlicePitchBits = 28;
constexpr int kSliceBits = 11;

bool fits_bits(size_t value, int bits) { return value >> bits == 0; }

// All distances that count for the shape, in one number.
size_t distances_of(const Side& side, const Shape& shape) {
  return (shape.height > 1 ? side.pitch.row : 0) |
         (shape.depth > 1 ? side.pitch.slice : 0);
}

// The largest unit that addresses, distances and the width are multiples of.
size_t element_of(const Side& to, const Side& from, const Shape& shape) {
  const size_t all = to.address | from.address | distances_of(to, shape) |
                     distances_of(from, shape) | shape.width;
  size_t element = kMostElement;
  while (all % element != 0) element /= 2;
  return element;
}

bool is_aligned(const Side& side, const Shape& shape) {
  return (side.address | distances_of(side, shape)) % kAlignment == 0;
}

CopyEngine choose_engine(const EngineRule& rule, const Copy& copy, bool prefer_sdma) {
  if (!rule.sdma) return CopyEngine::kBlit;
  if (prefer_sdma) return CopyEngine::kSdma;
  const bool crosses_the_link = copy.direction == Direction::kHostToDevice ||
                                copy.direction == Direction::kDeviceToHost;
  const bool suits = copy.pitched && !copy.staged
                         ? fits_packet(copy.to, copy.from, copy.shape)
                         : copy.shape.bytes() > rule.blit_bytes;
  return crosses_the_link && suits ? CopyEngine::kSdma : CopyEngine::kBlit;
}

}  // namespace

std::optional<uintptr_t> box_address(uintptr_t base, size_t pitch, size_t rows,
                                     size_t x, size_t y, size_t z) {
  size_t slice = 0;
  size_t to_slice = 0;
  size_t to_row = 0;
  uintptr_t address = 0;
  const bool wraps = __builtin_mul_overflow(pitch, rows, &slice) ||
                     __builtin_mul_overflow(z, slice, &to_slice) ||
                     __builtin_mul_overflow(y, pitch, &to_row) ||
                     __builtin_add_overflow(base, to_slice, &address) ||
                     __builtin_add_overflow(address, to_row, &address) ||
                     __builtin_add_overflow(address, x, &address);
  if (wraps) return std::nullopt;
  return address;
}

bool fits_packet(const Side& to, const Side& from, const Shape& shape) {
  if (!is_aligned(to, shape) || !is_aligned(from, shape)) return false;
  const size_t element = element_of(to, from, shape);
  const auto fits = [&](const Side& side) {
    const bool rows_fit = fits_bits(side.pitch.row / element, kRowPitchBits);
    // A plane whose rows are too far apart goes as slices of one row.
    if (shape.depth == 1) {
      return shape.height == 1 || rows_fit ||
             (fits_bits(side.pitch.row / element, kSlicePitchBits) &&
              fits_bits(shape.height, kSliceBits));
    }
    return rows_fit && fits_bits(side.pitch.slice / element, kSlicePitchBits) &&
           fits_bits(shape.depth, kSliceBits);
  };
  return fits(to) && fits(from);
}

Direction direction_of(const Place& destination, const Place& source) {
  if (source.on_device()) {
    return destination.on_device() ? Direction::kDeviceToDevice
                                   : Direction::kDeviceToHost;
  }
  return destination.on_device() ? Direction::kHostToDevice : Direction::kHostToHost;
}

Copy plan_copy(const EngineRule& rule, const Side& to, const Side& from,
               const Shape& shape, bool pitched, bool prefer_sdma) {
  const bool pageable_to = to.place.kind == MemoryKind::kPageableHost;
  const bool pageable_from = from.place.kind == MemoryKind::kPageableHost;
  Copy copy{to,
            from,
            shape,
            pitched,
            direction_of(to.place, from.place),
            CopyEngine::kHost,
            pageable_to != pageable_from};
  if (!pageable_to || !pageable_from) {
    copy.engine = choose_engine(rule, copy, prefer_sdma);
  }
  return copy;
}

void take_source(Copy* copy) {
  const Shape& shape = copy->shape;
  auto bytes = std::make_shared<std::vector<unsigned char>>();
  bytes->reserve(shape.bytes());
  for (size_t z = 0; z < shape.depth; ++z) {
    for (size_t y = 0; y < shape.height; ++y) {
      const auto* row = reinterpret_cast<const unsigned char*>(
          copy->from.place.reach + z * copy->from.pitch.slice +
          y * copy->from.pitch.row);
      bytes->insert(bytes->end(), row, row + shape.width);
    }
  }
  copy->from.pitch = {shape.width, shape.width * shape.height};
  copy->from.place.reach = reinterpret_cast<uintptr_t>(bytes->data());
  copy->taken = std::move(bytes);
}

bool perform(const Copy& copy, bool corrupt_loads, const std::atomic<bool>& abandoned) {
  const bool invert = corrupt_loads && copy.direction == Direction::kHostToDevice;
  for (size_t z = 0; z < copy.shape.depth; ++z) {
    for (size_t y = 0; y < copy.shape.height; ++y) {
      if (abandoned) return false;
      const auto row = [&](const Side& side) {
        return reinterpret_cast<unsigned char*>(
            side.place.reach + z * side.pitch.slice + y * side.pitch.row);
      };
      unsigned char* destination = row(copy.to);
      const unsigned char* source = row(copy.from);
      if (invert) {
        std::transform(source, source + copy.shape.width, destination,
                       std::bit_not<>());
      } else {
        std::memmove(destination, source, copy.shape.width);
      }
    }
  }
  return true;
}

}  // namespace hipsim
