// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "test.h"

namespace hipsim {
namespace {

using test::kMoment;
using test::Latch;
using namespace std::chrono_literals;

Operation opens(Latch& latch) {
  Operation operation;
  operation.run = [&latch](const std::atomic<bool>&) { latch.open(); };
  return operation;
}

Operation waits_at(Latch& latch) {
  Operation operation;
  operation.run = [&latch](const std::atomic<bool>&) { CHECK(latch.wait()); };
  return operation;
}

TEST(a_stream_runs_in_order_and_later) {
  Scheduler scheduler;
  const StreamRef stream = scheduler.create(0, StreamKind::kBlocking);
  Latch latch;
  scheduler.submit(stream, waits_at(latch));
  std::vector<int> order;
  Point last;
  for (int i = 0; i < 100; ++i) {
    Operation append;
    append.run = [&order, i](const std::atomic<bool>&) { order.push_back(i); };
    last = scheduler.submit(stream, std::move(append));
  }
  CHECK(!scheduler.idle(stream) && !scheduler.reached(last));
  latch.open();
  scheduler.wait(last);
  CHECK(order.size() == 100 && std::is_sorted(order.begin(), order.end()));
  CHECK(scheduler.idle(stream));
}

TEST(the_null_stream_orders_blocking_streams_only) {
  Scheduler scheduler;
  const StreamRef null = scheduler.null_stream(0);
  CHECK(scheduler.null_stream(0) == null && scheduler.null_stream(1) != null);
  const StreamRef blocking = scheduler.create(0, StreamKind::kBlocking);
  const StreamRef free = scheduler.create(0, StreamKind::kNonBlocking);
  const StreamRef elsewhere = scheduler.create(1, StreamKind::kBlocking);

  Latch latch;
  Latch after_null;
  Latch from_free;
  Latch from_elsewhere;
  scheduler.submit(blocking, waits_at(latch));
  CHECK(!scheduler.idle(null));
  const Point in_null = scheduler.submit(null, opens(after_null));
  Latch after_both;
  const StreamRef other = scheduler.create(0, StreamKind::kBlocking);
  const Point in_other = scheduler.submit(other, opens(after_both));
  scheduler.submit(free, opens(from_free));
  scheduler.submit(elsewhere, opens(from_elsewhere));
  CHECK(from_free.wait() && from_elsewhere.wait());
  CHECK(!after_null.wait(kMoment) && !after_both.wait(kMoment));
  CHECK(!scheduler.reached(in_null) && !scheduler.reached(in_other));
  CHECK(scheduler.idle(free) && !scheduler.idle(other));
  latch.open();
  scheduler.drain_device(0);
  CHECK(after_null.wait() && after_both.wait() && scheduler.idle(null));
}

TEST(draining_the_null_stream_waits_for_blocking_streams) {
  Scheduler scheduler;
  const StreamRef null = scheduler.null_stream(0);
  const StreamRef blocking = scheduler.create(0, StreamKind::kBlocking);
  const StreamRef free = scheduler.create(0, StreamKind::kNonBlocking);
  Latch latch;
  Latch held;
  Latch drained;
  scheduler.submit(blocking, waits_at(latch));
  scheduler.submit(free, waits_at(held));
  std::thread waiter([&] {
    scheduler.drain(null);
    drained.open();
  });
  CHECK(!drained.wait(kMoment));
  latch.open();
  CHECK(drained.wait());
  CHECK(!scheduler.idle(free));
  held.open();
  waiter.join();
}

TEST(a_point_keeps_what_it_was) {
  Scheduler scheduler;
  const StreamRef producer = scheduler.create(0, StreamKind::kNonBlocking);
  const StreamRef consumer = scheduler.create(0, StreamKind::kNonBlocking);
  Latch first;
  Latch second;
  const Point early = scheduler.submit(producer, waits_at(first));
  Latch consumed;
  Operation wait = opens(consumed);
  wait.after = {early};
  scheduler.submit(consumer, std::move(wait));
  const Point late = scheduler.submit(producer, waits_at(second));
  CHECK(!consumed.wait(kMoment));
  first.open();
  CHECK(consumed.wait());
  CHECK(scheduler.reached(early) && !scheduler.reached(late));
  second.open();
  scheduler.drain_all();
  CHECK(scheduler.reached(late) && scheduler.reached(Point{}));
}

TEST(destroying_a_stream_finishes_its_work) {
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

TEST(latency_is_skipped_for_what_was_submitted) {
  Scheduler scheduler;
  const StreamRef stream = scheduler.create(0, StreamKind::kNonBlocking);
  std::atomic<int> done{0};
  const auto submit = [&](std::chrono::microseconds latency) {
    Operation operation;
    operation.latency = latency;
    operation.run = [&](const std::atomic<bool>& abandoned) {
      CHECK(!abandoned);
      ++done;
    };
    return scheduler.submit(stream, std::move(operation));
  };
  for (int i = 0; i < 3; ++i) submit(1h);
  scheduler.skip_latency();
  scheduler.drain_all();
  CHECK(done == 3);
  const Point later = submit(1h);
  std::this_thread::sleep_for(kMoment);
  CHECK(!scheduler.reached(later));
  scheduler.skip_latency();
  scheduler.wait(later);
}

TEST(abandoned_work_ends_at_once) {
  Scheduler scheduler;
  const StreamRef stream = scheduler.create(0, StreamKind::kNonBlocking);
  std::atomic<int> worked{0};
  Latch running;
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

}  // namespace
}  // namespace hipsim
