// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "contract.h"

namespace contract {
namespace {

constexpr const char* kReference = DRIVER "; CUDA Driver API, cuMemcpyBatchAsync";
constexpr const char* kDriver = DRIVER;
constexpr CUresult kInvalid = CUDA_ERROR_INVALID_VALUE;
constexpr size_t kNoIndex = ~size_t{0};
constexpr size_t kUntouched = 777;

// The arguments of a batch. Both forms of the call must say the same of them.
struct Call {
  std::vector<CUdeviceptr> destinations;
  std::vector<CUdeviceptr> sources;
  std::vector<size_t> sizes;
  std::vector<CUmemcpyAttributes> attributes;
  std::vector<size_t> first_copies;
  size_t fail_index = kUntouched;

  void add(CUdeviceptr to, CUdeviceptr from, size_t bytes) {
    destinations.push_back(to);
    sources.push_back(from);
    sizes.push_back(bytes);
  }
  void set(size_t first, unsigned order, unsigned flags = 0) {
    CUmemcpyAttributes made = {};
    made.srcAccessOrder = static_cast<CUmemcpySrcAccessOrder>(order);
    made.flags = flags;
    attributes.push_back(made);
    first_copies.push_back(first);
  }

  CUresult first_form(CUstream stream) {
    fail_index = kUntouched;
    return cuMemcpyBatchAsync(destinations.data(), sources.data(), sizes.data(),
                              sizes.size(), attributes.data(), first_copies.data(),
                              attributes.size(), &fail_index, stream);
  }
  CUresult second_form(CUstream stream) {
    return cuMemcpyBatchAsync_v2(destinations.data(), sources.data(), sizes.data(),
                                 sizes.size(), attributes.data(), first_copies.data(),
                                 attributes.size(), stream);
  }
  CUresult run(CUstream stream) {
    const CUresult result = first_form(stream);
    if (exported("cuMemcpyBatchAsync_v2")) {
      const CUresult again = second_form(stream);
      if (again != result) {
        report(CONTRACT_HERE, "the second form says " + describe(again));
      }
    }
    return result;
  }
};

// Equal pieces of pinned memory and of device memory.
struct Pieces {
  explicit Pieces(size_t count_, size_t size_ = 4096)
      : count(count_), size(size_), device(count_ * size_), host(count_ * size_) {
    std::copy(bytes.begin(), bytes.end(), host.at(0));
    REQUIRE_OK(cuMemsetD8_v2(device, 0, count * size));
    REQUIRE_OK(cuCtxSynchronize());
  }
  Call load() const {
    Call call;
    for (size_t i = 0; i < count; ++i) {
      call.add(device.at(i * size), as_device(host.at(i * size)), size);
    }
    return call;
  }
  // A digit for each piece: 1 when it has arrived.
  std::string loaded() const {
    const Bytes found = download(device, count * size);
    std::string all;
    for (size_t i = 0; i < count; ++i) {
      const auto begin = static_cast<long>(i * size);
      const bool same = std::equal(found.begin() + begin,
                                   found.begin() + begin + static_cast<long>(size),
                                   bytes.begin() + begin);
      all += same ? '1' : '0';
    }
    return all;
  }
  bool all_loaded() const { return loaded() == std::string(count, '1'); }
  bool none_loaded() const { return loaded() == std::string(count, '0'); }

  size_t count;
  size_t size;
  Bytes bytes = random_bytes(count * size, 1);
  DeviceMemory device;
  HostMemory host;
  Stream stream;
};

constexpr unsigned kOrders[] = {CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
                                CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL,
                                CU_MEMCPY_SRC_ACCESS_ORDER_ANY};
constexpr unsigned kStreamOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;

CASE(batch, copies_all, kReference, cuMemcpyBatchAsync) {
  for (const unsigned order : kOrders) {
    const About about("order " + describe(order));
    Pieces pieces(8);
    Call call = pieces.load();
    call.set(0, order);
    EXPECT_OK(call.first_form(pieces.stream));
    EXPECT_EQ(call.fail_index, kNoIndex);
    EXPECT(pieces.all_loaded());
  }
}

CASE(batch, copies_all_in_its_second_form, kReference, cuMemcpyBatchAsync_v2) {
  for (const unsigned order : kOrders) {
    const About about("order " + describe(order));
    Pieces pieces(8);
    Call call = pieces.load();
    call.set(0, order);
    EXPECT_OK(call.second_form(pieces.stream));
    EXPECT(pieces.all_loaded());
  }
}

CASE(batch, in_every_direction, kReference, cuMemcpyBatchAsync) {
  constexpr size_t kSize = 1000;
  DeviceMemory first(kSize);
  DeviceMemory second(kSize);
  RegisteredMemory pinned(kSize);
  Bytes pageable(kSize);
  HostMemory other(kSize);
  Stream stream;
  const Bytes bytes = random_bytes(kSize, 1);
  const auto copy = [&](CUdeviceptr to, CUdeviceptr from) {
    Call call;
    call.add(to, from, kSize);
    call.set(0, kStreamOrder);
    const CUresult result = call.run(stream);
    EXPECT_OK(cuStreamSynchronize(stream));
    return result;
  };
  upload(first, bytes);
  EXPECT_OK(copy(second, first));
  EXPECT_OK(copy(as_device(pinned.get()), second));
  EXPECT_BYTES(pinned.get(), bytes);
  EXPECT_OK(copy(as_device(pageable.data()), second));
  EXPECT_BYTES(pageable.data(), bytes);
  EXPECT_OK(copy(as_device(other.get()), as_device(pinned.get())));
  EXPECT_BYTES(other.get(), bytes);
  EXPECT_OK(cuMemsetD8_v2(first, 0, kSize));
  EXPECT_OK(cuCtxSynchronize());
  EXPECT_OK(copy(first, as_device(pageable.data())));
  EXPECT_BYTES(download(first, kSize).data(), bytes);
  Bytes last(kSize);
  EXPECT_OK(copy(as_device(last.data()), as_device(pageable.data())));
  EXPECT_BYTES(last.data(), bytes);
}

CASE(batch, on_the_legacy_stream, kReference, cuMemcpyBatchAsync) {
  Pieces pieces(2);
  Call call = pieces.load();
  call.set(0, kStreamOrder);
  EXPECT_ERROR(call.run(nullptr), kInvalid);
  EXPECT_EQ(call.fail_index, kUntouched);
  EXPECT_ERROR(call.run(CU_STREAM_LEGACY), kInvalid);
  EXPECT(pieces.none_loaded());
}

CASE(batch, on_the_stream_of_the_thread, kDriver, cuMemcpyBatchAsync) {
  if (simulated()) SKIP("the simulator has no such stream");
  Pieces pieces(2);
  Call call = pieces.load();
  call.set(0, kStreamOrder);
  EXPECT_OK(call.run(CU_STREAM_PER_THREAD));
}

CASE(batch, without_attributes, kDriver, cuMemcpyBatchAsync) {
  Pieces pieces(2);
  Call call = pieces.load();
  EXPECT_ERROR(call.run(pieces.stream), kInvalid);
  EXPECT_EQ(call.fail_index, kNoIndex);
  EXPECT(pieces.none_loaded());
}

CASE(batch, of_nothing, kReference, cuMemcpyBatchAsync) {
  Pieces pieces(2);
  Call call = pieces.load();
  call.set(0, kStreamOrder);
  const auto run = [&](CUdeviceptr* to, CUdeviceptr* from, size_t* sizes,
                       size_t count) {
    return cuMemcpyBatchAsync(to, from, sizes, count, call.attributes.data(),
                              call.first_copies.data(), 1, &call.fail_index,
                              pieces.stream);
  };
  CUdeviceptr* const to = call.destinations.data();
  CUdeviceptr* const from = call.sources.data();
  size_t* const sizes = call.sizes.data();
  EXPECT_ERROR(run(nullptr, from, sizes, 2), kInvalid);
  EXPECT_ERROR(run(to, nullptr, sizes, 2), kInvalid);
  EXPECT_ERROR(run(to, from, nullptr, 2), kInvalid);
  EXPECT_ERROR(run(to, from, sizes, 0), kInvalid);
  EXPECT_ERROR(run(nullptr, nullptr, nullptr, 0), kInvalid);
  EXPECT(pieces.none_loaded());
}

CASE(batch, without_a_place_for_the_failing_index, kReference, cuMemcpyBatchAsync) {
  Pieces pieces(2);
  Call call = pieces.load();
  call.set(0, kStreamOrder);
  EXPECT_OK(cuMemcpyBatchAsync(call.destinations.data(), call.sources.data(),
                               call.sizes.data(), 2, call.attributes.data(),
                               call.first_copies.data(), 1, nullptr, pieces.stream));
  EXPECT(pieces.all_loaded());
}

CASE(batch, without_the_arrays_of_attributes, kReference, cuMemcpyBatchAsync) {
  Pieces pieces(2);
  Call call = pieces.load();
  call.set(0, kStreamOrder);
  const auto run = [&](CUmemcpyAttributes* attributes, size_t* first_copies) {
    return cuMemcpyBatchAsync(call.destinations.data(), call.sources.data(),
                              call.sizes.data(), 2, attributes, first_copies, 1,
                              &call.fail_index, pieces.stream);
  };
  EXPECT_ERROR(run(nullptr, call.first_copies.data()), kInvalid);
  EXPECT_ERROR(run(call.attributes.data(), nullptr), kInvalid);
  EXPECT(pieces.none_loaded());
}

CASE(batch, orders_that_do_not_exist, kReference, cuMemcpyBatchAsync) {
  for (const unsigned order : {0u, 4u, 0x7fffffffu}) {
    const About about("order " + describe(order));
    Pieces pieces(8);
    Call call = pieces.load();
    call.set(0, kStreamOrder);
    call.set(4, order);
    EXPECT_ERROR(call.run(pieces.stream), kInvalid);
    EXPECT_EQ(call.fail_index, kNoIndex);
    EXPECT(pieces.none_loaded());
  }
}

CASE(batch, flags_of_copies, kReference, cuMemcpyBatchAsync) {
  struct Flags {
    unsigned flags;
    CUresult result;
  };
  for (const Flags& each : {Flags{0, CUDA_SUCCESS}, Flags{1, CUDA_SUCCESS},
                            Flags{2, kInvalid}, Flags{0x100, kInvalid}}) {
    const About about("flags " + describe(each.flags));
    Pieces pieces(2);
    Call call = pieces.load();
    call.set(0, kStreamOrder, each.flags);
    EXPECT_ERROR(call.run(pieces.stream), each.result);
    EXPECT_EQ(pieces.all_loaded(), each.result == CUDA_SUCCESS);
  }
}

CASE(batch, attributes_for_the_wrong_copies, kReference, cuMemcpyBatchAsync) {
  const std::vector<std::vector<size_t>> wrong = {
      {1}, {0, 0}, {0, 5, 4}, {0, 5, 5}, {0, 8}, {0, 1, 2, 3, 4, 5, 6, 7, 8}};
  for (const std::vector<size_t>& first_copies : wrong) {
    const About about("from copy " + describe(first_copies.back()) + ", " +
                      describe(first_copies.size()) + " sets");
    Pieces pieces(8);
    Call call = pieces.load();
    for (const size_t first : first_copies) call.set(first, kStreamOrder);
    EXPECT_ERROR(call.run(pieces.stream), kInvalid);
    EXPECT_EQ(call.fail_index, kNoIndex);
    EXPECT(pieces.none_loaded());
  }
}

CASE(batch, a_set_of_attributes_for_each_copy, kReference, cuMemcpyBatchAsync) {
  Pieces pieces(6);
  Call call = pieces.load();
  for (size_t i = 0; i < 6; ++i) call.set(i, kOrders[i % 3]);
  EXPECT_OK(call.run(pieces.stream));
  EXPECT(pieces.all_loaded());
}

// --- the failing index ---------------------------------------------------------------

struct Fault {
  const char* name;
  void (*spoil)(const Pieces& pieces, Call* call);
};

// What comes before it is copied.
CASE(batch, with_a_copy_that_cannot_be_made, kReference, cuMemcpyBatchAsync) {
  const Fault faults[] = {
      {"size 0", [](const Pieces&, Call* call) { call->sizes[5] = 0; }},
      {"no destination", [](const Pieces&, Call* call) { call->destinations[5] = 0; }},
      {"no source", [](const Pieces&, Call* call) { call->sources[5] = 0; }},
      {"past the end of the destination",
       [](const Pieces& pieces, Call* call) {
         call->destinations[5] = pieces.device.at(8 * pieces.size - 63);
       }},
      {"past the end of the source",
       [](const Pieces& pieces, Call* call) {
         call->sources[5] = as_device(pieces.host.at(8 * pieces.size - 63));
       }},
  };
  for (const Fault& fault : faults) {
    const About about(fault.name);
    Pieces pieces(8);
    Call call = pieces.load();
    call.set(0, kStreamOrder);
    fault.spoil(pieces, &call);
    EXPECT_ERROR(call.run(pieces.stream), kInvalid);
    EXPECT_EQ(call.fail_index, size_t{5});
    EXPECT_OK(cuCtxSynchronize());
    EXPECT_EQ(pieces.loaded(), std::string("11111000"));
  }
}

CASE(batch, with_two_copies_that_cannot_be_made, kReference, cuMemcpyBatchAsync) {
  Pieces pieces(8);
  Call call = pieces.load();
  call.set(0, kStreamOrder);
  call.sizes[6] = 0;
  call.destinations[3] = 0;
  EXPECT_ERROR(call.run(pieces.stream), kInvalid);
  EXPECT_EQ(call.fail_index, size_t{3});
}

CASE(batch, with_memory_that_may_not_be_accessed, kReference, cuMemcpyBatchAsync) {
  VirtualMemory closed(1, granularity(), VirtualMemory::Open::kNo);
  Pieces pieces(8);
  Call call = pieces.load();
  call.set(0, kStreamOrder);
  call.destinations[5] = closed.get();
  EXPECT_ERROR(call.run(pieces.stream), kInvalid);
  EXPECT_EQ(call.fail_index, size_t{5});
  EXPECT_EQ(pieces.loaded(), std::string("11111000"));
}

CASE(batch, with_addresses_that_are_only_reserved, "none: the simulator's own",
     cuMemcpyBatchAsync) {
  if (!simulated()) SKIP("the driver takes them for the host's and faults");
  Reservation empty(granularity());
  Pieces pieces(8);
  Call call = pieces.load();
  call.set(0, kStreamOrder);
  call.destinations[5] = empty.get();
  EXPECT_ERROR(call.run(pieces.stream), kInvalid);
  EXPECT_EQ(call.fail_index, size_t{5});
}

// --- order ---------------------------------------------------------------------------

// With the order of the stream a pageable source is read before the call ends, and so
// is all that comes before it in the stream. With any other it is read at once.
CASE(batch, when_it_returns, kDriver, cuMemcpyBatchAsync) {
  Pieces pieces(8);
  Pages pageable(4096);
  const CUdeviceptr device = pieces.device;
  const CUdeviceptr pinned = as_device(pieces.host.get());
  const CUdeviceptr paged = as_device(pageable.get());
  struct Expectation {
    unsigned order;
    const char* load;
    const char* store;
    const char* pageable_load;
    const char* pageable_store;
  };
  const Expectation expectations[] = {
      {CU_MEMCPY_SRC_ACCESS_ORDER_STREAM, kAsynchronous, kAsynchronous, kSynchronous,
       kAsynchronous},
      {CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL, kSynchronous, kSynchronous,
       kAsynchronous, kSynchronous},
      {CU_MEMCPY_SRC_ACCESS_ORDER_ANY, kAsynchronous, kAsynchronous, kAsynchronous,
       kAsynchronous},
  };
  for (const Expectation& expected : expectations) {
    const About about("order " + describe(expected.order));
    const auto run = [&](CUdeviceptr to, CUdeviceptr from) {
      Call call;
      call.add(to, from, 64);
      call.set(0, expected.order);
      return when_it_returns([&] { return call.first_form(pieces.stream); },
                             pieces.stream);
    };
    EXPECT_EQ(run(device, pinned), std::string(expected.load));
    EXPECT_EQ(run(pinned, device), std::string(expected.store));
    EXPECT_EQ(run(device, paged), std::string(expected.pageable_load));
    EXPECT_EQ(run(paged, device), std::string(expected.pageable_store));
  }
}

// What any order allows is for the driver to say: it reads pinned memory late.
CASE(batch, when_its_source_is_read, kReference, cuMemcpyBatchAsync) {
  for (const unsigned order : kOrders) {
    const About about("order " + describe(order));
    const bool during = order == CU_MEMCPY_SRC_ACCESS_ORDER_DURING_API_CALL;
    Pieces pieces(8);
    Call call = pieces.load();
    call.set(0, order);
    const Busy busy(pieces.stream);
    EXPECT_OK(call.first_form(pieces.stream));
    std::fill_n(pieces.host.at(0), 8 * pieces.size, static_cast<unsigned char>(0));
    EXPECT_OK(cuStreamSynchronize(pieces.stream));
    EXPECT_EQ(pieces.all_loaded(), during);
  }
}

CASE(batch, when_its_pageable_source_is_read, kDriver, cuMemcpyBatchAsync) {
  for (const unsigned order : kOrders) {
    const About about("order " + describe(order));
    Pieces pieces(8);
    Bytes pageable = pieces.bytes;
    Call call = pieces.load();
    for (size_t i = 0; i < 8; ++i) {
      call.sources[i] = as_device(pageable.data() + i * pieces.size);
    }
    call.set(0, order);
    const Busy busy(pieces.stream);
    EXPECT_OK(call.first_form(pieces.stream));
    std::fill(pageable.begin(), pageable.end(), static_cast<unsigned char>(0));
    EXPECT_OK(cuStreamSynchronize(pieces.stream));
    EXPECT(pieces.all_loaded());
  }
}

CASE(batch, runs_in_stream_order, kReference, cuMemcpyBatchAsync) {
  Pieces pieces(8);
  Event event;
  Call call = pieces.load();
  call.set(0, kStreamOrder);
  const Busy busy(pieces.stream);
  EXPECT_OK(call.first_form(pieces.stream));
  EXPECT_OK(cuEventRecord(event, pieces.stream));
  EXPECT_ERROR(cuEventQuery(event), CUDA_ERROR_NOT_READY);
  EXPECT_OK(cuEventSynchronize(event));
  EXPECT(pieces.all_loaded());
}

CASE(batch, of_many_copies, kReference, cuMemcpyBatchAsync) {
  Pieces pieces(20'000, 4);
  Call call = pieces.load();
  call.set(0, kStreamOrder);
  EXPECT_OK(call.first_form(pieces.stream));
  EXPECT(pieces.all_loaded());
}

}  // namespace
}  // namespace contract
