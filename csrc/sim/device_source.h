// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace sim {

// Where device memory comes from.
class DeviceSource {
 public:
  DeviceSource() = default;
  virtual ~DeviceSource() = default;
  DeviceSource(const DeviceSource&) = delete;
  DeviceSource& operator=(const DeviceSource&) = delete;

  // The function that is called, for messages.
  virtual const char* name() const = 0;

  // Null when the device has no room; throws when anything else is wrong.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void free(void* data, std::size_t bytes) noexcept = 0;
};

}  // namespace sim
