// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdio>
#include <iterator>

#include "bridge/hip_api.h"
#include "bridge/hip_call.h"

using hipsim::api;
using hipsim::Call;
using hipsim::Caller;
using hipsim::Error;
using hipsim::Runtime;
using hipsim::this_thread;

namespace {

constexpr int kLeastPriority = 1;
constexpr int kGreatestPriority = -1;

struct Attribute {
  hipDeviceAttribute_t name;
  int value;
};

// What the simulated device can do. Of its compute units and their kernels there is
// nothing to tell.
constexpr Attribute kAttributes[] = {
    {hipDeviceAttributeAsyncEngineCount, 2},
    {hipDeviceAttributeCanMapHostMemory, 1},
    {hipDeviceAttributeIntegrated, 0},
    {hipDeviceAttributeMaxPitch, hipsim::kMaxPitch},
    {hipDeviceAttributePciDeviceId, 0},
    {hipDeviceAttributePciDomainId, 0},
    {hipDeviceAttributeUnifiedAddressing, 1},
    {hipDeviceAttributeHostRegisterSupported, 1},
};

hipError_t get_version(Call call, int* version) {
  return api(call, [=](Runtime& rt, const Caller&) {
    if (version == nullptr) return Error::kInvalidValue;
    *version = rt.version();
    return Error::kSuccess;
  });
}

}  // namespace

namespace hipsim {

HipThread& this_thread() {
  thread_local HipThread thread;
  return thread;
}

const Bridge& bridge() {
#define HIPSIM_NAME(name) #name,
  static const Bridge instance{
      false,
      {HIPSIM_CALLS(HIPSIM_NAME)},
      [] { this_thread().last_error = hipSuccess; },
  };
#undef HIPSIM_NAME
  return instance;
}

}  // namespace hipsim

hipError_t hipInit(unsigned flags) {
  return api(Call::hipInit, [=](Runtime&, const Caller&) {
    return flags == 0 ? Error::kSuccess : Error::kInvalidValue;
  });
}

hipError_t hipRuntimeGetVersion(int* version) {
  return get_version(Call::hipRuntimeGetVersion, version);
}

hipError_t hipDriverGetVersion(int* version) {
  return get_version(Call::hipDriverGetVersion, version);
}

hipError_t hipGetLastError() {
  const hipError_t error = this_thread().last_error;
  this_thread().last_error = hipSuccess;
  return error;
}

hipError_t hipPeekAtLastError() { return this_thread().last_error; }

// --- devices -----------------------------------------------------------------------

hipError_t hipGetDeviceCount(int* count) {
  return api(Call::hipGetDeviceCount, [=](Runtime& rt, const Caller&) {
    if (count == nullptr) return Error::kInvalidValue;
    *count = rt.devices();
    return Error::kSuccess;
  });
}

hipError_t hipSetDevice(int device) {
  return api(Call::hipSetDevice, [=](Runtime& rt, const Caller&) {
    if (!rt.has_device(device)) return Error::kInvalidDevice;
    this_thread().caller.device = device;
    return Error::kSuccess;
  });
}

hipError_t hipGetDevice(int* device) {
  return api(Call::hipGetDevice, [=](Runtime&, const Caller& caller) {
    if (device == nullptr) return Error::kInvalidValue;
    *device = caller.device;
    return Error::kSuccess;
  });
}

hipError_t hipDeviceSynchronize() {
  return api(Call::hipDeviceSynchronize, [](Runtime& rt, const Caller& caller) {
    return rt.synchronize_device(caller);
  });
}

hipError_t hipDeviceGetAttribute(int* value, hipDeviceAttribute_t attribute,
                                 int device) {
  return api(Call::hipDeviceGetAttribute, [=](Runtime& rt, const Caller&) {
    if (value == nullptr) return Error::kInvalidValue;
    if (!rt.has_device(device)) return Error::kInvalidDevice;
    if (attribute == hipDeviceAttributePciBusId) {
      *value = Runtime::pci_bus(device);
      return Error::kSuccess;
    }
    if (attribute == hipDeviceAttributeCanUseHostPointerForRegisteredMem) {
      *value = rt.aliases_host_pointers() ? 0 : 1;
      return Error::kSuccess;
    }
    if (attribute == hipDeviceAttributeVirtualMemoryManagementSupported) {
      *value = rt.has_virtual_memory() ? 1 : 0;
      return Error::kSuccess;
    }
    if (attribute == hipDeviceAttributeIsLargeBar) {
      *value = rt.has_large_bar() ? 1 : 0;
      return Error::kSuccess;
    }
    const auto* found =
        std::find_if(std::begin(kAttributes), std::end(kAttributes),
                     [&](const Attribute& each) { return each.name == attribute; });
    if (found == std::end(kAttributes)) return Error::kInvalidValue;
    *value = found->value;
    return Error::kSuccess;
  });
}

// Where the text does not fit, its beginning is there all the same.
hipError_t hipDeviceGetPCIBusId(char* text, int length, int device) {
  return api(Call::hipDeviceGetPCIBusId, [=](Runtime& rt, const Caller&) {
    if (!rt.has_device(device)) return Error::kInvalidDevice;
    if (text == nullptr) return Error::kInvalidValue;
    const int room = std::max(length, 0);
    const int needed = std::snprintf(text, static_cast<size_t>(room), "0000:%02x:00.0",
                                     Runtime::pci_bus(device));
    return needed < room ? Error::kSuccess : Error::kInvalidValue;
  });
}

// Streams of every priority are served alike.
hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return api(Call::hipDeviceGetStreamPriorityRange, [=](Runtime&, const Caller&) {
    if (least != nullptr) *least = kLeastPriority;
    if (greatest != nullptr) *greatest = kGreatestPriority;
    return Error::kSuccess;
  });
}
