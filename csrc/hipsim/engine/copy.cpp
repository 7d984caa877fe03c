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
// In elements, but for the distance in bytes from which on rows go as slices.
constexpr size_t kMostRowPitch = size_t{1} << 19;
constexpr size_t kMostSlicePitch = size_t{1} << 28;
constexpr size_t kMostRowElements = size_t{1} << 14;
constexpr size_t kMostRows = size_t{1} << 14;
constexpr size_t kMostSlices = size_t{1} << 11;

size_t pieces(size_t count, size_t most) { return (count - 1) / most + 1; }

// All numbers of `bits` are multiples of it.
size_t largest_element(size_t bits) {
  size_t element = kMostElement;
  while (bits % element != 0) element /= 2;
  return element;
}

// The packets beside each other that hold a row. All but the last count in `element`,
// which the row is so long to need; the last one covers what is left exactly.
size_t count_strips(size_t width, size_t element) {
  size_t strips = 0;
  for (; width > 0; ++strips) {
    const size_t exact = largest_element(element | width);
    if (width / exact <= kMostRowElements) return strips + 1;
    width -= std::min(width / element, kMostRowElements) * element;
  }
  return strips;
}

// Has no packet for rectangles such a distance?
bool goes_row_by_row(const Side& to, const Side& from) {
  return (to.pitch.row | from.pitch.row | to.pitch.slice | from.pitch.slice) %
             kAlignment !=
         0;
}

// A copy that goes by its packets has some to go by.
CopyEngine choose_engine(const EngineRule& rule, const Copy& copy, size_t packets,
                         bool by_packets, bool prefer_sdma) {
  if (!rule.sdma || (by_packets && packets == 0)) return CopyEngine::kBlit;
  if (prefer_sdma) return CopyEngine::kSdma;
  const bool crosses_the_link = copy.direction == Direction::kHostToDevice ||
                                copy.direction == Direction::kDeviceToHost;
  const bool too_many_rows = rule.max_row_copies != 0 &&
                             packets > rule.max_row_copies &&
                             goes_row_by_row(copy.to, copy.from);
  const bool suits = by_packets ? !too_many_rows : copy.shape.bytes() > rule.blit_bytes;
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

size_t count_packets(const Side& to, const Side& from, const Shape& shape) {
  if (goes_row_by_row(to, from)) return shape.height * shape.depth;
  if ((to.address | from.address) % kAlignment != 0) return 0;

  const bool as_slices =
      shape.depth == 1 && std::max(to.pitch.row, from.pitch.row) > kMostRowPitch;
  const auto distances = [&](const Side& side) {
    return as_slices ? Pitch{0, side.pitch.row} : side.pitch;
  };
  const Pitch to_pitch = distances(to);
  const Pitch from_pitch = distances(from);
  const size_t rows = as_slices ? 1 : shape.height;
  const size_t slices = as_slices ? shape.height : shape.depth;

  size_t bits = to_pitch.row | from_pitch.row;
  if (slices > 1) bits |= to_pitch.slice | from_pitch.slice;
  const size_t element = largest_element(bits);
  const size_t smallest = largest_element(element | shape.width);
  const size_t row_pitch = std::max(to_pitch.row, from_pitch.row);
  const size_t slice_pitch = std::max(to_pitch.slice, from_pitch.slice);
  if (row_pitch / smallest > kMostRowPitch ||
      (slices > 1 && slice_pitch / smallest > kMostSlicePitch)) {
    return 0;
  }
  return pieces(slices, kMostSlices) * pieces(rows, kMostRows) *
         count_strips(shape.width, element);
}

Direction direction_of(const Place& destination, const Place& source) {
  if (source.on_device()) {
    return destination.on_device() ? Direction::kDeviceToDevice
                                   : Direction::kDeviceToHost;
  }
  return destination.on_device() ? Direction::kHostToDevice : Direction::kHostToHost;
}

std::optional<HostMemory> host_memory_of(const Copy& copy) {
  if (copy.direction != Direction::kHostToDevice &&
      copy.direction != Direction::kDeviceToHost) {
    return std::nullopt;
  }
  const bool loads = copy.direction == Direction::kHostToDevice;
  const Place& place = loads ? copy.from.place : copy.to.place;
  if (place.kind == MemoryKind::kPageableHost) return HostMemory::kPageable;
  return place.allocated ? HostMemory::kAllocated : HostMemory::kRegistered;
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
  if (pageable_to && pageable_from) return copy;
  const bool by_packets = pitched && !copy.staged;
  const size_t packets = by_packets ? count_packets(to, from, shape) : 0;
  copy.engine = choose_engine(rule, copy, packets, by_packets, prefer_sdma);
  if (copy.engine == CopyEngine::kSdma) copy.packets = packets;
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
