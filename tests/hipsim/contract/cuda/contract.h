// SPDX-License-Identifier: Apache-2.0
//
// What a case about CUDA's driver needs: see Note [The contract]. On a real driver each
// case has a process of its own, because a fault of the device ends every context of
// its process.
//
// The driver that is the source of most statements was asked with this program.
#pragma once

#include <string>

#include "bridge/cuda_api.h"

namespace contract {
// Before the harness, whose templates must see it.
std::string describe(CUresult error);
}  // namespace contract

#include "harness/harness.h"

namespace contract {

// Of sources: CUDA 13.0.
#define DRIVER "driver 580.159.04, H200"

// --- the driver under test -----------------------------------------------------------

// As cuDriverGetVersion counts.
int release();

constexpr int cuda(int major, int minor) { return major * 1000 + minor * 10; }

int attribute(CUdevice_attribute name, CUdevice device = 0);

// Where it does, the driver takes pageable memory for the device's own.
bool device_reads_pageable_memory();

#define cuGetErrorName(error, name) \
  (::contract::called("cuGetErrorName"), ::cuGetErrorName(error, name))
#define cuGetErrorString(error, text) \
  (::contract::called("cuGetErrorString"), ::cuGetErrorString(error, text))

// --- expectations --------------------------------------------------------------------

#define EXPECT_OK(call) EXPECT_ERROR(call, CUDA_SUCCESS)
#define REQUIRE_OK(call) REQUIRE_ERROR(call, CUDA_SUCCESS)

// Of a child that is not made ready: initialises the driver and makes device 0 current.
void make_ready();

// --- contexts ------------------------------------------------------------------------

// The primary context of a device, held to the end of the process.
CUcontext context_of(CUdevice device);

// Makes a device current until its end, then the one before.
class CurrentDevice {
 public:
  explicit CurrentDevice(CUdevice device);
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice();

 private:
  CUcontext before_ = nullptr;
};

// Runs something in another thread that has the context of device 0.
void in_another_thread(const std::function<void()>& body);

// --- things that clean up after themselves -------------------------------------------

// cuMemAlloc.
class DeviceMemory : public Holder<CUdeviceptr, &cuMemFree_v2> {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes);
  CUdeviceptr at(size_t offset) const { return get() + offset; }
  size_t size() const { return size_; }

 private:
  size_t size_ = 0;
};

// cuMemHostAlloc.
class HostMemory : public Holder<void*, &cuMemFreeHost> {
 public:
  explicit HostMemory(size_t bytes, unsigned flags = 0);
  unsigned char* at(size_t offset) const;
  size_t size() const { return size_; }

 private:
  size_t size_;
};

// Pages that cuMemHostRegister was given.
class RegisteredMemory {
 public:
  explicit RegisteredMemory(size_t bytes, unsigned flags = 0);

  void* get() const { return pages_.get(); }
  unsigned char* at(size_t offset) const { return pages_.at(offset); }
  size_t size() const { return pages_.size(); }

 private:
  Pages pages_;
  Holder<void*, &cuMemHostUnregister> registered_;
};

class Stream : public Holder<CUstream, &cuStreamDestroy_v2> {
 public:
  explicit Stream(unsigned flags = CU_STREAM_NON_BLOCKING);
};

class Event : public Holder<CUevent, &cuEventDestroy_v2> {
 public:
  explicit Event(unsigned flags = CU_EVENT_DEFAULT);
};

class Graph : public Holder<CUgraph, &cuGraphDestroy> {
 public:
  using Holder::Holder;

  // What `body` does to a non-blocking stream while it captures.
  explicit Graph(const std::function<void(CUstream)>& body);
  size_t nodes() const;
};

class Executable : public Holder<CUgraphExec, &cuGraphExecDestroy> {
 public:
  explicit Executable(const Graph& graph);
};

// --- virtual memory ------------------------------------------------------------------

CUmemAllocationProp device_memory_properties(CUdevice device = 0);
size_t granularity();

// cuMemAddressReserve.
class Reservation : Counted {
 public:
  explicit Reservation(size_t bytes, size_t alignment = 0, CUdeviceptr hint = 0);
  ~Reservation();

  CUdeviceptr get() const { return base_; }
  CUdeviceptr at(size_t offset) const { return base_ + offset; }
  size_t size() const { return bytes_; }

  // The caller frees it.
  CUdeviceptr release();

 private:
  CUdeviceptr base_ = 0;
  size_t bytes_;
};

// cuMemCreate.
class Physical : public Holder<CUmemGenericAllocationHandle, &cuMemRelease> {
 public:
  explicit Physical(size_t bytes, CUdevice device = 0);
};

CUmemAccessDesc access(CUdevice device,
                       CUmemAccess_flags flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
CUresult set_access(CUdeviceptr pointer, size_t bytes, const CUmemAccessDesc& desc);

// `pieces` handles of `bytes` each, mapped side by side in one reservation.
class VirtualMemory {
 public:
  enum class Open { kNo, kReadOnly, kYes };
  VirtualMemory(size_t pieces, size_t bytes, Open open = Open::kYes);
  VirtualMemory(const VirtualMemory&) = delete;
  VirtualMemory& operator=(const VirtualMemory&) = delete;
  ~VirtualMemory();

  CUdeviceptr get() const { return addresses_.get(); }
  CUdeviceptr at(size_t offset) const { return get() + offset; }
  size_t piece() const { return bytes_; }
  size_t size() const { return addresses_.size(); }
  CUmemGenericAllocationHandle handle(size_t index) const { return memory_[index]; }

  // Were unmapped by the caller.
  void forget_mappings() { mapped_ = false; }

 private:
  Reservation addresses_;
  std::vector<Physical> memory_;
  size_t bytes_;
  bool mapped_ = true;
};

// --- bytes ---------------------------------------------------------------------------

// With a synchronous copy, and everything done before it and after it.
void upload(CUdeviceptr destination, const Bytes& bytes);
Bytes download(CUdeviceptr source, size_t count);

inline CUdeviceptr as_device(const void* pointer) {
  return reinterpret_cast<CUdeviceptr>(pointer);
}

// --- time ----------------------------------------------------------------------------

// Keeps a stream busy for a while from its construction on: what is queued behind is
// not ready when the next lines ask. On the simulator by latency, on hardware by
// copies within device memory. Made on the current device.
class Busy {
 public:
  explicit Busy(CUstream stream);

 private:
  DeviceMemory scratch_;
};

// Does the call return before the legacy stream, which is busy, is done? In an
// expectation: kAsynchronous or kSynchronous, or the call's error.
std::string when_it_returns(const std::function<CUresult()>& call,
                            CUstream busy_stream = nullptr);
constexpr const char* kAsynchronous = "before it is done";
constexpr const char* kSynchronous = "when it is done";

}  // namespace contract
