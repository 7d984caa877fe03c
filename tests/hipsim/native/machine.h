// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string_view>
#include <vector>

#include "engine/runtime.h"
#include "test.h"

namespace hipsim {

constexpr size_t kMachineVram = size_t{4} << 20;

inline Options machine_options(const char* profile) {
  Options options;
  options.profile = find_profile(profile);
  options.devices = 2;
  options.vram_bytes = kMachineVram;
  return options;
}

// A runtime with what most cases need of it. What fails ends the case.
struct Machine {
  explicit Machine(const char* profile = "7.16",
                   const std::vector<const char*>& calls = {})
      : runtime(machine_options(profile), calls) {}

  Runtime* operator->() { return &runtime; }

  void* allocate(size_t bytes, int device = 0) {
    void* pointer = nullptr;
    CHECK_OK(runtime.allocate({device, me.capture_mode}, bytes, &pointer));
    return pointer;
  }
  Handle stream(StreamKind kind = StreamKind::kNonBlocking, int device = 0) {
    return runtime.create_stream(device, kind);
  }
  Handle create(size_t bytes, int device = 0) {
    AllocationRequest request;
    request.device = device;
    request.bytes = bytes;
    Handle handle = 0;
    CHECK_OK(runtime.create({device, me.capture_mode}, request, &handle));
    return handle;
  }
  char* reserve(size_t bytes) {
    void* pointer = nullptr;
    CHECK_OK(runtime.reserve(bytes, 0, nullptr, &pointer));
    return static_cast<char*>(pointer);
  }

  // Mapped memory that a device may use, and its handle.
  Handle map(char* address, size_t bytes, int device = 0) {
    const Handle handle = create(bytes, device);
    CHECK_OK(runtime.map(address, bytes, 0, handle));
    CHECK_OK(runtime.set_access(address, bytes, {{device, Access::kReadWrite}}));
    return handle;
  }
  char* map(size_t bytes) {
    char* address = reserve(bytes);
    CHECK_OK(runtime.release_handle(map(address, bytes)));
    return address;
  }

  Error copy(void* to, const void* from, size_t bytes, Handle stream) {
    return runtime.copy(me, to, from, bytes, CopyKind::kDefault, stream, false);
  }
  Error copy_now(void* to, const void* from, size_t bytes) {
    return runtime.copy(me, to, from, bytes, CopyKind::kDefault, 0, true);
  }
  Error fill(void* to, int value, size_t bytes, Handle stream) {
    return runtime.fill(me, to, value, bytes, stream, false);
  }
  Error finish(Handle stream) { return runtime.synchronize_stream(me, stream); }
  void registered(std::vector<unsigned char>& host) {
    CHECK_OK(runtime.register_host(me, host.data(), host.size(), true));
  }

  Handle end_capture(Handle stream) {
    Handle graph = 0;
    CHECK_OK(runtime.end_capture(stream, &graph));
    return graph;
  }
  Handle executable(Handle graph) {
    Handle made = 0;
    CHECK_OK(runtime.instantiate(me, graph, &made));
    return made;
  }

  size_t free_bytes(int device = 0) const {
    size_t free = 0;
    size_t total = 0;
    runtime.memory_info(device, &free, &total);
    return free;
  }
  uint64_t stat(std::string_view name) const {
    for (const auto& [each, value] : runtime.stats()) {
      if (each == name) return value;
    }
    test::fail(__FILE__, __LINE__, "no statistic " + std::string(name));
  }

  // Work that is submitted waits until release_work(), which is for once.
  void hold_work() {
    constexpr int64_t kHour = 3'600'000'000;
    CHECK(runtime.set_switch("copy_latency_us", kHour));
  }
  void release_work() { runtime.abandon(); }

  Runtime runtime;
  Caller me;
};

}  // namespace hipsim
