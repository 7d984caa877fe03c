// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <new>
#include <system_error>

#include "bridge/hip_abi.h"
#include "bridge/instance.h"

using hipsim::Call;
using hipsim::Error;
using hipsim::Handle;
using hipsim::Runtime;
using hipsim::runtime;
using hipsim::StreamKind;

namespace {

constexpr int kLeastPriority = 1;
constexpr int kGreatestPriority = -1;

thread_local int t_device = 0;

template <auto hip, auto engine>
constexpr bool same = static_cast<unsigned>(hip) == static_cast<unsigned>(engine);

// Kinds, orders and flags go to the engine as they are.
using hipsim::CopyKind;
static_assert(same<hipMemcpyHostToHost, CopyKind::kHostToHost>);
static_assert(same<hipMemcpyHostToDevice, CopyKind::kHostToDevice>);
static_assert(same<hipMemcpyDeviceToHost, CopyKind::kDeviceToHost>);
static_assert(same<hipMemcpyDeviceToDevice, CopyKind::kDeviceToDevice>);
static_assert(same<hipMemcpyDefault, CopyKind::kDefault>);
static_assert(same<hipMemcpyDeviceToDeviceNoCU, CopyKind::kDeviceToDeviceNoCu>);
static_assert(same<hipMemcpySrcAccessOrderStream, hipsim::kSourceAccessStream>);
static_assert(
    same<hipMemcpySrcAccessOrderDuringApiCall, hipsim::kSourceAccessDuringApiCall>);
static_assert(same<hipMemcpySrcAccessOrderAny, hipsim::kSourceAccessAny>);
static_assert(same<hipMemcpyFlagExtPreferCE, hipsim::kCopyPreferSdma>);
static_assert(same<hipMemcpyFlagExtOpSwap, hipsim::kCopySwap>);
static_assert(same<hipMemcpyFlagExtOpIndirectSrc, hipsim::kCopyIndirectSource>);
static_assert(same<hipMemcpyFlagExtOpIndirectDst, hipsim::kCopyIndirectDestination>);

// HIP 7 keeps a thread's last error until it is asked for it; before, the next
// successful call wiped it out. "Not ready" is an answer, not an error.
hipError_t remember(hipError_t error) {
  if (error != hipSuccess && error != hipErrorNotReady) hipsim::set_last_error(error);
  return error;
}

// What every call has in common. `body` is run unless the call is refused or a test
// makes it fail, in which case `on_fault` is. A memory fault of the device overrides
// whatever the call says, as in HIP.
template <typename Body, typename OnFault>
hipError_t api(Call call, Body body, OnFault on_fault) {
  Error error = Error::kSuccess;
  try {
    Runtime& rt = runtime();
    error = rt.enter(static_cast<size_t>(call));
    if (error == Error::kSuccess) {
      error = body(rt);
    } else {
      on_fault(rt);
    }
    if (rt.gpu_error() != Error::kSuccess) error = rt.gpu_error();
  } catch (const std::bad_alloc&) {
    error = Error::kOutOfMemory;
  } catch (const std::system_error&) {  // no thread or no lock to be had
    error = Error::kOutOfMemory;
  }
  return remember(static_cast<hipError_t>(error));
}

template <typename Body>
hipError_t api(Call call, Body body) {
  return api(call, body, [](Runtime&) {});
}

Handle handle(hipStream_t stream) { return reinterpret_cast<Handle>(stream); }
Handle handle(hipEvent_t event) { return reinterpret_cast<Handle>(event); }

hipError_t create_stream(Call call, hipStream_t* stream, unsigned flags) {
  return api(call, [=](Runtime& rt) {
    if (stream == nullptr || flags > hipStreamNonBlocking) return Error::kInvalidValue;
    const StreamKind kind = flags == hipStreamNonBlocking ? StreamKind::kNonBlocking
                                                          : StreamKind::kBlocking;
    *stream = reinterpret_cast<hipStream_t>(rt.create_stream(t_device, kind));
    return Error::kSuccess;
  });
}

hipError_t create_event(Call call, hipEvent_t* event, unsigned flags) {
  constexpr unsigned kRelease =
      hipEventDisableSystemFence | hipEventReleaseToDevice | hipEventReleaseToSystem;
  constexpr unsigned kKnown =
      hipEventBlockingSync | hipEventDisableTiming | hipEventInterprocess | kRelease;
  return api(call, [=](Runtime& rt) {
    const unsigned release = flags & kRelease;
    const bool timing = (flags & hipEventDisableTiming) == 0;
    if (event == nullptr || (flags & ~kKnown) != 0 || (release & (release - 1)) != 0 ||
        (timing && (flags & hipEventInterprocess) != 0)) {
      return Error::kInvalidValue;
    }
    *event = reinterpret_cast<hipEvent_t>(rt.create_event(timing));
    return Error::kSuccess;
  });
}

hipError_t get_version(Call call, int* version) {
  return api(call, [=](Runtime& rt) {
    if (version == nullptr) return Error::kInvalidValue;
    *version = rt.version();
    return Error::kSuccess;
  });
}

}  // namespace

HIPSIM_EXPORT hipError_t hipInit(unsigned flags) {
  return api(Call::hipInit, [=](Runtime&) {
    return flags == 0 ? Error::kSuccess : Error::kInvalidValue;
  });
}

HIPSIM_EXPORT hipError_t hipRuntimeGetVersion(int* version) {
  return get_version(Call::hipRuntimeGetVersion, version);
}

HIPSIM_EXPORT hipError_t hipDriverGetVersion(int* version) {
  return get_version(Call::hipDriverGetVersion, version);
}

HIPSIM_EXPORT hipError_t hipGetLastError() { return hipsim::take_last_error(); }

HIPSIM_EXPORT hipError_t hipPeekAtLastError() { return hipsim::last_error(); }

// --- devices -----------------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipGetDeviceCount(int* count) {
  return api(Call::hipGetDeviceCount, [=](Runtime& rt) {
    if (count == nullptr) return Error::kInvalidValue;
    *count = rt.devices();
    return Error::kSuccess;
  });
}

HIPSIM_EXPORT hipError_t hipSetDevice(int device) {
  return api(Call::hipSetDevice, [=](Runtime& rt) {
    if (!rt.has_device(device)) return Error::kInvalidDevice;
    t_device = device;
    return Error::kSuccess;
  });
}

HIPSIM_EXPORT hipError_t hipGetDevice(int* device) {
  return api(Call::hipGetDevice, [=](Runtime&) {
    if (device == nullptr) return Error::kInvalidValue;
    *device = t_device;
    return Error::kSuccess;
  });
}

HIPSIM_EXPORT hipError_t hipDeviceSynchronize() {
  return api(Call::hipDeviceSynchronize, [](Runtime& rt) {
    rt.synchronize_device(t_device);
    return Error::kSuccess;
  });
}

// Streams of every priority are served alike.
HIPSIM_EXPORT hipError_t hipDeviceGetStreamPriorityRange(int* least, int* greatest) {
  return api(Call::hipDeviceGetStreamPriorityRange, [=](Runtime&) {
    if (least != nullptr) *least = kLeastPriority;
    if (greatest != nullptr) *greatest = kGreatestPriority;
    return Error::kSuccess;
  });
}

// --- streams -----------------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipStreamCreate(hipStream_t* stream) {
  return create_stream(Call::hipStreamCreate, stream, hipStreamDefault);
}

HIPSIM_EXPORT hipError_t hipStreamCreateWithFlags(hipStream_t* stream, unsigned flags) {
  return create_stream(Call::hipStreamCreateWithFlags, stream, flags);
}

// A priority outside the range is moved to its nearest end, so any value is right.
HIPSIM_EXPORT hipError_t hipStreamCreateWithPriority(hipStream_t* stream,
                                                     unsigned flags, int) {
  return create_stream(Call::hipStreamCreateWithPriority, stream, flags);
}

HIPSIM_EXPORT hipError_t hipStreamDestroy(hipStream_t stream) {
  return api(Call::hipStreamDestroy,
             [=](Runtime& rt) { return rt.destroy_stream(handle(stream)); });
}

HIPSIM_EXPORT hipError_t hipStreamQuery(hipStream_t stream) {
  return api(Call::hipStreamQuery,
             [=](Runtime& rt) { return rt.query_stream(handle(stream), t_device); });
}

HIPSIM_EXPORT hipError_t hipStreamSynchronize(hipStream_t stream) {
  return api(Call::hipStreamSynchronize, [=](Runtime& rt) {
    return rt.synchronize_stream(handle(stream), t_device);
  });
}

// Flag 1 (external) is for capturing streams, and there is none.
HIPSIM_EXPORT hipError_t hipStreamWaitEvent(hipStream_t stream, hipEvent_t event,
                                            unsigned flags) {
  return api(Call::hipStreamWaitEvent, [=](Runtime& rt) {
    if (flags > 1) return Error::kInvalidValue;
    if (flags == 1) return Error::kInvalidHandle;
    return rt.wait_event(handle(stream), t_device, handle(event));
  });
}

// --- events ------------------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipEventCreate(hipEvent_t* event) {
  return create_event(Call::hipEventCreate, event, hipEventDefault);
}

HIPSIM_EXPORT hipError_t hipEventCreateWithFlags(hipEvent_t* event, unsigned flags) {
  return create_event(Call::hipEventCreateWithFlags, event, flags);
}

HIPSIM_EXPORT hipError_t hipEventDestroy(hipEvent_t event) {
  return api(Call::hipEventDestroy, [=](Runtime& rt) {
    if (event == nullptr) return Error::kInvalidHandle;
    return rt.destroy_event(handle(event));
  });
}

HIPSIM_EXPORT hipError_t hipEventRecord(hipEvent_t event, hipStream_t stream) {
  return api(Call::hipEventRecord, [=](Runtime& rt) {
    return rt.record_event(handle(event), handle(stream), t_device);
  });
}

HIPSIM_EXPORT hipError_t hipEventQuery(hipEvent_t event) {
  return api(Call::hipEventQuery,
             [=](Runtime& rt) { return rt.query_event(handle(event)); });
}

HIPSIM_EXPORT hipError_t hipEventSynchronize(hipEvent_t event) {
  return api(Call::hipEventSynchronize,
             [=](Runtime& rt) { return rt.synchronize_event(handle(event)); });
}

HIPSIM_EXPORT hipError_t hipEventElapsedTime(float* milliseconds, hipEvent_t start,
                                             hipEvent_t stop) {
  return api(Call::hipEventElapsedTime, [=](Runtime& rt) {
    if (milliseconds == nullptr) return Error::kInvalidValue;
    return rt.elapsed_time(handle(start), handle(stop), milliseconds);
  });
}

// --- memory ------------------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipMalloc(void** pointer, size_t bytes) {
  return api(Call::hipMalloc, [=](Runtime& rt) {
    if (pointer == nullptr) return Error::kInvalidValue;
    return rt.allocate(t_device, bytes, pointer);
  });
}

HIPSIM_EXPORT hipError_t hipFree(void* pointer) {
  return api(Call::hipFree, [=](Runtime& rt) { return rt.release(pointer); });
}

HIPSIM_EXPORT hipError_t hipMemGetInfo(size_t* free, size_t* total) {
  return api(Call::hipMemGetInfo, [=](Runtime& rt) {
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    rt.memory_info(t_device, &free_bytes, &total_bytes);
    if (free != nullptr) *free = free_bytes;
    if (total != nullptr) *total = total_bytes;
    return Error::kSuccess;
  });
}

// The flags choose caching and NUMA placement, which are not modelled.
HIPSIM_EXPORT hipError_t hipHostMalloc(void** pointer, size_t bytes, unsigned) {
  return api(Call::hipHostMalloc, [=](Runtime& rt) {
    if (pointer == nullptr) return Error::kInvalidValue;
    return rt.allocate_host(bytes, pointer);
  });
}

HIPSIM_EXPORT hipError_t hipHostFree(void* pointer) {
  return api(Call::hipHostFree, [=](Runtime& rt) { return rt.release_host(pointer); });
}

HIPSIM_EXPORT hipError_t hipHostRegister(void* pointer, size_t bytes, unsigned flags) {
  constexpr unsigned kKnown =
      hipHostRegisterPortable | hipHostRegisterMapped | hipHostRegisterIoMemory |
      hipExtHostRegisterCoarseGrained | hipExtHostRegisterUncached;
  return api(Call::hipHostRegister, [=](Runtime& rt) {
    if ((flags & ~kKnown) != 0) return Error::kInvalidValue;
    return rt.register_host(pointer, bytes);
  });
}

HIPSIM_EXPORT hipError_t hipHostUnregister(void* pointer) {
  return api(Call::hipHostUnregister,
             [=](Runtime& rt) { return rt.unregister_host(pointer); });
}

// --- copies ------------------------------------------------------------------------

HIPSIM_EXPORT hipError_t hipMemset(void* destination, int value, size_t bytes) {
  return api(Call::hipMemset, [=](Runtime& rt) {
    return rt.fill(destination, value, bytes, 0, t_device, true);
  });
}

HIPSIM_EXPORT hipError_t hipMemsetAsync(void* destination, int value, size_t bytes,
                                        hipStream_t stream) {
  return api(Call::hipMemsetAsync, [=](Runtime& rt) {
    return rt.fill(destination, value, bytes, handle(stream), t_device, false);
  });
}

HIPSIM_EXPORT hipError_t hipMemcpy(void* destination, const void* source, size_t bytes,
                                   hipMemcpyKind kind) {
  return api(Call::hipMemcpy, [=](Runtime& rt) {
    return rt.copy(destination, source, bytes, static_cast<CopyKind>(kind), 0, t_device,
                   true);
  });
}

HIPSIM_EXPORT hipError_t hipMemcpyAsync(void* destination, const void* source,
                                        size_t bytes, hipMemcpyKind kind,
                                        hipStream_t stream) {
  return api(Call::hipMemcpyAsync, [=](Runtime& rt) {
    return rt.copy(destination, source, bytes, static_cast<CopyKind>(kind),
                   handle(stream), t_device, false);
  });
}

HIPSIM_EXPORT hipError_t hipMemcpyBatchAsync(void** destinations, void** sources,
                                             size_t* sizes, size_t count,
                                             hipMemcpyAttributes* attributes,
                                             size_t* first_copies,
                                             size_t attribute_count, size_t* fail_index,
                                             hipStream_t stream) {
  hipsim::Batch batch{destinations, sources,      sizes,           count,
                      {},           first_copies, attribute_count, fail_index};
  return api(
      Call::hipMemcpyBatchAsync,
      [&](Runtime& rt) {
        if (attributes != nullptr && attribute_count <= count) {
          std::for_each_n(attributes, attribute_count, [&](const auto& each) {
            batch.attributes.push_back({each.srcAccessOrder, each.flags});
          });
        }
        return rt.copy_batch(batch, handle(stream), t_device);
      },
      [&](Runtime& rt) { rt.blame_first_copy(batch); });
}
