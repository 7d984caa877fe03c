// SPDX-License-Identifier: Apache-2.0
#include "contract.h"

namespace contract {
namespace {

CASE(events, created_with_every_flag, "clr hip_event.cpp", hipEventCreate,
     hipEventCreateWithFlags, hipEventDestroy) {
  hipEvent_t event = nullptr;
  EXPECT_OK(hipEventCreate(&event));
  EXPECT(event != nullptr);
  EXPECT_OK(hipEventDestroy(event));
  for (const unsigned flags :
       {hipEventDefault, hipEventBlockingSync, hipEventDisableTiming,
        hipEventBlockingSync | hipEventDisableTiming,
        hipEventInterprocess | hipEventDisableTiming, hipEventDisableSystemFence,
        hipEventReleaseToDevice, hipEventReleaseToSystem}) {
    EXPECT_OK(hipEventCreateWithFlags(&event, flags));
    EXPECT_OK(hipEventDestroy(event));
  }
}

CASE(events, created_with_what_is_not_allowed, "clr hip_event.cpp", hipEventCreate,
     hipEventCreateWithFlags) {
  hipEvent_t event = nullptr;
  EXPECT_ERROR(hipEventCreate(nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipEventCreateWithFlags(nullptr, 0), hipErrorInvalidValue);
  for (const unsigned flags : {0x8u, 0x10u, hipEventInterprocess,
                               hipEventReleaseToDevice | hipEventReleaseToSystem}) {
    EXPECT_ERROR(hipEventCreateWithFlags(&event, flags), hipErrorInvalidValue);
  }
}

CASE(events, destroyed_once, "clr hip_event.cpp; hip-tests event/hipEventDestroy.cc",
     hipEventDestroy) {
  hipEvent_t event = nullptr;
  REQUIRE_OK(hipEventCreate(&event));
  EXPECT_OK(hipEventDestroy(event));
  EXPECT_ERROR(hipEventDestroy(event), hipErrorContextIsDestroyed);
  EXPECT_ERROR(hipEventDestroy(nullptr), hipErrorInvalidHandle);
}

CASE(events, no_event_is_an_invalid_handle, "clr hip_event.cpp", hipEventRecord,
     hipEventQuery, hipEventSynchronize) {
  Stream stream;
  EXPECT_ERROR(hipEventRecord(nullptr, stream), hipErrorInvalidHandle);
  EXPECT_ERROR(hipEventQuery(nullptr), hipErrorInvalidHandle);
  EXPECT_ERROR(hipEventSynchronize(nullptr), hipErrorInvalidHandle);
}

CASE(events, an_event_nobody_recorded_is_ready, "clr hip_event.cpp", hipEventQuery,
     hipEventSynchronize) {
  Event event;
  EXPECT_OK(hipEventQuery(event));
  EXPECT_OK(hipEventSynchronize(event));
}

CASE(events, ready_once_what_came_before_is_done,
     "hip-tests event/Unit_hipEventQuery.cc", hipEventRecord, hipEventQuery,
     hipEventSynchronize) {
  Stream stream;
  Event event;
  const Busy busy(stream);
  EXPECT_OK(hipEventRecord(event, stream));
  EXPECT_ERROR(hipEventQuery(event), hipErrorNotReady);
  EXPECT_OK(hipEventSynchronize(event));
  EXPECT_OK(hipEventQuery(event));
  EXPECT_OK(hipStreamSynchronize(stream));
}

CASE(events, what_comes_after_is_not_waited_for, "HIP docs, Event management",
     hipEventRecord, hipEventSynchronize) {
  Stream stream;
  Event event;
  EXPECT_OK(hipEventRecord(event, stream));
  const Busy busy(stream);
  EXPECT_OK(hipEventSynchronize(event));
  EXPECT_ERROR(hipStreamQuery(stream), hipErrorNotReady);
  EXPECT_OK(hipStreamSynchronize(stream));
}

CASE(events, recorded_on_the_null_stream, "hip-tests event/Unit_hipEventRecord.cc",
     hipEventRecord, hipEventQuery) {
  Stream blocking(hipStreamDefault);
  Event event;
  const Busy busy(blocking);
  EXPECT_OK(hipEventRecord(event, nullptr));
  EXPECT_ERROR(hipEventQuery(event), hipErrorNotReady);
  EXPECT_OK(hipStreamSynchronize(blocking));
  EXPECT(wait_until([&] { return hipEventQuery(event) == hipSuccess; }));
}

CASE(events, recorded_again, "HIP docs, Event management", hipEventRecord,
     hipEventQuery) {
  Stream stream;
  Event event;
  EXPECT_OK(hipEventRecord(event, stream));
  EXPECT_OK(hipEventSynchronize(event));
  const Busy busy(stream);
  EXPECT_OK(hipEventQuery(event));
  EXPECT_OK(hipEventRecord(event, stream));
  EXPECT_ERROR(hipEventQuery(event), hipErrorNotReady);
  EXPECT_OK(hipEventSynchronize(event));
}

CASE(events, outlived_by_their_work, "clr hip_event.cpp", hipEventDestroy,
     hipEventRecord) {
  Stream stream;
  hipEvent_t event = nullptr;
  REQUIRE_OK(hipEventCreateWithFlags(&event, hipEventDisableTiming));
  const Busy busy(stream);
  EXPECT_OK(hipEventRecord(event, stream));
  EXPECT_OK(hipEventDestroy(event));
  EXPECT_OK(hipStreamSynchronize(stream));
}

CASE(events, time_between_two, "hip-tests event/Unit_hipEventElapsedTime.cc",
     hipEventElapsedTime, hipEventRecord) {
  Stream stream;
  Event start;
  Event stop;
  float ms = -1;
  EXPECT_OK(hipEventRecord(start, stream));
  EXPECT_OK(hipEventSynchronize(start));
  const Busy busy(stream);
  EXPECT_OK(hipEventRecord(stop, stream));
  EXPECT_ERROR(hipEventElapsedTime(&ms, start, stop), hipErrorNotReady);
  EXPECT_OK(hipEventSynchronize(stop));
  EXPECT_OK(hipEventElapsedTime(&ms, start, stop));
  EXPECT(ms > 0);
  EXPECT(ms >= static_cast<float>(Busy::least().count()));
  EXPECT(ms < 60'000);
}

CASE(events, time_from_an_event_to_itself, "clr hip_event.cpp", hipEventElapsedTime) {
  Stream stream;
  Event event;
  float ms = -1;
  EXPECT_ERROR(hipEventElapsedTime(&ms, event, event), hipErrorInvalidHandle);
  EXPECT_OK(hipEventRecord(event, stream));
  EXPECT_OK(hipEventSynchronize(event));
  EXPECT_OK(hipEventElapsedTime(&ms, event, event));
  EXPECT_EQ(ms, 0.0f);
}

CASE(events, no_time_without_two_timed_recordings,
     "hip-tests event/Unit_hipEventElapsedTime.cc; clr hip_event.cpp",
     hipEventElapsedTime) {
  Stream stream;
  Event recorded;
  Event never;
  Event untimed(hipEventDisableTiming);
  float ms = -1;
  EXPECT_OK(hipEventRecord(recorded, stream));
  EXPECT_OK(hipEventRecord(untimed, stream));
  EXPECT_OK(hipStreamSynchronize(stream));
  EXPECT_ERROR(hipEventElapsedTime(nullptr, recorded, recorded), hipErrorInvalidValue);
  for (hipEvent_t wrong : {hipEvent_t{nullptr}, never.get(), untimed.get()}) {
    EXPECT_ERROR(hipEventElapsedTime(&ms, wrong, recorded), hipErrorInvalidHandle);
    EXPECT_ERROR(hipEventElapsedTime(&ms, recorded, wrong), hipErrorInvalidHandle);
  }
}

CASE(events, an_event_belongs_to_its_device,
     "hip-tests event/Unit_hipEventElapsedTime.cc; clr hip_event.cpp", hipEventRecord,
     hipEventElapsedTime) {
  need_devices(2);
  Event start;
  EXPECT_OK(hipEventRecord(start, nullptr));
  EXPECT_OK(hipEventSynchronize(start));
  CurrentDevice other(1);
  Stream stream;
  EXPECT_ERROR(hipEventRecord(start, stream), hipErrorInvalidHandle);
  Event stop;
  EXPECT_OK(hipEventRecord(stop, stream));
  EXPECT_OK(hipEventSynchronize(stop));
  float ms = -1;
  EXPECT_ERROR(hipEventElapsedTime(&ms, start, stop), hipErrorInvalidHandle);
}

}  // namespace
}  // namespace contract
