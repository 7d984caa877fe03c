// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <functional>
#include <string>

#include "contract.h"

namespace contract {

// What a call does to a capture: what it returns, what the capture's state is then, and
// what its end returns.
struct Effect {
  CUresult call = CUDA_SUCCESS;
  int status = 0;
  CUresult end = CUDA_SUCCESS;
};
inline bool operator==(const Effect& a, const Effect& b) {
  return a.call == b.call && a.status == b.status && a.end == b.end;
}
std::string describe(const Effect& effect);

constexpr Effect harmless(CUresult call = CUDA_SUCCESS) {
  return {call, CU_STREAM_CAPTURE_STATUS_ACTIVE, CUDA_SUCCESS};
}
constexpr Effect breaks_it(CUresult call) {
  return {call, CU_STREAM_CAPTURE_STATUS_INVALIDATED,
          CUDA_ERROR_STREAM_CAPTURE_INVALIDATED};
}

// How a capture and a call meet.
struct Meeting {
  CUstreamCaptureMode mode;
  bool blocking;      // is the capturing stream
  bool other_thread;  // makes the call
};
std::string describe(const Meeting& meeting);

using Rule = Effect (*)(const Meeting& meeting);

Effect is_harmless(const Meeting& meeting);

// What a thread may not do that captures, and others not during a global capture.
Effect is_unsafe(const Meeting& meeting);

// What would wait for the legacy stream and so for a blocking stream that captures.
Effect is_implicit(const Meeting& meeting);
Effect is_implicit_and_unsafe(const Meeting& meeting);

// What no mode allows.
Effect is_forbidden(const Meeting& meeting);

// Asks what a call does to a capture of `stream` in every meeting. `after` undoes what
// the call did, once the capture is over.
struct Asked {
  std::function<CUresult(CUstream stream)> call;
  std::function<void()> after = [] {};
  std::function<void()> before = [] {};
};
void ask_meetings(Rule rule, const Asked& asked);

}  // namespace contract
