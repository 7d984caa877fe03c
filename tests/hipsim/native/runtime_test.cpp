// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime.h"

#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "machine.h"
#include "test.h"

namespace hipsim {
namespace {

using test::at;
using test::is_readable;

// Releases of HIP; the driver of CUDA has tests of its own.
std::vector<const Profile*> releases() {
  std::vector<const Profile*> all;
  for (const Profile& profile : profiles()) {
    if (!profile.cuda) all.push_back(&profile);
  }
  return all;
}

// --- faults ------------------------------------------------------------------------

TEST(every_call_can_be_made_to_fail) {
  const std::vector<const char*> names = {"a", "b", "c", "d"};
  for (size_t faulty = 0; faulty < names.size(); ++faulty) {
    Machine machine("7.16", names);
    CHECK(machine->fail(names[faulty], 2, Error::kNotReady));
    CHECK(!machine->fail("e", 1, Error::kNotReady));
    for (int turn = 1; turn <= 3; ++turn) {
      for (size_t call = 0; call < names.size(); ++call) {
        const bool due = call == faulty && turn == 2;
        CHECK(machine->enter(call) == (due ? Error::kNotReady : Error::kSuccess));
      }
    }
    CHECK_EQ(machine.stat(std::string("calls.") + names[faulty]), 3);
    CHECK(machine->fail(names[faulty], 1, Error::kNotReady));
    machine->reset(nullptr);
    CHECK_OK(machine->enter(faulty));
    CHECK_EQ(machine.stat(std::string("calls.") + names[faulty]), 1);
    machine->refuse_calls(Error::kNoDevice);
    CHECK_ERROR(machine->enter(faulty), kNoDevice);
  }
}

TEST(a_failing_batch_blames_its_first_copy_where_releases_do) {
  for (const Profile* release : releases()) {
    Machine machine(release->name);
    size_t index = 5;
    Batch batch{};
    batch.fail_index = &index;
    machine->blame_first_copy(batch);
    CHECK_EQ(index, release->batch_is_a_loop ? 0 : Runtime::kNoIndex);
    batch.fail_index = nullptr;
    machine->blame_first_copy(batch);
  }
}

// One copy too many for the blit kernel.
Error overrun(Machine& machine, void* to, void* from, Handle stream) {
  const size_t count = machine->profile().max_blit_batch + 1;
  const std::vector<void*> destinations(count, to);
  const std::vector<const void*> sources(count, from);
  const std::vector<size_t> sizes(count, 1);
  Batch batch{};
  batch.destinations = destinations.data();
  batch.sources = sources.data();
  batch.sizes = sizes.data();
  batch.count = count;
  return machine->copy_batch(machine.me, batch, stream);
}

TEST(a_memory_fault_stays_and_stops_all_work) {
  Machine machine("7.15");
  void* memory = machine.allocate(64);
  const Handle stream = machine.stream();
  CHECK_OK(overrun(machine, memory, at(memory, 32), stream));
  CHECK_OK(machine.fill(memory, 9, 64, stream));
  CHECK_OK(machine.finish(stream));
  CHECK_ERROR(machine->gpu_error(), kIllegalAddress);
  CHECK_EQ(machine.stat("memory_faults"), 1);
  CHECK_EQ(machine.stat("fills"), 0);
  machine->reset(nullptr);
  CHECK_OK(machine->gpu_error());
  unsigned char byte = 1;
  CHECK_OK(machine.copy_now(&byte, memory, 1));
  CHECK(byte == 0);
}

// --- control -----------------------------------------------------------------------

TEST(switches_are_known_by_name_and_checked) {
  Machine machine;
  for (const char* name :
       {"corrupt_loads", "host_device_pointers", "one_mapping_copies",
        "ignore_address_hints", "no_virtual_memory", "small_bar"}) {
    CHECK(machine->set_switch(name, 1) && machine->set_switch(name, -1));
    CHECK(machine->set_switch(name, 0));
  }
  for (const char* name :
       {"copy_latency_us", "fill_latency_us", "stale_memory", "max_registration_bytes",
        "max_locked_bytes", "locked_memory"}) {
    CHECK(machine->set_switch(name, 1) && machine->set_switch(name, 0));
    CHECK(!machine->set_switch(name, -1));
  }
  for (const char* name : {"copy_latency_us", "fill_latency_us"}) {
    CHECK(!machine->set_switch(name, INT64_MAX));
  }
  CHECK(machine->set_switch("host_reads", 1) && machine->set_switch("host_reads", 0));
  CHECK(!machine->set_switch("host_reads", 2) &&
        !machine->set_switch("host_reads", -1));
  CHECK(!machine->set_switch("stale_memory", 3));
  CHECK(!machine->set_switch("locked_memory", 2));
  CHECK(!machine->set_switch("", 1) && !machine->set_switch("corrupt", 1));
}

TEST(reset_returns_switches_and_counters) {
  Machine machine("7.13");
  for (const char* name : {"corrupt_loads", "host_device_pointers",
                           "ignore_address_hints", "no_virtual_memory", "small_bar"}) {
    CHECK(machine->set_switch(name, 1));
  }
  CHECK(machine->set_switch("stale_memory", 2));
  unsigned char byte = 0;
  void* memory = machine.allocate(1);
  CHECK_OK(machine.copy_now(&byte, memory, 1));
  CHECK_EQ(byte, kPoison);
  CHECK_EQ(machine.stat("staged_copies"), 1);

  machine->reset(find_profile("7.15"));
  CHECK(std::string(machine->profile().name) == "7.15");
  CHECK_EQ(machine->version(), 71526333);
  CHECK_EQ(machine.stat("staged_copies"), 0);
  CHECK_EQ(machine.stat("device_allocations"), 1);
  CHECK(!machine->aliases_host_pointers());
  void* fresh = machine.allocate(1);
  byte = 1;
  CHECK_OK(machine.copy_now(&byte, fresh, 1));
  CHECK_EQ(byte, 0);
  byte = 42;
  CHECK_OK(machine.copy_now(fresh, &byte, 1));
  byte = 0;
  CHECK_OK(machine.copy_now(&byte, fresh, 1));
  CHECK_EQ(byte, 42);
  char* base = machine.reserve(kPage);
  CHECK_OK(machine->free_addresses(base, kPage));
  void* again = nullptr;
  CHECK_OK(machine->reserve(kPage, 0, base, &again));
  CHECK(again == base);
}

TEST(reset_spoils_captures) {
  Machine machine;
  const Handle stream = machine.stream();
  CHECK_OK(machine->begin_capture(stream, CaptureMode::kRelaxed));
  machine->reset(nullptr);
  Handle graph = 7;
  CHECK_ERROR(machine->end_capture(stream, &graph), kCaptureInvalidated);
  CHECK_EQ(machine.stat("captures"), 0);
  CHECK_EQ(graph, 7);
}

TEST(statistics_have_names_of_their_own) {
  Machine machine("7.16", {"f", "g"});
  std::set<std::string> names;
  for (const auto& [name, value] : machine->stats()) {
    CHECK(names.insert(name).second && value == 0);
  }
  CHECK(names.count("calls.f") == 1 && names.count("bytes.sdma.h2d") == 1);
}

// --- memory ------------------------------------------------------------------------

TEST(null_and_nothing_are_allocated_and_released_alike) {
  Machine machine;
  void* pointer = &machine;
  CHECK_OK(machine->allocate(machine.me, 0, &pointer));
  CHECK(pointer == nullptr);
  pointer = &machine;
  CHECK_OK(machine->allocate_host(machine.me, 0, &pointer));
  CHECK(pointer == nullptr);
  CHECK_OK(machine->release(machine.me, nullptr));
  CHECK_OK(machine->release_host(machine.me, nullptr));
  CHECK_ERROR(machine->unregister_host(machine.me, nullptr), kInvalidValue);
}

TEST(each_memory_is_released_by_its_own_call) {
  Machine machine;
  std::vector<unsigned char> host(64);
  machine.registered(host);
  void* locked = nullptr;
  CHECK_OK(machine->allocate_host(machine.me, 64, &locked));
  void* device = machine.allocate(64);
  char* mapped = machine.map(kPage);
  const auto any = [](auto* pointer) { return static_cast<void*>(pointer); };
  for (void* wrong : {any(host.data()), locked, any(at(device, 1)), any(mapped)}) {
    CHECK_ERROR(machine->release(machine.me, wrong), kInvalidValue);
  }
  for (void* wrong : {any(host.data()), device}) {
    CHECK_ERROR(machine->release_host(machine.me, wrong), kInvalidValue);
  }
  for (void* wrong : {locked, device, any(host.data() + 1)}) {
    CHECK_ERROR(machine->unregister_host(machine.me, wrong), kHostMemoryNotRegistered);
  }
  CHECK_OK(machine->release(machine.me, device));
  CHECK_ERROR(machine->release(machine.me, device), kInvalidValue);
  CHECK_OK(machine->release_host(machine.me, locked));
  CHECK_ERROR(machine->release_host(machine.me, locked), kInvalidValue);
  CHECK_OK(machine->unregister_host(machine.me, host.data()));
  CHECK_ERROR(machine->unregister_host(machine.me, host.data()),
              kHostMemoryNotRegistered);
}

TEST(the_range_of_an_address_is_its_memory) {
  Machine machine;
  std::vector<unsigned char> host(64);
  machine.registered(host);
  void* device = machine.allocate(100);
  char* mapped = machine.map(2 * kPage);
  const auto range = [&](void* pointer, void* base, size_t bytes) {
    void* found = nullptr;
    size_t size = 0;
    CHECK_OK(machine->address_range(pointer, &found, &size));
    CHECK(found == base);
    CHECK_EQ(size, bytes);
  };
  range(at(device, 99), device, 100);
  range(mapped + kPage, mapped, 2 * kPage);
  range(host.data() + 3, host.data(), 64);
  void* base = nullptr;
  size_t bytes = 0;
  const auto any = [](auto* pointer) { return static_cast<void*>(pointer); };
  for (void* unknown : {any(at(device, 100)), any(&machine), any(mapped + 2 * kPage)}) {
    CHECK_ERROR(machine->address_range(unknown, &base, &bytes), kNotFound);
  }
  CHECK_ERROR(machine->address_range(nullptr, &base, &bytes), kNotFound);
}

TEST(copies_reach_host_memory_by_either_address) {
  Machine machine;
  CHECK(machine->set_switch("host_device_pointers", 1));
  std::vector<unsigned char> host(64, 3);
  machine.registered(host);
  void* alias = nullptr;
  CHECK_OK(machine->device_pointer(host.data(), &alias));
  CHECK(alias != host.data());
  void* device = machine.allocate(64);
  CHECK_OK(machine.copy_now(device, alias, 64));
  CHECK_OK(machine.fill(alias, 4, 64, 0));
  CHECK_OK(machine.finish(0));
  CHECK_EQ(host[63], 4);
  CHECK_OK(machine.copy_now(host.data(), device, 64));
  CHECK_EQ(host[63], 3);
  CHECK_ERROR(machine.copy_now(at(alias, 1), device, 64), kInvalidValue);
  CHECK_OK(machine->unregister_host(machine.me, host.data()));
  CHECK_ERROR(machine.copy_now(alias, device, 1), kInvalidValue);
}

// --- virtual memory ----------------------------------------------------------------

TEST(memory_comes_back_when_the_release_says) {
  for (const Profile* release : releases()) {
    Machine machine(release->name);
    const size_t bytes = 4 * kPage;
    char* base = machine.reserve(bytes);
    const Handle handle = machine.map(base, bytes);
    CHECK_EQ(machine.free_bytes(), kMachineVram - bytes);
    CHECK_OK(machine->release_handle(handle));
    CHECK_OK(machine->unmap(machine.me, base, bytes));
    CHECK_EQ(machine.free_bytes(),
             kMachineVram - (release->unmap_keeps_memory ? bytes : 0));
    CHECK_OK(machine->free_addresses(base, bytes));
    CHECK_EQ(machine.free_bytes(), kMachineVram);
  }
}

TEST(memory_is_the_current_devices_whatever_is_named) {
  Machine machine;
  AllocationRequest request;
  request.device = 1;
  request.bytes = kPage;
  request.handle_types = kHandleTypePosixFile;
  Handle handle = 0;
  CHECK_OK(machine->create({0, CaptureMode::kGlobal}, request, &handle));
  CHECK_EQ(machine.free_bytes(0), kMachineVram - kPage);
  CHECK_EQ(machine.free_bytes(1), kMachineVram);
  AllocationRequest asked;
  CHECK_OK(machine->describe_handle(handle, &asked));
  CHECK(asked.device == 1 && asked.bytes == kPage);
  CHECK_EQ(asked.handle_types, kHandleTypePosixFile);
  CHECK_OK(machine->release_handle(handle));
  CHECK_ERROR(machine->describe_handle(handle, &asked), kInvalidValue);
}

TEST(requests_for_memory_are_checked_in_order) {
  Machine machine;
  const auto create = [&](bool valid, int device, unsigned types, size_t bytes) {
    AllocationRequest request{valid, device, types, bytes};
    Handle handle = 0;
    return machine->create(machine.me, request, &handle);
  };
  CHECK_ERROR(create(false, 9, 2, 0), kInvalidValue);
  CHECK_ERROR(create(true, 9, 2, 0), kInvalidValue);
  CHECK_ERROR(create(true, 9, 2, kPage), kInvalidDevice);
  CHECK_ERROR(create(true, -1, 2, kPage), kInvalidDevice);
  CHECK_ERROR(create(true, 1, 2, kPage), kNotSupported);
  CHECK_ERROR(create(true, 1, 0, kMachineVram + 1), kOutOfMemory);
  CHECK_ERROR(create(true, 1, 0, kPage + 1), kInvalidValue);
  machine.allocate(kPage);
  CHECK_ERROR(create(true, 1, 0, kMachineVram), kOutOfMemory);  // of device 0
}

TEST(a_failed_mapping_is_reported_by_later_releases) {
  for (const Profile* release : releases()) {
    Machine machine(release->name);
    char* base = machine.reserve(2 * kPage);
    machine.map(base, kPage);
    const Handle handle = machine.create(kPage);
    const Error expected =
        release->map_failure_is_silent ? Error::kSuccess : Error::kOutOfMemory;
    CHECK(machine->map(base, kPage, 0, handle) == expected);
    CHECK(machine->map(base + 2 * kPage, kPage, 0, handle) == expected);
    CHECK_EQ(machine.stat("mappings"), 1);
    CHECK_ERROR(machine->map(base + kPage, 2 * kPage, 0, handle), kInvalidValue);
    CHECK_ERROR(machine->map(base + kPage, kPage, kPage, handle), kInvalidValue);
    CHECK_ERROR(machine->map(nullptr, kPage, 0, handle), kInvalidValue);
    CHECK_ERROR(machine->map(base + kPage, kPage, 0, handle + 1), kInvalidValue);
  }
}

TEST(access_needs_a_known_device_and_a_known_right) {
  for (const Profile* release : releases()) {
    Machine machine(release->name);
    char* base = machine.reserve(kPage);
    machine.map(base, kPage);
    const auto grant = [&](int device, unsigned access) {
      return machine->set_access(base, kPage, {{device, static_cast<Access>(access)}});
    };
    CHECK(grant(kHostLocation, 3) ==
          (release->host_access ? Error::kSuccess : Error::kInvalidValue));
    CHECK_ERROR(grant(2, 3), kInvalidValue);
    CHECK_ERROR(grant(0, 2), kInvalidValue);
    CHECK_ERROR(grant(0, 4), kInvalidValue);
    CHECK_ERROR(machine->set_access(base, kPage, {}), kInvalidValue);
    Access access = Access::kNone;
    CHECK_OK(machine->access_of(base, 0, &access));
    CHECK(access == Access::kReadWrite);
    CHECK_ERROR(machine->access_of(base, 2, &access), kInvalidValue);
    CHECK_ERROR(machine->access_of(base, -1, &access), kInvalidValue);
  }
}

TEST(copies_need_access) {
  Machine machine;
  char* base = machine.reserve(kPage);
  machine.map(base, kPage);
  unsigned char byte = 0;
  CHECK_OK(machine.copy_now(base, &byte, 1));
  CHECK_OK(machine->set_access(base, kPage, {{0, Access::kRead}}));
  CHECK_ERROR(machine.copy_now(base, &byte, 1), kUnknown);
  CHECK_OK(machine.copy_now(&byte, base, 1));
  CHECK_ERROR(machine.fill(base, 1, 1, 0), kUnknown);
  CHECK_OK(machine->set_access(base, kPage, {{0, Access::kNone}}));
  CHECK_ERROR(machine.copy_now(&byte, base, 1), kUnknown);
  CHECK_OK(machine->set_access(base, kPage, {{1, Access::kReadWrite}}));
  CHECK_ERROR(machine.copy_now(&byte, base, 1), kUnknown);
  const Caller other{1, CaptureMode::kGlobal};
  CHECK_OK(machine->copy(other, base, &byte, 1, CopyKind::kDefault, 0, true));
}

TEST(a_copy_across_mappings_is_flat_and_refused_by_a_switch) {
  Machine machine;
  char* base = machine.reserve(2 * kPage);
  machine.map(base, kPage);
  machine.map(base + kPage, kPage);
  std::vector<unsigned char> host(2 * kPage, 5);
  CHECK_OK(machine.copy_now(base, host.data(), 2 * kPage));
  const PitchedCopy plane{base, {kPage, 0}, host.data(), {kPage, 0}, {16, 2}};
  const auto copy_plane = [&] {
    return machine->copy_pitched(machine.me, plane, CopyKind::kDefault, 0, true);
  };
  CHECK_ERROR(copy_plane(), kInvalidValue);
  CHECK(machine->set_switch("one_mapping_copies", 1));
  CHECK_ERROR(machine.copy_now(base, host.data(), 2 * kPage), kInvalidValue);
  CHECK_OK(machine.copy_now(base + kPage, host.data(), kPage));
}

TEST(a_copy_across_reservations_is_for_releases_that_let_it) {
  for (const Profile& release : profiles()) {
    Machine machine(release.name);
    const size_t piece = release.granularity;
    char* base = machine.reserve(piece);
    void* next = nullptr;
    CHECK_OK(machine->reserve(piece, 0, base + piece, &next));
    CHECK(next == base + piece);
    machine.map(base, piece);
    machine.map(base + piece, piece);
    std::vector<unsigned char> host(16, 5);
    char* across = base + piece - 8;
    const auto expect = [&](Error error) {
      CHECK(machine.copy_now(across, host.data(), 16) == error);
      CHECK(machine.copy_now(host.data(), across, 16) == error);
      CHECK(machine.fill(across, 7, 16, 0) == error);
    };
    expect(release.copies_cross == Crossing::kReservations ? Error::kSuccess
                                                           : Error::kInvalidValue);
    CHECK(machine->set_switch("one_mapping_copies", 1));
    expect(Error::kInvalidValue);
    CHECK_OK(machine->synchronize_device(machine.me));
  }
}

TEST(a_reservation_that_goes_under_a_copy_is_a_fault) {
  Machine machine("cuda-13.0");
  const size_t piece = machine->profile().granularity;
  char* base = machine.reserve(piece);
  void* next = nullptr;
  CHECK_OK(machine->reserve(piece, 0, base + piece, &next));
  machine.map(base, piece);
  machine.map(base + piece, piece);
  std::vector<unsigned char> host(16, 5);
  machine.registered(host);
  const Handle stream = machine.stream();
  CHECK(machine->set_switch("copy_latency_us", 50'000));
  CHECK_OK(machine.copy(base + piece - 8, host.data(), 16, stream));
  CHECK_OK(machine->unmap(machine.me, base + piece, piece));
  CHECK_OK(machine.finish(stream));
  CHECK_ERROR(machine->gpu_error(), kLaunchFailed);
  CHECK_EQ(machine.stat("host_copies.registered.h2d"), 0);
}

TEST(copies_are_counted_by_the_hosts_side) {
  Machine machine;
  constexpr size_t kBytes = 64;
  void* device = machine.allocate(2 * kBytes);
  std::vector<unsigned char> pageable(kBytes);
  std::vector<unsigned char> registered(kBytes);
  machine.registered(registered);
  void* allocated = nullptr;
  CHECK_OK(machine->allocate_host(machine.me, kBytes, &allocated));
  CHECK(machine->set_switch("host_device_pointers", 1));
  std::vector<unsigned char> aliased(kBytes);
  machine.registered(aliased);
  void* alias = nullptr;
  CHECK_OK(machine->device_pointer(aliased.data(), &alias));
  CHECK(alias != aliased.data());
  struct Kind {
    const char* name;
    void* host;
  };
  const Kind kinds[] = {{"pageable", pageable.data()},
                        {"registered", registered.data()},
                        {"allocated", allocated},
                        {"registered", alias}};
  for (const Kind& kind : kinds) {
    machine->reset(nullptr);
    CHECK_OK(machine.copy_now(device, kind.host, kBytes));
    CHECK_OK(machine.copy_now(kind.host, device, kBytes / 2));
    for (const char* name : {"pageable", "registered", "allocated"}) {
      const bool own = std::string_view(name) == kind.name;
      const std::string memory = std::string(name) + ".";
      CHECK_EQ(machine.stat("host_copies." + memory + "h2d"), own ? 1 : 0);
      CHECK_EQ(machine.stat("host_copies." + memory + "d2h"), own ? 1 : 0);
      CHECK_EQ(machine.stat("host_bytes." + memory + "h2d"), own ? kBytes : 0);
      CHECK_EQ(machine.stat("host_bytes." + memory + "d2h"), own ? kBytes / 2 : 0);
    }
  }
  machine->reset(nullptr);
  CHECK_OK(machine.copy_now(registered.data(), allocated, kBytes));
  CHECK_OK(machine.copy_now(at(device, kBytes), device, kBytes));
  CHECK_OK(machine->synchronize_device(machine.me));
  for (const char* name : {"pageable", "registered", "allocated"}) {
    CHECK_EQ(machine.stat(std::string("host_copies.") + name + ".h2d"), 0);
    CHECK_EQ(machine.stat(std::string("host_copies.") + name + ".d2h"), 0);
  }
}

// --- capture -----------------------------------------------------------------------

TEST(captured_work_runs_when_it_is_launched) {
  Machine machine;
  std::vector<unsigned char> source(64, 1);
  std::vector<unsigned char> target(64, 0);
  machine.registered(source);
  machine.registered(target);
  void* device = machine.allocate(64);
  const Handle stream = machine.stream();
  CHECK_OK(machine->begin_capture(stream, CaptureMode::kGlobal));
  CHECK_OK(machine.copy(device, source.data(), 64, stream));
  CHECK_OK(machine.fill(device, 9, 8, stream));
  CHECK_OK(machine.copy(target.data(), device, 64, stream));
  const Handle graph = machine.end_capture(stream);
  Handle first = 0;
  size_t count = 0;
  CHECK_OK(machine->graph_nodes(graph, &first, &count));
  CHECK(count == 3 && first != 0);

  const Handle executable = machine.executable(graph);
  CHECK_OK(machine.finish(stream));
  CHECK_EQ(target[32], 0);
  for (const unsigned char value : {1, 2}) {
    std::fill(source.begin(), source.end(), value);
    CHECK_OK(machine->launch(machine.me, executable, value == 1 ? stream : 0));
    CHECK_OK(machine->synchronize_device(machine.me));
    CHECK(target[0] == 9 && target[7] == 9 && target[8] == value);
    CHECK_EQ(target[63], value);
  }
  CHECK_OK(machine->destroy_graph(graph));
  CHECK_ERROR(machine->destroy_graph(graph), kIllegalState);
  CHECK_ERROR(machine->graph_nodes(graph, &first, &count), kInvalidValue);
  std::fill(source.begin(), source.end(), 3);
  CHECK_OK(machine->launch(machine.me, executable, stream));
  CHECK_OK(machine.finish(stream));
  CHECK_EQ(target[63], 3);
  CHECK_OK(machine->destroy_executable(machine.me, executable));
  CHECK_ERROR(machine->launch(machine.me, executable, stream), kInvalidValue);
}

// HIP's launch knows nothing of captures; CUDA's refuses, and spoils the capture.
TEST(a_graph_is_launched_during_a_capture) {
  for (const char* driver : {"7.16", "cuda-13.0"}) {
    Machine machine(driver);
    const bool refused = machine->profile().cuda;
    void* device = machine.allocate(64);
    const Handle stream = machine.stream();
    CHECK_OK(machine->begin_capture(stream, CaptureMode::kGlobal));
    CHECK_OK(machine.fill(device, 5, 64, stream));
    const Handle executable = machine.executable(machine.end_capture(stream));
    CHECK_OK(machine->begin_capture(stream, CaptureMode::kGlobal));
    CHECK(machine->launch(machine.me, executable, stream) ==
          (refused ? Error::kCaptureUnsupported : Error::kSuccess));
    Handle graph = 0;
    CHECK(machine->end_capture(stream, &graph) ==
          (refused ? Error::kCaptureInvalidated : Error::kSuccess));
    CHECK_OK(machine.finish(stream));
    CHECK_EQ(machine.stat("fills"), refused ? 0 : 1);
    if (refused) continue;
    Handle first = 0;
    size_t count = 1;
    CHECK_OK(machine->graph_nodes(graph, &first, &count));
    CHECK_EQ(count, 0);
  }
}

// What a graph names may go; that it did is found out at its launch.
TEST(a_graph_whose_memory_is_gone_is_a_memory_fault) {
  const char* kGone[] = {"device", "locked", "registered", "virtual", "nothing"};
  for (const std::string gone : kGone) {
    Machine machine;
    void* device = machine.allocate(64);
    void* locked = nullptr;
    CHECK_OK(machine->allocate_host(machine.me, 64, &locked));
    std::vector<unsigned char> host(64);
    machine.registered(host);
    char* mapped = machine.map(kPage);
    const Handle stream = machine.stream();
    CHECK_OK(machine->begin_capture(stream, CaptureMode::kGlobal));
    CHECK_OK(machine.fill(device, 1, 64, stream));
    CHECK_OK(machine.copy(locked, device, 64, stream));
    CHECK_OK(machine.copy(host.data(), locked, 64, stream));
    CHECK_OK(machine.copy(mapped, host.data(), 64, stream));
    const Handle executable = machine.executable(machine.end_capture(stream));
    if (gone == "device") CHECK_OK(machine->release(machine.me, device));
    if (gone == "locked") CHECK_OK(machine->release_host(machine.me, locked));
    if (gone == "registered") {
      CHECK_OK(machine->unregister_host(machine.me, host.data()));
    }
    if (gone == "virtual") CHECK_OK(machine->unmap(machine.me, mapped, kPage));
    CHECK_OK(machine->launch(machine.me, executable, stream));
    CHECK_OK(machine.finish(stream));
    const bool fault = gone != "nothing";
    CHECK(machine->gpu_error() == (fault ? Error::kIllegalAddress : Error::kSuccess));
    CHECK_EQ(machine.stat("memory_faults"), fault ? 1 : 0);
  }
}

TEST(an_executable_graph_holds_memory) {
  Machine machine;
  const Handle stream = machine.stream();
  CHECK_OK(machine->begin_capture(stream, CaptureMode::kGlobal));
  const Handle graph = machine.end_capture(stream);
  const Handle first = machine.executable(graph);
  const size_t each = kMachineVram - machine.free_bytes();
  CHECK(each > 0);
  Handle more = 0;
  for (size_t i = 1; i < kMachineVram / each; ++i) machine.executable(graph);
  CHECK_ERROR(machine->instantiate(machine.me, graph, &more), kOutOfMemory);
  CHECK_OK(machine->destroy_executable(machine.me, first));
  CHECK_ERROR(machine->destroy_executable(machine.me, first), kInvalidValue);
  CHECK_EQ(machine.free_bytes(), each);
  CHECK_OK(machine->destroy_graph(graph));
  CHECK_ERROR(machine->instantiate(machine.me, graph, &more), kInvalidValue);
}

TEST(wrong_names_of_graphs_and_streams_are_errors) {
  Machine machine;
  const Handle stream = machine.stream();
  CHECK_OK(machine->begin_capture(stream, CaptureMode::kGlobal));
  const Handle executable = machine.executable(machine.end_capture(stream));
  CHECK_ERROR(machine->destroy_graph(0), kInvalidValue);
  CHECK_ERROR(machine->destroy_graph(stream), kIllegalState);
  CHECK_ERROR(machine->launch(machine.me, stream, stream), kInvalidValue);
  CHECK_ERROR(machine->launch(machine.me, executable, executable), kContextIsDestroyed);
  Handle graph = 0;
  CHECK_ERROR(machine->begin_capture(0, CaptureMode::kGlobal), kCaptureUnsupported);
  CHECK_ERROR(machine->begin_capture(0, static_cast<CaptureMode>(9)),
              kCaptureUnsupported);
  CHECK_ERROR(machine->begin_capture(stream, static_cast<CaptureMode>(9)),
              kInvalidValue);
  CHECK_ERROR(machine->begin_capture(executable, CaptureMode::kGlobal), kInvalidHandle);
  CHECK_ERROR(machine->end_capture(0, &graph), kIllegalState);
  CHECK_ERROR(machine->end_capture(executable, &graph), kContextIsDestroyed);
  CHECK_OK(machine->destroy_stream(stream));
  CHECK_ERROR(machine->end_capture(stream, &graph), kContextIsDestroyed);
  CHECK_ERROR(machine.fill(nullptr, 0, 0, stream), kInvalidHandle);
}

// --- events ------------------------------------------------------------------------

TEST(an_event_belongs_to_its_device) {
  Machine machine;
  const Handle elsewhere = machine->create_event(1, true);
  const Handle here = machine->create_event(0, true);
  const Handle stream = machine.stream(StreamKind::kNonBlocking, 1);
  CHECK_ERROR(machine->record_event(machine.me, elsewhere, 0), kInvalidHandle);
  CHECK_ERROR(machine->record_event(machine.me, here, stream), kInvalidHandle);
  CHECK_OK(machine->record_event(machine.me, elsewhere, stream));
  CHECK_OK(machine->record_event(machine.me, here, 0));
  CHECK_OK(machine->synchronize_event(machine.me, here));
  CHECK_OK(machine->synchronize_event(machine.me, elsewhere));
  float milliseconds = 0;
  CHECK_ERROR(machine->elapsed_time(here, elsewhere, &milliseconds), kInvalidHandle);
  CHECK_OK(machine->elapsed_time(here, here, &milliseconds));
}

TEST(time_passes_between_recorded_events_only) {
  Machine machine;
  const Handle stream = machine.stream();
  const Handle start = machine->create_event(0, true);
  const Handle stop = machine->create_event(0, true);
  const Handle without = machine->create_event(0, false);
  float milliseconds = -1;
  CHECK_ERROR(machine->elapsed_time(start, stop, &milliseconds), kInvalidHandle);
  CHECK_OK(machine->record_event(machine.me, start, stream));
  CHECK_OK(machine->record_event(machine.me, without, stream));
  CHECK_ERROR(machine->elapsed_time(start, without, &milliseconds), kInvalidHandle);
  CHECK(machine->set_switch("copy_latency_us", 2000));
  void* device = machine.allocate(8);
  CHECK_OK(machine.fill(device, 0, 8, stream));
  CHECK_OK(machine->record_event(machine.me, stop, stream));
  CHECK_OK(machine->synchronize_event(machine.me, stop));
  CHECK_OK(machine->elapsed_time(start, stop, &milliseconds));
  CHECK(milliseconds >= 2.0F);
  CHECK_ERROR(machine->destroy_event(stream), kContextIsDestroyed);
  CHECK_OK(machine->destroy_event(stop));
  CHECK_ERROR(machine->elapsed_time(start, stop, &milliseconds), kInvalidHandle);
}

// --- IPC ---------------------------------------------------------------------------

TEST(handles_for_other_processes_are_given_by_allocation) {
  for (const Profile* release : releases()) {
    Machine machine(release->name);
    void* device = machine.allocate(100, 1);
    IpcHandle whole{};
    IpcHandle part{};
    CHECK_OK(machine->export_memory(device, &whole));
    CHECK_OK(machine->export_memory(at(device, 99), &part));
    CHECK(part.cookie == whole.cookie && part.offset == 99 && part.device == 1);
    CHECK_ERROR(machine->export_memory(at(device, 100), &part), kInvalidValue);
    CHECK_ERROR(machine->export_memory(nullptr, &part), kInvalidValue);
    CHECK_ERROR(machine->export_memory(&machine, &part), kInvalidValue);
    std::vector<unsigned char> host(8);
    machine.registered(host);
    CHECK_ERROR(machine->export_memory(host.data(), &part), kInvalidValue);
    CHECK_EQ(machine.stat("ipc_exports"), 2);

    char* mapped = machine.map(kPage);
    const Error expected =
        release->ipc_refuses_virtual ? Error::kInvalidValue : Error::kSuccess;
    CHECK(machine->export_memory(mapped, &part) == expected);
    CHECK_EQ(machine.stat("ipc_virtual_exports"), 1);
    if (!release->ipc_refuses_virtual) CHECK(open_ipc(part) == nullptr);

    void* pointer = nullptr;
    CHECK_ERROR(machine->import_memory(whole, &pointer), kInvalidContext);
    CHECK_OK(machine->release(machine.me, device));
    CHECK(open_ipc(whole) == nullptr);
  }
}

TEST(what_is_no_handle_is_refused) {
  Machine machine;
  void* pointer = nullptr;
  IpcHandle handle = make_empty_handle(0, kPage);
  handle.process += 1;
  CHECK_ERROR(machine->import_memory(handle, &pointer), kInvalidDevicePointer);
  handle.offset = kPage;
  CHECK_ERROR(machine->import_memory(handle, &pointer), kInvalidValue);
  handle.offset = 0;
  handle.device = 2;
  CHECK_ERROR(machine->import_memory(handle, &pointer), kInvalidValue);
  handle.device = 0;
  handle.mark += 1;
  CHECK_ERROR(machine->import_memory(handle, &pointer), kInvalidDevicePointer);
  CHECK_EQ(machine.stat("ipc_failed_imports"), 4);
  void* device = machine.allocate(8);
  for (void* wrong : {static_cast<void*>(nullptr), device, static_cast<void*>(&handle),
                      static_cast<void*>(machine.map(kPage))}) {
    CHECK_ERROR(machine->close_import(wrong), kInvalidValue);
  }
}

TEST(imports_are_counted) {
  int handles[2];
  int goodbye[2];
  CHECK(pipe(handles) == 0 && pipe(goodbye) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    close(goodbye[1]);
    Machine owner;
    void* memory = owner.allocate(3 * kPage, 1);
    std::strcpy(at(memory, kPage), "of the child");
    IpcHandle handle{};
    CHECK_OK(owner->export_memory(at(memory, kPage), &handle));
    CHECK(write(handles[1], &handle, sizeof handle) == sizeof handle);
    char word = 0;
    CHECK(read(goodbye[0], &word, 1) == 0);
    _exit(std::strcmp(at(memory, 2 * kPage), "of the parent"));
  }
  close(goodbye[0]);
  IpcHandle handle{};
  CHECK(read(handles[0], &handle, sizeof handle) == sizeof handle);
  Machine machine;
  void* first = nullptr;
  void* second = nullptr;
  CHECK_OK(machine->import_memory(handle, &first));
  handle.offset = 2 * kPage;
  CHECK_OK(machine->import_memory(handle, &second));
  CHECK(second == at(first, kPage));
  CHECK(machine.stat("imports") == 1 && machine.stat("imported_bytes") == 3 * kPage);
  char text[16] = {};
  CHECK_OK(machine.copy_now(text, first, 13));
  CHECK(std::strcmp(text, "of the child") == 0);
  CHECK_OK(machine.copy_now(second, "of the parent", 14));
  IpcHandle again{};
  CHECK_ERROR(machine->export_memory(first, &again), kInvalidValue);
  CHECK_ERROR(machine->release(machine.me, first), kInvalidValue);

  CHECK_OK(machine->close_import(first));
  CHECK_OK(machine.copy_now(text, first, 13));
  CHECK_OK(machine->close_import(second));
  CHECK_ERROR(machine->close_import(first), kInvalidValue);
  CHECK_ERROR(machine.copy_now(text, first, 13), kInvalidValue);
  CHECK_EQ(machine.stat("imports"), 0);
  CHECK_OK(machine->import_memory(handle, &first));
  CHECK_OK(machine->close_import(first));

  close(goodbye[1]);
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
  CHECK_EQ(WEXITSTATUS(status), 0);
  CHECK_ERROR(machine->import_memory(handle, &first), kInvalidDevicePointer);
}

}  // namespace
}  // namespace hipsim
