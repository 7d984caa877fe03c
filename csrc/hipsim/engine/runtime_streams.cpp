// SPDX-License-Identifier: Apache-2.0
#include <thread>
#include <utility>

#include "engine/runtime.h"

namespace hipsim {
int Runtime::device_of(const Caller& caller, Handle stream) const {
  return stream == 0 ? caller.device : streams_.at(stream).device;
}

StreamRef Runtime::find_stream(const Caller& caller, Handle stream) {
  if (stream == 0) return scheduler_.null_stream(caller.device);
  const auto it = streams_.find(stream);
  return it == streams_.end() ? nullptr : it->second.stream;
}

// --- devices -----------------------------------------------------------------------

Error Runtime::synchronize_device(const Caller& caller) {
  {
    std::lock_guard lock(mutex_);
    bool breaks = captures_.any_active();
    if (profile_->cuda) {
      // A context knows the captures of its own streams.
      breaks = captures_.invalidate_those([&](Handle stream, bool) {
        return streams_.at(stream).device == caller.device;
      });
    } else if (breaks) {
      captures_.invalidate_all();
    }
    if (breaks) return Error::kCaptureUnsupported;
  }
  scheduler_.drain_device(caller.device);
  return Error::kSuccess;
}

// --- streams -----------------------------------------------------------------------

Handle Runtime::create_stream(int device, StreamKind kind) {
  std::lock_guard lock(mutex_);
  const Handle handle = new_handle();
  streams_[handle] = {scheduler_.create(device, kind), device,
                      kind == StreamKind::kBlocking};
  return handle;
}

Error Runtime::destroy_stream(Handle stream) {
  std::unique_lock lock(mutex_);
  const auto it = streams_.find(stream);
  if (it == streams_.end()) return Error::kInvalidHandle;
  const StreamRef doomed = it->second.stream;
  captures_.forget(stream);
  streams_.erase(it);
  lock.unlock();
  scheduler_.destroy(doomed);
  return Error::kSuccess;
}

// HIP's null stream may be asked at any time.
Error Runtime::check_stream_poll(const Caller& caller, Handle stream) {
  if (stream == 0) {
    if (!profile_->cuda) return Error::kSuccess;
    const Error error = forbid_legacy_work(caller);
    return error != Error::kSuccess ? error : forbid_unsafe_call(caller);
  }
  if (captures_.status(stream) != CaptureStatus::kNone) {
    captures_.invalidate(captures_.id(stream));
    return Error::kCaptureUnsupported;
  }
  return forbid_unsafe_call(caller);
}

Error Runtime::query_stream(const Caller& caller, Handle stream) {
  std::lock_guard lock(mutex_);
  const StreamRef found = find_stream(caller, stream);
  if (!found) return Error::kInvalidHandle;
  if (const Error error = check_stream_poll(caller, stream); error != Error::kSuccess) {
    return error;
  }
  return scheduler_.idle(found) ? Error::kSuccess : Error::kNotReady;
}

Error Runtime::synchronize_stream(const Caller& caller, Handle stream) {
  std::unique_lock lock(mutex_);
  const StreamRef found = find_stream(caller, stream);
  if (!found) return Error::kInvalidHandle;
  if (const Error error = check_stream_poll(caller, stream); error != Error::kSuccess) {
    return error;
  }
  lock.unlock();
  scheduler_.drain(found);
  return Error::kSuccess;
}

Error Runtime::wait_event(const Caller& caller, Handle stream, Handle event) {
  std::lock_guard lock(mutex_);
  const StreamRef found = find_stream(caller, stream);
  const auto it = events_.find(event);
  if (!found || it == events_.end()) return Error::kInvalidHandle;
  const Event& awaited = it->second;
  const CaptureStatus status = captures_.status(stream);
  if (status == CaptureStatus::kInvalidated) return Error::kCaptureInvalidated;

  if (awaited.captured) {
    if (profile_->cuda && !captures_.is_active(awaited.captured->capture)) {
      return Error::kInvalidValue;
    }
    if (stream == 0) {
      captures_.invalidate(awaited.captured->capture);
      return Error::kCaptureImplicit;
    }
    return captures_.join(stream, streams_.at(stream).blocking, *awaited.captured);
  }
  const bool capturing = status == CaptureStatus::kActive;
  if (profile_->cuda) {
    if (stream == 0) {
      const Error error = forbid_legacy_work(caller);
      if (error != Error::kSuccess) return error;
    }
    if (awaited.recording && capturing) {
      captures_.invalidate(captures_.id(stream));
      return Error::kCaptureIsolation;
    }
  } else if (awaited.recording &&
             captures_.status(awaited.stream) == CaptureStatus::kActive) {
    return Error::kCaptureIsolation;
  }
  if (awaited.recording) {
    Operation wait;
    wait.after = {awaited.recording->point};
    scheduler_.submit(found, std::move(wait));
  }
  return Error::kSuccess;
}

// --- events ------------------------------------------------------------------------

Handle Runtime::create_event(int device, bool timing) {
  std::lock_guard lock(mutex_);
  const Handle handle = new_handle();
  events_[handle].device = device;
  events_[handle].timing = timing;
  return handle;
}

Error Runtime::destroy_event(Handle event) {
  std::lock_guard lock(mutex_);
  return events_.erase(event) == 1 ? Error::kSuccess : Error::kContextIsDestroyed;
}

Error Runtime::record_event(const Caller& caller, Handle event, Handle stream) {
  std::lock_guard lock(mutex_);
  const auto it = events_.find(event);
  if (it == events_.end()) return Error::kInvalidHandle;
  Target target;
  const Error error = find_target(caller, stream, &target);
  if (error != Error::kSuccess) return error;
  const int device = device_of(caller, stream);
  if (device != it->second.device) return Error::kInvalidHandle;
  it->second.stream = stream;
  if (target.captures) {
    it->second.recording = nullptr;
    it->second.captured = captures_.point(stream);
    return Error::kSuccess;
  }
  auto recording = std::make_shared<Recording>();
  Operation record;
  record.run = [recording](const std::atomic<bool>&) {
    recording->time = std::chrono::steady_clock::now();
  };
  recording->point = scheduler_.submit(target.stream, std::move(record));
  it->second.recording = std::move(recording);
  it->second.captured.reset();
  return Error::kSuccess;
}

Error Runtime::check_event_poll(const Caller& caller, const Event& event) {
  if (event.captured && captures_.is_active(event.captured->capture)) {
    captures_.invalidate(event.captured->capture);
    return Error::kCapturedEvent;
  }
  if (profile_->cuda) {
    return event.captured ? Error::kInvalidValue : forbid_unsafe_call(caller);
  }
  const bool polls_work = event.recording && event.stream != 0;
  return polls_work ? forbid_unsafe_call(caller) : Error::kSuccess;
}

Error Runtime::query_event(const Caller& caller, Handle event) {
  std::lock_guard lock(mutex_);
  const auto it = events_.find(event);
  if (it == events_.end()) return Error::kInvalidHandle;
  if (const Error error = check_event_poll(caller, it->second);
      error != Error::kSuccess) {
    return error;
  }
  const std::shared_ptr<Recording>& recording = it->second.recording;
  const bool done = !recording || scheduler_.reached(recording->point);
  return done ? Error::kSuccess : Error::kNotReady;
}

Error Runtime::synchronize_event(const Caller& caller, Handle event) {
  std::unique_lock lock(mutex_);
  const auto it = events_.find(event);
  if (it == events_.end()) return Error::kInvalidHandle;
  if (const Error error = check_event_poll(caller, it->second);
      error != Error::kSuccess) {
    return error;
  }
  const std::shared_ptr<Recording> recording = it->second.recording;
  lock.unlock();
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
  if (first->second.device != last->second.device) return Error::kInvalidHandle;
  const Recording& from = *first->second.recording;
  const Recording& to = *last->second.recording;
  if (!scheduler_.reached(from.point) || !scheduler_.reached(to.point)) {
    return Error::kNotReady;
  }
  *milliseconds = std::chrono::duration<float, std::milli>(to.time - from.time).count();
  return Error::kSuccess;
}

}  // namespace hipsim
