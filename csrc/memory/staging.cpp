// SPDX-License-Identifier: Apache-2.0
#include "memory/staging.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <optional>
#include <utility>

#include "memory/host_pages.h"
#include "memory/leftovers.h"

namespace memory {

// Locked memory with a stream of its own.
class Staging::Slot {
 public:
  // Null where the driver has no memory. Throws DriverError where it has no stream.
  static std::unique_ptr<Slot> make(gpu::Driver& driver, gpu::DeviceScope& scope,
                                    int device, size_t bytes) {
    auto slot = std::make_unique<Slot>(driver, scope, device, bytes);
    void* data = nullptr;
    if (!driver.allocate_host(&data, bytes).ok()) return nullptr;
    slot->memory_.data = static_cast<char*>(data);
    slot->stream_.emplace(driver, scope, device);
    return slot;
  }

  Slot(gpu::Driver& driver, gpu::DeviceScope& scope, int device, size_t bytes)
      : memory_{driver, scope, device}, bytes_(bytes) {}

  char* data() const { return memory_.data; }
  size_t bytes() const { return bytes_; }
  DeviceStream& stream() { return *stream_; }

 private:
  // A member of its own, so that it goes when the stream is gone, or was never had.
  struct Memory {
    gpu::Driver& driver;
    gpu::DeviceScope& scope;
    const int device;
    char* data = nullptr;

    ~Memory() {
      if (data == nullptr) return;
      const gpu::Status entered = scope.use(device);
      const gpu::Status freed = entered.ok() ? driver.free_host(data) : entered;
      if (freed.ok()) return;
      std::fprintf(stderr,
                   "cumem: %s failed with error %d: locked host memory at %p is left\n",
                   freed.call, freed.error, static_cast<void*>(data));
      Leftovers::of_process().add(
          [&driver = driver, device = device, data = data](gpu::DeviceScope& again) {
            return again.use(device).ok() && driver.free_host(data).ok();
          });
    }
  };

  Memory memory_;
  const size_t bytes_;
  std::optional<DeviceStream> stream_;
};

Staging::Staging(gpu::Driver& driver, gpu::DeviceScope& scope, Direction direction,
                 int device, std::vector<Part> parts, Progress* progress)
    : driver_(driver),
      scope_(scope),
      direction_(direction),
      device_(device),
      parts_(std::move(parts)),
      progress_(progress) {
  make_slots();
  threads_.reserve(slots_.size());
  try {
    for (const auto& slot : slots_) {
      threads_.emplace_back([this, &slot = *slot] {
        gpu::DeviceScope own(driver_);
        work(slot, own);
      });
    }
  } catch (const std::exception&) {
    // Those that there are do all of it, and without any, finish() does.
  }
}

Staging::~Staging() {
  {
    const std::lock_guard lock(mutex_);
    is_over_ = true;
  }
  join();
}

void Staging::join() {
  for (std::thread& thread : threads_) thread.join();
  threads_.clear();
}

// As many as there is work for, and smaller ones once the driver refuses a size.
void Staging::make_slots() {
  size_t left = 0, largest = 0;
  for (const Part& part : parts_) {
    left += part.bytes;
    largest = std::max(largest, part.bytes);
  }
  if (const gpu::Status entered = scope_.use(device_); !entered.ok()) {
    gpu::throw_if(driver_.failure(entered, {device_, {}}));
  }
  slots_.reserve(kSlots);
  const size_t smallest = std::min(kSmallestSlot, whole_pages(largest));
  size_t bytes = std::min(kSlotBytes, whole_pages(largest));
  while (left > 0 && slots_.size() < kSlots) {
    std::unique_ptr<Slot> slot;
    try {
      slot = Slot::make(driver_, scope_, device_, bytes);
    } catch (const gpu::DriverError&) {
      if (slots_.empty()) throw;
      return;  // the streams that there are do
    }
    if (slot != nullptr) {
      slots_.push_back(std::move(slot));
      left -= std::min(left, bytes);
    } else if (bytes > smallest) {
      bytes = std::max(smallest, bytes / 2 / page_bytes() * page_bytes());
    } else {
      return;
    }
  }
}

bool Staging::take(size_t most, Part* part) {
  const std::lock_guard lock(mutex_);
  if (is_over_ || failure_ || next_ == parts_.size()) return false;
  *part = parts_[next_];
  part->address += taken_;
  part->host += taken_;
  part->bytes = std::min(most, part->bytes - taken_);
  taken_ += part->bytes;
  if (taken_ == parts_[next_].bytes) {
    ++next_;
    taken_ = 0;
  }
  return true;
}

void Staging::work(Slot& slot, gpu::DeviceScope& scope) {
  try {
    if (const gpu::Status entered = scope.use(device_); !entered.ok()) {
      gpu::throw_if(driver_.failure(entered, {device_, {}}));
    }
    Part part{};
    while (take(slot.bytes(), &part)) copy(slot, scope, part);
  } catch (...) {
    const std::lock_guard lock(mutex_);
    gpu::keep_first(failure_, std::current_exception());
  }
}

void Staging::copy(Slot& slot, gpu::DeviceScope& scope, const Part& part) {
  Part staged = part;
  staged.host = slot.data();
  if (direction_ == Direction::kIn) std::memcpy(slot.data(), part.host, part.bytes);
  slot.stream().copy(direction_, staged);
  if (const gpu::Status waited = slot.stream().wait(scope); !waited.ok()) {
    gpu::throw_if(driver_.failure(waited, {device_, part.bytes}));
  }
  if (direction_ == Direction::kOut) std::memcpy(part.host, slot.data(), part.bytes);
  if (progress_ != nullptr) progress_->done += part.bytes;
}

void Staging::finish() {
  if (threads_.empty() && !slots_.empty()) work(*slots_.front(), scope_);
  join();
  gpu::throw_if(failure_);
}

}  // namespace memory
