// SPDX-License-Identifier: Apache-2.0
#include "engine/profile.h"

namespace hipsim {
namespace {

constexpr size_t kLeastGranularity = size_t{4} << 10;
constexpr size_t kLargeGranularity = size_t{2} << 20;

constexpr int hip_version(int major, int minor, int patch) {
  return major * 10'000'000 + minor * 100'000 + patch;
}

constexpr int cuda_version(int major, int minor) { return major * 1000 + minor * 10; }

// RS#n is a pull request of ROCm/rocm-systems.
//
// 7.1.25424 is the version of the headers that the triton wheel has, 7.15.26333 that
// of the published Python bindings, 7.16.26361 that of the runtime in vLLM's ROCm
// image; the patch numbers of the others are not established here, so they are 0.
Profile hip_7_1() {
  Profile profile;
  profile.name = "7.1";
  profile.version = hip_version(7, 1, 25424);
  profile.batch_is_a_loop = true;
  profile.batch_attributes = BatchAttributes::kRefused;
  profile.granularity = kLeastGranularity;
  profile.recommended_granularity = kLeastGranularity;
  profile.map_failure_is_silent = true;
  profile.retain_takes_reference = false;
  profile.host_access = false;
  profile.unmap_waits = UnmapWaits::kNullStream;
  profile.legacy_work_breaks_captures = true;
  profile.invalid_capture_ends = false;
  profile.ipc_refuses_virtual = false;
  return profile;
}

// RS#1620: host access, and map failures are reported. legacy-rocm-build#6021: memory
// stays with the address range.
Profile hip_7_2_3() {
  Profile profile = hip_7_1();
  profile.name = "7.2.3";
  profile.version = hip_version(7, 2, 0);
  profile.map_failure_is_silent = false;
  profile.host_access = true;
  profile.unmap_keeps_memory = true;
  return profile;
}

// When work on the legacy stream stopped to break captures is not established: after
// 7.1, and before 7.13.
Profile hip_7_12() {
  Profile profile = hip_7_2_3();
  profile.name = "7.12";
  profile.version = hip_version(7, 12, 0);
  profile.batch_is_a_loop = false;
  profile.batch_attributes = BatchAttributes::kChecked;
  profile.recommended_granularity = kLargeGranularity;
  profile.retain_takes_reference = true;
  return profile;
}

// RS#4363: memory comes back at unmap.
Profile hip_7_13() {
  Profile profile = hip_7_12();
  profile.name = "7.13";
  profile.version = hip_version(7, 13, 0);
  profile.batch_attributes = BatchAttributes::kHonoured;
  profile.unmap_keeps_memory = false;
  profile.legacy_work_breaks_captures = false;
  profile.ipc_refuses_virtual = true;
  return profile;
}

// Since 7.14 a descriptor of a blit batch has 32 bytes and its buffer 256 KiB, hence
// 8192. RS#9915 fixes it in a release that is not established; 7.16 keeps the limit,
// because code that passes with it passes without. RS#6982: unmap waits for devices.
Profile hip_7_15() {
  Profile profile = hip_7_13();
  profile.name = "7.15";
  profile.version = hip_version(7, 15, 26333);
  profile.max_blit_batch = 8192;
  profile.unmap_waits = UnmapWaits::kDevices;
  profile.invalid_capture_ends = true;
  return profile;
}

// kSdmaRectRowSerializeLimit of clr's rocblit.cpp, 2026. The release that it comes with
// is not established: the newest has it, because code that passes with it passes
// without.
Profile hip_7_16() {
  Profile profile = hip_7_15();
  profile.name = "7.16";
  profile.version = hip_version(7, 16, 26361);
  profile.max_row_copies = 256;
  return profile;
}

// As driver 580.159.04 behaves on an H200.
Profile cuda_13_0() {
  Profile profile;
  profile.name = "cuda-13.0";
  profile.version = cuda_version(13, 0);
  profile.cuda = true;
  profile.batch_is_a_loop = true;
  profile.granularity = kLargeGranularity;
  profile.recommended_granularity = kLargeGranularity;
  profile.unmap_waits = UnmapWaits::kNothing;
  profile.copies_cross = Crossing::kReservations;
  return profile;
}

const std::vector<Profile> kProfiles = {hip_7_1(),  hip_7_2_3(), hip_7_12(), hip_7_13(),
                                        hip_7_15(), hip_7_16(),  cuda_13_0()};

}  // namespace

const std::vector<Profile>& profiles() { return kProfiles; }

const Profile* find_profile(std::string_view name) {
  for (const Profile& profile : kProfiles) {
    if (name == profile.name) return &profile;
  }
  return nullptr;
}

const Profile& default_profile(bool cuda) {
  const Profile* newest = nullptr;
  for (const Profile& profile : kProfiles) {
    if (profile.cuda == cuda) newest = &profile;
  }
  return *newest;
}

}  // namespace hipsim
