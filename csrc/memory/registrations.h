// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mutex>
#include <string>
#include <utility>

namespace memory {

// Whether a transfer still asks the driver to register host memory. A limit, as on
// locked memory, refuses every piece alike, and each refusal takes its time.
// Thread-safe.
class Registrations {
 public:
  bool are_tried() const {
    const std::lock_guard lock(mutex_);
    return refusals_ < kMostRefusals;
  }

  void succeeded() {
    const std::lock_guard lock(mutex_);
    refusals_ = 0;
  }

  void refused(std::string text) {
    const std::lock_guard lock(mutex_);
    ++refusals_;
    last_refusal_ = std::move(text);
  }

  std::string last_refusal() const {
    const std::lock_guard lock(mutex_);
    return last_refusal_;
  }

 private:
  static constexpr int kMostRefusals = 2;  // in a row

  mutable std::mutex mutex_;
  int refusals_ = 0;
  std::string last_refusal_;
};

}  // namespace memory
