// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <mutex>

namespace hipsim {

// A shared mutex in which who wants it alone does not wait for ever behind those who
// share it. std::shared_mutex leaves that to the platform, and cannot be held across
// fork().
class Gate {
 public:
  void lock() {
    std::unique_lock lock(mutex_);
    ++waiting_;
    changed_.wait(lock, [&] { return !alone_ && sharing_ == 0; });
    --waiting_;
    alone_ = true;
  }
  void unlock() {
    std::lock_guard lock(mutex_);
    alone_ = false;
    changed_.notify_all();
  }
  void lock_shared() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !alone_ && waiting_ == 0; });
    ++sharing_;
  }
  void unlock_shared() {
    std::lock_guard lock(mutex_);
    --sharing_;
    changed_.notify_all();
  }

  // Held across fork(), so that the child finds the state whole.
  std::mutex& fork_lock() { return mutex_; }

  // For a forked child, which has none of the threads that are inside.
  void forget_everybody() {
    sharing_ = waiting_ = 0;
    alone_ = false;
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int sharing_ = 0;
  int waiting_ = 0;
  bool alone_ = false;
};

}  // namespace hipsim
