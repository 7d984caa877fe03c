// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace hipsim {

// Note [Streams]
//
// A stream is a queue and a thread. Work runs in the order in which it was
// submitted, one operation at a time, and later than the call that submitted it.
// The n-th operation of a stream is its point n; a point is reached when the
// operation has finished. Everything that orders streams is a wait for points:
//
// - an event is the point at which it was recorded, so that recording it again does
//   not move a wait that was already made;
// - an operation on a device's null stream waits for the last point of every
//   blocking stream of that device, and an operation on a blocking stream for the
//   last point of the null stream. Non-blocking streams take no part in this;
// - a host wait is for the points that exist when it begins.
//
// A point only ever depends on points that existed before it, hence no cycle and no
// deadlock. An operation runs without any lock of the scheduler and must not wait
// for the scheduler.

enum class StreamKind { kNull, kBlocking, kNonBlocking };

class Stream;
using StreamRef = std::shared_ptr<Stream>;

struct Point {
  StreamRef stream;
  uint64_t sequence = 0;
};

struct Operation {
  std::vector<Point> after;

  // Passes between the moment at which the operation could run and its run.
  std::chrono::microseconds latency{0};

  // Long work looks at the flag now and then, and stops when it is set.
  std::function<void(const std::atomic<bool>& abandoned)> run;

  // Of the scheduler: the latencies that were skipped before it was submitted.
  uint64_t skipped = 0;
};

class Scheduler {
 public:
  Scheduler() = default;
  Scheduler(const Scheduler&) = delete;
  Scheduler& operator=(const Scheduler&) = delete;
  ~Scheduler();

  // A kBlocking or kNonBlocking stream. Throws std::system_error when no thread can
  // be started.
  StreamRef create(int device, StreamKind kind);

  // The device's null stream, made when it is first asked for.
  StreamRef null_stream(int device);

  // Waits for the stream's work and ends its thread. No other thread may be
  // submitting to the stream.
  void destroy(const StreamRef& stream);

  Point submit(const StreamRef& stream, Operation operation);

  bool reached(const Point& point) const;
  void wait(const Point& point) const;

  // What hipStreamQuery and hipStreamSynchronize look at: for a null stream that is
  // also every blocking stream of its device.
  bool idle(const StreamRef& stream) const;
  void drain(const StreamRef& stream) const;
  void drain_device(int device) const;
  void drain_all() const;

  // No operation that was submitted until now waits for its latency any longer.
  void skip_latency();

  // From now on operations are asked to stop at once, and none sleeps. Returns when
  // none is running. For the end of the process, whose memory is about to go.
  void abandon();

  // Held across fork(), so that the child finds the lock free and the state whole.
  std::mutex& fork_lock() { return mutex_; }

  // Is there any stream? With the fork lock held.
  bool active() const { return !streams_.empty(); }

 private:
  StreamRef add(int device, StreamKind kind);
  void serve(Stream& stream);
  std::vector<Point> last_points(const Stream& stream) const;
  void wait_all(std::unique_lock<std::mutex>& lock,
                const std::vector<Point>& points) const;
  template <typename Predicate>
  void drain_if(Predicate predicate) const;

  mutable std::mutex mutex_;
  mutable std::condition_variable progress_;
  std::vector<StreamRef> streams_;
  std::atomic<bool> abandoned_{false};
  uint64_t skipped_ = 0;
  int running_ = 0;
};

}  // namespace hipsim
