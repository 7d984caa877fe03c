// SPDX-License-Identifier: Apache-2.0
#include "bridge/graphs.h"
#include "bridge/hip_api.h"
#include "bridge/hip_call.h"

using hipsim::api;
using hipsim::as_handle;
using hipsim::as_stream;
using hipsim::Call;
using hipsim::Caller;
using hipsim::CaptureMode;
using hipsim::CaptureStatus;
using hipsim::Error;
using hipsim::Handle;
using hipsim::Runtime;
using hipsim::this_thread;

namespace {

hipError_t instantiate(Call call, hipGraphExec_t* executable, hipGraph_t graph,
                       unsigned long long flags) {
  // One or the other, not both.
  const bool known = flags == 0 || flags == hipGraphInstantiateFlagAutoFreeOnLaunch ||
                     flags == hipGraphInstantiateFlagUseNodePriority;
  return api(call, [=](Runtime& rt, const Caller& caller) {
    if (executable == nullptr || graph == nullptr || !known) {
      return Error::kInvalidValue;
    }
    Handle made = 0;
    const Error error = rt.instantiate(caller, as_handle(graph), &made);
    if (error == Error::kSuccess) *executable = reinterpret_cast<hipGraphExec_t>(made);
    return error;
  });
}

hipError_t capture_status(Call call, hipStream_t stream, hipStreamCaptureStatus* status,
                          unsigned long long* id) {
  return api(call, [=](Runtime& rt, const Caller&) {
    if (status == nullptr) return Error::kInvalidValue;
    CaptureStatus found = CaptureStatus::kNone;
    uint64_t found_id = 0;
    const Error error = rt.capture_status(as_stream(stream), &found, &found_id);
    if (error != Error::kSuccess) return error;
    *status = static_cast<hipStreamCaptureStatus>(found);
    if (id != nullptr && found == CaptureStatus::kActive) *id = found_id;
    return Error::kSuccess;
  });
}

}  // namespace

// --- capture -----------------------------------------------------------------------

hipError_t hipStreamBeginCapture(hipStream_t stream, hipStreamCaptureMode mode) {
  return api(Call::hipStreamBeginCapture, [=](Runtime& rt, const Caller&) {
    return rt.begin_capture(as_stream(stream), static_cast<CaptureMode>(mode));
  });
}

hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph) {
  return api(Call::hipStreamEndCapture, [=](Runtime& rt, const Caller&) {
    return hipsim::end_capture(rt, as_stream(stream), graph);
  });
}

hipError_t hipStreamIsCapturing(hipStream_t stream, hipStreamCaptureStatus* status) {
  return capture_status(Call::hipStreamIsCapturing, stream, status, nullptr);
}

hipError_t hipStreamGetCaptureInfo(hipStream_t stream, hipStreamCaptureStatus* status,
                                   unsigned long long* id) {
  return capture_status(Call::hipStreamGetCaptureInfo, stream, status, id);
}

hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode) {
  return api(Call::hipThreadExchangeStreamCaptureMode, [=](Runtime&, const Caller&) {
    return hipsim::exchange_capture_mode(&this_thread().caller, mode);
  });
}

// --- graphs ------------------------------------------------------------------------

hipError_t hipGraphGetNodes(hipGraph_t graph, hipGraphNode_t* nodes, size_t* count) {
  return api(Call::hipGraphGetNodes, [=](Runtime& rt, const Caller&) {
    return hipsim::list_nodes(rt, graph, nodes, count);
  });
}

hipError_t hipGraphDestroy(hipGraph_t graph) {
  return api(Call::hipGraphDestroy, [=](Runtime& rt, const Caller&) {
    return rt.destroy_graph(as_handle(graph));
  });
}

hipError_t hipGraphInstantiate(hipGraphExec_t* executable, hipGraph_t graph,
                               hipGraphNode_t* error_node, char* log_buffer,
                               size_t log_bytes) {
  if (error_node != nullptr) *error_node = nullptr;
  if (log_buffer != nullptr && log_bytes > 0) *log_buffer = '\0';
  return instantiate(Call::hipGraphInstantiate, executable, graph, 0);
}

hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* executable, hipGraph_t graph,
                                        unsigned long long flags) {
  return instantiate(Call::hipGraphInstantiateWithFlags, executable, graph, flags);
}

hipError_t hipGraphLaunch(hipGraphExec_t executable, hipStream_t stream) {
  return api(Call::hipGraphLaunch, [=](Runtime& rt, const Caller& caller) {
    return rt.launch(caller, as_handle(executable), as_stream(stream));
  });
}

hipError_t hipGraphExecDestroy(hipGraphExec_t executable) {
  return api(Call::hipGraphExecDestroy, [=](Runtime& rt, const Caller& caller) {
    return rt.destroy_executable(caller, as_handle(executable));
  });
}
