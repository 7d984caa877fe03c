// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <future>
#include <memory>
#include <set>
#include <string>
#include <thread>

#include "stream_capture.h"
#include "virtual_memory.h"

namespace contract {

// --- for every group -----------------------------------------------------------------

namespace {

hipGraphExec_t instantiate(hipGraph_t graph) {
  hipGraphExec_t executable = nullptr;
  REQUIRE_OK(hipGraphInstantiate(&executable, graph, nullptr, nullptr, 0));
  return executable;
}

}  // namespace

size_t Graph::nodes() const {
  size_t count = 0;
  REQUIRE_OK(hipGraphGetNodes(get(), nullptr, &count));
  return count;
}

Executable::Executable(hipGraph_t graph) : Holder(instantiate(graph)) {}

hipStreamCaptureStatus capture_status(hipStream_t stream) {
  auto status = static_cast<hipStreamCaptureStatus>(99);
  REQUIRE_OK(hipStreamIsCapturing(stream, &status));
  return status;
}

void begin_capture(hipStream_t stream, hipStreamCaptureMode mode) {
  REQUIRE_OK(hipStreamBeginCapture(stream, mode));
}

Graph end_capture(hipStream_t stream) {
  hipGraph_t graph = nullptr;
  REQUIRE_OK(hipStreamEndCapture(stream, &graph));
  REQUIRE(graph != nullptr);
  return Graph(graph);
}

Graph capture(hipStream_t stream, const std::function<void()>& work,
              hipStreamCaptureMode mode) {
  begin_capture(stream, mode);
  work();
  return end_capture(stream);
}

void replay(hipGraphExec_t executable, hipStream_t stream) {
  REQUIRE_OK(hipGraphLaunch(executable, stream));
  REQUIRE_OK(hipStreamSynchronize(stream));
}

namespace {

constexpr const char* kSource = "clr hip_graph.cpp, hip_stream.cpp";

constexpr auto kNone = hipStreamCaptureStatusNone;
constexpr auto kActive = hipStreamCaptureStatusActive;
constexpr auto kInvalidated = hipStreamCaptureStatusInvalidated;

constexpr auto kGlobal = hipStreamCaptureModeGlobal;
constexpr auto kThreadLocal = hipStreamCaptureModeThreadLocal;
constexpr auto kRelaxed = hipStreamCaptureModeRelaxed;

constexpr size_t kBytes = 4096;

// Two pieces of device memory and one of the host's.
struct Pieces {
  DeviceMemory device{kBytes};
  DeviceMemory other{kBytes};
  RegisteredMemory host{kBytes};
  Bytes bytes = random_bytes(kBytes, 1);

  Pieces() { std::copy(bytes.begin(), bytes.end(), host.at(0)); }

  // One node in a capture.
  hipError_t load(hipStream_t stream) {
    return hipMemcpyAsync(device, host.get(), kBytes, hipMemcpyHostToDevice, stream);
  }
};

// The end of a capture that something has invalidated.
void expect_invalid_end(hipStream_t stream) {
  EXPECT_EQ(capture_status(stream), kInvalidated);
  auto graph = reinterpret_cast<hipGraph_t>(&stream);
  EXPECT_ERROR(hipStreamEndCapture(stream, &graph), hipErrorStreamCaptureInvalidated);
  EXPECT(graph == nullptr);
}

// The end of one that nothing has.
void expect_valid_end(hipStream_t stream) {
  EXPECT_EQ(capture_status(stream), kActive);
  end_capture(stream);
  EXPECT_EQ(capture_status(stream), kNone);
}

// A thread that captures from its construction to end().
class CapturingThread {
 public:
  CapturingThread(hipStream_t stream, hipStreamCaptureMode mode)
      : thread_([this, stream, mode] {
          began_.set_value(hipStreamBeginCapture(stream, mode));
          over_.get_future().wait_for(kPatience);
          hipGraph_t graph = nullptr;
          const hipError_t error = hipStreamEndCapture(stream, &graph);
          if (error == hipSuccess) EXPECT_OK(hipGraphDestroy(graph));
          ended_.set_value(error);
        }) {
    EXPECT_OK(began_.get_future().get());
  }
  ~CapturingThread() {
    if (thread_.joinable()) end();
  }

  // What the end of the capture says.
  hipError_t end() {
    over_.set_value();
    thread_.join();
    return ended_.get_future().get();
  }

 private:
  std::promise<hipError_t> began_;
  std::promise<void> over_;
  std::promise<hipError_t> ended_;
  std::thread thread_;
};

// Sets the calling thread's mode until its end.
class ThreadMode {
 public:
  explicit ThreadMode(hipStreamCaptureMode mode) : mode_(mode) {
    REQUIRE_OK(hipThreadExchangeStreamCaptureMode(&mode_));
  }
  ThreadMode(const ThreadMode&) = delete;
  ThreadMode& operator=(const ThreadMode&) = delete;
  ~ThreadMode() { EXPECT_OK(hipThreadExchangeStreamCaptureMode(&mode_)); }

 private:
  hipStreamCaptureMode mode_;
};

// In a thread of its own.
template <typename Call>
hipError_t elsewhere(Call call) {
  return std::async(std::launch::async, call).get();
}

// --- begin and end -------------------------------------------------------------------

CASE(capture, begins_and_ends,
     "hip-tests graph/hipStreamBeginCapture.cc, hipStreamEndCapture.cc",
     hipStreamBeginCapture, hipStreamEndCapture, hipStreamIsCapturing,
     hipGraphDestroy) {
  Pieces pieces;
  for (const unsigned kind : kStreamKinds) {
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      Stream stream(kind);
      EXPECT_EQ(capture_status(stream), kNone);
      begin_capture(stream, mode);
      EXPECT_EQ(capture_status(stream), kActive);
      EXPECT_OK(pieces.load(stream));
      EXPECT_EQ(capture_status(stream), kActive);
      const Graph graph = end_capture(stream);
      EXPECT_EQ(capture_status(stream), kNone);
      EXPECT_EQ(graph.nodes(), size_t{1});
    }
  }
}

CASE(capture, begins_again_and_again, kSource, hipStreamBeginCapture,
     hipStreamEndCapture) {
  Pieces pieces;
  Stream stream;
  for (size_t count = 0; count < 4; ++count) {
    const Graph graph = capture(stream, [&] {
      for (size_t i = 0; i < count; ++i) EXPECT_OK(pieces.load(stream));
    });
    EXPECT_EQ(graph.nodes(), count);
  }
}

CASE(capture, streams_that_cannot_capture, "hip-tests graph/hipStreamBeginCapture.cc",
     hipStreamBeginCapture) {
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    EXPECT_ERROR(hipStreamBeginCapture(nullptr, mode),
                 hipErrorStreamCaptureUnsupported);
    EXPECT_ERROR(hipStreamBeginCapture(hipStreamLegacy, mode),
                 hipErrorStreamCaptureUnsupported);
  }
}

// The stream is looked at first, then the mode, then whether the stream captures.
CASE(capture, modes_that_do_not_exist,
     "hip-tests graph/hipStreamBeginCapture.cc; clr hip_graph.cpp",
     hipStreamBeginCapture) {
  Stream stream;
  for (const int number : {-1, 3, 100}) {
    const auto mode = static_cast<hipStreamCaptureMode>(number);
    EXPECT_ERROR(hipStreamBeginCapture(stream, mode), hipErrorInvalidValue);
    EXPECT_ERROR(hipStreamBeginCapture(nullptr, mode),
                 hipErrorStreamCaptureUnsupported);
    begin_capture(stream);
    EXPECT_ERROR(hipStreamBeginCapture(stream, mode), hipErrorInvalidValue);
    expect_valid_end(stream);
  }
}

CASE(capture, a_stream_captures_once_at_a_time,
     "hip-tests graph/hipStreamBeginCapture.cc", hipStreamBeginCapture) {
  Stream stream;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    begin_capture(stream, mode);
    for (const hipStreamCaptureMode again : kCaptureModes) {
      EXPECT_ERROR(hipStreamBeginCapture(stream, again), hipErrorIllegalState);
    }
    expect_valid_end(stream);
  }
}

CASE(capture, ends_only_where_it_began, "hip-tests graph/hipStreamEndCapture.cc",
     hipStreamEndCapture) {
  Stream stream;
  hipGraph_t graph = nullptr;
  EXPECT_ERROR(hipStreamEndCapture(nullptr, &graph), hipErrorIllegalState);
  EXPECT_ERROR(hipStreamEndCapture(hipStreamLegacy, &graph), hipErrorIllegalState);
  EXPECT_ERROR(hipStreamEndCapture(stream, &graph), hipErrorIllegalState);
  begin_capture(stream);
  end_capture(stream);
  EXPECT_ERROR(hipStreamEndCapture(stream, &graph), hipErrorIllegalState);
}

CASE(capture, nobody_has_to_take_the_graph, "clr hip_graph.cpp; ROCm/clr#152",
     hipStreamEndCapture) {
  Pieces pieces;
  Stream stream;
  begin_capture(stream);
  EXPECT_OK(pieces.load(stream));
  EXPECT_OK(hipStreamEndCapture(stream, nullptr));
  EXPECT_EQ(capture_status(stream), kNone);
  EXPECT_ERROR(hipStreamEndCapture(stream, nullptr), hipErrorIllegalState);
  begin_capture(stream);
  EXPECT_ERROR(hipMemset(pieces.device, 0, kBytes), hipErrorStreamCaptureImplicit);
  EXPECT_ERROR(hipStreamEndCapture(stream, nullptr), hipErrorStreamCaptureInvalidated);
}

CASE(capture, ends_with_its_stream, "hip-tests graph/hipStreamEndCapture.cc",
     hipStreamDestroy, hipStreamEndCapture, hipMemset) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream stream;
    begin_capture(stream, mode);
    EXPECT_OK(pieces.load(stream));
    hipStream_t destroyed = stream.release();
    EXPECT_OK(hipStreamDestroy(destroyed));
    hipGraph_t graph = nullptr;
    EXPECT_ERROR(hipStreamEndCapture(destroyed, &graph), hipErrorContextIsDestroyed);
    EXPECT_OK(hipMemset(pieces.device, 0, kBytes));
  }
}

CASE(capture, ends_in_the_thread_in_which_it_began,
     "hip-tests graph/hipStreamEndCapture.cc", hipStreamEndCapture) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream stream;
    begin_capture(stream, mode);
    EXPECT_OK(pieces.load(stream));
    hipGraph_t graph = nullptr;
    const hipError_t error =
        elsewhere([&] { return hipStreamEndCapture(stream, &graph); });
    if (mode == kRelaxed) {
      EXPECT_OK(error);
      EXPECT_EQ(Graph(graph).nodes(), size_t{1});
    } else {
      EXPECT_ERROR(error, hipErrorStreamCaptureWrongThread);
      EXPECT_EQ(capture_status(stream), kActive);
      EXPECT_EQ(end_capture(stream).nodes(), size_t{1});
    }
  }
}

CASE(capture, other_threads_capture_too, "hip-tests graph/hipStreamBeginCapture.cc",
     hipStreamBeginCapture, hipMemcpyAsync) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream stream;
    begin_capture(stream, mode);
    EXPECT_OK(elsewhere([&] { return pieces.load(stream); }));
    EXPECT_OK(pieces.load(stream));
    EXPECT_EQ(end_capture(stream).nodes(), size_t{2});
  }
}

CASE(capture, nothing_runs, "hip-tests graph/hipStreamBeginCapture.cc", hipMemcpyAsync,
     hipMemsetAsync) {
  Pieces pieces;
  const Bytes before = random_bytes(kBytes, 2);
  upload(pieces.device, before);
  upload(pieces.other, before);
  Stream stream;
  begin_capture(stream);
  EXPECT_OK(pieces.load(stream));
  EXPECT_OK(hipMemsetAsync(pieces.other, 0, kBytes, stream));
  EXPECT_OK(hipMemcpyAsync(pieces.host.get(), pieces.other, kBytes,
                           hipMemcpyDeviceToHost, stream));
  EXPECT_EQ(end_capture(stream).nodes(), size_t{3});
  EXPECT_OK(hipDeviceSynchronize());
  EXPECT_BYTES(download(pieces.device, kBytes).data(), before);
  EXPECT_BYTES(download(pieces.other, kBytes).data(), before);
  EXPECT_BYTES(pieces.host.at(0), pieces.bytes);
}

CASE(capture, pageable_memory_is_captured_and_nobody_waits, "clr hip_memory.cpp",
     hipMemcpyAsync) {
  if (!simulated()) SKIP("what a machine does with it is not established");
  Pieces pieces;
  Pages pages(kBytes);
  Stream stream;
  const Graph graph = capture(stream, [&] {
    EXPECT_OK(hipMemcpyAsync(pieces.device, pages.get(), kBytes, hipMemcpyHostToDevice,
                             stream));
  });
  EXPECT_EQ(graph.nodes(), size_t{1});
  const Bytes late = random_bytes(kBytes, 3);
  std::copy(late.begin(), late.end(), pages.at(0));
  replay(Executable(graph), stream);
  EXPECT_BYTES(download(pieces.device, kBytes).data(), late);
}

// --- status --------------------------------------------------------------------------

CASE(capture, status_needs_a_place, kSource, hipStreamIsCapturing,
     hipStreamGetCaptureInfo) {
  Stream stream;
  unsigned long long id = 0;
  EXPECT_ERROR(hipStreamIsCapturing(stream, nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipStreamIsCapturing(nullptr, nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipStreamGetCaptureInfo(stream, nullptr, &id), hipErrorInvalidValue);
}

CASE(capture, the_null_stream_never_captures, kSource, hipStreamIsCapturing,
     hipStreamGetCaptureInfo) {
  hipStreamCaptureStatus status = kActive;
  unsigned long long id = 0;
  EXPECT_OK(hipStreamIsCapturing(nullptr, &status));
  EXPECT_EQ(status, kNone);
  status = kActive;
  EXPECT_OK(hipStreamGetCaptureInfo(nullptr, &status, &id));
  EXPECT_EQ(status, kNone);
}

CASE(capture, the_null_streams_status_is_not_told_while_a_blocking_stream_captures,
     kSource, hipStreamIsCapturing, hipStreamGetCaptureInfo) {
  for (const unsigned kind : kStreamKinds) {
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      Stream stream(kind);
      begin_capture(stream, mode);
      const hipError_t expected =
          kind == hipStreamDefault ? hipErrorStreamCaptureImplicit : hipSuccess;
      auto status = kActive;
      unsigned long long id = 0;
      EXPECT_ERROR(hipStreamIsCapturing(nullptr, &status), expected);
      EXPECT_ERROR(hipStreamGetCaptureInfo(nullptr, &status, &id), expected);
      expect_valid_end(stream);
    }
  }
}

// 0 when the stream does not capture.
unsigned long long capture_id(hipStream_t stream) {
  hipStreamCaptureStatus status = kNone;
  unsigned long long id = 0;
  REQUIRE_OK(hipStreamGetCaptureInfo(stream, &status, &id));
  EXPECT_EQ(status, capture_status(stream));
  return id;
}

CASE(capture, every_capture_has_an_id, "hip-tests graph/hipStreamGetCaptureInfo.cc",
     hipStreamGetCaptureInfo) {
  Stream first;
  Stream second;
  EXPECT_EQ(capture_id(first), 0ull);
  std::set<unsigned long long> ids;
  for (int round = 0; round < 3; ++round) {
    begin_capture(first);
    begin_capture(second);
    ids.insert(capture_id(first));
    ids.insert(capture_id(second));
    EXPECT_EQ(capture_id(first), capture_id(first));
    end_capture(second);
    end_capture(first);
  }
  EXPECT_EQ(ids.size(), size_t{6});
  EXPECT_EQ(ids.count(0), size_t{0});
}

CASE(capture, an_invalid_capture_has_no_id, kSource, hipStreamGetCaptureInfo,
     hipMemset) {
  Pieces pieces;
  Stream stream;
  begin_capture(stream);
  EXPECT_ERROR(hipMemset(pieces.device, 0, kBytes), hipErrorStreamCaptureImplicit);
  EXPECT_EQ(capture_id(stream), 0ull);
  expect_invalid_end(stream);
}

// --- several streams -----------------------------------------------------------------

// Lets the second stream depend on what the first has been given.
void follow(hipStream_t second, hipStream_t first, hipEvent_t event) {
  REQUIRE_OK(hipEventRecord(event, first));
  REQUIRE_OK(hipStreamWaitEvent(second, event, 0));
}

CASE(capture, a_stream_that_waits_joins, "hip-tests graph/hipStreamEndCapture.cc",
     hipEventRecord, hipStreamWaitEvent, hipStreamGetCaptureInfo) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream origin;
    Stream joined;
    Event fork;
    Event join;
    begin_capture(origin, mode);
    follow(joined, origin, fork);
    EXPECT_EQ(capture_status(joined), kActive);
    EXPECT_EQ(capture_id(joined), capture_id(origin));
    EXPECT_OK(pieces.load(joined));
    follow(origin, joined, join);
    EXPECT_OK(pieces.load(origin));
    EXPECT_EQ(end_capture(origin).nodes(), size_t{2});
    EXPECT_EQ(capture_status(joined), kNone);
    begin_capture(joined);
    expect_valid_end(joined);
  }
}

CASE(capture, a_stream_joins_through_another, kSource, hipStreamWaitEvent) {
  Pieces pieces;
  Stream streams[3];
  Event events[4];
  begin_capture(streams[0]);
  EXPECT_OK(pieces.load(streams[0]));
  follow(streams[1], streams[0], events[0]);
  EXPECT_OK(pieces.load(streams[1]));
  follow(streams[2], streams[1], events[1]);
  EXPECT_OK(pieces.load(streams[2]));
  EXPECT_EQ(capture_status(streams[2]), kActive);
  follow(streams[1], streams[2], events[2]);
  follow(streams[0], streams[1], events[3]);
  EXPECT_EQ(end_capture(streams[0]).nodes(), size_t{3});
}

CASE(capture, unjoined_work_is_an_error, "hip-tests graph/hipStreamEndCapture.cc",
     hipStreamEndCapture) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream origin;
    Stream joined;
    Event fork;
    begin_capture(origin, mode);
    follow(joined, origin, fork);
    EXPECT_OK(pieces.load(origin));
    EXPECT_OK(pieces.load(joined));
    hipGraph_t graph = nullptr;
    EXPECT_ERROR(hipStreamEndCapture(origin, &graph), hipErrorStreamCaptureUnjoined);
  }
}

CASE(capture, a_joined_stream_cannot_end_the_capture,
     "hip-tests graph/hipStreamEndCapture.cc", hipStreamEndCapture) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream origin;
    Stream joined;
    Event fork;
    Event join;
    begin_capture(origin, mode);
    follow(joined, origin, fork);
    EXPECT_OK(pieces.load(joined));
    follow(origin, joined, join);
    hipGraph_t graph = nullptr;
    EXPECT_ERROR(hipStreamEndCapture(joined, &graph), hipErrorStreamCaptureUnmatched);
    EXPECT_EQ(end_capture(origin).nodes(), size_t{1});
  }
}

CASE(capture, a_stream_that_did_nothing_need_not_join_again, kSource,
     hipStreamEndCapture) {
  Pieces pieces;
  Stream origin;
  Stream joined;
  Event fork;
  begin_capture(origin);
  EXPECT_OK(pieces.load(origin));
  follow(joined, origin, fork);
  EXPECT_EQ(capture_status(joined), kActive);
  EXPECT_EQ(end_capture(origin).nodes(), size_t{1});
  EXPECT_EQ(capture_status(joined), kNone);
  begin_capture(joined);
  expect_valid_end(joined);
}

CASE(capture, captures_do_not_disturb_each_other, kSource, hipStreamBeginCapture) {
  Pieces pieces;
  Stream first;
  Stream second;
  begin_capture(first, kGlobal);
  begin_capture(second, kThreadLocal);
  EXPECT_OK(pieces.load(first));
  EXPECT_OK(pieces.load(second));
  EXPECT_OK(pieces.load(first));
  EXPECT_EQ(end_capture(first).nodes(), size_t{2});
  EXPECT_EQ(end_capture(second).nodes(), size_t{1});
}

// --- events --------------------------------------------------------------------------

CASE(capture, a_recorded_event_is_no_node, kSource, hipEventRecord) {
  Pieces pieces;
  Stream stream;
  Event event;
  const Graph graph = capture(stream, [&] {
    EXPECT_OK(hipEventRecord(event, stream));
    EXPECT_OK(pieces.load(stream));
    EXPECT_OK(hipEventRecord(event, stream));
    EXPECT_ERROR(hipEventRecord(nullptr, stream), hipErrorInvalidHandle);
  });
  EXPECT_EQ(graph.nodes(), size_t{1});
}

CASE(capture, events_of_a_capture_cannot_be_asked,
     "clr CHANGELOG 7.2.1 and 7.12; clr hip_event.cpp", hipEventQuery,
     hipEventSynchronize) {
  if (!simulated() && !since(7, 12)) SKIP("known from 7.12 on");
  for (const auto ask : {hipEventQuery, hipEventSynchronize}) {
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      Stream stream;
      Event event;
      begin_capture(stream, mode);
      EXPECT_OK(hipEventRecord(event, stream));
      EXPECT_ERROR(ask(event), hipErrorCapturedEvent);
      expect_invalid_end(stream);
    }
  }
}

CASE(capture, events_that_stand_for_nothing_can_be_asked, "clr hip_event.cpp",
     hipEventQuery, hipEventSynchronize) {
  Stream stream;
  Event never;
  Event on_null_stream;
  REQUIRE_OK(hipEventRecord(on_null_stream, nullptr));
  REQUIRE_OK(hipEventSynchronize(on_null_stream));
  begin_capture(stream);
  for (hipEvent_t event : {never.get(), on_null_stream.get()}) {
    EXPECT_OK(hipEventQuery(event));
    EXPECT_OK(hipEventSynchronize(event));
  }
  expect_valid_end(stream);
}

CASE(capture, an_event_from_before_the_capture_is_isolated_from_it, "clr hip_event.cpp",
     hipStreamWaitEvent) {
  Stream stream;
  Stream other;
  Event before;
  REQUIRE_OK(hipEventRecord(before, stream));
  begin_capture(stream);
  EXPECT_ERROR(hipStreamWaitEvent(other, before, 0), hipErrorStreamCaptureIsolation);
  EXPECT_EQ(capture_status(other), kNone);
  expect_valid_end(stream);
  EXPECT_OK(hipStreamWaitEvent(other, before, 0));
}

CASE(capture, a_wait_for_ordinary_work_is_not_recorded, "clr hip_event.cpp",
     hipStreamWaitEvent) {
  Pieces pieces;
  Stream stream;
  Stream ordinary;
  Event event;
  REQUIRE_OK(hipEventRecord(event, ordinary));
  begin_capture(stream);
  EXPECT_OK(hipStreamWaitEvent(stream, event, 0));
  EXPECT_EQ(capture_status(ordinary), kNone);
  EXPECT_OK(pieces.load(stream));
  EXPECT_EQ(end_capture(stream).nodes(), size_t{1});
}

CASE(capture, waits_that_are_refused, "clr hip_event.cpp", hipStreamWaitEvent) {
  Stream stream;
  Event event;
  begin_capture(stream);
  EXPECT_OK(hipEventRecord(event, stream));
  EXPECT_ERROR(hipStreamWaitEvent(stream, nullptr, 0), hipErrorInvalidHandle);
  EXPECT_ERROR(hipStreamWaitEvent(stream, event, 2), hipErrorInvalidValue);
  expect_valid_end(stream);
}

// --- calls that wait for the legacy stream -------------------------------------------

struct SynchronousCall {
  const char* name;
  std::function<hipError_t(Pieces&)> make;
};

const std::vector<SynchronousCall>& synchronous_calls() {
  static const std::vector<SynchronousCall> calls = {
      {"hipMemset", [](Pieces& pieces) { return hipMemset(pieces.device, 7, kBytes); }},
      {"hipMemset of nothing", [](Pieces&) { return hipMemset(nullptr, 7, 0); }},
      {"hipMemcpy",
       [](Pieces& pieces) {
         return hipMemcpy(pieces.device, pieces.host.get(), kBytes,
                          hipMemcpyHostToDevice);
       }},
      {"hipMemcpy of nothing",
       [](Pieces&) { return hipMemcpy(nullptr, nullptr, 0, hipMemcpyDefault); }},
      {"hipMemcpy2D",
       [](Pieces& pieces) {
         return hipMemcpy2D(pieces.device, 128, pieces.host.get(), 128, 64, 4,
                            hipMemcpyHostToDevice);
       }},
      {"hipMemcpy3D",
       [](Pieces& pieces) {
         hipMemcpy3DParms box = {};
         box.dstPtr = {pieces.device, 128, 64, 4};
         box.srcPtr = {pieces.host.get(), 128, 64, 4};
         box.extent = {64, 4, 2};
         box.kind = hipMemcpyHostToDevice;
         return hipMemcpy3D(&box);
       }},
  };
  return calls;
}

// Whatever the mode, the kind of stream and the thread.
void expect_implicit_dependency(const SynchronousCall& call, hipStreamCaptureMode mode,
                                unsigned kind, bool in_other_thread) {
  Pieces pieces;
  const Bytes before = random_bytes(kBytes, 2);
  upload(pieces.device, before);
  Stream stream(kind);
  begin_capture(stream, mode);
  EXPECT_OK(pieces.load(stream));
  const auto make = [&] { return call.make(pieces); };
  if (!EXPECT_ERROR(in_other_thread ? elsewhere(make) : make(),
                    hipErrorStreamCaptureImplicit)) {
    report(CONTRACT_HERE, call.name);
  }
  EXPECT_ERROR(pieces.load(stream), hipErrorStreamCaptureInvalidated);
  expect_invalid_end(stream);
  EXPECT_OK(hipDeviceSynchronize());
  EXPECT_BYTES(download(pieces.device, kBytes).data(), before);
}

CASE(capture, blocking_copies_and_fills_break_every_capture, kSource, hipMemset,
     hipMemcpy, hipMemcpy2D, hipMemcpy3D, hipStreamEndCapture) {
  for (const SynchronousCall& call : synchronous_calls()) {
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      for (const unsigned kind : kStreamKinds) {
        expect_implicit_dependency(call, mode, kind, false);
        expect_implicit_dependency(call, mode, kind, true);
      }
    }
  }
}

CASE(capture, they_break_all_captures_of_the_process, kSource, hipMemset) {
  Pieces pieces;
  Stream streams[4];
  Event fork;
  begin_capture(streams[0], kGlobal);
  begin_capture(streams[1], kThreadLocal);
  begin_capture(streams[2], kRelaxed);
  follow(streams[3], streams[0], fork);
  EXPECT_ERROR(hipMemset(pieces.device, 0, kBytes), hipErrorStreamCaptureImplicit);
  EXPECT_EQ(capture_status(streams[3]), kInvalidated);
  for (const int i : {2, 1, 0}) expect_invalid_end(streams[i]);
}

CASE(capture, they_break_captures_of_other_threads, kSource, hipMemset) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream stream;
    CapturingThread other(stream, mode);
    EXPECT_ERROR(hipMemset(pieces.device, 0, kBytes), hipErrorStreamCaptureImplicit);
    EXPECT_ERROR(other.end(), hipErrorStreamCaptureInvalidated);
  }
}

CASE(capture, a_broken_capture_takes_nothing_more, kSource, hipMemcpyAsync,
     hipMemsetAsync, hipMemcpy2DAsync, hipMemcpy3DAsync) {
  Pieces pieces;
  Stream stream;
  begin_capture(stream);
  EXPECT_ERROR(hipMemset(pieces.device, 0, kBytes), hipErrorStreamCaptureImplicit);
  EXPECT_ERROR(pieces.load(stream), hipErrorStreamCaptureInvalidated);
  EXPECT_ERROR(hipMemsetAsync(pieces.device, 0, kBytes, stream),
               hipErrorStreamCaptureInvalidated);
  EXPECT_ERROR(hipMemcpy2DAsync(pieces.device, 64, pieces.other, 64, 64, 2,
                                hipMemcpyDeviceToDevice, stream),
               hipErrorStreamCaptureInvalidated);
  hipMemcpy3DParms box = {};
  box.dstPtr = {pieces.device, 128, 64, 4};
  box.srcPtr = {pieces.other, 128, 64, 4};
  box.extent = {64, 4, 2};
  box.kind = hipMemcpyDeviceToDevice;
  EXPECT_ERROR(hipMemcpy3DAsync(&box, stream), hipErrorStreamCaptureInvalidated);
  expect_invalid_end(stream);
}

CASE(capture, they_are_fine_again_when_no_capture_is_left, kSource, hipMemset,
     hipMemcpy) {
  Pieces pieces;
  Stream stream;
  begin_capture(stream);
  EXPECT_ERROR(hipMemset(pieces.device, 0, kBytes), hipErrorStreamCaptureImplicit);
  expect_invalid_end(stream);
  for (const SynchronousCall& call : synchronous_calls()) {
    EXPECT_OK(call.make(pieces));
  }
  EXPECT_OK(hipDeviceSynchronize());
}

CASE(capture, a_stream_is_free_after_a_broken_capture_from_7_14_on,
     "clr CHANGELOG 7.14; RS#6509", hipStreamEndCapture, hipStreamIsCapturing,
     hipStreamSynchronize) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream stream;
    begin_capture(stream, mode);
    EXPECT_ERROR(hipMemset(pieces.device, 0, kBytes), hipErrorStreamCaptureImplicit);
    expect_invalid_end(stream);
    if (since(7, 14)) {
      EXPECT_EQ(capture_status(stream), kNone);
      EXPECT_OK(hipStreamSynchronize(stream));
      const Graph graph = capture(stream, [&] { EXPECT_OK(pieces.load(stream)); });
      replay(Executable(graph), stream);
      EXPECT_BYTES(download(pieces.device, kBytes).data(), pieces.bytes);
    } else {
      EXPECT_EQ(capture_status(stream), kInvalidated);
      EXPECT_ERROR(hipStreamSynchronize(stream), hipErrorStreamCaptureUnsupported);
    }
  }
}

CASE(capture, waiting_for_the_device_breaks_every_capture, kSource,
     hipDeviceSynchronize) {
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream stream;
    Stream second;
    begin_capture(stream, mode);
    begin_capture(second, kRelaxed);
    EXPECT_ERROR(hipDeviceSynchronize(), hipErrorStreamCaptureUnsupported);
    expect_invalid_end(second);
    expect_invalid_end(stream);
  }
}

// In between it is not established.
CASE(capture, work_on_the_null_stream_breaks_captures_on_7_1_and_not_from_7_13_on,
     "RS#1032; RS#5361", hipMemcpyAsync, hipMemsetAsync) {
  const bool settled = !since(7, 2) || since(7, 13);
  if (!simulated() && !settled) SKIP("not established between 7.1 and 7.13");
  const hipError_t expected = since(7, 13) ? hipSuccess : hipErrorStreamCaptureImplicit;
  Pieces pieces;
  for (const unsigned kind : kStreamKinds) {
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      for (const bool fills : {false, true}) {
        Stream stream(kind);
        begin_capture(stream, mode);
        EXPECT_ERROR(fills ? hipMemsetAsync(pieces.device, 7, kBytes, nullptr)
                           : pieces.load(nullptr),
                     expected);
        if (!since(7, 13)) {
          expect_invalid_end(stream);
          continue;
        }
        expect_valid_end(stream);
        EXPECT_OK(hipStreamSynchronize(nullptr));
        EXPECT_BYTES(download(pieces.device, kBytes).data(),
                     fills ? Bytes(kBytes, 7) : pieces.bytes);
      }
    }
  }
}

CASE(capture, a_batch_runs_at_once_and_is_not_recorded, "clr hip_memory.cpp",
     hipMemcpyBatchAsync) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    upload(pieces.device, Bytes(kBytes, 0));
    Stream stream;
    begin_capture(stream, mode);
    EXPECT_OK(hipMemsetAsync(pieces.other, 1, kBytes, stream));
    void* destinations[] = {pieces.device.at(0), pieces.device.at(kBytes / 2)};
    void* sources[] = {pieces.host.at(0), pieces.host.at(kBytes / 2)};
    size_t sizes[] = {kBytes / 2, kBytes / 2};
    size_t fail_index = 0;
    EXPECT_OK(hipMemcpyBatchAsync(destinations, sources, sizes, 2, nullptr, nullptr, 0,
                                  &fail_index, stream));
    const Graph graph = end_capture(stream);
    EXPECT_EQ(graph.nodes(), size_t{1});
    EXPECT_OK(hipDeviceSynchronize());
    EXPECT_BYTES(download(pieces.device, kBytes).data(), pieces.bytes);
    upload(pieces.device, Bytes(kBytes, 0));
    replay(Executable(graph), stream);
    EXPECT_BYTES(download(pieces.device, kBytes).data(), Bytes(kBytes, 0));
  }
}

CASE(capture, a_wrong_rectangle_breaks_nothing, "clr hip_memory.cpp",
     hipMemcpy2DAsync) {
  Pieces pieces;
  Stream stream;
  begin_capture(stream);
  const auto copy = [&](void* to, const void* from, size_t pitch, size_t width,
                        size_t height) {
    return hipMemcpy2DAsync(to, pitch, from, 128, width, height, hipMemcpyHostToDevice,
                            stream);
  };
  void* const device = pieces.device;
  void* const host = pieces.host.get();
  EXPECT_ERROR(copy(nullptr, host, 128, 64, 2), hipErrorInvalidValue);
  EXPECT_ERROR(copy(device, nullptr, 128, 64, 2), hipErrorInvalidValue);
  EXPECT_ERROR(copy(device, host, 63, 64, 2), hipErrorInvalidPitchValue);
  EXPECT_ERROR(copy(device, host, 256, 129, 2), hipErrorInvalidPitchValue);
  EXPECT_OK(copy(device, host, 128, 0, 2));
  EXPECT_OK(copy(device, host, 128, 64, 0));
  EXPECT_OK(copy(device, host, 128, 64, 2));
  EXPECT_EQ(end_capture(stream).nodes(), size_t{1});
}

// Without a capture a rectangle of nothing is right whatever the addresses.
CASE(capture, a_captured_rectangle_needs_addresses_first, "clr hip_memory.cpp",
     hipMemcpy2DAsync) {
  if (!simulated() && !since(7, 12)) SKIP("the sources read are from 7.12 on");
  Pieces pieces;
  Stream stream;
  begin_capture(stream);
  EXPECT_ERROR(hipMemcpy2DAsync(nullptr, 64, pieces.host.get(), 64, 0, 2,
                                hipMemcpyHostToDevice, stream),
               hipErrorInvalidValue);
  EXPECT_EQ(end_capture(stream).nodes(), size_t{0});
}

// --- calls that the mode forbids -----------------------------------------------------

// A call that some modes forbid, and what to do once no capture is left.
struct UnsafeCall {
  const char* name;
  std::function<hipError_t()> make;
  std::function<void(hipError_t made)> tidy = [](hipError_t) {};
};

// Everything that the calls need.
class UnsafeCalls {
 public:
  UnsafeCalls() {
    REQUIRE_OK(hipEventRecord(event_, idle_));
    REQUIRE_OK(hipStreamSynchronize(idle_));
  }

  std::vector<UnsafeCall> all() {
    return {
        {"hipMalloc", [this] { return hipMalloc(&made_, 64); },
         [this](hipError_t made) {
           if (made == hipSuccess) EXPECT_OK(hipFree(made_));
         }},
        {"hipFree",
         [this] {
           doomed_ = device_.get();
           return hipFree(doomed_);
         },
         [this](hipError_t made) {
           if (made != hipSuccess) EXPECT_OK(hipFree(doomed_));
           device_.release();
           device_ = DeviceMemory(64);
         }},
        {"hipHostMalloc", [this] { return hipHostMalloc(&made_, 64, 0); },
         [this](hipError_t made) {
           if (made == hipSuccess) EXPECT_OK(hipHostFree(made_));
         }},
        {"hipHostRegister",
         [this] { return hipHostRegister(pages_.get(), pages_.size(), 0); },
         [this](hipError_t made) {
           if (made == hipSuccess) EXPECT_OK(hipHostUnregister(pages_.get()));
         }},
        {"hipStreamQuery", [this] { return hipStreamQuery(idle_); }},
        {"hipStreamSynchronize", [this] { return hipStreamSynchronize(idle_); }},
        {"hipEventQuery", [this] { return hipEventQuery(event_); }},
        {"hipEventSynchronize", [this] { return hipEventSynchronize(event_); }},
    };
  }

 private:
  void* made_ = nullptr;
  void* doomed_ = nullptr;
  DeviceMemory device_{64};
  Pages pages_{kBytes};
  Stream idle_;
  Event event_;
};

// Is a call forbidden in a thread of the mode, and is the capture broken by it?
void expect_verdict(const UnsafeCall& call, hipStreamCaptureMode thread_mode,
                    hipStream_t stream, bool forbidden,
                    const std::function<hipError_t()>& end) {
  hipError_t made = hipSuccess;
  {
    ThreadMode mode(thread_mode);
    made = call.make();
  }
  const bool right =
      EXPECT_ERROR(made, forbidden ? hipErrorStreamCaptureUnsupported : hipSuccess) &&
      EXPECT_EQ(capture_status(stream), forbidden ? kInvalidated : kActive);
  if (!right) report(CONTRACT_HERE, call.name);
  EXPECT_ERROR(end(), forbidden ? hipErrorStreamCaptureInvalidated : hipSuccess);
  call.tidy(made);
}

hipError_t end_without_graph(hipStream_t stream) {
  hipGraph_t graph = nullptr;
  const hipError_t error = hipStreamEndCapture(stream, &graph);
  if (error == hipSuccess) EXPECT_OK(hipGraphDestroy(graph));
  return error;
}

CASE(capture, calls_that_the_threads_own_captures_forbid,
     "clr hip_stream.cpp; clr hip_internal.hpp, hip_stream.cpp, hip_event.cpp",
     hipMalloc, hipFree, hipHostMalloc, hipHostRegister, hipStreamQuery,
     hipStreamSynchronize, hipEventQuery, hipThreadExchangeStreamCaptureMode) {
  UnsafeCalls calls;
  for (const UnsafeCall& call : calls.all()) {
    if (call.name == std::string("hipEventSynchronize") && !simulated() &&
        !since(7, 12)) {
      continue;
    }
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      for (const hipStreamCaptureMode thread_mode : kCaptureModes) {
        const bool forbidden = mode != kRelaxed && thread_mode != kRelaxed;
        Stream stream;
        begin_capture(stream, mode);
        expect_verdict(call, thread_mode, stream, forbidden,
                       [&] { return end_without_graph(stream); });
      }
    }
  }
}

CASE(capture, calls_that_other_threads_captures_forbid,
     "clr hip_stream.cpp; clr CHANGELOG 7.2.1 and 7.12", hipMalloc, hipFree,
     hipHostMalloc, hipHostRegister, hipStreamQuery, hipStreamSynchronize,
     hipEventQuery, hipEventSynchronize) {
  if (!simulated() && !since(7, 12)) SKIP("known from 7.12 on");
  UnsafeCalls calls;
  for (const UnsafeCall& call : calls.all()) {
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      for (const hipStreamCaptureMode thread_mode : kCaptureModes) {
        const bool forbidden = mode == kGlobal && thread_mode == kGlobal;
        Stream stream;
        CapturingThread other(stream, mode);
        expect_verdict(call, thread_mode, stream, forbidden,
                       [&] { return other.end(); });
      }
    }
  }
}

CASE(capture, a_forbidden_call_breaks_only_captures_that_forbid_it, kSource,
     hipMalloc) {
  Stream global;
  Stream local;
  Stream relaxed;
  begin_capture(global, kGlobal);
  begin_capture(local, kThreadLocal);
  begin_capture(relaxed, kRelaxed);
  void* pointer = nullptr;
  EXPECT_ERROR(hipMalloc(&pointer, 64), hipErrorStreamCaptureUnsupported);
  expect_valid_end(relaxed);
  EXPECT_EQ(capture_status(global), kInvalidated);
  end_without_graph(local);
  expect_invalid_end(global);
}

CASE(capture, capturing_streams_cannot_be_asked,
     "clr hip_stream.cpp; hip-tests graph/hipStreamIsCapturing.cc", hipStreamQuery,
     hipStreamSynchronize) {
  for (const auto ask : {hipStreamQuery, hipStreamSynchronize}) {
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      Stream stream;
      begin_capture(stream, mode);
      EXPECT_ERROR(ask(stream), hipErrorStreamCaptureUnsupported);
      EXPECT_EQ(capture_status(stream), kInvalidated);
      EXPECT_ERROR(ask(stream), hipErrorStreamCaptureUnsupported);
      expect_invalid_end(stream);
    }
  }
}

CASE(capture, the_null_stream_can_be_asked, "clr hip_stream.cpp", hipStreamQuery,
     hipStreamSynchronize) {
  for (const unsigned kind : kStreamKinds) {
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      Stream stream(kind);
      begin_capture(stream, mode);
      EXPECT_OK(hipStreamQuery(nullptr));
      EXPECT_OK(hipStreamSynchronize(nullptr));
      expect_valid_end(stream);
    }
  }
}

CASE(capture, a_device_pointer_can_be_asked_for,
     "hip-tests memory/hipHostGetDevicePointer.cc", hipHostGetDevicePointer) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream stream;
    begin_capture(stream, mode);
    void* pointer = nullptr;
    EXPECT_OK(hipHostGetDevicePointer(&pointer, pieces.host.get(), 0));
    expect_valid_end(stream);
  }
}

CASE(capture, virtual_memory_can_be_had_and_given_back,
     "clr hip_stream.cpp; hip-tests virtualMemoryManagement (cases *_Capture)",
     hipMemGetAllocationGranularity, hipMemAddressReserve, hipMemCreate, hipMemMap,
     hipMemSetAccess, hipMemGetAccess, hipMemRetainAllocationHandle,
     hipMemGetAllocationPropertiesFromHandle, hipMemUnmap, hipMemRelease,
     hipMemAddressFree) {
  need_virtual_memory();
  for (const unsigned kind : kStreamKinds) {
    for (const hipStreamCaptureMode mode : kCaptureModes) {
      Stream stream(kind);
      begin_capture(stream, mode);
      {
        hipMemAllocationProp properties = device_memory();
        size_t granularity = 0;
        EXPECT_OK(hipMemGetAllocationGranularity(&granularity, &properties,
                                                 hipMemAllocationGranularityMinimum));
        Reservation range(kChunk);
        Chunk chunk(kChunk);
        EXPECT_OK(hipMemGetAllocationPropertiesFromHandle(&properties, chunk));
        Mapping mapping(range.at(0), kChunk, chunk);
        EXPECT_OK(set_access(range.at(0), kChunk, hipMemAccessFlagsProtReadWrite));
        EXPECT_EQ(access_at(range.at(0)), 3ull);
        hipMemGenericAllocationHandle_t retained = nullptr;
        EXPECT_OK(hipMemRetainAllocationHandle(&retained, range.at(0)));
        if (since(7, 12)) EXPECT_OK(hipMemRelease(retained));
      }
      expect_valid_end(stream);
    }
  }
}

// --- a thread's mode -----------------------------------------------------------------

CASE(capture, a_threads_mode_is_exchanged,
     "hip-tests graph/hipThreadExchangeStreamCaptureMode.cc",
     hipThreadExchangeStreamCaptureMode) {
  auto mode = kRelaxed;
  EXPECT_OK(hipThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, kGlobal);
  mode = kThreadLocal;
  EXPECT_OK(hipThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, kRelaxed);
  auto others = kRelaxed;
  EXPECT_OK(elsewhere([&] { return hipThreadExchangeStreamCaptureMode(&others); }));
  EXPECT_EQ(others, kGlobal);
  mode = kGlobal;
  EXPECT_OK(hipThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, kThreadLocal);
}

CASE(capture, a_threads_mode_must_exist,
     "hip-tests graph/hipThreadExchangeStreamCaptureMode.cc",
     hipThreadExchangeStreamCaptureMode) {
  EXPECT_ERROR(hipThreadExchangeStreamCaptureMode(nullptr), hipErrorInvalidValue);
  for (const int number : {-1, 3}) {
    auto mode = static_cast<hipStreamCaptureMode>(number);
    EXPECT_ERROR(hipThreadExchangeStreamCaptureMode(&mode), hipErrorInvalidValue);
  }
  auto mode = kGlobal;
  EXPECT_OK(hipThreadExchangeStreamCaptureMode(&mode));
  EXPECT_EQ(mode, kGlobal);
}

// --- memory that is had during a capture ---------------------------------------------

// What an allocator does when memory is asked for: reserve, create, map, and clear.
class ClearedMemory {
 public:
  enum class Clear { kOnTheLegacyStream, kOnAStreamOfItsOwn };

  explicit ClearedMemory(Clear clear) {
    mapping_ = std::make_unique<Mapping>(range_.at(0), kChunk, chunk_);
    REQUIRE_OK(set_access(range_.at(0), kChunk, hipMemAccessFlagsProtReadWrite));
    error_ = clear == Clear::kOnTheLegacyStream ? hipMemset(range_.at(0), 0, kChunk)
                                                : clear_on_own_stream();
  }

  unsigned char* get() const { return range_.at(0); }
  hipError_t error() const { return error_; }

 private:
  // The thread may wait for a stream that takes no part in any capture.
  hipError_t clear_on_own_stream() {
    ThreadMode mode(kRelaxed);
    Stream stream(hipStreamNonBlocking);
    const hipError_t error = hipMemsetAsync(range_.at(0), 0, kChunk, stream);
    return error == hipSuccess ? hipStreamSynchronize(stream) : error;
  }

  Reservation range_{kChunk};
  Chunk chunk_{kChunk};
  std::unique_ptr<Mapping> mapping_;
  hipError_t error_;
};

CASE(capture, an_allocator_that_clears_with_a_blocking_fill_breaks_it, kSource,
     hipMemset, hipMemMap, hipStreamEndCapture) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream stream;
    begin_capture(stream, mode);
    EXPECT_OK(pieces.load(stream));
    const ClearedMemory memory(ClearedMemory::Clear::kOnTheLegacyStream);
    EXPECT_ERROR(memory.error(), hipErrorStreamCaptureImplicit);
    EXPECT_ERROR(hipMemcpyAsync(memory.get(), pieces.device, kBytes,
                                hipMemcpyDeviceToDevice, stream),
                 hipErrorStreamCaptureInvalidated);
    expect_invalid_end(stream);
  }
}

CASE(capture, an_allocator_that_clears_on_a_stream_of_its_own_does_not, kSource,
     hipMemsetAsync, hipMemMap, hipStreamEndCapture) {
  Pieces pieces;
  for (const hipStreamCaptureMode mode : kCaptureModes) {
    Stream stream;
    begin_capture(stream, mode);
    EXPECT_OK(pieces.load(stream));
    const ClearedMemory memory(ClearedMemory::Clear::kOnAStreamOfItsOwn);
    EXPECT_OK(memory.error());
    EXPECT_OK(hipMemcpyAsync(memory.get(), pieces.device, kBytes,
                             hipMemcpyDeviceToDevice, stream));
    const Graph graph = end_capture(stream);
    EXPECT_EQ(graph.nodes(), size_t{2});
    EXPECT_BYTES(download(memory.get(), kChunk).data(), Bytes(kChunk, 0));
    replay(Executable(graph), stream);
    EXPECT_BYTES(download(memory.get(), kBytes).data(), pieces.bytes);
  }
}

}  // namespace
}  // namespace contract
