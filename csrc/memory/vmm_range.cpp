// SPDX-License-Identifier: Apache-2.0
#include "memory/vmm_range.h"

#include <algorithm>
#include <cstdio>
#include <mutex>
#include <string>

namespace memory {
namespace {

// Held while addresses are reserved, and from where a range gives its own back until it
// has them again, so that no other range is given them in between.
std::mutex& address_space() {
  static auto* const instance = new std::mutex;
  return *instance;
}

}  // namespace

VmmRange::VmmRange(Driver& driver, DeviceScope& scope, int device, size_t bytes,
                   size_t chunk_bytes, size_t granularity)
    : driver_(driver), device_(device), bytes_(bytes), granularity_(granularity) {
  for (size_t offset = 0; offset < bytes; offset += chunks_.back().bytes) {
    chunks_.push_back({offset, std::min(chunk_bytes, bytes - offset), false});
  }
  handles_ = std::make_unique<Handle[]>(chunks_.size());
  if (const gpu::Status entered = scope.use(device); !entered.ok()) {
    gpu::throw_if(failure(entered, bytes));
  }
  const std::lock_guard lock(address_space());
  gpu::throw_if(reserve(0));
}

VmmRange::~VmmRange() {
  if (is_gone()) return;
  DeviceScope scope(driver_);
  if (const Failure left = free(scope)) {
    std::fprintf(stderr, "cumem: address %s is lost: %s\n",
                 gpu::format_address(address_).c_str(), gpu::describe(left).c_str());
  }
}

size_t VmmRange::chunk_end(size_t offset) const {
  const auto after = std::upper_bound(
      chunks_.begin(), chunks_.end(), offset,
      [](size_t wanted, const Chunk& chunk) { return wanted < chunk.offset; });
  return after == chunks_.end() ? bytes_ : after->offset;
}

bool VmmRange::has_mappings() const {
  return std::any_of(chunks_.begin(), chunks_.end(),
                     [](const Chunk& chunk) { return chunk.is_mapped; });
}

bool VmmRange::has_handles() const {
  return std::any_of(&handles_[0], &handles_[chunks_.size()],
                     [](Handle handle) { return handle != 0; });
}

bool VmmRange::is_unsettled() const {
  if (!strays_.empty()) return true;
  switch (goal_) {
    case Goal::kMapped:
      return false;
    case Goal::kReserved:
      return !is_reserved_ || is_stale_ || has_mappings() || has_handles();
    case Goal::kFreed:
      return is_reserved_ || has_mappings() || has_handles();
  }
  return false;
}

Failure VmmRange::failure(gpu::Status status, size_t bytes) const {
  return driver_.failure(status, {device_, bytes});
}

// --- addresses -----------------------------------------------------------------------

// Some releases of ROCm refuse an alignment that they would have kept without being
// asked (vLLM's allocator retries like this, too).
Failure VmmRange::reserve(Address wish) {
  const size_t alignment = driver_.alignment(granularity_);
  Address address = 0;
  gpu::Status reserved = driver_.reserve(&address, bytes_, alignment, wish);
  if (!reserved.ok() && alignment != 0) {
    reserved = driver_.reserve(&address, bytes_, 0, wish);
  }
  if (!reserved.ok()) return failure(reserved, bytes_);

  std::string problem;
  if (address % granularity_ != 0) {
    problem = std::string(reserved.call) + " returned " + gpu::format_address(address) +
              ", which is not aligned to " + std::to_string(granularity_) + " bytes";
  } else if (wish != 0 && address != wish) {
    problem =
        "address " + gpu::format_address(wish) + " of a sleeping allocation of " +
        gpu::format_bytes(bytes_) + " on device " + std::to_string(device_) +
        " was taken: " + reserved.call + " gave " + gpu::format_address(address) +
        " instead. What was at that address cannot be used until it is free again";
  }
  if (problem.empty()) {
    if (wish == 0) address_ = address;
    is_reserved_ = true;
    return nullptr;
  }
  if (!driver_.free_address(address, bytes_).ok()) strays_.push_back(address);
  return std::make_exception_ptr(std::runtime_error(problem));
}

Failure VmmRange::reserve_again() { return is_reserved_ ? nullptr : reserve(address_); }

Failure VmmRange::give_back_address() {
  if (!is_reserved_) return nullptr;
  const gpu::Status freed = driver_.free_address(address_, bytes_);
  if (!freed.ok()) return failure(freed, bytes_);
  is_reserved_ = is_stale_ = false;
  return nullptr;
}

// --- memory --------------------------------------------------------------------------

Failure VmmRange::map(DeviceScope& scope) {
  if (const Failure left = settle(scope)) {
    if (has_mappings() || has_handles() || !is_reserved_) return left;
  }
  for (size_t i = 0; i < chunks_.size(); ++i) {
    const gpu::Status made = driver_.create(&handles_[i], chunks_[i].bytes, device_);
    if (made.ok()) continue;
    const Failure first = failure(made, chunks_[i].bytes);
    (void)settle(scope);
    return first;
  }
  return remap(scope);
}

Failure VmmRange::map_chunks() {
  for (size_t i = 0; i < chunks_.size(); ++i) {
    Chunk& chunk = chunks_[i];
    if (chunk.is_mapped) continue;
    const gpu::Status mapped =
        driver_.map(address_ + chunk.offset, chunk.bytes, handles_[i]);
    if (!mapped.ok()) return failure(mapped, chunk.bytes);
    chunk.is_mapped = true;
  }
  const gpu::Status allowed = driver_.allow_access(address_, bytes_, device_);
  return allowed.ok() ? nullptr : failure(allowed, bytes_);
}

Failure VmmRange::remap(DeviceScope& scope) {
  goal_ = Goal::kReserved;
  const gpu::Status entered = scope.use(device_);
  const Failure first = entered.ok() ? map_chunks() : failure(entered, bytes_);
  if (first) {
    (void)settle(scope);
    return first;
  }
  goal_ = Goal::kMapped;
  return nullptr;
}

// Chunk by chunk: that one call may span several is not established for every release.
Failure VmmRange::unmap(DeviceScope& scope) {
  if (const gpu::Status entered = scope.use(device_); !entered.ok()) {
    return failure(entered, bytes_);
  }
  for (Chunk& chunk : chunks_) {
    const gpu::Status unmapped = driver_.unmap(address_ + chunk.offset, chunk.bytes);
    if (!unmapped.ok()) {
      const Failure first = failure(unmapped, chunk.bytes);
      (void)remap(scope);
      return first;
    }
    chunk.is_mapped = false;
    is_stale_ = driver_.frees_memory_with_address();
  }
  return nullptr;
}

Failure VmmRange::release(DeviceScope& scope) {
  goal_ = Goal::kReserved;
  return settle(scope);
}

Failure VmmRange::free(DeviceScope& scope) {
  goal_ = Goal::kFreed;
  return settle(scope);
}

Failure VmmRange::settle(DeviceScope& scope) {
  if (!is_unsettled()) return nullptr;
  if (const gpu::Status entered = scope.use(device_); !entered.ok()) {
    return failure(entered, bytes_);
  }
  Failure first;
  const auto stray_is_freed = [&](Address stray) {
    const gpu::Status freed = driver_.free_address(stray, bytes_);
    if (!freed.ok()) gpu::keep_first(first, failure(freed, bytes_));
    return freed.ok();
  };
  strays_.erase(std::remove_if(strays_.begin(), strays_.end(), stray_is_freed),
                strays_.end());
  if (goal_ == Goal::kMapped) return first;

  for (size_t i = 0; i < chunks_.size(); ++i) {
    Chunk& chunk = chunks_[i];
    if (chunk.is_mapped) {
      const gpu::Status unmapped = driver_.unmap(address_ + chunk.offset, chunk.bytes);
      if (unmapped.ok()) {
        chunk.is_mapped = false;
        is_stale_ = driver_.frees_memory_with_address();
      } else {
        gpu::keep_first(first, failure(unmapped, chunk.bytes));
      }
    }
    // A mapping keeps its memory without a handle, too.
    if (handles_[i] == 0) continue;
    const gpu::Status released = driver_.release(handles_[i]);
    if (released.ok()) {
      handles_[i] = 0;
    } else {
      gpu::keep_first(first, failure(released, chunk.bytes));
    }
  }
  const std::lock_guard lock(address_space());
  if (has_mappings()) {
    // HIP 7.1 does not report a mapping that fails, and addresses that can be freed
    // have none.
    if (!driver_.keeps_addresses_of_mappings()) return first;
    if (!driver_.free_address(address_, bytes_).ok()) return first;
    for (Chunk& chunk : chunks_) chunk.is_mapped = false;
    is_reserved_ = is_stale_ = false;
  }
  if (goal_ == Goal::kFreed || is_stale_) gpu::keep_first(first, give_back_address());
  if (goal_ == Goal::kReserved) gpu::keep_first(first, reserve_again());
  return first;
}

}  // namespace memory
