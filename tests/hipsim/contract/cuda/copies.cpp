// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "contract.h"

namespace contract {
namespace {

constexpr const char* kDriver = DRIVER;
constexpr const char* kReference = DRIVER "; CUDA Driver API, Memory Management";
constexpr const char* kSynchronization =
    DRIVER "; CUDA Driver API, API synchronization behavior";
constexpr CUresult kInvalid = CUDA_ERROR_INVALID_VALUE;
constexpr size_t kBytes = 4096;

// --- fills ---------------------------------------------------------------------------

CASE(copies, fills, kReference, cuMemsetD8_v2, cuMemsetD8Async) {
  Stream stream;
  DeviceMemory memory(kBytes);
  EXPECT_OK(cuMemsetD8_v2(memory, 1, kBytes));
  EXPECT_OK(cuMemsetD8_v2(memory.at(100), 2, 50));
  EXPECT_OK(cuCtxSynchronize());
  EXPECT_OK(cuMemsetD8Async(memory.at(120), 3, 7, stream));
  Bytes expected(kBytes, 1);
  std::fill_n(expected.begin() + 100, 50, static_cast<unsigned char>(2));
  std::fill_n(expected.begin() + 120, 7, static_cast<unsigned char>(3));
  EXPECT_BYTES(download(memory, kBytes).data(), expected);
}

CASE(copies, fills_that_are_refused, kReference, cuMemsetD8_v2, cuMemsetD8Async) {
  Stream stream;
  DeviceMemory memory(kBytes);
  const Pages pages(kBytes);
  EXPECT_OK(cuMemsetD8_v2(memory, 1, 0));
  EXPECT_OK(cuMemsetD8Async(memory, 1, 0, stream));
  EXPECT_OK(cuMemsetD8_v2(0, 1, 0));
  EXPECT_OK(cuMemsetD8Async(0, 1, 0, stream));
  EXPECT_ERROR(cuMemsetD8_v2(0, 1, 64), kInvalid);
  EXPECT_ERROR(cuMemsetD8Async(0, 1, 64, stream), kInvalid);
  EXPECT_ERROR(cuMemsetD8_v2(memory.at(kBytes - 1), 1, 2), kInvalid);
  if (!device_reads_pageable_memory()) {
    EXPECT_ERROR(cuMemsetD8_v2(as_device(pages.get()), 1, 64), kInvalid);
  }
}

CASE(copies, when_a_fill_returns, kSynchronization, cuMemsetD8_v2) {
  DeviceMemory memory(kBytes);
  HostMemory host(kBytes);
  RegisteredMemory registered(kBytes);
  VirtualMemory virtual_memory(1, granularity());
  const auto fill = [](CUdeviceptr pointer) {
    return when_it_returns([=] { return cuMemsetD8_v2(pointer, 1, 64); });
  };
  const std::string async = kAsynchronous;
  const std::string sync = kSynchronous;
  EXPECT_EQ(fill(memory), async);
  EXPECT_EQ(fill(memory.at(256)), async);
  EXPECT_EQ(fill(virtual_memory.get()), async);
  EXPECT_EQ(fill(virtual_memory.at(4096)), async);
  EXPECT_EQ(fill(as_device(host.get())), sync);
  EXPECT_EQ(fill(as_device(registered.get())), sync);
}

CASE(copies, a_fill_has_no_order_with_a_non_blocking_stream, kSynchronization,
     cuMemsetD8_v2) {
  DeviceMemory memory(kBytes);
  Stream stream;
  const Busy busy(nullptr);
  EXPECT_OK(cuMemsetD8_v2(memory, 1, kBytes));
  EXPECT_OK(cuMemsetD8Async(memory, 2, kBytes, stream));
  EXPECT_OK(cuStreamSynchronize(stream));
  EXPECT_BYTES(download(memory, kBytes).data(), Bytes(kBytes, 1));
}

// --- copies --------------------------------------------------------------------------

CASE(copies, there_and_back, kReference, cuMemcpyHtoD_v2, cuMemcpyDtoH_v2, cuMemcpy) {
  DeviceMemory first(kBytes);
  DeviceMemory second(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  Bytes back(kBytes);
  EXPECT_OK(cuMemcpyHtoD_v2(first, bytes.data(), kBytes));
  EXPECT_OK(cuMemcpy(second, first, kBytes));
  EXPECT_OK(cuMemcpyDtoH_v2(back.data(), second, kBytes));
  EXPECT_BYTES(back.data(), bytes);
  Bytes again(kBytes);
  EXPECT_OK(cuMemcpy(as_device(again.data()), second, kBytes));
  EXPECT_BYTES(again.data(), bytes);
  Bytes within_host(kBytes);
  EXPECT_OK(cuMemcpy(as_device(within_host.data()), as_device(bytes.data()), kBytes));
  EXPECT_BYTES(within_host.data(), bytes);
}

CASE(copies, asynchronous_there_and_back, kReference, cuMemcpyHtoDAsync_v2,
     cuMemcpyDtoHAsync_v2, cuMemcpyDtoDAsync_v2, cuMemcpyAsync) {
  Stream stream;
  DeviceMemory first(kBytes);
  DeviceMemory second(kBytes);
  HostMemory host(kBytes);
  RegisteredMemory back(kBytes);
  HostMemory again(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  std::copy(bytes.begin(), bytes.end(), host.at(0));
  EXPECT_OK(cuMemcpyHtoDAsync_v2(first, host, kBytes, stream));
  EXPECT_OK(cuMemcpyDtoDAsync_v2(second, first, kBytes, stream));
  EXPECT_OK(cuMemcpyDtoHAsync_v2(back.get(), second, kBytes, stream));
  EXPECT_OK(
      cuMemcpyAsync(as_device(again.get()), as_device(back.get()), kBytes, stream));
  EXPECT_OK(cuStreamSynchronize(stream));
  EXPECT_BYTES(back.get(), bytes);
  EXPECT_BYTES(again.get(), bytes);
}

CASE(copies, copies_that_are_refused, kReference, cuMemcpyHtoD_v2, cuMemcpyDtoH_v2,
     cuMemcpyAsync) {
  Stream stream;
  DeviceMemory memory(kBytes);
  Bytes host(2 * kBytes);
  EXPECT_OK(cuMemcpyHtoD_v2(memory, host.data(), 0));
  EXPECT_OK(cuMemcpyHtoD_v2(0, nullptr, 0));
  EXPECT_OK(cuMemcpyAsync(0, 0, 0, stream));
  EXPECT_ERROR(cuMemcpyHtoD_v2(memory, nullptr, 64), kInvalid);
  EXPECT_ERROR(cuMemcpyHtoD_v2(0, host.data(), 64), kInvalid);
  EXPECT_ERROR(cuMemcpyDtoH_v2(nullptr, memory, 64), kInvalid);
  EXPECT_ERROR(cuMemcpyDtoH_v2(host.data(), 0, 64), kInvalid);
  EXPECT_ERROR(cuMemcpyAsync(memory, 0, 64, stream), kInvalid);
  EXPECT_ERROR(cuMemcpyHtoD_v2(memory.at(1), host.data(), kBytes), kInvalid);
  EXPECT_ERROR(cuMemcpyDtoH_v2(host.data(), memory.at(1), kBytes), kInvalid);
  EXPECT_ERROR(cuMemcpyAsync(memory.at(1), as_device(host.data()), kBytes, stream),
               kInvalid);
}

// Pageable memory is not a device's; what else the calls' names say does not matter.
CASE(copies, calls_that_say_the_wrong_direction, kDriver, cuMemcpyHtoD_v2,
     cuMemcpyDtoH_v2, cuMemcpyDtoDAsync_v2) {
  Stream stream;
  DeviceMemory first(kBytes);
  DeviceMemory second(kBytes);
  HostMemory pinned(kBytes);
  Bytes pageable(kBytes);
  const auto as_host = [](CUdeviceptr pointer) {
    return reinterpret_cast<void*>(pointer);
  };
  EXPECT_OK(cuMemcpyHtoD_v2(first, as_host(second), 64));
  EXPECT_OK(cuMemcpyDtoH_v2(as_host(first), second, 64));
  EXPECT_OK(cuMemcpyHtoD_v2(as_device(pinned.get()), pageable.data(), 64));
  EXPECT_OK(cuMemcpyDtoDAsync_v2(first, as_device(pinned.get()), 64, stream));
  if (!device_reads_pageable_memory()) {
    EXPECT_ERROR(cuMemcpyHtoD_v2(as_device(pageable.data()), pinned, 64), kInvalid);
    EXPECT_ERROR(cuMemcpyDtoH_v2(pinned, as_device(pageable.data()), 64), kInvalid);
    EXPECT_ERROR(cuMemcpyDtoDAsync_v2(first, as_device(pageable.data()), 64, stream),
                 kInvalid);
  }
  EXPECT_OK(cuCtxSynchronize());
}

CASE(copies, when_a_synchronous_copy_returns, kSynchronization, cuMemcpy) {
  DeviceMemory first(kBytes);
  DeviceMemory second(kBytes);
  HostMemory pinned(kBytes);
  HostMemory other(kBytes);
  Pages pageable(kBytes);
  const auto copy = [](CUdeviceptr to, CUdeviceptr from) {
    return when_it_returns([=] { return cuMemcpy(to, from, 64); });
  };
  const std::string async = kAsynchronous;
  const std::string sync = kSynchronous;
  EXPECT_EQ(copy(first, second), async);
  EXPECT_EQ(copy(first, as_device(pinned.get())), sync);
  EXPECT_EQ(copy(as_device(pinned.get()), first), sync);
  EXPECT_EQ(copy(first, as_device(pageable.get())), sync);
  EXPECT_EQ(copy(as_device(pageable.get()), first), sync);
  EXPECT_EQ(copy(as_device(pinned.get()), as_device(other.get())), sync);
}

CASE(copies, when_an_asynchronous_copy_returns, kSynchronization, cuMemcpyAsync) {
  DeviceMemory first(kBytes);
  DeviceMemory second(kBytes);
  HostMemory pinned(kBytes);
  HostMemory other(kBytes);
  Pages pageable(2 * kBytes);
  Stream stream;
  const auto copy = [&](CUdeviceptr to, CUdeviceptr from) {
    return when_it_returns([&] { return cuMemcpyAsync(to, from, 64, stream); }, stream);
  };
  const std::string async = kAsynchronous;
  const std::string sync = kSynchronous;
  EXPECT_EQ(copy(first, second), async);
  EXPECT_EQ(copy(first, as_device(pinned.get())), async);
  EXPECT_EQ(copy(as_device(pinned.get()), first), async);
  EXPECT_EQ(copy(first, as_device(pageable.get())), async);
  EXPECT_EQ(copy(as_device(pageable.get()), first), sync);
  EXPECT_EQ(copy(as_device(pinned.get()), as_device(other.get())), sync);
  EXPECT_EQ(copy(as_device(pageable.get()), as_device(pageable.at(kBytes))), sync);
}

CASE(copies, when_a_large_copy_from_pageable_memory_returns, kSynchronization,
     cuMemcpyHtoDAsync_v2) {
  constexpr size_t kLarge = size_t{8} << 20;
  DeviceMemory memory(kLarge);
  Pages pageable(kLarge);
  Stream stream;
  const std::string when = when_it_returns(
      [&] { return cuMemcpyHtoDAsync_v2(memory, pageable.get(), kLarge, stream); },
      stream);
  EXPECT_EQ(when, std::string(kSynchronous));
}

CASE(copies, of_a_pageable_source_that_changes, kSynchronization,
     cuMemcpyHtoDAsync_v2) {
  DeviceMemory memory(kBytes);
  Bytes pageable = random_bytes(kBytes, 1);
  const Bytes before = pageable;
  Stream stream;
  const Busy busy(stream);
  EXPECT_OK(cuMemcpyHtoDAsync_v2(memory, pageable.data(), kBytes, stream));
  std::fill(pageable.begin(), pageable.end(), static_cast<unsigned char>(0));
  EXPECT_OK(cuStreamSynchronize(stream));
  EXPECT_BYTES(download(memory, kBytes).data(), before);
}

CASE(copies, on_streams_that_do_not_exist, "none: the simulator's own", cuMemcpyAsync) {
  if (!simulated()) SKIP("undefined on a real driver");
  DeviceMemory memory(kBytes);
  const CUstream gone = Stream().get();
  EXPECT_ERROR(cuMemcpyAsync(memory, memory, 64, gone), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_ERROR(cuMemcpyAsync(memory, memory, 64, CU_STREAM_PER_THREAD),
               CUDA_ERROR_INVALID_HANDLE);
}

CASE(copies, between_devices, kReference, cuMemcpy) {
  need_devices(2);
  DeviceMemory here(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(here, bytes);
  CurrentDevice other(1);
  DeviceMemory there(kBytes);
  EXPECT_OK(cuMemcpy(there, here, kBytes));
  EXPECT_BYTES(download(there, kBytes).data(), bytes);
}

// --- planes --------------------------------------------------------------------------

// Every byte of `rows` rows that lie `pitch` apart.
Bytes rows_of(const Bytes& all, size_t pitch, size_t width, size_t rows) {
  Bytes found;
  for (size_t row = 0; row < rows; ++row) {
    found.insert(found.end(), all.begin() + static_cast<long>(row * pitch),
                 all.begin() + static_cast<long>(row * pitch + width));
  }
  return found;
}

CUDA_MEMCPY2D to_device(CUdeviceptr device, size_t device_pitch, const void* host,
                        size_t host_pitch, size_t width, size_t height) {
  CUDA_MEMCPY2D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = host;
  copy.srcPitch = host_pitch;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = device;
  copy.dstPitch = device_pitch;
  copy.WidthInBytes = width;
  copy.Height = height;
  return copy;
}

CASE(planes, there_and_back, kReference, cuMemcpy2D_v2, cuMemcpy2DAsync_v2) {
  DeviceMemory device(64 * 32);
  Stream stream;
  const Bytes bytes = random_bytes(48 * 32, 1);
  const CUDA_MEMCPY2D down = to_device(device, 64, bytes.data(), 48, 40, 32);
  EXPECT_OK(cuMemsetD8_v2(device, 0, device.size()));
  EXPECT_OK(cuMemcpy2D_v2(&down));
  const Bytes expected = rows_of(bytes, 48, 40, 32);
  EXPECT_BYTES(rows_of(download(device, 64 * 32), 64, 40, 32).data(), expected);
  HostMemory back(50 * 32);
  CUDA_MEMCPY2D up = {};
  up.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  up.srcDevice = device;
  up.srcPitch = 64;
  up.dstMemoryType = CU_MEMORYTYPE_HOST;
  up.dstHost = back;
  up.dstPitch = 50;
  up.WidthInBytes = 40;
  up.Height = 32;
  EXPECT_OK(cuMemcpy2DAsync_v2(&up, stream));
  EXPECT_OK(cuStreamSynchronize(stream));
  const Bytes all(back.at(0), back.at(50 * 32));
  EXPECT_BYTES(rows_of(all, 50, 40, 32).data(), expected);
}

CASE(planes, of_memory_that_tells_itself, kReference, cuMemcpy2D_v2) {
  DeviceMemory device(64 * 8);
  const Bytes bytes = random_bytes(64 * 8, 1);
  CUDA_MEMCPY2D copy = to_device(device, 64, nullptr, 64, 64, 8);
  copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
  copy.srcDevice = as_device(bytes.data());
  EXPECT_OK(cuMemcpy2D_v2(&copy));
  EXPECT_BYTES(download(device, 64 * 8).data(), bytes);
}

CASE(planes, with_an_origin, kReference, cuMemcpy2D_v2) {
  DeviceMemory device(64 * 8);
  const Bytes bytes = random_bytes(64 * 8, 1);
  EXPECT_OK(cuMemsetD8_v2(device, 0, device.size()));
  CUDA_MEMCPY2D copy = to_device(device, 64, bytes.data(), 64, 10, 3);
  copy.srcXInBytes = 5;
  copy.srcY = 2;
  copy.dstXInBytes = 7;
  copy.dstY = 4;
  EXPECT_OK(cuMemcpy2D_v2(&copy));
  const Bytes found = download(device, 64 * 8);
  for (size_t row = 0; row < 3; ++row) {
    for (size_t column = 0; column < 10; ++column) {
      const size_t to = (4 + row) * 64 + 7 + column;
      REQUIRE_EQ(found[to], bytes[(2 + row) * 64 + 5 + column]);
    }
  }
}

// Beyond CU_DEVICE_ATTRIBUTE_MAX_PITCH, which no call holds anyone to.
CASE(planes, with_rows_further_apart_than_the_largest_pitch, kDriver,
     cuMemcpy2DAsync_v2) {
  constexpr size_t kWidth = 256;
  const Bytes bytes = random_bytes(2 * kWidth, 1);
  HostMemory host(4 * kWidth);
  Stream stream;
  std::copy(bytes.begin(), bytes.end(), host.at(0));
  for (const size_t pitch : {size_t{1} << 31, size_t{3} << 30}) {
    DeviceMemory device(pitch + kWidth);
    const CUDA_MEMCPY2D there = to_device(device, pitch, host, kWidth, kWidth, 2);
    CUDA_MEMCPY2D back = {};
    back.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    back.srcDevice = device;
    back.srcPitch = pitch;
    back.dstMemoryType = CU_MEMORYTYPE_HOST;
    back.dstHost = host.at(2 * kWidth);
    back.dstPitch = kWidth;
    back.WidthInBytes = kWidth;
    back.Height = 2;
    EXPECT_OK(cuMemcpy2DAsync_v2(&there, stream));
    EXPECT_OK(cuMemcpy2DAsync_v2(&back, stream));
    EXPECT_OK(cuStreamSynchronize(stream));
    EXPECT_BYTES(host.at(2 * kWidth), bytes);
    EXPECT_BYTES(download(device.at(pitch), kWidth).data(),
                 Bytes(bytes.begin() + kWidth, bytes.end()));
    std::fill_n(host.at(2 * kWidth), 2 * kWidth, static_cast<unsigned char>(0));
  }
}

CASE(planes, across_two_registrations, kDriver, cuMemcpy2DAsync_v2,
     cuMemHostRegister_v2) {
  constexpr size_t kPiece = size_t{2} << 20;
  constexpr size_t kPitch = 4096;
  const Pages pages(2 * kPiece);
  REQUIRE_OK(cuMemHostRegister_v2(pages.at(0), kPiece, 0));
  const Holder<void*, &cuMemHostUnregister> first(pages.at(0));
  REQUIRE_OK(cuMemHostRegister_v2(pages.at(kPiece), kPiece, 0));
  const Holder<void*, &cuMemHostUnregister> second(pages.at(kPiece));
  DeviceMemory device(4 * kPitch);
  Stream stream;
  const auto load = [&](size_t begin) {
    CUDA_MEMCPY2D copy = to_device(device, kPitch, nullptr, kPitch, 256, 4);
    copy.srcMemoryType = copy.dstMemoryType = CU_MEMORYTYPE_UNIFIED;
    copy.srcDevice = as_device(pages.at(begin));
    return cuMemcpy2DAsync_v2(&copy, stream);
  };
  EXPECT_OK(load(kPiece - 4 * kPitch));
  EXPECT_OK(load(kPiece));
  EXPECT_ERROR(load(kPiece - 2 * kPitch), kInvalid);
  EXPECT_OK(cuStreamSynchronize(stream));
}

// Zero is the pitch of rows without a gap, and that of a single row is of no account.
CASE(planes, pitches, kDriver, cuMemcpy2D_v2, cuMemcpy2DAsync_v2) {
  DeviceMemory device(4096);
  Stream stream;
  const Bytes bytes(4096);
  const auto copy = [&](size_t device_pitch, size_t host_pitch, size_t width,
                        size_t height) {
    const CUDA_MEMCPY2D plane =
        to_device(device, device_pitch, bytes.data(), host_pitch, width, height);
    const CUresult sync = cuMemcpy2D_v2(&plane);
    const CUresult async = cuMemcpy2DAsync_v2(&plane, stream);
    EXPECT_EQ(async, sync);
    REQUIRE_OK(cuStreamSynchronize(stream));
    return sync;
  };
  EXPECT_OK(copy(64, 64, 64, 4));
  EXPECT_ERROR(copy(63, 64, 64, 4), kInvalid);
  EXPECT_ERROR(copy(64, 63, 64, 4), kInvalid);
  EXPECT_ERROR(copy(63, 64, 64, 1), kInvalid);
  EXPECT_OK(copy(0, 64, 64, 4));
  EXPECT_OK(copy(0, 0, 64, 4));
  EXPECT_OK(copy(0, 0, 64, 1));
  EXPECT_OK(copy(size_t{1} << 31, 64, 64, 1));
  EXPECT_OK(copy(64, size_t{1} << 31, 64, 1));
  EXPECT_OK(copy((size_t{1} << 31) - 1, 64, 64, 1));
  EXPECT_OK(copy(64, 64, 0, 4));
  EXPECT_OK(copy(64, 64, 64, 0));
  EXPECT_OK(copy(0, 0, 0, 0));
  EXPECT_ERROR(copy(64, 64, 64, 65), kInvalid);
  EXPECT_ERROR(copy(1024, 64, 64, 5), kInvalid);
}

CASE(planes, with_pitches_and_origins_that_do_not_fit, kReference, cuMemcpy2D_v2) {
  DeviceMemory device(4096);
  const Bytes bytes(4096);
  CUDA_MEMCPY2D copy = to_device(device, 64, bytes.data(), 64, 60, 4);
  copy.srcXInBytes = 5;
  EXPECT_ERROR(cuMemcpy2D_v2(&copy), kInvalid);
  copy.srcXInBytes = 0;
  copy.dstXInBytes = 5;
  EXPECT_ERROR(cuMemcpy2D_v2(&copy), kInvalid);
}

CASE(planes, of_memory_there_is_not, kReference, cuMemcpy2D_v2) {
  DeviceMemory device(4096);
  const Bytes bytes(4096);
  const CUDA_MEMCPY2D good = to_device(device, 64, bytes.data(), 64, 64, 4);
  CUDA_MEMCPY2D copy = good;
  copy.srcHost = nullptr;
  EXPECT_ERROR(cuMemcpy2D_v2(&copy), kInvalid);
  copy = good;
  copy.dstDevice = 0;
  EXPECT_ERROR(cuMemcpy2D_v2(&copy), kInvalid);
  copy = good;
  copy.srcMemoryType = static_cast<CUmemorytype>(0);
  EXPECT_ERROR(cuMemcpy2D_v2(&copy), kInvalid);
  copy.srcMemoryType = static_cast<CUmemorytype>(5);
  EXPECT_ERROR(cuMemcpy2D_v2(&copy), kInvalid);
  copy = good;
  copy.dstMemoryType = static_cast<CUmemorytype>(0);
  EXPECT_ERROR(cuMemcpy2D_v2(&copy), kInvalid);
  const About pinned("pinned memory as a device's");
  HostMemory host(4096);
  copy = good;
  copy.srcMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.srcDevice = as_device(host.get());
  EXPECT_OK(cuMemcpy2D_v2(&copy));
  if (!device_reads_pageable_memory()) {
    const About pageable("pageable memory as a device's");
    copy.srcDevice = as_device(bytes.data());
    EXPECT_ERROR(cuMemcpy2D_v2(&copy), kInvalid);
  }
  const About hosts("device memory as the host's");
  copy = good;
  copy.srcHost = reinterpret_cast<void*>(device.get());
  copy.dstDevice = device.at(2048);
  EXPECT_OK(cuMemcpy2D_v2(&copy));
}

CHILD(copies_no_plane) {
  make_ready();
  const auto number = [](CUresult result) {
    return std::to_string(static_cast<int>(result));
  };
  write_to_parent(number(cuMemcpy2D_v2(nullptr)) + " " +
                  number(cuMemcpy2DAsync_v2(nullptr, nullptr)) + " " +
                  number(cuMemcpy3DAsync_v2(nullptr, nullptr)));
  return 0;
}

CASE(planes, that_are_not_given, kReference, cuMemcpy2D_v2, cuMemcpy2DAsync_v2,
     cuMemcpy3DAsync_v2) {
  Child child("copies_no_plane");
  const std::string said = child.read_line();
  EXPECT_EQ(said, std::string("1 1 1"));
  EXPECT_EQ(child.wait(), 0);
}

CASE(planes, when_a_plane_returns, kSynchronization, cuMemcpy2D_v2,
     cuMemcpy2DAsync_v2) {
  DeviceMemory device(4096);
  HostMemory pinned(4096);
  Pages pageable(4096);
  Stream stream;
  for (const void* host : {pinned.get(), pageable.get()}) {
    const About about(host == pinned.get() ? "pinned" : "pageable");
    const CUDA_MEMCPY2D copy = to_device(device, 64, host, 64, 32, 8);
    const std::string blocking = when_it_returns([&] { return cuMemcpy2D_v2(&copy); });
    EXPECT_EQ(blocking, std::string(kSynchronous));
    const std::string queued =
        when_it_returns([&] { return cuMemcpy2DAsync_v2(&copy, stream); }, stream);
    EXPECT_EQ(queued, std::string(kAsynchronous));
  }
}

// --- boxes ---------------------------------------------------------------------------

CUDA_MEMCPY3D box_to_device(CUdeviceptr device, size_t device_pitch,
                            size_t device_height, const void* host, size_t host_pitch,
                            size_t host_height, size_t width, size_t height,
                            size_t depth) {
  CUDA_MEMCPY3D copy = {};
  copy.srcMemoryType = CU_MEMORYTYPE_HOST;
  copy.srcHost = host;
  copy.srcPitch = host_pitch;
  copy.srcHeight = host_height;
  copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  copy.dstDevice = device;
  copy.dstPitch = device_pitch;
  copy.dstHeight = device_height;
  copy.WidthInBytes = width;
  copy.Height = height;
  copy.Depth = depth;
  return copy;
}

CASE(boxes, there, kReference, cuMemcpy3DAsync_v2) {
  DeviceMemory device(32 * 8 * 4);
  Stream stream;
  HostMemory host(24 * 6 * 4);
  const Bytes bytes = random_bytes(host.size(), 1);
  std::copy(bytes.begin(), bytes.end(), host.at(0));
  REQUIRE_OK(cuMemsetD8Async(device, 0, device.size(), stream));
  CUDA_MEMCPY3D copy = box_to_device(device, 32, 8, host, 24, 6, 10, 3, 2);
  copy.srcXInBytes = 2;
  copy.srcY = 1;
  copy.srcZ = 1;
  copy.dstXInBytes = 4;
  copy.dstY = 3;
  copy.dstZ = 2;
  EXPECT_OK(cuMemcpy3DAsync_v2(&copy, stream));
  EXPECT_OK(cuStreamSynchronize(stream));
  const Bytes found = download(device, device.size());
  for (size_t z = 0; z < 2; ++z) {
    for (size_t y = 0; y < 3; ++y) {
      for (size_t x = 0; x < 10; ++x) {
        REQUIRE_EQ(found[((2 + z) * 8 + 3 + y) * 32 + 4 + x],
                   bytes[((1 + z) * 6 + 1 + y) * 24 + 2 + x]);
      }
    }
  }
}

// Zero is the pitch of rows without a gap and the height of slices without one.
CASE(boxes, pitches_and_heights, kDriver, cuMemcpy3DAsync_v2) {
  DeviceMemory device(8192);
  HostMemory host(8192);
  Stream stream;
  const auto copy = [&](size_t pitch, size_t height, size_t box_height, size_t depth) {
    const CUDA_MEMCPY3D box =
        box_to_device(device, pitch, height, host, 64, 8, 64, box_height, depth);
    return cuMemcpy3DAsync_v2(&box, stream);
  };
  EXPECT_OK(copy(64, 8, 8, 4));
  EXPECT_ERROR(copy(63, 8, 8, 4), kInvalid);
  EXPECT_ERROR(copy(64, 7, 8, 4), kInvalid);
  EXPECT_ERROR(copy(64, 7, 8, 1), kInvalid);
  EXPECT_OK(copy(64, 0, 8, 4));
  EXPECT_OK(copy(64, 0, 8, 1));
  EXPECT_OK(copy(0, 8, 8, 4));
  EXPECT_OK(copy(0, 0, 1, 1));
  EXPECT_OK(copy(64, 8, 0, 4));
  EXPECT_OK(copy(64, 8, 8, 0));
  EXPECT_ERROR(copy(64, 8, 8, 17), kInvalid);
  EXPECT_OK(copy(size_t{1} << 31, 8, 1, 1));
  EXPECT_OK(cuCtxSynchronize());
}

CASE(boxes, fields_that_must_be_zero_are_not_looked_at, kDriver, cuMemcpy3DAsync_v2) {
  DeviceMemory device(4096);
  HostMemory host(4096);
  Stream stream;
  const CUDA_MEMCPY3D good = box_to_device(device, 64, 8, host, 64, 8, 64, 8, 4);
  CUDA_MEMCPY3D copy = good;
  copy.srcLOD = 1;
  EXPECT_OK(cuMemcpy3DAsync_v2(&copy, stream));
  copy = good;
  copy.dstLOD = 1;
  EXPECT_OK(cuMemcpy3DAsync_v2(&copy, stream));
  copy = good;
  copy.reserved0 = &copy;
  EXPECT_OK(cuMemcpy3DAsync_v2(&copy, stream));
  copy = good;
  copy.reserved1 = &copy;
  EXPECT_OK(cuMemcpy3DAsync_v2(&copy, stream));
  EXPECT_OK(cuStreamSynchronize(stream));
}

}  // namespace
}  // namespace contract
