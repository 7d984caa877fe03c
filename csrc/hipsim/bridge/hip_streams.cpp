// SPDX-License-Identifier: Apache-2.0
#include "bridge/hip_api.h"
#include "bridge/hip_call.h"

using hipsim::api;
using hipsim::as_handle;
using hipsim::as_stream;
using hipsim::Call;
using hipsim::Caller;
using hipsim::Error;
using hipsim::Runtime;
using hipsim::StreamKind;

namespace {

hipError_t create_stream(Call call, hipStream_t* stream, unsigned flags) {
  return api(call, [=](Runtime& rt, const Caller& caller) {
    if (stream == nullptr || flags > hipStreamNonBlocking) return Error::kInvalidValue;
    const StreamKind kind = flags == hipStreamNonBlocking ? StreamKind::kNonBlocking
                                                          : StreamKind::kBlocking;
    *stream = reinterpret_cast<hipStream_t>(rt.create_stream(caller.device, kind));
    return Error::kSuccess;
  });
}

hipError_t create_event(Call call, hipEvent_t* event, unsigned flags) {
  constexpr unsigned kRelease =
      hipEventDisableSystemFence | hipEventReleaseToDevice | hipEventReleaseToSystem;
  constexpr unsigned kKnown =
      hipEventBlockingSync | hipEventDisableTiming | hipEventInterprocess | kRelease;
  return api(call, [=](Runtime& rt, const Caller& caller) {
    const unsigned release = flags & kRelease;
    const bool timing = (flags & hipEventDisableTiming) == 0;
    if (event == nullptr || (flags & ~kKnown) != 0 || (release & (release - 1)) != 0 ||
        (timing && (flags & hipEventInterprocess) != 0)) {
      return Error::kInvalidValue;
    }
    *event = reinterpret_cast<hipEvent_t>(rt.create_event(caller.device, timing));
    return Error::kSuccess;
  });
}

}  // namespace

// --- streams -----------------------------------------------------------------------

hipError_t hipStreamCreate(hipStream_t* stream) {
  return create_stream(Call::hipStreamCreate, stream, hipStreamDefault);
}

hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags) {
  return create_stream(Call::hipStreamCreateWithFlags, stream, flags);
}

// A priority outside the range is moved to its nearest end, so any value is right.
hipError_t hipStreamCreateWithPriority(hipStream_t* stream, unsigned flags, int) {
  return create_stream(Call::hipStreamCreateWithPriority, stream, flags);
}

hipError_t hipStreamDestroy(hipStream_t stream) {
  return api(Call::hipStreamDestroy, [=](Runtime& rt, const Caller&) {
    return rt.destroy_stream(as_stream(stream));
  });
}

hipError_t hipStreamQuery(hipStream_t stream) {
  return api(Call::hipStreamQuery, [=](Runtime& rt, const Caller& caller) {
    return rt.query_stream(caller, as_stream(stream));
  });
}

hipError_t hipStreamSynchronize(hipStream_t stream) {
  return api(Call::hipStreamSynchronize, [=](Runtime& rt, const Caller& caller) {
    return rt.synchronize_stream(caller, as_stream(stream));
  });
}

hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event, unsigned flags) {
  return api(Call::hipStreamWaitEvent, [=](Runtime& rt, const Caller& caller) {
    if (flags > hipEventWaitExternal) return Error::kInvalidValue;
    // An external wait is a node of its own kind, and none of ours.
    if (flags == hipEventWaitExternal) return Error::kInvalidHandle;
    return rt.wait_event(caller, as_stream(stream), as_handle(event));
  });
}

// --- events ------------------------------------------------------------------------

hipError_t hipEventCreate(hipEvent_t* event) {
  return create_event(Call::hipEventCreate, event, hipEventDefault);
}

hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
  return create_event(Call::hipEventCreateWithFlags, event, flags);
}

hipError_t hipEventDestroy(hipEvent_t event) {
  return api(Call::hipEventDestroy, [=](Runtime& rt, const Caller&) {
    if (event == nullptr) return Error::kInvalidHandle;
    return rt.destroy_event(as_handle(event));
  });
}

hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  return api(Call::hipEventRecord, [=](Runtime& rt, const Caller& caller) {
    return rt.record_event(caller, as_handle(event), as_stream(stream));
  });
}

hipError_t hipEventQuery(hipEvent_t event) {
  return api(Call::hipEventQuery, [=](Runtime& rt, const Caller& caller) {
    return rt.query_event(caller, as_handle(event));
  });
}

hipError_t hipEventSynchronize(hipEvent_t event) {
  return api(Call::hipEventSynchronize, [=](Runtime& rt, const Caller& caller) {
    return rt.synchronize_event(caller, as_handle(event));
  });
}

hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start, hipEvent_t stop) {
  return api(Call::hipEventElapsedTime, [=](Runtime& rt, const Caller&) {
    if (milliseconds == nullptr) return Error::kInvalidValue;
    return rt.elapsed_time(as_handle(start), as_handle(stop), milliseconds);
  });
}
