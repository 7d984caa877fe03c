// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "bridge/hip_api.h"
#include "bridge/hip_call.h"

using hipsim::api;
using hipsim::Call;
using hipsim::Caller;
using hipsim::Error;
using hipsim::IpcHandle;
using hipsim::Runtime;

static_assert(sizeof(IpcHandle) == sizeof(hipIpcMemHandle_t));

// --- memory ------------------------------------------------------------------------

hipError_t hipMalloc(void** pointer, size_t bytes) {
  return api(Call::hipMalloc, [=](Runtime& rt, const Caller& caller) {
    if (pointer == nullptr) return Error::kInvalidValue;
    return rt.allocate(caller, bytes, pointer);
  });
}

hipError_t hipFree(void* pointer) {
  return api(Call::hipFree, [=](Runtime& rt, const Caller& caller) {
    return rt.release(caller, pointer);
  });
}

hipError_t hipMemGetInfo(size_t* free, size_t* total) {
  return api(Call::hipMemGetInfo, [=](Runtime& rt, const Caller& caller) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    rt.memory_info(caller.device, &free_bytes, &total_bytes);
    if (free != nullptr) *free = free_bytes;
    if (total != nullptr) *total = total_bytes;
    return Error::kSuccess;
  });
}

hipError_t hipMemGetAddressRange(hipDeviceptr_t* base, size_t* bytes,
                                 hipDeviceptr_t pointer) {
  return api(Call::hipMemGetAddressRange, [=](Runtime& rt, const Caller&) {
    void* found_base = nullptr;
    size_t found_bytes = 0;
    const Error error = rt.address_range(pointer, &found_base, &found_bytes);
    if (error != Error::kSuccess) return error;
    if (base != nullptr) *base = found_base;
    if (bytes != nullptr) *bytes = found_bytes;
    return Error::kSuccess;
  });
}

// The flags choose caching and NUMA placement, which are not modelled.
hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned) {
  return api(Call::hipHostMalloc, [=](Runtime& rt, const Caller& caller) {
    if (pointer == nullptr) return Error::kInvalidValue;
    return rt.allocate_host(caller, bytes, pointer);
  });
}

hipError_t hipHostFree(void* pointer) {
  return api(Call::hipHostFree, [=](Runtime& rt, const Caller& caller) {
    return rt.release_host(caller, pointer);
  });
}

hipError_t hipHostRegister(void* pointer, size_t bytes, unsigned flags) {
  constexpr unsigned kKnown =
      hipHostRegisterPortable | hipHostRegisterMapped | hipHostRegisterIoMemory |
      hipExtHostRegisterCoarseGrained | hipExtHostRegisterUncached;
  return api(Call::hipHostRegister, [=](Runtime& rt, const Caller& caller) {
    return rt.register_host(caller, pointer, bytes, (flags & ~kKnown) == 0);
  });
}

hipError_t hipHostUnregister(void* pointer) {
  return api(Call::hipHostUnregister, [=](Runtime& rt, const Caller& caller) {
    return rt.unregister_host(caller, pointer);
  });
}

hipError_t hipHostGetDevicePointer(void** device_pointer, void* host_pointer,
                                   unsigned flags) {
  return api(Call::hipHostGetDevicePointer, [=](Runtime& rt, const Caller&) {
    if (device_pointer == nullptr || host_pointer == nullptr || flags != 0) {
      return Error::kInvalidValue;
    }
    return rt.device_pointer(host_pointer, device_pointer);
  });
}

// --- memory of other processes -----------------------------------------------------

hipError_t hipIpcGetMemHandle(hipIpcMemHandle_t* handle, void* pointer) {
  return api(Call::hipIpcGetMemHandle, [=](Runtime& rt, const Caller&) {
    if (handle == nullptr) return Error::kInvalidValue;
    IpcHandle made{};
    const Error error = rt.export_memory(pointer, &made);
    if (error == Error::kSuccess) std::memcpy(handle, &made, sizeof made);
    return error;
  });
}

hipError_t hipIpcOpenMemHandle(void** pointer, hipIpcMemHandle_t handle,
                               unsigned flags) {
  return api(Call::hipIpcOpenMemHandle, [=](Runtime& rt, const Caller&) {
    if (pointer == nullptr || flags != hipIpcMemLazyEnablePeerAccess) {
      return Error::kInvalidValue;
    }
    IpcHandle given{};
    std::memcpy(&given, &handle, sizeof given);
    return rt.import_memory(given, pointer);
  });
}

hipError_t hipIpcCloseMemHandle(void* pointer) {
  return api(Call::hipIpcCloseMemHandle,
             [=](Runtime& rt, const Caller&) { return rt.close_import(pointer); });
}
