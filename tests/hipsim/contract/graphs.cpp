// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstdlib>
#include <set>

#include "stream_capture.h"
#include "virtual_memory.h"

namespace contract {
namespace {

constexpr const char* kSource = "clr hip_graph.cpp";
constexpr const char* kTest = "hip-tests graph/hipGraphLaunch.cc";

constexpr size_t kBytes = 4096;

void write(RegisteredMemory& memory, const Bytes& bytes) {
  std::copy(bytes.begin(), bytes.end(), memory.at(0));
}

// What a graph copies from the host to the device and back again.
struct RoundTrip {
  RegisteredMemory there{kBytes};
  RegisteredMemory back{kBytes};
  DeviceMemory device{kBytes};
  Stream stream;

  Graph captured() {
    return capture(stream, [this] {
      EXPECT_OK(
          hipMemcpyAsync(device, there.get(), kBytes, hipMemcpyHostToDevice, stream));
      EXPECT_OK(
          hipMemcpyAsync(back.get(), device, kBytes, hipMemcpyDeviceToHost, stream));
    });
  }
  void expect_replays(hipGraphExec_t executable, hipStream_t where, unsigned seed) {
    const Bytes bytes = random_bytes(kBytes, seed);
    write(there, bytes);
    replay(executable, where);
    EXPECT_BYTES(back.at(0), bytes);
  }
};

// --- replays -------------------------------------------------------------------------

CASE(graphs, copies_are_replayed_with_what_their_sources_hold, kTest,
     hipGraphInstantiate, hipGraphLaunch, hipGraphExecDestroy, hipGraphDestroy) {
  RoundTrip trip;
  const Graph graph = trip.captured();
  EXPECT_EQ(graph.nodes(), size_t{2});
  const Executable executable(graph);
  for (unsigned seed = 0; seed < 100; ++seed) {
    trip.expect_replays(executable, trip.stream, seed);
  }
}

CASE(graphs, nothing_runs_before_the_launch, kTest, hipGraphInstantiate,
     hipGraphLaunch) {
  RoundTrip trip;
  const Bytes before = random_bytes(kBytes, 1);
  write(trip.there, random_bytes(kBytes, 2));
  write(trip.back, before);
  upload(trip.device, before);
  const Graph graph = trip.captured();
  const Executable executable(graph);
  EXPECT_OK(hipDeviceSynchronize());
  EXPECT_BYTES(trip.back.at(0), before);
  EXPECT_BYTES(download(trip.device, kBytes).data(), before);
  trip.expect_replays(executable, trip.stream, 3);
}

CASE(graphs, fills_are_replayed, "hip-tests graph/hipGraphAddMemsetNode.cc",
     hipMemsetAsync, hipGraphLaunch) {
  DeviceMemory memory(kBytes);
  Stream stream;
  const Graph graph = capture(stream, [&] {
    EXPECT_OK(hipMemsetAsync(memory, 1, kBytes, stream));
    EXPECT_OK(hipMemsetAsync(memory.at(256), 2, 512, stream));
  });
  EXPECT_EQ(graph.nodes(), size_t{2});
  const Executable executable(graph);
  Bytes expected(kBytes, 1);
  std::fill_n(expected.begin() + 256, 512, static_cast<unsigned char>(2));
  for (unsigned seed = 0; seed < 20; ++seed) {
    upload(memory, random_bytes(kBytes, seed));
    replay(executable, stream);
    EXPECT_BYTES(download(memory, kBytes).data(), expected);
  }
}

CASE(graphs, rectangles_are_replayed, "clr hip_memory.cpp", hipMemcpy2DAsync,
     hipGraphLaunch) {
  constexpr size_t kPitch = 256;
  constexpr size_t kWidth = 100;
  constexpr size_t kHeight = 12;
  RegisteredMemory host(kPitch * kHeight);
  DeviceMemory device(kWidth * kHeight);
  Stream stream;
  const Graph graph = capture(stream, [&] {
    EXPECT_OK(hipMemcpy2DAsync(device, kWidth, host.at(20), kPitch, kWidth, kHeight,
                               hipMemcpyHostToDevice, stream));
  });
  EXPECT_EQ(graph.nodes(), size_t{1});
  const Executable executable(graph);
  for (unsigned seed = 0; seed < 20; ++seed) {
    const Bytes bytes = random_bytes(kPitch * kHeight, seed);
    write(host, bytes);
    Bytes expected;
    for (size_t row = 0; row < kHeight; ++row) {
      const auto first = bytes.begin() + static_cast<ptrdiff_t>(20 + row * kPitch);
      expected.insert(expected.end(), first, first + kWidth);
    }
    replay(executable, stream);
    EXPECT_BYTES(download(device, expected.size()).data(), expected);
  }
}

CASE(graphs, boxes_are_replayed, "clr hip_memory.cpp", hipMemcpy3DAsync,
     hipGraphLaunch) {
  constexpr size_t kPitch = 64;
  constexpr size_t kRows = 8;
  constexpr size_t kSlices = 4;
  RegisteredMemory host(kPitch * kRows * kSlices);
  DeviceMemory device(kPitch * kRows * kSlices);
  Stream stream;
  hipMemcpy3DParms box = {};
  box.srcPtr = {host.get(), kPitch, kPitch, kRows};
  box.dstPtr = {device, kPitch, kPitch, kRows};
  box.srcPos = {4, 1, 1};
  box.dstPos = {8, 2, 0};
  box.extent = {32, 5, 3};
  box.kind = hipMemcpyHostToDevice;
  const Graph graph =
      capture(stream, [&] { EXPECT_OK(hipMemcpy3DAsync(&box, stream)); });
  box = {};
  EXPECT_EQ(graph.nodes(), size_t{1});
  const Executable executable(graph);
  for (unsigned seed = 0; seed < 20; ++seed) {
    const Bytes bytes = random_bytes(host.size(), seed);
    write(host, bytes);
    upload(device, Bytes(device.size(), 0));
    Bytes expected(device.size(), 0);
    for (size_t z = 0; z < 3; ++z) {
      for (size_t y = 0; y < 5; ++y) {
        const size_t from = ((z + 1) * kRows + y + 1) * kPitch + 4;
        const size_t to = (z * kRows + y + 2) * kPitch + 8;
        std::copy_n(bytes.begin() + static_cast<ptrdiff_t>(from), 32,
                    expected.begin() + static_cast<ptrdiff_t>(to));
      }
    }
    replay(executable, stream);
    EXPECT_BYTES(download(device, device.size()).data(), expected);
  }
}

// Moves bytes one place on, so that the number of launches can be read off.
CASE(graphs, launches_of_one_stream_run_in_order, kTest, hipGraphLaunch) {
  constexpr size_t kPlace = 64;
  constexpr size_t kPlaces = 40;
  DeviceMemory row(kPlace * kPlaces);
  DeviceMemory copy(kPlace * kPlaces);
  Stream stream;
  const size_t moved = kPlace * (kPlaces - 1);
  const Graph graph = capture(stream, [&] {
    EXPECT_OK(hipMemcpyAsync(copy, row, moved, hipMemcpyDeviceToDevice, stream));
    EXPECT_OK(
        hipMemcpyAsync(row.at(kPlace), copy, moved, hipMemcpyDeviceToDevice, stream));
  });
  const Executable executable(graph);
  const Bytes bytes = random_bytes(kPlace * kPlaces, 1);
  upload(row, bytes);
  constexpr size_t kLaunches = 33;
  for (size_t i = 0; i < kLaunches; ++i) EXPECT_OK(hipGraphLaunch(executable, stream));
  EXPECT_OK(hipStreamSynchronize(stream));
  const Bytes first(bytes.begin(), bytes.begin() + kPlace);
  for (size_t place = 0; place <= kLaunches; ++place) {
    EXPECT_BYTES(download(row.at(place * kPlace), kPlace).data(), first);
  }
  const auto second = bytes.begin() + kPlace;
  EXPECT_BYTES(download(row.at((kLaunches + 1) * kPlace), kPlace).data(),
               Bytes(second, second + kPlace));
}

// Both branches read what came before the fork, and what comes after the join reads
// what both have written.
CASE(graphs, branches_keep_their_order, "hip-tests graph/hipGraphClassicForkJoin.cc",
     hipEventRecord, hipStreamWaitEvent, hipGraphLaunch) {
  constexpr size_t kLarge = size_t{1} << 20;
  RegisteredMemory there(kLarge);
  RegisteredMemory back(2 * kLarge);
  DeviceMemory root(kLarge);
  DeviceMemory left(kLarge);
  DeviceMemory right(kLarge);
  DeviceMemory both(2 * kLarge);
  Stream stream;
  Stream side;
  Event fork;
  Event join;
  const auto copy = [](void* to, const void* from, hipStream_t where) {
    EXPECT_OK(hipMemcpyAsync(to, from, kLarge, hipMemcpyDefault, where));
  };
  const Graph graph = capture(stream, [&] {
    EXPECT_OK(hipMemsetAsync(both, 0, 2 * kLarge, stream));
    copy(root, there.get(), stream);
    EXPECT_OK(hipEventRecord(fork, stream));
    EXPECT_OK(hipStreamWaitEvent(side, fork, 0));
    copy(left, root, stream);
    copy(right, root, side);
    EXPECT_OK(hipMemsetAsync(right.at(64), 0xEE, 64, side));
    EXPECT_OK(hipEventRecord(join, side));
    EXPECT_OK(hipStreamWaitEvent(stream, join, 0));
    copy(both.at(0), left, stream);
    copy(both.at(kLarge), right, stream);
    EXPECT_OK(
        hipMemcpyAsync(back.get(), both, 2 * kLarge, hipMemcpyDeviceToHost, stream));
  });
  EXPECT_EQ(graph.nodes(), size_t{8});
  const Executable executable(graph);
  for (unsigned seed = 0; seed < 20; ++seed) {
    Bytes bytes = random_bytes(kLarge, seed);
    write(there, bytes);
    replay(executable, stream);
    EXPECT_BYTES(back.at(0), bytes);
    std::fill_n(bytes.begin() + 64, 64, static_cast<unsigned char>(0xEE));
    EXPECT_BYTES(back.at(kLarge), bytes);
  }
}

// --- where graphs are launched -------------------------------------------------------

CASE(graphs, launched_on_any_stream, kTest, hipGraphLaunch) {
  RoundTrip trip;
  const Executable executable(trip.captured());
  Stream other;
  Stream blocking(hipStreamDefault);
  unsigned seed = 0;
  for (hipStream_t where : {trip.stream.get(), other.get(), blocking.get(),
                            hipStream_t{nullptr}, trip.stream.get()}) {
    trip.expect_replays(executable, where, ++seed);
  }
}

CASE(graphs, outlives_the_stream_of_its_capture, kSource, hipGraphLaunch) {
  RoundTrip trip;
  const Executable executable(trip.captured());
  trip.stream.reset();
  Stream other;
  trip.expect_replays(executable, other, 1);
}

CASE(graphs, a_launch_is_ordered_like_other_work, kTest, hipGraphLaunch,
     hipStreamQuery) {
  RoundTrip trip;
  const Executable executable(trip.captured());
  for (hipStream_t where : {trip.stream.get(), hipStream_t{nullptr}}) {
    const Bytes late = random_bytes(kBytes, 7);
    write(trip.there, Bytes(kBytes, 0));
    const Busy busy(where);
    EXPECT_OK(hipGraphLaunch(executable, where));
    write(trip.there, late);
    EXPECT_ERROR(hipStreamQuery(where), hipErrorNotReady);
    EXPECT_OK(hipStreamSynchronize(where));
    EXPECT_BYTES(trip.back.at(0), late);
  }
}

CASE(graphs, a_launch_on_the_null_stream_waits_for_blocking_streams,
     "HIP docs, Asynchronous execution", hipGraphLaunch) {
  RoundTrip trip;
  const Executable executable(trip.captured());
  Stream blocking(hipStreamDefault);
  const Bytes late = random_bytes(kBytes, 7);
  write(trip.there, Bytes(kBytes, 0));
  const Busy busy(blocking);
  EXPECT_OK(hipGraphLaunch(executable, nullptr));
  write(trip.there, late);
  EXPECT_OK(hipStreamSynchronize(nullptr));
  EXPECT_OK(hipStreamQuery(blocking));
  EXPECT_BYTES(trip.back.at(0), late);
}

CASE(graphs, on_another_device, "HIP docs, Multi-device management", hipGraphLaunch,
     hipSetDevice) {
  need_devices(2);
  CurrentDevice other(1);
  RoundTrip trip;
  const Executable executable(trip.captured());
  for (unsigned seed = 0; seed < 3; ++seed) {
    trip.expect_replays(executable, trip.stream, seed);
  }
}

// hipGraphLaunch has no word on captures.
CASE(graphs, a_launch_on_a_capturing_stream_runs_at_once_and_is_not_recorded, kSource,
     hipGraphLaunch, hipStreamBeginCapture, hipStreamEndCapture) {
  RoundTrip trip;
  const Executable executable(trip.captured());
  DeviceMemory other(kBytes);
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    const Bytes bytes = random_bytes(kBytes, 1 + mode);
    write(trip.there, bytes);
    begin_capture(trip.stream, mode);
    EXPECT_OK(hipMemsetAsync(other, 0, kBytes, trip.stream));
    EXPECT_OK(hipGraphLaunch(executable, trip.stream));
    EXPECT_EQ(end_capture(trip.stream).nodes(), size_t{1});
    EXPECT_OK(hipDeviceSynchronize());
    EXPECT_BYTES(trip.back.at(0), bytes);
  }
}

CASE(graphs, a_launch_leaves_the_captures_of_other_streams_alone, kSource,
     hipGraphLaunch) {
  RoundTrip trip;
  const Executable executable(trip.captured());
  unsigned seed = 0;
  for (const unsigned kind : kStreamKinds) {
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      Stream capturing(kind);
      const Bytes bytes = random_bytes(kBytes, ++seed);
      write(trip.there, bytes);
      begin_capture(capturing, mode);
      EXPECT_OK(
          hipGraphLaunch(executable, seed % 2 == 0 ? nullptr : trip.stream.get()));
      EXPECT_EQ(end_capture(capturing).nodes(), size_t{0});
      EXPECT_OK(hipDeviceSynchronize());
      EXPECT_BYTES(trip.back.at(0), bytes);
    }
  }
}

// --- lives ---------------------------------------------------------------------------

CASE(graphs, an_executable_outlives_its_graph, "hip-tests graph/hipGraphDestroy.cc",
     hipGraphDestroy, hipGraphLaunch) {
  RoundTrip trip;
  Graph graph = trip.captured();
  const Executable executable(graph);
  graph.reset();
  trip.expect_replays(executable, trip.stream, 1);
}

CASE(graphs, a_graph_outlives_its_executables, "hip-tests graph/hipGraphExecDestroy.cc",
     hipGraphExecDestroy, hipGraphInstantiate) {
  RoundTrip trip;
  const Graph graph = trip.captured();
  for (unsigned seed = 0; seed < 3; ++seed) {
    const Executable first(graph);
    const Executable second(graph);
    EXPECT(first.get() != second.get());
    trip.expect_replays(first, trip.stream, 2 * seed);
    trip.expect_replays(second, trip.stream, 2 * seed + 1);
  }
  EXPECT_EQ(graph.nodes(), size_t{2});
}

CASE(graphs, an_executable_may_go_while_it_runs, "CUDA docs, Graph memory lifetime",
     hipGraphExecDestroy) {
  if (!simulated()) SKIP("not established");
  RoundTrip trip;
  const Bytes bytes = random_bytes(kBytes, 1);
  write(trip.there, bytes);
  const Busy busy(trip.stream);
  {
    const Executable executable(trip.captured());
    EXPECT_OK(hipGraphLaunch(executable, trip.stream));
  }
  EXPECT_OK(hipStreamSynchronize(trip.stream));
  EXPECT_BYTES(trip.back.at(0), bytes);
}

CASE(graphs, an_empty_graph_does_nothing, "clr hip_graph.cpp", hipGraphInstantiate,
     hipGraphLaunch) {
  Stream stream;
  const Graph graph = capture(stream, [] {});
  EXPECT_EQ(graph.nodes(), size_t{0});
  const Executable executable(graph);
  replay(executable, stream);
  replay(executable, nullptr);
}

CASE(graphs, an_executable_holds_memory_of_the_device, "clr hip_graph_internal.cpp",
     hipGraphInstantiate, hipGraphExecDestroy, hipMemGetInfo) {
  if (!simulated()) SKIP("where the runtime takes it from is not known");
  RoundTrip trip;
  Graph graph = trip.captured();
  const size_t before = free_memory();
  Executable first(graph);
  const size_t one = before - free_memory();
  EXPECT(one >= size_t{128} << 10);
  Executable second(graph);
  EXPECT_EQ(before - free_memory(), 2 * one);
  graph.reset();
  EXPECT_EQ(before - free_memory(), 2 * one);
  trip.expect_replays(first, trip.stream, 1);
  first.reset();
  EXPECT_EQ(before - free_memory(), one);
  second.reset();
  EXPECT_EQ(free_memory(), before);
}

CASE(graphs, an_executable_needs_memory_of_the_device, "clr hip_graph_internal.cpp",
     hipGraphInstantiate) {
  if (!simulated()) SKIP("needs a small device");
  RoundTrip trip;
  const Graph graph = trip.captured();
  Chunk all(free_memory() / 4096 * 4096);
  hipGraphExec_t executable = nullptr;
  EXPECT_ERROR(hipGraphInstantiate(&executable, graph, nullptr, nullptr, 0),
               hipErrorOutOfMemory);
  all.reset();
  trip.expect_replays(Executable(graph), trip.stream, 1);
}

// --- arguments -----------------------------------------------------------------------

CASE(graphs, nodes_are_listed, "hip-tests graph/hipGraphGetNodes.cc",
     hipGraphGetNodes) {
  DeviceMemory memory(kBytes);
  Stream stream;
  const Graph graph = capture(stream, [&] {
    for (int i = 0; i < 3; ++i) {
      EXPECT_OK(hipMemsetAsync(memory, i, kBytes, stream));
    }
  });
  size_t count = 0;
  EXPECT_OK(hipGraphGetNodes(graph, nullptr, &count));
  REQUIRE_EQ(count, size_t{3});
  std::vector<hipGraphNode_t> nodes(3);
  EXPECT_OK(hipGraphGetNodes(graph, nodes.data(), &count));
  EXPECT_EQ(count, size_t{3});
  const std::set<hipGraphNode_t> different(nodes.begin(), nodes.end());
  EXPECT_EQ(different.size(), size_t{3});
  EXPECT_EQ(different.count(nullptr), size_t{0});

  const auto unwritten = reinterpret_cast<hipGraphNode_t>(&count);
  std::vector<hipGraphNode_t> room(5, unwritten);
  count = 2;
  EXPECT_OK(hipGraphGetNodes(graph, room.data(), &count));
  EXPECT_EQ(count, size_t{2});
  EXPECT(std::equal(nodes.begin(), nodes.begin() + 2, room.begin()));
  EXPECT(room[2] == unwritten);
  count = 5;
  EXPECT_OK(hipGraphGetNodes(graph, room.data(), &count));
  EXPECT_EQ(count, size_t{3});
  EXPECT(std::equal(nodes.begin(), nodes.end(), room.begin()));
  EXPECT(room[3] == nullptr && room[4] == nullptr);
}

CASE(graphs, nodes_of_nothing, "hip-tests graph/hipGraphGetNodes.cc",
     hipGraphGetNodes) {
  Stream stream;
  const Graph graph = capture(stream, [] {});
  size_t count = 0;
  hipGraphNode_t node = nullptr;
  EXPECT_ERROR(hipGraphGetNodes(nullptr, &node, &count), hipErrorInvalidValue);
  EXPECT_ERROR(hipGraphGetNodes(graph, &node, nullptr), hipErrorInvalidValue);
}

CASE(graphs, instantiated_with_what_is_not_allowed,
     "hip-tests graph/hipGraphInstantiate.cc, hipGraphInstantiateWithFlags.cc",
     hipGraphInstantiate, hipGraphInstantiateWithFlags) {
  RoundTrip trip;
  const Graph graph = trip.captured();
  hipGraphExec_t executable = nullptr;
  EXPECT_ERROR(hipGraphInstantiate(nullptr, graph, nullptr, nullptr, 0),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipGraphInstantiate(&executable, nullptr, nullptr, nullptr, 0),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipGraphInstantiateWithFlags(nullptr, graph, 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipGraphInstantiateWithFlags(&executable, nullptr, 0),
               hipErrorInvalidValue);
  for (const unsigned long long flags : {2ull, 4ull, 9ull, 16ull, ~0ull}) {
    EXPECT_ERROR(hipGraphInstantiateWithFlags(&executable, graph, flags),
                 hipErrorInvalidValue);
  }
}

CASE(graphs, instantiated_with_flags, "hip-tests graph/hipGraphInstantiateWithFlags.cc",
     hipGraphInstantiateWithFlags) {
  RoundTrip trip;
  const Graph graph = trip.captured();
  for (const unsigned flags : {0u, unsigned{hipGraphInstantiateFlagAutoFreeOnLaunch},
                               unsigned{hipGraphInstantiateFlagUseNodePriority}}) {
    hipGraphExec_t executable = nullptr;
    REQUIRE_OK(hipGraphInstantiateWithFlags(&executable, graph, flags));
    trip.expect_replays(executable, trip.stream, flags);
    EXPECT_OK(hipGraphExecDestroy(executable));
  }
}

CASE(graphs, launches_that_are_refused, "hip-tests graph/hipGraphLaunch.cc",
     hipGraphLaunch) {
  RoundTrip trip;
  Executable executable(trip.captured());
  EXPECT_ERROR(hipGraphLaunch(nullptr, trip.stream), hipErrorInvalidValue);
  hipStream_t gone = nullptr;
  REQUIRE_OK(hipStreamCreate(&gone));
  REQUIRE_OK(hipStreamDestroy(gone));
  EXPECT_ERROR(hipGraphLaunch(executable, gone), hipErrorContextIsDestroyed);
  EXPECT_ERROR(hipGraphLaunch(nullptr, gone), hipErrorInvalidValue);
  hipGraphExec_t destroyed = executable.release();
  REQUIRE_OK(hipGraphExecDestroy(destroyed));
  EXPECT_ERROR(hipGraphLaunch(destroyed, trip.stream), hipErrorInvalidValue);
}

CASE(graphs, destroyed_once,
     "hip-tests graph/hipGraphDestroy.cc, hipGraphExecDestroy.cc", hipGraphDestroy,
     hipGraphExecDestroy) {
  Stream stream;
  hipGraph_t graph = capture(stream, [] {}).release();
  EXPECT_OK(hipGraphDestroy(graph));
  EXPECT_ERROR(hipGraphDestroy(graph), hipErrorIllegalState);
  EXPECT_ERROR(hipGraphDestroy(nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipGraphExecDestroy(nullptr), hipErrorInvalidValue);
}

// --- memory that goes ----------------------------------------------------------------

constexpr int kFaulted = 70;

CHILD(replays_into_unmapped_memory) {
  MappedMemory memory;
  Stream stream;
  const Graph graph = capture(
      stream, [&] { EXPECT_OK(hipMemsetAsync(memory.get(), 1, kBytes, stream)); });
  const Executable executable(graph);
  replay(executable, stream);
  EXPECT_BYTES(download(memory.get(), kBytes).data(), Bytes(kBytes, 1));
  memory.unmap();
  REQUIRE_OK(hipGraphLaunch(executable, stream));
  const bool faulted = hipStreamSynchronize(stream) == hipErrorIllegalAddress &&
                       hipStreamSynchronize(nullptr) == hipErrorIllegalAddress;
  std::_Exit(faulted && stat("memory_faults") == 1 ? kFaulted : 1);
}

CASE(graphs, a_replay_into_unmapped_memory_faults, "clr hip_graph_internal.cpp",
     hipDeviceGetAttribute) {
  if (!simulated()) SKIP("a fault would end a real process");
  need_virtual_memory();
  EXPECT_EQ(run_child("replays_into_unmapped_memory"), kFaulted);
}

// What sleep and wake do: other memory at the same address.
CASE(graphs, a_replay_finds_what_is_mapped_at_the_address_now,
     "clr hip_graph_internal.cpp", hipGraphLaunch, hipMemMap, hipMemUnmap) {
  if (!simulated()) SKIP("not established for copies and fills");
  RegisteredMemory host(kBytes);
  Stream stream;
  Reservation range(kChunk);
  Executable executable;
  for (unsigned round = 0; round < 5; ++round) {
    const Chunk chunk(kChunk);
    const Mapping mapping(range.at(0), kChunk, chunk);
    REQUIRE_OK(set_access(range.at(0), kChunk, hipMemAccessFlagsProtReadWrite));
    upload(range.at(0), Bytes(kBytes, 0));
    if (round == 0) {
      executable = Executable(capture(stream, [&] {
        EXPECT_OK(hipMemcpyAsync(range.at(0), host.get(), kBytes, hipMemcpyHostToDevice,
                                 stream));
      }));
    }
    const Bytes bytes = random_bytes(kBytes, round);
    write(host, bytes);
    replay(executable, stream);
    EXPECT_BYTES(download(range.at(0), kBytes).data(), bytes);
  }
}

}  // namespace
}  // namespace contract
