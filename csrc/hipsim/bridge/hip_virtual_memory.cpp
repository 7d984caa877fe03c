// SPDX-License-Identifier: Apache-2.0
#include <vector>

#include "bridge/hip_api.h"
#include "bridge/hip_call.h"

using hipsim::Access;
using hipsim::AccessGrant;
using hipsim::AllocationRequest;
using hipsim::api;
using hipsim::as_handle;
using hipsim::Call;
using hipsim::Caller;
using hipsim::Error;
using hipsim::Handle;
using hipsim::kHostLocation;
using hipsim::Runtime;

namespace {

bool is_device_memory(const hipMemAllocationProp& properties) {
  return (properties.type == hipMemAllocationTypePinned ||
          properties.type == hipMemAllocationTypeUncached) &&
         properties.location.type == hipMemLocationTypeDevice;
}

}  // namespace

hipError_t hipMemGetAllocationGranularity(size_t* granularity,
                                          const hipMemAllocationProp* properties,
                                          hipMemAllocationGranularity_flags option) {
  return api(Call::hipMemGetAllocationGranularity, [=](Runtime& rt, const Caller&) {
    if (granularity == nullptr || properties == nullptr ||
        !is_device_memory(*properties) ||
        option > hipMemAllocationGranularityRecommended) {
      return Error::kInvalidValue;
    }
    return rt.granularity(properties->location.id,
                          option == hipMemAllocationGranularityRecommended,
                          granularity);
  });
}

hipError_t hipMemAddressReserve(void** pointer, size_t bytes, size_t alignment,
                                void* hint, unsigned long long flags) {
  return api(Call::hipMemAddressReserve, [=](Runtime& rt, const Caller&) {
    if (pointer == nullptr || flags != 0) return Error::kInvalidValue;
    return rt.reserve(bytes, alignment, hint, pointer);
  });
}

hipError_t hipMemAddressFree(void* pointer, size_t bytes) {
  return api(Call::hipMemAddressFree, [=](Runtime& rt, const Caller&) {
    if (pointer == nullptr) return Error::kInvalidValue;
    return rt.free_addresses(pointer, bytes);
  });
}

hipError_t hipMemCreate(hipMemGenericAllocationHandle_t* handle, size_t bytes,
                        const hipMemAllocationProp* properties,
                        unsigned long long flags) {
  return api(Call::hipMemCreate, [=](Runtime& rt, const Caller& caller) {
    if (handle == nullptr || properties == nullptr || flags != 0) {
      return Error::kInvalidValue;
    }
    const AllocationRequest request{is_device_memory(*properties),
                                    properties->location.id,
                                    properties->requestedHandleTypes,
                                    bytes,
                                    false,
                                    properties->type};
    Handle made = 0;
    const Error error = rt.create(caller, request, &made);
    if (error == Error::kSuccess) {
      *handle = reinterpret_cast<hipMemGenericAllocationHandle_t>(made);
    }
    return error;
  });
}

hipError_t hipMemRelease(hipMemGenericAllocationHandle_t handle) {
  return api(Call::hipMemRelease, [=](Runtime& rt, const Caller&) {
    return rt.release_handle(as_handle(handle));
  });
}

hipError_t hipMemMap(void* pointer, size_t bytes, size_t offset,
                     hipMemGenericAllocationHandle_t handle, unsigned long long flags) {
  return api(Call::hipMemMap, [=](Runtime& rt, const Caller&) {
    if (flags != 0) return Error::kInvalidValue;
    return rt.map(pointer, bytes, offset, as_handle(handle));
  });
}

hipError_t hipMemUnmap(void* pointer, size_t bytes) {
  return api(Call::hipMemUnmap, [=](Runtime& rt, const Caller& caller) {
    return rt.unmap(caller, pointer, bytes);
  });
}

hipError_t hipMemSetAccess(void* pointer, size_t bytes,
                           const hipMemAccessDesc* descriptors, size_t count) {
  return api(Call::hipMemSetAccess, [=](Runtime& rt, const Caller&) {
    if (descriptors == nullptr) return Error::kInvalidValue;
    std::vector<AccessGrant> grants;
    for (size_t i = 0; i < count; ++i) {
      const hipMemLocation& location = descriptors[i].location;
      const bool host = location.type == hipMemLocationTypeHost;
      if ((!host && location.type != hipMemLocationTypeDevice) ||
          !rt.has_device(location.id)) {
        return Error::kInvalidValue;
      }
      grants.push_back({host ? kHostLocation : location.id,
                        static_cast<Access>(descriptors[i].flags)});
    }
    return rt.set_access(pointer, bytes, grants);
  });
}

hipError_t hipMemGetAccess(unsigned long long* flags, const hipMemLocation* location,
                           void* pointer) {
  return api(Call::hipMemGetAccess, [=](Runtime& rt, const Caller&) {
    if (flags == nullptr || location == nullptr ||
        location->type != hipMemLocationTypeDevice) {
      return Error::kInvalidValue;
    }
    Access access = Access::kNone;
    const Error error = rt.access_of(pointer, location->id, &access);
    if (error == Error::kSuccess) *flags = static_cast<unsigned long long>(access);
    return error;
  });
}

hipError_t hipMemRetainAllocationHandle(hipMemGenericAllocationHandle_t* handle,
                                        void* pointer) {
  return api(Call::hipMemRetainAllocationHandle, [=](Runtime& rt, const Caller&) {
    if (handle == nullptr || pointer == nullptr) return Error::kInvalidValue;
    Handle retained = 0;
    const Error error = rt.retain_handle(pointer, &retained);
    if (error == Error::kSuccess) {
      *handle = reinterpret_cast<hipMemGenericAllocationHandle_t>(retained);
    }
    return error;
  });
}

hipError_t hipMemGetAllocationPropertiesFromHandle(
    hipMemAllocationProp* properties, hipMemGenericAllocationHandle_t handle) {
  return api(Call::hipMemGetAllocationPropertiesFromHandle,
             [=](Runtime& rt, const Caller&) {
               if (properties == nullptr) return Error::kInvalidValue;
               AllocationRequest asked;
               const Error error = rt.describe_handle(as_handle(handle), &asked);
               if (error != Error::kSuccess) return error;
               *properties = {};
               properties->type = static_cast<hipMemAllocationType>(asked.type);
               properties->requestedHandleTypes =
                   static_cast<hipMemAllocationHandleType>(asked.handle_types);
               properties->location = {hipMemLocationTypeDevice, asked.device};
               return Error::kSuccess;
             });
}
