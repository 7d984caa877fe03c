// SPDX-License-Identifier: Apache-2.0
#include "memory/copy_parts.h"

#include <algorithm>
#include <utility>

namespace memory {
namespace {

// What of a span one call may reach on the device, from its beginning on.
size_t reach(const gpu::Driver& driver, const Span& span) {
  if (driver.copies_across_mappings()) return span.bytes;
  return std::min(span.bytes, span.range->chunk_end(span.offset) - span.offset);
}

bool are_neighbours(const Part& one, const Part& next) {
  return one.arena != nullptr && one.arena == next.arena && one.piece == next.piece &&
         one.device == next.device && one.address + one.bytes == next.address &&
         one.host + one.bytes == next.host;
}

}  // namespace

std::vector<Part> ArenasInUse::split(const gpu::Driver& driver,
                                     const std::vector<Span>& spans, size_t most) {
  std::vector<Part> parts;
  for (Span left : spans) {
    while (left.bytes > 0) {
      Part part{left.range->device(),
                left.range->address() + left.offset,
                left.host,
                std::min(reach(driver, left), most),
                nullptr,
                0};
      HostArena::Stretch stretch = HostArena::from(left.host);
      part.bytes = std::min(part.bytes, stretch.bytes);
      if (stretch.arena != nullptr) {
        part.arena = stretch.arena.get();
        part.piece = part.arena->piece_at(left.host);
        const char* const end = part.arena->piece_end(part.piece);
        part.bytes = std::min(part.bytes, static_cast<size_t>(end - left.host));
        arenas_.emplace(part.arena, std::move(stretch.arena));
      }
      left.offset += part.bytes;
      left.bytes -= part.bytes;
      left.host += part.bytes;
      if (driver.copies_across_mappings() && !parts.empty() &&
          are_neighbours(parts.back(), part) &&
          parts.back().bytes + part.bytes <= most) {
        parts.back().bytes += part.bytes;
      } else {
        parts.push_back(part);
      }
    }
  }
  for (const auto& [pointer, arena] : arenas_) uses_.emplace_back(arena);
  return parts;
}

std::vector<Part> split_fills(const gpu::Driver& driver,
                              const std::vector<Span>& spans) {
  std::vector<Part> parts;
  for (Span left : spans) {
    while (left.bytes > 0) {
      const size_t bytes = reach(driver, left);
      parts.push_back({left.range->device(), left.range->address() + left.offset,
                       nullptr, bytes, nullptr, 0});
      left.offset += bytes;
      left.bytes -= bytes;
    }
  }
  return parts;
}

}  // namespace memory
