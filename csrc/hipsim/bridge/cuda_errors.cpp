// SPDX-License-Identifier: Apache-2.0
#include "bridge/cuda_api.h"
#include "engine/error.h"

namespace {

struct Description {
  CUresult number;
  const char* name;
  const char* text;
};

#define ERROR(symbol, text) {symbol, #symbol, text}
// The texts are what CUDA's runtime library says of the same number.
constexpr Description kDescriptions[] = {
    ERROR(CUDA_SUCCESS, "no error"),
    ERROR(CUDA_ERROR_INVALID_VALUE, "invalid argument"),
    ERROR(CUDA_ERROR_OUT_OF_MEMORY, "out of memory"),
    ERROR(CUDA_ERROR_NOT_INITIALIZED, "initialization error"),
    ERROR(CUDA_ERROR_DEINITIALIZED, "driver shutting down"),
    ERROR(CUDA_ERROR_NO_DEVICE, "no CUDA-capable device is detected"),
    ERROR(CUDA_ERROR_INVALID_DEVICE, "invalid device ordinal"),
    ERROR(CUDA_ERROR_INVALID_CONTEXT, "invalid device context"),
    ERROR(CUDA_ERROR_MAP_FAILED, "mapping of buffer object failed"),
    ERROR(CUDA_ERROR_UNMAP_FAILED, "unmapping of buffer object failed"),
    ERROR(CUDA_ERROR_ALREADY_MAPPED, "resource already mapped"),
    ERROR(CUDA_ERROR_NOT_MAPPED, "resource not mapped"),
    ERROR(CUDA_ERROR_CONTEXT_ALREADY_IN_USE,
          "exclusive-thread device already in use by a different thread"),
    ERROR(CUDA_ERROR_PEER_ACCESS_UNSUPPORTED,
          "peer access is not supported between these two devices"),
    ERROR(CUDA_ERROR_OPERATING_SYSTEM,
          "OS call failed or operation not supported on this OS"),
    ERROR(CUDA_ERROR_INVALID_HANDLE, "invalid resource handle"),
    ERROR(CUDA_ERROR_ILLEGAL_STATE,
          "the operation cannot be performed in the present state"),
    ERROR(CUDA_ERROR_NOT_FOUND, "named symbol not found"),
    ERROR(CUDA_ERROR_NOT_READY, "device not ready"),
    ERROR(CUDA_ERROR_ILLEGAL_ADDRESS, "an illegal memory access was encountered"),
    ERROR(CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "peer access is already enabled"),
    ERROR(CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "peer access has not been enabled"),
    ERROR(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE,
          "cannot set while device is active in this process"),
    ERROR(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed"),
    ERROR(CUDA_ERROR_ASSERT, "device-side assert triggered"),
    ERROR(CUDA_ERROR_TOO_MANY_PEERS, "peer mapping resources exhausted"),
    ERROR(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
          "part or all of the requested memory range is already mapped"),
    ERROR(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED,
          "pointer does not correspond to a registered memory region"),
    ERROR(CUDA_ERROR_LAUNCH_FAILED, "unspecified launch failure"),
    ERROR(CUDA_ERROR_NOT_PERMITTED, "operation not permitted"),
    ERROR(CUDA_ERROR_NOT_SUPPORTED, "operation not supported"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
          "operation not permitted when stream is capturing"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
          "operation failed due to a previous error during capture"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_MERGE,
          "operation would result in a merge of separate capture sequences"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNMATCHED,
          "capture was not ended in the same stream as it began"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_UNJOINED, "capturing stream has unjoined work"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_ISOLATION,
          "dependency created on uncaptured work in another stream"),
    ERROR(
        CUDA_ERROR_STREAM_CAPTURE_IMPLICIT,
        "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(CUDA_ERROR_CAPTURED_EVENT,
          "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD,
          "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(CUDA_ERROR_TIMEOUT, "wait operation timed out"),
    ERROR(CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE,
          "the graph update was not performed because it included changes which "
          "violated constraints specific to instantiated graph update"),
    ERROR(CUDA_ERROR_UNKNOWN, "unknown error"),
};
#undef ERROR

// Sets `*text` to the member of the error's description, to null when it has none.
CUresult describe(CUresult error, const char* Description::* member,
                  const char** text) {
  if (text == nullptr) return CUDA_ERROR_INVALID_VALUE;
  for (const Description& description : kDescriptions) {
    if (description.number == error) {
      *text = description.*member;
      return CUDA_SUCCESS;
    }
  }
  *text = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}

template <CUresult cuda, hipsim::Error engine>
constexpr bool same = static_cast<int>(cuda) == static_cast<int>(engine);

// All but kInvalidPitch and kInvalidCopyDirection, which CUDA's driver does not know.
using hipsim::Error;
static_assert(same<CUDA_SUCCESS, Error::kSuccess>);
static_assert(same<CUDA_ERROR_INVALID_VALUE, Error::kInvalidValue>);
static_assert(same<CUDA_ERROR_OUT_OF_MEMORY, Error::kOutOfMemory>);
static_assert(same<CUDA_ERROR_NOT_INITIALIZED, Error::kNotInitialized>);
static_assert(same<CUDA_ERROR_NO_DEVICE, Error::kNoDevice>);
static_assert(same<CUDA_ERROR_INVALID_DEVICE, Error::kInvalidDevice>);
static_assert(same<CUDA_ERROR_INVALID_CONTEXT, Error::kInvalidContext>);
static_assert(same<CUDA_ERROR_INVALID_HANDLE, Error::kInvalidHandle>);
static_assert(same<CUDA_ERROR_NOT_READY, Error::kNotReady>);
static_assert(same<CUDA_ERROR_ILLEGAL_ADDRESS, Error::kIllegalAddress>);
static_assert(same<CUDA_ERROR_CONTEXT_IS_DESTROYED, Error::kContextIsDestroyed>);
static_assert(same<CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED,
                   Error::kHostMemoryAlreadyRegistered>);
static_assert(
    same<CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, Error::kHostMemoryNotRegistered>);
static_assert(same<CUDA_ERROR_NOT_PERMITTED, Error::kNotPermitted>);
static_assert(same<CUDA_ERROR_NOT_SUPPORTED, Error::kNotSupported>);
static_assert(same<CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, Error::kCaptureUnsupported>);
static_assert(same<CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, Error::kCaptureInvalidated>);
static_assert(same<CUDA_ERROR_STREAM_CAPTURE_MERGE, Error::kCaptureMerge>);
static_assert(same<CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, Error::kCaptureUnmatched>);
static_assert(same<CUDA_ERROR_STREAM_CAPTURE_UNJOINED, Error::kCaptureUnjoined>);
static_assert(same<CUDA_ERROR_STREAM_CAPTURE_ISOLATION, Error::kCaptureIsolation>);
static_assert(same<CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, Error::kCaptureImplicit>);
static_assert(same<CUDA_ERROR_CAPTURED_EVENT, Error::kCapturedEvent>);
static_assert(same<CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, Error::kCaptureWrongThread>);
static_assert(same<CUDA_ERROR_UNKNOWN, Error::kUnknown>);

}  // namespace

HIPSIM_EXPORT CUresult cuGetErrorName(CUresult error, const char** name) {
  return describe(error, &Description::name, name);
}

HIPSIM_EXPORT CUresult cuGetErrorString(CUresult error, const char** text) {
  return describe(error, &Description::text, text);
}
