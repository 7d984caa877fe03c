// SPDX-License-Identifier: Apache-2.0
#include "bridge/hip_abi.h"
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
    ERROR(hipErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ERROR(hipErrorNoDevice, "no ROCm-capable device is detected"),
    ERROR(hipErrorInvalidDevice, "invalid device ordinal"),
    ERROR(hipErrorMapFailed, "mapping of buffer object failed"),
    ERROR(hipErrorUnmapFailed, "unmapping of buffer object failed"),
    ERROR(hipErrorInvalidHandle, "invalid resource handle"),
    ERROR(hipErrorNotFound, "named symbol not found"),
    ERROR(hipErrorNotReady, "device not ready"),
    ERROR(hipErrorIllegalAddress, "an illegal memory access was encountered"),
    ERROR(hipErrorContextIsDestroyed, "context is destroyed"),
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
    ERROR(hipErrorStreamCaptureImplicit,
          "operation would make the legacy stream depend on a capturing blocking "
          "stream"),
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
static_assert(same<hipErrorInvalidMemcpyDirection, Error::kInvalidCopyDirection>);
static_assert(same<hipErrorNoDevice, Error::kNoDevice>);
static_assert(same<hipErrorInvalidDevice, Error::kInvalidDevice>);
static_assert(same<hipErrorInvalidHandle, Error::kInvalidHandle>);
static_assert(same<hipErrorNotReady, Error::kNotReady>);
static_assert(same<hipErrorIllegalAddress, Error::kIllegalAddress>);
static_assert(same<hipErrorContextIsDestroyed, Error::kContextIsDestroyed>);
static_assert(
    same<hipErrorHostMemoryAlreadyRegistered, Error::kHostMemoryAlreadyRegistered>);
static_assert(same<hipErrorHostMemoryNotRegistered, Error::kHostMemoryNotRegistered>);
static_assert(same<hipErrorNotSupported, Error::kNotSupported>);

}  // namespace

HIPSIM_EXPORT const char* hipGetErrorName(hipError_t error) {
  return describe(error).name;
}

HIPSIM_EXPORT const char* hipGetErrorString(hipError_t error) {
  return describe(error).text;
}
