// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

#include "gpu/driver_api.h"
#include "memory/copy_parts.h"

namespace memory {

// A stream of a device that does not block others. Whatever was queued is over at its
// end. One thread's at a time.
class DeviceStream {
 public:
  // The scope is that of the thread in which the stream begins and ends. Throws
  // DriverError.
  DeviceStream(gpu::Driver& driver, gpu::DeviceScope& scope, int device);
  ~DeviceStream();
  DeviceStream(const DeviceStream&) = delete;
  DeviceStream& operator=(const DeviceStream&) = delete;

  // The device has to be the thread's current one. Throws DriverError.
  void copy(Direction direction, const Part& part);
  void zero(const Part& part);

  // Bytes since the last wait.
  size_t queued() const { return queued_; }

  // Waits for what is queued, with the scope of the calling thread. Nothing is under
  // way afterwards even if that fails, as far as that is in anybody's power.
  gpu::Status wait(gpu::DeviceScope& scope);

 private:
  void check(gpu::Status status, const Part& part);

  gpu::Driver& driver_;
  gpu::DeviceScope& scope_;
  const int device_;
  gpu::Stream stream_ = nullptr;
  size_t queued_ = 0;
  bool is_used_ = false;  // since the last wait, by a call that failed, too
};

}  // namespace memory
