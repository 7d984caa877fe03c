// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <array>
#include <cstdio>
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

CASE(devices, where_a_device_sits,
     "hip-tests device/hipDeviceGetPCIBusId.cc; clr hip_device_runtime.cpp",
     hipDeviceGetPCIBusId) {
  std::string before;
  for (int device = 0; device < device_count(); ++device) {
    std::array<char, 20> text{};
    REQUIRE_OK(hipDeviceGetPCIBusId(text.data(), 13, device));
    EXPECT_EQ(std::string(text.data()).size(), size_t{12});
    unsigned domain = 0;
    unsigned bus = 0;
    unsigned slot = 0;
    unsigned function = 0;
    EXPECT_EQ(
        std::sscanf(text.data(), "%4x:%2x:%2x.%1x", &domain, &bus, &slot, &function),
        4);
    int told = -1;
    EXPECT_OK(hipDeviceGetAttribute(&told, hipDeviceAttributePciBusId, device));
    EXPECT_EQ(static_cast<int>(bus), told);
    EXPECT(text.data() != before);
    before = text.data();
  }
}

CASE(devices, where_a_device_sits_in_too_little_room,
     "hip-tests device/hipDeviceGetPCIBusId.cc; clr hip_device_runtime.cpp",
     hipDeviceGetPCIBusId) {
  std::array<char, 20> text{};
  EXPECT_ERROR(hipDeviceGetPCIBusId(nullptr, 20, 0), hipErrorInvalidValue);
  EXPECT_ERROR(hipDeviceGetPCIBusId(text.data(), 20, -1), hipErrorInvalidDevice);
  EXPECT_ERROR(hipDeviceGetPCIBusId(text.data(), 20, device_count()),
               hipErrorInvalidDevice);
  REQUIRE_OK(hipDeviceGetPCIBusId(text.data(), 20, 0));
  const std::string whole = text.data();
  for (const int length : {0, 1, 6, 12}) {
    text.fill('#');
    EXPECT_ERROR(hipDeviceGetPCIBusId(text.data(), length, 0), hipErrorInvalidValue);
    const auto kept = static_cast<size_t>(std::max(length - 1, 0));
    EXPECT_EQ(std::string(text.data(), kept), whole.substr(0, kept));
    EXPECT_EQ(std::string(text.data() + length, 20 - length),
              std::string(20 - length, '#'));
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
