// SPDX-License-Identifier: Apache-2.0
#include "engine/scheduler.h"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <deque>
#include <thread>

namespace hipsim {

class Stream {
 public:
  Stream(int device, StreamKind kind) : device(device), kind(kind) {}

  const int device;
  const StreamKind kind;
  std::condition_variable work;
  std::deque<Operation> queue;
  uint64_t submitted = 0;
  uint64_t finished = 0;
  bool closing = false;
  std::thread thread;

  bool idle() const { return finished == submitted; }
};

namespace {

// Signals belong to the host program's threads: a handler must not find itself on a
// thread of the simulator. Those that say what the thread itself did are let through,
// since a handler is all that tells of a crash.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int own : {SIGABRT, SIGBUS, SIGFPE, SIGILL, SIGSEGV, SIGSYS, SIGTRAP}) {
      sigdelset(&all, own);
    }
    pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

 private:
  sigset_t before_;
};

bool is_reached(const Point& point) {
  return point.stream == nullptr || point.stream->finished >= point.sequence;
}

// Does work on `stream` wait for what was submitted to `other`?
bool ordered_after(const Stream& stream, const Stream& other) {
  if (stream.device != other.device) return false;
  return (stream.kind == StreamKind::kNull && other.kind == StreamKind::kBlocking) ||
         (stream.kind == StreamKind::kBlocking && other.kind == StreamKind::kNull);
}

}  // namespace

Scheduler::~Scheduler() {
  while (!streams_.empty()) destroy(streams_.back());
}

StreamRef Scheduler::create(int device, StreamKind kind) {
  std::lock_guard lock(mutex_);
  return add(device, kind);
}

StreamRef Scheduler::null_stream(int device) {
  std::lock_guard lock(mutex_);
  for (const StreamRef& stream : streams_) {
    if (stream->device == device && stream->kind == StreamKind::kNull) return stream;
  }
  return add(device, StreamKind::kNull);
}

StreamRef Scheduler::add(int device, StreamKind kind) {
  auto stream = std::make_shared<Stream>(device, kind);
  streams_.push_back(stream);
  try {
    SignalsBlocked blocked;
    stream->thread = std::thread([this, raw = stream.get()] { serve(*raw); });
  } catch (...) {
    streams_.pop_back();
    throw;
  }
  return stream;
}

void Scheduler::destroy(const StreamRef& stream) {
  const StreamRef kept = stream;
  {
    std::unique_lock lock(mutex_);
    kept->closing = true;
    kept->work.notify_all();
  }
  kept->thread.join();
  std::lock_guard lock(mutex_);
  streams_.erase(std::find(streams_.begin(), streams_.end(), kept));
}

Point Scheduler::submit(const StreamRef& stream, Operation operation) {
  std::lock_guard lock(mutex_);
  for (const StreamRef& other : streams_) {
    if (ordered_after(*stream, *other) && !other->idle()) {
      operation.after.push_back({other, other->submitted});
    }
  }
  operation.skipped = skipped_;
  stream->queue.push_back(std::move(operation));
  stream->work.notify_all();
  return {stream, ++stream->submitted};
}

void Scheduler::serve(Stream& stream) {
  std::unique_lock lock(mutex_);
  for (;;) {
    stream.work.wait(lock, [&] { return stream.closing || !stream.queue.empty(); });
    if (stream.queue.empty()) return;
    {
      Operation operation = std::move(stream.queue.front());
      stream.queue.pop_front();
      wait_all(lock, operation.after);
      progress_.wait_for(lock, operation.latency, [&] {
        return abandoned_.load() || skipped_ != operation.skipped;
      });
      ++running_;
      lock.unlock();
      if (operation.run) operation.run(abandoned_);
      lock.lock();
      --running_;
    }
    ++stream.finished;
    progress_.notify_all();
  }
}

void Scheduler::wait_all(std::unique_lock<std::mutex>& lock,
                         const std::vector<Point>& points) const {
  progress_.wait(lock,
                 [&] { return std::all_of(points.begin(), points.end(), is_reached); });
}

bool Scheduler::reached(const Point& point) const {
  std::lock_guard lock(mutex_);
  return is_reached(point);
}

void Scheduler::wait(const Point& point) const {
  std::unique_lock lock(mutex_);
  wait_all(lock, {point});
}

std::vector<Point> Scheduler::last_points(const Stream& stream) const {
  std::vector<Point> points;
  for (const StreamRef& other : streams_) {
    const bool joins =
        stream.kind == StreamKind::kNull && ordered_after(stream, *other);
    if (other.get() == &stream || joins) points.push_back({other, other->submitted});
  }
  return points;
}

bool Scheduler::idle(const StreamRef& stream) const {
  std::lock_guard lock(mutex_);
  const std::vector<Point> points = last_points(*stream);
  return std::all_of(points.begin(), points.end(), is_reached);
}

void Scheduler::drain(const StreamRef& stream) const {
  std::unique_lock lock(mutex_);
  wait_all(lock, last_points(*stream));
}

template <typename Predicate>
void Scheduler::drain_if(Predicate predicate) const {
  std::unique_lock lock(mutex_);
  std::vector<Point> points;
  for (const StreamRef& stream : streams_) {
    if (predicate(*stream)) points.push_back({stream, stream->submitted});
  }
  wait_all(lock, points);
}

void Scheduler::drain_device(int device) const {
  drain_if([device](const Stream& stream) { return stream.device == device; });
}

void Scheduler::drain_all() const {
  drain_if([](const Stream&) { return true; });
}

void Scheduler::skip_latency() {
  std::lock_guard lock(mutex_);
  ++skipped_;
  progress_.notify_all();
}

void Scheduler::abandon() {
  std::unique_lock lock(mutex_);
  abandoned_ = true;
  progress_.notify_all();
  progress_.wait(lock, [&] { return running_ == 0; });
}

}  // namespace hipsim
