// SPDX-License-Identifier: Apache-2.0
#include "memory/preparation.h"

#include <sched.h>

#include <algorithm>
#include <exception>
#include <utility>

namespace memory {

size_t default_threads() {
  constexpr size_t kMost = 12;
  cpu_set_t cpus;
  // Refused where the machine has more CPUs than the set has room for.
  if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) return kMost;
  const auto usable = static_cast<size_t>(CPU_COUNT(&cpus));
  return std::clamp(usable * 3 / 4, size_t{1}, kMost);
}

Preparation::Preparation(gpu::Driver& driver, int device, std::vector<Piece> pieces,
                         size_t threads, std::vector<Piece>& made)
    : driver_(driver),
      device_(device),
      pieces_(std::move(pieces)),
      is_ready_(pieces_.size()),
      made_(made) {
  made_.reserve(pieces_.size());
  if (pieces_.empty()) return;
  const size_t most = threads == 0 ? default_threads() : threads;
  const size_t wanted = std::min(pieces_.size(), most);
  threads_.reserve(wanted);
  try {
    while (threads_.size() < wanted) threads_.emplace_back([this] { work(); });
  } catch (const std::exception&) {
    // Those that there are do all of it.
  }
}

Preparation::~Preparation() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  join();
}

void Preparation::join() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

void Preparation::finish() {
  join();
  gpu::throw_if(failure_);
}

bool Preparation::take(size_t* position) {
  const std::lock_guard lock(mutex_);
  if (is_over_ || failure_ || next_ == pieces_.size()) return false;
  *position = next_++;
  return true;
}

void Preparation::prepare(size_t position) {
  const Piece& piece = pieces_[position];
  const bool is_made =
      piece.arena->prepare(piece.index, driver_, device_, registrations_);
  const std::lock_guard lock(mutex_);
  if (is_made) made_.push_back(piece);
  is_ready_[position] = true;
  changed_.notify_all();
}

void Preparation::work() {
  try {
    gpu::DeviceScope scope(driver_);
    if (const gpu::Status entered = scope.use(device_); !entered.ok()) {
      gpu::throw_if(driver_.failure(entered, {device_, {}}));
    }
    size_t position = 0;
    while (take(&position)) prepare(position);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    gpu::keep_first(failure_, std::current_exception());
    changed_.notify_all();
  }
}

void Preparation::await(size_t position) {
  if (threads_.empty()) {
    gpu::DeviceScope scope(driver_);
    if (const gpu::Status entered = scope.use(device_); !entered.ok()) {
      gpu::throw_if(driver_.failure(entered, {device_, {}}));
    }
    size_t next = 0;
    while (!is_ready_[position] && take(&next)) prepare(next);
    return;
  }
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return is_ready_[position] || failure_; });
  gpu::throw_if(failure_);
}

}  // namespace memory
