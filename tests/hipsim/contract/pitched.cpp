// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <functional>

#include "contract.h"

namespace contract {
namespace {

constexpr size_t kRoom = size_t{2} << 20;
constexpr unsigned char kUntouched = 0xA5;

enum class Side { kDevice, kPinned, kPageable };

struct Direction {
  Side to;
  Side from;
  hipMemcpyKind kind;
};

constexpr Direction kDirections[] = {
    {Side::kDevice, Side::kPinned, hipMemcpyHostToDevice},
    {Side::kDevice, Side::kPageable, hipMemcpyHostToDevice},
    {Side::kPinned, Side::kDevice, hipMemcpyDeviceToHost},
    {Side::kPageable, Side::kDevice, hipMemcpyDeviceToHost},
    {Side::kDevice, Side::kDevice, hipMemcpyDeviceToDevice},
    {Side::kDevice, Side::kPinned, hipMemcpyDefault},
    {Side::kPinned, Side::kDevice, hipMemcpyDefault},
};

// Memory of every kind, once to write to and once to read from.
class Memories {
 public:
  unsigned char* target(Side side) { return address(side, 0); }
  unsigned char* source(Side side) { return address(side, kRoom); }

  void put(Side side, unsigned char* at, const Bytes& bytes) {
    if (side == Side::kDevice) {
      upload(at, bytes);
    } else {
      std::copy(bytes.begin(), bytes.end(), at);
    }
  }
  Bytes get(Side side, const unsigned char* at, size_t count) {
    return side == Side::kDevice ? download(at, count) : Bytes(at, at + count);
  }

 private:
  unsigned char* address(Side side, size_t offset) {
    switch (side) {
      case Side::kDevice:
        return device_.at(offset);
      case Side::kPinned:
        return pinned_.at(offset);
      default:
        return pageable_.at(offset);
    }
  }

  DeviceMemory device_{2 * kRoom};
  RegisteredMemory pinned_{2 * kRoom};
  Pages pageable_{2 * kRoom};
};

// --- two dimensions ------------------------------------------------------------------

struct Rectangle {
  size_t width;
  size_t height;
  size_t target_pitch;
  size_t source_pitch;
  size_t target_offset = 0;
  size_t source_offset = 0;
};

using Copy2D = std::function<hipError_t(void* to, size_t to_pitch, const void* from,
                                        size_t from_pitch, size_t width, size_t height,
                                        hipMemcpyKind kind)>;

// The same with a loop on the host, compared with every byte around the rows.
bool expect_rectangle(Memories& memories, const Direction& direction,
                      const Rectangle& shape, const Copy2D& copy) {
  const Bytes source = random_bytes(
      shape.source_offset + shape.source_pitch * (shape.height - 1) + shape.width,
      static_cast<unsigned>(shape.width * 31 + shape.height));
  Bytes expected(shape.target_offset + shape.target_pitch * shape.height + 32,
                 kUntouched);
  REQUIRE(expected.size() <= kRoom && source.size() <= kRoom);
  memories.put(direction.from, memories.source(direction.from), source);
  memories.put(direction.to, memories.target(direction.to), expected);
  for (size_t row = 0; row < shape.height; ++row) {
    std::memcpy(&expected[shape.target_offset + row * shape.target_pitch],
                &source[shape.source_offset + row * shape.source_pitch], shape.width);
  }
  REQUIRE_OK(copy(memories.target(direction.to) + shape.target_offset,
                  shape.target_pitch,
                  memories.source(direction.from) + shape.source_offset,
                  shape.source_pitch, shape.width, shape.height, direction.kind));
  REQUIRE_OK(hipDeviceSynchronize());
  const Bytes actual =
      memories.get(direction.to, memories.target(direction.to), expected.size());
  return EXPECT_BYTES(actual.data(), expected);
}

void expect_rectangles(const Copy2D& copy) {
  Memories memories;
  for (const Direction& direction : kDirections) {
    for (const size_t width : {1, 3, 4, 16, 17, 100, 256}) {
      for (const size_t height : {1, 2, 7}) {
        for (const Rectangle& shape : {Rectangle{width, height, width, width},
                                       Rectangle{width, height, width + 1, width + 3},
                                       Rectangle{width, height, 512, width},
                                       Rectangle{width, height, width, 512, 3, 1},
                                       Rectangle{width, height, 4096, 512, 4, 8}}) {
          if (!expect_rectangle(memories, direction, shape, copy)) return;
        }
      }
    }
  }
}

CASE(pitched, rectangles_are_exact, "hip-tests memory/hipMemcpy2D.cc", hipMemcpy2D) {
  expect_rectangles([](auto... arguments) { return hipMemcpy2D(arguments...); });
}

CASE(pitched, async_rectangles_are_exact, "hip-tests memory/hipMemcpy2DAsync.cc",
     hipMemcpy2DAsync) {
  Stream stream;
  expect_rectangles(
      [&](auto... arguments) { return hipMemcpy2DAsync(arguments..., stream.get()); });
}

// The layout of KV blocks: short rows that lie far apart on one side.
CASE(pitched, rows_far_apart, "clr rocblit.cpp; ROCr hsa_amd_memory_async_copy_rect",
     hipMemcpy2DAsync) {
  Memories memories;
  Stream stream;
  const Rectangle out{4096, 4, 512 * 1024 - 4096, 4096};
  const Rectangle in{4096, 4, 4096, 512 * 1024 - 4096};
  for (const Direction& direction : kDirections) {
    for (const Rectangle& shape : {out, in}) {
      expect_rectangle(memories, direction, shape, [&](auto... arguments) {
        return hipMemcpy2DAsync(arguments..., stream.get());
      });
    }
  }
}

// That it is the copy engines that make these is what hipsim accounts.
CASE(pitched, rectangles_within_a_packet_are_one,
     "clr rocblit.cpp; ROCr amd_blit_sdma.cpp", hipMemcpy2DAsync, hipMemcpy3DAsync) {
  constexpr size_t kPage = 16 * 1024;
  constexpr size_t kRows = 8;
  constexpr size_t kFar = size_t{1} << 20;
  DeviceMemory device((kRows - 1) * kFar + kPage);
  RegisteredMemory host(kRows * kPage);
  Stream stream;
  const uint64_t packets = stat("pitched_packets");
  const uint64_t copies = stat("copies.sdma.h2d");
  const Bytes bytes = random_bytes(kRows * kPage, 1);
  std::copy(bytes.begin(), bytes.end(), host.at(0));
  EXPECT_OK(hipMemcpy2DAsync(device, kFar, host.get(), kPage, kPage, kRows,
                             hipMemcpyDefault, stream));
  EXPECT_OK(hipStreamSynchronize(stream));
  for (const size_t row : {size_t{0}, kRows - 1}) {
    const auto expected = bytes.begin() + static_cast<long>(row * kPage);
    EXPECT_BYTES(download(device.at(row * kFar), kPage).data(),
                 Bytes(expected, expected + static_cast<long>(kPage)));
  }
  // The same with a smaller pitch, of which kFar is a multiple, as slices of one row.
  std::fill_n(host.at(0), host.size(), kUntouched);
  hipMemcpy3DParms slices = {};
  slices.srcPtr = {device.get(), kPage, kPage, kFar / kPage};
  slices.dstPtr = {host.get(), kPage, kPage, 1};
  slices.extent = {kPage, 1, kRows};
  slices.kind = hipMemcpyDefault;
  EXPECT_OK(hipMemcpy3DAsync(&slices, stream));
  EXPECT_OK(hipStreamSynchronize(stream));
  EXPECT_BYTES(host.get(), bytes);
  if (!simulated()) return;
  EXPECT_EQ(stat("pitched_packets"), packets + 2);
  EXPECT_EQ(stat("copies.sdma.h2d"), copies + 1);
}

CASE(pitched, a_rectangle_may_end_with_its_memory, "clr hip_memory.cpp", hipMemcpy2D) {
  constexpr size_t kWidth = 100;
  constexpr size_t kPitch = 128;
  constexpr size_t kHeight = 5;
  constexpr size_t kBytes = kPitch * (kHeight - 1) + kWidth;
  DeviceMemory device(kBytes);
  RegisteredMemory host(kPitch * kHeight);
  EXPECT_OK(hipMemcpy2D(device, kPitch, host.get(), kPitch, kWidth, kHeight,
                        hipMemcpyHostToDevice));
  EXPECT_OK(hipMemcpy2D(host.get(), kPitch, device, kPitch, kWidth, kHeight,
                        hipMemcpyDeviceToHost));
}

CASE(pitched, a_rectangle_beyond_its_memory, "clr hip_memory.cpp", hipMemcpy2D,
     hipMemcpy2DAsync) {
  constexpr size_t kWidth = 100;
  constexpr size_t kPitch = 128;
  constexpr size_t kHeight = 5;
  DeviceMemory device(kPitch * (kHeight - 1) + kWidth - 1);
  RegisteredMemory host(kPitch * kHeight);
  Stream stream;
  EXPECT_ERROR(hipMemcpy2D(device, kPitch, host.get(), kPitch, kWidth, kHeight,
                           hipMemcpyHostToDevice),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy2DAsync(host.get(), kPitch, device, kPitch, kWidth, kHeight,
                                hipMemcpyDeviceToHost, stream),
               hipErrorInvalidValue);
}

struct Pair {
  DeviceMemory device{64 * 1024};
  RegisteredMemory host{64 * 1024};
  Stream stream;
};

CASE(pitched, rows_longer_than_their_pitch, "hip-tests memory/hipMemcpy2D.cc",
     hipMemcpy2D, hipMemcpy2DAsync) {
  Pair pair;
  for (const auto& [to_pitch, from_pitch] :
       {std::pair{99, 128}, std::pair{128, 99}, std::pair{0, 128}, std::pair{99, 99}}) {
    EXPECT_ERROR(hipMemcpy2D(pair.device, to_pitch, pair.host.get(), from_pitch, 100, 5,
                             hipMemcpyHostToDevice),
                 hipErrorInvalidPitchValue);
    EXPECT_ERROR(hipMemcpy2DAsync(pair.device, to_pitch, pair.host.get(), from_pitch,
                                  100, 5, hipMemcpyHostToDevice, pair.stream),
                 hipErrorInvalidPitchValue);
  }
}

CASE(pitched, pitches_beyond_the_devices_limit, "hip-tests memory/hipMemcpy2D.cc",
     hipMemcpy2D, hipDeviceGetAttribute) {
  Pair pair;
  int limit = 0;
  REQUIRE_OK(hipDeviceGetAttribute(&limit, hipDeviceAttributeMaxPitch, 0));
  const size_t beyond = static_cast<size_t>(limit) + 1;
  EXPECT_ERROR(hipMemcpy2D(pair.device, beyond, pair.host.get(), 128, 100, 2,
                           hipMemcpyHostToDevice),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy2D(pair.host.get(), 128, pair.device, beyond, 100, 2,
                           hipMemcpyDeviceToHost),
               hipErrorInvalidValue);
}

CASE(pitched, the_devices_limit_is_the_last_pitch,
     "hip-tests memory/hipMemcpy2D.cc; docs/hipsim.md, Where it is stricter",
     hipMemcpy2D, hipMemcpy2DAsync) {
  if (!simulated()) SKIP("clr was read to check nothing but the size of the memory");
  int limit = 0;
  REQUIRE_OK(hipDeviceGetAttribute(&limit, hipDeviceAttributeMaxPitch, 0));
  const size_t beyond = static_cast<size_t>(limit) + 1;
  DeviceMemory device(beyond + 4096);
  RegisteredMemory host(4096);
  Stream stream;
  const auto store = [&](size_t pitch) {
    return hipMemcpy2D(host.get(), 128, device, pitch, 100, 2, hipMemcpyDefault);
  };
  EXPECT_OK(store(beyond - 4));
  EXPECT_OK(store(limit));
  EXPECT_ERROR(store(beyond), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy2DAsync(device, beyond, host.get(), 128, 100, 2,
                                hipMemcpyDefault, stream),
               hipErrorInvalidValue);
}

CASE(pitched, a_rectangle_stays_in_one_registration, "clr hip_memory.cpp", hipMemcpy2D,
     hipMemcpy2DAsync) {
  // clr compares the extent with the size of the whole registration, wherever the
  // rectangle begins: from here on it is too much by any reading.
  constexpr size_t kPiece = 4 * 4096;
  Pages pages(2 * kPiece);
  REQUIRE_OK(hipHostRegister(pages.at(0), kPiece, 0));
  const Holder<void*, &hipHostUnregister> first(pages.at(0));
  REQUIRE_OK(hipHostRegister(pages.at(kPiece), kPiece, 0));
  const Holder<void*, &hipHostUnregister> second(pages.at(kPiece));
  DeviceMemory device(2 * kPiece);
  Stream stream;
  for (const hipMemcpyKind kind : {hipMemcpyDefault, hipMemcpyHostToDevice}) {
    EXPECT_OK(hipMemcpy2D(device, 4096, pages.get(), 4096, 100, 4, kind));
    EXPECT_OK(hipMemcpy2D(device, 4096, pages.at(kPiece), 4096, 100, 4, kind));
    EXPECT_ERROR(hipMemcpy2D(device, 4096, pages.get(), 4096, 100, 5, kind),
                 hipErrorInvalidValue);
  }
  for (const hipMemcpyKind kind : {hipMemcpyDefault, hipMemcpyDeviceToHost}) {
    EXPECT_OK(hipMemcpy2DAsync(pages.get(), 4096, device, 4096, 100, 4, kind, stream));
    EXPECT_ERROR(
        hipMemcpy2DAsync(pages.get(), 4096, device, 4096, 100, 5, kind, stream),
        hipErrorInvalidValue);
  }
  EXPECT_OK(hipStreamSynchronize(stream));
  if (!simulated()) return;
  EXPECT_ERROR(
      hipMemcpy2D(device, 4096, pages.at(2 * 4096), 4096, 100, 3, hipMemcpyDefault),
      hipErrorInvalidValue);
}

CASE(pitched, rectangles_from_or_to_nowhere, "hip-tests memory/hipMemcpy2D.cc",
     hipMemcpy2D, hipMemcpy2DAsync) {
  Pair pair;
  EXPECT_ERROR(
      hipMemcpy2D(nullptr, 128, pair.host.get(), 128, 100, 5, hipMemcpyHostToDevice),
      hipErrorInvalidValue);
  EXPECT_ERROR(
      hipMemcpy2D(pair.device, 128, nullptr, 128, 100, 5, hipMemcpyHostToDevice),
      hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy2DAsync(nullptr, 128, pair.device, 128, 100, 5,
                                hipMemcpyDeviceToHost, pair.stream),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy2DAsync(pair.device, 128, nullptr, 128, 100, 5,
                                hipMemcpyHostToDevice, pair.stream),
               hipErrorInvalidValue);
}

CASE(pitched, rectangles_of_nothing, "hip-tests memory/hipMemcpy2D.cc", hipMemcpy2D,
     hipMemcpy2DAsync) {
  Pair pair;
  upload(pair.device, Bytes(512, kUntouched));
  for (const auto& [width, height] : {std::pair{0, 5}, std::pair{100, 0}}) {
    EXPECT_OK(hipMemcpy2D(pair.device, 128, pair.host.get(), 128, width, height,
                          hipMemcpyHostToDevice));
    EXPECT_OK(hipMemcpy2DAsync(pair.device, 128, pair.host.get(), 128, width, height,
                               hipMemcpyHostToDevice, pair.stream));
  }
  EXPECT_OK(hipStreamSynchronize(pair.stream));
  EXPECT_BYTES(download(pair.device, 512).data(), Bytes(512, kUntouched));
}

CASE(pitched, the_order_of_the_checks, "clr hip_memory.cpp", hipMemcpy2D,
     hipMemcpy2DAsync) {
  if (!since(7, 12)) SKIP("the order of the checks is known from 7.12 on");
  Pair pair;
  constexpr auto kNoKind = static_cast<hipMemcpyKind>(5);
  EXPECT_ERROR(hipMemcpy2D(nullptr, 1, nullptr, 1, 0, 0, kNoKind),
               hipErrorInvalidMemcpyDirection);
  EXPECT_OK(hipMemcpy2D(nullptr, 1, nullptr, 1, 100, 0, hipMemcpyHostToDevice));
  EXPECT_OK(hipMemcpy2DAsync(nullptr, 1, nullptr, 1, 0, 5, hipMemcpyHostToDevice,
                             pair.stream));
  EXPECT_ERROR(hipMemcpy2D(nullptr, 1, nullptr, 1, 100, 5, hipMemcpyHostToDevice),
               hipErrorInvalidPitchValue);
  EXPECT_ERROR(hipMemcpy2DAsync(nullptr, 1, nullptr, 1, 100, 5, hipMemcpyHostToDevice,
                                pair.stream),
               hipErrorInvalidPitchValue);
}

CASE(pitched, a_device_side_that_the_runtime_does_not_know, "clr hip_memory.cpp",
     hipMemcpy2D) {
  if (!since(7, 12)) SKIP("known from 7.12 on");
  if (device_reads_pageable_memory()) SKIP("the device reads pageable memory");
  Pair pair;
  Pages pages(4096);
  EXPECT_ERROR(hipMemcpy2D(pages.get(), 128, pair.host.get(), 128, 100, 5,
                           hipMemcpyHostToDevice),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy2D(pair.host.get(), 128, pages.get(), 128, 100, 5,
                           hipMemcpyDeviceToHost),
               hipErrorInvalidValue);
}

// --- when a call returns -------------------------------------------------------------

bool waits(hipStream_t stream, const std::function<hipError_t()>& call) {
  REQUIRE_OK(hipDeviceSynchronize());
  const Busy busy(stream);
  EXPECT_OK(call());
  const bool idle = hipStreamQuery(stream) == hipSuccess;
  EXPECT_OK(hipDeviceSynchronize());
  return idle;
}

CASE(pitched, async_rectangles_of_pinned_memory_return_at_once,
     "hip-tests memory/hipMemcpy2DAsync.cc", hipMemcpy2DAsync) {
  Pair pair;
  EXPECT(!waits(pair.stream, [&] {
    return hipMemcpy2DAsync(pair.device, 128, pair.host.get(), 128, 100, 5,
                            hipMemcpyHostToDevice, pair.stream);
  }));
  EXPECT(!waits(pair.stream, [&] {
    return hipMemcpy2DAsync(pair.host.get(), 128, pair.device, 128, 100, 5,
                            hipMemcpyDeviceToHost, pair.stream);
  }));
}

CASE(pitched, blocking_rectangles_between_host_and_device_wait,
     "hip-tests memory/hipMemcpy2D.cc", hipMemcpy2D) {
  Pair pair;
  EXPECT(waits(nullptr, [&] {
    return hipMemcpy2D(pair.device, 128, pair.host.get(), 128, 100, 5,
                       hipMemcpyHostToDevice);
  }));
  EXPECT(waits(nullptr, [&] {
    return hipMemcpy2D(pair.host.get(), 128, pair.device, 128, 100, 5,
                       hipMemcpyDeviceToHost);
  }));
}

CASE(pitched, rectangles_run_in_stream_order, "HIP docs, Asynchronous execution",
     hipMemcpy2DAsync) {
  Pair pair;
  const Bytes bytes = random_bytes(4096, 1);
  std::copy(bytes.begin(), bytes.end(), pair.host.at(0));
  const Busy busy(pair.stream);
  EXPECT_OK(hipMemcpy2DAsync(pair.device, 64, pair.host.get(), 64, 64, 64,
                             hipMemcpyHostToDevice, pair.stream));
  EXPECT_OK(hipMemcpy2DAsync(pair.device.at(8192), 64, pair.device, 64, 64, 64,
                             hipMemcpyDeviceToDevice, pair.stream));
  EXPECT_OK(hipStreamSynchronize(pair.stream));
  EXPECT_BYTES(download(pair.device.at(8192), 4096).data(), bytes);
}

// --- three dimensions ----------------------------------------------------------------

struct Box {
  hipExtent extent;
  hipExtent target;  // pitch, rows and (for the room) slices
  hipExtent source;
  hipPos target_position = {0, 0, 0};
  hipPos source_position = {0, 0, 0};
};

hipMemcpy3DParms parameters_of(const Box& box, void* target, void* source,
                               hipMemcpyKind kind) {
  hipMemcpy3DParms parameters = {};
  parameters.dstPtr = {target, box.target.width, box.target.width, box.target.height};
  parameters.srcPtr = {source, box.source.width, box.source.width, box.source.height};
  parameters.dstPos = box.target_position;
  parameters.srcPos = box.source_position;
  parameters.extent = box.extent;
  parameters.kind = kind;
  return parameters;
}

size_t room(const hipExtent& whole) { return whole.width * whole.height * whole.depth; }

size_t row_start(const hipExtent& whole, const hipPos& position, size_t row,
                 size_t slice) {
  return ((position.z + slice) * whole.height + position.y + row) * whole.width +
         position.x;
}

using Copy3D = std::function<hipError_t(const hipMemcpy3DParms*)>;

bool expect_box(Memories& memories, const Direction& direction, const Box& box,
                const Copy3D& copy) {
  const Bytes source = random_bytes(room(box.source), 7);
  Bytes expected(room(box.target), kUntouched);
  memories.put(direction.from, memories.source(direction.from), source);
  memories.put(direction.to, memories.target(direction.to), expected);
  for (size_t slice = 0; slice < box.extent.depth; ++slice) {
    for (size_t row = 0; row < box.extent.height; ++row) {
      std::memcpy(&expected[row_start(box.target, box.target_position, row, slice)],
                  &source[row_start(box.source, box.source_position, row, slice)],
                  box.extent.width);
    }
  }
  const hipMemcpy3DParms parameters =
      parameters_of(box, memories.target(direction.to), memories.source(direction.from),
                    direction.kind);
  REQUIRE_OK(copy(&parameters));
  REQUIRE_OK(hipDeviceSynchronize());
  const Bytes actual =
      memories.get(direction.to, memories.target(direction.to), expected.size());
  return EXPECT_BYTES(actual.data(), expected);
}

void expect_boxes(const Copy3D& copy) {
  Memories memories;
  for (const Direction& direction : kDirections) {
    for (const Box& box : {
             Box{{1, 1, 1}, {1, 1, 1}, {1, 1, 1}},
             Box{{100, 5, 3}, {100, 5, 3}, {100, 5, 3}},
             Box{{100, 5, 3}, {128, 5, 3}, {104, 7, 3}},
             Box{{64, 4, 2}, {128, 8, 4}, {256, 6, 3}, {16, 2, 1}, {32, 1, 1}},
             Box{{17, 3, 4}, {33, 5, 5}, {29, 4, 6}, {5, 1, 1}, {3, 1, 2}},
             Box{{64, 1, 100}, {128, 2, 100}, {64, 1, 100}},
         }) {
      if (!expect_box(memories, direction, box, copy)) return;
    }
  }
}

CASE(pitched, boxes_are_exact, "hip-tests memory/hipMemcpy3D.cc", hipMemcpy3D) {
  expect_boxes([](auto... arguments) { return hipMemcpy3D(arguments...); });
}

CASE(pitched, async_boxes_are_exact, "hip-tests memory/hipMemcpy3DAsync.cc",
     hipMemcpy3DAsync) {
  Stream stream;
  expect_boxes([&](const hipMemcpy3DParms* parameters) {
    return hipMemcpy3DAsync(parameters, stream);
  });
}

// A box of 100 x 5 x 3 in memory of 128 x 5 x 3, after `spoil` has changed it.
template <typename Spoil>
void expect_refused(hipError_t error, Spoil spoil) {
  Pair pair;
  const Box box{{100, 5, 3}, {128, 5, 3}, {128, 5, 3}};
  hipMemcpy3DParms parameters =
      parameters_of(box, pair.device, pair.host.get(), hipMemcpyHostToDevice);
  EXPECT_OK(hipMemcpy3D(&parameters));
  spoil(parameters);
  EXPECT_ERROR(hipMemcpy3D(&parameters), error);
  EXPECT_ERROR(hipMemcpy3DAsync(&parameters, pair.stream), error);
}

CASE(pitched, boxes_from_or_to_nowhere, "hip-tests memory/hipMemcpy3D.cc", hipMemcpy3D,
     hipMemcpy3DAsync) {
  Stream stream;
  EXPECT_ERROR(hipMemcpy3D(nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy3DAsync(nullptr, stream), hipErrorInvalidValue);
  expect_refused(hipErrorInvalidValue, [](auto& box) { box.dstPtr.ptr = nullptr; });
  expect_refused(hipErrorInvalidValue, [](auto& box) { box.srcPtr.ptr = nullptr; });
}

CASE(pitched, boxes_with_pitches_beyond_the_devices_limit,
     "hip-tests memory/hipMemcpy3D.cc", hipMemcpy3D, hipMemcpy3DAsync,
     hipDeviceGetAttribute) {
  int limit = 0;
  REQUIRE_OK(hipDeviceGetAttribute(&limit, hipDeviceAttributeMaxPitch, 0));
  expect_refused(hipErrorInvalidValue, [&](auto& box) { box.dstPtr.pitch = limit; });
  expect_refused(hipErrorInvalidValue, [&](auto& box) { box.srcPtr.pitch = limit; });
}

CASE(pitched, boxes_that_do_not_fit, "clr hip_memory.cpp", hipMemcpy3D,
     hipMemcpy3DAsync) {
  if (!since(7, 12)) SKIP("known from 7.12 on");
  expect_refused(hipErrorInvalidPitchValue, [](auto& box) { box.dstPtr.pitch = 127; });
  expect_refused(hipErrorInvalidPitchValue, [](auto& box) { box.srcPtr.pitch = 127; });
  expect_refused(hipErrorInvalidValue, [](auto& box) { box.extent.width = 129; });
  expect_refused(hipErrorInvalidValue, [](auto& box) { box.dstPos.x = 29; });
  expect_refused(hipErrorInvalidValue, [](auto& box) { box.srcPos.x = 29; });
  expect_refused(hipErrorInvalidValue, [](auto& box) { box.extent.depth = 1000; });
  expect_refused(hipErrorInvalidMemcpyDirection,
                 [](auto& box) { box.kind = static_cast<hipMemcpyKind>(5); });
}

CASE(pitched, boxes_of_nothing, "clr hip_memory.cpp", hipMemcpy3D, hipMemcpy3DAsync) {
  Pair pair;
  upload(pair.device, Bytes(512, kUntouched));
  for (const hipExtent& extent :
       {hipExtent{0, 5, 3}, hipExtent{100, 0, 3}, hipExtent{100, 5, 0}}) {
    const Box box{extent, {128, 5, 3}, {128, 5, 3}};
    const hipMemcpy3DParms parameters =
        parameters_of(box, pair.device, pair.host.get(), hipMemcpyHostToDevice);
    EXPECT_OK(hipMemcpy3D(&parameters));
    EXPECT_OK(hipMemcpy3DAsync(&parameters, pair.stream));
  }
  EXPECT_OK(hipStreamSynchronize(pair.stream));
  EXPECT_BYTES(download(pair.device, 512).data(), Bytes(512, kUntouched));
}

CASE(pitched, blocking_boxes_between_host_and_device_wait,
     "hip-tests memory/hipMemcpy3D.cc", hipMemcpy3D) {
  Pair pair;
  const Box box{{100, 5, 3}, {128, 5, 3}, {128, 5, 3}};
  const hipMemcpy3DParms load =
      parameters_of(box, pair.device, pair.host.get(), hipMemcpyHostToDevice);
  const hipMemcpy3DParms store =
      parameters_of(box, pair.host.get(), pair.device, hipMemcpyDeviceToHost);
  EXPECT(waits(nullptr, [&] { return hipMemcpy3D(&load); }));
  EXPECT(waits(nullptr, [&] { return hipMemcpy3D(&store); }));
}

CASE(pitched, async_boxes_of_pinned_memory_return_at_once,
     "hip-tests memory/hipMemcpy3DAsync.cc", hipMemcpy3DAsync) {
  Pair pair;
  const Box box{{100, 5, 3}, {128, 5, 3}, {128, 5, 3}};
  const hipMemcpy3DParms parameters =
      parameters_of(box, pair.device, pair.host.get(), hipMemcpyHostToDevice);
  EXPECT(
      !waits(pair.stream, [&] { return hipMemcpy3DAsync(&parameters, pair.stream); }));
}

}  // namespace
}  // namespace contract
