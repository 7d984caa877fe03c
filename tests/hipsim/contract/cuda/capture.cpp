// SPDX-License-Identifier: Apache-2.0
#include "capture.h"

#include <algorithm>

namespace contract {

std::string describe(const Effect& effect) {
  const auto number = [](CUresult result) {
    return std::to_string(static_cast<int>(result));
  };
  constexpr const char* kStatus[] = {"none", "active", "invalidated"};
  return number(effect.call) + ", then " + kStatus[effect.status] + ", ends with " +
         number(effect.end);
}

std::string describe(const Meeting& meeting) {
  constexpr const char* kModes[] = {"global", "thread-local", "relaxed"};
  return std::string(kModes[meeting.mode]) +
         (meeting.blocking ? ", blocking" : ", non-blocking") +
         (meeting.other_thread ? ", another thread" : "");
}

Effect is_harmless(const Meeting&) { return harmless(); }

Effect is_unsafe(const Meeting& meeting) {
  const bool allowed =
      meeting.mode == CU_STREAM_CAPTURE_MODE_RELAXED ||
      (meeting.other_thread && meeting.mode == CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
  return allowed ? harmless() : breaks_it(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

Effect is_implicit(const Meeting& meeting) {
  return meeting.blocking ? breaks_it(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) : harmless();
}

Effect is_implicit_and_unsafe(const Meeting& meeting) {
  return meeting.blocking ? is_implicit(meeting) : is_unsafe(meeting);
}

Effect is_forbidden(const Meeting&) {
  return breaks_it(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
}

namespace {

CUgraph end_capture(CUstream stream, Effect* effect) {
  CUgraph graph = nullptr;
  effect->end = cuStreamEndCapture(stream, &graph);
  return graph;
}

Effect effect_of(const Meeting& meeting, const Asked& asked) {
  Stream stream(meeting.blocking ? CU_STREAM_DEFAULT : CU_STREAM_NON_BLOCKING);
  asked.before();
  Effect effect;
  REQUIRE_OK(cuStreamBeginCapture_v2(stream, meeting.mode));
  if (meeting.other_thread) {
    in_another_thread([&] { effect.call = asked.call(stream); });
  } else {
    effect.call = asked.call(stream);
  }
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  REQUIRE_OK(cuStreamIsCapturing(stream, &status));
  effect.status = static_cast<int>(status);
  const CUgraph graph = end_capture(stream, &effect);
  if (graph != nullptr) REQUIRE_OK(cuGraphDestroy(graph));
  asked.after();
  return effect;
}

}  // namespace

void ask_meetings(Rule rule, const Asked& asked) {
  for (const bool other_thread : {false, true}) {
    for (const bool blocking : {false, true}) {
      for (const CUstreamCaptureMode mode :
           {CU_STREAM_CAPTURE_MODE_GLOBAL, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
            CU_STREAM_CAPTURE_MODE_RELAXED}) {
        const Meeting meeting{mode, blocking, other_thread};
        const About about(describe(meeting));
        const Effect effect = effect_of(meeting, asked);
        EXPECT_EQ(effect, rule(meeting));
      }
    }
  }
}

namespace {

constexpr const char* kReference = DRIVER "; CUDA Driver API, Stream Management";
constexpr const char* kDriver = DRIVER;
constexpr size_t kBytes = 4096;
constexpr CUresult kInvalid = CUDA_ERROR_INVALID_VALUE;
constexpr auto kGlobal = CU_STREAM_CAPTURE_MODE_GLOBAL;
constexpr auto kThreadLocal = CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
constexpr auto kRelaxed = CU_STREAM_CAPTURE_MODE_RELAXED;

CUstreamCaptureStatus status_of(CUstream stream) {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  REQUIRE_OK(cuStreamIsCapturing(stream, &status));
  return status;
}

// Ends a capture of which nothing more is to be known.
void drop_capture(CUstream stream) {
  CUgraph graph = nullptr;
  cuStreamEndCapture(stream, &graph);
  if (graph != nullptr) REQUIRE_OK(cuGraphDestroy(graph));
}

// --- synchronous calls ---------------------------------------------------------------

CASE(capture, meets_cuMemcpyHtoD, kReference, cuMemcpyHtoD_v2) {
  DeviceMemory memory(kBytes);
  Bytes host(kBytes);
  ask_meetings(is_implicit,
               {[&](CUstream) { return cuMemcpyHtoD_v2(memory, host.data(), 64); }});
}

CASE(capture, meets_cuMemcpyDtoH, kReference, cuMemcpyDtoH_v2) {
  DeviceMemory memory(kBytes);
  Bytes host(kBytes);
  ask_meetings(is_implicit,
               {[&](CUstream) { return cuMemcpyDtoH_v2(host.data(), memory, 64); }});
}

CASE(capture, meets_cuMemcpy_within_the_device, kReference, cuMemcpy) {
  DeviceMemory memory(kBytes);
  ask_meetings(is_implicit,
               {[&](CUstream) { return cuMemcpy(memory, memory.at(1024), 64); }});
}

CASE(capture, meets_cuMemcpy_of_nothing, kReference, cuMemcpy) {
  DeviceMemory memory(kBytes);
  ask_meetings(is_implicit,
               {[&](CUstream) { return cuMemcpy(memory, memory.at(1024), 0); }});
}

CASE(capture, meets_cuMemcpy2D, kReference, cuMemcpy2D_v2) {
  DeviceMemory memory(kBytes);
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = memory;
  copy.dstDevice = memory.at(1024);
  copy.srcPitch = copy.dstPitch = 64;
  copy.WidthInBytes = 32;
  copy.Height = 4;
  ask_meetings(is_implicit, {[&](CUstream) { return cuMemcpy2D_v2(&copy); }});
}

CASE(capture, meets_cuMemsetD8, kReference, cuMemsetD8_v2) {
  DeviceMemory memory(kBytes);
  ask_meetings(is_implicit,
               {[&](CUstream) { return cuMemsetD8_v2(memory, 1, kBytes); }});
}

CASE(capture, meets_cuMemsetD8_in_the_middle, kReference, cuMemsetD8_v2) {
  DeviceMemory memory(kBytes);
  ask_meetings(is_implicit,
               {[&](CUstream) { return cuMemsetD8_v2(memory.at(256), 1, 64); }});
}

CASE(capture, meets_cuMemsetD8_of_pinned_memory, kReference, cuMemsetD8_v2) {
  HostMemory memory(kBytes);
  ask_meetings(is_implicit, {[&](CUstream) {
                 return cuMemsetD8_v2(as_device(memory.get()), 1, 64);
               }});
}

// --- work on the legacy stream -------------------------------------------------------

CASE(capture, meets_cuMemcpyAsync_on_the_legacy_stream, kReference, cuMemcpyAsync) {
  DeviceMemory memory(kBytes);
  HostMemory host(kBytes);
  ask_meetings(is_implicit, {[&](CUstream) {
                 return cuMemcpyAsync(memory, as_device(host.get()), 64, nullptr);
               }});
}

CASE(capture, meets_cuMemsetD8Async_on_the_legacy_stream, kReference, cuMemsetD8Async) {
  DeviceMemory memory(kBytes);
  ask_meetings(is_implicit,
               {[&](CUstream) { return cuMemsetD8Async(memory, 1, 64, nullptr); }});
}

CASE(capture, leaves_the_legacy_stream_alone, kReference, cuMemsetD8Async) {
  DeviceMemory memory(kBytes);
  upload(memory, Bytes(kBytes, 0));
  Graph graph(
      [&](CUstream) { EXPECT_OK(cuMemsetD8Async(memory, 7, kBytes, nullptr)); });
  EXPECT_EQ(graph.nodes(), size_t{0});
  EXPECT_BYTES(download(memory, kBytes).data(), Bytes(kBytes, 7));
}

CASE(capture, meets_cuEventRecord_on_the_legacy_stream, kReference, cuEventRecord) {
  Event event;
  ask_meetings(is_implicit, {[&](CUstream) { return cuEventRecord(event, nullptr); }});
}

CASE(capture, meets_cuStreamWaitEvent_of_the_legacy_stream, kReference,
     cuStreamWaitEvent) {
  Event event;
  Stream other;
  ask_meetings(is_implicit,
               {[&](CUstream) { return cuStreamWaitEvent(nullptr, event, 0); }, [] {},
                [&] { REQUIRE_OK(cuEventRecord(event, other)); }});
}

CASE(capture, meets_cuMemcpyBatchAsync_on_the_legacy_stream, kReference,
     cuMemcpyBatchAsync) {
  DeviceMemory memory(kBytes);
  ask_meetings([](const Meeting&) { return harmless(kInvalid); }, {[&](CUstream) {
                 CUdeviceptr to = memory;
                 CUdeviceptr from = memory.at(1024);
                 size_t bytes = 64;
                 size_t first = 0;
                 size_t failed = 0;
                 CUmemcpyAttributes attributes = {};
                 attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
                 return cuMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &first,
                                           1, &failed, nullptr);
               }});
}

CASE(capture, meets_cuGraphLaunch_on_the_legacy_stream, kReference, cuGraphLaunch) {
  DeviceMemory memory(kBytes);
  Graph graph(
      [&](CUstream stream) { REQUIRE_OK(cuMemsetD8Async(memory, 1, 64, stream)); });
  Executable executable(graph);
  ask_meetings(is_implicit,
               {[&](CUstream) { return cuGraphLaunch(executable, nullptr); }});
}

CASE(capture, meets_cuStreamIsCapturing_of_the_legacy_stream, kReference,
     cuStreamIsCapturing) {
  ask_meetings(
      [](const Meeting& meeting) {
        return harmless(meeting.blocking ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT
                                         : CUDA_SUCCESS);
      },
      {[&](CUstream) {
        CUstreamCaptureStatus status;
        return cuStreamIsCapturing(nullptr, &status);
      }});
}

// --- waiting -------------------------------------------------------------------------

CASE(capture, meets_cuCtxSynchronize, kReference, cuCtxSynchronize) {
  ask_meetings(is_forbidden, {[](CUstream) { return cuCtxSynchronize(); }});
}

CASE(capture, meets_cuStreamSynchronize_of_its_stream, kReference,
     cuStreamSynchronize) {
  ask_meetings(is_forbidden,
               {[](CUstream stream) { return cuStreamSynchronize(stream); }});
}

CASE(capture, meets_cuStreamQuery_of_its_stream, kReference, cuStreamQuery) {
  ask_meetings(is_forbidden, {[](CUstream stream) { return cuStreamQuery(stream); }});
}

CASE(capture, meets_cuStreamSynchronize_of_the_legacy_stream, kReference,
     cuStreamSynchronize) {
  ask_meetings(is_implicit_and_unsafe,
               {[](CUstream) { return cuStreamSynchronize(nullptr); }});
}

CASE(capture, meets_cuStreamQuery_of_the_legacy_stream, kReference, cuStreamQuery) {
  ask_meetings(is_implicit_and_unsafe,
               {[](CUstream) { return cuStreamQuery(nullptr); }});
}

CASE(capture, meets_cuStreamSynchronize_of_another_stream, kReference,
     cuStreamSynchronize) {
  Stream other;
  ask_meetings(is_unsafe, {[&](CUstream) { return cuStreamSynchronize(other); }});
}

CASE(capture, meets_cuStreamQuery_of_another_stream, kReference, cuStreamQuery) {
  Stream other;
  ask_meetings(is_unsafe, {[&](CUstream) { return cuStreamQuery(other); }});
}

CASE(capture, meets_cuStreamSynchronize_of_another_blocking_stream, kReference,
     cuStreamSynchronize) {
  Stream other(CU_STREAM_DEFAULT);
  ask_meetings(is_unsafe, {[&](CUstream) { return cuStreamSynchronize(other); }});
}

CASE(capture, meets_cuEventQuery_of_an_event_that_was_never_recorded, kReference,
     cuEventQuery) {
  Event event;
  ask_meetings(is_unsafe, {[&](CUstream) { return cuEventQuery(event); }});
}

CASE(capture, meets_cuEventQuery_of_an_event_of_another_stream, kReference,
     cuEventQuery) {
  Event event;
  Stream other;
  ask_meetings(is_unsafe, {[&](CUstream) { return cuEventQuery(event); }, [] {},
                           [&] {
                             REQUIRE_OK(cuEventRecord(event, other));
                             REQUIRE_OK(cuEventSynchronize(event));
                           }});
}

CASE(capture, meets_cuEventQuery_of_an_event_of_the_legacy_stream, kReference,
     cuEventQuery) {
  Event event;
  ask_meetings(is_unsafe, {[&](CUstream) { return cuEventQuery(event); }, [] {},
                           [&] {
                             REQUIRE_OK(cuEventRecord(event, nullptr));
                             REQUIRE_OK(cuEventSynchronize(event));
                           }});
}

CASE(capture, meets_cuEventSynchronize_of_an_event_of_another_stream, kReference,
     cuEventSynchronize) {
  Event event;
  Stream other;
  ask_meetings(is_unsafe, {[&](CUstream) { return cuEventSynchronize(event); }, [] {},
                           [&] { REQUIRE_OK(cuEventRecord(event, other)); }});
}

CASE(capture, meets_cuEventSynchronize_of_an_event_that_was_never_recorded, kReference,
     cuEventSynchronize) {
  Event event;
  ask_meetings(is_unsafe, {[&](CUstream) { return cuEventSynchronize(event); }});
}

CASE(capture, meets_cuEventElapsedTime, kReference, cuEventElapsedTime) {
  Event event;
  Stream other;
  REQUIRE_OK(cuEventRecord(event, other));
  REQUIRE_OK(cuStreamSynchronize(other));
  ask_meetings(is_harmless, {[&](CUstream) {
                 float time = 0;
                 return cuEventElapsedTime(&time, event, event);
               }});
}

CASE(capture, meets_cuEventQuery_of_an_event_of_its_own, kReference, cuEventQuery) {
  Event event;
  ask_meetings([](const Meeting&) { return breaks_it(CUDA_ERROR_CAPTURED_EVENT); },
               {[&](CUstream stream) {
                 REQUIRE_OK(cuEventRecord(event, stream));
                 return cuEventQuery(event);
               }});
}

CASE(capture, meets_cuEventSynchronize_of_an_event_of_its_own, kReference,
     cuEventSynchronize) {
  Event event;
  ask_meetings([](const Meeting&) { return breaks_it(CUDA_ERROR_CAPTURED_EVENT); },
               {[&](CUstream stream) {
                 REQUIRE_OK(cuEventRecord(event, stream));
                 return cuEventSynchronize(event);
               }});
}

// --- memory --------------------------------------------------------------------------

CASE(capture, meets_cuMemAlloc, kReference, cuMemAlloc_v2) {
  CUdeviceptr made = 0;
  ask_meetings(is_unsafe, {[&](CUstream) { return cuMemAlloc_v2(&made, 64); },
                           [&] {
                             if (made != 0) REQUIRE_OK(cuMemFree_v2(made));
                             made = 0;
                           }});
}

CASE(capture, meets_cuMemFree, kReference, cuMemFree_v2) {
  DeviceMemory memory;
  CUdeviceptr left = 0;
  ask_meetings(is_unsafe, {[&](CUstream) {
                             const CUresult result = cuMemFree_v2(left);
                             if (result == CUDA_SUCCESS) left = 0;
                             return result;
                           },
                           [&] {
                             if (left != 0) REQUIRE_OK(cuMemFree_v2(left));
                           },
                           [&] { left = DeviceMemory(64).release(); }});
}

CASE(capture, meets_cuMemFree_of_nothing, kReference, cuMemFree_v2) {
  ask_meetings(is_unsafe, {[](CUstream) { return cuMemFree_v2(0); }});
}

CASE(capture, meets_cuMemHostAlloc, kReference, cuMemHostAlloc) {
  void* made = nullptr;
  ask_meetings(is_unsafe, {[&](CUstream) { return cuMemHostAlloc(&made, 64, 0); },
                           [&] {
                             if (made != nullptr) REQUIRE_OK(cuMemFreeHost(made));
                             made = nullptr;
                           }});
}

CASE(capture, meets_cuMemFreeHost, kReference, cuMemFreeHost) {
  void* left = nullptr;
  ask_meetings(is_unsafe, {[&](CUstream) {
                             const CUresult result = cuMemFreeHost(left);
                             if (result == CUDA_SUCCESS) left = nullptr;
                             return result;
                           },
                           [&] {
                             if (left != nullptr) REQUIRE_OK(cuMemFreeHost(left));
                           },
                           [&] { left = HostMemory(64).release(); }});
}

CASE(capture, meets_cuMemHostRegister, kReference, cuMemHostRegister_v2) {
  Pages pages(kBytes);
  bool made = false;
  ask_meetings(is_unsafe, {[&](CUstream) {
                             const CUresult result =
                                 cuMemHostRegister_v2(pages.get(), kBytes, 0);
                             made = result == CUDA_SUCCESS;
                             return result;
                           },
                           [&] {
                             if (made) REQUIRE_OK(cuMemHostUnregister(pages.get()));
                           }});
}

CASE(capture, meets_cuMemHostUnregister, kReference, cuMemHostUnregister) {
  Pages pages(kBytes);
  bool left = false;
  ask_meetings(is_unsafe, {[&](CUstream) {
                             const CUresult result = cuMemHostUnregister(pages.get());
                             if (result == CUDA_SUCCESS) left = false;
                             return result;
                           },
                           [&] {
                             if (left) REQUIRE_OK(cuMemHostUnregister(pages.get()));
                           },
                           [&] {
                             REQUIRE_OK(cuMemHostRegister_v2(pages.get(), kBytes, 0));
                             left = true;
                           }});
}

CASE(capture, meets_cuMemHostGetDevicePointer, kReference,
     cuMemHostGetDevicePointer_v2) {
  HostMemory host(64);
  ask_meetings(is_harmless, {[&](CUstream) {
                 CUdeviceptr pointer = 0;
                 return cuMemHostGetDevicePointer_v2(&pointer, host, 0);
               }});
}

CASE(capture, meets_questions_about_memory, kReference, cuMemGetInfo_v2,
     cuMemGetAddressRange_v2) {
  DeviceMemory memory(64);
  ask_meetings(is_harmless, {[&](CUstream) {
                 size_t free = 0;
                 size_t total = 0;
                 const CUresult result = cuMemGetInfo_v2(&free, &total);
                 CUdeviceptr base = 0;
                 return result != CUDA_SUCCESS
                            ? result
                            : cuMemGetAddressRange_v2(&base, &total, memory);
               }});
}

CASE(capture, meets_cuIpcGetMemHandle, kReference, cuIpcGetMemHandle) {
  DeviceMemory memory(size_t{2} << 20);
  ask_meetings(is_harmless, {[&](CUstream) {
                 CUipcMemHandle handle;
                 return cuIpcGetMemHandle(&handle, memory);
               }});
}

// --- virtual memory ------------------------------------------------------------------

CASE(capture, meets_cuMemAddressReserve, kReference, cuMemAddressReserve) {
  const size_t piece = granularity();
  CUdeviceptr made = 0;
  ask_meetings(is_harmless,
               {[&](CUstream) { return cuMemAddressReserve(&made, piece, 0, 0, 0); },
                [&] {
                  if (made != 0) REQUIRE_OK(cuMemAddressFree(made, piece));
                  made = 0;
                }});
}

CASE(capture, meets_cuMemAddressFree, kReference, cuMemAddressFree) {
  const size_t piece = granularity();
  CUdeviceptr left = 0;
  ask_meetings(is_harmless, {[&](CUstream) {
                               const CUresult result = cuMemAddressFree(left, piece);
                               if (result == CUDA_SUCCESS) left = 0;
                               return result;
                             },
                             [&] {
                               if (left != 0) REQUIRE_OK(cuMemAddressFree(left, piece));
                             },
                             [&] { left = Reservation(piece).release(); }});
}

CASE(capture, meets_cuMemCreate, kReference, cuMemCreate, cuMemRelease) {
  const size_t piece = granularity();
  const CUmemAllocationProp properties = device_memory_properties();
  CUmemGenericAllocationHandle made = 0;
  ask_meetings(is_harmless,
               {[&](CUstream) { return cuMemCreate(&made, piece, &properties, 0); },
                [&] {
                  if (made != 0) REQUIRE_OK(cuMemRelease(made));
                  made = 0;
                }});
}

CASE(capture, meets_cuMemRelease, kReference, cuMemRelease) {
  const size_t piece = granularity();
  CUmemGenericAllocationHandle left = 0;
  ask_meetings(is_harmless, {[&](CUstream) {
                               const CUresult result = cuMemRelease(left);
                               if (result == CUDA_SUCCESS) left = 0;
                               return result;
                             },
                             [&] {
                               if (left != 0) REQUIRE_OK(cuMemRelease(left));
                             },
                             [&] { left = Physical(piece).release(); }});
}

CASE(capture, meets_cuMemMap, kReference, cuMemMap) {
  const size_t piece = granularity();
  Physical memory(piece);
  Reservation addresses(piece);
  bool mapped = false;
  ask_meetings(is_harmless, {[&](CUstream) {
                               const CUresult result =
                                   cuMemMap(addresses.get(), piece, 0, memory, 0);
                               mapped = result == CUDA_SUCCESS;
                               return result;
                             },
                             [&] {
                               if (mapped)
                                 REQUIRE_OK(cuMemUnmap(addresses.get(), piece));
                             }});
}

CASE(capture, meets_cuMemSetAccess, kReference, cuMemSetAccess, cuMemGetAccess) {
  VirtualMemory memory(1, granularity(), VirtualMemory::Open::kNo);
  ask_meetings(
      is_harmless, {[&](CUstream) {
        const CUresult result = set_access(memory.get(), memory.size(), access(0));
        unsigned long long flags = 0;
        const CUmemLocation location = access(0).location;
        return result != CUDA_SUCCESS ? result
                                      : cuMemGetAccess(&flags, &location, memory.get());
      }});
}

CASE(capture, meets_cuMemUnmap, kReference, cuMemUnmap) {
  const size_t piece = granularity();
  Physical memory(piece);
  Reservation addresses(piece);
  bool mapped = false;
  ask_meetings(is_harmless,
               {[&](CUstream) {
                  const CUresult result = cuMemUnmap(addresses.get(), piece);
                  if (result == CUDA_SUCCESS) mapped = false;
                  return result;
                },
                [&] {
                  if (mapped) REQUIRE_OK(cuMemUnmap(addresses.get(), piece));
                },
                [&] {
                  REQUIRE_OK(cuMemMap(addresses.get(), piece, 0, memory, 0));
                  REQUIRE_OK(set_access(addresses.get(), piece, access(0)));
                  mapped = true;
                }});
}

// --- things made and ended -----------------------------------------------------------

CASE(capture, meets_cuStreamCreate, kReference, cuStreamCreate) {
  ask_meetings(is_harmless, {[](CUstream) {
                 CUstream made = nullptr;
                 const CUresult result = cuStreamCreate(&made, 0);
                 return result != CUDA_SUCCESS ? result : cuStreamDestroy_v2(made);
               }});
}

CASE(capture, meets_cuEventCreate, kReference, cuEventCreate) {
  ask_meetings(is_harmless, {[](CUstream) {
                 CUevent made = nullptr;
                 const CUresult result = cuEventCreate(&made, 0);
                 return result != CUDA_SUCCESS ? result : cuEventDestroy_v2(made);
               }});
}

CASE(capture, meets_cuGraphInstantiate, kDriver, cuGraphInstantiateWithFlags) {
  DeviceMemory memory(kBytes);
  Graph graph(
      [&](CUstream stream) { REQUIRE_OK(cuMemsetD8Async(memory, 1, 64, stream)); });
  CUgraphExec made = nullptr;
  ask_meetings(is_unsafe,
               {[&](CUstream) { return cuGraphInstantiateWithFlags(&made, graph, 0); },
                [&] {
                  if (made != nullptr) REQUIRE_OK(cuGraphExecDestroy(made));
                  made = nullptr;
                }});
}

CASE(capture, meets_cuGraphLaunch_on_another_stream, kDriver, cuGraphLaunch) {
  DeviceMemory memory(kBytes);
  Stream other;
  Graph graph(
      [&](CUstream stream) { REQUIRE_OK(cuMemsetD8Async(memory, 1, 64, stream)); });
  Executable executable(graph);
  ask_meetings(is_harmless,
               {[&](CUstream) { return cuGraphLaunch(executable, other); }});
}

CASE(capture, meets_cuGraphLaunch_on_its_stream, kDriver, cuGraphLaunch) {
  DeviceMemory memory(kBytes);
  Graph graph(
      [&](CUstream stream) { REQUIRE_OK(cuMemsetD8Async(memory, 1, 64, stream)); });
  Executable executable(graph);
  ask_meetings(is_forbidden,
               {[&](CUstream stream) { return cuGraphLaunch(executable, stream); }});
}

CASE(capture, meets_cuGraphDestroy, kDriver, cuGraphDestroy) {
  CUgraph graph = nullptr;
  ask_meetings(is_harmless,
               {[&](CUstream) { return cuGraphDestroy(std::exchange(graph, nullptr)); },
                [] {}, [&] { graph = Graph([](CUstream) {}).release(); }});
}

// One that is refused may be gone all the same: only the simulator is asked again.
CASE(capture, meets_cuGraphExecDestroy, kDriver, cuGraphExecDestroy) {
  Graph graph([](CUstream) {});
  CUgraphExec executable = nullptr;
  CUresult result = CUDA_SUCCESS;
  ask_meetings(is_unsafe,
               {[&](CUstream) { return result = cuGraphExecDestroy(executable); },
                [&] {
                  if (simulated() && result != CUDA_SUCCESS) {
                    EXPECT_OK(cuGraphExecDestroy(executable));
                  }
                },
                [&] { executable = Executable(graph).release(); }});
}

CASE(capture, meets_work_on_another_stream, kReference, cuMemcpyAsync) {
  DeviceMemory memory(kBytes);
  HostMemory host(kBytes);
  for (const unsigned flags : {CU_STREAM_NON_BLOCKING, CU_STREAM_DEFAULT}) {
    const About about(flags == 0 ? "a blocking one" : "a non-blocking one");
    Stream other(flags);
    Event event;
    ask_meetings(is_harmless, {[&](CUstream) {
                   const CUresult result =
                       cuMemcpyAsync(memory, as_device(host.get()), 64, other);
                   return result != CUDA_SUCCESS ? result : cuEventRecord(event, other);
                 }});
  }
}

CASE(capture, meets_pageable_memory_on_another_stream, kReference, cuMemcpyAsync) {
  DeviceMemory memory(kBytes);
  Bytes host(kBytes);
  Stream other;
  ask_meetings(is_harmless, {[&](CUstream) {
                 return cuMemcpyAsync(memory, as_device(host.data()), 64, other);
               }});
  const About about("from the device");
  ask_meetings(is_harmless, {[&](CUstream) {
                 return cuMemcpyAsync(as_device(host.data()), memory, 64, other);
               }});
}

// It is refused, and the capture goes on.
CASE(capture, meets_a_batch_on_its_stream, kDriver, cuMemcpyBatchAsync) {
  DeviceMemory memory(kBytes);
  const auto is_refused = [](const Meeting&) {
    return harmless(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  };
  ask_meetings(is_refused, {[&](CUstream stream) {
                 CUdeviceptr to = memory;
                 CUdeviceptr from = memory.at(1024);
                 size_t bytes = 64;
                 size_t first = 0;
                 size_t failed = 0;
                 CUmemcpyAttributes attributes = {};
                 attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
                 return cuMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &first,
                                           1, &failed, stream);
               }});
}

CASE(capture, meets_a_batch_on_another_stream, kReference, cuMemcpyBatchAsync) {
  DeviceMemory memory(kBytes);
  Stream other;
  ask_meetings(is_harmless, {[&](CUstream) {
                 CUdeviceptr to = memory;
                 CUdeviceptr from = memory.at(1024);
                 size_t bytes = 64;
                 size_t first = 0;
                 size_t failed = 0;
                 CUmemcpyAttributes attributes = {};
                 attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
                 return cuMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &first,
                                           1, &failed, other);
               }});
}

CASE(capture, meets_contexts, kReference, cuCtxSetCurrent, cuDevicePrimaryCtxRetain) {
  ask_meetings(is_harmless, {[](CUstream) {
                 CUcontext context = nullptr;
                 CUresult result = cuDevicePrimaryCtxRetain(&context, 0);
                 if (result != CUDA_SUCCESS) return result;
                 result = cuCtxSetCurrent(context);
                 const CUresult released = cuDevicePrimaryCtxRelease_v2(0);
                 return result != CUDA_SUCCESS ? result : released;
               }});
}

CASE(capture, meets_a_thread_that_exchanged_its_mode, kReference,
     cuThreadExchangeStreamCaptureMode, cuMemAlloc_v2) {
  DeviceMemory memory;
  CUdeviceptr made = 0;
  for (const CUstreamCaptureMode exchanged : {kThreadLocal, kRelaxed}) {
    const About about(exchanged == kRelaxed ? "to relaxed" : "to thread-local");
    const Rule rule =
        exchanged == kRelaxed ? Rule(is_harmless) : Rule([](const Meeting& meeting) {
          return meeting.other_thread ? harmless() : is_unsafe(meeting);
        });
    ask_meetings(rule, {[&](CUstream) {
                          CUstreamCaptureMode mode = exchanged;
                          REQUIRE_OK(cuThreadExchangeStreamCaptureMode(&mode));
                          const CUresult result = cuMemAlloc_v2(&made, 64);
                          REQUIRE_OK(cuThreadExchangeStreamCaptureMode(&mode));
                          return result;
                        },
                        [&] {
                          if (made != 0) REQUIRE_OK(cuMemFree_v2(made));
                          made = 0;
                        }});
  }
}

// A context knows the captures of its own streams.
CASE(capture, meets_calls_for_another_device, kDriver, cuCtxSynchronize,
     cuMemsetD8Async, cuMemsetD8_v2, cuMemAlloc_v2) {
  need_devices(2);
  DeviceMemory there;
  {
    CurrentDevice other(1);
    there = DeviceMemory(64);
  }
  const auto on_the_other = [](const std::function<CUresult()>& call) {
    return Asked{[=](CUstream) {
      CurrentDevice other(1);
      return call();
    }};
  };
  {
    const About about("cuCtxSynchronize");
    ask_meetings(is_harmless, on_the_other([] { return cuCtxSynchronize(); }));
  }
  {
    const About about("cuMemsetD8Async on its legacy stream");
    ask_meetings(is_harmless,
                 on_the_other([&] { return cuMemsetD8Async(there, 1, 64, nullptr); }));
  }
  {
    const About about("cuStreamIsCapturing of its legacy stream");
    ask_meetings(is_harmless, on_the_other([] {
                   CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
                   return cuStreamIsCapturing(nullptr, &status);
                 }));
  }
  {
    const About about("cuMemsetD8");
    ask_meetings(is_harmless,
                 on_the_other([&] { return cuMemsetD8_v2(there, 1, 64); }));
  }
  CurrentDevice other(1);
  there.reset();
}

CASE(capture, begun_while_the_stream_is_busy, kReference, cuStreamBeginCapture_v2) {
  Stream stream;
  const Busy busy(stream);
  EXPECT_OK(cuStreamBeginCapture_v2(stream, kGlobal));
  CUgraph graph = nullptr;
  EXPECT_OK(cuStreamEndCapture(stream, &graph));
  EXPECT_OK(cuGraphDestroy(graph));
  EXPECT_ERROR(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
}

CASE(capture, modes_of_a_thread, kReference, cuThreadExchangeStreamCaptureMode) {
  CUstreamCaptureMode mode = kRelaxed;
  EXPECT_OK(cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, kGlobal);
  mode = kThreadLocal;
  EXPECT_OK(cuThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, kRelaxed);
  in_another_thread([] {
    CUstreamCaptureMode other = kGlobal;
    EXPECT_OK(cuThreadExchangeStreamCaptureMode(&other));
    EXPECT_EQ(other, kGlobal);
  });
  mode = kGlobal;
  EXPECT_OK(cuThreadExchangeStreamCaptureMode(&mode));
  // Without a place for the mode a real driver faults.
  if (simulated()) EXPECT_ERROR(cuThreadExchangeStreamCaptureMode(nullptr), kInvalid);
}

// --- beginnings and ends -------------------------------------------------------------

CASE(capture, of_nothing, kReference, cuStreamBeginCapture_v2, cuStreamEndCapture,
     cuStreamIsCapturing) {
  for (const CUstreamCaptureMode mode : {kGlobal, kThreadLocal, kRelaxed}) {
    for (const unsigned flags : {0u, 1u}) {
      Stream stream(flags);
      CUgraph graph = nullptr;
      EXPECT_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_NONE);
      EXPECT_OK(cuStreamBeginCapture_v2(stream, mode));
      EXPECT_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
      EXPECT_OK(cuStreamEndCapture(stream, &graph));
      EXPECT(graph != nullptr);
      EXPECT_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_NONE);
      EXPECT_OK(cuStreamQuery(stream));
      EXPECT_OK(cuGraphDestroy(graph));
    }
  }
}

CASE(capture, begun_where_it_cannot, kReference, cuStreamBeginCapture_v2) {
  Stream stream;
  EXPECT_ERROR(cuStreamBeginCapture_v2(nullptr, kGlobal),
               CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_ERROR(cuStreamBeginCapture_v2(CU_STREAM_LEGACY, kGlobal),
               CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_ERROR(cuStreamBeginCapture_v2(stream, static_cast<CUstreamCaptureMode>(3)),
               kInvalid);
  EXPECT_OK(cuStreamBeginCapture_v2(stream, kGlobal));
  EXPECT_ERROR(cuStreamBeginCapture_v2(stream, kGlobal), CUDA_ERROR_ILLEGAL_STATE);
  const About about("after the second beginning");
  EXPECT_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  CUgraph graph = nullptr;
  EXPECT_OK(cuStreamEndCapture(stream, &graph));
  if (graph != nullptr) EXPECT_OK(cuGraphDestroy(graph));
}

CASE(capture, ended_where_there_is_none, kReference, cuStreamEndCapture) {
  Stream stream;
  CUgraph graph = nullptr;
  EXPECT_ERROR(cuStreamEndCapture(stream, &graph), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_ERROR(cuStreamEndCapture(nullptr, &graph), CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_ERROR(cuStreamIsCapturing(stream, nullptr), kInvalid);
  EXPECT_OK(cuStreamBeginCapture_v2(stream, kRelaxed));
  EXPECT_OK(cuStreamEndCapture(stream, nullptr));
  EXPECT_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_NONE);
}

CASE(capture, begun_again_when_it_is_invalid, kReference, cuStreamBeginCapture_v2,
     cuStreamEndCapture) {
  Stream stream;
  DeviceMemory memory(64);
  REQUIRE_OK(cuStreamBeginCapture_v2(stream, kRelaxed));
  EXPECT_ERROR(cuCtxSynchronize(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  EXPECT_ERROR(cuCtxSynchronize(), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_ERROR(cuMemsetD8Async(memory, 1, 64, stream),
               CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_ERROR(cuStreamQuery(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_ERROR(cuStreamBeginCapture_v2(stream, kRelaxed), CUDA_ERROR_ILLEGAL_STATE);
  CUgraph graph = reinterpret_cast<CUgraph>(1);
  EXPECT_ERROR(cuStreamEndCapture(stream, &graph),
               CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT(graph == nullptr);
  EXPECT_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_NONE);
  EXPECT_OK(cuStreamBeginCapture_v2(stream, kRelaxed));
  EXPECT_OK(cuStreamEndCapture(stream, &graph));
  EXPECT_OK(cuGraphDestroy(graph));
}

// Which is an end all the same.
CASE(capture, ended_by_another_thread, kDriver, cuStreamEndCapture) {
  for (const CUstreamCaptureMode mode : {kGlobal, kThreadLocal, kRelaxed}) {
    const About about("mode " + describe(mode));
    Stream stream;
    CUgraph graph = nullptr;
    CUresult elsewhere = CUDA_SUCCESS;
    REQUIRE_OK(cuStreamBeginCapture_v2(stream, mode));
    in_another_thread([&] { elsewhere = cuStreamEndCapture(stream, &graph); });
    if (mode == kRelaxed) {
      EXPECT_OK(elsewhere);
      EXPECT_OK(cuGraphDestroy(graph));
    } else {
      EXPECT_ERROR(elsewhere, CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD);
      EXPECT(graph == nullptr);
      EXPECT_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_NONE);
      EXPECT_ERROR(cuStreamEndCapture(stream, &graph), CUDA_ERROR_ILLEGAL_STATE);
    }
  }
}

CASE(capture, of_a_stream_that_is_destroyed, kReference, cuStreamDestroy_v2) {
  CUstream stream = Stream().release();
  REQUIRE_OK(cuStreamBeginCapture_v2(stream, kGlobal));
  EXPECT_OK(cuStreamDestroy_v2(stream));
  DeviceMemory memory(64);
  EXPECT_OK(cuCtxSynchronize());
}

// What a capture forbids it forbids until it is ended.
CASE(capture, invalidates_others, kReference, cuStreamIsCapturing) {
  Stream global;
  Stream local;
  Stream relaxed;
  REQUIRE_OK(cuStreamBeginCapture_v2(global, kGlobal));
  REQUIRE_OK(cuStreamBeginCapture_v2(local, kThreadLocal));
  REQUIRE_OK(cuStreamBeginCapture_v2(relaxed, kRelaxed));
  CUdeviceptr made = 0;
  in_another_thread([&] {
    EXPECT_ERROR(cuMemAlloc_v2(&made, 64), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  });
  EXPECT_EQ(status_of(global), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  EXPECT_EQ(status_of(local), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT_EQ(status_of(relaxed), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT_ERROR(cuMemAlloc_v2(&made, 64), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  const About about("when the thread allocates");
  EXPECT_EQ(status_of(local), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  EXPECT_EQ(status_of(relaxed), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT_ERROR(cuMemAlloc_v2(&made, 64), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  drop_capture(global);
  EXPECT_ERROR(cuMemAlloc_v2(&made, 64), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  drop_capture(local);
  EXPECT_OK(cuMemAlloc_v2(&made, 64));
  drop_capture(relaxed);
  if (made != 0) EXPECT_OK(cuMemFree_v2(made));
}

CASE(capture, implicit_work_invalidates_which, kReference, cuMemsetD8Async) {
  Stream blocking(CU_STREAM_DEFAULT);
  Stream relaxed(CU_STREAM_DEFAULT);
  Stream non_blocking;
  DeviceMemory memory(64);
  REQUIRE_OK(cuStreamBeginCapture_v2(blocking, kGlobal));
  REQUIRE_OK(cuStreamBeginCapture_v2(relaxed, kRelaxed));
  REQUIRE_OK(cuStreamBeginCapture_v2(non_blocking, kGlobal));
  EXPECT_ERROR(cuMemsetD8Async(memory, 1, 64, nullptr),
               CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  EXPECT_EQ(status_of(blocking), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  EXPECT_EQ(status_of(relaxed), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  EXPECT_EQ(status_of(non_blocking), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  for (CUstream stream : {blocking.get(), relaxed.get(), non_blocking.get()}) {
    drop_capture(stream);
  }
}

CASE(capture, that_is_invalid_meets_the_legacy_stream, kDriver, cuMemsetD8Async) {
  Stream stream(CU_STREAM_DEFAULT);
  DeviceMemory memory(64);
  REQUIRE_OK(cuStreamBeginCapture_v2(stream, kRelaxed));
  for (int i = 0; i < 2; ++i) {
    const About about(i == 0 ? "at first" : "when it is invalid");
    EXPECT_ERROR(cuMemsetD8Async(memory, 1, 64, nullptr),
                 CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    EXPECT_ERROR(cuStreamIsCapturing(nullptr, &status),
                 CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
  }
  drop_capture(stream);
  EXPECT_OK(cuMemsetD8Async(memory, 1, 64, nullptr));
}

// --- forks and joins -----------------------------------------------------------------

CASE(capture, forked_and_joined, kReference, cuStreamWaitEvent, cuEventRecord,
     cuGraphGetNodes) {
  DeviceMemory memory(kBytes);
  Stream origin;
  Stream fork;
  Event forked;
  Event joined;
  REQUIRE_OK(cuStreamBeginCapture_v2(origin, kGlobal));
  EXPECT_OK(cuMemsetD8Async(memory, 1, 64, origin));
  EXPECT_OK(cuEventRecord(forked, origin));
  EXPECT_OK(cuStreamWaitEvent(fork, forked, 0));
  EXPECT_EQ(status_of(fork), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT_OK(cuMemsetD8Async(memory.at(64), 2, 64, fork));
  EXPECT_OK(cuMemsetD8Async(memory.at(128), 3, 64, origin));
  EXPECT_OK(cuEventRecord(joined, fork));
  EXPECT_OK(cuStreamWaitEvent(origin, joined, 0));
  CUgraph graph = nullptr;
  EXPECT_OK(cuStreamEndCapture(origin, &graph));
  EXPECT_EQ(status_of(fork), CU_STREAM_CAPTURE_STATUS_NONE);
  if (graph == nullptr) return;
  const Graph made(graph);
  EXPECT_EQ(made.nodes(), size_t{3});
  EXPECT_OK(cuStreamQuery(fork));
}

CASE(capture, ended_on_a_fork, kDriver, cuStreamEndCapture) {
  Stream origin;
  Stream fork;
  Event forked;
  REQUIRE_OK(cuStreamBeginCapture_v2(origin, kGlobal));
  REQUIRE_OK(cuEventRecord(forked, origin));
  REQUIRE_OK(cuStreamWaitEvent(fork, forked, 0));
  CUgraph graph = nullptr;
  EXPECT_ERROR(cuStreamEndCapture(fork, &graph), CUDA_ERROR_STREAM_CAPTURE_UNMATCHED);
  EXPECT_EQ(status_of(origin), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  EXPECT_ERROR(cuStreamEndCapture(origin, &graph),
               CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_EQ(status_of(fork), CU_STREAM_CAPTURE_STATUS_NONE);
}

CASE(capture, forked_and_not_joined, kReference, cuStreamEndCapture) {
  for (const bool works : {true, false}) {
    const About about(works ? "with work" : "without work");
    DeviceMemory memory(kBytes);
    Stream origin;
    Stream fork;
    Event event;
    REQUIRE_OK(cuStreamBeginCapture_v2(origin, kGlobal));
    REQUIRE_OK(cuMemsetD8Async(memory, 1, 64, origin));
    REQUIRE_OK(cuEventRecord(event, origin));
    REQUIRE_OK(cuStreamWaitEvent(fork, event, 0));
    if (works) REQUIRE_OK(cuMemsetD8Async(memory.at(64), 2, 64, fork));
    CUgraph graph = nullptr;
    EXPECT_ERROR(cuStreamEndCapture(origin, &graph),
                 works ? CUDA_ERROR_STREAM_CAPTURE_UNJOINED : CUDA_SUCCESS);
    EXPECT_EQ(graph == nullptr, works);
    EXPECT_EQ(status_of(origin), CU_STREAM_CAPTURE_STATUS_NONE);
    EXPECT_EQ(status_of(fork), CU_STREAM_CAPTURE_STATUS_NONE);
    EXPECT_OK(cuStreamQuery(origin));
    EXPECT_OK(cuStreamQuery(fork));
    if (graph != nullptr) EXPECT_OK(cuGraphDestroy(graph));
  }
}

CASE(capture, waits_for_an_event_from_outside, kReference, cuStreamWaitEvent) {
  Event event;
  Stream other;
  REQUIRE_OK(cuEventRecord(event, other));
  ask_meetings(
      [](const Meeting&) { return breaks_it(CUDA_ERROR_STREAM_CAPTURE_ISOLATION); },
      {[&](CUstream stream) { return cuStreamWaitEvent(stream, event, 0); }});
}

CASE(capture, waits_for_an_event_of_its_stream_from_before, kReference,
     cuStreamWaitEvent) {
  Event event;
  Stream stream;
  REQUIRE_OK(cuEventRecord(event, stream));
  REQUIRE_OK(cuStreamBeginCapture_v2(stream, kGlobal));
  EXPECT_ERROR(cuStreamWaitEvent(stream, event, 0),
               CUDA_ERROR_STREAM_CAPTURE_ISOLATION);
  EXPECT_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  drop_capture(stream);
}

CASE(capture, another_stream_waits_for_an_event_from_before, kReference,
     cuStreamWaitEvent) {
  Event event;
  Stream stream;
  Stream other;
  REQUIRE_OK(cuEventRecord(event, stream));
  REQUIRE_OK(cuStreamBeginCapture_v2(stream, kGlobal));
  EXPECT_OK(cuStreamWaitEvent(other, event, 0));
  EXPECT_EQ(status_of(stream), CU_STREAM_CAPTURE_STATUS_ACTIVE);
  EXPECT_EQ(status_of(other), CU_STREAM_CAPTURE_STATUS_NONE);
  drop_capture(stream);
}

CASE(capture, waits_for_an_event_nobody_recorded, kReference, cuStreamWaitEvent) {
  Event event;
  ask_meetings(is_harmless,
               {[&](CUstream stream) { return cuStreamWaitEvent(stream, event, 0); }});
}

CASE(capture, of_which_an_event_outlives, kDriver, cuStreamWaitEvent, cuEventQuery,
     cuEventSynchronize) {
  Event event;
  Stream stream;
  Stream other;
  REQUIRE_OK(cuStreamBeginCapture_v2(stream, kGlobal));
  REQUIRE_OK(cuEventRecord(event, stream));
  drop_capture(stream);
  EXPECT_ERROR(cuEventQuery(event), kInvalid);
  EXPECT_ERROR(cuEventSynchronize(event), kInvalid);
  EXPECT_ERROR(cuStreamWaitEvent(other, event, 0), kInvalid);
  EXPECT_EQ(status_of(other), CU_STREAM_CAPTURE_STATUS_NONE);
  EXPECT_OK(cuEventRecord(event, other));
  EXPECT_OK(cuEventSynchronize(event));
}

CASE(capture, the_legacy_stream_waits_for_an_event_of_it, kReference,
     cuStreamWaitEvent) {
  Event event;
  ask_meetings(
      [](const Meeting&) { return breaks_it(CUDA_ERROR_STREAM_CAPTURE_IMPLICIT); },
      {[&](CUstream stream) {
        REQUIRE_OK(cuEventRecord(event, stream));
        return cuStreamWaitEvent(nullptr, event, 0);
      }});
}

CASE(capture, two_that_would_become_one, kReference, cuStreamWaitEvent) {
  Stream first;
  Stream second;
  Event event;
  REQUIRE_OK(cuStreamBeginCapture_v2(first, kRelaxed));
  REQUIRE_OK(cuStreamBeginCapture_v2(second, kRelaxed));
  REQUIRE_OK(cuEventRecord(event, first));
  EXPECT_ERROR(cuStreamWaitEvent(second, event, 0), CUDA_ERROR_STREAM_CAPTURE_MERGE);
  EXPECT_EQ(status_of(first), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  EXPECT_EQ(status_of(second), CU_STREAM_CAPTURE_STATUS_INVALIDATED);
  drop_capture(first);
  drop_capture(second);
}

CASE(capture, that_is_invalid_and_whose_event_is_awaited, kDriver, cuStreamWaitEvent) {
  Stream stream;
  Stream other;
  Event event;
  REQUIRE_OK(cuStreamBeginCapture_v2(stream, kRelaxed));
  REQUIRE_OK(cuEventRecord(event, stream));
  EXPECT_ERROR(cuStreamQuery(stream), CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED);
  EXPECT_ERROR(cuEventRecord(event, stream), CUDA_ERROR_STREAM_CAPTURE_INVALIDATED);
  EXPECT_ERROR(cuEventQuery(event), kInvalid);
  EXPECT_ERROR(cuStreamWaitEvent(other, event, 0), kInvalid);
  EXPECT_EQ(status_of(other), CU_STREAM_CAPTURE_STATUS_NONE);
  drop_capture(stream);
}

// --- bad arguments on a capturing stream ---------------------------------------------

CASE(capture, meets_arguments_that_are_refused, kReference, cuMemcpyAsync,
     cuMemsetD8Async, cuMemcpy2DAsync_v2) {
  DeviceMemory memory(kBytes);
  const auto refused = [](const Meeting&) { return harmless(kInvalid); };
  {
    const About about("no destination");
    ask_meetings(refused, {[&](CUstream stream) {
                   return cuMemcpyAsync(0, memory, 64, stream);
                 }});
  }
  {
    const About about("past the end");
    ask_meetings(refused, {[&](CUstream stream) {
                   return cuMemcpyAsync(memory, memory.at(kBytes - 1), 64, stream);
                 }});
  }
  if (simulated()) {
    // A real driver records it.
    const About about("a fill past the end");
    ask_meetings(refused, {[&](CUstream stream) {
                   return cuMemsetD8Async(memory, 1, 2 * kBytes, stream);
                 }});
  }
  {
    const About about("a narrow pitch");
    CUDA_MEMCPY2D copy = {};
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.srcDevice = memory;
    copy.dstDevice = memory.at(1024);
    copy.srcPitch = copy.dstPitch = 16;
    copy.WidthInBytes = 32;
    copy.Height = 4;
    ask_meetings(refused,
                 {[&](CUstream stream) { return cuMemcpy2DAsync_v2(&copy, stream); }});
  }
  {
    const About about("of nothing");
    ask_meetings(is_harmless, {[&](CUstream stream) {
                   return cuMemcpyAsync(memory, memory.at(1024), 0, stream);
                 }});
  }
}

// --- graphs --------------------------------------------------------------------------

CASE(graphs, replay_what_was_captured, kReference, cuGraphInstantiateWithFlags,
     cuGraphLaunch, cuGraphGetNodes, cuMemcpy2DAsync_v2, cuMemcpy3DAsync_v2) {
  DeviceMemory memory(kBytes);
  HostMemory host(kBytes);
  HostMemory back(kBytes);
  Stream stream;
  CUDA_MEMCPY2D plane = {};
  plane.srcMemoryType = plane.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  plane.srcDevice = memory;
  plane.dstDevice = memory.at(2048);
  plane.srcPitch = plane.dstPitch = plane.WidthInBytes = 64;
  plane.Height = 4;
  CUDA_MEMCPY3D box = {};
  box.srcMemoryType = box.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  box.srcDevice = memory;
  box.dstDevice = memory.at(3072);
  box.srcPitch = box.dstPitch = box.WidthInBytes = 64;
  box.srcHeight = box.dstHeight = box.Height = 2;
  box.Depth = 2;
  Graph graph([&](CUstream capturing) {
    EXPECT_OK(cuMemsetD8Async(memory, 7, kBytes, capturing));
    EXPECT_OK(cuMemcpyHtoDAsync_v2(memory, host, 256, capturing));
    EXPECT_OK(cuMemcpyDtoDAsync_v2(memory.at(1024), memory, 256, capturing));
    EXPECT_OK(cuMemcpy2DAsync_v2(&plane, capturing));
    EXPECT_OK(cuMemcpy3DAsync_v2(&box, capturing));
    EXPECT_OK(cuMemcpyDtoHAsync_v2(back, memory, kBytes, capturing));
  });
  EXPECT_EQ(graph.nodes(), size_t{6});
  upload(memory, Bytes(kBytes, 0));
  Executable executable(graph);
  for (const unsigned seed : {1u, 2u}) {
    const Bytes bytes = random_bytes(256, seed);
    std::copy(bytes.begin(), bytes.end(), host.at(0));
    EXPECT_OK(cuGraphLaunch(executable, stream));
    EXPECT_OK(cuStreamSynchronize(stream));
    for (const size_t at : {0, 1024, 2048, 3072}) EXPECT_BYTES(back.at(at), bytes);
    EXPECT_BYTES(back.at(256), Bytes(256, 7));
  }
}

CASE(graphs, of_pageable_memory, kReference, cuMemcpyHtoDAsync_v2,
     cuMemcpyDtoHAsync_v2) {
  DeviceMemory memory(kBytes);
  Bytes host(64, 1);
  Bytes back(64, 0);
  Stream stream;
  CUresult in = CUDA_SUCCESS;
  CUresult out = CUDA_SUCCESS;
  Graph graph([&](CUstream capturing) {
    in = cuMemcpyHtoDAsync_v2(memory, host.data(), 64, capturing);
    out = cuMemcpyDtoHAsync_v2(back.data(), memory, 64, capturing);
  });
  EXPECT_OK(in);
  EXPECT_OK(out);
  Executable executable(graph);
  std::fill(host.begin(), host.end(), static_cast<unsigned char>(2));
  EXPECT_OK(cuGraphLaunch(executable, stream));
  EXPECT_OK(cuStreamSynchronize(stream));
  EXPECT_BYTES(back.data(), Bytes(64, 2));
}

CASE(graphs, capturing_runs_nothing, kReference, cuStreamEndCapture) {
  DeviceMemory memory(kBytes);
  upload(memory, Bytes(kBytes, 0));
  Graph graph(
      [&](CUstream stream) { EXPECT_OK(cuMemsetD8Async(memory, 7, kBytes, stream)); });
  EXPECT_BYTES(download(memory, kBytes).data(), Bytes(kBytes, 0));
}

CASE(graphs, outlive_their_source, kReference, cuGraphDestroy, cuGraphExecDestroy) {
  DeviceMemory memory(64);
  Stream stream;
  Graph graph([&](CUstream capturing) {
    REQUIRE_OK(cuMemsetD8Async(memory, 7, 64, capturing));
  });
  Executable executable(graph);
  graph.reset();
  EXPECT_OK(cuGraphLaunch(executable, stream));
  EXPECT_BYTES(download(memory, 64).data(), Bytes(64, 7));
}

CASE(graphs, nodes, kReference, cuGraphGetNodes) {
  DeviceMemory memory(kBytes);
  Graph graph([&](CUstream stream) {
    for (size_t i = 0; i < 3; ++i) {
      REQUIRE_OK(cuMemsetD8Async(memory.at(64 * i), 7, 64, stream));
    }
  });
  const auto mark = reinterpret_cast<CUgraphNode>(1);
  CUgraphNode nodes[5] = {mark, mark, mark, mark, mark};
  size_t count = 5;
  EXPECT_OK(cuGraphGetNodes(graph, nodes, &count));
  EXPECT_EQ(count, size_t{3});
  EXPECT(nodes[0] != nullptr && nodes[0] != nodes[1] && nodes[1] != nodes[2]);
  EXPECT(nodes[3] == nullptr);
  EXPECT(nodes[4] == nullptr);
  std::fill(std::begin(nodes), std::end(nodes), mark);
  count = 2;
  EXPECT_OK(cuGraphGetNodes(graph, nodes, &count));
  EXPECT_EQ(count, size_t{2});
  EXPECT(nodes[1] != mark);
  EXPECT(nodes[2] == mark);
  EXPECT_ERROR(cuGraphGetNodes(nullptr, nullptr, &count), kInvalid);
  EXPECT_ERROR(cuGraphGetNodes(graph, nullptr, nullptr), kInvalid);
}

CASE(graphs, that_are_not_given, kReference, cuGraphInstantiateWithFlags, cuGraphLaunch,
     cuGraphDestroy, cuGraphExecDestroy) {
  Graph graph([](CUstream) {});
  CUgraphExec executable = nullptr;
  EXPECT_ERROR(cuGraphInstantiateWithFlags(nullptr, graph, 0), kInvalid);
  EXPECT_ERROR(cuGraphInstantiateWithFlags(&executable, nullptr, 0), kInvalid);
  EXPECT_ERROR(cuGraphInstantiateWithFlags(&executable, graph, 0x100), kInvalid);
  EXPECT_ERROR(cuGraphLaunch(nullptr, nullptr), kInvalid);
  EXPECT_ERROR(cuGraphDestroy(nullptr), kInvalid);
  EXPECT_ERROR(cuGraphExecDestroy(nullptr), kInvalid);
}

CASE(graphs, flags_of_an_executable, kDriver, cuGraphInstantiateWithFlags) {
  DeviceMemory memory(64);
  Graph graph(
      [&](CUstream stream) { REQUIRE_OK(cuMemsetD8Async(memory, 7, 64, stream)); });
  for (const unsigned long long flags : {1ull, 2ull, 4ull, 8ull, 9ull}) {
    const About about("flags " + describe(flags));
    CUgraphExec executable = nullptr;
    const CUresult result = cuGraphInstantiateWithFlags(&executable, graph, flags);
    EXPECT_ERROR(result, flags == 2 ? kInvalid : CUDA_SUCCESS);
    if (result == CUDA_SUCCESS) EXPECT_OK(cuGraphExecDestroy(executable));
  }
}

CASE(graphs, of_nothing, kReference, cuGraphInstantiateWithFlags, cuGraphLaunch) {
  Graph graph([](CUstream) {});
  EXPECT_EQ(graph.nodes(), size_t{0});
  Executable executable(graph);
  Stream stream;
  EXPECT_OK(cuGraphLaunch(executable, stream));
  EXPECT_OK(cuGraphLaunch(executable, nullptr));
  EXPECT_OK(cuCtxSynchronize());
}

CASE(graphs, launched_while_it_runs, kReference, cuGraphLaunch) {
  DeviceMemory memory(kBytes);
  Stream stream;
  Stream other;
  Graph graph([&](CUstream capturing) {
    REQUIRE_OK(cuMemsetD8Async(memory, 7, 64, capturing));
  });
  Executable executable(graph);
  Event event;
  {
    const Busy busy(stream);
    EXPECT_OK(cuGraphLaunch(executable, stream));
    EXPECT_OK(cuGraphLaunch(executable, stream));
    EXPECT_OK(cuGraphLaunch(executable, other));
    EXPECT_OK(cuEventRecord(event, other));
    // An executable runs once at a time.
    EXPECT_ERROR(cuEventQuery(event), CUDA_ERROR_NOT_READY);
    EXPECT_OK(cuCtxSynchronize());
  }
}

CASE(graphs, ended_while_they_run, kReference, cuGraphExecDestroy) {
  DeviceMemory memory(kBytes);
  upload(memory, Bytes(64, 0));
  Stream stream;
  Graph graph([&](CUstream capturing) {
    REQUIRE_OK(cuMemsetD8Async(memory, 7, 64, capturing));
  });
  Executable executable(graph);
  const Busy busy(stream);
  EXPECT_OK(cuGraphLaunch(executable, stream));
  EXPECT_OK(cuGraphExecDestroy(executable.release()));
  EXPECT_ERROR(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
  EXPECT_BYTES(download(memory, 64).data(), Bytes(64, 7));
}

CASE(graphs, hold_no_memory_of_the_device, kDriver, cuMemGetInfo_v2) {
  DeviceMemory memory(64);
  Graph graph(
      [&](CUstream stream) { REQUIRE_OK(cuMemsetD8Async(memory, 7, 64, stream)); });
  const auto free_bytes = [] {
    size_t free = 0;
    size_t total = 0;
    REQUIRE_OK(cuMemGetInfo_v2(&free, &total));
    return free;
  };
  const size_t before = free_bytes();
  Executable executable(graph);
  EXPECT_EQ(before - free_bytes(), size_t{0});
}

}  // namespace
}  // namespace contract
