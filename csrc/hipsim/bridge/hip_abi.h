// SPDX-License-Identifier: Apache-2.0
//
// The part of HIP's C ABI that the simulator exports, declared anew so that building
// needs no ROCm. The headers of HIP 7.1.25424 and the Python bindings of 7.15.26333
// agree on it, except that the copy flags from 0x100 on are in the latter alone.
// tests/hipsim/abi/hip.toml has the same as data, and is checked against both.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bridge/export.h"

enum hipError_t : int {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorNotInitialized = 3,
  hipErrorDeinitialized = 4,
  hipErrorInvalidPitchValue = 12,
  hipErrorInvalidDevicePointer = 17,
  hipErrorInvalidMemcpyDirection = 21,
  hipErrorNoDevice = 100,
  hipErrorInvalidDevice = 101,
  hipErrorInvalidContext = 201,
  hipErrorMapFailed = 205,
  hipErrorUnmapFailed = 206,
  hipErrorAlreadyMapped = 208,
  hipErrorNotMapped = 211,
  hipErrorContextAlreadyInUse = 216,
  hipErrorPeerAccessUnsupported = 217,
  hipErrorOperatingSystem = 304,
  hipErrorInvalidHandle = 400,
  hipErrorIllegalState = 401,
  hipErrorNotFound = 500,
  hipErrorNotReady = 600,
  hipErrorIllegalAddress = 700,
  hipErrorPeerAccessAlreadyEnabled = 704,
  hipErrorPeerAccessNotEnabled = 705,
  hipErrorSetOnActiveProcess = 708,
  hipErrorContextIsDestroyed = 709,
  hipErrorAssert = 710,
  hipErrorHostMemoryAlreadyRegistered = 712,
  hipErrorHostMemoryNotRegistered = 713,
  hipErrorLaunchFailure = 719,
  hipErrorNotSupported = 801,
  hipErrorStreamCaptureUnsupported = 900,
  hipErrorStreamCaptureInvalidated = 901,
  hipErrorStreamCaptureMerge = 902,
  hipErrorStreamCaptureUnmatched = 903,
  hipErrorStreamCaptureUnjoined = 904,
  hipErrorStreamCaptureIsolation = 905,
  hipErrorStreamCaptureImplicit = 906,
  hipErrorCapturedEvent = 907,
  hipErrorStreamCaptureWrongThread = 908,
  hipErrorGraphExecUpdateFailure = 910,
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

enum hipDeviceAttribute_t : unsigned {
  hipDeviceAttributeAsyncEngineCount = 2,
  hipDeviceAttributeCanMapHostMemory = 3,
  hipDeviceAttributeCanUseHostPointerForRegisteredMem = 4,
  hipDeviceAttributeIntegrated = 16,
  hipDeviceAttributeComputeCapabilityMajor = 23,
  hipDeviceAttributeMaxPitch = 58,
  hipDeviceAttributeComputeCapabilityMinor = 61,
  hipDeviceAttributeMultiprocessorCount = 63,
  hipDeviceAttributePciBusId = 67,
  hipDeviceAttributePciDeviceId = 68,
  hipDeviceAttributePciDomainId = 69,
  hipDeviceAttributeUnifiedAddressing = 85,
  hipDeviceAttributeWarpSize = 87,
  hipDeviceAttributeVirtualMemoryManagementSupported = 89,
  hipDeviceAttributeHostRegisterSupported = 90,
  hipDeviceAttributeIsLargeBar = 10011,
};

enum hipMemLocationType : unsigned {
  hipMemLocationTypeInvalid = 0,
  hipMemLocationTypeDevice = 1,
  hipMemLocationTypeHost = 2,
  hipMemLocationTypeHostNuma = 3,
  hipMemLocationTypeHostNumaCurrent = 4,
};

enum hipMemAllocationType : unsigned {
  hipMemAllocationTypeInvalid = 0,
  hipMemAllocationTypePinned = 1,
  hipMemAllocationTypeManaged = 2,
  hipMemAllocationTypeUncached = 0x40000000,
};

enum hipMemAllocationHandleType : unsigned {
  hipMemHandleTypeNone = 0,
  hipMemHandleTypePosixFileDescriptor = 0x1,
  hipMemHandleTypeWin32 = 0x2,
  hipMemHandleTypeWin32Kmt = 0x4,
};

enum hipMemAllocationGranularity_flags : unsigned {
  hipMemAllocationGranularityMinimum = 0,
  hipMemAllocationGranularityRecommended = 1,
};

enum hipMemAccessFlags : unsigned {
  hipMemAccessFlagsProtNone = 0,
  hipMemAccessFlagsProtRead = 1,
  hipMemAccessFlagsProtReadWrite = 3,
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

enum hipStreamCaptureMode : unsigned {
  hipStreamCaptureModeGlobal = 0,
  hipStreamCaptureModeThreadLocal = 1,
  hipStreamCaptureModeRelaxed = 2,
};

enum hipStreamCaptureStatus : unsigned {
  hipStreamCaptureStatusNone = 0,
  hipStreamCaptureStatusActive = 1,
  hipStreamCaptureStatusInvalidated = 2,
};

enum hipGraphInstantiateFlags : unsigned {
  hipGraphInstantiateFlagAutoFreeOnLaunch = 0x1,
  hipGraphInstantiateFlagUpload = 0x2,
  hipGraphInstantiateFlagDeviceLaunch = 0x4,
  hipGraphInstantiateFlagUseNodePriority = 0x8,
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

constexpr unsigned hipEventWaitDefault = 0x0;
constexpr unsigned hipEventWaitExternal = 0x1;

constexpr unsigned hipHostMallocDefault = 0x0;
constexpr unsigned hipHostMallocPortable = 0x1;
constexpr unsigned hipHostMallocMapped = 0x2;
constexpr unsigned hipHostMallocWriteCombined = 0x4;
constexpr unsigned hipHostMallocUncached = 0x10000000;
constexpr unsigned hipHostMallocNumaUser = 0x20000000;
constexpr unsigned hipHostMallocCoherent = 0x40000000;
constexpr unsigned hipHostMallocNonCoherent = 0x80000000;

constexpr unsigned hipHostRegisterDefault = 0x0;
constexpr unsigned hipHostRegisterPortable = 0x1;
constexpr unsigned hipHostRegisterMapped = 0x2;
constexpr unsigned hipHostRegisterIoMemory = 0x4;
// HIP has two names for this bit.
constexpr unsigned hipHostRegisterReadOnly = 0x8;
constexpr unsigned hipExtHostRegisterCoarseGrained = 0x8;
constexpr unsigned hipExtHostRegisterUncached = 0x80000000;

constexpr unsigned hipIpcMemLazyEnablePeerAccess = 0x1;
constexpr size_t HIP_IPC_HANDLE_SIZE = 64;

using hipDeviceptr_t = void*;
using hipStream_t = struct ihipStream_t*;
using hipEvent_t = struct ihipEvent_t*;
using hipArray_t = struct hipArray*;
using hipGraph_t = struct ihipGraph*;
using hipGraphNode_t = struct hipGraphNode*;
using hipGraphExec_t = struct hipGraphExec*;
using hipMemGenericAllocationHandle_t = struct ihipMemGenericAllocationHandle*;

// Stream handles that no call makes; macros, because a pointer made of a number is no
// constant expression.
#define hipStreamLegacy (reinterpret_cast<hipStream_t>(uintptr_t{1}))
#define hipStreamPerThread (reinterpret_cast<hipStream_t>(uintptr_t{2}))

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

struct hipMemAllocationProp {
  hipMemAllocationType type;
  union {
    hipMemAllocationHandleType requestedHandleTypes;
    hipMemAllocationHandleType requestedHandleType;
  };
  hipMemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
  } allocFlags;
};

struct hipMemAccessDesc {
  hipMemLocation location;
  hipMemAccessFlags flags;
};

struct hipPos {
  size_t x, y, z;
};

struct hipExtent {
  size_t width, height, depth;
};

struct hipPitchedPtr {
  void* ptr;
  size_t pitch;
  size_t xsize, ysize;
};

struct hipMemcpy3DParms {
  hipArray_t srcArray;
  hipPos srcPos;
  hipPitchedPtr srcPtr;
  hipArray_t dstArray;
  hipPos dstPos;
  hipPitchedPtr dstPtr;
  hipExtent extent;
  hipMemcpyKind kind;
};

struct hipIpcMemHandle_t {
  char reserved[HIP_IPC_HANDLE_SIZE];
};

static_assert(sizeof(hipMemLocation) == 8);
static_assert(sizeof(hipMemcpyAttributes) == 24 && alignof(hipMemcpyAttributes) == 4);
static_assert(offsetof(hipMemcpyAttributes, srcAccessOrder) == 0);
static_assert(offsetof(hipMemcpyAttributes, srcLocHint) == 4);
static_assert(offsetof(hipMemcpyAttributes, dstLocHint) == 12);
static_assert(offsetof(hipMemcpyAttributes, flags) == 20);

static_assert(sizeof(hipMemAllocationProp) == 32 && alignof(hipMemAllocationProp) == 8);
static_assert(offsetof(hipMemAllocationProp, type) == 0);
static_assert(offsetof(hipMemAllocationProp, requestedHandleTypes) == 4);
static_assert(offsetof(hipMemAllocationProp, location) == 8);
static_assert(offsetof(hipMemAllocationProp, win32HandleMetaData) == 16);
static_assert(offsetof(hipMemAllocationProp, allocFlags) == 24);
static_assert(sizeof(hipMemAllocationProp::allocFlags) == 4);

static_assert(sizeof(hipMemAccessDesc) == 12 && alignof(hipMemAccessDesc) == 4);
static_assert(offsetof(hipMemAccessDesc, location) == 0);
static_assert(offsetof(hipMemAccessDesc, flags) == 8);

static_assert(sizeof(hipPos) == 24 && sizeof(hipExtent) == 24);
static_assert(sizeof(hipPitchedPtr) == 32 && offsetof(hipPitchedPtr, ptr) == 0);
static_assert(offsetof(hipPitchedPtr, pitch) == 8);

static_assert(sizeof(hipMemcpy3DParms) == 160 && alignof(hipMemcpy3DParms) == 8);
static_assert(offsetof(hipMemcpy3DParms, srcArray) == 0);
static_assert(offsetof(hipMemcpy3DParms, srcPos) == 8);
static_assert(offsetof(hipMemcpy3DParms, srcPtr) == 32);
static_assert(offsetof(hipMemcpy3DParms, dstArray) == 64);
static_assert(offsetof(hipMemcpy3DParms, dstPos) == 72);
static_assert(offsetof(hipMemcpy3DParms, dstPtr) == 96);
static_assert(offsetof(hipMemcpy3DParms, extent) == 128);
static_assert(offsetof(hipMemcpy3DParms, kind) == 152);

static_assert(sizeof(hipIpcMemHandle_t) == 64 && alignof(hipIpcMemHandle_t) == 1);
