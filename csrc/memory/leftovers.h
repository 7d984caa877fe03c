// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <functional>
#include <mutex>
#include <vector>

#include "gpu/driver_api.h"

namespace memory {

// What a driver has refused to take back, beside ranges: tried again with every call of
// the module, because whoever made it is gone.
class Leftovers {
 public:
  // One try; whether it was the last that is needed.
  using Try = std::function<bool(gpu::DeviceScope&)>;

  static Leftovers& of_process();

  void add(Try again);
  // How many are left.
  size_t retry(gpu::Driver& driver);
  size_t count() const;

 private:
  mutable std::mutex mutex_;
  std::vector<Try> tries_;
};

}  // namespace memory
