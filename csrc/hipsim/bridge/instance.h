// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

#include "bridge/hip_abi.h"
#include "engine/runtime.h"

// Every HIP function that can fail: it is counted, and a test can make it fail.
#define HIPSIM_CALLS(X)              \
  X(hipInit)                         \
  X(hipRuntimeGetVersion)            \
  X(hipDriverGetVersion)             \
  X(hipGetDeviceCount)               \
  X(hipSetDevice)                    \
  X(hipGetDevice)                    \
  X(hipDeviceSynchronize)            \
  X(hipDeviceGetStreamPriorityRange) \
  X(hipStreamCreate)                 \
  X(hipStreamCreateWithFlags)        \
  X(hipStreamCreateWithPriority)     \
  X(hipStreamDestroy)                \
  X(hipStreamQuery)                  \
  X(hipStreamSynchronize)            \
  X(hipStreamWaitEvent)              \
  X(hipEventCreate)                  \
  X(hipEventCreateWithFlags)         \
  X(hipEventDestroy)                 \
  X(hipEventRecord)                  \
  X(hipEventQuery)                   \
  X(hipEventSynchronize)             \
  X(hipEventElapsedTime)             \
  X(hipMalloc)                       \
  X(hipFree)                         \
  X(hipMemGetInfo)                   \
  X(hipHostMalloc)                   \
  X(hipHostFree)                     \
  X(hipHostRegister)                 \
  X(hipHostUnregister)               \
  X(hipMemset)                       \
  X(hipMemsetAsync)                  \
  X(hipMemcpy)                       \
  X(hipMemcpyAsync)                  \
  X(hipMemcpyBatchAsync)

namespace hipsim {

enum class Call : size_t {
#define HIPSIM_ENUMERATOR(name) name,
  HIPSIM_CALLS(HIPSIM_ENUMERATOR)
#undef HIPSIM_ENUMERATOR
};

// The process's runtime, made at the first use from HIPSIM_PROFILE, HIPSIM_VRAM_BYTES
// and the variables of HIP and ROCr that choose a copy engine
// (GPU_FORCE_BLIT_COPY_SIZE in KiB, HSA_ENABLE_SDMA). A value that makes no sense is
// reported on stderr, and then there is no device. Never destroyed: streams may be
// running when the process ends.
Runtime& runtime();

// What was reported; empty when nothing was. Set once runtime() has returned.
const std::string& environment_error();

// The thread's hipGetLastError.
hipError_t take_last_error();
hipError_t last_error();
void set_last_error(hipError_t error);

}  // namespace hipsim
