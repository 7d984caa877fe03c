// SPDX-License-Identifier: Apache-2.0
//
// Captures and graphs for cases.
#pragma once

#include <cstddef>
#include <functional>

#include "contract.h"

namespace contract {

constexpr hipStreamCaptureMode kCaptureModes[] = {hipStreamCaptureModeGlobal,
                                                  hipStreamCaptureModeThreadLocal,
                                                  hipStreamCaptureModeRelaxed};
constexpr unsigned kStreamKinds[] = {hipStreamDefault, hipStreamNonBlocking};

class Graph : public Holder<hipGraph_t, &hipGraphDestroy> {
 public:
  Graph() = default;
  explicit Graph(hipGraph_t graph) : Holder(graph) {}
  size_t nodes() const;
};

class Executable : public Holder<hipGraphExec_t, &hipGraphExecDestroy> {
 public:
  Executable() = default;
  explicit Executable(hipGraph_t graph);
};

hipStreamCaptureStatus capture_status(hipStream_t stream);

// They end the case when they fail.
void begin_capture(hipStream_t stream,
                   hipStreamCaptureMode mode = hipStreamCaptureModeGlobal);
Graph end_capture(hipStream_t stream);
Graph capture(hipStream_t stream, const std::function<void()>& work,
              hipStreamCaptureMode mode = hipStreamCaptureModeRelaxed);

// Launches and waits for the stream.
void replay(hipGraphExec_t executable, hipStream_t stream);

}  // namespace contract
