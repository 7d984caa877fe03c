// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "bridge/cuda_api.h"
#include "bridge/cuda_call.h"

using hipsim::Access;
using hipsim::AccessGrant;
using hipsim::AllocationRequest;
using hipsim::api;
using hipsim::as_device_pointer;
using hipsim::as_pointer;
using hipsim::Call;
using hipsim::Caller;
using hipsim::Error;
using hipsim::Handle;
using hipsim::Needs;
using hipsim::Runtime;

namespace {

bool is_device_memory(const CUmemAllocationProp& properties) {
  return properties.type == CU_MEM_ALLOCATION_TYPE_PINNED &&
         properties.location.type == CU_MEM_LOCATION_TYPE_DEVICE;
}

bool is_host(const CUmemLocation& location) {
  return location.type == CU_MEM_LOCATION_TYPE_HOST ||
         location.type == CU_MEM_LOCATION_TYPE_HOST_NUMA;
}

}  // namespace

CUresult cuMemGetAllocationGranularity(size_t* granularity,
                                       const CUmemAllocationProp* properties,
                                       CUmemAllocationGranularity_flags option) {
  return api(Needs::kDriver, Call::cuMemGetAllocationGranularity,
             [=](Runtime& rt, const Caller&) {
               if (granularity == nullptr || properties == nullptr ||
                   option > CU_MEM_ALLOC_GRANULARITY_RECOMMENDED) {
                 return Error::kInvalidValue;
               }
               // It is that of every memory, and of what is none.
               return rt.granularity(0, option == CU_MEM_ALLOC_GRANULARITY_RECOMMENDED,
                                     granularity);
             });
}

CUresult cuMemAddressReserve(CUdeviceptr* pointer, size_t bytes, size_t alignment,
                             CUdeviceptr hint, unsigned long long flags) {
  return api(
      Needs::kDriver, Call::cuMemAddressReserve, [=](Runtime& rt, const Caller&) {
        if (pointer == nullptr || flags != 0) return Error::kInvalidValue;
        void* reserved = nullptr;
        const Error error = rt.reserve(bytes, alignment, as_pointer(hint), &reserved);
        if (error == Error::kSuccess) *pointer = as_device_pointer(reserved);
        return error;
      });
}

CUresult cuMemAddressFree(CUdeviceptr pointer, size_t bytes) {
  return api(Needs::kDriver, Call::cuMemAddressFree, [=](Runtime& rt, const Caller&) {
    if (pointer == 0) return Error::kInvalidValue;
    return rt.free_addresses(as_pointer(pointer), bytes);
  });
}

CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t bytes,
                     const CUmemAllocationProp* properties, unsigned long long flags) {
  return api(Needs::kDriver, Call::cuMemCreate, [=](Runtime& rt, const Caller& caller) {
    if (handle == nullptr || properties == nullptr || flags != 0) {
      return Error::kInvalidValue;
    }
    const AllocationRequest request{is_device_memory(*properties),
                                    properties->location.id,
                                    properties->requestedHandleTypes, bytes,
                                    properties->allocFlags.gpuDirectRDMACapable != 0};
    Handle made = 0;
    const Error error = rt.create(caller, request, &made);
    if (error == Error::kSuccess) *handle = made;
    return error;
  });
}

CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
  return api(Needs::kDriver, Call::cuMemRelease,
             [=](Runtime& rt, const Caller&) { return rt.release_handle(handle); });
}

CUresult cuMemMap(CUdeviceptr pointer, size_t bytes, size_t offset,
                  CUmemGenericAllocationHandle handle, unsigned long long flags) {
  return api(Needs::kDriver, Call::cuMemMap, [=](Runtime& rt, const Caller&) {
    if (flags != 0) return Error::kInvalidValue;
    return rt.map(as_pointer(pointer), bytes, offset, handle);
  });
}

CUresult cuMemUnmap(CUdeviceptr pointer, size_t bytes) {
  return api(Needs::kDriver, Call::cuMemUnmap, [=](Runtime& rt, const Caller& caller) {
    return rt.unmap(caller, as_pointer(pointer), bytes);
  });
}

CUresult cuMemSetAccess(CUdeviceptr pointer, size_t bytes,
                        const CUmemAccessDesc* descriptors, size_t count) {
  return api(Needs::kDriver, Call::cuMemSetAccess, [=](Runtime& rt, const Caller&) {
    if (descriptors == nullptr) return Error::kInvalidValue;
    std::vector<AccessGrant> grants;
    for (size_t i = 0; i < count; ++i) {
      const CUmemLocation& location = descriptors[i].location;
      if (is_host(location)) return Error::kNotSupported;
      if (location.type != CU_MEM_LOCATION_TYPE_DEVICE || !rt.has_device(location.id)) {
        return Error::kInvalidValue;
      }
      grants.push_back({location.id, static_cast<Access>(descriptors[i].flags)});
    }
    return rt.set_access(as_pointer(pointer), bytes, grants);
  });
}

CUresult cuMemGetAccess(unsigned long long* flags, const CUmemLocation* location,
                        CUdeviceptr pointer) {
  return api(Needs::kDriver, Call::cuMemGetAccess, [=](Runtime& rt, const Caller&) {
    if (flags == nullptr || location == nullptr ||
        (!is_host(*location) && location->type != CU_MEM_LOCATION_TYPE_DEVICE)) {
      return Error::kInvalidValue;
    }
    const int device = is_host(*location) ? 0 : location->id;
    if (!rt.has_device(device)) return Error::kInvalidDevice;
    Access access = Access::kNone;
    const Error error = rt.access_of(as_pointer(pointer), device, &access);
    if (error != Error::kSuccess) return error;
    *flags = is_host(*location) ? 0 : static_cast<unsigned long long>(access);
    return Error::kSuccess;
  });
}

CUresult cuMemRetainAllocationHandle(CUmemGenericAllocationHandle* handle,
                                     void* pointer) {
  return api(Needs::kDriver, Call::cuMemRetainAllocationHandle,
             [=](Runtime& rt, const Caller&) {
               if (handle == nullptr || pointer == nullptr) return Error::kInvalidValue;
               Handle retained = 0;
               const Error error = rt.retain_handle(pointer, &retained);
               if (error == Error::kSuccess) *handle = retained;
               return error;
             });
}

CUresult cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp* properties,
                                                CUmemGenericAllocationHandle handle) {
  return api(Needs::kDriver, Call::cuMemGetAllocationPropertiesFromHandle,
             [=](Runtime& rt, const Caller&) {
               if (properties == nullptr) return Error::kInvalidValue;
               AllocationRequest asked;
               const Error error = rt.describe_handle(handle, &asked);
               if (error != Error::kSuccess) return error;
               *properties = {};
               properties->type = CU_MEM_ALLOCATION_TYPE_PINNED;
               properties->requestedHandleTypes =
                   static_cast<CUmemAllocationHandleType>(asked.handle_types);
               properties->location = {CU_MEM_LOCATION_TYPE_DEVICE, asked.device};
               properties->allocFlags.gpuDirectRDMACapable = asked.for_network ? 1 : 0;
               return Error::kSuccess;
             });
}
