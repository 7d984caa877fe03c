// SPDX-License-Identifier: Apache-2.0
#include "bridge/hip_api.h"
#include "engine/error.h"

namespace {

struct Description {
  hipError_t number;
  const char* name;
  const char* text;
};

#define ERROR(symbol, text) {symbol, #symbol, text}
// The texts are part of HIP's interface: people search logs for them.
constexpr Description kDescriptions[] = {
    ERROR(hipSuccess, "no error"),
    ERROR(hipErrorInvalidValue, "invalid argument"),
    ERROR(hipErrorOutOfMemory, "out of memory"),
    ERROR(hipErrorNotInitialized, "initialization error"),
    ERROR(hipErrorDeinitialized, "driver shutting down"),
    ERROR(hipErrorInvalidPitchValue, "invalid pitch argument"),
    ERROR(hipErrorInvalidDevicePointer, "invalid device pointer"),
    ERROR(hipErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ERROR(hipErrorNoDevice, "no ROCm-capable device is detected"),
    ERROR(hipErrorInvalidDevice, "invalid device ordinal"),
    ERROR(hipErrorInvalidContext, "invalid device context"),
    ERROR(hipErrorMapFailed, "mapping of buffer object failed"),
    ERROR(hipErrorUnmapFailed, "unmapping of buffer object failed"),
    ERROR(hipErrorAlreadyMapped, "resource already mapped"),
    ERROR(hipErrorNotMapped, "resource not mapped"),
    ERROR(hipErrorContextAlreadyInUse,
          "exclusive-thread device already in use by a different thread"),
    ERROR(hipErrorPeerAccessUnsupported,
          "peer access is not supported between these two devices"),
    ERROR(hipErrorOperatingSystem,
          "OS call failed or operation not supported on this OS"),
    ERROR(hipErrorInvalidHandle, "invalid resource handle"),
    ERROR(hipErrorIllegalState,
          "the operation cannot be performed in the present state"),
    ERROR(hipErrorNotFound, "named symbol not found"),
    ERROR(hipErrorNotReady, "device not ready"),
    ERROR(hipErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(hipErrorPeerAccessAlreadyEnabled, "peer access is already enabled"),
    ERROR(hipErrorPeerAccessNotEnabled, "peer access has not been enabled"),
    ERROR(hipErrorSetOnActiveProcess,
          "cannot set while device is active in this process"),
    ERROR(hipErrorContextIsDestroyed, "context is destroyed"),
    ERROR(hipErrorAssert, "device-side assert triggered"),
    ERROR(hipErrorHostMemoryAlreadyRegistered,
          "part or all of the requested memory range is already mapped"),
    ERROR(hipErrorHostMemoryNotRegistered,
          "pointer does not correspond to a registered memory region"),
    ERROR(hipErrorLaunchFailure, "unspecified launch failure"),
    ERROR(hipErrorNotSupported, "operation not supported"),
    ERROR(hipErrorStreamCaptureUnsupported,
          "operation not permitted when stream is capturing"),
    ERROR(hipErrorStreamCaptureInvalidated,
          "operation failed due to a previous error during capture"),
    ERROR(hipErrorStreamCaptureMerge,
          "operation would result in a merge of separate capture sequences"),
    ERROR(hipErrorStreamCaptureUnmatched,
          "capture was not ended in the same stream as it began"),
    ERROR(hipErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ERROR(hipErrorStreamCaptureIsolation,
          "dependency created on uncaptured work in another stream"),
    ERROR(
        hipErrorStreamCaptureImplicit,
        "operation would make the legacy stream depend on a capturing blocking stream"),
    ERROR(hipErrorCapturedEvent,
          "operation not permitted on an event last recorded in a capturing stream"),
    ERROR(hipErrorStreamCaptureWrongThread,
          "attempt to terminate a thread-local capture sequence from another thread"),
    ERROR(hipErrorGraphExecUpdateFailure,
          "the graph update was not performed because it included changes which "
          "violated constraints specific to instantiated graph update"),
    ERROR(hipErrorUnknown, "unknown error"),
};
#undef ERROR

const Description& describe(hipError_t error) {
  for (const Description& description : kDescriptions) {
    if (description.number == error) return description;
  }
  return describe(hipErrorUnknown);
}

template <hipError_t hip, hipsim::Error engine>
constexpr bool same = static_cast<int>(hip) == static_cast<int>(engine);

using hipsim::Error;
static_assert(same<hipSuccess, Error::kSuccess>);
static_assert(same<hipErrorInvalidValue, Error::kInvalidValue>);
static_assert(same<hipErrorOutOfMemory, Error::kOutOfMemory>);
static_assert(same<hipErrorNotInitialized, Error::kNotInitialized>);
static_assert(same<hipErrorInvalidPitchValue, Error::kInvalidPitch>);
static_assert(same<hipErrorInvalidMemcpyDirection, Error::kInvalidCopyDirection>);
static_assert(same<hipErrorNoDevice, Error::kNoDevice>);
static_assert(same<hipErrorInvalidDevice, Error::kInvalidDevice>);
static_assert(same<hipErrorInvalidContext, Error::kInvalidContext>);
static_assert(same<hipErrorInvalidHandle, Error::kInvalidHandle>);
static_assert(same<hipErrorNotReady, Error::kNotReady>);
static_assert(same<hipErrorIllegalAddress, Error::kIllegalAddress>);
static_assert(same<hipErrorContextIsDestroyed, Error::kContextIsDestroyed>);
static_assert(
    same<hipErrorHostMemoryAlreadyRegistered, Error::kHostMemoryAlreadyRegistered>);
static_assert(same<hipErrorHostMemoryNotRegistered, Error::kHostMemoryNotRegistered>);
static_assert(same<hipErrorNotSupported, Error::kNotSupported>);
static_assert(same<hipErrorStreamCaptureUnsupported, Error::kCaptureUnsupported>);
static_assert(same<hipErrorStreamCaptureInvalidated, Error::kCaptureInvalidated>);
static_assert(same<hipErrorStreamCaptureMerge, Error::kCaptureMerge>);
static_assert(same<hipErrorStreamCaptureUnmatched, Error::kCaptureUnmatched>);
static_assert(same<hipErrorStreamCaptureUnjoined, Error::kCaptureUnjoined>);
static_assert(same<hipErrorStreamCaptureIsolation, Error::kCaptureIsolation>);
static_assert(same<hipErrorStreamCaptureImplicit, Error::kCaptureImplicit>);
static_assert(same<hipErrorCapturedEvent, Error::kCapturedEvent>);
static_assert(same<hipErrorStreamCaptureWrongThread, Error::kCaptureWrongThread>);
static_assert(same<hipErrorUnknown, Error::kUnknown>);

}  // namespace

HIPSIM_EXPORT const char* hipGetErrorName(hipError_t error) {
  return describe(error).name;
}

HIPSIM_EXPORT const char* hipGetErrorString(hipError_t error) {
  return describe(error).text;
}
