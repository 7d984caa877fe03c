// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <cstdio>

#include "contract.h"

namespace contract {
namespace {

constexpr const char* kReference =
    DRIVER "; CUDA Driver API, Error Handling, Device Management";

CASE(devices, initialised_again, kReference, cuInit) {
  EXPECT_OK(cuInit(0));
  EXPECT_ERROR(cuInit(1), CUDA_ERROR_INVALID_VALUE);
}

CASE(devices, version, kReference, cuDriverGetVersion) {
  int version = 0;
  EXPECT_OK(cuDriverGetVersion(&version));
  EXPECT(version >= cuda(12, 8));
  EXPECT_ERROR(cuDriverGetVersion(nullptr), CUDA_ERROR_INVALID_VALUE);
}

CASE(devices, entry_points, kReference, cuGetProcAddress_v2) {
  void* function = nullptr;
  auto said = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  const auto find = [&](const char* name, int version) {
    return cuGetProcAddress_v2(name, &function, version, CU_GET_PROC_ADDRESS_DEFAULT,
                               &said);
  };
  REQUIRE_OK(find("cuMemcpyBatchAsync", cuda(12, 8)));
  EXPECT_EQ(said, CU_GET_PROC_ADDRESS_SUCCESS);
  EXPECT(function != nullptr);
  void* const with_index = function;
  if (release() >= cuda(13, 0)) {
    REQUIRE_OK(find("cuMemcpyBatchAsync", cuda(13, 0)));
    EXPECT(function != with_index);
  }
  REQUIRE_OK(find("cuMemAlloc", cuda(12, 0)));
  size_t free = 0;
  size_t total = 0;
  REQUIRE_OK(find("cuMemGetInfo", cuda(12, 0)));
  const auto info = reinterpret_cast<decltype(&cuMemGetInfo_v2)>(function);
  EXPECT_OK(info(&free, &total));
  EXPECT(free <= total && total > 0);

  // The result does not tell; the status and the address do.
  EXPECT_OK(find("cuMemcpyBatchAsync", cuda(12, 0)));
  EXPECT_EQ(said, CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
  EXPECT(function == nullptr);
  EXPECT_OK(find("cuNoSuchFunction", cuda(13, 0)));
  EXPECT_EQ(said, CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
  EXPECT(function == nullptr);
}

CASE(devices, count_and_ordinals, kReference, cuDeviceGetCount, cuDeviceGet) {
  int count = 0;
  EXPECT_OK(cuDeviceGetCount(&count));
  EXPECT(count > 0);
  EXPECT_ERROR(cuDeviceGetCount(nullptr), CUDA_ERROR_INVALID_VALUE);
  for (int ordinal = 0; ordinal < count; ++ordinal) {
    CUdevice device = -1;
    EXPECT_OK(cuDeviceGet(&device, ordinal));
    EXPECT_EQ(device, ordinal);
  }
  CUdevice device = -1;
  EXPECT_ERROR(cuDeviceGet(&device, count), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_ERROR(cuDeviceGet(&device, -1), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_ERROR(cuDeviceGet(nullptr, 0), CUDA_ERROR_INVALID_VALUE);
}

CASE(devices, attributes, kReference, cuDeviceGetAttribute) {
  const auto get = [](CUdevice_attribute name) { return attribute(name); };
  EXPECT_EQ(get(CU_DEVICE_ATTRIBUTE_WARP_SIZE), 32);
  EXPECT_EQ(get(CU_DEVICE_ATTRIBUTE_MAX_PITCH), 0x7FFFFFFF);
  EXPECT_EQ(get(CU_DEVICE_ATTRIBUTE_INTEGRATED), 0);
  EXPECT_EQ(get(CU_DEVICE_ATTRIBUTE_CAN_MAP_HOST_MEMORY), 1);
  EXPECT_EQ(get(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING), 1);
  EXPECT_EQ(get(CU_DEVICE_ATTRIBUTE_CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM), 1);
  EXPECT_EQ(get(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED), 1);
  EXPECT_EQ(get(CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED), 1);
  EXPECT_EQ(get(CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED), 1);
  for (const CUdevice_attribute told : {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                        CU_DEVICE_ATTRIBUTE_ASYNC_ENGINE_COUNT}) {
    EXPECT(get(told) > 0);
  }
  for (const CUdevice_attribute told :
       {CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED,
        CU_DEVICE_ATTRIBUTE_PAGEABLE_MEMORY_ACCESS, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID,
        CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID}) {
    EXPECT(get(told) >= 0);
  }
  EXPECT(get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) >= 7);
  EXPECT(get(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR) >= 0);
}

CASE(devices, where_a_device_sits, "CUDA Driver API, Device Management",
     cuDeviceGetPCIBusId) {
  std::string before;
  for (int device = 0; device < kVendor.count_devices(); ++device) {
    std::array<char, 20> text{};
    REQUIRE_OK(cuDeviceGetPCIBusId(text.data(), 13, device));
    EXPECT_EQ(std::string(text.data()).size(), size_t{12});
    unsigned domain = 0;
    unsigned bus = 0;
    unsigned slot = 0;
    unsigned function = 0;
    EXPECT_EQ(
        std::sscanf(text.data(), "%4x:%2x:%2x.%1x", &domain, &bus, &slot, &function),
        4);
    EXPECT_EQ(static_cast<int>(bus), attribute(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, device));
    EXPECT_EQ(static_cast<int>(domain),
              attribute(CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, device));
    EXPECT(text.data() != before);
    before = text.data();
  }
}

// What a driver does where the text does not fit is not said.
CASE(devices, where_no_device_sits, "CUDA Driver API, Device Management",
     cuDeviceGetPCIBusId) {
  std::array<char, 20> text{};
  EXPECT_ERROR(cuDeviceGetPCIBusId(nullptr, 13, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuDeviceGetPCIBusId(text.data(), 0, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuDeviceGetPCIBusId(text.data(), 13, -1), CUDA_ERROR_INVALID_DEVICE);
  EXPECT_ERROR(cuDeviceGetPCIBusId(text.data(), 13, kVendor.count_devices()),
               CUDA_ERROR_INVALID_DEVICE);
  if (simulated()) {
    EXPECT_ERROR(cuDeviceGetPCIBusId(text.data(), 12, 0), CUDA_ERROR_INVALID_VALUE);
  }
}

CASE(devices, attributes_that_do_not_exist, kReference, cuDeviceGetAttribute) {
  int value = 0;
  const auto known = CU_DEVICE_ATTRIBUTE_WARP_SIZE;
  EXPECT_ERROR(cuDeviceGetAttribute(nullptr, known, 0), CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuDeviceGetAttribute(&value, static_cast<CUdevice_attribute>(100000), 0),
               CUDA_ERROR_INVALID_VALUE);
  EXPECT_ERROR(cuDeviceGetAttribute(&value, known, kVendor.count_devices()),
               CUDA_ERROR_INVALID_DEVICE);
  EXPECT_ERROR(cuDeviceGetAttribute(&value, known, -1), CUDA_ERROR_INVALID_DEVICE);
}

CASE(devices, priorities, kReference, cuCtxGetStreamPriorityRange) {
  int least = 99;
  int greatest = 99;
  EXPECT_OK(cuCtxGetStreamPriorityRange(&least, &greatest));
  EXPECT_EQ(least, 0);
  EXPECT_EQ(greatest, -5);
  EXPECT_OK(cuCtxGetStreamPriorityRange(nullptr, nullptr));
}

// --- errors --------------------------------------------------------------------------

struct Known {
  CUresult number;
  const char* name;
  const char* text;
};

constexpr std::array<Known, 9> kKnown = {{
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT",
     "invalid device context"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "device not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS",
     "an illegal memory access was encountered"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED",
     "operation not permitted when stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED",
     "operation failed due to a previous error during capture"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT",
     "operation would make the legacy stream depend on a capturing blocking stream"},
}};

CASE(devices, errors_have_names_and_texts, kReference, cuGetErrorName,
     cuGetErrorString) {
  for (const Known& known : kKnown) {
    const char* name = nullptr;
    const char* text = nullptr;
    REQUIRE_OK(cuGetErrorName(known.number, &name));
    REQUIRE_OK(cuGetErrorString(known.number, &text));
    const About number(describe(static_cast<int>(known.number)));
    EXPECT_EQ(std::string(name), std::string(known.name));
    EXPECT_EQ(std::string(text), std::string(known.text));
  }
}

CASE(devices, errors_that_do_not_exist, kReference, cuGetErrorName, cuGetErrorString) {
  const auto unknown = static_cast<CUresult>(123456);
  const char* text = "untouched";
  EXPECT_ERROR(cuGetErrorName(unknown, &text), CUDA_ERROR_INVALID_VALUE);
  EXPECT(text == nullptr);
  text = "untouched";
  EXPECT_ERROR(cuGetErrorString(unknown, &text), CUDA_ERROR_INVALID_VALUE);
  EXPECT(text == nullptr);
}

}  // namespace
}  // namespace contract
