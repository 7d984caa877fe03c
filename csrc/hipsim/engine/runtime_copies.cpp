// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <limits>
#include <shared_mutex>
#include <utility>

#include "engine/runtime.h"

namespace hipsim {
namespace {

uintptr_t as_number(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

bool is_host(const Place& place) { return !place.on_device(); }

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

// As much of a pageable source CUDA's driver reads before an asynchronous copy returns
// (CUDA Driver API, API synchronization behavior).
constexpr size_t kMostTakenAtOnce = size_t{64} << 10;

bool is_staged_load(const Copy& copy) {
  return copy.staged && copy.direction == Direction::kHostToDevice;
}

uint32_t order_of(const Batch& batch, size_t index) {
  const size_t* end = batch.first_copies + batch.attribute_count;
  const size_t* next = std::upper_bound(batch.first_copies, end, index);
  return batch.attributes[next - batch.first_copies - 1].source_access_order;
}

// CUDA's driver reads a pageable source during the call unless the order is that of the
// stream, and then waits for it. Else it waits only for what it has to do during the
// call, and between two host addresses.
bool settle_sources(const Batch& batch, std::vector<Copy>* copies) {
  bool caller_waits = false;
  for (size_t i = 0; i < copies->size(); ++i) {
    Copy& copy = (*copies)[i];
    const uint32_t order = order_of(batch, i);
    if (is_staged_load(copy)) {
      if (order != kSourceAccessStream) take_source(&copy);
      caller_waits |= order == kSourceAccessStream;
    } else {
      caller_waits |= order == kSourceAccessDuringApiCall ||
                      copy.direction == Direction::kHostToHost;
    }
  }
  return caller_waits;
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

// Can the far end of the shape be counted in bytes?
bool is_countable(const Shape& shape, const Pitch& pitch) {
  constexpr size_t kMost = std::numeric_limits<size_t>::max() / 4;
  const auto fits = [](size_t count, size_t distance) {
    return distance == 0 || count <= kMost / distance;
  };
  return shape.width <= kMost && fits(shape.height, pitch.row) &&
         fits(shape.depth, pitch.slice) && fits(shape.height, shape.width) &&
         fits(shape.depth, shape.width * shape.height);
}

}  // namespace

// --- when work runs ----------------------------------------------------------------

void Runtime::account(const std::vector<Copy>& copies, size_t made) {
  std::lock_guard lock(mutex_);
  const auto add = [](Tally& tally, const Copy& copy) {
    tally.copies += 1;
    tally.bytes += copy.shape.bytes();
  };
  for (size_t i = 0; i < made; ++i) {
    const Copy& copy = copies[i];
    const auto engine = static_cast<int>(copy.engine);
    const auto direction = static_cast<int>(copy.direction);
    add(counters_.copies[engine][direction], copy);
    if (const auto host = host_memory_of(copy)) {
      add(counters_.host_copies[static_cast<int>(*host)][direction], copy);
    }
    if (copy.staged) add(counters_.staged, copy);
    if (copy.pitched) add(counters_.pitched, copy);
    counters_.pitched_packets += copy.packets;
  }
}

bool Runtime::may_touch(const Side& side, size_t extent, int device, bool write) const {
  std::lock_guard lock(mutex_);
  if (side.place.kind != MemoryKind::kVirtual) return memory_.still_holds(side.place);
  Place now;
  return memory_.locate(reinterpret_cast<const void*>(side.address), extent,
                        side.crossing, &now) == Error::kSuccess &&
         memory_.virtual_memory().permits(side.address, extent, device, write,
                                          side.crossing);
}

void Runtime::raise_memory_fault() {
  std::lock_guard lock(mutex_);
  counters_.memory_faults += 1;
  gpu_error_ = profile_->cuda ? Error::kLaunchFailed : Error::kIllegalAddress;
}

void Runtime::run_copies(const std::vector<Copy>& copies, int device, bool corrupt,
                         const std::atomic<bool>& abandoned) {
  size_t made = 0;
  for (const Copy& copy : copies) {
    if (gpu_error_ != Error::kSuccess) break;
    std::shared_lock in_use(memory_in_use_);
    if (!may_touch(copy.to, copy.to.extent(copy.shape), device, true) ||
        !may_touch(copy.from, copy.from.extent(copy.shape), device, false)) {
      raise_memory_fault();
      break;
    }
    if (!perform(copy, corrupt, abandoned)) break;
    ++made;
  }
  account(copies, made);
}

Work Runtime::copy_work(Copies copies) {
  return [this, copies = std::move(copies)](int device) {
    Operation operation;
    operation.latency = switches_.copy_latency;
    operation.run = [this, copies, device, corrupt = switches_.corrupt_loads](
                        const std::atomic<bool>& abandoned) {
      run_copies(*copies, device, corrupt, abandoned);
    };
    return operation;
  };
}

Work Runtime::memory_fault_work() {
  return [this](int) {
    Operation operation;
    operation.latency = switches_.copy_latency;
    operation.run = [this](const std::atomic<bool>&) { raise_memory_fault(); };
    return operation;
  };
}

// --- single copies -----------------------------------------------------------------

Error Runtime::locate(const Caller& caller, Side* side, size_t extent, bool pitched,
                      bool write) const {
  if (side->address == 0) return Error::kInvalidValue;
  // HIP checks a pitched copy against the one mapping that holds its first byte.
  const bool one_mapping = switches_.one_mapping_copies || (pitched && !profile_->cuda);
  side->crossing = one_mapping ? Crossing::kNothing : profile_->copies_cross;
  const Error error = memory_.locate(reinterpret_cast<const void*>(side->address),
                                     extent, side->crossing, &side->place);
  if (error != Error::kSuccess) return error;
  const bool open = side->place.kind != MemoryKind::kVirtual ||
                    memory_.virtual_memory().permits(
                        side->address, extent, caller.device, write, side->crossing);
  if (open) return Error::kSuccess;
  return profile_->cuda ? Error::kInvalidValue : Error::kUnknown;
}

Error Runtime::plan(const Caller& caller, Side to, Side from, const Shape& shape,
                    bool pitched, bool prefer_sdma, Copy* copy) const {
  if (to.address == 0 || from.address == 0) return Error::kInvalidValue;
  Error error = locate(caller, &to, to.extent(shape), pitched, true);
  if (error == Error::kSuccess) {
    error = locate(caller, &from, from.extent(shape), pitched, false);
  }
  if (error != Error::kSuccess) return error;
  EngineRule engines = options_.engines;
  engines.max_row_copies = profile_->max_row_copies;
  *copy = plan_copy(engines, to, from, shape, pitched, prefer_sdma);
  return Error::kSuccess;
}

// Within a device even a blocking copy only queues (HIP's own tests differ on whether a
// pitched one does); host to host even an asynchronous one waits.
Error Runtime::submit_copy(const Target& target, const Copy& copy, bool blocking,
                           std::unique_lock<std::mutex> lock) {
  const bool takes = profile_->cuda && is_staged_load(copy) && !blocking &&
                     !target.captures && copy.shape.bytes() <= kMostTakenAtOnce;
  const auto copies = std::make_shared<std::vector<Copy>>(1, copy);
  if (takes) take_source(&copies->front());
  const std::optional<Point> done = enqueue(target, copy_work(copies));
  lock.unlock();
  const bool within_host = is_host(copy.to.place) && is_host(copy.from.place);
  const bool within_device = copy.direction == Direction::kDeviceToDevice;
  const bool detours = copy.staged && !takes;
  if (done && (detours || within_host || (blocking && !within_device))) {
    scheduler_.wait(*done);
  }
  return Error::kSuccess;
}

Error Runtime::copy(const Caller& caller, void* destination, const void* source,
                    size_t bytes, CopyKind kind, Handle stream, bool blocking) {
  std::unique_lock lock(mutex_);
  if (blocking) {
    const Error error = forbid_synchronous_call(caller);
    if (error != Error::kSuccess) return error;
  }
  Target target;
  Error error = find_target(caller, stream, &target);
  if (error != Error::kSuccess) return error;
  // A blocking call looks at everything else before the kind.
  const bool nowhere = destination == nullptr || source == nullptr;
  if (blocking && bytes == 0) return Error::kSuccess;
  if (blocking && nowhere) return Error::kInvalidValue;
  if (!is_known(kind)) return Error::kInvalidCopyDirection;
  if (bytes == 0) return Error::kSuccess;

  Copy copy;
  error = plan(target.caller, {as_number(destination)}, {as_number(source)}, {bytes},
               false, kind == CopyKind::kDeviceToDeviceNoCu, &copy);
  if (error != Error::kSuccess) return error;
  const bool leaves_device =
      profile_->cuda && kind == CopyKind::kDeviceToDevice &&
      (is_pageable(copy.to.place) || is_pageable(copy.from.place));
  if (!fits(kind, copy.to.place, copy.from.place) || leaves_device) {
    return Error::kInvalidValue;
  }
  return submit_copy(target, copy, blocking, std::move(lock));
}

Error Runtime::copy_pitched(const Caller& caller, const PitchedCopy& copy,
                            CopyKind kind, Handle stream, bool blocking) {
  std::unique_lock lock(mutex_);
  if (blocking) {
    const Error error = forbid_synchronous_call(caller);
    if (error != Error::kSuccess) return error;
  }
  Target target;
  Error error = find_target(caller, stream, &target);
  if (error != Error::kSuccess) return error;
  if (!is_known(kind)) return Error::kInvalidCopyDirection;
  const bool nowhere = copy.destination == nullptr || copy.source == nullptr;
  if (target.captures && nowhere) return Error::kInvalidValue;
  const Shape& shape = copy.shape;
  if (shape.width == 0 || shape.height == 0 || shape.depth == 0) {
    return Error::kSuccess;
  }
  if (shape.width > copy.destination_pitch.row || shape.width > copy.source_pitch.row) {
    return Error::kInvalidPitch;
  }
  if (!profile_->cuda &&
      std::max(copy.destination_pitch.row, copy.source_pitch.row) > kMaxPitch) {
    return Error::kInvalidValue;
  }
  if (!is_countable(shape, copy.destination_pitch) ||
      !is_countable(shape, copy.source_pitch)) {
    return Error::kInvalidValue;
  }
  Copy planned;
  error = plan(target.caller, {as_number(copy.destination), copy.destination_pitch},
               {as_number(copy.source), copy.source_pitch}, shape, true,
               kind == CopyKind::kDeviceToDeviceNoCu, &planned);
  if (error != Error::kSuccess) return error;
  const bool within_device =
      kind == CopyKind::kDeviceToDevice || kind == CopyKind::kDeviceToDeviceNoCu;
  const bool touches_pageable =
      is_pageable(planned.to.place) || is_pageable(planned.from.place);
  if (!fits(kind, planned.to.place, planned.from.place) ||
      (within_device && touches_pageable)) {
    return Error::kInvalidValue;
  }
  return submit_copy(target, planned, blocking, std::move(lock));
}

// --- batches -----------------------------------------------------------------------

Error Runtime::check_attributes(const Batch& batch) const {
  if (batch.attribute_count == 0) {
    return profile_->cuda ? Error::kInvalidValue : Error::kSuccess;
  }
  if (profile_->batch_attributes == BatchAttributes::kRefused) {
    return Error::kNotSupported;
  }
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
  const bool flags_count = profile_->batch_attributes == BatchAttributes::kHonoured;
  for (const CopyAttributes& attributes : batch.attributes) {
    const uint32_t order = attributes.source_access_order;
    if (order < kSourceAccessStream || order > kSourceAccessAny) {
      return Error::kInvalidValue;
    }
    const bool indirect =
        attributes.flags & (kCopyIndirectSource | kCopyIndirectDestination);
    if (profile_->cuda && (attributes.flags & ~kCopyPreferOverlap) != 0) {
      return Error::kInvalidValue;
    }
    if (flags_count && indirect && (attributes.flags & kCopySwap)) {
      if (batch.fail_index != nullptr) *batch.fail_index = kNoIndex;
      return Error::kInvalidValue;
    }
  }
  return Error::kSuccess;
}

Error Runtime::plan_batch(const Caller& caller, const Batch& batch,
                          std::vector<Copy>* copies) const {
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

  const bool flags_count = profile_->batch_attributes == BatchAttributes::kHonoured;
  size_t set = 0;
  for (size_t i = 0; i < batch.count; ++i) {
    while (set + 1 < batch.attributes.size() && batch.first_copies[set + 1] <= i) ++set;
    const uint32_t flags =
        batch.attributes.empty() || !flags_count ? 0 : batch.attributes[set].flags;
    // A CUDA device has copy engines for every copy of a batch.
    const bool prefer_sdma = (flags & kCopyPreferSdma) != 0 || profile_->cuda;
    Copy copy;
    const Error error = batch.sizes[i] == 0
                            ? Error::kInvalidValue
                            : plan(caller, {as_number(batch.destinations[i])},
                                   {as_number(batch.sources[i])}, {batch.sizes[i]},
                                   false, prefer_sdma, &copy);
    if (error != Error::kSuccess) {
      if (profile_->batch_is_a_loop) set_fail_index(i);
      return error;
    }
    copies->push_back(copy);
  }

  // A device that has no packets for these refuses them; the simulated one is such.
  const bool refused = std::any_of(
      batch.attributes.begin(), batch.attributes.end(), [](const CopyAttributes& each) {
        return each.flags &
               (kCopySwap | kCopyIndirectSource | kCopyIndirectDestination);
      });
  return flags_count && refused ? Error::kNotSupported : Error::kSuccess;
}

Error Runtime::copy_batch(const Caller& thread, const Batch& batch, Handle stream) {
  std::unique_lock lock(mutex_);
  Caller caller = thread;
  const StreamRef found = find_stream(caller, stream);
  if (!found) return Error::kInvalidHandle;
  // HIP has no word on captures here: the copies run at once and are not recorded.
  if (profile_->cuda) {
    if (stream == 0) return Error::kInvalidValue;
    if (captures_.status(stream) != CaptureStatus::kNone) {
      return Error::kCaptureUnsupported;
    }
    if (batch.fail_index != nullptr) *batch.fail_index = kNoIndex;
    caller.device = streams_.at(stream).device;
  }
  const bool wants_index = profile_->batch_is_a_loop && !profile_->cuda;
  if (batch.destinations == nullptr || batch.sources == nullptr ||
      batch.sizes == nullptr || batch.count == 0 ||
      (wants_index && batch.fail_index == nullptr)) {
    return Error::kInvalidValue;
  }
  if (const Error error = check_attributes(batch); error != Error::kSuccess) {
    return error;
  }
  auto copies = std::make_shared<std::vector<Copy>>();
  copies->reserve(std::min(batch.count, size_t{1} << 20));
  const Error error = plan_batch(caller, batch, copies.get());
  if (copies->empty() || (error != Error::kSuccess && !profile_->batch_is_a_loop)) {
    return error;
  }

  const bool caller_waits =
      profile_->cuda ? settle_sources(batch, copies.get()) : must_wait(batch, *copies);
  const bool overruns = profile_->max_blit_batch != 0 &&
                        count_kernel_copies(*copies) > profile_->max_blit_batch;
  if (error == Error::kSuccess) {
    counters_.batch_calls += 1;
    counters_.batch_copies += batch.count;
  }
  const Work work = overruns ? memory_fault_work() : copy_work(copies);
  const int device = device_of(caller, stream);
  const Point done = scheduler_.submit(found, work(device));
  lock.unlock();
  if (caller_waits) scheduler_.wait(done);
  return error;
}

void Runtime::blame_first_copy(const Batch& batch) const {
  if (batch.fail_index == nullptr) return;
  *batch.fail_index = profile().batch_is_a_loop ? 0 : kNoIndex;
}

// --- fills -------------------------------------------------------------------------

Error Runtime::fill(const Caller& caller, void* destination, int value, size_t bytes,
                    Handle stream, bool blocking) {
  std::unique_lock lock(mutex_);
  if (blocking) {
    const Error error = forbid_synchronous_call(caller);
    if (error != Error::kSuccess) return error;
  }
  Target target;
  Error error = find_target(caller, stream, &target);
  if (error != Error::kSuccess) return error;
  if (bytes == 0) return Error::kSuccess;
  Side side{as_number(destination)};
  error = locate(target.caller, &side, bytes, false, true);
  if (error != Error::kSuccess) return error;
  if (is_pageable(side.place)) return Error::kInvalidValue;

  const std::optional<Point> done =
      enqueue(target, [this, side, value, bytes](int device) {
        Operation operation;
        operation.latency = switches_.fill_latency.value_or(switches_.copy_latency);
        operation.run = [=](const std::atomic<bool>& abandoned) {
          if (abandoned || gpu_error_ != Error::kSuccess) return;
          std::shared_lock in_use(memory_in_use_);
          if (!may_touch(side, bytes, device, true)) {
            raise_memory_fault();
            return;
          }
          std::memset(reinterpret_cast<void*>(side.place.reach), value, bytes);
          std::lock_guard account_lock(mutex_);
          counters_.fills.copies += 1;
          counters_.fills.bytes += bytes;
        };
        return operation;
      });
  // A blocking fill of device memory only queues, HIP's when it begins at the base.
  const bool queues =
      side.place.on_device() && (profile_->cuda || side.place.base == side.address);
  lock.unlock();
  if (done && blocking && !queues) scheduler_.wait(*done);
  return Error::kSuccess;
}

}  // namespace hipsim
