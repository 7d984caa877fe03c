// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <vector>

#include "engine/address_space.h"

namespace hipsim {

// What moves the bytes: a copy engine, a kernel on the compute units, or the CPU.
enum class CopyEngine { kSdma, kBlit, kHost };
constexpr int kCopyEngines = 3;

enum class Direction { kHostToDevice, kDeviceToHost, kDeviceToDevice, kHostToHost };
constexpr int kDirections = 4;

// How this process's runtime chooses an engine.
struct EngineRule {
  // GPU_FORCE_BLIT_COPY_SIZE, in bytes: a copy of at most this size is a kernel.
  size_t blit_bytes = 16 * 1024;

  // HSA_ENABLE_SDMA.
  bool sdma = true;
};

struct Copy {
  void* destination;
  const void* source;
  size_t bytes;
  Direction direction;
  CopyEngine engine;

  // One side is pageable host memory, so the bytes take a detour through a
  // page-locked buffer of the runtime, and the caller waits.
  bool staged;
};

Direction direction_of(const Place& destination, const Place& source);

// `prefer_sdma` is the caller's word, which passes over the size. Copies between two
// addresses of one device, and between two devices, are accounted to the kernel.
Copy plan_copy(const EngineRule& rule, void* destination, const Place& to,
               const void* source, const Place& from, size_t bytes, bool prefer_sdma);

// Moves the bytes; with `corrupt_loads` what goes from host to device is inverted.
// Returns how many of the copies were made before `abandoned` was set.
size_t perform(const std::vector<Copy>& copies, bool corrupt_loads,
               const std::atomic<bool>& abandoned);

}  // namespace hipsim
