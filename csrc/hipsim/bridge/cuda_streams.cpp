// SPDX-License-Identifier: Apache-2.0
#include "bridge/cuda_api.h"
#include "bridge/cuda_call.h"

using hipsim::api;
using hipsim::as_handle;
using hipsim::as_stream;
using hipsim::Call;
using hipsim::Caller;
using hipsim::Error;
using hipsim::Needs;
using hipsim::needs_of;
using hipsim::Runtime;
using hipsim::StreamKind;

namespace {

CUresult create_stream(Call call, CUstream* stream, unsigned flags) {
  return api(call, [=](Runtime& rt, const Caller& caller) {
    if (stream == nullptr || flags > CU_STREAM_NON_BLOCKING) {
      return Error::kInvalidValue;
    }
    const StreamKind kind = flags == CU_STREAM_NON_BLOCKING ? StreamKind::kNonBlocking
                                                            : StreamKind::kBlocking;
    *stream = reinterpret_cast<CUstream>(rt.create_stream(caller.device, kind));
    return Error::kSuccess;
  });
}

}  // namespace

// --- streams -----------------------------------------------------------------------

CUresult cuStreamCreate(CUstream* stream, unsigned flags) {
  return create_stream(Call::cuStreamCreate, stream, flags);
}

// A priority outside the range is moved to its nearest end, so any value is right.
CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags, int) {
  return create_stream(Call::cuStreamCreateWithPriority, stream, flags);
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  // The two that nobody made are refused before anything else is asked.
  const Needs needs = as_stream(stream) == 0 ? Needs::kNothing : Needs::kWork;
  return api(needs, Call::cuStreamDestroy_v2, [=](Runtime& rt, const Caller&) {
    return rt.destroy_stream(as_stream(stream));
  });
}

CUresult cuStreamQuery(CUstream stream) {
  return api(needs_of(stream), Call::cuStreamQuery,
             [=](Runtime& rt, const Caller& caller) {
               return rt.query_stream(caller, as_stream(stream));
             });
}

CUresult cuStreamSynchronize(CUstream stream) {
  return api(needs_of(stream), Call::cuStreamSynchronize,
             [=](Runtime& rt, const Caller& caller) {
               return rt.synchronize_stream(caller, as_stream(stream));
             });
}

CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned flags) {
  return api(needs_of(stream), Call::cuStreamWaitEvent,
             [=](Runtime& rt, const Caller& caller) {
               if (flags > CU_EVENT_WAIT_EXTERNAL) return Error::kInvalidValue;
               // An external wait is a node of its own kind in a capture, and none of
               // ours.
               if (flags == CU_EVENT_WAIT_EXTERNAL) return Error::kIllegalState;
               return rt.wait_event(caller, as_stream(stream), as_handle(event));
             });
}

// --- events ------------------------------------------------------------------------

CUresult cuEventCreate(CUevent* event, unsigned flags) {
  constexpr unsigned kKnown =
      CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING | CU_EVENT_INTERPROCESS;
  return api(Call::cuEventCreate, [=](Runtime& rt, const Caller& caller) {
    const bool timing = (flags & CU_EVENT_DISABLE_TIMING) == 0;
    if (event == nullptr || (flags & ~kKnown) != 0 ||
        (timing && (flags & CU_EVENT_INTERPROCESS) != 0)) {
      return Error::kInvalidValue;
    }
    *event = reinterpret_cast<CUevent>(rt.create_event(caller.device, timing));
    return Error::kSuccess;
  });
}

CUresult cuEventDestroy_v2(CUevent event) {
  return api(needs_of(event), Call::cuEventDestroy_v2, [=](Runtime& rt, const Caller&) {
    const Error error = rt.destroy_event(as_handle(event));
    return error == Error::kContextIsDestroyed ? Error::kInvalidHandle : error;
  });
}

CUresult cuEventRecord(CUevent event, CUstream stream) {
  return api(needs_of(stream), Call::cuEventRecord,
             [=](Runtime& rt, const Caller& caller) {
               return rt.record_event(caller, as_handle(event), as_stream(stream));
             });
}

CUresult cuEventQuery(CUevent event) {
  return api(needs_of(event), Call::cuEventQuery,
             [=](Runtime& rt, const Caller& caller) {
               return rt.query_event(caller, as_handle(event));
             });
}

CUresult cuEventSynchronize(CUevent event) {
  return api(needs_of(event), Call::cuEventSynchronize,
             [=](Runtime& rt, const Caller& caller) {
               return rt.synchronize_event(caller, as_handle(event));
             });
}

CUresult cuEventElapsedTime(float* milliseconds, CUevent start, CUevent stop) {
  const Needs needs = start == nullptr ? needs_of(start) : needs_of(stop);
  return api(needs, Call::cuEventElapsedTime, [=](Runtime& rt, const Caller&) {
    if (milliseconds == nullptr) return Error::kInvalidHandle;
    return rt.elapsed_time(as_handle(start), as_handle(stop), milliseconds);
  });
}
