// SPDX-License-Identifier: Apache-2.0
#include "contract.h"

#undef hipGetErrorName
#undef hipGetErrorString
#undef hipGetLastError
#undef hipPeekAtLastError

namespace contract {
namespace {

constexpr auto kBusy = std::chrono::milliseconds(150);

int g_release = 0;

void ask_for_release() { hipRuntimeGetVersion(&g_release); }

std::string release_text() {
  ask_for_release();
  return "HIP " + std::to_string(g_release / 10'000'000) + "." +
         std::to_string(g_release / 100'000 % 100) + "." +
         std::to_string(g_release % 100'000);
}

int count_devices() {
  int count = 0;
  return hipGetDeviceCount(&count) == hipSuccess ? count : 0;
}

void begin_case() {
  ask_for_release();
  hipSetDevice(0);
  hipGetLastError();
}

}  // namespace

const Vendor kVendor = {release_text, count_devices, begin_case, false};

// --- the runtime under test ----------------------------------------------------------

int release() {
  if (g_release == 0) ask_for_release();
  return g_release;
}

int device_count() {
  int count = 0;
  REQUIRE_OK(hipGetDeviceCount(&count));
  return count;
}

bool device_reads_pageable_memory() {
  constexpr auto kPageableMemoryAccess = static_cast<hipDeviceAttribute_t>(65);
  int value = 0;
  if (simulated()) return false;
  return hipDeviceGetAttribute(&value, kPageableMemoryAccess, 0) != hipSuccess ||
         value != 0;
}

std::string describe(hipError_t error) {
  return std::string(hipGetErrorName(error)) + " (" +
         std::to_string(static_cast<int>(error)) + ")";
}

// --- things that clean up after themselves -------------------------------------------

namespace {

void* allocate_device(size_t bytes) {
  void* pointer = nullptr;
  REQUIRE_OK(hipMalloc(&pointer, bytes));
  return pointer;
}

void* allocate_host(size_t bytes, unsigned flags) {
  void* pointer = nullptr;
  REQUIRE_OK(hipHostMalloc(&pointer, bytes, flags));
  return pointer;
}

void* register_pages(const Pages& pages, unsigned flags) {
  REQUIRE_OK(hipHostRegister(pages.get(), pages.size(), flags));
  return pages.get();
}

hipStream_t create_stream(unsigned flags) {
  hipStream_t stream = nullptr;
  REQUIRE_OK(hipStreamCreateWithFlags(&stream, flags));
  return stream;
}

hipEvent_t create_event(unsigned flags) {
  hipEvent_t event = nullptr;
  REQUIRE_OK(hipEventCreateWithFlags(&event, flags));
  return event;
}

unsigned char* offset_from(void* base, size_t offset) {
  return static_cast<unsigned char*>(base) + offset;
}

}  // namespace

DeviceMemory::DeviceMemory(size_t bytes)
    : Holder(allocate_device(bytes)), size_(bytes) {}

unsigned char* DeviceMemory::at(size_t offset) const {
  return offset_from(get(), offset);
}

HostMemory::HostMemory(size_t bytes, unsigned flags)
    : Holder(allocate_host(bytes, flags)), size_(bytes) {}

unsigned char* HostMemory::at(size_t offset) const {
  return offset_from(get(), offset);
}

RegisteredMemory::RegisteredMemory(size_t bytes, unsigned flags)
    : pages_(bytes), registered_(register_pages(pages_, flags)) {}

Stream::Stream(unsigned flags) : Holder(create_stream(flags)) {}

Event::Event(unsigned flags) : Holder(create_event(flags)) {}

CurrentDevice::CurrentDevice(int device) {
  REQUIRE_OK(hipGetDevice(&before_));
  REQUIRE_OK(hipSetDevice(device));
}

CurrentDevice::~CurrentDevice() { EXPECT_OK(hipSetDevice(before_)); }

Busy::Busy(hipStream_t stream) {
  constexpr size_t kHalf = size_t{256} << 20;
  constexpr int kCopies = 400;
  scratch_ = DeviceMemory(simulated() ? 128 : 2 * kHalf);
  const size_t half = scratch_.size() / 2;
  set_switch("copy_latency_us", std::chrono::microseconds(kBusy).count());
  for (int i = 0; i < (simulated() ? 1 : kCopies); ++i) {
    REQUIRE_OK(hipMemcpyAsync(scratch_.at(half), scratch_.get(), half,
                              hipMemcpyDeviceToDevice, stream));
  }
  set_switch("copy_latency_us", 0);
}

std::chrono::milliseconds Busy::least() {
  return simulated() ? kBusy : std::chrono::milliseconds(0);
}

// --- bytes ---------------------------------------------------------------------------

void upload(void* destination, const Bytes& bytes) {
  REQUIRE_OK(hipMemcpy(destination, bytes.data(), bytes.size(), hipMemcpyHostToDevice));
  REQUIRE_OK(hipDeviceSynchronize());
}

Bytes download(const void* source, size_t count) {
  Bytes bytes(count);
  REQUIRE_OK(hipMemcpy(bytes.data(), source, count, hipMemcpyDeviceToHost));
  REQUIRE_OK(hipDeviceSynchronize());
  return bytes;
}

}  // namespace contract
