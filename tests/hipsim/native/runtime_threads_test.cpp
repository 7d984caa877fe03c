// SPDX-License-Identifier: Apache-2.0
//
// The runtime with several threads at it. The thread sanitizer is half of each case.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "engine/runtime.h"
#include "machine.h"
#include "test.h"

namespace hipsim {
namespace {

using test::at;
using test::kMoment;
using test::Latch;
using namespace std::chrono_literals;

// --- memory that goes --------------------------------------------------------------

bool waits_for(UnmapWaits waits, const std::optional<StreamKind>& kind) {
  const bool ordered_with_null = !kind || *kind == StreamKind::kBlocking;
  return waits == UnmapWaits::kDevices ||
         (waits == UnmapWaits::kNullStream && ordered_with_null);
}

TEST(unmap_waits_for_what_its_release_waits_for) {
  const std::optional<StreamKind> kinds[] = {std::nullopt, StreamKind::kBlocking,
                                             StreamKind::kNonBlocking};
  for (const Profile& release : profiles()) {
    for (const auto& kind : kinds) {
      Machine machine(release.name);
      const size_t bytes = release.granularity;
      char* mapped = machine.map(bytes);
      const Handle stream = kind ? machine.stream(*kind) : 0;
      unsigned char source = 1;
      CHECK_OK(machine->register_host(machine.me, &source, 1, true));
      machine.hold_work();
      CHECK_OK(machine.copy(mapped, &source, 1, stream));
      Latch done;
      std::thread other([&] {
        CHECK_OK(machine->unmap({}, mapped, bytes));
        done.open();
      });
      const bool waits = waits_for(release.unmap_waits, kind);
      CHECK(waits ? !done.wait(kMoment) : done.wait());
      machine.release_work();
      CHECK(done.wait());
      other.join();
      CHECK_OK(machine.finish(stream));
      // Work that finds its memory gone is a fault of the GPU.
      const Error fault = release.cuda ? Error::kLaunchFailed : Error::kIllegalAddress;
      CHECK(machine->gpu_error() == (waits ? Error::kSuccess : fault));
      CHECK_EQ(machine.stat("memory_faults"), waits ? 0 : 1);
    }
  }
}

TEST(unmap_waits_for_every_device_that_has_access) {
  for (const bool shared : {false, true}) {
    Machine machine("7.16");
    char* mapped = machine.map(kPage);
    if (shared) CHECK_OK(machine->set_access(mapped, kPage, {{1, Access::kRead}}));
    void* elsewhere = machine.allocate(8, 1);
    const Handle stream = machine.stream(StreamKind::kNonBlocking, 1);
    machine.hold_work();
    CHECK_OK(machine.fill(elsewhere, 1, 8, stream));
    Latch done;
    std::thread other([&] {
      CHECK_OK(machine->unmap({}, mapped, kPage));
      done.open();
    });
    CHECK(shared ? !done.wait(kMoment) : done.wait());
    machine.release_work();
    CHECK(done.wait());
    other.join();
  }
}

TEST(memory_is_released_when_its_work_is_done) {
  Machine machine;
  void* device = machine.allocate(8);
  void* locked = nullptr;
  CHECK_OK(machine->allocate_host(machine.me, 8, &locked));
  std::vector<unsigned char> host(8);
  machine.registered(host);
  const Handle stream = machine.stream();
  machine.hold_work();
  CHECK_OK(machine.copy(locked, device, 8, stream));
  std::atomic<int> done{0};
  std::vector<std::thread> threads;
  threads.emplace_back([&] {
    CHECK_OK(machine->release({}, device));
    ++done;
  });
  threads.emplace_back([&] {
    CHECK_OK(machine->release_host({}, locked));
    ++done;
  });
  threads.emplace_back([&] {
    CHECK_OK(machine->unregister_host({}, host.data()));
    ++done;
  });
  std::this_thread::sleep_for(kMoment);
  CHECK(done == 0);
  machine.release_work();
  for (std::thread& thread : threads) thread.join();
  CHECK(done == 3);
}

// Frees race with the copies that still use the memory: the copies win.
TEST(freeing_waits_for_what_is_queued) {
  Machine machine;
  CHECK(machine->set_switch("copy_latency_us", 200));
  const Handle stream = machine.stream();
  for (int round = 0; round < 40; ++round) {
    void* from = machine.allocate(1 << 20);
    void* to = machine.allocate(1 << 20);
    CHECK_OK(machine->copy(machine.me, to, from, 1 << 20, CopyKind::kDeviceToDevice,
                           stream, true));
    std::thread other([&] { CHECK_OK(machine->release({}, from)); });
    CHECK_OK(machine->release(machine.me, to));
    other.join();
    CHECK_ERROR(machine->release(machine.me, to), kInvalidValue);
  }
  CHECK_OK(machine->gpu_error());
}

TEST(one_of_two_releases_succeeds) {
  Machine machine;
  for (int round = 0; round < 100; ++round) {
    void* memory = machine.allocate(64);
    std::atomic<int> released{0};
    const auto release = [&] {
      const Error error = machine->release({}, memory);
      CHECK(error == Error::kSuccess || error == Error::kInvalidValue);
      if (error == Error::kSuccess) ++released;
    };
    std::thread other(release);
    release();
    other.join();
    CHECK(released == 1);
  }
  CHECK_EQ(machine.free_bytes(), kMachineVram);
}

TEST(copies_race_with_the_release_of_their_memory) {
  Machine machine;
  std::atomic<void*> current{machine.allocate(kPage)};
  std::atomic<bool> stop{false};
  std::vector<std::thread> copiers;
  for (int i = 0; i < 2; ++i) {
    copiers.emplace_back([&] {
      const Handle stream = machine.stream();
      std::vector<unsigned char> host(kPage);
      CHECK_OK(machine->register_host({}, host.data(), host.size(), true));
      while (!stop) {
        for (int queued = 0; queued < 4; ++queued) {
          const Error error = machine->copy({}, host.data(), current, kPage,
                                            CopyKind::kDefault, stream, false);
          CHECK(error == Error::kSuccess || error == Error::kInvalidValue);
        }
        CHECK_OK(machine.finish(stream));
      }
      CHECK_OK(machine->unregister_host({}, host.data()));
    });
  }
  for (int round = 0; round < 200; ++round) {
    void* before = current.exchange(machine.allocate(kPage));
    CHECK_OK(machine->release(machine.me, before));
  }
  stop = true;
  for (std::thread& copier : copiers) copier.join();
  CHECK_OK(machine->gpu_error());
}

// A release that waits for the null stream takes memory from under the others.
TEST(unmapping_races_with_copies) {
  for (const char* release : {"7.13", "7.16"}) {
    Machine machine(release);
    const Handle stream = machine.stream();
    std::vector<unsigned char> host(16 * kPage);
    machine.registered(host);
    char* base = machine.reserve(host.size());
    for (int round = 0; round < 60; ++round) {
      const Handle handle = machine.map(base, host.size());
      for (int i = 0; i < 3; ++i) {
        CHECK_OK(machine.copy(base, host.data(), host.size(), stream));
      }
      std::thread other([&] {
        CHECK_OK(machine->unmap({}, base, host.size()));
        CHECK_OK(machine->release_handle(handle));
      });
      const Error error = machine.copy(base, host.data(), host.size(), stream);
      CHECK(error == Error::kSuccess || error == Error::kInvalidValue);
      other.join();
      CHECK_OK(machine.finish(stream));
      const bool fault = machine->gpu_error() != Error::kSuccess;
      CHECK_EQ(machine.stat("memory_faults"), fault ? 1 : 0);
      CHECK_EQ(machine.free_bytes(), kMachineVram);
      machine->reset(nullptr);
    }
    CHECK_OK(machine->free_addresses(base, host.size()));
  }
}

// --- captures of other threads -----------------------------------------------------

void in_another_thread(const std::function<void()>& body) { std::thread(body).join(); }

TEST(a_synchronous_call_of_any_thread_spoils_every_capture) {
  for (const CaptureMode mode :
       {CaptureMode::kGlobal, CaptureMode::kThreadLocal, CaptureMode::kRelaxed}) {
    Machine machine;
    void* memory = machine.allocate(8);
    void* other = machine.allocate(8);  // for what the NULL stream is not ordered with
    const Handle stream = machine.stream();
    CHECK_OK(machine->begin_capture(stream, mode));
    CHECK_OK(machine.fill(memory, 1, 8, stream));
    in_another_thread([&] {
      const Caller relaxed{1, CaptureMode::kRelaxed};
      CHECK_ERROR(machine->fill(relaxed, memory, 2, 8, 0, true), kCaptureImplicit);
      CHECK_OK(machine->fill(relaxed, memory, 2, 8, 0, true));
    });
    CHECK_ERROR(machine.fill(memory, 3, 8, stream), kCaptureInvalidated);
    Handle graph = 0;
    CHECK_ERROR(machine->end_capture(stream, &graph), kCaptureInvalidated);
    CHECK_OK(machine.fill(other, 4, 8, stream));
  }
}

TEST(an_allocation_of_another_thread_spoils_global_captures) {
  for (const CaptureMode mode :
       {CaptureMode::kGlobal, CaptureMode::kThreadLocal, CaptureMode::kRelaxed}) {
    Machine machine;
    const Handle stream = machine.stream();
    CHECK_OK(machine->begin_capture(stream, mode));
    const bool harmless = mode != CaptureMode::kGlobal;
    Handle graph = 0;
    in_another_thread([&] {
      void* pointer = nullptr;
      CHECK((machine->allocate({}, 8, &pointer) == Error::kSuccess) == harmless);
      if (mode == CaptureMode::kRelaxed) return;
      CHECK_ERROR(machine->end_capture(stream, &graph), kCaptureWrongThread);
    });
    const Error error = machine->end_capture(stream, &graph);
    CHECK(error == (harmless ? Error::kSuccess : Error::kCaptureInvalidated));
  }
}

TEST(threads_capture_side_by_side) {
  Machine machine;
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&, i] {
      const Handle stream = machine.stream();
      const Handle fork = machine.stream();
      const Handle event = machine->create_event(0, false);
      const Caller me{i % 2, CaptureMode::kThreadLocal};
      void* memory = nullptr;
      CHECK_OK(machine->allocate(me, kPage, &memory));
      for (int round = 0; round < 50; ++round) {
        CHECK_OK(machine->begin_capture(stream, CaptureMode::kThreadLocal));
        CHECK_OK(machine->record_event(me, event, stream));
        CHECK_OK(machine->wait_event(me, fork, event));
        CHECK_OK(machine->fill(me, memory, round, 64, fork, false));
        CHECK_OK(machine->record_event(me, event, fork));
        CHECK_OK(machine->wait_event(me, stream, event));
        Handle graph = 0;
        Handle executable = 0;
        CHECK_OK(machine->end_capture(stream, &graph));
        CHECK_OK(machine->instantiate(me, graph, &executable));
        CHECK_OK(machine->launch(me, executable, fork));
        CHECK_OK(machine->synchronize_stream(me, fork));
        unsigned char byte = 0;
        CHECK_OK(machine->copy(me, &byte, memory, 1, CopyKind::kDefault, fork, false));
        CHECK_EQ(byte, round);
        CHECK_OK(machine->destroy_graph(graph));
        CHECK_OK(machine->destroy_executable(me, executable));
      }
      CHECK_OK(machine->release({i % 2, CaptureMode::kRelaxed}, memory));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_EQ(machine.free_bytes(0), kMachineVram);
}

// --- waiting -----------------------------------------------------------------------

TEST(many_wait_for_one_stream_that_goes) {
  Machine machine;
  void* memory = machine.allocate(8);
  const Handle stream = machine.stream();
  const Handle event = machine->create_event(0, false);
  machine.hold_work();
  CHECK_OK(machine.fill(memory, 1, 8, stream));
  CHECK_OK(machine->record_event(machine.me, event, stream));
  std::atomic<int> done{0};
  std::vector<std::thread> waiters;
  for (int i = 0; i < 3; ++i) {
    waiters.emplace_back([&, i] {
      if (i == 0) CHECK_OK(machine->synchronize_event({}, event));
      if (i == 1) CHECK_OK(machine->synchronize_device({}));
      if (i == 2) CHECK_OK(machine->destroy_stream(stream));
      ++done;
    });
  }
  std::this_thread::sleep_for(kMoment);
  CHECK(done == 0);
  CHECK_ERROR(machine->query_event(machine.me, event), kNotReady);
  machine.release_work();
  for (std::thread& waiter : waiters) waiter.join();
  CHECK_OK(machine->query_event(machine.me, event));
  CHECK_ERROR(machine->query_stream(machine.me, stream), kInvalidHandle);
}

TEST(a_runtime_ends_when_its_work_has) {
  std::vector<unsigned char> host(64);
  {
    Machine machine;
    machine.registered(host);
    CHECK(machine->set_switch("copy_latency_us", 500));
    for (size_t i = 0; i < 4; ++i) {
      const Handle stream = machine.stream();
      void* memory = machine.allocate(16);
      CHECK_OK(machine.fill(memory, 1, 16, stream));
      CHECK_OK(machine.copy(host.data() + 16 * i, memory, 16, stream));
    }
  }
  CHECK_EQ(std::count(host.begin(), host.end(), 1), 64);
}

// --- fork --------------------------------------------------------------------------

// A child that hangs is ended by its alarm.
TEST(a_child_of_a_busy_parent_is_refused_and_does_not_hang) {
  Machine machine("7.16", {"f"});
  std::atomic<bool> stop{false};
  std::vector<std::thread> busy;
  for (int i = 0; i < 2; ++i) {
    busy.emplace_back([&] {
      const Handle stream = machine.stream();
      while (!stop) {
        char* mapped = machine.map(kPage);
        CHECK_OK(machine->fill({}, mapped, 1, kPage, stream, false));
        CHECK_OK(machine->unmap({}, mapped, kPage));
        CHECK_OK(machine->free_addresses(mapped, kPage));
      }
    });
  }
  void* memory = machine.allocate(8);
  for (int round = 0; round < 20; ++round) {
    machine->before_fork();
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      machine->after_fork_in_child();
      const bool refused = machine->enter(0) == Error::kNotInitialized;
      // Nor would it wait for the parent's threads if it were not refused.
      machine->free_addresses(memory, kPage);
      machine->reset(nullptr);
      machine->abandon();
      _exit(refused && machine.stat("device_allocations") == 1 ? 0 : 1);
    }
    machine->after_fork_in_parent();
    int status = 0;
    CHECK(child > 0 && waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  }
  stop = true;
  for (std::thread& thread : busy) thread.join();
  CHECK_OK(machine->release(machine.me, memory));
}

TEST(a_child_of_an_idle_parent_starts_afresh) {
  Machine machine("7.16", {"f"});
  machine->before_fork();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    machine->after_fork_in_child();
    CHECK_OK(machine->enter(0));
    void* memory = machine.allocate(8);
    CHECK_OK(machine->release(machine.me, memory));
    char* mapped = machine.map(kPage);
    CHECK_OK(machine->unmap(machine.me, mapped, kPage));
    _exit(0);
  }
  machine->after_fork_in_parent();
  int status = 0;
  CHECK(child > 0 && waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

// --- everything at once ------------------------------------------------------------

// Threads that make, use and drop everything at once. Each has memory of its own and
// finds in it what it put there; streams and one event are everybody's.
TEST(threads_share_a_runtime) {
  Machine machine("7.16", {"f"});
  const Handle shared_event = machine->create_event(0, true);
  const Handle shared_stream = machine.stream(StreamKind::kBlocking);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      std::vector<unsigned char> host(256 * 1024);
      std::vector<unsigned char> back(host.size());
      CHECK_OK(machine->register_host({}, back.data(), back.size(), true));
      for (int round = 0; round < 60; ++round) {
        const int device = static_cast<int>(random() % 2);
        const Caller me{device, CaptureMode::kGlobal};
        const size_t bytes = 1 + random() % host.size();
        const Handle stream = machine.stream(
            random() % 2 ? StreamKind::kBlocking : StreamKind::kNonBlocking, device);
        std::fill(host.begin(), host.end(), static_cast<unsigned char>(random()));
        void* memory = machine.allocate(bytes, device);
        CHECK_OK(machine->fill(me, memory, 0, bytes, 0, true));
        CHECK_OK(machine->record_event({}, shared_event, 0));
        CHECK_OK(machine->synchronize_stream(me, 0));
        CHECK_OK(machine->copy(me, memory, host.data(), bytes, CopyKind::kDefault,
                               stream, false));
        CHECK_OK(machine->wait_event(me, shared_stream, shared_event));
        CHECK_OK(machine->copy(me, back.data(), memory, bytes, CopyKind::kDeviceToHost,
                               stream, false));
        if (random() % 2) {
          CHECK_OK(machine->synchronize_stream(me, stream));
          CHECK_OK(machine->release(me, memory));
          CHECK_OK(machine->destroy_stream(stream));
        } else {
          CHECK_OK(machine->destroy_stream(stream));
          CHECK_ERROR(machine->query_stream(me, stream), kInvalidHandle);
          CHECK_OK(machine->release(me, memory));
        }
        CHECK(std::equal(back.begin(), back.begin() + static_cast<ptrdiff_t>(bytes),
                         host.begin()));
        CHECK_OK(machine->enter(0));
        CHECK(!machine->stats().empty());
      }
      CHECK_OK(machine->unregister_host({}, back.data()));
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK_OK(machine->synchronize_event(machine.me, shared_event));
  CHECK_OK(machine->destroy_event(shared_event));
  CHECK_OK(machine->destroy_stream(shared_stream));
  for (const char* live : {"streams", "events", "device_allocations", "device_bytes",
                           "registered_ranges", "registered_bytes"}) {
    CHECK_EQ(machine.stat(live), 0);
  }
  CHECK(machine.stat("copies.blit.h2d") > 0 && machine.stat("copies.sdma.h2d") > 0);
  CHECK_EQ(machine.stat("calls.f"), 4 * 60);
}

// What threads have made and any of them may use or end.
class Pool {
 public:
  void add(Handle value) {
    if (value == 0) return;
    std::lock_guard lock(mutex_);
    values_.push_back(value);
  }

  // 0 when there is none, as one that is gone is in the eyes of the runtime.
  Handle any(std::mt19937& random) {
    std::lock_guard lock(mutex_);
    return values_.empty() ? 0 : values_[random() % values_.size()];
  }
  Handle take(std::mt19937& random) {
    std::lock_guard lock(mutex_);
    if (values_.empty()) return 0;
    std::swap(values_[random() % values_.size()], values_.back());
    const Handle taken = values_.back();
    values_.pop_back();
    return taken;
  }

 private:
  std::mutex mutex_;
  std::vector<Handle> values_;
};

// Every call of the runtime from many threads, on things that the others end
// meanwhile.
//
// The calls may race, the bytes may not, or the thread sanitizer would report the
// program that is played here. So each stream that moves bytes has a lane: a few bytes
// of every memory that it alone touches. What a lane captures is launched in that lane,
// and a lane's stream waits for no other lane, so that it joins no other's capture.
// Other streams move nothing and wait for anybody.
class Hammer {
 public:
  Hammer() {
    for (size_t i = 0; i < kLanes; ++i) {
      Lane& lane = lanes_[i];
      lane.offset = i * kLaneBytes;
      lane.me.device = static_cast<int>(i % 2);
      lane.is_null = i < 2;
      lane.kind = i < 5 ? StreamKind::kBlocking : StreamKind::kNonBlocking;
      if (!lane.is_null) lane.stream = machine_.stream(lane.kind, lane.me.device);
      lane.event = machine_->create_event(lane.me.device, true);
    }
    for (int i = 0; i < 3; ++i) {
      idle_streams_.add(machine_.stream(StreamKind::kBlocking, i % 2));
      events_.add(machine_->create_event(i % 2, i != 0));
    }
  }

  void run(unsigned seed, std::chrono::steady_clock::time_point end) {
    std::mt19937 random(seed);
    while (std::chrono::steady_clock::now() < end) {
      const size_t choice = random() % 20;
      if (choice < 4) use_memory(random);
      if (choice >= 4 && choice < 8) use_virtual_memory(random);
      if (choice >= 8 && choice < 13) use_lane(random);
      if (choice >= 13 && choice < 15) capture_in_lane(random);
      if (choice >= 15 && choice < 18) use_streams(random);
      if (choice == 18) ask(random);
      if (choice == 19 && random() % 4 == 0) control(random);
      ++calls_;
    }
  }

  // Ends all there is, and finds nothing left.
  void finish() {
    std::mt19937 random(0);
    machine_->reset(nullptr);
    for (Lane& lane : lanes_) {
      if (!lane.is_null) CHECK_OK(machine_->destroy_stream(lane.stream));
      CHECK_OK(machine_->destroy_event(lane.event));
      while (const Handle each = lane.executables.take(random)) {
        CHECK_OK(machine_->destroy_executable(Caller{}, each));
      }
    }
    drop_all(idle_streams_,
             [&](Handle each) { return machine_->destroy_stream(each); });
    drop_all(events_, [&](Handle each) { return machine_->destroy_event(each); });
    drop_all(graphs_, [&](Handle each) { return machine_->destroy_graph(each); });
    drop_all(allocations_, [&](Handle each) {
      return machine_->release(machine_.me, pointer(each));
    });
    drop_all(reservations_, [&](Handle each) {
      machine_->unmap(machine_.me, pointer(each), kBytes);
      machine_->unmap(machine_.me, pointer(each + kBytes), kBytes);
      return machine_->free_addresses(pointer(each), 2 * kBytes);
    });
    // Older releases tell a handle without a reference to it: it is here twice.
    while (const Handle each = handles_.take(random)) machine_->release_handle(each);
    machine_->unregister_host(machine_.me, arena_.data());
    for (const char* live :
         {"streams", "events", "device_allocations", "registered_ranges",
          "host_allocations", "reservations", "handles", "mappings", "captures",
          "graphs", "executables", "imports"}) {
      CHECK_EQ(machine_.stat(live), 0);
    }
    for (const int device : {0, 1}) {
      CHECK_EQ(machine_.free_bytes(device), kMachineVram);
    }
    CHECK(calls_ > 1000);
  }

 private:
  static constexpr size_t kLanes = 8;
  static constexpr size_t kLaneBytes = 64;
  static constexpr size_t kBytes = 2 * kPage;  // of every memory

  struct Lane {
    size_t offset = 0;
    Caller me;
    bool is_null = false;
    StreamKind kind = StreamKind::kBlocking;
    std::atomic<Handle> stream{0};
    Handle event = 0;
    Pool executables;
  };

  static void* pointer(Handle number) { return reinterpret_cast<void*>(number); }
  static Handle number(const void* pointer) {
    return reinterpret_cast<Handle>(pointer);
  }
  static CaptureMode any_mode(std::mt19937& random) {
    return static_cast<CaptureMode>(random() % 3);
  }
  static Caller anybody(std::mt19937& random) {
    return {static_cast<int>(random() % 2), any_mode(random)};
  }

  template <typename Drop>
  void drop_all(Pool& pool, Drop drop) {
    std::mt19937 random(0);
    while (const Handle each = pool.take(random)) CHECK_OK(drop(each));
  }

  // A capture may forbid the end of something; then it stays.
  template <typename Drop>
  static void drop_one(Pool& pool, std::mt19937& random, Drop drop) {
    const Handle each = pool.take(random);
    if (each != 0 && drop(each) != Error::kSuccess) pool.add(each);
  }

  void use_memory(std::mt19937& random) {
    const Caller me = anybody(random);
    void* made = nullptr;
    switch (random() % 8) {
      case 0:
      case 1:
        machine_->allocate(me, kBytes, &made);
        allocations_.add(number(made));
        break;
      case 2:
      case 3:
        drop_one(allocations_, random,
                 [&](Handle each) { return machine_->release(me, pointer(each)); });
        break;
      case 4:
        if (machine_->allocate_host(me, kBytes, &made) == Error::kSuccess) {
          while (machine_->release_host(anybody(random), made) != Error::kSuccess) {
          }
        }
        break;
      case 5:
        machine_->register_host(me, arena_.data(), arena_.size(), true);
        break;
      case 6:
        machine_->unregister_host(me, arena_.data());
        break;
      case 7:
        IpcHandle handle{};
        machine_->export_memory(pointer(allocations_.any(random)), &handle);
        machine_->export_memory(pointer(reservations_.any(random)), &handle);
        machine_->import_memory(handle, &made);
        machine_->close_import(pointer(allocations_.any(random)));
        break;
    }
  }

  void use_virtual_memory(std::mt19937& random) {
    const Caller me = anybody(random);
    void* made = nullptr;
    Handle handle = 0;
    char* half = static_cast<char*>(pointer(reservations_.any(random)));
    if (half != nullptr) half += kBytes * (random() % 2);
    AllocationRequest request;
    request.device = static_cast<int>(random() % 2);
    request.bytes = kBytes;
    switch (random() % 10) {
      case 0:
        machine_->reserve(2 * kBytes, 0, half, &made);
        reservations_.add(number(made));
        break;
      case 1:
        drop_one(reservations_, random, [&](Handle each) {
          return machine_->free_addresses(pointer(each), 2 * kBytes);
        });
        break;
      case 2:
        machine_->create(me, request, &handle);
        handles_.add(handle);
        break;
      case 3:
        drop_one(handles_, random,
                 [&](Handle each) { return machine_->release_handle(each); });
        break;
      case 4:
        machine_->retain_handle(half, &handle);
        handles_.add(handle);
        break;
      case 5:
      case 6:
        machine_->map(half, kBytes, 0, handles_.any(random));
        [[fallthrough]];
      case 7:
        machine_->set_access(half, kBytes,
                             {{0, Access::kReadWrite}, {1, Access::kReadWrite}});
        break;
      case 8:
        machine_->unmap(me, half, kBytes);
        break;
      case 9:
        Access access = Access::kNone;
        machine_->access_of(half, me.device, &access);
        machine_->describe_handle(handles_.any(random), &request);
        size_t bytes = 0;
        machine_->granularity(me.device, random() % 2, &bytes);
        break;
    }
  }

  // An address of the lane in some memory.
  char* any_bytes(const Lane& lane, std::mt19937& random) {
    void* memory = nullptr;
    switch (random() % 4) {
      case 0:
        memory = arena_.data();
        break;
      case 1:
        memory = pointer(reservations_.any(random));
        break;
      default:
        memory = pointer(allocations_.any(random));
    }
    return memory == nullptr ? nullptr : at(memory, lane.offset);
  }

  void use_lane(std::mt19937& random) {
    Lane& lane = lanes_[random() % kLanes];
    const Caller me{lane.me.device, any_mode(random)};
    const Handle stream = lane.stream;
    char* to = any_bytes(lane, random);
    char* from = any_bytes(lane, random);
    const bool blocking = lane.is_null && random() % 4 == 0;
    switch (random() % 8) {
      case 0:
        machine_->fill(me, to, 7, kLaneBytes, stream, blocking);
        break;
      case 1:
      case 2:
        machine_->copy(me, to, from, kLaneBytes, CopyKind::kDefault, stream, blocking);
        break;
      case 3: {
        const Pitch pitch{kPage, 0};
        machine_->copy_pitched(me, {to, pitch, from, pitch, {kLaneBytes, 2}},
                               CopyKind::kDefault, stream, blocking);
        break;
      }
      case 4: {
        void* const targets[] = {to, to};
        const void* const sources[] = {from, from};
        const size_t sizes[] = {kLaneBytes, 3};
        const size_t first = 0;
        Batch batch{targets, sources, sizes, 2, {}, &first, 0, nullptr};
        if (random() % 2) {
          batch.attributes = {{static_cast<uint32_t>(1 + random() % 3), 0x100}};
          batch.attribute_count = 1;
        }
        size_t index = 0;
        batch.fail_index = &index;
        machine_->copy_batch(me, batch, stream);
        machine_->blame_first_copy(batch);
        break;
      }
      case 5:
        machine_->record_event(me, lane.event, stream);
        machine_->wait_event(me, stream, lane.event);
        break;
      case 6:
        machine_->launch(me, lane.executables.any(random), stream);
        break;
      case 7:
        if (!lane.is_null && random() % 4 == 0 &&
            machine_->destroy_stream(stream) == Error::kSuccess) {
          lane.stream = machine_.stream(lane.kind, lane.me.device);
        }
        break;
    }
  }

  void capture_in_lane(std::mt19937& random) {
    Lane& lane = lanes_[2 + random() % (kLanes - 2)];
    const Caller me{lane.me.device, CaptureMode::kRelaxed};
    const Handle stream = lane.stream;
    machine_->begin_capture(stream, any_mode(random));
    for (int i = 0; i < 3; ++i) {
      machine_->fill(me, any_bytes(lane, random), 3, kLaneBytes, stream, false);
    }
    Handle graph = 0;
    Handle executable = 0;
    if (machine_->end_capture(stream, &graph) != Error::kSuccess) return;
    machine_->instantiate(me, graph, &executable);
    lane.executables.add(executable);
    graphs_.add(graph);
    drop_one(lane.executables, random,
             [&](Handle each) { return machine_->destroy_executable(me, each); });
    drop_one(graphs_, random,
             [&](Handle each) { return machine_->destroy_graph(each); });
  }

  void use_streams(std::mt19937& random) {
    const Caller me = anybody(random);
    const Handle stream = idle_streams_.any(random);
    const Handle event = events_.any(random);
    const Lane& lane = lanes_[random() % kLanes];
    CaptureStatus status = CaptureStatus::kNone;
    uint64_t id = 0;
    Handle graph = 0;
    float milliseconds = 0;
    switch (random() % 12) {
      case 0:
        machine_->record_event(me, event, stream);
        break;
      case 1:
        machine_->wait_event(me, stream, event);
        break;
      case 2:
        machine_->wait_event(me, stream, lane.event);
        break;
      case 3:
        machine_->query_event(me, random() % 2 ? event : lane.event);
        machine_->query_stream(me, random() % 2 ? stream : lane.stream.load());
        break;
      case 4:
        machine_->synchronize_event(me, random() % 2 ? event : lane.event);
        break;
      case 5:
        machine_->synchronize_stream(me, random() % 2 ? stream : lane.stream.load());
        break;
      case 6:
        machine_->elapsed_time(event, lane.event, &milliseconds);
        break;
      case 7:
        machine_->begin_capture(stream, any_mode(random));
        break;
      case 8:
        if (machine_->end_capture(stream, &graph) == Error::kSuccess)
          graphs_.add(graph);
        break;
      case 9:
        machine_->capture_status(random() % 2 ? stream : lane.stream.load(), &status,
                                 &id);
        break;
      case 10:
        drop_one(idle_streams_, random,
                 [&](Handle each) { return machine_->destroy_stream(each); });
        idle_streams_.add(machine_.stream(StreamKind::kNonBlocking, me.device));
        break;
      case 11:
        drop_one(events_, random,
                 [&](Handle each) { return machine_->destroy_event(each); });
        events_.add(machine_->create_event(me.device, random() % 2));
        break;
    }
  }

  void ask(std::mt19937& random) {
    const Caller me = anybody(random);
    void* base = nullptr;
    size_t count = 0;
    Handle first = 0;
    machine_->address_range(pointer(reservations_.any(random)), &base, &count);
    machine_->device_pointer(arena_.data(), &base);
    machine_->graph_nodes(graphs_.any(random), &first, &count);
    machine_->memory_info(me.device, &count, &count);
    machine_->enter(0);
    if (machine_->gpu_error() != Error::kSuccess) machine_->reset(nullptr);
    CHECK(machine_->version() > 0 && machine_->has_device(1));
    CHECK(!machine_->stats().empty());
    machine_->aliases_host_pointers();
  }

  void control(std::mt19937& random) {
    constexpr const char* kReleases[] = {"7.1",  "7.2.3", "7.12",
                                         "7.13", "7.15",  "7.16"};
    constexpr const char* kSwitches[] = {"corrupt_loads",
                                         "host_device_pointers",
                                         "one_mapping_copies",
                                         "ignore_address_hints",
                                         "copy_latency_us",
                                         "fill_latency_us",
                                         "host_reads",
                                         "stale_memory",
                                         "max_registration_bytes",
                                         "max_locked_bytes",
                                         "locked_memory",
                                         "no_virtual_memory",
                                         "small_bar"};
    switch (random() % 4) {
      case 0:
        machine_->reset(find_profile(kReleases[random() % 6]));
        break;
      case 1:
        CHECK(machine_->set_switch(kSwitches[random() % std::size(kSwitches)],
                                   random() % 2));
        break;
      case 2:
        machine_->fail("f", 1 + random() % 3, Error::kNotReady);
        break;
      case 3:
        machine_->synchronize_device(anybody(random));
        break;
    }
  }

  Machine machine_{"7.16", {"f"}};
  std::array<Lane, kLanes> lanes_;
  Pool allocations_;
  Pool reservations_;
  Pool handles_;
  Pool idle_streams_;
  Pool events_;
  Pool graphs_;
  std::vector<unsigned char> arena_ = std::vector<unsigned char>(kBytes);
  std::atomic<uint64_t> calls_{0};
};

TEST(every_call_at_once) {
  Hammer hammer;
  const auto end = std::chrono::steady_clock::now() + 1s;
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 6; ++seed) {
    threads.emplace_back([&, seed] { hammer.run(seed, end); });
  }
  for (std::thread& thread : threads) thread.join();
  hammer.finish();
}

}  // namespace
}  // namespace hipsim
