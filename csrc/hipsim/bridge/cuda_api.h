// SPDX-License-Identifier: Apache-2.0
//
// Every function of the CUDA driver that a stand-in for libcuda.so.1 exports, under the
// name of its symbol, as dlsym() wants it: cuda.h renames most of them with macros.
// Nothing here is the simulator's own.
#pragma once

#include "bridge/cuda_abi.h"

HIPSIM_EXPORT CUresult cuInit(unsigned flags);
HIPSIM_EXPORT CUresult cuDriverGetVersion(int* version);
HIPSIM_EXPORT CUresult cuGetProcAddress_v2(const char* symbol, void** function,
                                           int version, uint64_t flags,
                                           CUdriverProcAddressQueryResult* status);
HIPSIM_EXPORT CUresult cuGetErrorName(CUresult error, const char** name);
HIPSIM_EXPORT CUresult cuGetErrorString(CUresult error, const char** text);

// --- devices and contexts ----------------------------------------------------------

HIPSIM_EXPORT CUresult cuDeviceGet(CUdevice* device, int ordinal);
HIPSIM_EXPORT CUresult cuDeviceGetCount(int* count);
HIPSIM_EXPORT CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                                            CUdevice device);
HIPSIM_EXPORT CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device);
HIPSIM_EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device);
HIPSIM_EXPORT CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device);
HIPSIM_EXPORT CUresult cuCtxGetCurrent(CUcontext* context);
HIPSIM_EXPORT CUresult cuCtxSetCurrent(CUcontext context);
HIPSIM_EXPORT CUresult cuCtxGetDevice(CUdevice* device);
HIPSIM_EXPORT CUresult cuCtxSynchronize();
HIPSIM_EXPORT CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest);

// --- streams -----------------------------------------------------------------------

HIPSIM_EXPORT CUresult cuStreamCreate(CUstream* stream, unsigned flags);
HIPSIM_EXPORT CUresult cuStreamCreateWithPriority(CUstream* stream, unsigned flags,
                                                  int priority);
HIPSIM_EXPORT CUresult cuStreamDestroy_v2(CUstream stream);
HIPSIM_EXPORT CUresult cuStreamQuery(CUstream stream);
HIPSIM_EXPORT CUresult cuStreamSynchronize(CUstream stream);
HIPSIM_EXPORT CUresult cuStreamWaitEvent(CUstream stream, CUevent event,
                                         unsigned flags);

// --- events ------------------------------------------------------------------------

HIPSIM_EXPORT CUresult cuEventCreate(CUevent* event, unsigned flags);
HIPSIM_EXPORT CUresult cuEventDestroy_v2(CUevent event);
HIPSIM_EXPORT CUresult cuEventRecord(CUevent event, CUstream stream);
HIPSIM_EXPORT CUresult cuEventQuery(CUevent event);
HIPSIM_EXPORT CUresult cuEventSynchronize(CUevent event);
HIPSIM_EXPORT CUresult cuEventElapsedTime(float* milliseconds, CUevent start,
                                          CUevent stop);

// --- memory ------------------------------------------------------------------------

HIPSIM_EXPORT CUresult cuMemGetInfo_v2(size_t* free, size_t* total);
HIPSIM_EXPORT CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes);
HIPSIM_EXPORT CUresult cuMemFree_v2(CUdeviceptr pointer);
HIPSIM_EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes,
                                               CUdeviceptr pointer);
HIPSIM_EXPORT CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags);
HIPSIM_EXPORT CUresult cuMemFreeHost(void* pointer);
HIPSIM_EXPORT CUresult cuMemHostRegister_v2(void* pointer, size_t bytes,
                                            unsigned flags);
HIPSIM_EXPORT CUresult cuMemHostUnregister(void* pointer);
HIPSIM_EXPORT CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device_pointer,
                                                    void* host_pointer, unsigned flags);

// --- virtual memory ----------------------------------------------------------------

HIPSIM_EXPORT CUresult cuMemGetAllocationGranularity(
    size_t* granularity, const CUmemAllocationProp* properties,
    CUmemAllocationGranularity_flags option);
HIPSIM_EXPORT CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes,
                                           size_t alignment, CUdeviceptr hint,
                                           unsigned long long flags);
HIPSIM_EXPORT CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes);
HIPSIM_EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                                   const CUmemAllocationProp* properties,
                                   unsigned long long flags);
HIPSIM_EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle);
HIPSIM_EXPORT CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset,
                                CUmemGenericAllocationHandle handle,
                                unsigned long long flags);
HIPSIM_EXPORT CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes);
HIPSIM_EXPORT CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes,
                                      const CUmemAccessDesc* descriptors, size_t count);
HIPSIM_EXPORT CUresult cuMemGetAccess(unsigned long long* flags,
                                      const CUmemLocation* location,
                                      CUdeviceptr pointer);
HIPSIM_EXPORT CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle,
                                                   void* pointer);
HIPSIM_EXPORT CUresult cuMemGetAllocationPropertiesFromHandle(
    CUmemAllocationProp* properties, CUmemGenericAllocationHandle handle);

// --- copies ------------------------------------------------------------------------

HIPSIM_EXPORT CUresult cuMemsetD8_v2(CUdeviceptr destination, unsigned char value,
                                     size_t bytes);
HIPSIM_EXPORT CUresult cuMemsetD8Async(CUdeviceptr destination, unsigned char value,
                                       size_t bytes, CUstream stream);
HIPSIM_EXPORT CUresult cuMemcpy(CUdeviceptr destination, CUdeviceptr source,
                                size_t bytes);
HIPSIM_EXPORT CUresult cuMemcpyAsync(CUdeviceptr destination, CUdeviceptr source,
                                     size_t bytes, CUstream stream);
HIPSIM_EXPORT CUresult cuMemcpyHtoD_v2(CUdeviceptr destination, const void* source,
                                       size_t bytes);
HIPSIM_EXPORT CUresult cuMemcpyDtoH_v2(void* destination, CUdeviceptr source,
                                       size_t bytes);
HIPSIM_EXPORT CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr destination, const void* source,
                                            size_t bytes, CUstream stream);
HIPSIM_EXPORT CUresult cuMemcpyDtoHAsync_v2(void* destination, CUdeviceptr source,
                                            size_t bytes, CUstream stream);
HIPSIM_EXPORT CUresult cuMemcpyDtoDAsync_v2(CUdeviceptr destination, CUdeviceptr source,
                                            size_t bytes, CUstream stream);
HIPSIM_EXPORT CUresult cuMemcpy2D_v2(const CUDA_MEMCPY2D* copy);
HIPSIM_EXPORT CUresult cuMemcpy2DAsync_v2(const CUDA_MEMCPY2D* copy, CUstream stream);
HIPSIM_EXPORT CUresult cuMemcpy3DAsync_v2(const CUDA_MEMCPY3D* copy, CUstream stream);
// As in CUDA 12.8; CUDA 13's header has only the next, without the failing index.
HIPSIM_EXPORT CUresult cuMemcpyBatchAsync(CUdeviceptr* destinations,
                                          CUdeviceptr* sources, size_t* sizes,
                                          size_t count, CUmemcpyAttributes* attributes,
                                          size_t* first_copies, size_t attribute_count,
                                          size_t* fail_index, CUstream stream);
HIPSIM_EXPORT CUresult cuMemcpyBatchAsync_v2(CUdeviceptr* destinations,
                                             CUdeviceptr* sources, size_t* sizes,
                                             size_t count,
                                             CUmemcpyAttributes* attributes,
                                             size_t* first_copies,
                                             size_t attribute_count, CUstream stream);

// --- capture and graphs ------------------------------------------------------------

HIPSIM_EXPORT CUresult cuStreamBeginCapture_v2(CUstream stream,
                                               CUstreamCaptureMode mode);
HIPSIM_EXPORT CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph);
HIPSIM_EXPORT CUresult cuStreamIsCapturing(CUstream stream,
                                           CUstreamCaptureStatus* status);
HIPSIM_EXPORT CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode* mode);
HIPSIM_EXPORT CUresult cuGraphGetNodes(CUgraph graph, CUgraphNode* nodes,
                                       size_t* count);
HIPSIM_EXPORT CUresult cuGraphDestroy(CUgraph graph);
HIPSIM_EXPORT CUresult cuGraphInstantiateWithFlags(CUgraphExec* executable,
                                                   CUgraph graph,
                                                   unsigned long long flags);
HIPSIM_EXPORT CUresult cuGraphLaunch(CUgraphExec executable, CUstream stream);
HIPSIM_EXPORT CUresult cuGraphExecDestroy(CUgraphExec executable);

// --- memory of other processes -----------------------------------------------------

HIPSIM_EXPORT CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer);
HIPSIM_EXPORT CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pointer,
                                             CUipcMemHandle handle, unsigned flags);
HIPSIM_EXPORT CUresult cuIpcCloseMemHandle(CUdeviceptr pointer);
