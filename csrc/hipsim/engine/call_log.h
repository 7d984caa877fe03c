// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "engine/error.h"

namespace hipsim {

// Counts the calls of each function and fails the ones that a test named. A bridge
// says which functions there are. Not thread-safe: its owner locks.
class CallLog {
 public:
  explicit CallLog(std::vector<const char*> names);

  // One call of function `index`: the error it shall return at once, or kSuccess.
  Error enter(size_t index);

  // The nth call from now on, 1 being the next, fails. False for a name that is not
  // a function's, and for nth 0.
  bool fail(std::string_view name, uint64_t nth, Error error);

  void reset();

  // Faults that were asked for and have not come yet.
  uint64_t pending() const;

  const std::vector<const char*>& names() const { return names_; }
  uint64_t count(size_t index) const { return calls_[index].count; }

 private:
  struct Fault {
    uint64_t at;
    Error error;
  };
  struct Call {
    uint64_t count = 0;
    std::vector<Fault> faults;
  };

  std::vector<const char*> names_;
  std::vector<Call> calls_;
};

}  // namespace hipsim
