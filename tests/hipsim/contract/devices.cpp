// SPDX-License-Identifier: Apache-2.0
#include <thread>

#include "contract.h"

namespace contract {
namespace {

CASE(devices, versions, "HIP 7.1 header, hip_version.h; clr hip_context.cpp",
     hipRuntimeGetVersion, hipDriverGetVersion) {
  int runtime = 0;
  int driver = 0;
  REQUIRE_OK(hipRuntimeGetVersion(&runtime));
  REQUIRE_OK(hipDriverGetVersion(&driver));
  EXPECT_EQ(runtime, release());
  EXPECT_EQ(driver, runtime);
  EXPECT(since(7, 1));
  EXPECT(runtime < hip(8, 0));
}

CASE(devices, version_needs_a_place, "clr hip_context.cpp", hipRuntimeGetVersion,
     hipDriverGetVersion) {
  EXPECT_ERROR(hipRuntimeGetVersion(nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipDriverGetVersion(nullptr), hipErrorInvalidValue);
}

CASE(devices, init_takes_no_flags, "clr hip_context.cpp; hip-tests device/hipInit.cc",
     hipInit) {
  EXPECT_OK(hipInit(0));
  EXPECT_ERROR(hipInit(1), hipErrorInvalidValue);
}

CASE(devices, count, "hip-tests device/hipGetDeviceCount.cc", hipGetDeviceCount) {
  int count = 0;
  REQUIRE_OK(hipGetDeviceCount(&count));
  EXPECT(count >= 1);
  EXPECT_ERROR(hipGetDeviceCount(nullptr), hipErrorInvalidValue);
}

CASE(devices, only_devices_that_exist_can_be_current,
     "hip-tests device/hipSetGetDevice.cc", hipSetDevice, hipGetDevice) {
  const int count = device_count();
  for (int device = 0; device < count && device < 2; ++device) {
    EXPECT_OK(hipSetDevice(device));
    int current = -1;
    EXPECT_OK(hipGetDevice(&current));
    EXPECT_EQ(current, device);
  }
  int before = -1;
  EXPECT_OK(hipGetDevice(&before));
  EXPECT_ERROR(hipSetDevice(-1), hipErrorInvalidDevice);
  EXPECT_ERROR(hipSetDevice(count), hipErrorInvalidDevice);
  int after = -1;
  EXPECT_OK(hipGetDevice(&after));
  EXPECT_EQ(after, before);
  EXPECT_ERROR(hipGetDevice(nullptr), hipErrorInvalidValue);
}

CASE(devices, each_thread_has_its_current_device, "HIP docs, Multi-device management",
     hipSetDevice, hipGetDevice) {
  need_devices(2);
  EXPECT_OK(hipSetDevice(1));
  std::thread([] {
    int device = -1;
    EXPECT_OK(hipGetDevice(&device));
    EXPECT_EQ(device, 0);
  }).join();
}

CASE(devices, synchronize_waits_for_every_stream,
     "hip-tests device/hipDeviceSynchronize.cc", hipDeviceSynchronize) {
  Stream free(hipStreamNonBlocking);
  Stream blocking(hipStreamDefault);
  const Busy busy(free);
  const Busy busy_too(blocking);
  EXPECT_ERROR(hipStreamQuery(free), hipErrorNotReady);
  EXPECT_OK(hipDeviceSynchronize());
  EXPECT_OK(hipStreamQuery(free));
  EXPECT_OK(hipStreamQuery(blocking));
}

CASE(devices, synchronize_leaves_other_devices_alone,
     "HIP docs, Multi-device management", hipDeviceSynchronize, hipSetDevice) {
  need_devices(2);
  Stream stream;
  const Busy busy(stream);
  {
    CurrentDevice other(1);
    EXPECT_OK(hipDeviceSynchronize());
  }
  EXPECT_ERROR(hipStreamQuery(stream), hipErrorNotReady);
  EXPECT_OK(hipDeviceSynchronize());
}

CASE(devices, priorities_have_a_range, "clr hip_stream.cpp",
     hipDeviceGetStreamPriorityRange) {
  int least = 0;
  int greatest = 0;
  REQUIRE_OK(hipDeviceGetStreamPriorityRange(&least, &greatest));
  EXPECT_EQ(least, 1);
  EXPECT_EQ(greatest, -1);
  EXPECT_OK(hipDeviceGetStreamPriorityRange(nullptr, &greatest));
  EXPECT_OK(hipDeviceGetStreamPriorityRange(&least, nullptr));
}

int attribute(hipDeviceAttribute_t which) {
  int value = -1;
  EXPECT_OK(hipDeviceGetAttribute(&value, which, 0));
  return value;
}

CASE(devices, attributes_make_sense, "HIP 7.1 header, hipDeviceAttribute_t",
     hipDeviceGetAttribute) {
  EXPECT(attribute(hipDeviceAttributeMaxPitch) > 0);
  EXPECT(attribute(hipDeviceAttributeAsyncEngineCount) > 0);
  for (const auto yes_or_no :
       {hipDeviceAttributeVirtualMemoryManagementSupported,
        hipDeviceAttributeCanMapHostMemory, hipDeviceAttributeHostRegisterSupported,
        hipDeviceAttributeCanUseHostPointerForRegisteredMem,
        hipDeviceAttributeUnifiedAddressing, hipDeviceAttributeIntegrated}) {
    const int value = attribute(yes_or_no);
    EXPECT(value == 0 || value == 1);
  }
}

CASE(devices, attributes_of_what_is_not_there,
     "hip-tests device/hipGetDeviceAttribute.cc", hipDeviceGetAttribute) {
  int value = 0;
  constexpr auto kPitch = hipDeviceAttributeMaxPitch;
  constexpr auto kNothing = static_cast<hipDeviceAttribute_t>(-1);
  EXPECT(hipDeviceGetAttribute(nullptr, kPitch, 0) != hipSuccess);
  EXPECT(hipDeviceGetAttribute(&value, kPitch, -1) != hipSuccess);
  EXPECT(hipDeviceGetAttribute(&value, kPitch, device_count()) != hipSuccess);
  EXPECT(hipDeviceGetAttribute(&value, kNothing, 0) != hipSuccess);
}

}  // namespace
}  // namespace contract
