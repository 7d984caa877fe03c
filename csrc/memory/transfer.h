// SPDX-License-Identifier: Apache-2.0
//
// Note [Transfers]
// Bulk copies between mapped ranges and host memory, at the rate of the link. The
// devices are waited for first: the streams here have no order with what others have
// queued, least of all with a fill on the legacy stream. Then copies are queued on two
// streams a device in turn.
//
// A copy out goes into pieces of an arena (Note [Host arenas]) that may not be ready.
// Threads prepare them in the order of the copies, and each copy is queued as soon as
// its piece is ready; the first sleep takes little longer than the preparation alone. A
// piece that is ready and not registered is staged (Note [Staging]). Memory that is in
// no arena is copied as it is.
//
// A copy is checked by some runtimes against the object that holds its first byte, and
// whether the chunks of a range are one object is not established for HIP; so no copy
// and no fill crosses the end of a chunk there, and none on any driver that of a piece,
// which was registered by itself. With CUDA, neighbours on both sides are one copy.
//
// The streams that copy never have more than a window of bytes queued, and the waits
// that this takes are what progress is counted by. Both are full at about the same
// moment. While the one is waited for, the other still has its last copies to do, and
// the first gets its next before the other is waited for in turn. Fills have a stream
// of their own: no byte of them crosses the link.
//
// A transfer is over when its function ends, however it ends: no thread is at work, and
// host memory or mappings may go afterwards. The first error is thrown then, and the
// pieces that are ready stay so for the next try.
#pragma once

#include <cstddef>
#include <vector>

#include "gpu/driver_api.h"
#include "memory/copy_parts.h"
#include "memory/progress.h"

namespace memory {

struct TransferOptions {
  static constexpr size_t kWindow = size_t{1} << 30;

  Progress* progress = nullptr;
  size_t threads = 0;  // that prepare; 0: default_threads()
  size_t window = kWindow;
};

// Both throw DriverError, and the first one HostMemoryError.
void copy_out(gpu::Driver& driver, const std::vector<Span>& copies,
              const TransferOptions& options = {});

void copy_in(gpu::Driver& driver, const std::vector<Span>& copies,
             const std::vector<Span>& zeros, const TransferOptions& options = {});

}  // namespace memory
