// SPDX-License-Identifier: Apache-2.0
#include <sys/wait.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <thread>

#include "contract.h"

namespace contract {
namespace {

constexpr const char* kDriver = DRIVER;
constexpr const char* kReference =
    DRIVER "; CUDA Driver API, Primary Context Management";

constexpr CUresult kOk = CUDA_SUCCESS;
constexpr CUresult kNoContext = CUDA_ERROR_INVALID_CONTEXT;

// --- every function ------------------------------------------------------------------

// What the calls below work on; all null where nothing can be made.
struct Things {
  CUstream stream = nullptr;
  CUevent event = nullptr;
  CUgraph graph = nullptr;
  CUgraphExec executable = nullptr;
  CUdeviceptr memory = 0;
  void* host = nullptr;
  void* pages = nullptr;
  CUdeviceptr reserved = 0;
  CUmemGenericAllocationHandle physical = 0;
  size_t piece = 0;

  // What the calls make.
  CUstream made_stream = nullptr;
  CUevent made_event = nullptr;
  CUdeviceptr made_memory = 0;
  void* made_host = nullptr;
  CUdeviceptr made_reservation = 0;
  CUmemGenericAllocationHandle made_physical = 0;
  CUgraphExec made_executable = nullptr;
  bool mapped = false;
  bool registered = false;
};

struct Call {
  const char* name;
  std::function<CUresult(Things&)> make;

  // The answer without a context. A stream, an event or a graph has its own, and
  // virtual memory needs none.
  CUresult without;
};

// These look at a handle that is null before they look for the driver.
CUresult before_initialisation(const std::string& name) {
  if (name == "cuDriverGetVersion") return CUDA_SUCCESS;
  for (const char* each : {"cuIpcGetMemHandle", "cuMemcpyBatchAsync(stream)"}) {
    if (name == each) return CUDA_ERROR_INVALID_VALUE;
  }
  for (const char* each : {"cuEventQuery", "cuEventSynchronize", "cuEventElapsedTime",
                           "cuEventDestroy", "cuStreamDestroy"}) {
    if (name == each) return CUDA_ERROR_INVALID_HANDLE;
  }
  return CUDA_ERROR_NOT_INITIALIZED;
}

const std::vector<Call>& calls() {
  constexpr size_t kBytes = 4096;
  const static CUmemAllocationProp properties = device_memory_properties();
  const static CUmemAccessDesc opened = access(0);
  const static CUmemLocation location = opened.location;
  const static std::vector<Call> all = {
      {"cuDriverGetVersion",
       [](Things&) {
         int version = 0;
         return cuDriverGetVersion(&version);
       },
       kOk},
      {"cuDeviceGetCount",
       [](Things&) {
         int count = 0;
         return cuDeviceGetCount(&count);
       },
       kOk},
      {"cuDeviceGet",
       [](Things&) {
         CUdevice device = 0;
         return cuDeviceGet(&device, 0);
       },
       kOk},
      {"cuDeviceGetAttribute",
       [](Things&) {
         int value = 0;
         return cuDeviceGetAttribute(&value, CU_DEVICE_ATTRIBUTE_WARP_SIZE, 0);
       },
       kOk},
      {"cuDevicePrimaryCtxRetain",
       [](Things&) {
         CUcontext context = nullptr;
         return cuDevicePrimaryCtxRetain(&context, 0);
       },
       kOk},
      {"cuDevicePrimaryCtxRelease",
       [](Things&) { return cuDevicePrimaryCtxRelease_v2(0); }, kOk},
      {"cuCtxGetCurrent",
       [](Things&) {
         CUcontext context = nullptr;
         return cuCtxGetCurrent(&context);
       },
       kOk},
      {"cuCtxSetCurrent(nullptr)", [](Things&) { return cuCtxSetCurrent(nullptr); },
       kOk},
      {"cuCtxGetDevice",
       [](Things&) {
         CUdevice device = 0;
         return cuCtxGetDevice(&device);
       },
       kNoContext},
      {"cuCtxSynchronize", [](Things&) { return cuCtxSynchronize(); }, kNoContext},
      {"cuCtxGetStreamPriorityRange",
       [](Things&) {
         int least = 0;
         int greatest = 0;
         return cuCtxGetStreamPriorityRange(&least, &greatest);
       },
       kNoContext},
      {"cuStreamCreate",
       [](Things& the) { return cuStreamCreate(&the.made_stream, 0); }, kNoContext},
      {"cuStreamCreateWithPriority",
       [](Things& the) { return cuStreamCreateWithPriority(&the.made_stream, 0, 0); },
       kNoContext},
      {"cuStreamQuery(stream)", [](Things& the) { return cuStreamQuery(the.stream); },
       kOk},
      {"cuStreamQuery(nullptr)", [](Things&) { return cuStreamQuery(nullptr); },
       kNoContext},
      {"cuStreamSynchronize(stream)",
       [](Things& the) { return cuStreamSynchronize(the.stream); }, kOk},
      {"cuStreamSynchronize(nullptr)",
       [](Things&) { return cuStreamSynchronize(nullptr); }, kNoContext},
      {"cuEventCreate", [](Things& the) { return cuEventCreate(&the.made_event, 0); },
       kNoContext},
      {"cuEventRecord(event, stream)",
       [](Things& the) { return cuEventRecord(the.event, the.stream); }, kOk},
      {"cuEventRecord(event, nullptr)",
       [](Things& the) { return cuEventRecord(the.event, nullptr); }, kNoContext},
      {"cuStreamWaitEvent(stream, event)",
       [](Things& the) { return cuStreamWaitEvent(the.stream, the.event, 0); }, kOk},
      {"cuEventSynchronize", [](Things& the) { return cuEventSynchronize(the.event); },
       kOk},
      {"cuEventQuery", [](Things& the) { return cuEventQuery(the.event); }, kOk},
      {"cuEventElapsedTime",
       [](Things& the) {
         float time = 0;
         return cuEventElapsedTime(&time, the.event, the.event);
       },
       kOk},
      {"cuMemGetInfo",
       [](Things&) {
         size_t free = 0;
         size_t total = 0;
         return cuMemGetInfo_v2(&free, &total);
       },
       kNoContext},
      {"cuMemAlloc",
       [](Things& the) { return cuMemAlloc_v2(&the.made_memory, kBytes); }, kNoContext},
      {"cuMemGetAddressRange",
       [](Things& the) {
         CUdeviceptr base = 0;
         size_t bytes = 0;
         return cuMemGetAddressRange_v2(&base, &bytes, the.memory);
       },
       kNoContext},
      {"cuMemHostAlloc",
       [](Things& the) { return cuMemHostAlloc(&the.made_host, kBytes, 0); },
       kNoContext},
      {"cuMemHostGetDevicePointer",
       [](Things& the) {
         CUdeviceptr pointer = 0;
         return cuMemHostGetDevicePointer_v2(&pointer, the.host, 0);
       },
       kNoContext},
      {"cuMemHostRegister",
       [](Things& the) {
         const CUresult result = cuMemHostRegister_v2(the.pages, kBytes, 0);
         the.registered = result == CUDA_SUCCESS;
         return result;
       },
       kNoContext},
      {"cuMemHostUnregister",
       [](Things& the) {
         const CUresult result = cuMemHostUnregister(the.pages);
         if (result == CUDA_SUCCESS) the.registered = false;
         return result;
       },
       CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED},
      {"cuMemsetD8", [](Things& the) { return cuMemsetD8_v2(the.memory, 1, kBytes); },
       kNoContext},
      {"cuMemsetD8Async(stream)",
       [](Things& the) { return cuMemsetD8Async(the.memory, 1, kBytes, the.stream); },
       kOk},
      {"cuMemcpy",
       [](Things& the) { return cuMemcpy(the.memory, as_device(the.host), kBytes); },
       kNoContext},
      {"cuMemcpyAsync(stream)",
       [](Things& the) {
         return cuMemcpyAsync(the.memory, as_device(the.host), kBytes, the.stream);
       },
       kOk},
      {"cuMemcpyAsync(nullptr)",
       [](Things& the) {
         return cuMemcpyAsync(the.memory, as_device(the.host), kBytes, nullptr);
       },
       kNoContext},
      {"cuMemcpyHtoD",
       [](Things& the) { return cuMemcpyHtoD_v2(the.memory, the.host, kBytes); },
       kNoContext},
      {"cuMemcpyDtoH",
       [](Things& the) { return cuMemcpyDtoH_v2(the.host, the.memory, kBytes); },
       kNoContext},
      {"cuMemcpyHtoDAsync(stream)",
       [](Things& the) {
         return cuMemcpyHtoDAsync_v2(the.memory, the.host, kBytes, the.stream);
       },
       kOk},
      {"cuMemcpyDtoHAsync(stream)",
       [](Things& the) {
         return cuMemcpyDtoHAsync_v2(the.host, the.memory, kBytes, the.stream);
       },
       kOk},
      {"cuMemcpyDtoDAsync(stream)",
       [](Things& the) {
         return cuMemcpyDtoDAsync_v2(the.memory, the.memory, kBytes, the.stream);
       },
       kOk},
      {"cuMemcpy2DAsync(stream)",
       [](Things& the) {
         CUDA_MEMCPY2D copy = {};
         copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
         copy.srcDevice = the.memory;
         copy.dstDevice = the.memory + 2048;
         copy.WidthInBytes = copy.Height = 16;
         return cuMemcpy2DAsync_v2(&copy, the.stream);
       },
       kOk},
      {"cuMemcpy3DAsync(stream)",
       [](Things& the) {
         CUDA_MEMCPY3D copy = {};
         copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
         copy.srcDevice = the.memory;
         copy.dstDevice = the.memory + 2048;
         copy.WidthInBytes = copy.Height = copy.Depth = 8;
         return cuMemcpy3DAsync_v2(&copy, the.stream);
       },
       kOk},
      {"cuMemcpyBatchAsync(stream)",
       [](Things& the) {
         CUdeviceptr to = the.memory;
         CUdeviceptr from = the.memory + 2048;
         size_t bytes = 64;
         size_t first = 0;
         size_t failed = 0;
         CUmemcpyAttributes attributes = {};
         attributes.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
         return cuMemcpyBatchAsync(&to, &from, &bytes, 1, &attributes, &first, 1,
                                   &failed, the.stream);
       },
       CUDA_ERROR_INVALID_VALUE},
      {"cuStreamIsCapturing",
       [](Things& the) {
         CUstreamCaptureStatus status;
         return cuStreamIsCapturing(the.stream, &status);
       },
       kOk},
      {"cuThreadExchangeStreamCaptureMode",
       [](Things&) {
         CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
         return cuThreadExchangeStreamCaptureMode(&mode);
       },
       kOk},
      {"cuStreamBeginCapture",
       [](Things& the) {
         return cuStreamBeginCapture_v2(the.stream, CU_STREAM_CAPTURE_MODE_RELAXED);
       },
       kOk},
      {"cuStreamEndCapture",
       [](Things& the) {
         CUgraph graph = nullptr;
         const CUresult result = cuStreamEndCapture(the.stream, &graph);
         if (graph != nullptr) cuGraphDestroy(graph);
         return result;
       },
       kOk},
      {"cuGraphGetNodes",
       [](Things& the) {
         size_t count = 0;
         return cuGraphGetNodes(the.graph, nullptr, &count);
       },
       kOk},
      {"cuGraphInstantiateWithFlags",
       [](Things& the) {
         return cuGraphInstantiateWithFlags(&the.made_executable, the.graph, 0);
       },
       kNoContext},
      {"cuGraphLaunch(stream)",
       [](Things& the) { return cuGraphLaunch(the.executable, the.stream); }, kOk},
      {"cuIpcGetMemHandle",
       [](Things& the) {
         CUipcMemHandle handle;
         return cuIpcGetMemHandle(&handle, the.memory);
       },
       kNoContext},
      {"cuMemGetAllocationGranularity",
       [](Things&) {
         size_t bytes = 0;
         return cuMemGetAllocationGranularity(&bytes, &properties,
                                              CU_MEM_ALLOC_GRANULARITY_MINIMUM);
       },
       kOk},
      {"cuMemAddressReserve",
       [](Things& the) {
         return cuMemAddressReserve(&the.made_reservation, the.piece, 0, 0, 0);
       },
       kOk},
      {"cuMemAddressFree",
       [](Things& the) {
         const CUresult result = cuMemAddressFree(the.made_reservation, the.piece);
         if (result == CUDA_SUCCESS) the.made_reservation = 0;
         return result;
       },
       kOk},
      {"cuMemCreate",
       [](Things& the) {
         return cuMemCreate(&the.made_physical, the.piece, &properties, 0);
       },
       kOk},
      {"cuMemRelease",
       [](Things& the) {
         const CUresult result = cuMemRelease(the.made_physical);
         if (result == CUDA_SUCCESS) the.made_physical = 0;
         return result;
       },
       kOk},
      {"cuMemMap",
       [](Things& the) {
         const CUresult result = cuMemMap(the.reserved, the.piece, 0, the.physical, 0);
         the.mapped = result == CUDA_SUCCESS;
         return result;
       },
       kOk},
      {"cuMemSetAccess",
       [](Things& the) { return cuMemSetAccess(the.reserved, the.piece, &opened, 1); },
       kOk},
      {"cuMemGetAccess",
       [](Things& the) {
         unsigned long long flags = 0;
         return cuMemGetAccess(&flags, &location, the.reserved);
       },
       kOk},
      {"cuMemRetainAllocationHandle",
       [](Things& the) {
         CUmemGenericAllocationHandle handle = 0;
         const CUresult result = cuMemRetainAllocationHandle(
             &handle, reinterpret_cast<void*>(the.reserved));
         if (result == CUDA_SUCCESS) cuMemRelease(handle);
         return result;
       },
       kOk},
      {"cuMemGetAllocationPropertiesFromHandle",
       [](Things& the) {
         CUmemAllocationProp found;
         return cuMemGetAllocationPropertiesFromHandle(&found, the.physical);
       },
       kOk},
      {"cuMemUnmap",
       [](Things& the) {
         const CUresult result = cuMemUnmap(the.reserved, the.piece);
         if (result == CUDA_SUCCESS) the.mapped = false;
         return result;
       },
       kOk},
      {"cuGraphExecDestroy",
       [](Things& the) {
         const CUresult result = cuGraphExecDestroy(the.executable);
         if (result == CUDA_SUCCESS) the.executable = nullptr;
         return result;
       },
       kOk},
      {"cuGraphDestroy",
       [](Things& the) {
         const CUresult result = cuGraphDestroy(the.graph);
         if (result == CUDA_SUCCESS) the.graph = nullptr;
         return result;
       },
       kOk},
      {"cuEventDestroy",
       [](Things& the) {
         const CUresult result = cuEventDestroy_v2(the.event);
         if (result == CUDA_SUCCESS) the.event = nullptr;
         return result;
       },
       kOk},
      {"cuStreamDestroy",
       [](Things& the) {
         const CUresult result = cuStreamDestroy_v2(the.stream);
         if (result == CUDA_SUCCESS) the.stream = nullptr;
         return result;
       },
       kOk},
      {"cuMemFreeHost",
       [](Things& the) {
         const CUresult result = cuMemFreeHost(the.host);
         if (result == CUDA_SUCCESS) the.host = nullptr;
         return result;
       },
       kOk},
      {"cuMemFree",
       [](Things& the) {
         const CUresult result = cuMemFree_v2(the.memory);
         if (result == CUDA_SUCCESS) the.memory = 0;
         return result;
       },
       kOk},
  };
  return all;
}

void make(Things* the, const Pages& pages) {
  the->pages = pages.get();
  the->piece = granularity();
  the->stream = Stream().release();
  the->event = Event().release();
  the->memory = DeviceMemory(4096).release();
  the->host = HostMemory(4096).release();
  the->reserved = Reservation(the->piece).release();
  the->physical = Physical(the->piece).release();
  Graph graph([](CUstream) {});
  the->executable = Executable(graph).release();
  the->graph = graph.release();
  REQUIRE_OK(cuEventRecord(the->event, the->stream));
  REQUIRE_OK(cuCtxSynchronize());
}

void clean(Things* the) {
  if (!simulated()) return;  // the case has a process of its own there
  if (the->mapped) EXPECT_OK(cuMemUnmap(the->reserved, the->piece));
  if (the->registered) EXPECT_OK(cuMemHostUnregister(the->pages));
  if (the->made_reservation != 0) {
    EXPECT_OK(cuMemAddressFree(the->made_reservation, the->piece));
  }
  if (the->reserved != 0) EXPECT_OK(cuMemAddressFree(the->reserved, the->piece));
  const Holder<CUmemGenericAllocationHandle, &cuMemRelease> handles[] = {
      Holder<CUmemGenericAllocationHandle, &cuMemRelease>(the->physical),
      Holder<CUmemGenericAllocationHandle, &cuMemRelease>(the->made_physical)};
  const Holder<CUstream, &cuStreamDestroy_v2> streams[] = {
      Holder<CUstream, &cuStreamDestroy_v2>(the->stream),
      Holder<CUstream, &cuStreamDestroy_v2>(the->made_stream)};
  const Holder<CUevent, &cuEventDestroy_v2> events[] = {
      Holder<CUevent, &cuEventDestroy_v2>(the->event),
      Holder<CUevent, &cuEventDestroy_v2>(the->made_event)};
  const Holder<CUdeviceptr, &cuMemFree_v2> memory[] = {
      Holder<CUdeviceptr, &cuMemFree_v2>(the->memory),
      Holder<CUdeviceptr, &cuMemFree_v2>(the->made_memory)};
  const Holder<void*, &cuMemFreeHost> host[] = {
      Holder<void*, &cuMemFreeHost>(the->host),
      Holder<void*, &cuMemFreeHost>(the->made_host)};
  const Holder<CUgraphExec, &cuGraphExecDestroy> executables[] = {
      Holder<CUgraphExec, &cuGraphExecDestroy>(the->executable),
      Holder<CUgraphExec, &cuGraphExecDestroy>(the->made_executable)};
  const Holder<CUgraph, &cuGraphDestroy> graph(the->graph);
}

CASE(contexts, every_call_of_a_thread_without_a_context, kDriver, cuCtxGetDevice,
     cuStreamCreate, cuMemAlloc_v2) {
  const Pages pages(4096);
  Things things;
  make(&things, pages);
  std::thread([&] {
    for (const Call& call : calls()) {
      const About name(call.name);
      const CUresult said = call.make(things);
      EXPECT_EQ(said, call.without);
    }
  }).join();
  clean(&things);
}

CHILD(uninitialised) {
  const Pages pages(4096);
  Things nothing;
  nothing.pages = pages.get();
  nothing.piece = size_t{2} << 20;
  for (const Call& call : calls()) {
    write_to_parent(call.name);
    write_to_parent(describe(call.make(nothing)));
  }
  return 0;
}

CASE(contexts, every_call_before_cuInit, kDriver, cuDeviceGet, cuMemAlloc_v2) {
  Child child("uninitialised");
  for (const Call& call : calls()) {
    const std::string name = child.read_line();
    REQUIRE_EQ(name, std::string(call.name));
    const About about(name);
    const std::string said = child.read_line();
    EXPECT_EQ(said, describe(before_initialisation(name)));
  }
  EXPECT_EQ(child.wait(), 0);
}

CASE(contexts, a_forked_child_of_an_initialised_process, kDriver, cuInit) {
  int ends[2] = {};
  REQUIRE(pipe(ends) == 0);
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) {
    int count = 0;
    const CUresult results[] = {cuInit(0), cuDeviceGetCount(&count),
                                cuCtxSynchronize()};
    [[maybe_unused]] const ssize_t written = write(ends[1], results, sizeof results);
    _exit(0);
  }
  close(ends[1]);
  CUresult results[3] = {};
  EXPECT_EQ(read(ends[0], results, sizeof results),
            static_cast<ssize_t>(sizeof results));
  close(ends[0]);
  waitpid(child, nullptr, 0);
  EXPECT_ERROR(results[0], CUDA_ERROR_NOT_INITIALIZED);
  EXPECT_ERROR(results[1], CUDA_ERROR_NOT_INITIALIZED);
  EXPECT_ERROR(results[2], CUDA_ERROR_NOT_INITIALIZED);
  EXPECT_OK(cuInit(0));
}

// --- contexts ------------------------------------------------------------------------

CASE(contexts, the_current_one, kReference, cuCtxSetCurrent, cuCtxGetCurrent,
     cuCtxGetDevice) {
  CUcontext context = nullptr;
  CUdevice device = -1;
  EXPECT_OK(cuCtxGetCurrent(&context));
  EXPECT(context == context_of(0));
  EXPECT_OK(cuCtxGetDevice(&device));
  EXPECT_EQ(device, 0);
  EXPECT_OK(cuCtxSetCurrent(nullptr));
  EXPECT_OK(cuCtxGetCurrent(&context));
  EXPECT(context == nullptr);
  EXPECT_ERROR(cuCtxGetDevice(&device), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_OK(cuCtxSetCurrent(context_of(0)));
  EXPECT_ERROR(cuCtxGetCurrent(nullptr), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuCtxGetDevice(nullptr), CUDA_ERROR_INVALID_VALUE);
}

CASE(contexts, each_thread_has_its_own, kReference, cuCtxGetCurrent) {
  std::thread([] {
    CUcontext context = context_of(0);
    EXPECT_OK(cuCtxGetCurrent(&context));
    EXPECT(context == nullptr);
  }).join();
}

CASE(contexts, one_a_device, kReference, cuDevicePrimaryCtxRetain, cuCtxGetDevice) {
  need_devices(2);
  CUcontext context = nullptr;
  REQUIRE_OK(cuDevicePrimaryCtxRetain(&context, 1));
  EXPECT(context != context_of(0));
  EXPECT(context == context_of(1));
  REQUIRE_OK(cuDevicePrimaryCtxRelease_v2(1));
  CurrentDevice other(1);
  CUdevice device = -1;
  EXPECT_OK(cuCtxGetDevice(&device));
  EXPECT_EQ(device, 1);
}

CASE(contexts, retained_and_released, kReference, cuDevicePrimaryCtxRetain,
     cuDevicePrimaryCtxRelease_v2) {
  CUcontext context = nullptr;
  EXPECT_OK(cuDevicePrimaryCtxRetain(&context, 0));
  EXPECT(context == context_of(0));
  EXPECT_OK(cuDevicePrimaryCtxRelease_v2(0));
  EXPECT_OK(cuCtxSynchronize());
  EXPECT_ERROR(cuDevicePrimaryCtxRetain(nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuDevicePrimaryCtxRetain(&context, kVendor.count_devices()),
               CUDA_ERROR_INVALID_DEVICE);
  EXPECT_ERROR(cuDevicePrimaryCtxRetain(&context, -1), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_ERROR(cuDevicePrimaryCtxRelease_v2(kVendor.count_devices()),
               CUDA_ERROR_INVALID_DEVICE);
}

CHILD(releases_too_often) {
  CUcontext context = nullptr;
  const auto say = [](CUresult result) { write_to_parent(describe(result)); };
  say(cuInit(0));
  say(cuDevicePrimaryCtxRelease_v2(0));
  say(cuDevicePrimaryCtxRetain(&context, 0));
  say(cuCtxSetCurrent(context));
  say(cuCtxSynchronize());
  say(cuDevicePrimaryCtxRelease_v2(0));
  say(cuCtxSynchronize());
  CUcontext current = nullptr;
  say(cuCtxGetCurrent(&current));
  write_to_parent(current == context   ? "the same"
                  : current == nullptr ? "none"
                                       : "new");
  say(cuCtxSetCurrent(nullptr));
  say(cuCtxSetCurrent(context));
  say(cuDevicePrimaryCtxRelease_v2(0));
  say(cuDevicePrimaryCtxRetain(&current, 0));
  write_to_parent(current == context ? "the same" : "another");
  return 0;
}

CASE(contexts, released_to_the_last, kDriver, cuDevicePrimaryCtxRelease_v2) {
  Child child("releases_too_often");
  const auto expect = [&](const char* what, const std::string& expected) {
    const About about(what);
    const std::string said = child.read_line();
    EXPECT_EQ(said, expected);
  };
  expect("init", describe(kOk));
  expect("release before any retain", describe(CUDA_ERROR_INVALID_CONTEXT));
  expect("retain", describe(kOk));
  expect("set current", describe(kOk));
  expect("synchronize", describe(kOk));
  expect("release", describe(kOk));
  expect("synchronize when released", describe(CUDA_ERROR_CONTEXT_IS_DESTROYED));
  expect("get current when released", describe(kOk));
  expect("which is", "the same");
  expect("set none current", describe(kOk));
  expect("set the released current", describe(kOk));
  expect("release once more", describe(CUDA_ERROR_INVALID_CONTEXT));
  expect("retain once more", describe(kOk));
  expect("the context then is", "the same");
  EXPECT_EQ(child.wait(), 0);
}

CHILD(sets_a_made_up_context) {
  REQUIRE_OK(cuInit(0));
  char nonsense[4096] = {};
  write_to_parent(describe(cuCtxSetCurrent(reinterpret_cast<CUcontext>(nonsense))));
  return 0;
}

CASE(contexts, one_that_nobody_made, "none: the simulator's own", cuCtxSetCurrent) {
  if (!simulated()) SKIP("undefined on a real driver");
  EXPECT_OK(cuCtxSetCurrent(context_of(0)));
  Child child("sets_a_made_up_context");
  EXPECT_EQ(child.read_line(), describe(CUDA_ERROR_INVALID_CONTEXT));
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace
}  // namespace contract
