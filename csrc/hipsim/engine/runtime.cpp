// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime.h"

#include <algorithm>
#include <cstring>
#include <string_view>

namespace hipsim {
namespace {

constexpr Handle kHandleStep = 16;

bool is_host(const Place& place) { return place.kind != MemoryKind::kDevice; }

bool is_pageable(const Place& place) { return place.kind == MemoryKind::kPageableHost; }

// The direction that a caller names is checked only where an address is not known to
// the runtime; else the addresses decide.
bool fits(CopyKind kind, const Place& to, const Place& from) {
  if (is_pageable(to) && is_pageable(from)) {
    return kind == CopyKind::kHostToHost || kind == CopyKind::kDefault;
  }
  if (kind == CopyKind::kDeviceToHost) return !is_pageable(from);
  if (kind == CopyKind::kHostToDevice) return !is_pageable(to);
  return true;
}

// Does the call end only after its copies?
bool must_wait(const Batch& batch, const std::vector<Copy>& copies) {
  return std::any_of(copies.begin(), copies.end(),
                     [](const Copy& copy) {
                       return copy.staged || copy.engine == CopyEngine::kHost;
                     }) ||
         std::any_of(batch.attributes.begin(), batch.attributes.end(),
                     [](const CopyAttributes& each) {
                       return each.source_access_order == kSourceAccessDuringApiCall;
                     });
}

// The copies that share one launch of the blit kernel.
size_t count_kernel_copies(const std::vector<Copy>& copies) {
  return std::count_if(copies.begin(), copies.end(), [](const Copy& copy) {
    return copy.engine == CopyEngine::kBlit && !copy.staged;
  });
}

bool is_known(CopyKind kind) {
  return kind <= CopyKind::kDefault || kind == CopyKind::kDeviceToDeviceNoCu;
}

}  // namespace

Runtime::Runtime(const Options& options, std::vector<const char*> call_names)
    : options_(options),
      profile_(options.profile),
      calls_(std::move(call_names)),
      memory_(options.devices, options.vram_bytes) {}

// --- calls -------------------------------------------------------------------------

Error Runtime::enter(size_t call) {
  if (const Error refusal = refusal_; refusal != Error::kSuccess) return refusal;
  std::lock_guard lock(mutex_);
  return calls_.enter(call);
}

int Runtime::version() const { return profile().version; }

// --- memory ------------------------------------------------------------------------

Error Runtime::allocate(int device, size_t bytes, void** pointer) {
  *pointer = nullptr;
  if (bytes == 0) return Error::kSuccess;
  std::lock_guard lock(mutex_);
  return memory_.allocate(device, bytes, pointer);
}

Error Runtime::release(void* pointer) {
  return release_by(&AddressSpace::forget_device, pointer);
}

Error Runtime::allocate_host(size_t bytes, void** pointer) {
  *pointer = nullptr;
  if (bytes == 0) return Error::kSuccess;
  std::lock_guard lock(mutex_);
  return memory_.allocate_host(bytes, pointer);
}

Error Runtime::release_host(void* pointer) {
  return release_by(&AddressSpace::forget_host_allocation, pointer);
}

Error Runtime::release_by(std::optional<Place> (AddressSpace::*forget)(const void*),
                          void* pointer) {
  if (pointer == nullptr) return Error::kSuccess;
  std::unique_lock lock(mutex_);
  const std::optional<Place> place = (memory_.*forget)(pointer);
  if (!place) return Error::kInvalidValue;
  lock.unlock();
  scheduler_.drain_all();
  lock.lock();
  memory_.unmap(*place);
  return Error::kSuccess;
}

Error Runtime::register_host(void* pointer, size_t bytes) {
  std::lock_guard lock(mutex_);
  return memory_.register_host(pointer, bytes);
}

Error Runtime::unregister_host(void* pointer) {
  if (pointer == nullptr) return Error::kInvalidValue;
  {
    std::lock_guard lock(mutex_);
    if (!memory_.unregister_host(pointer)) return Error::kHostMemoryNotRegistered;
  }
  scheduler_.drain_all();
  return Error::kSuccess;
}

void Runtime::memory_info(int device, size_t* free, size_t* total) const {
  std::lock_guard lock(mutex_);
  *free = memory_.free_bytes(device);
  *total = memory_.vram_bytes();
}

// --- streams and events ------------------------------------------------------------

StreamRef Runtime::find_stream(Handle stream, int device) {
  if (stream == 0) return scheduler_.null_stream(device);
  const auto it = streams_.find(stream);
  return it == streams_.end() ? nullptr : it->second;
}

Handle Runtime::create_stream(int device, StreamKind kind) {
  std::lock_guard lock(mutex_);
  const Handle handle = next_handle_ += kHandleStep;
  streams_[handle] = scheduler_.create(device, kind);
  return handle;
}

Error Runtime::destroy_stream(Handle stream) {
  std::unique_lock lock(mutex_);
  const auto it = streams_.find(stream);
  if (it == streams_.end()) return Error::kInvalidHandle;
  const StreamRef doomed = it->second;
  streams_.erase(it);
  lock.unlock();
  scheduler_.destroy(doomed);
  return Error::kSuccess;
}

Error Runtime::query_stream(Handle stream, int device) {
  std::lock_guard lock(mutex_);
  const StreamRef found = find_stream(stream, device);
  if (!found) return Error::kInvalidHandle;
  return scheduler_.idle(found) ? Error::kSuccess : Error::kNotReady;
}

Error Runtime::synchronize_stream(Handle stream, int device) {
  std::unique_lock lock(mutex_);
  const StreamRef found = find_stream(stream, device);
  lock.unlock();
  if (!found) return Error::kInvalidHandle;
  scheduler_.drain(found);
  return Error::kSuccess;
}

Error Runtime::wait_event(Handle stream, int device, Handle event) {
  std::lock_guard lock(mutex_);
  const StreamRef found = find_stream(stream, device);
  bool known = false;
  const std::shared_ptr<Recording> recording = last_recording(event, &known);
  if (!found || !known) return Error::kInvalidHandle;
  if (recording) {
    Operation wait;
    wait.after = {recording->point};
    scheduler_.submit(found, std::move(wait));
  }
  return Error::kSuccess;
}

Handle Runtime::create_event(bool timing) {
  std::lock_guard lock(mutex_);
  const Handle handle = next_handle_ += kHandleStep;
  events_[handle] = {timing, nullptr};
  return handle;
}

Error Runtime::destroy_event(Handle event) {
  std::lock_guard lock(mutex_);
  return events_.erase(event) == 1 ? Error::kSuccess : Error::kContextIsDestroyed;
}

Error Runtime::record_event(Handle event, Handle stream, int device) {
  std::lock_guard lock(mutex_);
  const StreamRef found = find_stream(stream, device);
  const auto it = events_.find(event);
  if (!found || it == events_.end()) return Error::kInvalidHandle;
  auto recording = std::make_shared<Recording>();
  Operation record;
  record.run = [recording](const std::atomic<bool>&) {
    recording->time = std::chrono::steady_clock::now();
  };
  recording->point = scheduler_.submit(found, std::move(record));
  it->second.recording = std::move(recording);
  return Error::kSuccess;
}

std::shared_ptr<Runtime::Recording> Runtime::last_recording(Handle event,
                                                            bool* known) const {
  const auto it = events_.find(event);
  *known = it != events_.end();
  return *known ? it->second.recording : nullptr;
}

Error Runtime::query_event(Handle event) {
  std::lock_guard lock(mutex_);
  bool known = false;
  const std::shared_ptr<Recording> recording = last_recording(event, &known);
  if (!known) return Error::kInvalidHandle;
  const bool done = !recording || scheduler_.reached(recording->point);
  return done ? Error::kSuccess : Error::kNotReady;
}

Error Runtime::synchronize_event(Handle event) {
  std::unique_lock lock(mutex_);
  bool known = false;
  const std::shared_ptr<Recording> recording = last_recording(event, &known);
  lock.unlock();
  if (!known) return Error::kInvalidHandle;
  if (recording) scheduler_.wait(recording->point);
  return Error::kSuccess;
}

Error Runtime::elapsed_time(Handle start, Handle end, float* milliseconds) {
  std::lock_guard lock(mutex_);
  const auto first = events_.find(start);
  const auto last = events_.find(end);
  for (const auto& it : {first, last}) {
    if (it == events_.end() || !it->second.timing || !it->second.recording) {
      return Error::kInvalidHandle;
    }
  }
  const Recording& from = *first->second.recording;
  const Recording& to = *last->second.recording;
  if (!scheduler_.reached(from.point) || !scheduler_.reached(to.point)) {
    return Error::kNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(to.time - from.time).count();
  return Error::kSuccess;
}

// --- copies ------------------------------------------------------------------------

void Runtime::account(const std::vector<Copy>& copies, size_t made) {
  std::lock_guard lock(mutex_);
  for (size_t i = 0; i < made; ++i) {
    const Copy& copy = copies[i];
    Tally& tally =
        counters_
            .copies[static_cast<int>(copy.engine)][static_cast<int>(copy.direction)];
    tally.copies += 1;
    tally.bytes += copy.bytes;
    if (copy.staged) {
      counters_.staged.copies += 1;
      counters_.staged.bytes += copy.bytes;
    }
  }
}

Operation Runtime::copy_operation(std::vector<Copy> copies) {
  Operation operation;
  operation.latency = switches_.copy_latency;
  operation.run = [this, copies = std::move(copies),
                   corrupt = switches_.corrupt_loads](const std::atomic<bool>& stop) {
    if (gpu_error_ != Error::kSuccess) return;
    account(copies, perform(copies, corrupt, stop));
  };
  return operation;
}

Operation Runtime::memory_fault() {
  Operation operation;
  operation.latency = switches_.copy_latency;
  operation.run = [this](const std::atomic<bool>&) {
    std::lock_guard lock(mutex_);
    counters_.memory_faults += 1;
    gpu_error_ = Error::kIllegalAddress;
  };
  return operation;
}

Error Runtime::locate(const void* destination, Place* to, const void* source,
                      Place* from, size_t bytes) const {
  if (destination == nullptr || source == nullptr) return Error::kInvalidValue;
  const Error error = memory_.locate(destination, bytes, to);
  return error != Error::kSuccess ? error : memory_.locate(source, bytes, from);
}

Error Runtime::copy(void* destination, const void* source, size_t bytes, CopyKind kind,
                    Handle stream, int device, bool blocking) {
  std::unique_lock lock(mutex_);
  const StreamRef found = find_stream(stream, device);
  if (!found) return Error::kInvalidHandle;
  if (!is_known(kind)) return Error::kInvalidCopyDirection;
  if (bytes == 0) return Error::kSuccess;

  Place to;
  Place from;
  const Error error = locate(destination, &to, source, &from, bytes);
  if (error != Error::kSuccess) return error;
  if (!fits(kind, to, from)) return Error::kInvalidValue;
  const Copy copy = plan_copy(options_.engines, destination, to, source, from, bytes,
                              kind == CopyKind::kDeviceToDeviceNoCu);
  const Point done = scheduler_.submit(found, copy_operation({copy}));
  lock.unlock();

  // Within a device even hipMemcpy only queues; host to host even hipMemcpyAsync
  // waits.
  const bool within_host = is_host(to) && is_host(from);
  const bool within_device = copy.direction == Direction::kDeviceToDevice;
  if (copy.staged || within_host || (blocking && !within_device)) {
    scheduler_.wait(done);
  }
  return Error::kSuccess;
}

Error Runtime::check_attributes(const Batch& batch) const {
  if (batch.attribute_count == 0) return Error::kSuccess;
  if (!profile_->batch_attributes) return Error::kNotSupported;
  if (batch.attributes.size() != batch.attribute_count ||
      batch.first_copies == nullptr || batch.first_copies[0] != 0) {
    return Error::kInvalidValue;
  }
  for (size_t i = 1; i < batch.attribute_count; ++i) {
    if (batch.first_copies[i] <= batch.first_copies[i - 1] ||
        batch.first_copies[i] >= batch.count) {
      return Error::kInvalidValue;
    }
  }
  for (const CopyAttributes& attributes : batch.attributes) {
    const uint32_t order = attributes.source_access_order;
    if (order < kSourceAccessStream || order > kSourceAccessAny) {
      return Error::kInvalidValue;
    }
    const bool indirect =
        attributes.flags & (kCopyIndirectSource | kCopyIndirectDestination);
    if (profile_->extended_flags && indirect && (attributes.flags & kCopySwap)) {
      return Error::kInvalidValue;
    }
  }
  return Error::kSuccess;
}

Error Runtime::plan_batch(const Batch& batch, std::vector<Copy>* copies) const {
  const auto set_fail_index = [&](size_t index) {
    if (batch.fail_index != nullptr) *batch.fail_index = index;
  };
  if (!profile_->batch_is_a_loop) {
    const size_t* end = batch.sizes + batch.count;
    const size_t* empty = std::find(batch.sizes, end, size_t{0});
    if (empty != end) {
      set_fail_index(empty - batch.sizes);
      return Error::kInvalidValue;
    }
  }
  set_fail_index(kNoIndex);

  size_t set = 0;
  for (size_t i = 0; i < batch.count; ++i) {
    while (set + 1 < batch.attributes.size() && batch.first_copies[set + 1] <= i) ++set;
    const uint32_t flags = batch.attributes.empty() || !profile_->extended_flags
                               ? 0
                               : batch.attributes[set].flags;
    void* destination = batch.destinations[i];
    const void* source = batch.sources[i];
    const size_t bytes = batch.sizes[i];
    Place to;
    Place from;
    const Error error = bytes == 0 ? Error::kInvalidValue
                                   : locate(destination, &to, source, &from, bytes);
    if (error != Error::kSuccess) {
      if (profile_->batch_is_a_loop) set_fail_index(i);
      return error;
    }
    copies->push_back(plan_copy(options_.engines, destination, to, source, from, bytes,
                                flags & kCopyPreferSdma));
  }

  // A device that has no packets for these refuses them; the simulated one is such.
  const bool refused = std::any_of(
      batch.attributes.begin(), batch.attributes.end(), [](const CopyAttributes& each) {
        return each.flags &
               (kCopySwap | kCopyIndirectSource | kCopyIndirectDestination);
      });
  return profile_->extended_flags && refused ? Error::kNotSupported : Error::kSuccess;
}

Error Runtime::copy_batch(const Batch& batch, Handle stream, int device) {
  std::unique_lock lock(mutex_);
  const StreamRef found = find_stream(stream, device);
  if (!found) return Error::kInvalidHandle;
  if (batch.destinations == nullptr || batch.sources == nullptr ||
      batch.sizes == nullptr || batch.count == 0 ||
      (profile_->batch_is_a_loop && batch.fail_index == nullptr)) {
    return Error::kInvalidValue;
  }
  if (const Error error = check_attributes(batch); error != Error::kSuccess) {
    return error;
  }
  std::vector<Copy> copies;
  copies.reserve(batch.count);
  const Error error = plan_batch(batch, &copies);
  if (copies.empty() || (error != Error::kSuccess && !profile_->batch_is_a_loop)) {
    return error;
  }

  const bool caller_waits = must_wait(batch, copies);
  const bool overruns = profile_->max_blit_batch != 0 &&
                        count_kernel_copies(copies) > profile_->max_blit_batch;
  if (error == Error::kSuccess) {
    counters_.batch_calls += 1;
    counters_.batch_copies += batch.count;
  }
  const Point done = scheduler_.submit(
      found, overruns ? memory_fault() : copy_operation(std::move(copies)));
  lock.unlock();
  if (caller_waits) scheduler_.wait(done);
  return error;
}

void Runtime::blame_first_copy(const Batch& batch) const {
  if (batch.fail_index == nullptr) return;
  *batch.fail_index = profile().batch_is_a_loop ? 0 : kNoIndex;
}

Error Runtime::fill(void* destination, int value, size_t bytes, Handle stream,
                    int device, bool blocking) {
  std::unique_lock lock(mutex_);
  const StreamRef found = find_stream(stream, device);
  if (!found) return Error::kInvalidHandle;
  if (bytes == 0) return Error::kSuccess;
  Place place;
  if (destination == nullptr ||
      memory_.locate(destination, bytes, &place) != Error::kSuccess ||
      place.kind == MemoryKind::kPageableHost) {
    return Error::kInvalidValue;
  }
  Operation operation;
  operation.latency = switches_.copy_latency;
  operation.run = [this, destination, value, bytes](const std::atomic<bool>& stop) {
    if (!stop && gpu_error_ == Error::kSuccess) std::memset(destination, value, bytes);
  };
  const Point done = scheduler_.submit(found, std::move(operation));
  lock.unlock();

  // hipMemset only queues when it begins at the base of a device allocation.
  const bool at_base = place.kind == MemoryKind::kDevice &&
                       place.base == reinterpret_cast<uintptr_t>(destination);
  if (blocking && !at_base) scheduler_.wait(done);
  return Error::kSuccess;
}

// --- control -----------------------------------------------------------------------

const Profile& Runtime::profile() const {
  std::lock_guard lock(mutex_);
  return *profile_;
}

void Runtime::reset(const Profile* profile) {
  // A refused process may be a forked child, which has no threads to wait for.
  if (refusal_ == Error::kSuccess) scheduler_.drain_all();
  std::lock_guard lock(mutex_);
  if (profile != nullptr) profile_ = profile;
  calls_.reset();
  switches_ = {};
  counters_ = {};
  gpu_error_ = Error::kSuccess;
}

bool Runtime::fail(std::string_view call, uint64_t nth, Error error) {
  std::lock_guard lock(mutex_);
  return calls_.fail(call, nth, error);
}

void Runtime::corrupt_loads(bool on) {
  std::lock_guard lock(mutex_);
  switches_.corrupt_loads = on;
}

void Runtime::copy_latency(std::chrono::microseconds latency) {
  std::lock_guard lock(mutex_);
  switches_.copy_latency = latency;
}

std::vector<std::pair<std::string, uint64_t>> Runtime::stats() const {
  constexpr const char* kEngineNames[kCopyEngines] = {"sdma", "blit", "host"};
  constexpr const char* kDirectionNames[kDirections] = {"h2d", "d2h", "d2d", "h2h"};
  std::lock_guard lock(mutex_);
  const Usage& usage = memory_.usage();
  std::vector<std::pair<std::string, uint64_t>> stats = {
      {"streams", streams_.size()},
      {"events", events_.size()},
      {"device_allocations", usage.device_allocations},
      {"device_bytes", usage.device_bytes},
      {"registered_ranges", usage.registered_ranges},
      {"registered_bytes", usage.registered_bytes},
      {"host_allocations", usage.host_allocations},
      {"host_allocation_bytes", usage.host_allocation_bytes},
      {"batch_calls", counters_.batch_calls},
      {"batch_copies", counters_.batch_copies},
      {"staged_copies", counters_.staged.copies},
      {"staged_bytes", counters_.staged.bytes},
      {"memory_faults", counters_.memory_faults},
  };
  for (int engine = 0; engine < kCopyEngines; ++engine) {
    for (int direction = 0; direction < kDirections; ++direction) {
      const std::string name =
          std::string(kEngineNames[engine]) + "." + kDirectionNames[direction];
      const Tally& tally = counters_.copies[engine][direction];
      stats.emplace_back("copies." + name, tally.copies);
      stats.emplace_back("bytes." + name, tally.bytes);
    }
  }
  for (size_t call = 0; call < calls_.names().size(); ++call) {
    stats.emplace_back(std::string("calls.") + calls_.names()[call],
                       calls_.count(call));
  }
  return stats;
}

void Runtime::abandon() {
  if (refusal_ == Error::kSuccess) scheduler_.abandon();
}

// --- fork --------------------------------------------------------------------------

void Runtime::before_fork() {
  mutex_.lock();
  scheduler_.fork_lock().lock();
}

void Runtime::after_fork_in_parent() {
  scheduler_.fork_lock().unlock();
  mutex_.unlock();
}

void Runtime::after_fork_in_child() {
  const Usage& usage = memory_.usage();
  if (scheduler_.active() || !events_.empty() || usage.device_allocations != 0 ||
      usage.host_allocations != 0 || usage.registered_ranges != 0) {
    refusal_ = Error::kNotInitialized;
  }
  scheduler_.fork_lock().unlock();
  mutex_.unlock();
}

}  // namespace hipsim
