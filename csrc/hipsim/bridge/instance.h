// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>
#include <vector>

#include "engine/runtime.h"

namespace hipsim {

// What differs between the libraries that are made of this engine. Each defines one.
struct Bridge {
  // The vendor's driver that it stands in for.
  bool cuda;

  // Every function that can fail: it is counted, and a test can make it fail.
  std::vector<const char*> calls;

  // Forgets the calling thread's last error, where there is one.
  void (*forget_last_error)();
};
const Bridge& bridge();

// The process's runtime, made at the first use from HIPSIM_PROFILE, HIPSIM_VRAM_BYTES,
// HIPSIM_HOST_READS, HIPSIM_SWITCHES and the variables of HIP and ROCr that choose a
// copy engine (GPU_FORCE_BLIT_COPY_SIZE in KiB, HSA_ENABLE_SDMA). A value that makes no
// sense is reported on stderr, and then there is no device. Never destroyed: streams
// may be running when the process ends.
Runtime& runtime();

// Resets it, and sets the switches of HIPSIM_SWITCHES again: they are where it starts.
void start_over(const Profile* profile);

// What was reported; empty when nothing was. Set once runtime() has returned.
const std::string& environment_error();

}  // namespace hipsim
