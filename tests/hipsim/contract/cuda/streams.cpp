// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "contract.h"

namespace contract {
namespace {

constexpr const char* kDriver = DRIVER;
constexpr const char* kReference = DRIVER "; CUDA Driver API, Stream Management";
constexpr const char* kOrder =
    DRIVER "; CUDA Driver API, Stream synchronization behavior";
constexpr const char* kEvents = DRIVER "; CUDA Driver API, Event Management";
constexpr size_t kBytes = 4096;

// Two pieces of device memory and the bytes of a registered one. Whether `late` has
// arrived in `target` says in which order two streams ran.
struct Relay {
  RegisteredMemory late{kBytes};
  DeviceMemory middle{kBytes};
  DeviceMemory target{kBytes};
  Bytes expected = random_bytes(kBytes, 1);

  Relay() {
    std::copy(expected.begin(), expected.end(), late.at(0));
    upload(middle, Bytes(kBytes, 0));
    upload(target, Bytes(kBytes, 0));
  }
  void write_middle(CUstream stream) {
    REQUIRE_OK(cuMemcpyHtoDAsync_v2(middle, late.get(), kBytes, stream));
  }
  void read_middle(CUstream stream) {
    REQUIRE_OK(cuMemcpyDtoDAsync_v2(target, middle, kBytes, stream));
  }
  bool arrived() { return download(target, kBytes) == expected; }
};

// --- streams -------------------------------------------------------------------------

CASE(streams, created_and_destroyed, kReference, cuStreamCreate,
     cuStreamCreateWithPriority, cuStreamDestroy_v2) {
  CUstream streams[3] = {};
  REQUIRE_OK(cuStreamCreate(&streams[0], CU_STREAM_DEFAULT));
  REQUIRE_OK(cuStreamCreate(&streams[1], CU_STREAM_NON_BLOCKING));
  REQUIRE_OK(cuStreamCreateWithPriority(&streams[2], CU_STREAM_NON_BLOCKING, 0));
  for (int i = 0; i < 3; ++i) {
    EXPECT(streams[i] != nullptr);
    EXPECT_OK(cuStreamQuery(streams[i]));
    for (int j = 0; j < i; ++j) EXPECT(streams[i] != streams[j]);
  }
  for (CUstream stream : streams) EXPECT_OK(cuStreamDestroy_v2(stream));
}

CASE(streams, created_with_what_is_not_allowed, kReference, cuStreamCreate,
     cuStreamCreateWithPriority) {
  CUstream stream = nullptr;
  EXPECT_ERROR(cuStreamCreate(nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuStreamCreateWithPriority(nullptr, 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuStreamCreate(&stream, 2), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuStreamCreateWithPriority(&stream, 2, 0), CUDA_ERROR_INVALID_VALUE);
}

CASE(streams, priorities_outside_the_range_are_moved_into_it, kReference,
     cuStreamCreateWithPriority) {
  for (const int priority : {-100, -1, 0, 1, 100}) {
    CUstream stream = nullptr;
    EXPECT_OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, priority));
    EXPECT_OK(cuStreamDestroy_v2(stream));
  }
}

CASE(streams, the_streams_nobody_made_cannot_be_destroyed, kReference,
     cuStreamDestroy_v2) {
  EXPECT_ERROR(cuStreamDestroy_v2(nullptr), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_ERROR(cuStreamDestroy_v2(CU_STREAM_LEGACY), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_ERROR(cuStreamDestroy_v2(CU_STREAM_PER_THREAD), CUDA_ERROR_INVALID_HANDLE);
}

CASE(streams, the_legacy_stream_has_two_names, kReference, cuStreamQuery) {
  const Busy busy(nullptr);
  EXPECT_ERROR(cuStreamQuery(nullptr), CUDA_ERROR_NOT_READY);
  EXPECT_ERROR(cuStreamQuery(CU_STREAM_LEGACY), CUDA_ERROR_NOT_READY);
  EXPECT_OK(cuStreamSynchronize(CU_STREAM_LEGACY));
  EXPECT_OK(cuStreamQuery(nullptr));
}

CASE(streams, query_says_whether_work_is_done, kReference, cuStreamQuery,
     cuStreamSynchronize, cuCtxSynchronize) {
  Stream stream;
  EXPECT_OK(cuStreamQuery(stream));
  const Busy busy(stream);
  EXPECT_ERROR(cuStreamQuery(stream), CUDA_ERROR_NOT_READY);
  EXPECT_OK(cuStreamSynchronize(stream));
  EXPECT_OK(cuStreamQuery(stream));
  const Busy again(stream);
  EXPECT_OK(cuCtxSynchronize());
  EXPECT_OK(cuStreamQuery(stream));
}

CASE(streams, synchronize_is_for_one_stream, kReference, cuStreamSynchronize) {
  Stream busy_one;
  Stream idle_one;
  const Busy busy(busy_one);
  EXPECT_OK(cuStreamSynchronize(idle_one));
  EXPECT_ERROR(cuStreamQuery(busy_one), CUDA_ERROR_NOT_READY);
  EXPECT_OK(cuStreamSynchronize(busy_one));
}

CASE(streams, a_stream_runs_in_order, kReference, cuMemcpyHtoDAsync_v2) {
  Relay relay;
  Stream stream;
  const Busy busy(stream);
  relay.write_middle(stream);
  relay.read_middle(stream);
  EXPECT(relay.arrived());
}

CASE(streams, the_legacy_stream_waits_for_blocking_streams, kOrder, cuStreamCreate) {
  Relay relay;
  Stream stream(CU_STREAM_DEFAULT);
  const Busy busy(stream);
  relay.write_middle(stream);
  relay.read_middle(nullptr);
  EXPECT(relay.arrived());
}

CASE(streams, blocking_streams_wait_for_the_legacy_stream, kOrder, cuStreamCreate) {
  Relay relay;
  Stream stream(CU_STREAM_DEFAULT);
  const Busy busy(nullptr);
  relay.write_middle(nullptr);
  relay.read_middle(stream);
  EXPECT(relay.arrived());
}

CASE(streams, non_blocking_streams_do_not_wait_for_the_legacy_stream, kOrder,
     cuStreamCreate) {
  Relay relay;
  Stream stream;
  const Busy busy(nullptr);
  relay.write_middle(nullptr);
  relay.read_middle(stream);
  EXPECT(!relay.arrived());
}

CASE(streams, the_legacy_stream_does_not_wait_for_non_blocking_streams, kOrder,
     cuStreamCreate) {
  Relay relay;
  Stream stream;
  const Busy busy(stream);
  relay.write_middle(stream);
  relay.read_middle(nullptr);
  EXPECT(!relay.arrived());
}

CASE(streams, what_asking_the_legacy_stream_is_about, kOrder, cuStreamQuery,
     cuStreamSynchronize) {
  Stream blocking(CU_STREAM_DEFAULT);
  Stream free;
  {
    const Busy busy(free);
    EXPECT_OK(cuStreamQuery(nullptr));
    EXPECT_OK(cuStreamSynchronize(nullptr));
    EXPECT_ERROR(cuStreamQuery(free), CUDA_ERROR_NOT_READY);
    EXPECT_OK(cuStreamSynchronize(free));
  }
  const Busy busy(blocking);
  EXPECT_ERROR(cuStreamQuery(nullptr), CUDA_ERROR_NOT_READY);
  EXPECT_OK(cuStreamSynchronize(nullptr));
  EXPECT_OK(cuStreamQuery(blocking));
}

CASE(streams, destroyed_while_they_are_busy, kReference, cuStreamDestroy_v2) {
  Stream stream;
  Stream other;
  Event event;
  const std::string of_another =
      when_it_returns([&] { return cuStreamDestroy_v2(other.release()); }, stream);
  EXPECT_EQ(of_another, std::string(kAsynchronous));
  if (simulated()) return;  // where the end of a stream waits for its work
  const std::string of_it =
      when_it_returns([&] { return cuStreamDestroy_v2(stream.release()); }, stream);
  EXPECT_EQ(of_it, std::string(kAsynchronous));
}

// --- events --------------------------------------------------------------------------

CASE(events, created_and_destroyed, kEvents, cuEventCreate, cuEventDestroy_v2) {
  for (const unsigned flags : {0u, 1u, 2u, 3u, 6u, 7u}) {
    const About about("flags " + describe(flags));
    CUevent event = nullptr;
    EXPECT_OK(cuEventCreate(&event, flags));
    EXPECT_OK(cuEventQuery(event));
    EXPECT_OK(cuEventSynchronize(event));
    EXPECT_OK(cuEventDestroy_v2(event));
  }
  CUevent event = nullptr;
  EXPECT_ERROR(cuEventCreate(nullptr, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuEventCreate(&event, CU_EVENT_INTERPROCESS), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuEventCreate(&event, 8), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuEventDestroy_v2(nullptr), CUDA_ERROR_INVALID_HANDLE);
}

CASE(events, a_null_event, kEvents, cuEventRecord, cuEventQuery, cuEventSynchronize,
     cuStreamWaitEvent) {
  EXPECT_ERROR(cuEventRecord(nullptr, nullptr), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_ERROR(cuEventQuery(nullptr), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_ERROR(cuEventSynchronize(nullptr), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_ERROR(cuStreamWaitEvent(nullptr, nullptr, 0), CUDA_ERROR_INVALID_HANDLE);
}

CASE(events, query_says_whether_it_was_reached, kEvents, cuEventRecord, cuEventQuery,
     cuEventSynchronize) {
  Stream stream;
  Event event;
  const Busy busy(stream);
  EXPECT_OK(cuEventRecord(event, stream));
  EXPECT_ERROR(cuEventQuery(event), CUDA_ERROR_NOT_READY);
  EXPECT_OK(cuEventSynchronize(event));
  EXPECT_OK(cuEventQuery(event));
  EXPECT_OK(cuStreamQuery(stream));
}

CASE(events, elapsed_time, kEvents, cuEventElapsedTime) {
  Stream stream;
  Event start;
  Event stop;
  Event never;
  Event untimed(CU_EVENT_DISABLE_TIMING);
  float time = -1;
  EXPECT_OK(cuEventRecord(start, stream));
  {
    const Busy busy(stream);
    EXPECT_OK(cuEventRecord(stop, stream));
    EXPECT_OK(cuEventRecord(untimed, stream));
    EXPECT_ERROR(cuEventElapsedTime(&time, start, stop), CUDA_ERROR_NOT_READY);
    EXPECT_OK(cuStreamSynchronize(stream));
  }
  EXPECT_OK(cuEventElapsedTime(&time, start, stop));
  EXPECT(time > 1);
  EXPECT_OK(cuEventElapsedTime(&time, stop, start));
  EXPECT(time < 0);
  EXPECT_ERROR(cuEventElapsedTime(&time, start, untimed), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_ERROR(cuEventElapsedTime(&time, never, stop), CUDA_ERROR_INVALID_HANDLE);
  EXPECT_ERROR(cuEventElapsedTime(nullptr, start, stop), CUDA_ERROR_INVALID_HANDLE);
}

CASE(events, a_wait_orders_two_streams, kReference, cuStreamWaitEvent, cuEventRecord) {
  Relay relay;
  Stream writer;
  Stream reader;
  Event written;
  const Busy busy(writer);
  relay.write_middle(writer);
  EXPECT_OK(cuEventRecord(written, writer));
  EXPECT_OK(cuStreamWaitEvent(reader, written, 0));
  EXPECT_ERROR(cuEventQuery(written), CUDA_ERROR_NOT_READY);
  relay.read_middle(reader);
  EXPECT(relay.arrived());
}

CASE(events, without_a_wait_two_streams_have_no_order, kReference,
     cuMemcpyDtoDAsync_v2) {
  Relay relay;
  Stream writer;
  Stream reader;
  const Busy busy(writer);
  relay.write_middle(writer);
  relay.read_middle(reader);
  EXPECT(!relay.arrived());
}

CASE(events, a_wait_for_an_event_nobody_recorded_is_no_wait, kReference,
     cuStreamWaitEvent) {
  Stream stream;
  Event event;
  EXPECT_OK(cuStreamWaitEvent(stream, event, 0));
  EXPECT_OK(cuStreamSynchronize(stream));
}

CASE(events, a_wait_is_for_the_recording_of_its_moment, kReference, cuStreamWaitEvent) {
  Stream slow;
  Stream waiting;
  Event event;
  EXPECT_OK(cuEventRecord(event, slow));
  EXPECT_OK(cuStreamWaitEvent(waiting, event, 0));
  const Busy busy(slow);
  EXPECT_OK(cuEventRecord(event, slow));
  EXPECT_OK(cuStreamSynchronize(waiting));
  EXPECT_ERROR(cuEventQuery(event), CUDA_ERROR_NOT_READY);
  EXPECT_OK(cuStreamSynchronize(slow));
}

CASE(events, flags_of_a_wait, kDriver, cuStreamWaitEvent) {
  Stream stream;
  Event event;
  EXPECT_ERROR(cuStreamWaitEvent(stream, event, CU_EVENT_WAIT_EXTERNAL),
               CUDA_ERROR_ILLEGAL_STATE);
  EXPECT_ERROR(cuStreamWaitEvent(stream, event, 2), CUDA_ERROR_INVALID_VALUE);
}

CASE(events, an_event_orders_streams_of_two_devices, kReference, cuStreamWaitEvent) {
  need_devices(2);
  Stream writer;
  Event written;
  const Busy busy(writer);
  EXPECT_OK(cuEventRecord(written, writer));
  {
    CurrentDevice other(1);
    Stream reader;
    EXPECT_ERROR(cuEventRecord(written, reader), CUDA_ERROR_INVALID_HANDLE);
    EXPECT_OK(cuStreamWaitEvent(reader, written, 0));
    EXPECT_OK(cuStreamSynchronize(reader));
  }
  EXPECT_OK(cuEventQuery(written));
}

}  // namespace
}  // namespace contract
