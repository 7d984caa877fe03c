// SPDX-License-Identifier: Apache-2.0
#include "memory/device_stream.h"

#include <cstdio>

#include "memory/leftovers.h"

namespace memory {

using gpu::Status;

DeviceStream::DeviceStream(gpu::Driver& driver, gpu::DeviceScope& scope, int device)
    : driver_(driver), scope_(scope), device_(device) {
  Status status = scope.use(device);
  if (status.ok()) status = driver.create_stream(&stream_);
  if (!status.ok()) gpu::throw_if(driver.failure(status, {device, {}}));
}

DeviceStream::~DeviceStream() {
  if (is_used_) (void)wait(scope_);
  const Status entered = scope_.use(device_);
  const Status gone = entered.ok() ? driver_.destroy_stream(stream_) : entered;
  if (gone.ok()) return;
  std::fprintf(stderr,
               "cumem: %s failed with error %d: a stream of device %d is left\n",
               gone.call, gone.error, device_);
  Leftovers::of_process().add(
      [&driver = driver_, device = device_, stream = stream_](gpu::DeviceScope& scope) {
        return scope.use(device).ok() && driver.destroy_stream(stream).ok();
      });
}

void DeviceStream::check(Status status, const Part& part) {
  if (!status.ok()) gpu::throw_if(driver_.failure(status, {device_, part.bytes}));
  queued_ += part.bytes;
}

void DeviceStream::copy(Direction direction, const Part& part) {
  is_used_ = true;
  check(direction == Direction::kOut
            ? driver_.copy_to_host(part.host, part.address, part.bytes, stream_)
            : driver_.copy_to_device(part.address, part.host, part.bytes, stream_),
        part);
}

void DeviceStream::zero(const Part& part) {
  is_used_ = true;
  check(driver_.zero(part.address, part.bytes, stream_), part);
}

// Whoever is told that a wait has failed may take the memory away, so another way to
// wait is tried.
Status DeviceStream::wait(gpu::DeviceScope& scope) {
  if (const Status entered = scope.use(device_); !entered.ok()) {
    if (!scope.use(device_).ok()) return entered;
  }
  queued_ = 0;
  is_used_ = false;
  const Status waited = driver_.synchronize_stream(stream_);
  if (!waited.ok() && !driver_.synchronize_device().ok()) {
    (void)driver_.synchronize_stream(stream_);
  }
  return waited;
}

}  // namespace memory
