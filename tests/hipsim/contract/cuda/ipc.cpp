// SPDX-License-Identifier: Apache-2.0
#include <cstring>

#include "contract.h"

namespace contract {
namespace {

constexpr const char* kReference = DRIVER "; CUDA Driver API, cuIpcGetMemHandle";
constexpr const char* kDriver = DRIVER;
constexpr CUresult kInvalid = CUDA_ERROR_INVALID_VALUE;
constexpr size_t kBytes = size_t{4} << 20;

std::string number(CUresult result) { return std::to_string(static_cast<int>(result)); }

std::string text_of(const CUipcMemHandle& handle) {
  return to_hex(&handle, sizeof handle);
}

CUipcMemHandle handle_of(const std::string& text) {
  const Bytes bytes = from_hex(text);
  CUipcMemHandle handle = {};
  std::memcpy(&handle, bytes.data(), std::min(bytes.size(), sizeof handle));
  return handle;
}

// Opens the handle that the parent sends, says what its first bytes are, writes others,
// waits to be told, and closes.
CHILD(opens_memory) {
  make_ready();
  const CUipcMemHandle handle = handle_of(read_from_parent());
  CUdeviceptr pointer = 0;
  const CUresult opened = cuIpcOpenMemHandle_v2(&pointer, handle, 1);
  write_to_parent(number(opened));
  if (opened != CUDA_SUCCESS) return 0;
  write_to_parent(to_hex(download(pointer, 16).data(), 16));
  upload(pointer, Bytes(16, 0x5A));
  CUdeviceptr base = 0;
  size_t bytes = 0;
  REQUIRE_OK(cuMemGetAddressRange_v2(&base, &bytes, pointer));
  write_to_parent(std::to_string(pointer - base) + " of " + std::to_string(bytes));
  CUdeviceptr again = 0;
  const CUresult twice = cuIpcOpenMemHandle_v2(&again, handle, 1);
  write_to_parent(number(twice) + (again == pointer ? " the same" : " another"));
  write_to_parent("free " + number(cuMemFree_v2(pointer)));
  std::string closings;
  for (int i = 0; i < 3; ++i) closings += " " + number(cuIpcCloseMemHandle(pointer));
  write_to_parent("close" + closings);
  return 0;
}

CASE(ipc, opened_by_another_process, kReference, cuIpcGetMemHandle,
     cuIpcOpenMemHandle_v2, cuIpcCloseMemHandle) {
  DeviceMemory memory(kBytes);
  const Bytes bytes = random_bytes(16, 1);
  upload(memory, bytes);
  CUipcMemHandle handle = {};
  REQUIRE_OK(cuIpcGetMemHandle(&handle, memory));
  Child child("opens_memory");
  child.write_line(text_of(handle));
  const std::string opened = child.read_line();
  REQUIRE_EQ(opened, std::string("0"));
  const std::string content = child.read_line();
  EXPECT_EQ(content, to_hex(bytes.data(), 16));
  const std::string place = child.read_line();
  EXPECT_EQ(place, "0 of " + std::to_string(kBytes));
  const std::string opened_again = child.read_line();
  EXPECT_EQ(opened_again, std::string("0 the same"));
  const std::string freed = child.read_line();
  EXPECT_EQ(freed, std::string("free 1"));
  const std::string closed = child.read_line();
  EXPECT_EQ(closed, std::string("close 0 0 1"));
  EXPECT_EQ(child.wait(), 0);
  EXPECT_BYTES(download(memory, 16).data(), Bytes(16, 0x5A));
}

// The handle is that of the whole allocation.
CASE(ipc, of_an_address_in_the_middle, kDriver, cuIpcGetMemHandle) {
  constexpr size_t kOffset = size_t{1} << 20;
  DeviceMemory memory(kBytes);
  const Bytes at_base = random_bytes(16, 1);
  upload(memory, at_base);
  upload(memory.at(kOffset), random_bytes(16, 2));
  CUipcMemHandle handle = {};
  CUipcMemHandle of_base = {};
  EXPECT_OK(cuIpcGetMemHandle(&handle, memory.at(kOffset)));
  EXPECT_OK(cuIpcGetMemHandle(&of_base, memory));
  EXPECT_EQ(std::memcmp(&handle, &of_base, sizeof handle), 0);
  Child child("opens_memory");
  child.write_line(text_of(handle));
  const std::string opened = child.read_line();
  REQUIRE_EQ(opened, std::string("0"));
  const std::string content = child.read_line();
  EXPECT_EQ(content, to_hex(at_base.data(), 16));
  const std::string place = child.read_line();
  EXPECT_EQ(place, "0 of " + std::to_string(kBytes));
  EXPECT_EQ(child.wait(), 0);
}

CASE(ipc, of_small_allocations_that_share_a_block, kReference, cuIpcGetMemHandle) {
  DeviceMemory first(1000);
  DeviceMemory second(1000);
  const Bytes bytes = random_bytes(16, 2);
  upload(second, bytes);
  CUipcMemHandle handle = {};
  EXPECT_OK(cuIpcGetMemHandle(&handle, second));
  Child child("opens_memory");
  child.write_line(text_of(handle));
  const std::string opened = child.read_line();
  REQUIRE_EQ(opened, std::string("0"));
  const std::string content = child.read_line();
  EXPECT_EQ(content, to_hex(bytes.data(), 16));
  const std::string place = child.read_line();
  EXPECT_EQ(place, std::string("0 of 1000"));
  EXPECT_EQ(child.wait(), 0);
}

CASE(ipc, in_the_same_process, kReference, cuIpcOpenMemHandle_v2) {
  DeviceMemory memory(kBytes);
  CUipcMemHandle handle = {};
  CUdeviceptr pointer = 0;
  REQUIRE_OK(cuIpcGetMemHandle(&handle, memory));
  EXPECT_ERROR(cuIpcOpenMemHandle_v2(&pointer, handle, 1), CUDA_ERROR_INVALID_CONTEXT);
  EXPECT_EQ(pointer, CUdeviceptr{0});
  EXPECT_ERROR(cuIpcOpenMemHandle_v2(nullptr, handle, 1), kInvalid);
  EXPECT_ERROR(cuIpcCloseMemHandle(memory), kInvalid);
  EXPECT_ERROR(cuIpcCloseMemHandle(0), kInvalid);
}

CASE(ipc, of_what_cannot_be_shared, kReference, cuIpcGetMemHandle) {
  DeviceMemory memory(kBytes);
  HostMemory host(4096);
  RegisteredMemory registered(4096);
  Pages pages(4096);
  CUipcMemHandle handle = {};
  EXPECT_ERROR(cuIpcGetMemHandle(nullptr, memory), kInvalid);
  EXPECT_ERROR(cuIpcGetMemHandle(&handle, 0), kInvalid);
  EXPECT_ERROR(cuIpcGetMemHandle(&handle, as_device(host.get())), kInvalid);
  EXPECT_ERROR(cuIpcGetMemHandle(&handle, as_device(registered.get())), kInvalid);
  EXPECT_ERROR(cuIpcGetMemHandle(&handle, as_device(pages.get())), kInvalid);
  VirtualMemory virtual_memory(1, granularity());
  EXPECT_ERROR(cuIpcGetMemHandle(&handle, virtual_memory.get()), kInvalid);
  Reservation empty(granularity());
  EXPECT_ERROR(cuIpcGetMemHandle(&handle, empty.get()), kInvalid);
  const CUdeviceptr gone = memory.release();
  EXPECT_OK(cuMemFree_v2(gone));
  EXPECT_ERROR(cuIpcGetMemHandle(&handle, gone), kInvalid);
}

CASE(ipc, of_virtual_memory_that_can_be_shared, kReference, cuIpcGetMemHandle) {
  const size_t piece = granularity();
  CUmemAllocationProp properties = device_memory_properties();
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle memory = 0;
  REQUIRE_OK(cuMemCreate(&memory, piece, &properties, 0));
  Reservation addresses(piece);
  REQUIRE_OK(cuMemMap(addresses.get(), piece, 0, memory, 0));
  REQUIRE_OK(set_access(addresses.get(), piece, access(0)));
  CUipcMemHandle handle = {};
  EXPECT_ERROR(cuIpcGetMemHandle(&handle, addresses.get()), kInvalid);
  EXPECT_OK(cuMemUnmap(addresses.get(), piece));
  EXPECT_OK(cuMemRelease(memory));
}

// The answers to handles that nobody may have made.
CHILD(opens_nonsense) {
  make_ready();
  CUdeviceptr pointer = 0;
  const CUipcMemHandle good = handle_of(read_from_parent());
  for (const unsigned flags : {0u, 2u, 3u}) {
    const CUresult result = cuIpcOpenMemHandle_v2(&pointer, good, flags);
    write_to_parent(number(result));
    if (result == CUDA_SUCCESS) REQUIRE_OK(cuIpcCloseMemHandle(pointer));
  }
  CUipcMemHandle nonsense = {};
  write_to_parent(number(cuIpcOpenMemHandle_v2(&pointer, nonsense, 1)));
  std::memset(&nonsense, 0xA5, sizeof nonsense);
  write_to_parent(number(cuIpcOpenMemHandle_v2(&pointer, nonsense, 1)));
  return 0;
}

CASE(ipc, opened_with_what_is_not_allowed, kReference, cuIpcOpenMemHandle_v2) {
  DeviceMemory memory(kBytes);
  CUipcMemHandle handle = {};
  REQUIRE_OK(cuIpcGetMemHandle(&handle, memory));
  Child child("opens_nonsense");
  child.write_line(text_of(handle));
  const std::pair<const char*, const char*> expected[] = {
      {"flags 0", "1"}, {"flags 2", "1"},  {"flags 3", "0"},
      {"zeroes", "1"},  {"nonsense", "1"},
  };
  for (const auto& [what, answer] : expected) {
    const About about(what);
    const std::string said = child.read_line();
    EXPECT_EQ(said, std::string(answer));
  }
  EXPECT_EQ(child.wait(), 0);
}

CASE(ipc, opened_when_the_memory_is_gone, kReference, cuIpcOpenMemHandle_v2) {
  DeviceMemory memory(kBytes);
  CUipcMemHandle handle = {};
  REQUIRE_OK(cuIpcGetMemHandle(&handle, memory));
  EXPECT_OK(cuMemFree_v2(memory.release()));
  Child child("opens_memory");
  child.write_line(text_of(handle));
  const std::string opened = child.read_line();
  EXPECT_EQ(opened, std::string("1"));
  child.wait();
}

// Holds a mapping of the parent's memory until it is told to go.
CHILD(holds_memory) {
  make_ready();
  const CUipcMemHandle handle = handle_of(read_from_parent());
  CUdeviceptr pointer = 0;
  write_to_parent(number(cuIpcOpenMemHandle_v2(&pointer, handle, 1)));
  read_from_parent();
  Bytes bytes(16);
  write_to_parent(number(cuMemcpyDtoH_v2(bytes.data(), pointer, 16)));
  write_to_parent(number(cuIpcCloseMemHandle(pointer)));
  return 0;
}

// What the other process then reads is undefined.
CASE(ipc, freed_while_another_process_has_it_open, kReference, cuMemFree_v2) {
  DeviceMemory memory(kBytes);
  CUipcMemHandle handle = {};
  REQUIRE_OK(cuIpcGetMemHandle(&handle, memory));
  Child child("holds_memory");
  child.write_line(text_of(handle));
  const std::string opened = child.read_line();
  REQUIRE_EQ(opened, std::string("0"));
  EXPECT_OK(cuMemFree_v2(memory.release()));
  child.write_line("go on");
  const std::string read = child.read_line();
  EXPECT_EQ(read, std::string("0"));
  const std::string closed = child.read_line();
  EXPECT_EQ(closed, std::string("0"));
  EXPECT_EQ(child.wait(), 0);
}

}  // namespace
}  // namespace contract
