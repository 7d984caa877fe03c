// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>

namespace memory {

// What others may know of a transfer while it runs.
struct Progress {
  std::atomic<bool> started = false;  // and Python's lock let go of, where there is one
  std::atomic<size_t> done = 0;       // bytes that are copied; fills do not count
};

}  // namespace memory
