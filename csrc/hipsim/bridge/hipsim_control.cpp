// SPDX-License-Identifier: Apache-2.0
#include "bridge/hipsim_control.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>

#include "bridge/instance.h"

using hipsim::Profile;
using hipsim::runtime;

namespace {

constexpr int kAccepted = 0;
constexpr int kNotAllowed = 1;

#define HIPSIM_NAME(name) #name,
constexpr const char* kCallNames[] = {HIPSIM_CALLS(HIPSIM_NAME)};
#undef HIPSIM_NAME

}  // namespace

HIPSIM_EXPORT const char* hipsim_environment_error() {
  runtime();
  const std::string& error = hipsim::environment_error();
  return error.empty() ? nullptr : error.c_str();
}

HIPSIM_EXPORT const char* hipsim_profile_name(size_t index) {
  const auto& profiles = hipsim::profiles();
  return index < profiles.size() ? profiles[index].name : nullptr;
}

HIPSIM_EXPORT const char* hipsim_profile() { return runtime().profile().name; }

HIPSIM_EXPORT int hipsim_reset(const char* profile) {
  const Profile* found = nullptr;
  if (profile != nullptr) {
    found = hipsim::find_profile(profile);
    if (found == nullptr) return kNotAllowed;
  }
  runtime().reset(found);
  hipsim::set_last_error(hipSuccess);
  return kAccepted;
}

HIPSIM_EXPORT const char* hipsim_call_name(size_t index) {
  return index < std::size(kCallNames) ? kCallNames[index] : nullptr;
}

HIPSIM_EXPORT int hipsim_fail(const char* call, uint64_t nth, int error) {
  if (call == nullptr || error == hipSuccess) return kNotAllowed;
  const auto failure = static_cast<hipsim::Error>(error);
  return runtime().fail(call, nth, failure) ? kAccepted : kNotAllowed;
}

HIPSIM_EXPORT int hipsim_set_switch(const char* name, int64_t value) {
  const std::string_view wanted = name == nullptr ? "" : name;
  if (wanted == "corrupt_loads") {
    runtime().corrupt_loads(value != 0);
  } else if (wanted == "copy_latency_us" && value >= 0) {
    runtime().copy_latency(std::chrono::microseconds(value));
  } else {
    return kNotAllowed;
  }
  return kAccepted;
}

HIPSIM_EXPORT size_t hipsim_stats(struct hipsim_stat* stats, size_t capacity) {
  const auto current = runtime().stats();
  const size_t filled = std::min(capacity, current.size());
  for (size_t i = 0; i < filled; ++i) {
    const auto& [name, value] = current[i];
    stats[i].name[name.copy(stats[i].name, sizeof(stats[i].name) - 1)] = '\0';
    stats[i].value = value;
  }
  return current.size();
}

HIPSIM_EXPORT void hipsim_abandon() { runtime().abandon(); }
