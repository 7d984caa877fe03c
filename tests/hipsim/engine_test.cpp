// SPDX-License-Identifier: Apache-2.0
//
// The simulator's engine without a bridge. test_engine.py builds and runs this under
// the thread sanitizer and under the address and undefined-behaviour sanitizers.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <set>
#include <thread>
#include <vector>

#include "engine/address_space.h"
#include "engine/call_log.h"
#include "engine/copy.h"
#include "engine/profile.h"
#include "engine/runtime.h"
#include "engine/scheduler.h"

using namespace hipsim;
using namespace std::chrono_literals;

#define CHECK(condition)                                                           \
  do {                                                                             \
    if (!(condition)) {                                                            \
      std::fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #condition); \
      std::exit(1);                                                                \
    }                                                                              \
  } while (false)

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kVram = 64 * kPage;
constexpr auto kLong = 20s;

char* at(void* base, size_t offset) { return static_cast<char*>(base) + offset; }

// Closed at first; whoever waits at it goes on when it is opened.
class Gate {
 public:
  void open() {
    std::lock_guard lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  bool wait(std::chrono::milliseconds limit = kLong) {
    std::unique_lock lock(mutex_);
    return changed_.wait_for(lock, limit, [&] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

Operation opens(Gate& gate) {
  Operation operation;
  operation.run = [&gate](const std::atomic<bool>&) { gate.open(); };
  return operation;
}

Operation waits_at(Gate& gate) {
  Operation operation;
  operation.run = [&gate](const std::atomic<bool>&) { CHECK(gate.wait()); };
  return operation;
}

// --- profiles ----------------------------------------------------------------------

void profiles_are_ordered_and_found() {
  const auto& all = profiles();
  CHECK(!all.empty());
  CHECK(std::is_sorted(all.begin(), all.end(), [](const auto& a, const auto& b) {
    return a.version < b.version;
  }));
  for (const Profile& profile : all) CHECK(find_profile(profile.name) == &profile);
  CHECK(find_profile("7") == nullptr && find_profile("") == nullptr);
  CHECK(&default_profile() == &all.back());
}

// --- address space -----------------------------------------------------------------

void device_addresses_are_checked_by_allocation() {
  AddressSpace memory(2, kVram);
  void* first = nullptr;
  void* second = nullptr;
  CHECK(memory.allocate(0, 100, &first) == Error::kSuccess);
  CHECK(memory.allocate(1, kPage, &second) == Error::kSuccess);
  std::memset(first, 1, 100);
  std::memset(second, 2, kPage);

  Place place;
  CHECK(memory.locate(first, 100, &place) == Error::kSuccess);
  CHECK(place.kind == MemoryKind::kDevice && place.device == 0);
  CHECK(memory.locate(at(first, 99), 1, &place) == Error::kSuccess);
  CHECK(memory.locate(at(first, 99), 2, &place) == Error::kInvalidValue);
  CHECK(memory.locate(at(first, 100), 1, &place) == Error::kInvalidValue);
  CHECK(memory.locate(second, kPage, &place) == Error::kSuccess && place.device == 1);
  CHECK(memory.locate(second, kPage + 1, &place) == Error::kInvalidValue);
  CHECK(memory.locate(second, SIZE_MAX, &place) == Error::kInvalidValue);

  CHECK(!memory.forget_device(at(first, 1)));
  const auto forgotten = memory.forget_device(first);
  CHECK(forgotten && forgotten->bytes == 100);
  CHECK(memory.locate(first, 1, &place) == Error::kInvalidValue);
  static_cast<char*>(first)[0] = 3;  // still mapped
  memory.unmap(*forgotten);
  CHECK(!memory.forget_device(first));
  CHECK(memory.locate(first, 1, &place) == Error::kInvalidValue);
}

void device_memory_is_limited_in_pages() {
  AddressSpace memory(2, kVram);
  std::vector<void*> pointers(64);
  for (void*& pointer : pointers) {
    CHECK(memory.allocate(0, 1, &pointer) == Error::kSuccess);
  }
  void* more = nullptr;
  CHECK(memory.allocate(0, 1, &more) == Error::kOutOfMemory);
  CHECK(memory.allocate(0, SIZE_MAX, &more) == Error::kOutOfMemory);
  CHECK(memory.free_bytes(0) == 0 && memory.free_bytes(1) == kVram);
  CHECK(memory.allocate(1, kVram + 1, &more) == Error::kOutOfMemory);
  CHECK(memory.allocate(1, kVram, &more) == Error::kSuccess);
  CHECK(memory.usage().device_allocations == 65);
  CHECK(memory.usage().device_bytes == 64 + kVram);
}

void addresses_return_late_and_fresh() {
  AddressSpace memory(1, kVram);
  std::set<void*> seen;
  size_t rounds = 0;
  for (;; ++rounds) {
    void* pointer = nullptr;
    CHECK(memory.allocate(0, kVram / 4, &pointer) == Error::kSuccess);
    CHECK(*static_cast<char*>(pointer) == 0);
    *static_cast<char*>(pointer) = 1;
    memory.unmap(*memory.forget_device(pointer));
    if (!seen.insert(pointer).second) break;
  }
  CHECK(rounds == 16);  // the window is four times the memory
}

void host_ranges_do_not_overlap() {
  AddressSpace memory(1, kVram);
  std::vector<char> buffer(1000);
  char* base = buffer.data();
  CHECK(memory.register_host(base + 100, 100) == Error::kSuccess);
  CHECK(memory.register_host(base + 100, 100) == Error::kHostMemoryAlreadyRegistered);
  CHECK(memory.register_host(base + 199, 1) == Error::kHostMemoryAlreadyRegistered);
  CHECK(memory.register_host(base, 101) == Error::kHostMemoryAlreadyRegistered);
  CHECK(memory.register_host(base, 1000) == Error::kHostMemoryAlreadyRegistered);
  CHECK(memory.register_host(base, 100) == Error::kSuccess);
  CHECK(memory.register_host(base + 200, 100) == Error::kSuccess);
  CHECK(memory.register_host(nullptr, 1) == Error::kInvalidValue);
  CHECK(memory.register_host(base + 500, 0) == Error::kInvalidValue);
  CHECK(memory.register_host(base + 500, SIZE_MAX) == Error::kInvalidValue);

  Place place;
  CHECK(memory.locate(base + 150, 50, &place) == Error::kSuccess);
  CHECK(place.kind == MemoryKind::kRegisteredHost);
  CHECK(memory.locate(base + 150, 51, &place) == Error::kInvalidValue);
  CHECK(memory.locate(base + 300, 700, &place) == Error::kSuccess);
  CHECK(place.kind == MemoryKind::kPageableHost);

  CHECK(!memory.unregister_host(base + 101));
  CHECK(memory.unregister_host(base + 100) && !memory.unregister_host(base + 100));
  CHECK(memory.usage().registered_ranges == 2);
  CHECK(memory.usage().registered_bytes == 200);

  void* device = nullptr;
  void* host = nullptr;
  CHECK(memory.allocate(0, kPage, &device) == Error::kSuccess);
  CHECK(memory.register_host(device, kPage) == Error::kInvalidValue);
  CHECK(memory.allocate_host(10, &host) == Error::kSuccess);
  CHECK(memory.allocate_host(SIZE_MAX, &host) == Error::kOutOfMemory);
  CHECK(memory.register_host(host, 10) == Error::kHostMemoryAlreadyRegistered);
  CHECK(!memory.unregister_host(host));
  CHECK(!memory.forget_host_allocation(base));
  memory.unmap(*memory.forget_host_allocation(host));
}

void address_space_follows_a_model() {
  AddressSpace memory(1, kVram);
  std::map<char*, size_t> model;
  std::mt19937 random(7);
  size_t charged = 0;
  for (int step = 0; step < 20000; ++step) {
    if (random() % 2 == 0) {
      const size_t bytes = 1 + random() % (6 * kPage);
      const size_t pages = (bytes + kPage - 1) / kPage * kPage;
      void* pointer = nullptr;
      const bool room = charged + pages <= kVram;
      CHECK((memory.allocate(0, bytes, &pointer) == Error::kSuccess) == room);
      if (room) {
        const auto next = model.lower_bound(at(pointer, 0));
        CHECK(next == model.end() || at(pointer, pages) <= next->first);
        model[at(pointer, 0)] = bytes;
        charged += pages;
      }
    } else if (!model.empty()) {
      auto victim = std::next(model.begin(), random() % model.size());
      const auto place = memory.forget_device(victim->first);
      CHECK(place && place->bytes == victim->second);
      memory.unmap(*place);
      charged -= (victim->second + kPage - 1) / kPage * kPage;
      model.erase(victim);
    }
    CHECK(memory.free_bytes(0) == kVram - charged);
  }
}

// --- copies ------------------------------------------------------------------------

void engines_are_chosen_by_rule() {
  const Place device{MemoryKind::kDevice, 0, 0, 0};
  const Place host{MemoryKind::kRegisteredHost, -1, 0, 0};
  const Place pageable{};
  struct Row {
    Place to;
    Place from;
    size_t bytes;
    bool prefer_sdma;
    CopyEngine engine;
    Direction direction;
    bool staged;
  };
  const auto sdma = CopyEngine::kSdma;
  const auto blit = CopyEngine::kBlit;
  const auto load = Direction::kHostToDevice;
  const auto store = Direction::kDeviceToHost;
  const Row rows[] = {
      {device, host, 16384, false, blit, load, false},
      {device, host, 16385, false, sdma, load, false},
      {host, device, 16384, false, blit, store, false},
      {host, device, 16385, false, sdma, store, false},
      {device, host, 1, true, sdma, load, false},
      {device, device, 1 << 20, false, blit, Direction::kDeviceToDevice, false},
      {device, device, 1, true, sdma, Direction::kDeviceToDevice, false},
      {device, pageable, 16385, false, sdma, load, true},
      {pageable, device, 1, false, blit, store, true},
      {host, host, 1 << 20, false, blit, Direction::kHostToHost, false},
      {pageable, pageable, 1, true, CopyEngine::kHost, Direction::kHostToHost, false},
  };
  for (const Row& row : rows) {
    const Copy copy = plan_copy(EngineRule{}, nullptr, row.to, nullptr, row.from,
                                row.bytes, row.prefer_sdma);
    CHECK(copy.engine == row.engine && copy.direction == row.direction);
    CHECK(copy.staged == row.staged);
    const EngineRule without_sdma{16384, false};
    const Copy slow = plan_copy(without_sdma, nullptr, row.to, nullptr, row.from,
                                row.bytes, row.prefer_sdma);
    CHECK(slow.engine == (row.engine == sdma ? blit : row.engine));
  }
  const Copy small =
      plan_copy(EngineRule{0, true}, nullptr, device, nullptr, host, 1, false);
  CHECK(small.engine == sdma);
}

void copies_move_corrupt_and_stop() {
  unsigned char source[4] = {1, 2, 3, 4};
  unsigned char loaded[4] = {};
  unsigned char stored[4] = {};
  const std::vector<Copy> copies = {
      {loaded, source, 4, Direction::kHostToDevice, CopyEngine::kBlit, false},
      {stored, source, 4, Direction::kDeviceToHost, CopyEngine::kBlit, false},
  };
  std::atomic<bool> stop{false};
  CHECK(perform(copies, false, stop) == 2);
  CHECK(std::memcmp(loaded, source, 4) == 0);
  CHECK(perform(copies, true, stop) == 2);
  for (int i = 0; i < 4; ++i) {
    CHECK(loaded[i] == static_cast<unsigned char>(~source[i]));
    CHECK(stored[i] == source[i]);
  }
  stop = true;
  std::memset(stored, 0, 4);
  CHECK(perform(copies, false, stop) == 0 && stored[0] == 0);
}

void calls_fail_when_told() {
  CallLog log({"f", "g"});
  CHECK(!log.fail("h", 1, Error::kOutOfMemory) && !log.fail("f", 0, Error::kNotReady));
  CHECK(log.enter(0) == Error::kSuccess);
  CHECK(log.fail("f", 2, Error::kOutOfMemory) && log.fail("f", 1, Error::kNoDevice));
  CHECK(log.enter(1) == Error::kSuccess);
  CHECK(log.enter(0) == Error::kNoDevice);
  CHECK(log.enter(0) == Error::kOutOfMemory);
  CHECK(log.enter(0) == Error::kSuccess);
  CHECK(log.count(0) == 4 && log.count(1) == 1);
  CHECK(log.fail("f", 1, Error::kNoDevice));
  log.reset();
  CHECK(log.enter(0) == Error::kSuccess && log.count(0) == 1);
}

// --- streams -----------------------------------------------------------------------

void a_stream_runs_in_order_and_later() {
  Scheduler scheduler;
  const StreamRef stream = scheduler.create(0, StreamKind::kBlocking);
  Gate gate;
  scheduler.submit(stream, waits_at(gate));
  std::vector<int> order;
  Point last;
  for (int i = 0; i < 100; ++i) {
    Operation append;
    append.run = [&order, i](const std::atomic<bool>&) { order.push_back(i); };
    last = scheduler.submit(stream, std::move(append));
  }
  CHECK(!scheduler.idle(stream) && !scheduler.reached(last));
  gate.open();
  scheduler.wait(last);
  CHECK(order.size() == 100 && std::is_sorted(order.begin(), order.end()));
  CHECK(scheduler.idle(stream));
}

void the_null_stream_orders_blocking_streams_only() {
  Scheduler scheduler;
  const StreamRef null = scheduler.null_stream(0);
  CHECK(scheduler.null_stream(0) == null && scheduler.null_stream(1) != null);
  const StreamRef blocking = scheduler.create(0, StreamKind::kBlocking);
  const StreamRef free = scheduler.create(0, StreamKind::kNonBlocking);
  const StreamRef elsewhere = scheduler.create(1, StreamKind::kBlocking);

  Gate gate;
  Gate after_null;
  Gate from_free;
  Gate from_elsewhere;
  scheduler.submit(blocking, waits_at(gate));
  CHECK(!scheduler.idle(null));
  const Point in_null = scheduler.submit(null, opens(after_null));
  Gate after_both;
  const StreamRef other = scheduler.create(0, StreamKind::kBlocking);
  const Point in_other = scheduler.submit(other, opens(after_both));
  scheduler.submit(free, opens(from_free));
  scheduler.submit(elsewhere, opens(from_elsewhere));
  CHECK(from_free.wait() && from_elsewhere.wait());
  CHECK(!after_null.wait(50ms) && !after_both.wait(50ms));
  CHECK(!scheduler.reached(in_null) && !scheduler.reached(in_other));
  CHECK(scheduler.idle(free) && !scheduler.idle(other));
  gate.open();
  scheduler.drain_device(0);
  CHECK(after_null.wait() && after_both.wait() && scheduler.idle(null));
}

void draining_the_null_stream_waits_for_blocking_streams() {
  Scheduler scheduler;
  const StreamRef null = scheduler.null_stream(0);
  const StreamRef blocking = scheduler.create(0, StreamKind::kBlocking);
  const StreamRef free = scheduler.create(0, StreamKind::kNonBlocking);
  Gate gate;
  Gate held;
  Gate drained;
  scheduler.submit(blocking, waits_at(gate));
  scheduler.submit(free, waits_at(held));
  std::thread waiter([&] {
    scheduler.drain(null);
    drained.open();
  });
  CHECK(!drained.wait(50ms));
  gate.open();
  CHECK(drained.wait());
  CHECK(!scheduler.idle(free));
  held.open();
  waiter.join();
}

void a_point_keeps_what_it_was() {
  Scheduler scheduler;
  const StreamRef producer = scheduler.create(0, StreamKind::kNonBlocking);
  const StreamRef consumer = scheduler.create(0, StreamKind::kNonBlocking);
  Gate first;
  Gate second;
  const Point early = scheduler.submit(producer, waits_at(first));
  Gate consumed;
  Operation wait = opens(consumed);
  wait.after = {early};
  scheduler.submit(consumer, std::move(wait));
  const Point late = scheduler.submit(producer, waits_at(second));
  CHECK(!consumed.wait(50ms));
  first.open();
  CHECK(consumed.wait());
  CHECK(scheduler.reached(early) && !scheduler.reached(late));
  second.open();
  scheduler.drain_all();
  CHECK(scheduler.reached(late) && scheduler.reached(Point{}));
}

void destroying_a_stream_finishes_its_work() {
  Scheduler scheduler;
  const StreamRef stream = scheduler.create(0, StreamKind::kNonBlocking);
  std::atomic<int> done{0};
  Point last;
  for (int i = 0; i < 50; ++i) {
    Operation operation;
    operation.latency = 100us;
    operation.run = [&](const std::atomic<bool>&) { ++done; };
    last = scheduler.submit(stream, std::move(operation));
  }
  scheduler.destroy(stream);
  CHECK(done == 50 && scheduler.reached(last));
  scheduler.wait(last);
}

void abandoned_work_ends_at_once() {
  Scheduler scheduler;
  const StreamRef stream = scheduler.create(0, StreamKind::kNonBlocking);
  std::atomic<int> worked{0};
  Gate running;
  Operation endless;
  endless.run = [&](const std::atomic<bool>& abandoned) {
    running.open();
    while (!abandoned) std::this_thread::sleep_for(1ms);
  };
  scheduler.submit(stream, std::move(endless));
  for (int i = 0; i < 10; ++i) {
    Operation slow;
    slow.latency = 1h;
    slow.run = [&](const std::atomic<bool>& abandoned) {
      if (!abandoned) ++worked;
    };
    scheduler.submit(stream, std::move(slow));
  }
  CHECK(running.wait());
  scheduler.abandon();
  scheduler.drain_all();
  CHECK(worked == 0);
}

// --- the whole ---------------------------------------------------------------------

// Threads that make, use and drop everything at once. Each has memory of its own and
// finds in it what it put there; streams and one event are everybody's.
void threads_share_a_runtime() {
  Options options;
  options.devices = 2;
  options.vram_bytes = size_t{64} << 20;
  Runtime runtime(options, {"f"});
  const Handle shared_event = runtime.create_event(true);
  const Handle shared_stream = runtime.create_stream(0, StreamKind::kBlocking);
  std::vector<std::thread> threads;
  for (unsigned seed = 0; seed < 4; ++seed) {
    threads.emplace_back([&, seed] {
      std::mt19937 random(seed);
      std::vector<unsigned char> host(256 * 1024);
      std::vector<unsigned char> back(host.size());
      CHECK(runtime.register_host(back.data(), back.size()) == Error::kSuccess);
      for (int round = 0; round < 60; ++round) {
        const int device = random() % 2;
        const size_t bytes = 1 + random() % host.size();
        const Handle stream = runtime.create_stream(
            device, random() % 2 ? StreamKind::kBlocking : StreamKind::kNonBlocking);
        std::fill(host.begin(), host.end(), static_cast<unsigned char>(random()));
        void* memory = nullptr;
        CHECK(runtime.allocate(device, bytes, &memory) == Error::kSuccess);
        CHECK(runtime.fill(memory, 0, bytes, 0, device, true) == Error::kSuccess);
        CHECK(runtime.record_event(shared_event, 0, device) == Error::kSuccess);
        CHECK(runtime.synchronize_stream(0, device) == Error::kSuccess);
        CHECK(runtime.copy(memory, host.data(), bytes, CopyKind::kDefault, stream,
                           device, false) == Error::kSuccess);
        CHECK(runtime.wait_event(shared_stream, 0, shared_event) == Error::kSuccess);
        CHECK(runtime.copy(back.data(), memory, bytes, CopyKind::kDeviceToHost, stream,
                           device, false) == Error::kSuccess);
        if (random() % 2) {
          CHECK(runtime.synchronize_stream(stream, device) == Error::kSuccess);
          CHECK(runtime.release(memory) == Error::kSuccess);
          CHECK(runtime.destroy_stream(stream) == Error::kSuccess);
        } else {
          CHECK(runtime.destroy_stream(stream) == Error::kSuccess);
          CHECK(runtime.query_stream(stream, device) == Error::kInvalidHandle);
          CHECK(runtime.release(memory) == Error::kSuccess);
        }
        CHECK(std::equal(back.begin(), back.begin() + bytes, host.begin()));
        CHECK(runtime.enter(0) == Error::kSuccess);
        CHECK(!runtime.stats().empty());
      }
      CHECK(runtime.unregister_host(back.data()) == Error::kSuccess);
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(runtime.synchronize_event(shared_event) == Error::kSuccess);
  CHECK(runtime.destroy_event(shared_event) == Error::kSuccess);
  CHECK(runtime.destroy_stream(shared_stream) == Error::kSuccess);
  for (const auto& [name, value] : runtime.stats()) {
    const bool live = name == "streams" || name == "events" ||
                      name == "device_allocations" || name == "device_bytes" ||
                      name == "registered_ranges" || name == "registered_bytes";
    CHECK(!live || value == 0);
    if (name == "copies.blit.h2d" || name == "copies.sdma.h2d") CHECK(value > 0);
    if (name == "calls.f") CHECK(value == 4 * 60);
  }
}

// Frees race with the copies that still use the memory: the copies win.
void freeing_waits_for_what_is_queued() {
  Options options;
  options.devices = 1;
  options.vram_bytes = size_t{8} << 20;
  Runtime runtime(options, {});
  runtime.copy_latency(200us);
  const Handle stream = runtime.create_stream(0, StreamKind::kNonBlocking);
  for (int round = 0; round < 100; ++round) {
    void* from = nullptr;
    void* to = nullptr;
    CHECK(runtime.allocate(0, 1 << 20, &from) == Error::kSuccess);
    CHECK(runtime.allocate(0, 1 << 20, &to) == Error::kSuccess);
    CHECK(runtime.copy(to, from, 1 << 20, CopyKind::kDeviceToDevice, stream, 0, true) ==
          Error::kSuccess);
    std::thread other([&] { CHECK(runtime.release(from) == Error::kSuccess); });
    CHECK(runtime.release(to) == Error::kSuccess);
    other.join();
    CHECK(runtime.release(to) == Error::kInvalidValue);
  }
}

void addresses_are_not_free_while_work_uses_them() {
  // The window holds four times the memory of all devices, so it wraps soon.
  AddressSpace space(2, size_t{1} << 20);
  void* first = nullptr;
  CHECK(space.allocate(0, 1 << 20, &first) == Error::kSuccess);
  const std::optional<Place> place = space.forget_device(first);
  CHECK(place.has_value());
  CHECK(!space.forget_device(first).has_value());
  Place found;
  CHECK(space.locate(first, 1, &found) == Error::kInvalidValue);
  for (int turn = 0; turn < 20; ++turn) {
    void* other = nullptr;
    CHECK(space.allocate(1, 1 << 20, &other) == Error::kSuccess);
    CHECK(other != first);
    space.unmap(*space.forget_device(other));
  }
  space.unmap(*place);
  void* again = nullptr;
  CHECK(space.allocate(0, 1 << 20, &again) == Error::kSuccess);
}

constexpr struct {
  const char* name;
  void (*run)();
} kTests[] = {
#define TEST(function) {#function, function}
    TEST(profiles_are_ordered_and_found),
    TEST(device_addresses_are_checked_by_allocation),
    TEST(device_memory_is_limited_in_pages),
    TEST(addresses_return_late_and_fresh),
    TEST(host_ranges_do_not_overlap),
    TEST(address_space_follows_a_model),
    TEST(engines_are_chosen_by_rule),
    TEST(copies_move_corrupt_and_stop),
    TEST(calls_fail_when_told),
    TEST(a_stream_runs_in_order_and_later),
    TEST(the_null_stream_orders_blocking_streams_only),
    TEST(draining_the_null_stream_waits_for_blocking_streams),
    TEST(a_point_keeps_what_it_was),
    TEST(destroying_a_stream_finishes_its_work),
    TEST(abandoned_work_ends_at_once),
    TEST(threads_share_a_runtime),
    TEST(freeing_waits_for_what_is_queued),
    TEST(addresses_are_not_free_while_work_uses_them),
#undef TEST
};

}  // namespace

// Without an argument: the names of the tests. With one: that test.
int main(int count, char** arguments) {
  for (const auto& test : kTests) {
    if (count < 2) {
      std::puts(test.name);
    } else if (std::strcmp(test.name, arguments[1]) == 0) {
      test.run();
      return 0;
    }
  }
  return count < 2 ? 0 : 2;
}
