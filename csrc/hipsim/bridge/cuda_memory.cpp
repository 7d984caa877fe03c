// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "bridge/cuda_api.h"
#include "bridge/cuda_call.h"

using hipsim::api;
using hipsim::as_device_pointer;
using hipsim::as_pointer;
using hipsim::Call;
using hipsim::Caller;
using hipsim::Error;
using hipsim::IpcHandle;
using hipsim::Needs;
using hipsim::Runtime;

static_assert(sizeof(IpcHandle) == sizeof(CUipcMemHandle));

// --- memory ------------------------------------------------------------------------

CUresult cuMemGetInfo_v2(size_t* free, size_t* total) {
  return api(Call::cuMemGetInfo_v2, [=](Runtime& rt, const Caller& caller) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    rt.memory_info(caller.device, &free_bytes, &total_bytes);
    if (free != nullptr) *free = free_bytes;
    if (total != nullptr) *total = total_bytes;
    return Error::kSuccess;
  });
}

CUresult cuMemAlloc_v2(CUdeviceptr* pointer, size_t bytes) {
  return api(Call::cuMemAlloc_v2, [=](Runtime& rt, const Caller& caller) {
    if (pointer == nullptr || bytes == 0) return Error::kInvalidValue;
    void* made = nullptr;
    const Error error = rt.allocate(caller, bytes, &made);
    if (error == Error::kSuccess) *pointer = as_device_pointer(made);
    return error;
  });
}

CUresult cuMemFree_v2(CUdeviceptr pointer) {
  return api(Needs::kWork, Call::cuMemFree_v2, [=](Runtime& rt, const Caller& caller) {
    return rt.release(caller, as_pointer(pointer));
  });
}

CUresult cuMemGetAddressRange_v2(CUdeviceptr* base, size_t* bytes,
                                 CUdeviceptr pointer) {
  return api(Call::cuMemGetAddressRange_v2, [=](Runtime& rt, const Caller&) {
    void* found_base = nullptr;
    size_t found_bytes = 0;
    const Error error =
        rt.address_range(as_pointer(pointer), &found_base, &found_bytes);
    if (error != Error::kSuccess) return error;
    if (base != nullptr) *base = as_device_pointer(found_base);
    if (bytes != nullptr) *bytes = found_bytes;
    return Error::kSuccess;
  });
}

CUresult cuMemHostAlloc(void** pointer, size_t bytes, unsigned flags) {
  constexpr unsigned kKnown = CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP |
                              CU_MEMHOSTALLOC_WRITECOMBINED;
  return api(Call::cuMemHostAlloc, [=](Runtime& rt, const Caller& caller) {
    if (pointer == nullptr || (flags & ~kKnown) != 0) return Error::kInvalidValue;
    return rt.allocate_host(caller, bytes, pointer);
  });
}

CUresult cuMemFreeHost(void* pointer) {
  return api(Needs::kWork, Call::cuMemFreeHost, [=](Runtime& rt, const Caller& caller) {
    return rt.release_host(caller, pointer);
  });
}

CUresult cuMemHostRegister_v2(void* pointer, size_t bytes, unsigned flags) {
  // Memory of a device on the bus is not what is registered here.
  constexpr unsigned kKnown = CU_MEMHOSTREGISTER_PORTABLE |
                              CU_MEMHOSTREGISTER_DEVICEMAP |
                              CU_MEMHOSTREGISTER_READ_ONLY;
  return api(Call::cuMemHostRegister_v2, [=](Runtime& rt, const Caller& caller) {
    return rt.register_host(caller, pointer, bytes, (flags & ~kKnown) == 0);
  });
}

CUresult cuMemHostUnregister(void* pointer) {
  return api(Needs::kWork, Call::cuMemHostUnregister,
             [=](Runtime& rt, const Caller& caller) {
               return rt.unregister_host(caller, pointer);
             });
}

CUresult cuMemHostGetDevicePointer_v2(CUdeviceptr* device_pointer, void* host_pointer,
                                      unsigned flags) {
  return api(Call::cuMemHostGetDevicePointer_v2, [=](Runtime& rt, const Caller&) {
    if (device_pointer == nullptr || host_pointer == nullptr || flags != 0) {
      return Error::kInvalidValue;
    }
    void* found = nullptr;
    const Error error = rt.device_pointer(host_pointer, &found);
    if (error == Error::kSuccess) *device_pointer = as_device_pointer(found);
    return error;
  });
}

// --- memory of other processes -----------------------------------------------------

CUresult cuIpcGetMemHandle(CUipcMemHandle* handle, CUdeviceptr pointer) {
  const bool nothing = handle == nullptr || pointer == 0;
  const Needs needs = nothing ? Needs::kNothing : Needs::kContext;
  return api(needs, Call::cuIpcGetMemHandle, [=](Runtime& rt, const Caller&) {
    if (nothing) return Error::kInvalidValue;
    IpcHandle made{};
    const Error error = rt.export_memory(as_pointer(pointer), &made);
    if (error == Error::kSuccess) std::memcpy(handle, &made, sizeof made);
    return error;
  });
}

CUresult cuIpcOpenMemHandle_v2(CUdeviceptr* pointer, CUipcMemHandle handle,
                               unsigned flags) {
  return api(Call::cuIpcOpenMemHandle_v2, [=](Runtime& rt, const Caller&) {
    if (pointer == nullptr || (flags & CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS) == 0) {
      return Error::kInvalidValue;
    }
    IpcHandle given{};
    std::memcpy(&given, &handle, sizeof given);
    void* opened = nullptr;
    const Error error = rt.import_memory(given, &opened);
    if (error == Error::kSuccess) *pointer = as_device_pointer(opened);
    return error;
  });
}

CUresult cuIpcCloseMemHandle(CUdeviceptr pointer) {
  return api(Call::cuIpcCloseMemHandle, [=](Runtime& rt, const Caller&) {
    return rt.close_import(as_pointer(pointer));
  });
}
