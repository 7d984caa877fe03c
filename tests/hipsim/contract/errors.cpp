// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include "contract.h"

namespace contract {
namespace {

struct Described {
  hipError_t number;
  const char* name;
  const char* text;
};

#define ROW(symbol, text) {symbol, #symbol, text}
constexpr Described kDescribed[] = {
    ROW(hipSuccess, "no error"),
    ROW(hipErrorInvalidValue, "invalid argument"),
    ROW(hipErrorOutOfMemory, "out of memory"),
    ROW(hipErrorNotInitialized, "initialization error"),
    ROW(hipErrorDeinitialized, "driver shutting down"),
    ROW(hipErrorInvalidPitchValue, "invalid pitch argument"),
    ROW(hipErrorInvalidDevicePointer, "invalid device pointer"),
    ROW(hipErrorInvalidMemcpyDirection, "invalid copy direction for memcpy"),
    ROW(hipErrorNoDevice, "no ROCm-capable device is detected"),
    ROW(hipErrorInvalidDevice, "invalid device ordinal"),
    ROW(hipErrorInvalidContext, "invalid device context"),
    ROW(hipErrorMapFailed, "mapping of buffer object failed"),
    ROW(hipErrorUnmapFailed, "unmapping of buffer object failed"),
    ROW(hipErrorAlreadyMapped, "resource already mapped"),
    ROW(hipErrorNotMapped, "resource not mapped"),
    ROW(hipErrorInvalidHandle, "invalid resource handle"),
    ROW(hipErrorIllegalState, "the operation cannot be performed in the present state"),
    ROW(hipErrorNotFound, "named symbol not found"),
    ROW(hipErrorNotReady, "device not ready"),
    ROW(hipErrorIllegalAddress, "an illegal memory access was encountered"),
    ROW(hipErrorContextIsDestroyed, "context is destroyed"),
    ROW(hipErrorHostMemoryAlreadyRegistered,
        "part or all of the requested memory range is already mapped"),
    ROW(hipErrorHostMemoryNotRegistered,
        "pointer does not correspond to a registered memory region"),
    ROW(hipErrorLaunchFailure, "unspecified launch failure"),
    ROW(hipErrorNotSupported, "operation not supported"),
    ROW(hipErrorStreamCaptureUnsupported,
        "operation not permitted when stream is capturing"),
    ROW(hipErrorStreamCaptureInvalidated,
        "operation failed due to a previous error during capture"),
    ROW(hipErrorStreamCaptureMerge,
        "operation would result in a merge of separate capture sequences"),
    ROW(hipErrorStreamCaptureUnmatched,
        "capture was not ended in the same stream as it began"),
    ROW(hipErrorStreamCaptureUnjoined, "capturing stream has unjoined work"),
    ROW(hipErrorStreamCaptureIsolation,
        "dependency created on uncaptured work in another stream"),
    ROW(hipErrorStreamCaptureImplicit,
        "operation would make the legacy stream depend on a capturing blocking "
        "stream"),
    ROW(hipErrorCapturedEvent,
        "operation not permitted on an event last recorded in a capturing stream"),
    ROW(hipErrorStreamCaptureWrongThread,
        "attempt to terminate a thread-local capture sequence from another thread"),
    ROW(hipErrorUnknown, "unknown error"),
};
#undef ROW

CASE(errors, names_and_texts, "clr hip_error.cpp", hipGetErrorName, hipGetErrorString) {
  for (const Described& each : kDescribed) {
    EXPECT_EQ(std::string(hipGetErrorName(each.number)), each.name);
    EXPECT_EQ(std::string(hipGetErrorString(each.number)), each.text);
  }
}

CASE(errors, numbers_that_mean_nothing, "clr hip_error.cpp", hipGetErrorName,
     hipGetErrorString) {
  for (const int number : {-1, 909, 123456}) {
    const auto error = static_cast<hipError_t>(number);
    EXPECT_EQ(std::string(hipGetErrorName(error)), "hipErrorUnknown");
    EXPECT_EQ(std::string(hipGetErrorString(error)), "unknown error");
  }
}

CASE(errors, last_error_is_kept_until_it_is_taken,
     "HIP 7.0 changelog, hipGetLastError; clr hip_error.cpp", hipGetLastError,
     hipPeekAtLastError) {
  EXPECT_ERROR(hipGetLastError(), hipSuccess);
  EXPECT_ERROR(hipSetDevice(-1), hipErrorInvalidDevice);
  int device = -1;
  EXPECT_OK(hipGetDevice(&device));
  EXPECT_ERROR(hipPeekAtLastError(), hipErrorInvalidDevice);
  EXPECT_ERROR(hipPeekAtLastError(), hipErrorInvalidDevice);
  EXPECT_ERROR(hipGetLastError(), hipErrorInvalidDevice);
  EXPECT_ERROR(hipGetLastError(), hipSuccess);
  EXPECT_ERROR(hipPeekAtLastError(), hipSuccess);
}

CASE(errors, last_error_is_the_latest, "HIP 7.0 changelog, hipGetLastError",
     hipGetLastError) {
  EXPECT_ERROR(hipSetDevice(-1), hipErrorInvalidDevice);
  EXPECT_ERROR(hipHostUnregister(nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipGetLastError(), hipErrorInvalidValue);
  EXPECT_ERROR(hipGetLastError(), hipSuccess);
}

CASE(errors, not_ready_is_no_error, "clr hip_internal.hpp", hipGetLastError,
     hipStreamQuery) {
  Stream stream;
  const Busy busy(stream);
  EXPECT_ERROR(hipStreamQuery(stream), hipErrorNotReady);
  EXPECT_ERROR(hipGetLastError(), hipSuccess);
  EXPECT_OK(hipStreamSynchronize(stream));
}

CASE(errors, each_thread_has_its_last_error, "HIP docs, Error handling",
     hipGetLastError) {
  EXPECT_ERROR(hipSetDevice(-1), hipErrorInvalidDevice);
  std::thread([] {
    EXPECT_ERROR(hipGetLastError(), hipSuccess);
    EXPECT_ERROR(hipHostUnregister(nullptr), hipErrorInvalidValue);
  }).join();
  EXPECT_ERROR(hipGetLastError(), hipErrorInvalidDevice);
}

}  // namespace
}  // namespace contract
