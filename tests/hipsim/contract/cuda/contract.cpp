// SPDX-License-Identifier: Apache-2.0
#include "contract.h"

#include <exception>
#include <thread>

#undef cuGetErrorName
#undef cuGetErrorString

namespace contract {
namespace {

constexpr auto kBusy = std::chrono::milliseconds(150);

int version() {
  int number = 0;
  cuDriverGetVersion(&number);
  return number;
}

std::string release_text() {
  return "CUDA " + std::to_string(version() / 1000) + "." +
         std::to_string(version() % 1000 / 10);
}

int count_devices() {
  int count = 0;
  return cuInit(0) == CUDA_SUCCESS && cuDeviceGetCount(&count) == CUDA_SUCCESS ? count
                                                                               : 0;
}

}  // namespace

const Vendor kVendor = {release_text, count_devices, make_ready, true};

// --- the driver under test -----------------------------------------------------------

int release() { return version(); }

int attribute(CUdevice_attribute name, CUdevice device) {
  int value = 0;
  REQUIRE_OK(cuDeviceGetAttribute(&value, name, device));
  return value;
}

bool device_reads_pageable_memory() {
  return attribute(CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS) != 0;
}

// --- expectations --------------------------------------------------------------------

std::string describe(CUresult error) {
  const char* name = nullptr;
  cuGetErrorName(error, &name);
  return std::string(name != nullptr ? name : "?") + " (" +
         std::to_string(static_cast<int>(error)) + ")";
}

// --- contexts ------------------------------------------------------------------------

CUcontext context_of(CUdevice device) {
  static std::vector<CUcontext> contexts(64);
  CUcontext& context = contexts.at(static_cast<size_t>(device));
  if (context == nullptr) REQUIRE_OK(cuDevicePrimaryCtxRetain(&context, device));
  return context;
}

void make_ready() {
  REQUIRE_OK(cuInit(0));
  REQUIRE_OK(cuCtxSetCurrent(context_of(0)));
}

CurrentDevice::CurrentDevice(CUdevice device) {
  REQUIRE_OK(cuCtxGetCurrent(&before_));
  REQUIRE_OK(cuCtxSetCurrent(context_of(device)));
}

CurrentDevice::~CurrentDevice() { EXPECT_OK(cuCtxSetCurrent(before_)); }

void in_another_thread(const std::function<void()>& body) {
  std::exception_ptr thrown;
  std::thread([&] {
    try {
      REQUIRE_OK(cuCtxSetCurrent(context_of(0)));
      body();
    } catch (...) {
      thrown = std::current_exception();
    }
  }).join();
  if (thrown) std::rethrow_exception(thrown);
}

// --- things that clean up after themselves -------------------------------------------

namespace {

CUdeviceptr allocate_device(size_t bytes) {
  CUdeviceptr pointer = 0;
  REQUIRE_OK(cuMemAlloc_v2(&pointer, bytes));
  return pointer;
}

void* allocate_host(size_t bytes, unsigned flags) {
  void* pointer = nullptr;
  REQUIRE_OK(cuMemHostAlloc(&pointer, bytes, flags));
  return pointer;
}

void* register_pages(const Pages& pages, unsigned flags) {
  REQUIRE_OK(cuMemHostRegister_v2(pages.get(), pages.size(), flags));
  return pages.get();
}

CUstream create_stream(unsigned flags) {
  CUstream stream = nullptr;
  REQUIRE_OK(cuStreamCreate(&stream, flags));
  return stream;
}

CUevent create_event(unsigned flags) {
  CUevent event = nullptr;
  REQUIRE_OK(cuEventCreate(&event, flags));
  return event;
}

CUgraph capture(const std::function<void(CUstream)>& body) {
  const Stream stream;
  CUgraph graph = nullptr;
  REQUIRE_OK(cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_RELAXED));
  body(stream);
  REQUIRE_OK(cuStreamEndCapture(stream, &graph));
  return graph;
}

CUgraphExec instantiate(CUgraph graph) {
  CUgraphExec executable = nullptr;
  REQUIRE_OK(cuGraphInstantiateWithFlags(&executable, graph, 0));
  return executable;
}

CUmemGenericAllocationHandle create(size_t bytes, CUdevice device) {
  const CUmemAllocationProp properties = device_memory_properties(device);
  CUmemGenericAllocationHandle handle = 0;
  REQUIRE_OK(cuMemCreate(&handle, bytes, &properties, 0));
  return handle;
}

}  // namespace

DeviceMemory::DeviceMemory(size_t bytes)
    : Holder(allocate_device(bytes)), size_(bytes) {}

HostMemory::HostMemory(size_t bytes, unsigned flags)
    : Holder(allocate_host(bytes, flags)), size_(bytes) {}

unsigned char* HostMemory::at(size_t offset) const {
  return static_cast<unsigned char*>(get()) + offset;
}

RegisteredMemory::RegisteredMemory(size_t bytes, unsigned flags)
    : pages_(bytes), registered_(register_pages(pages_, flags)) {}

Stream::Stream(unsigned flags) : Holder(create_stream(flags)) {}

Event::Event(unsigned flags) : Holder(create_event(flags)) {}

Graph::Graph(const std::function<void(CUstream)>& body) : Holder(capture(body)) {}

size_t Graph::nodes() const {
  size_t count = 0;
  REQUIRE_OK(cuGraphGetNodes(get(), nullptr, &count));
  return count;
}

Executable::Executable(const Graph& graph) : Holder(instantiate(graph)) {}

// --- virtual memory ------------------------------------------------------------------

CUmemAllocationProp device_memory_properties(CUdevice device) {
  CUmemAllocationProp properties = {};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, device};
  return properties;
}

size_t granularity() {
  const CUmemAllocationProp properties = device_memory_properties();
  size_t bytes = 0;
  REQUIRE_OK(cuMemGetAllocationGranularity(&bytes, &properties,
                                           CU_MEM_ALLOC_GRANULARITY_MINIMUM));
  return bytes;
}

Reservation::Reservation(size_t bytes, size_t alignment, CUdeviceptr hint)
    : bytes_(bytes) {
  REQUIRE_OK(cuMemAddressReserve(&base_, bytes, alignment, hint, 0));
}

Reservation::~Reservation() {
  if (base_ == 0) return;
  const CUresult result = cuMemAddressFree(base_, bytes_);
  if (result != CUDA_SUCCESS) {
    report(CONTRACT_HERE, "a reservation ends with " + describe(result));
  }
}

CUdeviceptr Reservation::release() { return std::exchange(base_, 0); }

Physical::Physical(size_t bytes, CUdevice device) : Holder(create(bytes, device)) {}

CUmemAccessDesc access(CUdevice device, CUmemAccess_flags flags) {
  return {{CU_MEM_LOCATION_TYPE_DEVICE, device}, flags};
}

CUresult set_access(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc& desc) {
  return cuMemSetAccess(pointer, bytes, &desc, 1);
}

VirtualMemory::VirtualMemory(size_t pieces, size_t bytes, Open open)
    : addresses_(pieces * bytes), bytes_(bytes) {
  for (size_t i = 0; i < pieces; ++i) {
    memory_.emplace_back(bytes);
    REQUIRE_OK(cuMemMap(at(i * bytes), bytes, 0, memory_[i], 0));
  }
  if (open == Open::kNo) return;
  const CUmemAccess_flags flags = open == Open::kYes
                                      ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                                      : CU_MEM_ACCESS_FLAGS_PROT_READ;
  REQUIRE_OK(set_access(get(), size(), access(0, flags)));
}

VirtualMemory::~VirtualMemory() {
  if (!mapped_) return;
  const CUresult result = cuMemUnmap(get(), size());
  if (result != CUDA_SUCCESS) {
    report(CONTRACT_HERE, "mappings end with " + describe(result));
  }
}

// --- bytes ---------------------------------------------------------------------------

void upload(CUdeviceptr destination, const Bytes& bytes) {
  REQUIRE_OK(cuMemcpyHtoD_v2(destination, bytes.data(), bytes.size()));
  REQUIRE_OK(cuCtxSynchronize());
}

Bytes download(CUdeviceptr source, size_t count) {
  Bytes bytes(count);
  REQUIRE_OK(cuCtxSynchronize());
  REQUIRE_OK(cuMemcpyDtoH_v2(bytes.data(), source, count));
  return bytes;
}

// --- time ----------------------------------------------------------------------------

Busy::Busy(CUstream stream) {
  constexpr size_t kHalf = size_t{512} << 20;
  constexpr int kCopies = 500;
  scratch_ = DeviceMemory(simulated() ? 128 : 2 * kHalf);
  const size_t half = scratch_.size() / 2;
  set_switch("copy_latency_us", std::chrono::microseconds(kBusy).count());
  for (int i = 0; i < (simulated() ? 1 : kCopies); ++i) {
    REQUIRE_OK(cuMemcpyDtoDAsync_v2(scratch_.at(half), scratch_.get(), half, stream));
  }
  set_switch("copy_latency_us", 0);
}

std::string when_it_returns(const std::function<CUresult()>& call,
                            CUstream busy_stream) {
  Event done;
  const Busy busy(busy_stream);
  REQUIRE_OK(cuEventRecord(done, busy_stream));
  const CUresult result = call();
  const CUresult state = cuEventQuery(done);
  REQUIRE_OK(cuCtxSynchronize());
  if (result != CUDA_SUCCESS) return describe(result);
  return state == CUDA_ERROR_NOT_READY ? kAsynchronous : kSynchronous;
}

}  // namespace contract
