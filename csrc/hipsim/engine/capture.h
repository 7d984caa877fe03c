// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <vector>

#include "engine/error.h"
#include "engine/scheduler.h"
#include "engine/virtual_memory.h"

namespace hipsim {

// HIP's numbers for them, and CUDA's.
enum class CaptureMode : unsigned { kGlobal = 0, kThreadLocal = 1, kRelaxed = 2 };
enum class CaptureStatus : unsigned { kNone = 0, kActive = 1, kInvalidated = 2 };

// Work that is made anew each time it is launched, for the device that runs it.
using Work = std::function<Operation(int device)>;

struct GraphNode {
  std::set<size_t> after;
  Work work;
};

// Nodes come after those that they depend on, so that their order is one in which
// they may run.
struct Graph {
  std::vector<GraphNode> nodes;
};

// What an event recorded in a capture stands for: nodes of that capture.
struct CapturedPoint {
  uint64_t capture = 0;
  std::set<size_t> nodes;
};

// Note [Capture]
//
// A capture begins on one stream, its origin, and spreads to every stream that waits
// for an event of it. Each of those streams has a frontier: the nodes that its next
// node will depend on. A capture ends at its origin, when the origin depends on all
// there is.
//
// What is forbidden meanwhile invalidates captures: they take nothing more, every call
// on their streams fails, and their end yields no graph. Which captures suffer depends
// on the call: one that would synchronize with the legacy stream takes all of the
// process, an unsafe call those that its thread or the process began in a mode that
// forbids it.
//
// Not thread-safe: its owner locks.
class Captures {
 public:
  Error begin(Handle stream, bool blocking, CaptureMode mode, std::thread::id thread);

  // On success, or when the capture was invalidated, it is over; with
  // `stays_invalid` its streams remain unusable in the latter case.
  Error end(Handle stream, std::thread::id thread, bool stays_invalid, Graph* graph);

  // The stream goes; a capture that it began is over.
  void forget(Handle stream);

  CaptureStatus status(Handle stream) const;

  // The capture's name; 0 when the stream has none.
  uint64_t id(Handle stream) const;

  bool any_active() const;

  // Is a stream capturing that the legacy stream is ordered with?
  bool any_blocking() const;

  // A node of a capturing stream.
  void add(Handle stream, Work work);

  // What has been captured on the stream so far.
  CapturedPoint point(Handle stream) const;

  // Further work of the stream depends on the point, and the stream joins its capture
  // if it has none. kCaptureMerge when it has another; kCaptureInvalidated when the
  // point's capture is invalidated or over.
  Error join(Handle stream, bool blocking, const CapturedPoint& point);

  bool is_active(uint64_t capture) const { return active(capture) != nullptr; }
  void invalidate(uint64_t capture);
  void invalidate_all();

  // All captures are invalid, and streams that an ended one left unusable are not.
  void reset();

  // Is a stream of a capture meant, of one that is invalid too? Such a capture can be
  // invalidated.
  using Meant = std::function<bool(Handle stream, bool blocking)>;
  bool any_of_those(const Meant& meant) const;
  bool invalidate_those(const Meant& meant);

  // kCaptureUnsupported, and captures invalidated, if a call that is not safe during a
  // capture may not be made by the thread with this mode. With `until_they_end` a
  // capture that is invalid already forbids it too.
  Error forbid_unsafe_call(CaptureMode thread_mode, std::thread::id thread,
                           bool until_they_end = false);

  size_t live() const { return captures_.size(); }

 private:
  struct Member {
    bool blocking;
    std::set<size_t> frontier;
  };
  struct Capture {
    CaptureMode mode;
    Handle origin;
    std::thread::id thread;
    bool valid = true;
    Graph graph;
    std::map<Handle, Member> members;
  };
  using Table = std::map<uint64_t, Capture>;

  Table::iterator of(Handle stream);
  Table::const_iterator of(Handle stream) const;
  const Capture* active(uint64_t capture) const;

  static bool has_one_of_those(const Capture& capture, const Meant& meant);

  // Does the origin depend on every node?
  static bool joined(const Capture& capture);

  uint64_t last_id_ = 0;
  Table captures_;
  std::set<Handle> unusable_;
};

}  // namespace hipsim
