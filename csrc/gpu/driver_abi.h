// SPDX-License-Identifier: Apache-2.0
//
// What driver_api.cpp needs of the HIP runtime and of the CUDA driver, declared anew so
// that building takes no SDK. HIP: hip/hip_runtime_api.h and hip/driver_types.h of HIP
// 7.1.25424; what is here is the same in the bindings of HIP 7.15.26333. CUDA: cuda.h
// of CUDA 13.0, under the names of the symbols, which cuda.h renames with macros.
// tests/device_allocator/test_driver_api.py compares it with those headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpu::hip {

using Error = int;             // hipError_t
using Handle = void*;          // hipMemGenericAllocationHandle_t
using Stream = void*;          // hipStream_t
using CopyKind = unsigned;     // hipMemcpyKind
using Granularity = unsigned;  // hipMemAllocationGranularity_flags
using Attribute = unsigned;    // hipDeviceAttribute_t

constexpr Error kSuccess = 0;
constexpr Error kNotSupported = 801;
constexpr CopyKind kHostToDevice = 1;
constexpr CopyKind kDeviceToHost = 2;
constexpr CopyKind kByAddress = 4;
constexpr unsigned kAllocationPinned = 1;
constexpr unsigned kLocationDevice = 1;
constexpr unsigned kLocationHost = 2;
constexpr unsigned kAccessReadWrite = 3;
constexpr Granularity kGranularityMinimum = 0;
constexpr Attribute kVirtualMemorySupported = 89;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostMallocPortable = 1;

struct MemLocation {
  unsigned type;
  int id;
};

struct MemAllocationProp {
  unsigned type;
  unsigned requestedHandleTypes;
  MemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
  } allocFlags;
};

struct MemAccessDesc {
  MemLocation location;
  unsigned flags;
};

struct Position {
  size_t x;
  size_t y;
  size_t z;
};

struct Extent {
  size_t width;
  size_t height;
  size_t depth;
};

struct PitchedPointer {
  void* ptr;
  size_t pitch;
  size_t xsize;
  size_t ysize;
};

struct Copy3D {
  void* srcArray;
  Position srcPos;
  PitchedPointer srcPtr;
  void* dstArray;
  Position dstPos;
  PitchedPointer dstPtr;
  Extent extent;
  CopyKind kind;
};

#define GPU_HIP_FUNCTIONS(X)                                                          \
  X(hipRuntimeGetVersion, Error, (int*))                                              \
  X(hipGetErrorName, const char*, (Error))                                            \
  X(hipGetErrorString, const char*, (Error))                                          \
  X(hipGetLastError, Error, ())                                                       \
  X(hipGetDevice, Error, (int*))                                                      \
  X(hipSetDevice, Error, (int))                                                       \
  X(hipDeviceGetAttribute, Error, (int*, Attribute, int))                             \
  X(hipDeviceSynchronize, Error, ())                                                  \
  X(hipMemGetInfo, Error, (size_t*, size_t*))                                         \
  X(hipMemGetAllocationGranularity, Error,                                            \
    (size_t*, const MemAllocationProp*, Granularity))                                 \
  X(hipMemAddressReserve, Error, (void**, size_t, size_t, void*, unsigned long long)) \
  X(hipMemAddressFree, Error, (void*, size_t))                                        \
  X(hipMemCreate, Error,                                                              \
    (Handle*, size_t, const MemAllocationProp*, unsigned long long))                  \
  X(hipMemRelease, Error, (Handle))                                                   \
  X(hipMemMap, Error, (void*, size_t, size_t, Handle, unsigned long long))            \
  X(hipMemUnmap, Error, (void*, size_t))                                              \
  X(hipMemSetAccess, Error, (void*, size_t, const MemAccessDesc*, size_t))            \
  X(hipStreamCreateWithFlags, Error, (Stream*, unsigned))                             \
  X(hipStreamSynchronize, Error, (Stream))                                            \
  X(hipStreamDestroy, Error, (Stream))                                                \
  X(hipMemcpyAsync, Error, (void*, const void*, size_t, CopyKind, Stream))            \
  X(hipMemcpy2DAsync, Error,                                                          \
    (void*, size_t, const void*, size_t, size_t, size_t, CopyKind, Stream))           \
  X(hipMemcpy3DAsync, Error, (const Copy3D*, Stream))                                 \
  X(hipMemsetAsync, Error, (void*, int, size_t, Stream))                              \
  X(hipHostRegister, Error, (void*, size_t, unsigned))                                \
  X(hipHostUnregister, Error, (void*))

// Those that a driver may lack: what they are for is done without then.
#define GPU_HIP_OPTIONAL_FUNCTIONS(X)                 \
  X(hipDeviceGetPCIBusId, Error, (char*, int, int))   \
  X(hipHostMalloc, Error, (void**, size_t, unsigned)) \
  X(hipHostFree, Error, (void*))

}  // namespace gpu::hip

namespace gpu::cuda {

using Error = int;                   // CUresult
using Device = int;                  // CUdevice
using Context = void*;               // CUcontext
using Stream = void*;                // CUstream
using Address = unsigned long long;  // CUdeviceptr
using Handle = unsigned long long;   // CUmemGenericAllocationHandle
using Granularity = unsigned;        // CUmemAllocationGranularity_flags
using Attribute = unsigned;          // CUdevice_attribute
using MemoryType = unsigned;         // CUmemorytype

constexpr Error kSuccess = 0;
constexpr Error kNotPermitted = 800;
constexpr Error kNotSupported = 801;
constexpr unsigned kAllocationPinned = 1;
constexpr unsigned kLocationDevice = 1;
constexpr unsigned kHandlePosixFile = 1;
constexpr unsigned kHandleFabric = 8;
constexpr unsigned kAccessReadWrite = 3;
constexpr Granularity kGranularityMinimum = 0;
constexpr Attribute kVirtualMemorySupported = 102;
constexpr Attribute kRdmaSupported = 110;
constexpr Attribute kFabricSupported = 128;
constexpr unsigned kStreamNonBlocking = 1;
constexpr unsigned kHostRegisterPortable = 1;
constexpr unsigned kHostAllocPortable = 1;
constexpr MemoryType kByAddress = 4;

struct MemLocation {
  unsigned type;
  int id;
};

struct MemAllocationProp {
  unsigned type;
  unsigned requestedHandleTypes;
  MemLocation location;
  void* win32HandleMetaData;
  struct {
    unsigned char compressionType;
    unsigned char gpuDirectRDMACapable;
    unsigned short usage;
    unsigned char reserved[4];
  } allocFlags;
};

struct MemAccessDesc {
  MemLocation location;
  unsigned flags;
};

struct Copy2D {
  size_t srcXInBytes;
  size_t srcY;
  MemoryType srcMemoryType;
  const void* srcHost;
  Address srcDevice;
  void* srcArray;
  size_t srcPitch;
  size_t dstXInBytes;
  size_t dstY;
  MemoryType dstMemoryType;
  void* dstHost;
  Address dstDevice;
  void* dstArray;
  size_t dstPitch;
  size_t WidthInBytes;
  size_t Height;
};

struct Copy3D {
  size_t srcXInBytes;
  size_t srcY;
  size_t srcZ;
  size_t srcLOD;
  MemoryType srcMemoryType;
  const void* srcHost;
  Address srcDevice;
  void* srcArray;
  void* reserved0;
  size_t srcPitch;
  size_t srcHeight;
  size_t dstXInBytes;
  size_t dstY;
  size_t dstZ;
  size_t dstLOD;
  MemoryType dstMemoryType;
  void* dstHost;
  Address dstDevice;
  void* dstArray;
  void* reserved1;
  size_t dstPitch;
  size_t dstHeight;
  size_t WidthInBytes;
  size_t Height;
  size_t Depth;
};

#define GPU_CUDA_FUNCTIONS(X)                                               \
  X(cuInit, Error, (unsigned))                                              \
  X(cuDriverGetVersion, Error, (int*))                                      \
  X(cuGetErrorName, Error, (Error, const char**))                           \
  X(cuGetErrorString, Error, (Error, const char**))                         \
  X(cuDeviceGet, Error, (Device*, int))                                     \
  X(cuDeviceGetAttribute, Error, (int*, Attribute, Device))                 \
  X(cuDevicePrimaryCtxRetain, Error, (Context*, Device))                    \
  X(cuCtxGetCurrent, Error, (Context*))                                     \
  X(cuCtxSetCurrent, Error, (Context))                                      \
  X(cuCtxSynchronize, Error, ())                                            \
  X(cuMemGetInfo_v2, Error, (size_t*, size_t*))                             \
  X(cuMemGetAllocationGranularity, Error,                                   \
    (size_t*, const MemAllocationProp*, Granularity))                       \
  X(cuMemAddressReserve, Error,                                             \
    (Address*, size_t, size_t, Address, unsigned long long))                \
  X(cuMemAddressFree, Error, (Address, size_t))                             \
  X(cuMemCreate, Error,                                                     \
    (Handle*, size_t, const MemAllocationProp*, unsigned long long))        \
  X(cuMemRelease, Error, (Handle))                                          \
  X(cuMemMap, Error, (Address, size_t, size_t, Handle, unsigned long long)) \
  X(cuMemUnmap, Error, (Address, size_t))                                   \
  X(cuMemSetAccess, Error, (Address, size_t, const MemAccessDesc*, size_t)) \
  X(cuStreamCreate, Error, (Stream*, unsigned))                             \
  X(cuStreamSynchronize, Error, (Stream))                                   \
  X(cuStreamDestroy_v2, Error, (Stream))                                    \
  X(cuMemcpyHtoDAsync_v2, Error, (Address, const void*, size_t, Stream))    \
  X(cuMemcpyDtoHAsync_v2, Error, (void*, Address, size_t, Stream))          \
  X(cuMemcpy2DAsync_v2, Error, (const Copy2D*, Stream))                     \
  X(cuMemcpy3DAsync_v2, Error, (const Copy3D*, Stream))                     \
  X(cuMemsetD8Async, Error, (Address, unsigned char, size_t, Stream))       \
  X(cuMemHostRegister_v2, Error, (void*, size_t, unsigned))                 \
  X(cuMemHostUnregister, Error, (void*))

#define GPU_CUDA_OPTIONAL_FUNCTIONS(X)                 \
  X(cuDeviceGetPCIBusId, Error, (char*, int, Device))  \
  X(cuMemHostAlloc, Error, (void**, size_t, unsigned)) \
  X(cuMemFreeHost, Error, (void*))

}  // namespace gpu::cuda
