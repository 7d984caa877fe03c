// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <cstring>
#include <sstream>
#include <string>

#include "contract.h"
#include "virtual_memory.h"

namespace contract {
namespace {

constexpr const char* kSource = "clr hip_memory.cpp";

constexpr size_t kBytes = 4096;

// --- another process -----------------------------------------------------------------

void* as_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

hipIpcMemHandle_t handle_from_hex(const std::string& text) {
  hipIpcMemHandle_t handle = {};
  const Bytes bytes = from_hex(text);
  REQUIRE_EQ(bytes.size(), sizeof handle);
  std::memcpy(&handle, bytes.data(), sizeof handle);
  return handle;
}

// What a request is answered with: an error, and what it is about.
struct Answer {
  hipError_t error = hipSuccess;
  std::string text = "-";
};

Answer serve(std::istringstream request) {
  std::string what;
  std::string text;
  uintptr_t address = 0;
  size_t count = 0;
  request >> what;
  void* pointer = nullptr;
  if (what == "open") {
    unsigned flags = 0;
    request >> text >> flags;
    const hipError_t error =
        hipIpcOpenMemHandle(&pointer, handle_from_hex(text), flags);
    return {error, std::to_string(reinterpret_cast<uintptr_t>(pointer))};
  }
  if (what == "allocate") {
    request >> count;
    const hipError_t error = hipMalloc(&pointer, count);
    return {error, std::to_string(reinterpret_cast<uintptr_t>(pointer))};
  }
  request >> address;
  pointer = as_pointer(address);
  if (what == "export") {
    hipIpcMemHandle_t handle = {};
    const hipError_t error = hipIpcGetMemHandle(&handle, pointer);
    return {error, to_hex(&handle, sizeof handle)};
  }
  if (what == "read") {
    request >> count;
    Bytes bytes(count);
    const hipError_t error =
        hipMemcpy(bytes.data(), pointer, count, hipMemcpyDeviceToHost);
    return {error, to_hex(bytes.data(), count)};
  }
  if (what == "write") {
    request >> text;
    const Bytes bytes = from_hex(text);
    const hipError_t error =
        hipMemcpy(pointer, bytes.data(), bytes.size(), hipMemcpyHostToDevice);
    return {error == hipSuccess ? hipDeviceSynchronize() : error};
  }
  if (what == "find") return {hipMemGetAddressRange(nullptr, nullptr, pointer)};
  if (what == "close") return {hipIpcCloseMemHandle(pointer)};
  if (what == "free") return {hipFree(pointer)};
  report(CONTRACT_HERE, "no request " + what);
  return {};
}

// Answers a request a line, to the end of its input.
CHILD(ipc_peer) {
  for (;;) {
    const std::string line = read_from_parent();
    if (line.empty()) return 0;
    const Answer answer = serve(std::istringstream(line));
    write_to_parent(std::to_string(answer.error) + " " + answer.text);
  }
}

// A process that does what it is asked to do.
class Peer {
 public:
  ~Peer() { end(); }

  hipError_t open(const hipIpcMemHandle_t& handle, uintptr_t* pointer,
                  unsigned flags = hipIpcMemLazyEnablePeerAccess) {
    const Answer answer =
        ask("open " + to_hex(&handle, sizeof handle) + " " + std::to_string(flags));
    *pointer = std::stoull(answer.text);
    return answer.error;
  }
  hipError_t close(uintptr_t pointer) { return ask("close", pointer).error; }
  hipError_t find(uintptr_t pointer) { return ask("find", pointer).error; }

  Bytes read(uintptr_t pointer, size_t count) {
    const Answer answer = ask("read", pointer, " " + std::to_string(count));
    REQUIRE_OK(answer.error);
    return from_hex(answer.text);
  }
  void write(uintptr_t pointer, const Bytes& bytes) {
    REQUIRE_OK(ask("write", pointer, " " + to_hex(bytes.data(), bytes.size())).error);
  }

  uintptr_t allocate(size_t bytes) {
    const Answer answer = ask("allocate " + std::to_string(bytes));
    REQUIRE_OK(answer.error);
    return std::stoull(answer.text);
  }
  hipIpcMemHandle_t share(uintptr_t pointer) {
    const Answer answer = ask("export", pointer);
    REQUIRE_OK(answer.error);
    return handle_from_hex(answer.text);
  }
  void free(uintptr_t pointer) { REQUIRE_OK(ask("free", pointer).error); }

  void end() {
    if (child_.pid() > 0) EXPECT_EQ(child_.wait(), 0);
  }

 private:
  Answer ask(const std::string& request) {
    child_.write_line(request);
    std::istringstream line(child_.read_line());
    int error = 0;
    Answer answer;
    line >> error >> answer.text;
    answer.error = static_cast<hipError_t>(error);
    return answer;
  }
  Answer ask(const std::string& request, uintptr_t pointer,
             const std::string& more = "") {
    return ask(request + " " + std::to_string(pointer) + more);
  }

  Child child_{"ipc_peer"};
};

hipIpcMemHandle_t share(const void* pointer) {
  hipIpcMemHandle_t handle = {};
  REQUIRE_OK(hipIpcGetMemHandle(&handle, const_cast<void*>(pointer)));
  return handle;
}

// Memory of another process, until the end.
class Import : public Holder<void*, &hipIpcCloseMemHandle> {
 public:
  explicit Import(const hipIpcMemHandle_t& handle) : Holder(opened(handle)) {}

 private:
  static void* opened(const hipIpcMemHandle_t& handle) {
    void* pointer = nullptr;
    REQUIRE_OK(hipIpcOpenMemHandle(&pointer, handle, hipIpcMemLazyEnablePeerAccess));
    return pointer;
  }
};

bool equal(const hipIpcMemHandle_t& a, const hipIpcMemHandle_t& b) {
  return std::memcmp(&a, &b, sizeof a) == 0;
}

// --- bytes ---------------------------------------------------------------------------

CASE(ipc, bytes_go_both_ways, "hip-tests device/hipIpcOpenMemHandle.cc",
     hipIpcGetMemHandle, hipIpcOpenMemHandle, hipIpcCloseMemHandle) {
  DeviceMemory memory(kBytes);
  Peer peer;
  uintptr_t theirs = 0;
  REQUIRE_OK(peer.open(share(memory), &theirs));
  for (unsigned seed = 0; seed < 5; ++seed) {
    const Bytes bytes = random_bytes(kBytes, 2 * seed);
    upload(memory, bytes);
    EXPECT_EQ(peer.read(theirs, kBytes), bytes);
    const Bytes answer = random_bytes(kBytes, 2 * seed + 1);
    peer.write(theirs, answer);
    EXPECT_BYTES(download(memory, kBytes).data(), answer);
  }
  EXPECT_OK(peer.close(theirs));
}

CASE(ipc, memory_of_a_child_is_opened, "hip-tests device/hipIpcOpenMemHandle.cc",
     hipIpcOpenMemHandle, hipIpcCloseMemHandle) {
  Peer peer;
  const uintptr_t theirs = peer.allocate(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  peer.write(theirs, bytes);
  {
    const Import memory(peer.share(theirs));
    EXPECT_BYTES(download(memory, kBytes).data(), bytes);
    const Bytes answer = random_bytes(kBytes, 2);
    upload(memory, answer);
    EXPECT_EQ(peer.read(theirs, kBytes), answer);
  }
  peer.free(theirs);
}

CASE(ipc, large_memory_made_of_many_pieces, kSource, hipIpcGetMemHandle,
     hipIpcOpenMemHandle) {
  constexpr size_t kPiece = size_t{64} << 10;
  constexpr size_t kPieces = 16;
  std::vector<DeviceMemory> pieces;
  for (size_t i = 0; i < 2 * kPieces; ++i) pieces.emplace_back(kPiece);
  for (size_t i = 0; i < 2 * kPieces; i += 2) pieces[i].reset();
  DeviceMemory memory(kPiece * kPieces);
  Peer peer;
  uintptr_t theirs = 0;
  REQUIRE_OK(peer.open(share(memory), &theirs));
  const Bytes bytes = random_bytes(kPiece * kPieces, 1);
  upload(memory, bytes);
  for (size_t offset = 0; offset < bytes.size(); offset += kPiece - 100) {
    const size_t count = std::min<size_t>(200, bytes.size() - offset);
    const auto first = bytes.begin() + static_cast<ptrdiff_t>(offset);
    EXPECT_EQ(peer.read(theirs + offset, count),
              Bytes(first, first + static_cast<ptrdiff_t>(count)));
  }
  EXPECT_OK(peer.close(theirs));
}

CASE(ipc, an_address_within_memory_is_opened_where_it_is, kSource, hipIpcGetMemHandle,
     hipIpcOpenMemHandle, hipIpcCloseMemHandle) {
  constexpr size_t kOffset = 1000;
  DeviceMemory memory(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(memory, bytes);
  Peer peer;
  uintptr_t theirs = 0;
  REQUIRE_OK(peer.open(share(memory.at(kOffset)), &theirs));
  EXPECT_EQ(peer.read(theirs, kBytes - kOffset),
            Bytes(bytes.begin() + kOffset, bytes.end()));
  EXPECT_OK(peer.close(theirs));
}

CASE(ipc, both_directions_at_once, kSource, hipIpcGetMemHandle, hipIpcOpenMemHandle) {
  Peer peer;
  DeviceMemory ours(kBytes);
  const uintptr_t theirs = peer.allocate(kBytes);
  uintptr_t ours_there = 0;
  REQUIRE_OK(peer.open(share(ours), &ours_there));
  {
    const Import theirs_here(peer.share(theirs));
    const Bytes bytes = random_bytes(kBytes, 1);
    peer.write(theirs, bytes);
    EXPECT_OK(hipMemcpy(ours, theirs_here, kBytes, hipMemcpyDeviceToDevice));
    EXPECT_OK(hipDeviceSynchronize());
    EXPECT_EQ(peer.read(ours_there, kBytes), bytes);
  }
  EXPECT_OK(peer.close(ours_there));
  peer.free(theirs);
}

// --- handles -------------------------------------------------------------------------

CASE(ipc, memories_have_different_handles, "hip-tests device/hipIpcGetMemHandle.cc",
     hipIpcGetMemHandle) {
  DeviceMemory first(kBytes);
  DeviceMemory second(kBytes);
  EXPECT(!equal(share(first), share(second)));
}

CASE(ipc, what_has_no_handle, "hip-tests device/hipIpcGetMemHandle.cc",
     hipIpcGetMemHandle) {
  DeviceMemory memory(kBytes);
  Pages pages(kBytes);
  hipIpcMemHandle_t handle = {};
  EXPECT_ERROR(hipIpcGetMemHandle(nullptr, memory), hipErrorInvalidValue);
  EXPECT_ERROR(hipIpcGetMemHandle(&handle, nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipIpcGetMemHandle(&handle, pages.get()), hipErrorInvalidValue);
  EXPECT_ERROR(hipIpcGetMemHandle(&handle, memory.at(kBytes)), hipErrorInvalidValue);
  void* const freed = memory.release();
  REQUIRE_OK(hipFree(freed));
  EXPECT_ERROR(hipIpcGetMemHandle(&handle, freed), hipErrorInvalidValue);
}

CASE(ipc, host_memory_has_no_handle, kSource, hipIpcGetMemHandle) {
  if (!simulated()) SKIP("not established");
  HostMemory allocated(kBytes);
  RegisteredMemory registered(kBytes);
  hipIpcMemHandle_t handle = {};
  for (void* const pointer : {allocated.get(), registered.get()}) {
    EXPECT_ERROR(hipIpcGetMemHandle(&handle, pointer), hipErrorInvalidValue);
  }
}

CASE(ipc, a_handle_is_not_opened_in_its_own_process,
     "hip-tests device/hipIpcOpenMemHandle.cc", hipIpcOpenMemHandle) {
  DeviceMemory memory(kBytes);
  void* pointer = nullptr;
  for (const size_t offset : {0, 100}) {
    EXPECT_ERROR(hipIpcOpenMemHandle(&pointer, share(memory.at(offset)),
                                     hipIpcMemLazyEnablePeerAccess),
                 hipErrorInvalidContext);
  }
}

CASE(ipc, handles_that_are_refused, kSource, hipIpcOpenMemHandle) {
  Peer peer;
  const uintptr_t theirs = peer.allocate(kBytes);
  const hipIpcMemHandle_t handle = peer.share(theirs);
  void* pointer = nullptr;
  EXPECT_ERROR(hipIpcOpenMemHandle(nullptr, handle, hipIpcMemLazyEnablePeerAccess),
               hipErrorInvalidValue);
  for (const unsigned flags : {0u, 2u, 3u, ~0u}) {
    EXPECT_ERROR(hipIpcOpenMemHandle(&pointer, handle, flags), hipErrorInvalidValue);
  }
  const hipIpcMemHandle_t zeroes = {};
  EXPECT_ERROR(hipIpcOpenMemHandle(&pointer, zeroes, hipIpcMemLazyEnablePeerAccess),
               hipErrorInvalidValue);
  const Import works(handle);
}

// The driver's own part of a handle is its beginning.
CASE(ipc, a_handle_that_the_driver_did_not_make_is_an_invalid_pointer, kSource,
     hipIpcOpenMemHandle) {
  Peer peer;
  const uintptr_t theirs = peer.allocate(kBytes);
  hipIpcMemHandle_t handle = peer.share(theirs);
  for (size_t i = 0; i < 32; ++i) {
    handle.reserved[i] = static_cast<char>(~handle.reserved[i]);
  }
  void* pointer = nullptr;
  EXPECT_ERROR(hipIpcOpenMemHandle(&pointer, handle, hipIpcMemLazyEnablePeerAccess),
               hipErrorInvalidDevicePointer);
}

CASE(ipc, an_export_ends_with_its_memory, kSource, hipIpcGetMemHandle,
     hipIpcOpenMemHandle) {
  if (!simulated()) SKIP("not established");
  DeviceMemory memory(kBytes);
  Peer peer;
  uintptr_t theirs = 0;
  const hipIpcMemHandle_t old = share(memory);
  memory = DeviceMemory();
  EXPECT_ERROR(peer.open(old, &theirs), hipErrorInvalidDevicePointer);
  memory = DeviceMemory(kBytes);
  const hipIpcMemHandle_t fresh = share(memory);
  EXPECT(!equal(old, fresh));
  EXPECT_ERROR(peer.open(old, &theirs), hipErrorInvalidDevicePointer);
  REQUIRE_OK(peer.open(fresh, &theirs));
  EXPECT_OK(peer.close(theirs));
}

CASE(ipc, an_export_ends_with_its_process, kSource, hipIpcOpenMemHandle) {
  if (!simulated()) SKIP("not established");
  Peer peer;
  const uintptr_t theirs = peer.allocate(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  peer.write(theirs, bytes);
  const hipIpcMemHandle_t handle = peer.share(theirs);
  {
    const Import memory(handle);
    peer.end();
    EXPECT_BYTES(download(memory, kBytes).data(), bytes);
  }
  void* pointer = nullptr;
  EXPECT_ERROR(hipIpcOpenMemHandle(&pointer, handle, hipIpcMemLazyEnablePeerAccess),
               hipErrorInvalidDevicePointer);
}

// --- references ----------------------------------------------------------------------

CASE(ipc, every_open_needs_a_close, "hip-tests device/hipIpcCloseMemHandle.cc",
     hipIpcOpenMemHandle, hipIpcCloseMemHandle, hipMemGetAddressRange) {
  DeviceMemory memory(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(memory, bytes);
  Peer peer;
  const hipIpcMemHandle_t handle = share(memory);
  uintptr_t first = 0;
  uintptr_t second = 0;
  REQUIRE_OK(peer.open(handle, &first));
  REQUIRE_OK(peer.open(handle, &second));
  EXPECT_EQ(second, first);
  EXPECT_OK(peer.close(first));
  EXPECT_OK(peer.find(second));
  EXPECT_EQ(peer.read(second, kBytes), bytes);
  EXPECT_OK(peer.close(second));
  EXPECT_ERROR(peer.find(second), hipErrorNotFound);
  EXPECT_ERROR(peer.close(second), hipErrorInvalidValue);
  EXPECT_BYTES(download(memory, kBytes).data(), bytes);
}

CASE(ipc, closed_memory_is_opened_again, kSource, hipIpcOpenMemHandle,
     hipIpcCloseMemHandle) {
  DeviceMemory memory(kBytes);
  Peer peer;
  const hipIpcMemHandle_t handle = share(memory);
  for (unsigned seed = 0; seed < 3; ++seed) {
    const Bytes bytes = random_bytes(kBytes, seed);
    upload(memory, bytes);
    uintptr_t theirs = 0;
    REQUIRE_OK(peer.open(handle, &theirs));
    EXPECT_EQ(peer.read(theirs, kBytes), bytes);
    EXPECT_OK(peer.close(theirs));
  }
}

CASE(ipc, what_cannot_be_closed, "hip-tests device/hipIpcCloseMemHandle.cc",
     hipIpcCloseMemHandle) {
  DeviceMemory memory(kBytes);
  Pages pages(kBytes);
  share(memory);
  EXPECT_ERROR(hipIpcCloseMemHandle(nullptr), hipErrorInvalidValue);
  EXPECT_ERROR(hipIpcCloseMemHandle(pages.get()), hipErrorInvalidValue);
  EXPECT_ERROR(hipIpcCloseMemHandle(memory), hipErrorInvalidValue);
}

CASE(ipc, a_close_waits_for_the_device, kSource, hipIpcCloseMemHandle) {
  Peer peer;
  const uintptr_t theirs = peer.allocate(kBytes);
  const Bytes bytes = random_bytes(kBytes, 1);
  peer.write(theirs, bytes);
  DeviceMemory memory(kBytes);
  Stream stream;
  {
    const Import import(peer.share(theirs));
    const Busy busy(stream);
    EXPECT_OK(hipMemcpyAsync(memory, import, kBytes, hipMemcpyDeviceToDevice, stream));
    EXPECT_ERROR(hipStreamQuery(stream), hipErrorNotReady);
  }
  EXPECT_OK(hipStreamQuery(stream));
  EXPECT_BYTES(download(memory, kBytes).data(), bytes);
}

// --- virtual memory ------------------------------------------------------------------

CASE(ipc, virtual_memory_is_refused_from_7_13_on, "clr hip_vm.cpp",
     hipIpcGetMemHandle) {
  MappedMemory memory;
  hipIpcMemHandle_t handle = {};
  for (const size_t offset : {0, 100}) {
    EXPECT_ERROR(hipIpcGetMemHandle(&handle, memory.at(offset)),
                 since(7, 13) ? hipErrorInvalidValue : hipSuccess);
  }
}

CASE(ipc, handles_of_virtual_memory_cannot_be_opened_before_7_13, "clr hip_vm.cpp",
     hipIpcGetMemHandle, hipIpcOpenMemHandle) {
  if (!simulated()) SKIP("opening one can crash the kernel driver");
  if (since(7, 13)) SKIP("there are no such handles from 7.13 on");
  MappedMemory memory;
  const hipIpcMemHandle_t handle = share(memory.get());
  Peer peer;
  uintptr_t theirs = 0;
  EXPECT_ERROR(peer.open(handle, &theirs), hipErrorInvalidDevicePointer);
  void* pointer = nullptr;
  EXPECT_ERROR(hipIpcOpenMemHandle(&pointer, handle, hipIpcMemLazyEnablePeerAccess),
               hipErrorInvalidContext);
}

// --- accounts ------------------------------------------------------------------------

CASE(ipc, exports_and_imports_are_counted, "hipsim_control.h", hipIpcGetMemHandle,
     hipIpcOpenMemHandle) {
  if (!simulated()) SKIP("needs the simulator");
  const uint64_t imports = stat("imports");
  const uint64_t imported_bytes = stat("imported_bytes");
  DeviceMemory memory(kBytes);
  MappedMemory mapped;
  Peer peer;
  const uintptr_t theirs = peer.allocate(kBytes);
  const hipIpcMemHandle_t own = share(memory);
  share(memory.at(100));
  hipIpcMemHandle_t handle = {};
  for (int i = 0; i < 3; ++i) hipIpcGetMemHandle(&handle, mapped.get());
  EXPECT_EQ(stat("ipc_exports"), uint64_t{2});
  EXPECT_EQ(stat("ipc_virtual_exports"), uint64_t{3});

  void* pointer = nullptr;
  EXPECT_ERROR(hipIpcOpenMemHandle(&pointer, own, hipIpcMemLazyEnablePeerAccess),
               hipErrorInvalidContext);
  EXPECT_EQ(stat("ipc_failed_imports"), uint64_t{1});
  {
    const Import first(peer.share(theirs));
    const Import second(peer.share(theirs));
    EXPECT_EQ(stat("imports"), imports + 1);
    EXPECT_EQ(stat("imported_bytes"), imported_bytes + kBytes);
  }
  EXPECT_EQ(stat("imports"), imports);
  EXPECT_EQ(stat("imported_bytes"), imported_bytes);
  EXPECT_EQ(stat("ipc_failed_imports"), uint64_t{1});
}

}  // namespace
}  // namespace contract
