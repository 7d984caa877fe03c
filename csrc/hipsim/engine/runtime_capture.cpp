// SPDX-License-Identifier: Apache-2.0
#include <thread>
#include <utility>

#include "engine/runtime.h"

namespace hipsim {
namespace {

// What an executable graph holds for the arguments of its kernels, of which the
// simulator has none; on hardware it is the arguments' size beside this.
constexpr size_t kKernelArgumentBytes = size_t{128} << 10;

}  // namespace

// --- work --------------------------------------------------------------------------

Error Runtime::find_target(const Caller& caller, Handle stream, Target* target) {
  target->stream = find_stream(caller, stream);
  target->handle = stream;
  target->caller = caller;
  target->device = caller.device;
  if (!target->stream) return Error::kInvalidHandle;
  if (stream == 0) return forbid_legacy_work(caller);
  target->device = streams_.at(stream).device;
  // HIP asks for the rights of the current device, CUDA for those of the stream's.
  if (profile_->cuda) target->caller.device = target->device;
  const CaptureStatus status = captures_.status(stream);
  target->captures = status == CaptureStatus::kActive;
  return status == CaptureStatus::kInvalidated ? Error::kCaptureInvalidated
                                               : Error::kSuccess;
}

std::optional<Point> Runtime::enqueue(const Target& target, const Work& work) {
  if (target.captures) {
    captures_.add(target.handle, work);
    return std::nullopt;
  }
  return scheduler_.submit(target.stream, work(target.device));
}

Captures::Meant Runtime::ordered_with_legacy_stream(const Caller& caller) const {
  return [this, device = caller.device](Handle stream, bool blocking) {
    return blocking && streams_.at(stream).device == device;
  };
}

Error Runtime::forbid_legacy_work(const Caller& caller) {
  bool breaks = false;
  if (profile_->cuda) {
    breaks = captures_.invalidate_those(ordered_with_legacy_stream(caller));
  } else if (profile_->legacy_work_breaks_captures && captures_.any_active()) {
    captures_.invalidate_all();
    breaks = true;
  }
  return breaks ? Error::kCaptureImplicit : Error::kSuccess;
}

Error Runtime::forbid_synchronous_call(const Caller& caller) {
  if (profile_->cuda) return forbid_legacy_work(caller);
  if (!captures_.any_active()) return Error::kSuccess;
  captures_.invalidate_all();
  return Error::kCaptureImplicit;
}

// --- capture -----------------------------------------------------------------------

Error Runtime::begin_capture(Handle stream, CaptureMode mode) {
  std::lock_guard lock(mutex_);
  if (stream == 0) return Error::kCaptureUnsupported;
  const auto it = streams_.find(stream);
  if (it == streams_.end()) return Error::kInvalidHandle;
  if (mode > CaptureMode::kRelaxed) return Error::kInvalidValue;
  return captures_.begin(stream, it->second.blocking, mode, std::this_thread::get_id());
}

Error Runtime::end_capture(Handle stream, Handle* graph) {
  std::lock_guard lock(mutex_);
  if (stream == 0) return Error::kIllegalState;
  if (streams_.count(stream) == 0) return Error::kContextIsDestroyed;
  Graph captured;
  const Error error = captures_.end(stream, std::this_thread::get_id(),
                                    !profile_->invalid_capture_ends, &captured);
  // In CUDA no capture survives an end in the wrong place.
  if (profile_->cuda && error == Error::kCaptureWrongThread) captures_.forget(stream);
  if (profile_->cuda && error == Error::kCaptureUnmatched) {
    captures_.invalidate(captures_.id(stream));
  }
  if (error != Error::kSuccess) return error;
  if (graph == nullptr) return Error::kSuccess;
  *graph = new_handle();
  const Handle first_node = next_handle_ + 1;
  next_handle_ += captured.nodes.size();
  graphs_[*graph] = {std::make_shared<const Graph>(std::move(captured)), first_node};
  return Error::kSuccess;
}

Error Runtime::capture_status(Handle stream, CaptureStatus* status,
                              uint64_t* id) const {
  std::lock_guard lock(mutex_);
  *status = CaptureStatus::kNone;
  *id = 0;
  if (stream == 0) {
    return captures_.any_blocking() ? Error::kCaptureImplicit : Error::kSuccess;
  }
  if (streams_.count(stream) == 0) return Error::kInvalidHandle;
  *status = captures_.status(stream);
  if (*status == CaptureStatus::kActive) *id = captures_.id(stream);
  return Error::kSuccess;
}

Error Runtime::legacy_capture_status(const Caller& caller) const {
  std::lock_guard lock(mutex_);
  return captures_.any_of_those(ordered_with_legacy_stream(caller))
             ? Error::kCaptureImplicit
             : Error::kSuccess;
}

// --- graphs ------------------------------------------------------------------------

Error Runtime::graph_nodes(Handle graph, Handle* first, size_t* count) const {
  std::lock_guard lock(mutex_);
  const auto it = graphs_.find(graph);
  if (it == graphs_.end()) return Error::kInvalidValue;
  *first = it->second.first_node;
  *count = it->second.graph->nodes.size();
  return Error::kSuccess;
}

Error Runtime::destroy_graph(Handle graph) {
  std::lock_guard lock(mutex_);
  if (graph == 0) return Error::kInvalidValue;
  return graphs_.erase(graph) == 1 ? Error::kSuccess : Error::kIllegalState;
}

Error Runtime::instantiate(const Caller& caller, Handle graph, Handle* executable) {
  std::lock_guard lock(mutex_);
  const auto it = graphs_.find(graph);
  if (it == graphs_.end()) return Error::kInvalidValue;
  size_t charged = kKernelArgumentBytes;
  if (profile_->cuda) {
    charged = 0;
    const Error error = forbid_unsafe_call(caller);
    if (error != Error::kSuccess) return error;
  }
  const Handle made = new_handle();
  executables_[made] = {it->second.graph, caller.device, charged};
  if (!memory_.vram(caller.device).charge(charged)) {
    executables_.erase(made);
    return Error::kOutOfMemory;
  }
  *executable = made;
  return Error::kSuccess;
}

Error Runtime::launch(const Caller& caller, Handle executable, Handle stream) {
  std::lock_guard lock(mutex_);
  const auto it = executables_.find(executable);
  if (it == executables_.end()) return Error::kInvalidValue;
  Target target;
  if (profile_->cuda) {
    const Error error = find_target(caller, stream, &target);
    if (error != Error::kSuccess) return error;
    if (target.captures) {
      captures_.invalidate(captures_.id(stream));
      return Error::kCaptureUnsupported;
    }
  } else {
    // HIP has no word on captures here: the graph runs at once and is not recorded.
    target.stream = find_stream(caller, stream);
    if (!target.stream) return Error::kContextIsDestroyed;
    target.device = device_of(caller, stream);
  }
  for (const GraphNode& node : it->second.graph->nodes) enqueue(target, node.work);
  return Error::kSuccess;
}

Error Runtime::destroy_executable(const Caller& caller, Handle executable) {
  std::lock_guard lock(mutex_);
  const auto it = executables_.find(executable);
  if (it == executables_.end()) return Error::kInvalidValue;
  if (profile_->cuda) {
    const Error error = forbid_unsafe_call(caller);
    if (error != Error::kSuccess) return error;
  }
  memory_.vram(it->second.device).refund(it->second.charged);
  executables_.erase(it);
  return Error::kSuccess;
}

}  // namespace hipsim
