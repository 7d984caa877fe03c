// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <functional>
#include <numeric>

#include "contract.h"

namespace contract {
namespace {

constexpr const char* kClr = "clr hip_memory.cpp (hipMemcpyBatchAsync)";
constexpr const char* kLimit = "clr rocblit.cpp; RS#9915";
constexpr size_t kNoIndex = ~size_t{0};
constexpr size_t kUnwritten = kNoIndex - 6;

constexpr unsigned kKnownOrders[] = {hipMemcpySrcAccessOrderStream,
                                     hipMemcpySrcAccessOrderDuringApiCall,
                                     hipMemcpySrcAccessOrderAny};

// Before 7.12 a batch is one copy after the other. From there on it is checked as a
// whole first.
bool is_a_loop() { return !since(7, 12); }

hipMemcpyAttributes attributes_of(unsigned order, unsigned flags = 0) {
  hipMemcpyAttributes attributes = {};
  attributes.srcAccessOrder = static_cast<hipMemcpySrcAccessOrder>(order);
  attributes.flags = flags;
  return attributes;
}

// The arguments of a call, free to be changed before it.
struct Call {
  std::vector<void*> destinations;
  std::vector<void*> sources;
  std::vector<size_t> sizes;
  std::vector<hipMemcpyAttributes> attributes;
  std::vector<size_t> first_copies;
  size_t fail_index = kUnwritten;

  void add(void* destination, void* source, size_t size) {
    destinations.push_back(destination);
    sources.push_back(source);
    sizes.push_back(size);
  }
  void set(size_t first_copy, unsigned order, unsigned flags = 0) {
    attributes.push_back(attributes_of(order, flags));
    first_copies.push_back(first_copy);
  }
  hipError_t run(hipStream_t stream) {
    return hipMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(),
                               sizes.size(),
                               attributes.empty() ? nullptr : attributes.data(),
                               first_copies.empty() ? nullptr : first_copies.data(),
                               attributes.size(), &fail_index, stream);
  }
};

// Equal pieces of registered memory and the places for them on the device.
class Pieces {
 public:
  explicit Pieces(size_t count, size_t size = 64)
      : count(count), size(size), host(count * size), device(count * size) {
    bytes = random_bytes(count * size, static_cast<unsigned>(count));
    std::copy(bytes.begin(), bytes.end(), host.at(0));
    clear();
  }

  Call load() {
    Call call;
    for (size_t i = 0; i < count; ++i) {
      call.add(device.at(i * size), host.at(i * size), size);
    }
    return call;
  }
  void clear() { upload(device, Bytes(count * size, 0)); }

  // Which pieces have arrived.
  std::vector<bool> loaded() {
    EXPECT_OK(hipDeviceSynchronize());
    const Bytes there = download(device, count * size);
    std::vector<bool> equal(count);
    for (size_t i = 0; i < count; ++i) {
      equal[i] = std::equal(there.begin() + i * size, there.begin() + (i + 1) * size,
                            bytes.begin() + i * size);
    }
    return equal;
  }
  bool all_loaded() { return loaded() == std::vector<bool>(count, true); }
  bool none_loaded() { return loaded() == std::vector<bool>(count, false); }

  const size_t count;
  const size_t size;
  RegisteredMemory host;
  DeviceMemory device;
  Stream stream;
  Bytes bytes;
};

// --- copies --------------------------------------------------------------------------

void expect_round_trip(size_t count, size_t size) {
  Pieces pieces(count, size);
  RegisteredMemory back(count * size);
  Call load = pieces.load();
  EXPECT_OK(load.run(pieces.stream));
  EXPECT_EQ(load.fail_index, kNoIndex);
  Call store;
  for (size_t i = 0; i < count; ++i) {
    const size_t from = (i * 7919 + 3) % count;  // a prime, so every piece once
    store.add(back.at(from * size), pieces.device.at(from * size), size);
  }
  EXPECT_OK(store.run(pieces.stream));
  EXPECT_EQ(store.fail_index, kNoIndex);
  EXPECT_OK(hipStreamSynchronize(pieces.stream));
  EXPECT_BYTES(back.at(0), pieces.bytes);
}

CASE(batch, of_one_copy, kClr, hipMemcpyBatchAsync) { expect_round_trip(1, 48); }

CASE(batch, of_8192_small_copies, kClr, hipMemcpyBatchAsync) {
  expect_round_trip(8192, 48);
}

CASE(batch, of_copies_around_the_size_that_decides_the_engine, kClr,
     hipMemcpyBatchAsync) {
  expect_round_trip(5, 16 * 1024);
  expect_round_trip(5, 16 * 1024 + 1);
}

CASE(batch, of_copies_within_the_device, "hip-tests memory/hipMemcpyBatchAsync.cc",
     hipMemcpyBatchAsync) {
  constexpr size_t kSize = 100;
  DeviceMemory memory(8 * kSize);
  Stream stream;
  const Bytes bytes = random_bytes(4 * kSize, 1);
  upload(memory, bytes);
  Call call;
  for (size_t i = 0; i < 4; ++i) {
    call.add(memory.at((4 + i) * kSize), memory.at(i * kSize), kSize);
  }
  EXPECT_OK(call.run(stream));
  EXPECT_OK(hipStreamSynchronize(stream));
  EXPECT_BYTES(download(memory.at(4 * kSize), 4 * kSize).data(), bytes);
}

CASE(batch, of_copies_in_every_direction, "hip-tests memory/hipMemcpyBatchAsync.cc",
     hipMemcpyBatchAsync) {
  constexpr size_t kSize = 100;
  DeviceMemory device(2 * kSize);
  RegisteredMemory pinned(4 * kSize);
  Pages pageable(4 * kSize);
  Stream stream;
  const Bytes bytes = random_bytes(4 * kSize, 1);
  std::copy(bytes.begin(), bytes.end(), pinned.at(0));
  std::copy(bytes.begin(), bytes.end(), pageable.at(0));
  upload(device, Bytes(bytes.begin(), bytes.begin() + kSize));
  Call call;
  call.add(device.at(kSize), device.at(0), kSize);
  call.add(pinned.at(3 * kSize), device.at(0), kSize);
  call.add(pageable.at(3 * kSize), pageable.at(0), kSize);
  EXPECT_OK(call.run(stream));
  EXPECT_OK(hipStreamSynchronize(stream));
  const Bytes first(bytes.begin(), bytes.begin() + kSize);
  EXPECT_BYTES(download(device.at(kSize), kSize).data(), first);
  EXPECT_BYTES(pinned.at(3 * kSize), first);
  EXPECT_BYTES(pageable.at(3 * kSize), first);
}

CASE(batch, of_pageable_memory, "hip-tests memory/hipMemcpyBatchAsync.cc",
     hipMemcpyBatchAsync) {
  constexpr size_t kSize = 1000;
  DeviceMemory device(8 * kSize);
  Pages pages(8 * kSize);
  Stream stream;
  const Bytes bytes = random_bytes(8 * kSize, 1);
  std::copy(bytes.begin(), bytes.end(), pages.at(0));
  Call call;
  for (size_t i = 0; i < 8; ++i) {
    call.add(device.at(i * kSize), pages.at(i * kSize), kSize);
  }
  EXPECT_OK(call.run(stream));
  EXPECT_OK(hipStreamSynchronize(stream));
  EXPECT_BYTES(download(device, 8 * kSize).data(), bytes);
}

CASE(batch, on_the_null_stream, kClr, hipMemcpyBatchAsync) {
  Pieces pieces(8);
  Call call = pieces.load();
  EXPECT_OK(call.run(nullptr));
  EXPECT_OK(hipStreamSynchronize(nullptr));
  EXPECT(pieces.all_loaded());
}

CASE(batch, on_a_stream_that_was_destroyed, "clr hip_memory.cpp", hipMemcpyBatchAsync) {
  if (is_a_loop()) SKIP("the stream is checked from 7.12 on");
  Pieces pieces(2);
  hipStream_t gone = nullptr;
  REQUIRE_OK(hipStreamCreate(&gone));
  REQUIRE_OK(hipStreamDestroy(gone));
  EXPECT_ERROR(pieces.load().run(gone), hipErrorInvalidHandle);
  EXPECT(pieces.none_loaded());
}

CASE(batch, runs_in_stream_order, "HIP docs, Asynchronous execution",
     hipMemcpyBatchAsync) {
  Pieces pieces(8);
  Event event;
  const Busy busy(pieces.stream);
  EXPECT_OK(pieces.load().run(pieces.stream));
  EXPECT_OK(hipEventRecord(event, pieces.stream));
  EXPECT_ERROR(hipEventQuery(event), hipErrorNotReady);
  EXPECT_OK(hipEventSynchronize(event));
  EXPECT(pieces.all_loaded());
}

// --- the failing index ---------------------------------------------------------------

hipError_t run_without_index(Call call, hipStream_t stream) {
  return hipMemcpyBatchAsync(
      call.destinations.data(), call.sources.data(), call.sizes.data(),
      call.sizes.size(), call.attributes.empty() ? nullptr : call.attributes.data(),
      call.first_copies.empty() ? nullptr : call.first_copies.data(),
      call.attributes.size(), nullptr, stream);
}

CASE(batch, without_a_place_for_the_failing_index, kClr, hipMemcpyBatchAsync) {
  Pieces pieces(8);
  if (is_a_loop()) {
    EXPECT_ERROR(run_without_index(pieces.load(), pieces.stream), hipErrorInvalidValue);
    EXPECT(pieces.none_loaded());
  } else {
    EXPECT_OK(run_without_index(pieces.load(), pieces.stream));
    EXPECT(pieces.all_loaded());
  }
}

// Copies 0 to 4 of 8 are right and copy 5 is not.
void expect_fifth_to_fail(const std::function<void(Pieces&, Call&)>& spoil,
                          size_t index_if_checked) {
  Pieces pieces(8);
  Call call = pieces.load();
  spoil(pieces, call);
  EXPECT_ERROR(call.run(pieces.stream), hipErrorInvalidValue);
  if (is_a_loop()) {
    EXPECT_EQ(call.fail_index, size_t{5});
    EXPECT(pieces.loaded() ==
           std::vector<bool>({true, true, true, true, true, false, false, false}));
  } else {
    EXPECT_EQ(call.fail_index, index_if_checked);
    EXPECT(pieces.none_loaded());
  }
}

CASE(batch, with_a_copy_beyond_its_memory, kClr, hipMemcpyBatchAsync) {
  expect_fifth_to_fail(
      [](Pieces& pieces, Call& call) {
        call.destinations[5] = pieces.device.at(8 * pieces.size - 63);
      },
      kNoIndex);
}

CASE(batch, with_a_copy_to_nowhere, kClr, hipMemcpyBatchAsync) {
  expect_fifth_to_fail([](Pieces&, Call& call) { call.destinations[5] = nullptr; },
                       kNoIndex);
}

CASE(batch, with_a_copy_from_nowhere, kClr, hipMemcpyBatchAsync) {
  expect_fifth_to_fail([](Pieces&, Call& call) { call.sources[5] = nullptr; },
                       kNoIndex);
}

CASE(batch, with_copies_of_nothing, kClr, hipMemcpyBatchAsync) {
  if (is_a_loop()) SKIP("what a copy of nothing does before 7.12 is not known");
  for (const size_t empty : {0, 3, 7}) {
    Pieces pieces(8);
    Call call = pieces.load();
    call.sizes[empty] = 0;
    EXPECT_ERROR(call.run(pieces.stream), hipErrorInvalidValue);
    EXPECT_EQ(call.fail_index, empty);
    EXPECT_ERROR(run_without_index(call, pieces.stream), hipErrorInvalidValue);
    EXPECT(pieces.none_loaded());
  }
}

CASE(batch, of_nothing, "hip-tests memory/hipMemcpyBatchAsync.cc",
     hipMemcpyBatchAsync) {
  Pieces pieces(2);
  Call call = pieces.load();
  const auto run = [&](void** destinations, void** sources, size_t* sizes,
                       size_t count) {
    return hipMemcpyBatchAsync(destinations, sources, sizes, count, nullptr, nullptr, 0,
                               &call.fail_index, pieces.stream);
  };
  void** const to = call.destinations.data();
  void** const from = call.sources.data();
  size_t* const sizes = call.sizes.data();
  EXPECT_ERROR(run(nullptr, from, sizes, 2), hipErrorInvalidValue);
  EXPECT_ERROR(run(to, nullptr, sizes, 2), hipErrorInvalidValue);
  EXPECT_ERROR(run(to, from, nullptr, 2), hipErrorInvalidValue);
  EXPECT_ERROR(run(to, from, sizes, 0), hipErrorInvalidValue);
  EXPECT(pieces.none_loaded());
}

// --- attributes ----------------------------------------------------------------------

void need_attributes() {
  if (is_a_loop()) SKIP("attributes are taken from 7.12 on");
}

CASE(batch, attributes_are_taken_or_not_supported, kClr, hipMemcpyBatchAsync) {
  Pieces pieces(8);
  Call call = pieces.load();
  call.set(0, hipMemcpySrcAccessOrderStream);
  if (is_a_loop()) {
    EXPECT_ERROR(call.run(pieces.stream), hipErrorNotSupported);
    EXPECT(pieces.none_loaded());
  } else {
    EXPECT_OK(call.run(pieces.stream));
    EXPECT(pieces.all_loaded());
  }
}

CASE(batch, every_access_order, kClr, hipMemcpyBatchAsync) {
  need_attributes();
  for (const unsigned order : kKnownOrders) {
    Pieces pieces(8);
    Call call = pieces.load();
    call.set(0, order);
    EXPECT_OK(call.run(pieces.stream));
    EXPECT_EQ(call.fail_index, kNoIndex);
    EXPECT(pieces.all_loaded());
  }
}

CASE(batch, orders_that_do_not_exist, kClr, hipMemcpyBatchAsync) {
  need_attributes();
  for (const unsigned order : {0u, 4u, 0x7fffffffu}) {
    Pieces pieces(8);
    Call call = pieces.load();
    call.set(0, hipMemcpySrcAccessOrderStream);
    call.set(4, order);
    EXPECT_ERROR(call.run(pieces.stream), hipErrorInvalidValue);
    EXPECT(pieces.none_loaded());
  }
}

CASE(batch, attributes_without_their_arrays, "hip-tests memory/hipMemcpyBatchAsync.cc",
     hipMemcpyBatchAsync) {
  need_attributes();
  Pieces pieces(2);
  Call call = pieces.load();
  call.set(0, hipMemcpySrcAccessOrderStream);
  const auto run = [&](hipMemcpyAttributes* attributes, size_t* first_copies) {
    return hipMemcpyBatchAsync(call.destinations.data(), call.sources.data(),
                               call.sizes.data(), 2, attributes, first_copies, 1,
                               nullptr, pieces.stream);
  };
  EXPECT_ERROR(run(nullptr, call.first_copies.data()), hipErrorInvalidValue);
  EXPECT_ERROR(run(call.attributes.data(), nullptr), hipErrorInvalidValue);
  EXPECT(pieces.none_loaded());
}

CASE(batch, attributes_for_the_wrong_copies, kClr, hipMemcpyBatchAsync) {
  need_attributes();
  const std::vector<std::vector<size_t>> wrong = {
      {1}, {0, 0}, {0, 5, 4}, {0, 5, 5}, {0, 8}, {0, 1, 2, 3, 4, 5, 6, 7, 8}};
  for (const std::vector<size_t>& first_copies : wrong) {
    Pieces pieces(8);
    Call call = pieces.load();
    for (const size_t first : first_copies) {
      call.set(first, hipMemcpySrcAccessOrderStream);
    }
    EXPECT_ERROR(call.run(pieces.stream), hipErrorInvalidValue);
    EXPECT(pieces.none_loaded());
  }
}

CASE(batch, a_set_of_attributes_for_each_copy, kClr, hipMemcpyBatchAsync) {
  need_attributes();
  const std::vector<std::vector<size_t>> right = {
      {0, 7}, {0, 3, 5}, {0, 1, 2, 3, 4, 5, 6, 7}};
  for (const std::vector<size_t>& first_copies : right) {
    Pieces pieces(8);
    Call call = pieces.load();
    for (size_t i = 0; i < first_copies.size(); ++i) {
      call.set(first_copies[i], kKnownOrders[i % 3],
               i % 2 == 0 ? 0 : unsigned{hipMemcpyFlagExtPreferCE});
    }
    EXPECT_OK(call.run(pieces.stream));
    EXPECT(pieces.all_loaded());
  }
}

CASE(batch, a_source_read_during_the_call_is_free_afterwards, kClr,
     hipMemcpyBatchAsync) {
  need_attributes();
  Pieces pieces(8);
  Call call = pieces.load();
  call.set(0, hipMemcpySrcAccessOrderDuringApiCall);
  {
    const Busy busy(pieces.stream);
    EXPECT_OK(call.run(pieces.stream));
    std::fill_n(pieces.host.at(0), 8 * pieces.size, static_cast<unsigned char>(0));
    EXPECT_OK(hipStreamSynchronize(pieces.stream));
  }
  EXPECT(pieces.all_loaded());
}

CASE(batch, a_source_in_stream_order_is_read_when_the_batch_runs, kClr,
     hipMemcpyBatchAsync) {
  need_attributes();
  Pieces pieces(8);
  Call call = pieces.load();
  call.set(0, hipMemcpySrcAccessOrderStream);
  const Bytes late = random_bytes(8 * pieces.size, 99);
  const Busy busy(pieces.stream);
  EXPECT_OK(call.run(pieces.stream));
  std::copy(late.begin(), late.end(), pieces.host.at(0));
  pieces.bytes = late;
  EXPECT_OK(hipStreamSynchronize(pieces.stream));
  EXPECT(pieces.all_loaded());
}

// --- flags ---------------------------------------------------------------------------

CASE(batch, hints_that_any_release_takes, kClr, hipMemcpyBatchAsync) {
  need_attributes();
  for (const unsigned flags :
       {hipMemcpyFlagDefault, hipMemcpyFlagPreferOverlapWithCompute,
        hipMemcpyFlagExtPreferCE}) {
    for (const size_t size : {64, 16 * 1024 + 1}) {
      Pieces pieces(8, size);
      Call call = pieces.load();
      call.set(0, hipMemcpySrcAccessOrderStream, flags);
      EXPECT_OK(call.run(pieces.stream));
      EXPECT(pieces.all_loaded());
    }
  }
}

CASE(batch, unknown_flags_are_ignored, kClr, hipMemcpyBatchAsync) {
  need_attributes();
  if (since(7, 16)) SKIP("known up to 7.15");
  Pieces pieces(8);
  Call call = pieces.load();
  call.set(0, hipMemcpySrcAccessOrderStream, 0xF0000002u);
  EXPECT_OK(call.run(pieces.stream));
  EXPECT(pieces.all_loaded());
}

CASE(batch, swap_and_indirect_exclude_each_other, kClr, hipMemcpyBatchAsync) {
  need_attributes();
  if (!since(7, 14)) SKIP("the sources differ on 7.13, and 7.12 knows neither flag");
  for (const unsigned indirect :
       {hipMemcpyFlagExtOpIndirectSrc, hipMemcpyFlagExtOpIndirectDst}) {
    Pieces pieces(8);
    Call call = pieces.load();
    call.set(0, hipMemcpySrcAccessOrderStream, hipMemcpyFlagExtOpSwap | indirect);
    EXPECT_ERROR(call.run(pieces.stream), hipErrorInvalidValue);
    EXPECT_EQ(call.fail_index, kNoIndex);
    EXPECT(pieces.none_loaded());
  }
}

CASE(batch, swap_is_done_or_not_supported, "hip-tests memory/hipMemcpyBatchAsync.cc",
     hipMemcpyBatchAsync) {
  if (!since(7, 14)) SKIP("known from 7.14 on");
  constexpr size_t kSize = 4096;
  DeviceMemory memory(2 * kSize);
  Stream stream;
  Bytes first = random_bytes(kSize, 1);
  Bytes second = random_bytes(kSize, 2);
  upload(memory, first);
  upload(memory.at(kSize), second);
  Call call;
  call.add(memory.at(kSize), memory, kSize);
  call.set(0, hipMemcpySrcAccessOrderStream, hipMemcpyFlagExtOpSwap);
  const hipError_t error = call.run(stream);
  EXPECT_OK(hipStreamSynchronize(stream));
  if (error == hipSuccess) {
    std::swap(first, second);
  } else {
    EXPECT_ERROR(error, hipErrorNotSupported);
  }
  EXPECT_BYTES(download(memory, kSize).data(), first);
  EXPECT_BYTES(download(memory.at(kSize), kSize).data(), second);
}

// --- capture -------------------------------------------------------------------------

CASE(batch, on_a_capturing_stream_runs_and_is_not_recorded, kClr, hipMemcpyBatchAsync,
     hipStreamBeginCapture, hipStreamEndCapture, hipGraphGetNodes, hipGraphDestroy) {
  Pieces pieces(8);
  REQUIRE_OK(hipStreamBeginCapture(pieces.stream, hipStreamCaptureModeRelaxed));
  EXPECT_OK(pieces.load().run(pieces.stream));
  hipGraph_t graph = nullptr;
  REQUIRE_OK(hipStreamEndCapture(pieces.stream, &graph));
  size_t nodes = 99;
  EXPECT_OK(hipGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_EQ(nodes, size_t{0});
  EXPECT_OK(hipGraphDestroy(graph));
  EXPECT(pieces.all_loaded());
}

// --- more than 8192 copies -----------------------------------------------------------

constexpr int kFaulted = 70;

// 20,000 copies that are kernels unless `flags` says otherwise. The status is 0 when
// all arrived and kFaulted when the runtime reports a memory fault.
CHILD(large_batch) {
  const auto flags = static_cast<unsigned>(std::stoul(arguments.at(0)));
  Pieces pieces(20'000, 4);
  Call call = pieces.load();
  if (flags != 0) call.set(0, hipMemcpySrcAccessOrderStream, flags);
  hipError_t error = call.run(pieces.stream);
  if (error == hipSuccess) error = hipStreamSynchronize(pieces.stream);
  if (error == hipErrorIllegalAddress || error == hipErrorLaunchFailure) {
    std::_Exit(kFaulted);  // nothing works any more, freeing included
  }
  REQUIRE_OK(error);
  EXPECT(pieces.all_loaded());
  return 0;
}

bool faulted(const Ending& ending) {
  return ending.in_time && (ending.signal != 0 || ending.status == kFaulted);
}

// The case's own process makes a small batch, so that it has called what it covers
// when the child does not live to tell.
void call_here() {
  Pieces pieces(1);
  EXPECT_OK(pieces.load().run(pieces.stream));
}

CASE(batch, of_more_copies_than_the_kernel_has_room_for, kLimit, hipMemcpyBatchAsync) {
  call_here();
  const Ending ending = run_child("large_batch", {"0"});
  if (!since(7, 14)) {
    EXPECT_EQ(ending, 0);
  } else if (!since(7, 16)) {
    EXPECT(faulted(ending));
  } else {
    // Fixed in a release that is not established (RS#9915).
    EXPECT(faulted(ending) || ending == 0);
  }
}

CASE(batch, of_any_number_of_copies_on_the_copy_engine, kLimit, hipMemcpyBatchAsync) {
  if (!since(7, 13)) SKIP("the flag has a meaning from 7.13 on");
  call_here();
  EXPECT_EQ(run_child("large_batch", {std::to_string(hipMemcpyFlagExtPreferCE)}), 0);
}

}  // namespace
}  // namespace contract
