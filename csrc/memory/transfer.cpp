// SPDX-License-Identifier: Apache-2.0
#include "memory/transfer.h"

#include <algorithm>
#include <cstdio>
#include <map>
#include <set>

#include "memory/host_arena.h"
#include "memory/leftovers.h"

namespace memory {
namespace {

using gpu::Status;
using gpu::Stream;

enum class Kind { kCopyOut, kCopyIn, kZero };

Status queue(gpu::Driver& driver, Kind kind, const Span& part, Stream stream) {
  const gpu::Address address = part.range->address() + part.offset;
  switch (kind) {
    case Kind::kCopyOut:
      return driver.copy_to_host(part.host, address, part.bytes, stream);
    case Kind::kCopyIn:
      return driver.copy_to_device(address, part.host, part.bytes, stream);
    case Kind::kZero:
      return driver.zero(address, part.bytes, stream);
  }
  return {};
}

// What of a span one call may move, from its beginning on.
Span first_part(Kind kind, const Span& span) {
  Span part = span;
  part.bytes = std::min(span.bytes, span.range->chunk_end(span.offset) - span.offset);
  if (kind != Kind::kZero) {
    const char* const end = HostArena::copy_end(part.host, part.host + part.bytes);
    part.bytes = static_cast<size_t>(end - part.host);
  }
  return part;
}

// Its end is the end of all that was queued.
class Transfer {
 public:
  explicit Transfer(gpu::Driver& driver) : driver_(driver), scope_(driver) {}
  ~Transfer();
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  void start(const std::set<int>& devices);
  void add(Kind kind, const std::vector<Span>& spans);
  void finish();

 private:
  void check(Status status, int device, std::optional<size_t> bytes = {}) {
    if (!status.ok()) gpu::throw_if(driver_.failure(status, {device, bytes}));
  }

  Status wait(int device, Stream stream);

  gpu::Driver& driver_;
  gpu::DeviceScope scope_;
  std::map<int, Stream> streams_;
  bool is_finished_ = false;
};

void Transfer::start(const std::set<int>& devices) {
  for (const int device : devices) {
    check(scope_.use(device), device);
    check(driver_.synchronize_device(), device);
  }
  for (const int device : devices) {
    check(scope_.use(device), device);
    Stream stream = nullptr;
    check(driver_.create_stream(&stream), device);
    streams_[device] = stream;
  }
}

void Transfer::add(Kind kind, const std::vector<Span>& spans) {
  for (Span left : spans) {
    const int device = left.range->device();
    check(scope_.use(device), device);
    while (left.bytes > 0) {
      const Span part = first_part(kind, left);
      check(queue(driver_, kind, part, streams_.at(device)), device, part.bytes);
      left.offset += part.bytes;
      left.bytes -= part.bytes;
      if (kind != Kind::kZero) left.host += part.bytes;
    }
  }
}

// Whoever is told that a wait has failed may take the memory away, so another way to
// wait is tried.
Status Transfer::wait(int device, Stream stream) {
  if (const Status entered = scope_.use(device); !entered.ok()) {
    if (!scope_.use(device).ok()) return entered;
  }
  const Status waited = driver_.synchronize_stream(stream);
  if (!waited.ok() && !driver_.synchronize_device().ok()) {
    (void)driver_.synchronize_stream(stream);
  }
  return waited;
}

void Transfer::finish() {
  is_finished_ = true;
  Failure first;
  for (const auto& [device, stream] : streams_) {
    if (const Status waited = wait(device, stream); !waited.ok()) {
      gpu::keep_first(first, driver_.failure(waited, {device, {}}));
    }
  }
  gpu::throw_if(first);
}

Transfer::~Transfer() {
  for (const auto& [device, stream] : streams_) {
    if (!is_finished_) (void)wait(device, stream);
    const Status entered = scope_.use(device);
    const Status gone = entered.ok() ? driver_.destroy_stream(stream) : entered;
    if (gone.ok()) continue;
    std::fprintf(stderr,
                 "cumem: %s failed with error %d: a stream of device %d is left\n",
                 gone.call, gone.error, device);
    Leftovers::of_process().add(
        [&driver = driver_, device = device, stream = stream](gpu::DeviceScope& scope) {
          return scope.use(device).ok() && driver.destroy_stream(stream).ok();
        });
  }
}

void add_devices(std::set<int>& devices, const std::vector<Span>& spans) {
  for (const Span& span : spans) devices.insert(span.range->device());
}

}  // namespace

void copy_out(gpu::Driver& driver, const std::vector<Span>& copies) {
  std::set<int> devices;
  add_devices(devices, copies);
  Transfer transfer(driver);
  transfer.start(devices);
  transfer.add(Kind::kCopyOut, copies);
  transfer.finish();
}

void copy_in(gpu::Driver& driver, const std::vector<Span>& copies,
             const std::vector<Span>& zeros) {
  std::set<int> devices;
  add_devices(devices, copies);
  add_devices(devices, zeros);
  Transfer transfer(driver);
  transfer.start(devices);
  transfer.add(Kind::kZero, zeros);
  transfer.add(Kind::kCopyIn, copies);
  transfer.finish();
}

}  // namespace memory
