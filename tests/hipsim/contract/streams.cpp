// SPDX-License-Identifier: Apache-2.0
#include <algorithm>

#include "contract.h"

namespace contract {
namespace {

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
  void write_middle(hipStream_t stream) {
    REQUIRE_OK(
        hipMemcpyAsync(middle, late.get(), kBytes, hipMemcpyHostToDevice, stream));
  }
  void read_middle(hipStream_t stream) {
    REQUIRE_OK(hipMemcpyAsync(target, middle, kBytes, hipMemcpyDeviceToDevice, stream));
  }
  bool arrived() {
    REQUIRE_OK(hipDeviceSynchronize());
    return download(target, kBytes) == expected;
  }
};

CASE(streams, created_and_destroyed, "hip-tests stream/hipStreamCreate.cc",
     hipStreamCreate, hipStreamCreateWithFlags, hipStreamCreateWithPriority,
     hipStreamDestroy) {
  hipStream_t streams[4] = {};
  REQUIRE_OK(hipStreamCreate(&streams[0]));
  REQUIRE_OK(hipStreamCreateWithFlags(&streams[1], hipStreamDefault));
  REQUIRE_OK(hipStreamCreateWithFlags(&streams[2], hipStreamNonBlocking));
  REQUIRE_OK(hipStreamCreateWithPriority(&streams[3], hipStreamNonBlocking, 0));
  for (int i = 0; i < 4; ++i) {
    EXPECT(streams[i] != nullptr);
    EXPECT_OK(hipStreamQuery(streams[i]));
    for (int j = 0; j < i; ++j) EXPECT(streams[i] != streams[j]);
  }
  for (hipStream_t stream : streams) EXPECT_OK(hipStreamDestroy(stream));
}

CASE(streams, created_with_what_is_not_allowed, "clr hip_stream.cpp", hipStreamCreate,
     hipStreamCreateWithFlags, hipStreamCreateWithPriority) {
  hipStream_t stream = nullptr;
  EXPECT_ERROR(hipStreamCreate(nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipStreamCreateWithFlags(nullptr, 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipStreamCreateWithPriority(nullptr, 0, 0), hipErrorInvalidValue);
  for (const unsigned flags : {2u, 3u, 0x80000000u, ~0u}) {
    EXPECT_ERROR(hipStreamCreateWithFlags(&stream, flags), hipErrorInvalidValue);
    EXPECT_ERROR(hipStreamCreateWithPriority(&stream, flags, 0), hipErrorInvalidValue);
  }
}

CASE(streams, priorities_outside_the_range_are_moved_into_it, "clr hip_stream.cpp",
     hipStreamCreateWithPriority) {
  for (const int priority : {-100, -1, 0, 1, 100}) {
    hipStream_t stream = nullptr;
    EXPECT_OK(hipStreamCreateWithPriority(&stream, hipStreamNonBlocking, priority));
    EXPECT_OK(hipStreamDestroy(stream));
  }
}

CASE(streams, the_streams_nobody_made_cannot_be_destroyed, "clr hip_stream.cpp",
     hipStreamDestroy) {
  EXPECT_ERROR(hipStreamDestroy(nullptr), hipErrorInvalidHandle);
  EXPECT_ERROR(hipStreamDestroy(hipStreamLegacy), hipErrorInvalidHandle);
  EXPECT_ERROR(hipStreamDestroy(hipStreamPerThread), hipErrorInvalidHandle);
}

CASE(streams, query_says_whether_work_is_done, "hip-tests stream/hipStreamQuery.cc",
     hipStreamQuery, hipStreamSynchronize) {
  Stream stream;
  EXPECT_OK(hipStreamQuery(stream));
  EXPECT_OK(hipStreamSynchronize(stream));
  const Busy busy(stream);
  EXPECT_ERROR(hipStreamQuery(stream), hipErrorNotReady);
  EXPECT_OK(hipStreamSynchronize(stream));
  EXPECT_OK(hipStreamQuery(stream));
}

CASE(streams, synchronize_is_for_one_stream, "HIP docs, Asynchronous execution",
     hipStreamSynchronize) {
  Stream busy_one;
  Stream idle_one;
  const Busy busy(busy_one);
  EXPECT_OK(hipStreamSynchronize(idle_one));
  EXPECT_ERROR(hipStreamQuery(busy_one), hipErrorNotReady);
  EXPECT_OK(hipStreamSynchronize(busy_one));
}

CASE(streams, a_stream_runs_in_order, "HIP docs, Asynchronous execution",
     hipMemcpyAsync) {
  Relay relay;
  Stream stream;
  const Busy busy(stream);
  relay.write_middle(stream);
  relay.read_middle(stream);
  EXPECT(relay.arrived());
}

CASE(streams, the_null_stream_waits_for_blocking_streams,
     "hip-tests stream/hipStreamImplicitSync.cc", hipStreamCreateWithFlags,
     hipMemcpyAsync) {
  Relay relay;
  Stream stream(hipStreamDefault);
  const Busy busy(stream);
  relay.write_middle(stream);
  relay.read_middle(nullptr);
  EXPECT(relay.arrived());
}

CASE(streams, blocking_streams_wait_for_the_null_stream,
     "hip-tests stream/hipStreamImplicitSync.cc", hipStreamCreateWithFlags,
     hipMemcpyAsync) {
  Relay relay;
  Stream stream(hipStreamDefault);
  const Busy busy(nullptr);
  relay.write_middle(nullptr);
  relay.read_middle(stream);
  EXPECT(relay.arrived());
}

CASE(streams, non_blocking_streams_do_not_wait_for_the_null_stream,
     "HIP docs, Asynchronous execution (null stream)", hipStreamCreateWithFlags,
     hipMemcpyAsync) {
  Relay relay;
  Stream stream(hipStreamNonBlocking);
  const Busy busy(nullptr);
  relay.write_middle(nullptr);
  relay.read_middle(stream);
  EXPECT(!relay.arrived());
}

CASE(streams, the_null_stream_does_not_wait_for_non_blocking_streams,
     "HIP docs, Asynchronous execution (null stream)", hipStreamCreateWithFlags,
     hipMemcpyAsync) {
  Relay relay;
  Stream stream(hipStreamNonBlocking);
  const Busy busy(stream);
  relay.write_middle(stream);
  relay.read_middle(nullptr);
  EXPECT(!relay.arrived());
}

CASE(streams, interleaved_null_stream_work_stays_in_order,
     "hip-tests stream/hipStreamImplicitSync.cc", hipMemsetAsync) {
  DeviceMemory memory(kBytes);
  Stream stream(hipStreamDefault);
  const Busy busy(nullptr);
  for (int round = 1; round <= 4; ++round) {
    EXPECT_OK(hipMemsetAsync(memory, 2 * round, kBytes, nullptr));
    EXPECT_OK(hipMemsetAsync(memory.at(round), 2 * round + 1, kBytes - round, stream));
  }
  EXPECT_OK(hipStreamSynchronize(stream));
  Bytes expected(kBytes, 9);
  std::fill_n(expected.begin(), 4, static_cast<unsigned char>(8));
  EXPECT_BYTES(download(memory, kBytes).data(), expected);
}

CASE(streams, synchronizing_the_null_stream_waits_for_blocking_streams_alone,
     "clr hip_stream.cpp", hipStreamSynchronize) {
  Stream blocking(hipStreamDefault);
  Stream free(hipStreamNonBlocking);
  const Busy busy(blocking);
  EXPECT_OK(hipStreamSynchronize(nullptr));
  EXPECT_OK(hipStreamQuery(blocking));
  const Busy busy_too(free);
  EXPECT_OK(hipStreamSynchronize(nullptr));
  EXPECT_ERROR(hipStreamQuery(free), hipErrorNotReady);
  EXPECT_OK(hipStreamSynchronize(free));
}

CASE(streams, querying_the_null_stream_is_about_blocking_streams_alone,
     "clr hip_stream.cpp", hipStreamQuery) {
  Stream blocking(hipStreamDefault);
  Stream free(hipStreamNonBlocking);
  {
    const Busy busy(free);
    EXPECT_OK(hipStreamQuery(nullptr));
    EXPECT_OK(hipStreamSynchronize(free));
  }
  const Busy busy(blocking);
  EXPECT_ERROR(hipStreamQuery(nullptr), hipErrorNotReady);
  EXPECT_OK(hipStreamSynchronize(blocking));
  EXPECT_OK(hipStreamQuery(nullptr));
}

CASE(streams, a_wait_orders_two_streams, "hip-tests stream/hipStreamWaitEvent.cc",
     hipStreamWaitEvent, hipEventRecord) {
  Relay relay;
  Stream writer;
  Stream reader;
  Event written;
  const Busy busy(writer);
  relay.write_middle(writer);
  EXPECT_OK(hipEventRecord(written, writer));
  EXPECT_OK(hipStreamWaitEvent(reader, written, 0));
  relay.read_middle(reader);
  EXPECT(relay.arrived());
}

CASE(streams, without_a_wait_two_streams_have_no_order,
     "HIP docs, Asynchronous execution", hipMemcpyAsync) {
  Relay relay;
  Stream writer;
  Stream reader;
  const Busy busy(writer);
  relay.write_middle(writer);
  relay.read_middle(reader);
  EXPECT(!relay.arrived());
}

CASE(streams, the_null_stream_can_wait_for_a_non_blocking_one,
     "hip-tests stream/hipStreamWaitEvent.cc", hipStreamWaitEvent, hipEventRecord) {
  Relay relay;
  Stream writer;
  Event written;
  const Busy busy(writer);
  relay.write_middle(writer);
  EXPECT_OK(hipEventRecord(written, writer));
  EXPECT_OK(hipStreamWaitEvent(nullptr, written, 0));
  relay.read_middle(nullptr);
  EXPECT(relay.arrived());
}

CASE(streams, a_wait_does_not_block_the_caller, "HIP docs, Asynchronous execution",
     hipStreamWaitEvent) {
  Stream writer;
  Stream reader;
  Event written;
  const Busy busy(writer);
  EXPECT_OK(hipEventRecord(written, writer));
  EXPECT_OK(hipStreamWaitEvent(reader, written, 0));
  EXPECT_ERROR(hipEventQuery(written), hipErrorNotReady);
  EXPECT_OK(hipStreamSynchronize(reader));
  EXPECT_OK(hipEventQuery(written));
}

CASE(streams, a_wait_for_an_event_nobody_recorded_is_no_wait, "clr hip_event.cpp",
     hipStreamWaitEvent) {
  Stream stream;
  Event event;
  EXPECT_OK(hipStreamWaitEvent(stream, event, 0));
  EXPECT_OK(hipStreamSynchronize(stream));
}

CASE(streams, a_wait_is_for_the_recording_of_its_moment, "HIP docs, Event management",
     hipStreamWaitEvent, hipEventRecord) {
  Stream slow;
  Stream waiting;
  Event event;
  EXPECT_OK(hipEventRecord(event, slow));
  EXPECT_OK(hipStreamWaitEvent(waiting, event, 0));
  const Busy busy(slow);
  EXPECT_OK(hipEventRecord(event, slow));
  EXPECT_OK(hipStreamSynchronize(waiting));
  EXPECT_ERROR(hipEventQuery(event), hipErrorNotReady);
  EXPECT_OK(hipStreamSynchronize(slow));
}

CASE(streams, a_wait_for_nothing_or_with_unknown_flags, "clr hip_stream.cpp",
     hipStreamWaitEvent) {
  Stream stream;
  Event event;
  EXPECT_ERROR(hipStreamWaitEvent(stream, nullptr, 0), hipErrorInvalidHandle);
  EXPECT_ERROR(hipStreamWaitEvent(stream, event, 2), hipErrorInvalidValue);
  EXPECT_ERROR(hipStreamWaitEvent(stream, nullptr, 2), hipErrorInvalidValue);
}

CASE(streams, devices_are_not_ordered, "HIP docs, Multi-device management",
     hipStreamQuery, hipSetDevice) {
  need_devices(2);
  const Busy busy(nullptr);
  {
    CurrentDevice other(1);
    EXPECT_OK(hipStreamQuery(nullptr));
    EXPECT_OK(hipStreamSynchronize(nullptr));
  }
  EXPECT_ERROR(hipStreamQuery(nullptr), hipErrorNotReady);
  EXPECT_OK(hipStreamSynchronize(nullptr));
}

CASE(streams, an_event_orders_streams_of_two_devices,
     "HIP docs, Multi-device management", hipStreamWaitEvent, hipEventRecord,
     hipSetDevice) {
  need_devices(2);
  Stream writer;
  Event written;
  const Busy busy(writer);
  EXPECT_OK(hipEventRecord(written, writer));
  {
    CurrentDevice other(1);
    Stream reader;
    EXPECT_OK(hipStreamWaitEvent(reader, written, 0));
    EXPECT_OK(hipStreamSynchronize(reader));
  }
  EXPECT_OK(hipEventQuery(written));
}

}  // namespace
}  // namespace contract
