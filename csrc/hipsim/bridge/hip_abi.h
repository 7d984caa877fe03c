// SPDX-License-Identifier: Apache-2.0
//
// The part of HIP's C ABI that the simulator exports, declared anew so that building
// needs no ROCm. The headers of HIP 7.1.25424 and the Python bindings of 7.15.26333
// agree on it, except that the copy flags from 0x100 on are in the latter alone.
#pragma once

#include <cstddef>
#include <cstdint>

#define HIPSIM_EXPORT extern "C" __attribute__((visibility("default")))

enum hipError_t : int {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorNotInitialized = 3,
  hipErrorDeinitialized = 4,
  hipErrorInvalidMemcpyDirection = 21,
  hipErrorNoDevice = 100,
  hipErrorInvalidDevice = 101,
  hipErrorMapFailed = 205,
  hipErrorUnmapFailed = 206,
  hipErrorInvalidHandle = 400,
  hipErrorNotFound = 500,
  hipErrorNotReady = 600,
  hipErrorIllegalAddress = 700,
  hipErrorContextIsDestroyed = 709,
  hipErrorHostMemoryAlreadyRegistered = 712,
  hipErrorHostMemoryNotRegistered = 713,
  hipErrorLaunchFailure = 719,
  hipErrorNotSupported = 801,
  hipErrorStreamCaptureUnsupported = 900,
  hipErrorStreamCaptureInvalidated = 901,
  hipErrorStreamCaptureImplicit = 906,
  hipErrorUnknown = 999,
};

enum hipMemcpyKind : unsigned {
  hipMemcpyHostToHost = 0,
  hipMemcpyHostToDevice = 1,
  hipMemcpyDeviceToHost = 2,
  hipMemcpyDeviceToDevice = 3,
  hipMemcpyDefault = 4,
  hipMemcpyDeviceToDeviceNoCU = 1024,
};

enum hipMemLocationType : unsigned {
  hipMemLocationTypeInvalid = 0,
  hipMemLocationTypeDevice = 1,
  hipMemLocationTypeHost = 2,
};

enum hipMemcpySrcAccessOrder : unsigned {
  hipMemcpySrcAccessOrderInvalid = 0,
  hipMemcpySrcAccessOrderStream = 1,
  hipMemcpySrcAccessOrderDuringApiCall = 2,
  hipMemcpySrcAccessOrderAny = 3,
};

enum hipMemcpyFlags : unsigned {
  hipMemcpyFlagDefault = 0,
  hipMemcpyFlagPreferOverlapWithCompute = 0x1,
  hipMemcpyFlagExtPreferCE = 0x100,
  hipMemcpyFlagExtOpSwap = 0x200,
  hipMemcpyFlagExtOpIndirectSrc = 0x400,
  hipMemcpyFlagExtOpIndirectDst = 0x800,
};

constexpr unsigned hipStreamDefault = 0;
constexpr unsigned hipStreamNonBlocking = 1;

constexpr unsigned hipEventDefault = 0x0;
constexpr unsigned hipEventBlockingSync = 0x1;
constexpr unsigned hipEventDisableTiming = 0x2;
constexpr unsigned hipEventInterprocess = 0x4;
constexpr unsigned hipEventDisableSystemFence = 0x20000000;
constexpr unsigned hipEventReleaseToDevice = 0x40000000;
constexpr unsigned hipEventReleaseToSystem = 0x80000000;

constexpr unsigned hipHostRegisterPortable = 0x1;
constexpr unsigned hipHostRegisterMapped = 0x2;
constexpr unsigned hipHostRegisterIoMemory = 0x4;
constexpr unsigned hipExtHostRegisterCoarseGrained = 0x8;
constexpr unsigned hipExtHostRegisterUncached = 0x80000000;

using hipStream_t = struct ihipStream_t*;
using hipEvent_t = struct ihipEvent_t*;

struct hipMemLocation {
  hipMemLocationType type;
  int id;
};

struct hipMemcpyAttributes {
  hipMemcpySrcAccessOrder srcAccessOrder;
  hipMemLocation srcLocHint;
  hipMemLocation dstLocHint;
  unsigned int flags;
};

static_assert(sizeof(hipMemLocation) == 8);
static_assert(sizeof(hipMemcpyAttributes) == 24 && alignof(hipMemcpyAttributes) == 4);
static_assert(offsetof(hipMemcpyAttributes, srcAccessOrder) == 0);
static_assert(offsetof(hipMemcpyAttributes, srcLocHint) == 4);
static_assert(offsetof(hipMemcpyAttributes, dstLocHint) == 12);
static_assert(offsetof(hipMemcpyAttributes, flags) == 20);
