// SPDX-License-Identifier: Apache-2.0
//
// Who may touch virtual memory: devices, copies, the host.
#include <algorithm>
#include <csignal>
#include <string>

#include "virtual_memory.h"

namespace contract {
namespace {

constexpr const char* kSource = "clr hip_vm.cpp";

constexpr auto kNone = hipMemAccessFlagsProtNone;
constexpr auto kRead = hipMemAccessFlagsProtRead;
constexpr auto kReadWrite = hipMemAccessFlagsProtReadWrite;

constexpr size_t kBytes = 4096;

// --- access --------------------------------------------------------------------------

CASE(virtual_memory, access_is_none_until_it_is_set,
     "hip-tests virtualMemoryManagement/hipMemSetGetAccess.cc", hipMemGetAccess,
     hipMemSetAccess) {
  MappedMemory memory({kChunk}, kNone);
  EXPECT_EQ(access_at(memory.get()), 0ull);
  for (const hipMemAccessFlags flags : {kReadWrite, kRead, kReadWrite}) {
    EXPECT_OK(set_access(memory.get(), kChunk, flags));
    for (const size_t offset : {size_t{0}, kBytes + 1, kChunk - 1}) {
      EXPECT_EQ(access_at(memory.at(offset)), static_cast<unsigned long long>(flags));
    }
  }
}

CASE(virtual_memory, access_is_lost_at_unmap, "ROCr runtime.cpp", hipMemUnmap,
     hipMemGetAccess) {
  Reservation range(kChunk);
  Chunk chunk(kChunk);
  {
    Mapping mapping(range.at(0), kChunk, chunk);
    REQUIRE_OK(set_access(range.at(0), kChunk, kReadWrite));
  }
  Mapping mapping(range.at(0), kChunk, chunk);
  EXPECT_EQ(access_at(range.at(0)), 0ull);
}

CASE(virtual_memory, access_of_what_is_not_mapped,
     "hip-tests virtualMemoryManagement/hipMemSetGetAccess.cc; clr hip_vm.cpp",
     hipMemGetAccess) {
  MappedMemory memory;
  Reservation empty(kChunk);
  unsigned long long flags = 0;
  hipMemLocation location = {hipMemLocationTypeDevice, 0};
  const auto refused = [&](void* address) {
    EXPECT_ERROR(hipMemGetAccess(&flags, &location, address), hipErrorInvalidValue);
  };
  refused(nullptr);
  refused(memory.at(memory.size()));
  refused(empty.at(0));
  EXPECT_ERROR(hipMemGetAccess(nullptr, &location, memory.get()), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemGetAccess(&flags, nullptr, memory.get()), hipErrorInvalidValue);
  for (const int device : {-1, device_count()}) {
    location = {hipMemLocationTypeDevice, device};
    refused(memory.get());
  }
  for (const auto type : {hipMemLocationTypeInvalid, hipMemLocationTypeHost}) {
    location = {type, 0};
    refused(memory.get());
  }
}

CASE(virtual_memory, access_that_cannot_be_set,
     "hip-tests virtualMemoryManagement/hipMemSetGetAccess.cc; clr hip_vm.cpp",
     hipMemSetAccess) {
  MappedMemory memory;
  const hipMemAccessDesc access = device_access(kRead);
  const auto refused = [&](const hipMemAccessDesc& wrong) {
    EXPECT_ERROR(hipMemSetAccess(memory.get(), kChunk, &wrong, 1),
                 hipErrorInvalidValue);
  };
  EXPECT_ERROR(hipMemSetAccess(nullptr, kChunk, &access, 1), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemSetAccess(memory.get(), 0, &access, 1), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemSetAccess(memory.get(), kChunk, nullptr, 1), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemSetAccess(memory.get(), kChunk, &access, 0), hipErrorInvalidValue);
  refused(device_access(kRead, device_count()));
  need_checked_mappings();
  refused(device_access(kRead, device_count() + 100));
  for (const unsigned flags : {2u, 4u, 0xFFu}) {
    refused(device_access(static_cast<hipMemAccessFlags>(flags)));
  }
  refused({{hipMemLocationTypeInvalid, 0}, kRead});
  EXPECT_EQ(access_at(memory.get()), 3ull);
  memory.unmap();
  refused(access);
}

CASE(virtual_memory, access_is_for_whole_mappings, kSource, hipMemSetAccess) {
  need_checked_mappings();
  MappedMemory memory({kChunk, 2 * kChunk, kChunk});
  const size_t wrong[] = {kChunk / 2, 2 * kChunk, 5 * kChunk};
  for (const size_t size : wrong) {
    EXPECT_ERROR(set_access(memory.get(), size, kRead), hipErrorInvalidValue);
  }
  for (const size_t chunk : {0, 1, 2, 3}) {
    EXPECT_EQ(access_at(memory.at(chunk * kChunk)), 3ull);
  }
  EXPECT_OK(set_access(memory.get(), 3 * kChunk, kRead));
  EXPECT_EQ(access_at(memory.at(0)), 1ull);
  EXPECT_EQ(access_at(memory.at(2 * kChunk)), 1ull);
  EXPECT_EQ(access_at(memory.at(3 * kChunk)), 3ull);
}

CASE(virtual_memory, access_within_a_reservation, "RS#2516", hipMemSetAccess) {
  if (!simulated() && !since(7, 12)) SKIP("refused by some releases before 7.12");
  MappedMemory memory({kChunk, 2 * kChunk, kChunk});
  EXPECT_ERROR(set_access(memory.at(kChunk), kChunk, kRead), hipErrorInvalidValue);
  EXPECT_ERROR(set_access(memory.at(kChunk), 4 * kChunk, kRead), hipErrorInvalidValue);
  EXPECT_OK(set_access(memory.at(kChunk), 3 * kChunk, kRead));
  EXPECT_EQ(access_at(memory.at(0)), 3ull);
  for (const size_t chunk : {1, 2, 3}) {
    EXPECT_EQ(access_at(memory.at(chunk * kChunk)), 1ull);
  }
}

// --- copies and access ---------------------------------------------------------------

void need_checked_copies() {
  if (!simulated() && !since(7, 12)) SKIP("the sources read are from 7.12 on");
}

// What the current device is told when it reads and writes the memory.
void expect_access(MappedMemory& memory, bool reads, bool writes) {
  const hipError_t read = reads ? hipSuccess : hipErrorUnknown;
  const hipError_t written = writes ? hipSuccess : hipErrorUnknown;
  RegisteredMemory host(kBytes);
  Stream stream;
  unsigned char* const byte = memory.at(kBytes);
  EXPECT_ERROR(hipMemcpy(host.get(), byte, 64, hipMemcpyDeviceToHost), read);
  EXPECT_ERROR(hipMemcpy(byte, host.get(), 64, hipMemcpyHostToDevice), written);
  EXPECT_ERROR(hipMemcpyAsync(host.get(), byte, 64, hipMemcpyDeviceToHost, stream),
               read);
  EXPECT_ERROR(hipMemcpyAsync(byte, host.get(), 64, hipMemcpyHostToDevice, stream),
               written);
  EXPECT_ERROR(hipMemset(byte, 1, 64), written);
  EXPECT_OK(hipDeviceSynchronize());
}

CASE(virtual_memory, copies_need_access, "clr hip_memory.cpp", hipMemcpy,
     hipMemcpyAsync, hipMemset, hipMemSetAccess) {
  need_checked_copies();
  MappedMemory memory({kChunk}, kNone);
  expect_access(memory, false, false);
  EXPECT_OK(set_access(memory.get(), kChunk, kRead));
  expect_access(memory, true, false);
  EXPECT_OK(set_access(memory.get(), kChunk, kReadWrite));
  expect_access(memory, true, true);
  EXPECT_OK(set_access(memory.get(), kChunk, kNone));
  expect_access(memory, false, false);
}

CASE(virtual_memory, access_is_for_a_device, "clr hip_memory.cpp", hipMemSetAccess,
     hipMemGetAccess, hipSetDevice) {
  need_devices(2);
  need_checked_copies();
  MappedMemory memory;
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(memory.get(), bytes);
  EXPECT_EQ(access_at(memory.get(), 1), 0ull);
  {
    CurrentDevice other(1);
    expect_access(memory, false, false);
  }
  const hipError_t error = set_access(memory.get(), kChunk, kReadWrite, 1);
  if (!simulated() && error != hipSuccess) SKIP("the devices do not reach each other");
  EXPECT_OK(error);
  EXPECT_EQ(access_at(memory.get(), 0), 3ull);
  EXPECT_EQ(access_at(memory.get(), 1), 3ull);
  CurrentDevice other(1);
  expect_access(memory, true, true);
  EXPECT_BYTES(download(memory.get(), kBytes).data(), bytes);
}

CASE(virtual_memory, access_for_several_devices_at_once,
     "hip-tests virtualMemoryManagement/hipMemSetGetAccess.cc", hipMemSetAccess,
     hipMemGetAccess) {
  need_devices(2);
  MappedMemory memory({kChunk}, kNone);
  const hipMemAccessDesc access[] = {device_access(kReadWrite, 0),
                                     device_access(kRead, 1)};
  const hipError_t error = hipMemSetAccess(memory.get(), kChunk, access, 2);
  if (!simulated() && error != hipSuccess) SKIP("the devices do not reach each other");
  EXPECT_OK(error);
  EXPECT_EQ(access_at(memory.get(), 0), 3ull);
  EXPECT_EQ(access_at(memory.get(), 1), 1ull);
}

CASE(virtual_memory, a_copy_ends_in_its_reservation, "clr hip_memory.cpp", hipMemcpy,
     hipMemset) {
  need_checked_copies();
  MappedMemory memory;
  Bytes bytes(2 * kChunk);
  unsigned char* const end = memory.at(kChunk);
  EXPECT_OK(hipMemcpy(end - 1, bytes.data(), 1, hipMemcpyHostToDevice));
  EXPECT_ERROR(hipMemcpy(end - 1, bytes.data(), 2, hipMemcpyHostToDevice),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy(bytes.data(), end - 1, 2, hipMemcpyDeviceToHost),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy(memory.get(), bytes.data(), kChunk + 1, hipMemcpyHostToDevice),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemset(end - 1, 1, 2), hipErrorInvalidValue);
}

CASE(virtual_memory, a_copy_does_not_go_on_in_the_next_reservation,
     "clr hip_memory.cpp", hipMemcpy, hipMemset) {
  need_checked_copies();
  Reservation first(kChunk);
  Reservation second(kChunk, first.at(kChunk));
  if (second.at(0) != first.at(kChunk)) SKIP("the reservations are no neighbours");
  const Chunk chunk(kChunk);
  const Mapping here(first.at(0), kChunk, chunk);
  const Mapping there(second.at(0), kChunk, chunk);
  REQUIRE_OK(set_access(first.at(0), kChunk, kReadWrite));
  REQUIRE_OK(set_access(second.at(0), kChunk, kReadWrite));
  Bytes bytes(2);
  unsigned char* const end = first.at(kChunk);
  EXPECT_ERROR(hipMemcpy(end - 1, bytes.data(), 2, hipMemcpyHostToDevice),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemset(end - 1, 0, 2), hipErrorInvalidValue);
  EXPECT_OK(hipMemcpy(end, bytes.data(), 2, hipMemcpyHostToDevice));
}

CASE(virtual_memory, a_copy_across_mappings, "clr hip_memory.cpp", hipMemcpy,
     hipMemset) {
  if (!simulated()) SKIP("whether a machine can do it is not established");
  MappedMemory memory({kChunk, kChunk, kChunk});
  const Bytes bytes = random_bytes(memory.size(), 1);
  upload(memory.get(), bytes);
  EXPECT_BYTES(download(memory.get(), memory.size()).data(), bytes);
  EXPECT_OK(hipMemset(memory.at(kChunk - 2), 7, kChunk + 4));
  EXPECT_BYTES(download(memory.at(kChunk - 2), kChunk + 4).data(),
               Bytes(kChunk + 4, 7));
  memory.mapping(1).reset();
  Bytes back(kChunk + 1);
  EXPECT_ERROR(hipMemcpy(back.data(), memory.get(), kChunk + 1, hipMemcpyDeviceToHost),
               hipErrorInvalidValue);
}

CASE(virtual_memory, access_counts_in_every_mapping_of_a_copy, "clr hip_memory.cpp",
     hipMemcpy) {
  if (!simulated()) SKIP("whether a machine can do it is not established");
  MappedMemory memory({kChunk, kChunk});
  EXPECT_OK(set_access(memory.at(kChunk), kChunk, kRead));
  const Bytes bytes = random_bytes(kBytes, 1);
  unsigned char* const across = memory.at(kChunk - kBytes / 2);
  EXPECT_ERROR(hipMemcpy(across, bytes.data(), kBytes, hipMemcpyHostToDevice),
               hipErrorUnknown);
  Bytes back(kBytes);
  EXPECT_OK(hipMemcpy(back.data(), across, kBytes, hipMemcpyDeviceToHost));
}

CASE(virtual_memory, copies_across_mappings_can_be_refused, "clr hip_memory.cpp",
     hipMemcpy, hipMemcpyAsync, hipMemcpyBatchAsync, hipMemset) {
  if (!simulated()) SKIP("needs the simulator's switch");
  MappedMemory memory({kChunk, kChunk});
  RegisteredMemory host(kBytes);
  Stream stream;
  unsigned char* const across = memory.at(kChunk - 1);
  set_switch("one_mapping_copies", 1);
  EXPECT_ERROR(hipMemcpy(across, host.get(), 2, hipMemcpyHostToDevice),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpyAsync(host.get(), across, 2, hipMemcpyDeviceToHost, stream),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemset(across, 0, 2), hipErrorInvalidValue);
  void* destinations[] = {across};
  void* sources[] = {host.get()};
  size_t sizes[] = {2};
  size_t fail_index = 0;
  EXPECT_ERROR(hipMemcpyBatchAsync(destinations, sources, sizes, 1, nullptr, nullptr, 0,
                                   &fail_index, stream),
               hipErrorInvalidValue);
  EXPECT_OK(hipMemcpy(across, host.get(), 1, hipMemcpyHostToDevice));
  EXPECT_OK(hipMemcpy(across + 1, host.get(), 1, hipMemcpyHostToDevice));
  set_switch("one_mapping_copies", 0);
  EXPECT_OK(hipMemcpy(across, host.get(), 2, hipMemcpyHostToDevice));
}

CASE(virtual_memory, a_pitched_copy_stays_in_one_mapping, "clr hip_memory.cpp",
     hipMemcpy2D, hipMemcpy2DAsync) {
  need_checked_copies();
  MappedMemory memory({kChunk, kChunk});
  RegisteredMemory host(kBytes);
  Stream stream;
  const Bytes bytes = random_bytes(kBytes, 1);
  std::copy(bytes.begin(), bytes.end(), host.at(0));
  constexpr size_t kPitch = kChunk / 4;
  const auto store = [&](size_t offset, size_t rows) {
    return hipMemcpy2D(memory.at(offset), kPitch, host.get(), 64, 64, rows,
                       hipMemcpyHostToDevice);
  };
  EXPECT_OK(store(0, 4));
  EXPECT_BYTES(download(memory.at(3 * kPitch), 64).data(),
               Bytes(bytes.begin() + 3 * 64, bytes.begin() + 4 * 64));
  EXPECT_ERROR(store(0, 5), hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy2DAsync(host.get(), 64, memory.get(), kPitch, 64, 5,
                                hipMemcpyDeviceToHost, stream),
               hipErrorInvalidValue);
  EXPECT_OK(store(kChunk, 4));
}

// The direction is the addresses' own, as for hipMalloc's memory.
CASE(virtual_memory, pitched_copies_there_and_back, "clr hip_memory.cpp",
     hipMemcpy2DAsync, hipMemcpy3DAsync) {
  need_checked_copies();
  MappedMemory memory({kChunk, kChunk});
  RegisteredMemory host(2 * kBytes);
  Stream stream;
  constexpr size_t kPitch = kChunk / 4;
  constexpr size_t kWidth = kBytes / 4;
  const uint64_t packets = stat("pitched_packets");
  const uint64_t copies = stat("copies.sdma.d2h");
  for (const size_t begin : {size_t{0}, kChunk}) {
    const Bytes bytes = random_bytes(kBytes, 1 + static_cast<unsigned>(begin));
    std::copy(bytes.begin(), bytes.end(), host.at(0));
    EXPECT_OK(hipMemcpy2DAsync(memory.at(begin), kPitch, host.get(), kWidth, kWidth, 4,
                               hipMemcpyDefault, stream));
    EXPECT_OK(hipMemcpy2DAsync(host.at(kBytes), kWidth, memory.at(begin), kPitch,
                               kWidth, 4, hipMemcpyDefault, stream));
    EXPECT_OK(hipStreamSynchronize(stream));
    EXPECT_BYTES(host.at(kBytes), bytes);
    std::fill_n(host.at(kBytes), kBytes, static_cast<unsigned char>(0));
    hipMemcpy3DParms box = {};
    box.srcPtr = {memory.at(begin), kWidth, kWidth, kPitch / kWidth};
    box.dstPtr = {host.at(kBytes), kWidth, kWidth, 1};
    box.extent = {kWidth, 1, 4};
    box.kind = hipMemcpyDefault;
    EXPECT_OK(hipMemcpy3DAsync(&box, stream));
    EXPECT_OK(hipStreamSynchronize(stream));
    EXPECT_BYTES(host.at(kBytes), bytes);
  }
  if (!simulated()) return;
  EXPECT_EQ(stat("pitched_packets"), packets + 6);
  EXPECT_EQ(stat("copies.sdma.d2h"), copies + 4);
}

CASE(virtual_memory, a_copy_from_or_to_what_is_not_mapped,
     "docs/hipsim.md, Where it is stricter", hipMemcpy, hipMemset) {
  if (!simulated()) SKIP("HIP takes the address for the host's");
  Reservation range(kChunk);
  Bytes bytes(64);
  EXPECT_ERROR(hipMemcpy(range.at(0), bytes.data(), 64, hipMemcpyHostToDevice),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemcpy(bytes.data(), range.at(0), 64, hipMemcpyDeviceToHost),
               hipErrorInvalidValue);
  EXPECT_ERROR(hipMemset(range.at(0), 0, 64), hipErrorInvalidValue);
}

CASE(virtual_memory, a_fill_waits_unless_it_begins_a_mapping, "clr hip_memory.cpp",
     hipMemset) {
  need_checked_copies();
  MappedMemory memory({kChunk, kChunk});
  for (const size_t offset : {size_t{0}, kChunk, size_t{256}, kChunk + 256}) {
    const Busy busy(nullptr);
    EXPECT_OK(hipMemset(memory.at(offset), 1, 64));
    EXPECT_ERROR(hipStreamQuery(nullptr),
                 offset % kChunk == 0 ? hipErrorNotReady : hipSuccess);
    EXPECT_OK(hipDeviceSynchronize());
  }
}

// --- the host ------------------------------------------------------------------------

CASE(virtual_memory, the_host_has_no_access_before_7_2, "RS#1620", hipMemSetAccess) {
  MappedMemory memory;
  const hipMemAccessDesc access = host_access(kReadWrite);
  EXPECT_ERROR(hipMemSetAccess(memory.get(), kChunk, &access, 1),
               since(7, 2) ? hipSuccess : hipErrorInvalidValue);
}

void need_host_access() {
  int large_bar = 0;
  REQUIRE_OK(hipDeviceGetAttribute(&large_bar, hipDeviceAttributeIsLargeBar, 0));
  if (!since(7, 2) || large_bar == 0) SKIP("the host has no access");
}

CASE(virtual_memory, the_host_reads_and_writes_with_its_own_access, "RS#1620",
     hipMemSetAccess) {
  need_host_access();
  MappedMemory memory({kChunk}, kNone);
  const hipMemAccessDesc access[] = {device_access(kReadWrite),
                                     host_access(kReadWrite)};
  REQUIRE_OK(hipMemSetAccess(memory.get(), kChunk, access, 2));
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(memory.at(kBytes), bytes);
  EXPECT_BYTES(memory.at(kBytes), bytes);
  const Bytes others = random_bytes(kBytes, 2);
  std::copy(others.begin(), others.end(), memory.at(0));
  EXPECT_BYTES(download(memory.get(), kBytes).data(), others);
}

// Arguments: the flags of the host's access or none, "read" or "write", and whether
// the host may do what the device may.
CHILD(touches_memory_from_the_host) {
  set_switch("host_reads", std::stoi(arguments.at(2)));
  MappedMemory memory;
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(memory.get(), bytes);
  if (arguments.at(0) != "none") {
    const hipMemAccessDesc access =
        host_access(static_cast<hipMemAccessFlags>(std::stoul(arguments.at(0))));
    REQUIRE_OK(hipMemSetAccess(memory.get(), kChunk, &access, 1));
  }
  volatile unsigned char* const byte = memory.at(100);
  EXPECT_EQ(static_cast<int>(*byte), static_cast<int>(bytes[100]));
  if (arguments.at(1) == "write") {
    *byte = static_cast<unsigned char>(~bytes[100]);
    EXPECT_EQ(download(memory.at(100), 1), Bytes(1, ~bytes[100]));
  }
  return 0;
}

void expect_host_access(const Arguments& arguments, bool allowed) {
  const Ending ending = run_child("touches_memory_from_the_host", arguments, kPatience,
                                  kNoSignalHandlers);
  if (allowed) {
    EXPECT_EQ(ending, 0);
  } else {
    EXPECT_EQ(ending.signal, SIGSEGV);
  }
}

CASE(virtual_memory, the_host_faults_without_access, kSource, hipDeviceGetAttribute) {
  if (!simulated()) SKIP("what happens depends on the machine");
  need_virtual_memory();
  expect_host_access({"none", "read", "0"}, false);
  expect_host_access({"none", "write", "0"}, false);
  if (!since(7, 2)) return;
  expect_host_access({"0", "read", "0"}, false);
  expect_host_access({"1", "read", "0"}, true);
  expect_host_access({"1", "write", "0"}, false);
  expect_host_access({"3", "write", "0"}, true);
}

CHILD(reads_memory_that_nobody_may) {
  set_switch("host_reads", 1);
  MappedMemory memory({kChunk}, kNone);
  return *static_cast<volatile unsigned char*>(memory.at(0));
}

CASE(virtual_memory, the_host_faults_where_nobody_has_access, kSource,
     hipDeviceGetAttribute) {
  if (!simulated()) SKIP("what happens depends on the machine");
  need_virtual_memory();
  EXPECT_EQ(run_child("reads_memory_that_nobody_may", {}, kPatience, kNoSignalHandlers)
                .signal,
            SIGSEGV);
}

CASE(virtual_memory, the_host_may_be_let_in, "docs/hipsim.md", hipMemSetAccess) {
  if (!simulated()) SKIP("needs the simulator's switch");
  expect_host_access({"none", "read", "1"}, true);
  expect_host_access({"none", "write", "1"}, true);
}

// Whether the host may read is settled by the environment.
CHILD(reads_memory_from_the_host) {
  MappedMemory memory;
  const Bytes bytes = random_bytes(kBytes, 1);
  upload(memory.get(), bytes);
  EXPECT_BYTES(memory.at(0), bytes);
  return 0;
}

CASE(virtual_memory, the_host_may_be_let_in_by_the_environment, "docs/hipsim.md",
     hipMemSetAccess) {
  if (!simulated()) SKIP("needs the simulator");
  std::vector<std::string> environment = kNoSignalHandlers;
  environment.emplace_back("HIPSIM_HOST_READS=fault");
  EXPECT_EQ(run_child("reads_memory_from_the_host", {}, kPatience, environment).signal,
            SIGSEGV);
  environment.back() = "HIPSIM_HOST_READS=allow";
  EXPECT_EQ(run_child("reads_memory_from_the_host", {}, kPatience, environment), 0);
}

}  // namespace
}  // namespace contract
