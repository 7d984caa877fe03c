// SPDX-License-Identifier: Apache-2.0
//
// What a case about HIP needs: see Note [The contract]. The program asks the runtime
// for its release: a statement that only some releases make is skipped or turned round
// on the others.
#pragma once

#include <string>

#include "bridge/hip_api.h"

namespace contract {
// Before the harness, whose templates must see it.
std::string describe(hipError_t error);
}  // namespace contract

#include "harness/harness.h"

namespace contract {

// --- the runtime under test ----------------------------------------------------------

// As hipRuntimeGetVersion counts, without the patch number.
constexpr int hip(int major, int minor) { return major * 10'000'000 + minor * 100'000; }

// What hipRuntimeGetVersion said at the start of the case.
int release();

inline bool since(int major, int minor) { return release() >= hip(major, minor); }

int device_count();

// Where it does, the runtime takes pageable memory for the device's own and does not
// check the kind of a copy.
bool device_reads_pageable_memory();

// The functions that the simulator does not count. Each macro tells the harness.
#define hipGetErrorName(error) \
  (::contract::called("hipGetErrorName"), ::hipGetErrorName(error))
#define hipGetErrorString(error) \
  (::contract::called("hipGetErrorString"), ::hipGetErrorString(error))
#define hipGetLastError() (::contract::called("hipGetLastError"), ::hipGetLastError())
#define hipPeekAtLastError() \
  (::contract::called("hipPeekAtLastError"), ::hipPeekAtLastError())

// --- expectations --------------------------------------------------------------------

#define EXPECT_OK(call) EXPECT_ERROR(call, hipSuccess)
#define REQUIRE_OK(call) REQUIRE_ERROR(call, hipSuccess)

// --- things that clean up after themselves -------------------------------------------

// hipMalloc.
class DeviceMemory : public Holder<void*, &hipFree> {
 public:
  DeviceMemory() = default;
  explicit DeviceMemory(size_t bytes);
  unsigned char* at(size_t offset) const;
  size_t size() const { return size_; }

 private:
  size_t size_ = 0;
};

// hipHostMalloc.
class HostMemory : public Holder<void*, &hipHostFree> {
 public:
  explicit HostMemory(size_t bytes, unsigned flags = 0);
  unsigned char* at(size_t offset) const;
  size_t size() const { return size_; }

 private:
  size_t size_;
};

// Pages that hipHostRegister was given.
class RegisteredMemory {
 public:
  explicit RegisteredMemory(size_t bytes, unsigned flags = 0);

  void* get() const { return pages_.get(); }
  unsigned char* at(size_t offset) const { return pages_.at(offset); }
  size_t size() const { return pages_.size(); }

 private:
  Pages pages_;
  Holder<void*, &hipHostUnregister> registered_;
};

class Stream : public Holder<hipStream_t, &hipStreamDestroy> {
 public:
  explicit Stream(unsigned flags = hipStreamNonBlocking);
};

class Event : public Holder<hipEvent_t, &hipEventDestroy> {
 public:
  explicit Event(unsigned flags = hipEventDefault);
};

// Makes a device current until its end, then the one before.
class CurrentDevice {
 public:
  explicit CurrentDevice(int device);
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;
  ~CurrentDevice();

 private:
  int before_ = 0;
};

// Keeps a stream busy for a while from its construction on: what is queued behind is
// not ready when the next lines ask. On the simulator by latency, on hardware by
// copies within device memory. Made on the current device.
class Busy {
 public:
  explicit Busy(hipStream_t stream);

  // How long the stream is busy at least; nothing is promised on hardware.
  static std::chrono::milliseconds least();

 private:
  DeviceMemory scratch_;
};

// --- bytes ---------------------------------------------------------------------------

// With hipMemcpy, followed by hipDeviceSynchronize.
void upload(void* destination, const Bytes& bytes);
Bytes download(const void* source, size_t count);

}  // namespace contract
