// SPDX-License-Identifier: Apache-2.0
//
// Every function of HIP that the simulator exports. Nothing here is the simulator's
// own: a program that includes this and links with -lamdhip64 runs on any HIP runtime.
#pragma once

#include "bridge/hip_abi.h"

HIPSIM_EXPORT hipError_t hipInit(unsigned flags);
HIPSIM_EXPORT hipError_t hipRuntimeGetVersion(int* version);
HIPSIM_EXPORT hipError_t hipDriverGetVersion(int* version);
HIPSIM_EXPORT const char* hipGetErrorName(hipError_t error);
HIPSIM_EXPORT const char* hipGetErrorString(hipError_t error);
HIPSIM_EXPORT hipError_t hipGetLastError();
HIPSIM_EXPORT hipError_t hipPeekAtLastError();

// --- devices -----------------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipGetDeviceCount(int* count);
HIPSIM_EXPORT hipError_t hipSetDevice(int device);
HIPSIM_EXPORT hipError_t hipGetDevice(int* device);
HIPSIM_EXPORT hipError_t hipDeviceSynchronize();
HIPSIM_EXPORT hipError_t hipDeviceGetAttribute(int* value,
                                               hipDeviceAttribute_t attribute,
                                               int device);
HIPSIM_EXPORT hipError_t hipDeviceGetPCIBusId(char* text, int length, int device);
HIPSIM_EXPORT hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest);

// --- streams -----------------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipStreamCreate(hipStream_t* stream);
HIPSIM_EXPORT hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags);
HIPSIM_EXPORT hipError_t hipStreamCreateWithPriority(hipStream_t* stream,
                                                     unsigned flags, int priority);
HIPSIM_EXPORT hipError_t hipStreamDestroy(hipStream_t stream);
HIPSIM_EXPORT hipError_t hipStreamQuery(hipStream_t stream);
HIPSIM_EXPORT hipError_t hipStreamSynchronize(hipStream_t stream);
HIPSIM_EXPORT hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event,
                                            unsigned flags);

// --- events ------------------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipEventCreate(hipEvent_t* event);
HIPSIM_EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags);
HIPSIM_EXPORT hipError_t hipEventDestroy(hipEvent_t event);
HIPSIM_EXPORT hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream);
HIPSIM_EXPORT hipError_t hipEventQuery(hipEvent_t event);
HIPSIM_EXPORT hipError_t hipEventSynchronize(hipEvent_t event);
HIPSIM_EXPORT hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start,
                                             hipEvent_t stop);

// --- memory ------------------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipMalloc(void** pointer, size_t bytes);
HIPSIM_EXPORT hipError_t hipFree(void* pointer);
HIPSIM_EXPORT hipError_t hipMemGetInfo(size_t* free, size_t* total);
HIPSIM_EXPORT hipError_t hipMemGetAddressRange(hipDeviceptr_t* base, size_t* bytes,
                                               hipDeviceptr_t pointer);
HIPSIM_EXPORT hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned flags);
HIPSIM_EXPORT hipError_t hipHostFree(void* pointer);
HIPSIM_EXPORT hipError_t hipHostRegister(void* pointer, size_t bytes, unsigned flags);
HIPSIM_EXPORT hipError_t hipHostUnregister(void* pointer);
HIPSIM_EXPORT hipError_t hipHostGetDevicePointer(void** device_pointer,
                                                 void* host_pointer, unsigned flags);

// --- virtual memory ----------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipMemGetAllocationGranularity(
    size_t* granularity, const hipMemAllocationProp* properties,
    hipMemAllocationGranularity_flags option);
HIPSIM_EXPORT hipError_t hipMemAddressReserve(void** pointer, size_t bytes,
                                              size_t alignment, void* hint,
                                              unsigned long long flags);
HIPSIM_EXPORT hipError_t hipMemAddressFree(void* pointer, size_t bytes);
HIPSIM_EXPORT hipError_t hipMemCreate(hipMemGenericAllocationHandle_t* handle,
                                      size_t bytes,
                                      const hipMemAllocationProp* properties,
                                      unsigned long long flags);
HIPSIM_EXPORT hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle);
HIPSIM_EXPORT hipError_t hipMemMap(void* pointer, size_t bytes, size_t offset,
                                   hipMemGenericAllocationHandle_t handle,
                                   unsigned long long flags);
HIPSIM_EXPORT hipError_t hipMemUnmap(void* pointer, size_t bytes);
HIPSIM_EXPORT hipError_t hipMemSetAccess(void* pointer, size_t bytes,
                                         const hipMemAccessDesc* descriptors,
                                         size_t count);
HIPSIM_EXPORT hipError_t hipMemGetAccess(unsigned long long* flags,
                                         const hipMemLocation* location, void* pointer);
HIPSIM_EXPORT hipError_t
hipMemRetainAllocationHandle(hipMemGenericAllocationHandle_t* handle, void* pointer);
HIPSIM_EXPORT hipError_t hipMemGetAllocationPropertiesFromHandle(
    hipMemAllocationProp* properties, hipMemGenericAllocationHandle_t handle);

// --- copies ------------------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipMemset(void* destination, int value, size_t bytes);
HIPSIM_EXPORT hipError_t hipMemsetAsync(void* destination, int value, size_t bytes,
                                        hipStream_t stream);
HIPSIM_EXPORT hipError_t hipMemcpy(void* destination, const void* source, size_t bytes,
                                   hipMemcpyKind kind);
HIPSIM_EXPORT hipError_t hipMemcpyAsync(void* destination, const void* source,
                                        size_t bytes, hipMemcpyKind kind,
                                        hipStream_t stream);
HIPSIM_EXPORT hipError_t hipMemcpy2D(void* destination, size_t destination_pitch,
                                     const void* source, size_t source_pitch,
                                     size_t width, size_t height, hipMemcpyKind kind);
HIPSIM_EXPORT hipError_t hipMemcpy2DAsync(void* destination, size_t destination_pitch,
                                          const void* source, size_t source_pitch,
                                          size_t width, size_t height,
                                          hipMemcpyKind kind, hipStream_t stream);
HIPSIM_EXPORT hipError_t hipMemcpy3D(const hipMemcpy3DParms* parameters);
HIPSIM_EXPORT hipError_t hipMemcpy3DAsync(const hipMemcpy3DParms* parameters,
                                          hipStream_t stream);
HIPSIM_EXPORT hipError_t hipMemcpyBatchAsync(void** destinations, void** sources,
                                             size_t* sizes, size_t count,
                                             hipMemcpyAttributes* attributes,
                                             size_t* first_copies,
                                             size_t attribute_count, size_t* fail_index,
                                             hipStream_t stream);

// --- capture and graphs ------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipStreamBeginCapture(hipStream_t stream,
                                               hipStreamCaptureMode mode);
HIPSIM_EXPORT hipError_t hipStreamEndCapture(hipStream_t stream, hipGraph_t* graph);
HIPSIM_EXPORT hipError_t hipStreamIsCapturing(hipStream_t stream,
                                              hipStreamCaptureStatus* status);
HIPSIM_EXPORT hipError_t hipStreamGetCaptureInfo(hipStream_t stream,
                                                 hipStreamCaptureStatus* status,
                                                 unsigned long long* id);
HIPSIM_EXPORT hipError_t hipThreadExchangeStreamCaptureMode(hipStreamCaptureMode* mode);
HIPSIM_EXPORT hipError_t hipGraphGetNodes(hipGraph_t graph, hipGraphNode_t* nodes,
                                          size_t* count);
HIPSIM_EXPORT hipError_t hipGraphDestroy(hipGraph_t graph);
HIPSIM_EXPORT hipError_t hipGraphInstantiate(hipGraphExec_t* executable,
                                             hipGraph_t graph,
                                             hipGraphNode_t* error_node,
                                             char* log_buffer, size_t log_bytes);
HIPSIM_EXPORT hipError_t hipGraphInstantiateWithFlags(hipGraphExec_t* executable,
                                                      hipGraph_t graph,
                                                      unsigned long long flags);
HIPSIM_EXPORT hipError_t hipGraphLaunch(hipGraphExec_t executable, hipStream_t stream);
HIPSIM_EXPORT hipError_t hipGraphExecDestroy(hipGraphExec_t executable);

// --- memory of other processes -----------------------------------------------------

HIPSIM_EXPORT hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* pointer);
HIPSIM_EXPORT hipError_t hipIpcOpenMemHandle(void** pointer, hipIpcMemHandle_t handle,
                                             unsigned flags);
HIPSIM_EXPORT hipError_t hipIpcCloseMemHandle(void* pointer);
