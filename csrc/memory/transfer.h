// SPDX-License-Identifier: Apache-2.0
//
// Note [Transfers]
// Bulk copies between mapped ranges and host memory. A copy is checked by some runtimes
// against the object that holds its first byte, and whether the chunks of a range are
// one object is not established; so no copy and no fill crosses the end of a chunk, or
// of a piece of host memory that was registered at once.
//
// Everything goes through one non-blocking stream a device. Such a stream has no order
// with what others have queued, least of all with a fill on the legacy stream, so the
// device is waited for first. A transfer is over when its function ends, however it
// ends: host memory or mappings may go afterwards.
#pragma once

#include <cstddef>
#include <vector>

#include "gpu/driver_api.h"
#include "memory/vmm_range.h"

namespace memory {

// A part of a mapped range, and where it is or goes on the host.
struct Span {
  const VmmRange* range;
  size_t offset;
  size_t bytes;
  char* host;  // not used by fills
};

void copy_out(gpu::Driver& driver, const std::vector<Span>& copies);

void copy_in(gpu::Driver& driver, const std::vector<Span>& copies,
             const std::vector<Span>& zeros);

}  // namespace memory
