// SPDX-License-Identifier: Apache-2.0
#include "bridge/cuda_api.h"
#include "bridge/cuda_call.h"
#include "bridge/graphs.h"

using hipsim::api;
using hipsim::as_handle;
using hipsim::as_stream;
using hipsim::Call;
using hipsim::Caller;
using hipsim::CaptureMode;
using hipsim::CaptureStatus;
using hipsim::Error;
using hipsim::Handle;
using hipsim::Needs;
using hipsim::needs_of;
using hipsim::Runtime;
using hipsim::this_thread;

// --- capture -----------------------------------------------------------------------

CUresult cuStreamBeginCapture_v2(CUstream stream, CUstreamCaptureMode mode) {
  return api(
      needs_of(stream), Call::cuStreamBeginCapture_v2, [=](Runtime& rt, const Caller&) {
        return rt.begin_capture(as_stream(stream), static_cast<CaptureMode>(mode));
      });
}

CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
  return api(needs_of(stream), Call::cuStreamEndCapture,
             [=](Runtime& rt, const Caller&) {
               return hipsim::end_capture(rt, as_stream(stream), graph);
             });
}

CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
  return api(needs_of(stream), Call::cuStreamIsCapturing,
             [=](Runtime& rt, const Caller& caller) {
               if (status == nullptr) return Error::kInvalidValue;
               CaptureStatus found = CaptureStatus::kNone;
               uint64_t id = 0;
               const Error error =
                   as_stream(stream) == 0
                       ? rt.legacy_capture_status(caller)
                       : rt.capture_status(as_stream(stream), &found, &id);
               if (error == Error::kSuccess) {
                 *status = static_cast<CUstreamCaptureStatus>(found);
               }
               return error;
             });
}

CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode) {
  return api(Needs::kDriver, Call::cuThreadExchangeStreamCaptureMode,
             [=](Runtime&, const Caller&) {
               return hipsim::exchange_capture_mode(&this_thread().caller, mode);
             });
}

// --- graphs ------------------------------------------------------------------------

CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes, size_t* count) {
  return api(Needs::kWork, Call::cuGraphGetNodes, [=](Runtime& rt, const Caller&) {
    return hipsim::list_nodes(rt, graph, nodes, count);
  });
}

CUresult cuGraphDestroy(CUgraph graph) {
  return api(Needs::kWork, Call::cuGraphDestroy, [=](Runtime& rt, const Caller&) {
    return rt.destroy_graph(as_handle(graph));
  });
}

CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable, CUgraph graph,
                                     unsigned long long flags) {
  constexpr unsigned long long kKnown =
      CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
      CUDA_GRAPH_INSTANTIATE_FLAG_DEVICE_LAUNCH |
      CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;
  return api(Call::cuGraphInstantiateWithFlags, [=](Runtime& rt, const Caller& caller) {
    if (executable == nullptr || graph == nullptr || (flags & ~kKnown) != 0) {
      return Error::kInvalidValue;
    }
    Handle made = 0;
    const Error error = rt.instantiate(caller, as_handle(graph), &made);
    if (error == Error::kSuccess) *executable = reinterpret_cast<CUgraphExec>(made);
    return error;
  });
}

CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream) {
  return api(needs_of(stream), Call::cuGraphLaunch,
             [=](Runtime& rt, const Caller& caller) {
               return rt.launch(caller, as_handle(executable), as_stream(stream));
             });
}

CUresult cuGraphExecDestroy(CUgraphExec executable) {
  return api(Needs::kWork, Call::cuGraphExecDestroy,
             [=](Runtime& rt, const Caller& caller) {
               return rt.destroy_executable(caller, as_handle(executable));
             });
}
