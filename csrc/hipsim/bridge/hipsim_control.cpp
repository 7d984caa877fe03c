// SPDX-License-Identifier: Apache-2.0
#include "bridge/hipsim_control.h"

#include <algorithm>
#include <string>
#include <string_view>

#include "bridge/export.h"
#include "bridge/instance.h"

using hipsim::bridge;
using hipsim::Profile;
using hipsim::runtime;

namespace {

constexpr int kAccepted = 0;
constexpr int kNotAllowed = 1;

// The releases of the driver that this library stands in for.
std::vector<const Profile*> own_profiles() {
  std::vector<const Profile*> own;
  for (const Profile& profile : hipsim::profiles()) {
    if (profile.cuda == bridge().cuda) own.push_back(&profile);
  }
  return own;
}

}  // namespace

HIPSIM_EXPORT const char* hipsim_environment_error() {
  runtime();
  const std::string& error = hipsim::environment_error();
  return error.empty() ? nullptr : error.c_str();
}

HIPSIM_EXPORT const char* hipsim_profile_name(size_t index) {
  const std::vector<const Profile*> profiles = own_profiles();
  return index < profiles.size() ? profiles[index]->name : nullptr;
}

HIPSIM_EXPORT const char* hipsim_profile() { return runtime().profile().name; }

HIPSIM_EXPORT int hipsim_reset(const char* profile) {
  const Profile* found = nullptr;
  if (profile != nullptr) {
    found = hipsim::find_profile(profile);
    if (found == nullptr || found->cuda != bridge().cuda) return kNotAllowed;
  }
  hipsim::start_over(found);
  bridge().forget_last_error();
  return kAccepted;
}

HIPSIM_EXPORT const char* hipsim_call_name(size_t index) {
  return index < bridge().calls.size() ? bridge().calls[index] : nullptr;
}

HIPSIM_EXPORT int hipsim_fail(const char* call, uint64_t nth, int error) {
  if (call == nullptr || error == 0) return kNotAllowed;
  const auto failure = static_cast<hipsim::Error>(error);
  return runtime().fail(call, nth, failure) ? kAccepted : kNotAllowed;
}

HIPSIM_EXPORT int hipsim_set_switch(const char* name, int64_t value) {
  return name != nullptr && runtime().set_switch(name, value) ? kAccepted : kNotAllowed;
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
