// SPDX-License-Identifier: Apache-2.0
#include "engine/profile.h"

namespace hipsim {
namespace {

constexpr int version_number(int major, int minor, int patch) {
  return major * 10'000'000 + minor * 100'000 + patch;
}

// RS#n is a pull request of ROCm/rocm-systems.
//
// The patch number of the HIP 7.2 that ROCm 7.2.3 ships is not established here,
// so it is 0. 7.15.26333 is the version of the published Python bindings, and
// 7.16.26361 that of the runtime in vLLM's ROCm image.
//
// The limit of 8192 came with 7.14: a descriptor of a blit batch has 32 bytes and
// the buffer 256 KiB. RS#9915 fixes it in a release that is not established. The
// row of 7.16 keeps the limit, because code that passes with it passes without.
const std::vector<Profile> kProfiles = {
    // name, version, loop, attributes, extended flags, blit batch
    {"7.2.3", version_number(7, 2, 0), true, false, false, 0},
    {"7.15", version_number(7, 15, 26333), false, true, true, 8192},
    {"7.16", version_number(7, 16, 26361), false, true, true, 8192},
};

}  // namespace

const std::vector<Profile>& profiles() { return kProfiles; }

const Profile* find_profile(std::string_view name) {
  for (const Profile& profile : kProfiles) {
    if (name == profile.name) return &profile;
  }
  return nullptr;
}

const Profile& default_profile() { return kProfiles.back(); }

}  // namespace hipsim
