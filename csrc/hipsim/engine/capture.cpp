// SPDX-License-Identifier: Apache-2.0
#include "engine/capture.h"

#include <algorithm>
#include <utility>

namespace hipsim {

Captures::Table::iterator Captures::of(Handle stream) {
  return std::find_if(captures_.begin(), captures_.end(), [&](const auto& each) {
    return each.second.members.count(stream) != 0;
  });
}

Captures::Table::const_iterator Captures::of(Handle stream) const {
  return const_cast<Captures*>(this)->of(stream);
}

const Captures::Capture* Captures::active(uint64_t capture) const {
  const auto it = captures_.find(capture);
  return it != captures_.end() && it->second.valid ? &it->second : nullptr;
}

Error Captures::begin(Handle stream, bool blocking, CaptureMode mode,
                      std::thread::id thread) {
  if (of(stream) != captures_.end()) return Error::kIllegalState;
  unusable_.erase(stream);
  Capture& capture = captures_[++last_id_];
  capture.mode = mode;
  capture.origin = stream;
  capture.thread = thread;
  capture.members[stream] = {blocking, {}};
  return Error::kSuccess;
}

Error Captures::end(Handle stream, std::thread::id thread, bool stays_invalid,
                    Graph* graph) {
  const auto it = of(stream);
  if (it == captures_.end()) {
    return unusable_.count(stream) != 0 ? Error::kCaptureInvalidated
                                        : Error::kIllegalState;
  }
  Capture& capture = it->second;
  if (capture.origin != stream) return Error::kCaptureUnmatched;
  if (capture.mode != CaptureMode::kRelaxed && capture.thread != thread) {
    return Error::kCaptureWrongThread;
  }
  Error result = Error::kSuccess;
  if (!capture.valid) {
    result = Error::kCaptureInvalidated;
    if (stays_invalid) {
      for (const auto& [member, state] : capture.members) unusable_.insert(member);
    }
  } else if (!joined(capture)) {
    result = Error::kCaptureUnjoined;
  } else {
    *graph = std::move(capture.graph);
  }
  captures_.erase(it);
  return result;
}

bool Captures::joined(const Capture& capture) {
  std::set<size_t> reached = capture.members.at(capture.origin).frontier;
  for (size_t node = capture.graph.nodes.size(); node-- > 0;) {
    if (reached.count(node) == 0) return false;
    const std::set<size_t>& after = capture.graph.nodes[node].after;
    reached.insert(after.begin(), after.end());
  }
  return true;
}

void Captures::forget(Handle stream) {
  unusable_.erase(stream);
  const auto it = of(stream);
  if (it == captures_.end()) return;
  if (it->second.origin == stream) {
    captures_.erase(it);
  } else {
    it->second.members.erase(stream);
  }
}

CaptureStatus Captures::status(Handle stream) const {
  const auto it = of(stream);
  if (it != captures_.end()) {
    return it->second.valid ? CaptureStatus::kActive : CaptureStatus::kInvalidated;
  }
  return unusable_.count(stream) != 0 ? CaptureStatus::kInvalidated
                                      : CaptureStatus::kNone;
}

uint64_t Captures::id(Handle stream) const {
  const auto it = of(stream);
  return it == captures_.end() ? 0 : it->first;
}

bool Captures::any_active() const {
  return std::any_of(captures_.begin(), captures_.end(),
                     [](const auto& each) { return each.second.valid; });
}

bool Captures::any_blocking() const {
  return std::any_of(captures_.begin(), captures_.end(), [](const auto& each) {
    const Capture& capture = each.second;
    return capture.valid &&
           std::any_of(capture.members.begin(), capture.members.end(),
                       [](const auto& member) { return member.second.blocking; });
  });
}

void Captures::add(Handle stream, Work work) {
  Capture& capture = of(stream)->second;
  std::set<size_t>& frontier = capture.members.at(stream).frontier;
  capture.graph.nodes.push_back({std::exchange(frontier, {}), std::move(work)});
  frontier.insert(capture.graph.nodes.size() - 1);
}

CapturedPoint Captures::point(Handle stream) const {
  const auto it = of(stream);
  return {it->first, it->second.members.at(stream).frontier};
}

Error Captures::join(Handle stream, bool blocking, const CapturedPoint& point) {
  if (active(point.capture) == nullptr) return Error::kCaptureInvalidated;
  const uint64_t current = id(stream);
  if (current != 0 && current != point.capture) {
    invalidate(current);
    invalidate(point.capture);
    return Error::kCaptureMerge;
  }
  Member& member = captures_.at(point.capture)
                       .members.try_emplace(stream, Member{blocking, {}})
                       .first->second;
  member.frontier.insert(point.nodes.begin(), point.nodes.end());
  return Error::kSuccess;
}

void Captures::invalidate(uint64_t capture) {
  const auto it = captures_.find(capture);
  if (it != captures_.end()) it->second.valid = false;
}

void Captures::reset() {
  invalidate_all();
  unusable_.clear();
}

void Captures::invalidate_all() {
  for (auto& [id, capture] : captures_) capture.valid = false;
}

bool Captures::has_one_of_those(const Capture& capture, const Meant& meant) {
  return std::any_of(
      capture.members.begin(), capture.members.end(),
      [&](const auto& member) { return meant(member.first, member.second.blocking); });
}

bool Captures::any_of_those(const Meant& meant) const {
  return std::any_of(captures_.begin(), captures_.end(), [&](const auto& each) {
    return has_one_of_those(each.second, meant);
  });
}

bool Captures::invalidate_those(const Meant& meant) {
  bool found = false;
  for (auto& [id, capture] : captures_) {
    if (!has_one_of_those(capture, meant)) continue;
    capture.valid = false;
    found = true;
  }
  return found;
}

Error Captures::forbid_unsafe_call(CaptureMode thread_mode, std::thread::id thread,
                                   bool until_they_end) {
  if (thread_mode == CaptureMode::kRelaxed) return Error::kSuccess;
  bool forbidden = false;
  for (auto& [id, capture] : captures_) {
    if (!capture.valid && !until_they_end) continue;
    const bool own = capture.thread == thread && capture.mode != CaptureMode::kRelaxed;
    const bool global =
        thread_mode == CaptureMode::kGlobal && capture.mode == CaptureMode::kGlobal;
    if (!own && !global) continue;
    capture.valid = false;
    forbidden = true;
  }
  return forbidden ? Error::kCaptureUnsupported : Error::kSuccess;
}

}  // namespace hipsim
