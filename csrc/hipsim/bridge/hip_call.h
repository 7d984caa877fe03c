// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>
#include <system_error>

#include "bridge/hip_abi.h"
#include "bridge/instance.h"

// Every HIP function that can fail.
#define HIPSIM_CALLS(X)                      \
  X(hipInit)                                 \
  X(hipRuntimeGetVersion)                    \
  X(hipDriverGetVersion)                     \
  X(hipGetDeviceCount)                       \
  X(hipSetDevice)                            \
  X(hipGetDevice)                            \
  X(hipDeviceSynchronize)                    \
  X(hipDeviceGetAttribute)                   \
  X(hipDeviceGetPCIBusId)                    \
  X(hipDeviceGetStreamPriorityRange)         \
  X(hipStreamCreate)                         \
  X(hipStreamCreateWithFlags)                \
  X(hipStreamCreateWithPriority)             \
  X(hipStreamDestroy)                        \
  X(hipStreamQuery)                          \
  X(hipStreamSynchronize)                    \
  X(hipStreamWaitEvent)                      \
  X(hipEventCreate)                          \
  X(hipEventCreateWithFlags)                 \
  X(hipEventDestroy)                         \
  X(hipEventRecord)                          \
  X(hipEventQuery)                           \
  X(hipEventSynchronize)                     \
  X(hipEventElapsedTime)                     \
  X(hipMalloc)                               \
  X(hipFree)                                 \
  X(hipMemGetInfo)                           \
  X(hipMemGetAddressRange)                   \
  X(hipHostMalloc)                           \
  X(hipHostFree)                             \
  X(hipHostRegister)                         \
  X(hipHostUnregister)                       \
  X(hipHostGetDevicePointer)                 \
  X(hipMemGetAllocationGranularity)          \
  X(hipMemAddressReserve)                    \
  X(hipMemAddressFree)                       \
  X(hipMemCreate)                            \
  X(hipMemRelease)                           \
  X(hipMemMap)                               \
  X(hipMemUnmap)                             \
  X(hipMemSetAccess)                         \
  X(hipMemGetAccess)                         \
  X(hipMemRetainAllocationHandle)            \
  X(hipMemGetAllocationPropertiesFromHandle) \
  X(hipMemset)                               \
  X(hipMemsetAsync)                          \
  X(hipMemcpy)                               \
  X(hipMemcpyAsync)                          \
  X(hipMemcpy2D)                             \
  X(hipMemcpy2DAsync)                        \
  X(hipMemcpy3D)                             \
  X(hipMemcpy3DAsync)                        \
  X(hipMemcpyBatchAsync)                     \
  X(hipStreamBeginCapture)                   \
  X(hipStreamEndCapture)                     \
  X(hipStreamIsCapturing)                    \
  X(hipStreamGetCaptureInfo)                 \
  X(hipThreadExchangeStreamCaptureMode)      \
  X(hipGraphGetNodes)                        \
  X(hipGraphDestroy)                         \
  X(hipGraphInstantiate)                     \
  X(hipGraphInstantiateWithFlags)            \
  X(hipGraphLaunch)                          \
  X(hipGraphExecDestroy)                     \
  X(hipIpcGetMemHandle)                      \
  X(hipIpcOpenMemHandle)                     \
  X(hipIpcCloseMemHandle)

namespace hipsim {

enum class Call : size_t {
#define HIPSIM_ENUMERATOR(name) name,
  HIPSIM_CALLS(HIPSIM_ENUMERATOR)
#undef HIPSIM_ENUMERATOR
};

// The device and the capture mode that the thread has chosen, and its last error.
struct HipThread {
  Caller caller;
  hipError_t last_error = hipSuccess;
};
HipThread& this_thread();

// HIP 7 keeps a thread's last error until it is asked for it; before, the next
// successful call wiped it out. "Not ready" is an answer, not an error.
inline hipError_t remember(Error error) {
  const auto result = static_cast<hipError_t>(error);
  if (error != Error::kSuccess && error != Error::kNotReady) {
    this_thread().last_error = result;
  }
  return result;
}

// Calls that do not tell what became of the work that they queue, which may have run
// before they return.
constexpr bool only_queues(Call call) {
  switch (call) {
    case Call::hipEventRecord:
    case Call::hipGraphLaunch:
    case Call::hipMemcpy2DAsync:
    case Call::hipMemcpy3DAsync:
    case Call::hipMemcpyAsync:
    case Call::hipMemcpyBatchAsync:
    case Call::hipMemsetAsync:
    case Call::hipStreamWaitEvent:
      return true;
    default:
      return false;
  }
}

// What every call has in common. `body` is run unless the call is refused or a test
// makes it fail, in which case `on_fault` is. After a memory fault no call does
// anything but say so, and one during which it happened says so too, unless it only
// queues.
template <typename Body, typename OnFault>
hipError_t api(Call call, Body body, OnFault on_fault) {
  Error error = Error::kSuccess;
  try {
    Runtime& rt = runtime();
    error = rt.enter(static_cast<size_t>(call));
    if (error == Error::kSuccess) {
      error = rt.gpu_error();
      if (error == Error::kSuccess) error = body(rt, this_thread().caller);
    } else {
      on_fault(rt);
    }
    if (!only_queues(call) && rt.gpu_error() != Error::kSuccess) error = rt.gpu_error();
  } catch (const std::bad_alloc&) {
    error = Error::kOutOfMemory;
  } catch (const std::system_error&) {  // no thread or no lock to be had
    error = Error::kOutOfMemory;
  }
  return remember(error);
}

template <typename Body>
hipError_t api(Call call, Body body) {
  return api(call, body, [](Runtime&) {});
}

// Handles of the engine are pointers in HIP's eyes.
template <typename Pointer>
Handle as_handle(Pointer pointer) {
  return reinterpret_cast<Handle>(pointer);
}

// The legacy stream is the NULL stream by another name.
inline Handle as_stream(hipStream_t stream) {
  return stream == hipStreamLegacy ? 0 : as_handle(stream);
}

}  // namespace hipsim
