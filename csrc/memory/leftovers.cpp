// SPDX-License-Identifier: Apache-2.0
#include "memory/leftovers.h"

#include <algorithm>
#include <utility>

namespace memory {

Leftovers& Leftovers::of_process() {
  static auto* const instance = new Leftovers;
  return *instance;
}

void Leftovers::add(Try again) {
  const std::lock_guard lock(mutex_);
  tries_.push_back(std::move(again));
}

size_t Leftovers::retry(gpu::Driver& driver) {
  const std::lock_guard lock(mutex_);
  if (tries_.empty()) return 0;
  gpu::DeviceScope scope(driver);
  tries_.erase(std::remove_if(tries_.begin(), tries_.end(),
                              [&](const Try& again) { return again(scope); }),
               tries_.end());
  return tries_.size();
}

size_t Leftovers::count() const {
  const std::lock_guard lock(mutex_);
  return tries_.size();
}

}  // namespace memory
