// SPDX-License-Identifier: Apache-2.0
#include "engine/copy.h"

#include <algorithm>
#include <cstring>
#include <functional>

namespace hipsim {
namespace {

CopyEngine choose_engine(const EngineRule& rule, Direction direction, size_t bytes,
                         bool prefer_sdma) {
  if (!rule.sdma) return CopyEngine::kBlit;
  if (prefer_sdma) return CopyEngine::kSdma;
  const bool crosses_the_link =
      direction == Direction::kHostToDevice || direction == Direction::kDeviceToHost;
  return crosses_the_link && bytes > rule.blit_bytes ? CopyEngine::kSdma
                                                     : CopyEngine::kBlit;
}

}  // namespace

Direction direction_of(const Place& destination, const Place& source) {
  const bool to_device = destination.kind == MemoryKind::kDevice;
  if (source.kind == MemoryKind::kDevice) {
    return to_device ? Direction::kDeviceToDevice : Direction::kDeviceToHost;
  }
  return to_device ? Direction::kHostToDevice : Direction::kHostToHost;
}

Copy plan_copy(const EngineRule& rule, void* destination, const Place& to,
               const void* source, const Place& from, size_t bytes, bool prefer_sdma) {
  const bool pageable_to = to.kind == MemoryKind::kPageableHost;
  const bool pageable_from = from.kind == MemoryKind::kPageableHost;
  const Direction direction = direction_of(to, from);
  const CopyEngine engine = pageable_to && pageable_from
                                ? CopyEngine::kHost
                                : choose_engine(rule, direction, bytes, prefer_sdma);
  return {destination, source,
          bytes,       direction,
          engine,      (pageable_to || pageable_from) && engine != CopyEngine::kHost};
}

size_t perform(const std::vector<Copy>& copies, bool corrupt_loads,
               const std::atomic<bool>& abandoned) {
  size_t made = 0;
  for (const Copy& copy : copies) {
    if (abandoned) break;
    if (corrupt_loads && copy.direction == Direction::kHostToDevice) {
      const auto* source = static_cast<const unsigned char*>(copy.source);
      std::transform(source, source + copy.bytes,
                     static_cast<unsigned char*>(copy.destination), std::bit_not<>());
    } else {
      std::memmove(copy.destination, copy.source, copy.bytes);
    }
    ++made;
  }
  return made;
}

}  // namespace hipsim
