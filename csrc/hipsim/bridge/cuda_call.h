// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <new>
#include <system_error>

#include "bridge/cuda_abi.h"
#include "bridge/instance.h"

// Every function of the driver that can fail, but the two that describe errors.
#define HIPSIM_CALLS(X)                     \
  X(cuInit)                                 \
  X(cuDriverGetVersion)                     \
  X(cuGetProcAddress_v2)                    \
  X(cuDeviceGet)                            \
  X(cuDeviceGetCount)                       \
  X(cuDeviceGetAttribute)                   \
  X(cuDeviceGetPCIBusId)                    \
  X(cuDevicePrimaryCtxRetain)               \
  X(cuDevicePrimaryCtxRelease_v2)           \
  X(cuCtxGetCurrent)                        \
  X(cuCtxSetCurrent)                        \
  X(cuCtxGetDevice)                         \
  X(cuCtxSynchronize)                       \
  X(cuCtxGetStreamPriorityRange)            \
  X(cuStreamCreate)                         \
  X(cuStreamCreateWithPriority)             \
  X(cuStreamDestroy_v2)                     \
  X(cuStreamQuery)                          \
  X(cuStreamSynchronize)                    \
  X(cuStreamWaitEvent)                      \
  X(cuEventCreate)                          \
  X(cuEventDestroy_v2)                      \
  X(cuEventRecord)                          \
  X(cuEventQuery)                           \
  X(cuEventSynchronize)                     \
  X(cuEventElapsedTime)                     \
  X(cuMemGetInfo_v2)                        \
  X(cuMemAlloc_v2)                          \
  X(cuMemFree_v2)                           \
  X(cuMemGetAddressRange_v2)                \
  X(cuMemHostAlloc)                         \
  X(cuMemFreeHost)                          \
  X(cuMemHostRegister_v2)                   \
  X(cuMemHostUnregister)                    \
  X(cuMemHostGetDevicePointer_v2)           \
  X(cuMemGetAllocationGranularity)          \
  X(cuMemAddressReserve)                    \
  X(cuMemAddressFree)                       \
  X(cuMemCreate)                            \
  X(cuMemRelease)                           \
  X(cuMemMap)                               \
  X(cuMemUnmap)                             \
  X(cuMemSetAccess)                         \
  X(cuMemGetAccess)                         \
  X(cuMemRetainAllocationHandle)            \
  X(cuMemGetAllocationPropertiesFromHandle) \
  X(cuMemsetD8_v2)                          \
  X(cuMemsetD8Async)                        \
  X(cuMemcpy)                               \
  X(cuMemcpyAsync)                          \
  X(cuMemcpyHtoD_v2)                        \
  X(cuMemcpyDtoH_v2)                        \
  X(cuMemcpyHtoDAsync_v2)                   \
  X(cuMemcpyDtoHAsync_v2)                   \
  X(cuMemcpyDtoDAsync_v2)                   \
  X(cuMemcpy2D_v2)                          \
  X(cuMemcpy2DAsync_v2)                     \
  X(cuMemcpy3DAsync_v2)                     \
  X(cuMemcpyBatchAsync)                     \
  X(cuMemcpyBatchAsync_v2)                  \
  X(cuStreamBeginCapture_v2)                \
  X(cuStreamEndCapture)                     \
  X(cuStreamIsCapturing)                    \
  X(cuThreadExchangeStreamCaptureMode)      \
  X(cuGraphGetNodes)                        \
  X(cuGraphDestroy)                         \
  X(cuGraphInstantiateWithFlags)            \
  X(cuGraphLaunch)                          \
  X(cuGraphExecDestroy)                     \
  X(cuIpcGetMemHandle)                      \
  X(cuIpcOpenMemHandle_v2)                  \
  X(cuIpcCloseMemHandle)

namespace hipsim {

enum class Call : size_t {
#define HIPSIM_ENUMERATOR(name) name,
  HIPSIM_CALLS(HIPSIM_ENUMERATOR)
#undef HIPSIM_ENUMERATOR
};

// What must be there before a call. Most calls on streams, events and graphs find the
// context in what they are given, and virtual memory has none.
enum class Needs {
  kNothing,
  kDriver,   // cuInit
  kWork,     // the same, and the call tells how earlier work has failed
  kContext,  // a current context of the thread, beside that
};

// What a thread has chosen. Only primary contexts exist, so a context is a device.
struct CudaThread {
  Caller caller;
  bool has_context = false;
};
CudaThread& this_thread();

// kSuccess when the thread may make the call.
Error check_needs(Needs needs);

// The driver has no words for some of the numbers of HIP.
inline Error as_cuda(Error error) {
  switch (error) {
    case Error::kInvalidPitch:
    case Error::kInvalidDevicePointer:
    case Error::kInvalidCopyDirection:
      return Error::kInvalidValue;
    default:
      return error;
  }
}

// Calls that do not tell what became of the work that they queue, which may have run
// before they return.
constexpr bool only_queues(Call call) {
  switch (call) {
    case Call::cuEventRecord:
    case Call::cuGraphLaunch:
    case Call::cuMemcpy2DAsync_v2:
    case Call::cuMemcpy3DAsync_v2:
    case Call::cuMemcpyAsync:
    case Call::cuMemcpyBatchAsync:
    case Call::cuMemcpyBatchAsync_v2:
    case Call::cuMemcpyDtoDAsync_v2:
    case Call::cuMemcpyDtoHAsync_v2:
    case Call::cuMemcpyHtoDAsync_v2:
    case Call::cuMemsetD8Async:
    case Call::cuStreamWaitEvent:
      return true;
    default:
      return false;
  }
}

// What every call has in common. `body` is run unless the call is refused or a test
// makes it fail, in which case `on_fault` is. A memory fault of the device overrides
// whatever a call says that tells of one.
template <typename Body, typename OnFault>
CUresult api(Needs needs, Call call, Body body, OnFault on_fault) {
  Error error = Error::kSuccess;
  try {
    Runtime& rt = runtime();
    const Error before = rt.gpu_error();
    error = rt.enter(static_cast<size_t>(call));
    if (error != Error::kSuccess) {
      on_fault(rt);
    } else if (error = check_needs(needs); error == Error::kSuccess) {
      error = as_cuda(body(rt, this_thread().caller));
    }
    const Error work = only_queues(call) ? before : rt.gpu_error();
    if (needs >= Needs::kWork && work != Error::kSuccess) error = work;
  } catch (const std::bad_alloc&) {
    error = Error::kOutOfMemory;
  } catch (const std::system_error&) {  // no thread or no lock to be had
    error = Error::kOutOfMemory;
  }
  return static_cast<CUresult>(error);
}

template <typename Body>
CUresult api(Needs needs, Call call, Body body) {
  return api(needs, call, body, [](Runtime&) {});
}

template <typename Body>
CUresult api(Call call, Body body) {
  return api(Needs::kContext, call, body);
}

// Handles of the engine are pointers in CUDA's eyes.
template <typename Pointer>
Handle as_handle(Pointer pointer) {
  return reinterpret_cast<Handle>(pointer);
}

// The legacy stream has two names. That of each thread does not exist here: an unknown
// handle to the engine.
inline Handle as_stream(CUstream stream) {
  return stream == CU_STREAM_LEGACY ? 0 : as_handle(stream);
}

// The legacy stream is that of the current context, any other has one of its own.
inline Needs needs_of(CUstream stream) {
  return as_stream(stream) == 0 ? Needs::kContext : Needs::kWork;
}

// Of calls that look at a handle before they look for the driver.
inline Needs needs_of(CUevent event) {
  return event == nullptr ? Needs::kNothing : Needs::kWork;
}

inline void* as_pointer(CUdeviceptr address) {
  return reinterpret_cast<void*>(address);
}

inline CUdeviceptr as_device_pointer(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

}  // namespace hipsim
