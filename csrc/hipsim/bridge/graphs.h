// SPDX-License-Identifier: Apache-2.0
//
// What the vendors' graph calls have in common but for the names of their types.
#pragma once

#include "engine/runtime.h"

namespace hipsim {

// Swaps the thread's capture mode with `mode`, whose type counts as CaptureMode does.
template <typename Mode>
Error exchange_capture_mode(Caller* caller, Mode* mode) {
  if (mode == nullptr || static_cast<CaptureMode>(*mode) > CaptureMode::kRelaxed) {
    return Error::kInvalidValue;
  }
  const CaptureMode before = caller->capture_mode;
  caller->capture_mode = static_cast<CaptureMode>(*mode);
  *mode = static_cast<Mode>(before);
  return Error::kSuccess;
}

// Without `nodes` tells their number alone; with it, `count` is the room that there is,
// and what is left of the room becomes null.
template <typename Graph, typename Node>
Error list_nodes(const Runtime& rt, Graph graph, Node* nodes, size_t* count) {
  if (graph == nullptr || count == nullptr) return Error::kInvalidValue;
  Handle first = 0;
  size_t found = 0;
  const Error error = rt.graph_nodes(reinterpret_cast<Handle>(graph), &first, &found);
  if (error != Error::kSuccess) return error;
  if (nodes != nullptr) {
    for (size_t i = 0; i < *count; ++i) {
      nodes[i] = i < found ? reinterpret_cast<Node>(first + i) : nullptr;
    }
    if (*count < found) return Error::kSuccess;
  }
  *count = found;
  return Error::kSuccess;
}

// Ends the capture. A caller without a place for the graph gets none.
template <typename Graph>
Error end_capture(Runtime& rt, Handle stream, Graph* graph) {
  Handle made = 0;
  const Error error = rt.end_capture(stream, graph == nullptr ? nullptr : &made);
  if (graph != nullptr) *graph = reinterpret_cast<Graph>(made);
  return error;
}

}  // namespace hipsim
