// SPDX-License-Identifier: Apache-2.0
#include <pthread.h>

#include <algorithm>
#include <cstdio>
#include <deque>
#include <iterator>
#include <mutex>

#include "bridge/cuda_api.h"
#include "bridge/cuda_call.h"

// A context is named by its address, and there is one a device.
struct CUctx_st {
  int device;
  size_t retained;
};

using hipsim::api;
using hipsim::Call;
using hipsim::Caller;
using hipsim::CaptureMode;
using hipsim::CudaThread;
using hipsim::Error;
using hipsim::Needs;
using hipsim::Runtime;
using hipsim::runtime;
using hipsim::this_thread;

namespace {

constexpr int kLeastPriority = 0;
constexpr int kGreatestPriority = -5;

struct Attribute {
  CUdevice_attribute name;
  int value;
};

// What the simulated device can do: an H200 without kernels, whose fabric nobody may
// use.
constexpr Attribute kAttributes[] = {
    {CU_DEVICE_ATTRIBUTE_WARP_SIZE, 32},
    {CU_DEVICE_ATTRIBUTE_MAX_PITCH, hipsim::kMaxPitch},
    {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    {CU_DEVICE_ATTRIBUTE_INTEGRATED, 0},
    {CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY, 1},
    {CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, 0},
    {CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT, 3},
    {CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 1},
    {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, 0},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
    {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
    {CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, 0},
    {CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, 1},
    {CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, 1},
};

// The driver's state beside the runtime's.
class Driver {
 public:
  // A child made by fork() inherits no usable driver, as the real one says.
  void initialise() {
    std::lock_guard lock(mutex_);
    if (initialised_) return;
    for (int device = 0; device < runtime().devices(); ++device) {
      contexts_.push_back({device, 0});
    }
    pthread_atfork(nullptr, nullptr,
                   [] { runtime().refuse_calls(Error::kNotInitialized); });
    initialised_ = true;
  }

  CUcontext retain(int device) {
    std::lock_guard lock(mutex_);
    contexts_[device].retained += 1;
    return &contexts_[device];
  }

  Error release(int device) {
    std::lock_guard lock(mutex_);
    if (contexts_[device].retained == 0) return Error::kInvalidContext;
    contexts_[device].retained -= 1;
    return Error::kSuccess;
  }

  // It keeps its name when the last holder has gone.
  CUcontext context_of(int device) {
    std::lock_guard lock(mutex_);
    return &contexts_[device];
  }

  bool is_context(CUcontext context) {
    std::lock_guard lock(mutex_);
    return std::any_of(contexts_.begin(), contexts_.end(),
                       [&](const CUctx_st& each) { return &each == context; });
  }

  Error check(Needs needs) {
    if (needs == Needs::kNothing) return Error::kSuccess;
    std::lock_guard lock(mutex_);
    if (!initialised_) return Error::kNotInitialized;
    if (needs != Needs::kContext) return Error::kSuccess;
    const CudaThread& thread = this_thread();
    if (!thread.has_context) return Error::kInvalidContext;
    return contexts_[thread.caller.device].retained > 0 ? Error::kSuccess
                                                        : Error::kContextIsDestroyed;
  }

 private:
  std::mutex mutex_;
  bool initialised_ = false;
  std::deque<CUctx_st> contexts_;
};

Driver& driver() {
  static auto* const instance = new Driver;
  return *instance;
}

}  // namespace

namespace hipsim {

CudaThread& this_thread() {
  thread_local CudaThread thread;
  return thread;
}

Error check_needs(Needs needs) { return driver().check(needs); }

const Bridge& bridge() {
#define HIPSIM_NAME(name) #name,
  static const Bridge instance{true, {HIPSIM_CALLS(HIPSIM_NAME)}, [] {}};
#undef HIPSIM_NAME
  return instance;
}

}  // namespace hipsim

CUresult cuInit(unsigned flags) {
  return api(Needs::kNothing, Call::cuInit, [=](Runtime&, const Caller&) {
    if (flags != 0) return Error::kInvalidValue;
    driver().initialise();
    return Error::kSuccess;
  });
}

CUresult cuDriverGetVersion(int* version) {
  return api(Needs::kNothing, Call::cuDriverGetVersion,
             [=](Runtime& rt, const Caller&) {
               if (version == nullptr) return Error::kInvalidValue;
               *version = rt.version();
               return Error::kSuccess;
             });
}

// --- devices -----------------------------------------------------------------------

CUresult cuDeviceGetCount(int* count) {
  return api(Needs::kDriver, Call::cuDeviceGetCount, [=](Runtime& rt, const Caller&) {
    if (count == nullptr) return Error::kInvalidValue;
    *count = rt.devices();
    return Error::kSuccess;
  });
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  return api(Needs::kDriver, Call::cuDeviceGet, [=](Runtime& rt, const Caller&) {
    if (device == nullptr) return Error::kInvalidValue;
    if (!rt.has_device(ordinal)) return Error::kInvalidDevice;
    *device = ordinal;
    return Error::kSuccess;
  });
}

CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute,
                              CUdevice device) {
  return api(
      Needs::kDriver, Call::cuDeviceGetAttribute, [=](Runtime& rt, const Caller&) {
        if (value == nullptr) return Error::kInvalidValue;
        if (!rt.has_device(device)) return Error::kInvalidDevice;
        if (attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID) {
          *value = Runtime::pci_bus(device);
          return Error::kSuccess;
        }
        if (attribute == CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM) {
          *value = rt.aliases_host_pointers() ? 0 : 1;
          return Error::kSuccess;
        }
        if (attribute == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
          *value = rt.has_virtual_memory() ? 1 : 0;
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

// Of the digits the driver's are the large ones.
CUresult cuDeviceGetPCIBusId(char* text, int length, CUdevice device) {
  constexpr int kRoom = sizeof "0000:00:00.0";
  return api(
      Needs::kDriver, Call::cuDeviceGetPCIBusId, [=](Runtime& rt, const Caller&) {
        if (text == nullptr || length < kRoom) return Error::kInvalidValue;
        if (!rt.has_device(device)) return Error::kInvalidDevice;
        std::snprintf(text, kRoom, "0000:%02X:00.0", Runtime::pci_bus(device) & 0xFF);
        return Error::kSuccess;
      });
}

// --- contexts ----------------------------------------------------------------------

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  return api(Needs::kDriver, Call::cuDevicePrimaryCtxRetain,
             [=](Runtime& rt, const Caller&) {
               if (context == nullptr) return Error::kInvalidValue;
               if (!rt.has_device(device)) return Error::kInvalidDevice;
               *context = driver().retain(device);
               return Error::kSuccess;
             });
}

// What was made in a context stays when its last holder goes, as a leak to be found.
CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  return api(Needs::kDriver, Call::cuDevicePrimaryCtxRelease_v2,
             [=](Runtime& rt, const Caller&) {
               if (!rt.has_device(device)) return Error::kInvalidDevice;
               return driver().release(device);
             });
}

CUresult cuCtxGetCurrent(CUcontext* context) {
  return api(
      Needs::kDriver, Call::cuCtxGetCurrent, [=](Runtime&, const Caller& caller) {
        if (context == nullptr) return Error::kInvalidValue;
        *context =
            this_thread().has_context ? driver().context_of(caller.device) : nullptr;
        return Error::kSuccess;
      });
}

CUresult cuCtxSetCurrent(CUcontext context) {
  return api(Needs::kDriver, Call::cuCtxSetCurrent, [=](Runtime&, const Caller&) {
    CudaThread& thread = this_thread();
    if (context != nullptr) {
      if (!driver().is_context(context)) return Error::kInvalidContext;
      thread.caller.device = context->device;
    }
    thread.has_context = context != nullptr;
    return Error::kSuccess;
  });
}

CUresult cuCtxGetDevice(CUdevice* device) {
  return api(Call::cuCtxGetDevice, [=](Runtime&, const Caller& caller) {
    if (device == nullptr) return Error::kInvalidValue;
    *device = caller.device;
    return Error::kSuccess;
  });
}

CUresult cuCtxSynchronize() {
  return api(Call::cuCtxSynchronize, [](Runtime& rt, const Caller& caller) {
    return rt.synchronize_device(caller);
  });
}

// Streams of every priority are served alike.
CUresult cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  return api(Call::cuCtxGetStreamPriorityRange, [=](Runtime&, const Caller&) {
    if (least != nullptr) *least = kLeastPriority;
    if (greatest != nullptr) *greatest = kGreatestPriority;
    return Error::kSuccess;
  });
}
