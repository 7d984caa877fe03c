// SPDX-License-Identifier: Apache-2.0
#include "engine/call_log.h"

#include <algorithm>
#include <utility>

namespace hipsim {

CallLog::CallLog(std::vector<const char*> names)
    : names_(std::move(names)), calls_(names_.size()) {}

Error CallLog::enter(size_t index) {
  Call& call = calls_[index];
  ++call.count;
  const auto due = std::find_if(call.faults.begin(), call.faults.end(),
                                [&](const Fault& f) { return f.at == call.count; });
  return due == call.faults.end() ? Error::kSuccess : due->error;
}

bool CallLog::fail(std::string_view name, uint64_t nth, Error error) {
  const auto it = std::find(names_.begin(), names_.end(), name);
  if (it == names_.end() || nth == 0) return false;
  Call& call = calls_[it - names_.begin()];
  call.faults.push_back({call.count + nth, error});
  return true;
}

void CallLog::reset() { std::fill(calls_.begin(), calls_.end(), Call{}); }

uint64_t CallLog::pending() const {
  uint64_t pending = 0;
  for (const Call& call : calls_) {
    for (const Fault& fault : call.faults) pending += fault.at > call.count;
  }
  return pending;
}

}  // namespace hipsim
