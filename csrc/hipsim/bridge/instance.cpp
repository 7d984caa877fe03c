// SPDX-License-Identifier: Apache-2.0
#include "bridge/instance.h"

#include <pthread.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <string>

namespace hipsim {
namespace {

// Null when it is not set or empty, as for the ROCm variables.
const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

bool parse_number(const char* text, unsigned long long* number) {
  char* end = nullptr;
  errno = 0;
  *number = std::strtoull(text, &end, 10);
  return *text >= '0' && *text <= '9' && *end == '\0' && errno == 0;
}

class EnvironmentReader {
 public:
  Options read() {
    options_.profile = &default_profile(bridge().cuda);
    read_profile();
    read_vram();
    read_host_reads();
    read_engines();
    return options_;
  }
  const std::string& error() const { return error_; }

 private:
  void read_profile() {
    const char* name = environment("HIPSIM_PROFILE");
    if (name == nullptr) return;
    const Profile* profile = find_profile(name);
    if (profile != nullptr && profile->cuda == bridge().cuda) {
      options_.profile = profile;
      return;
    }
    // A process may have both drivers, and the variable names a release of one.
    if (profile != nullptr && bridge().cuda) return;
    std::string names;
    for (const Profile& each : profiles()) {
      if (each.cuda == bridge().cuda) names += std::string(" ") + each.name;
    }
    reject("HIPSIM_PROFILE", name, "one of" + names);
  }

  void read_vram() {
    const char* text = environment("HIPSIM_VRAM_BYTES");
    unsigned long long bytes = 0;
    if (text == nullptr) return;
    if (!parse_number(text, &bytes) || bytes < kLeastVram || bytes > kMostVram) {
      reject("HIPSIM_VRAM_BYTES", text, "a number of bytes from 1 MiB to 1 TiB");
      return;
    }
    options_.vram_bytes = bytes;
  }

  void read_host_reads() {
    const char* text = environment("HIPSIM_HOST_READS");
    if (text == nullptr) return;
    const std::string answer = text;
    options_.host_reads = answer == "allow";
    if (answer != "allow" && answer != "fault") {
      reject("HIPSIM_HOST_READS", text, "'fault' or 'allow'");
    }
  }

  void read_engines() {
    const char* size = environment("GPU_FORCE_BLIT_COPY_SIZE");
    unsigned long long kib = 0;
    if (size != nullptr && parse_number(size, &kib) && kib <= kMostVram / 1024) {
      options_.engines.blit_bytes = kib * 1024;
    }
    const char* sdma = environment("HSA_ENABLE_SDMA");
    options_.engines.sdma = sdma == nullptr || std::string(sdma) != "0";
  }

  void reject(const char* name, const char* value, const std::string& allowed) {
    error_ = std::string(name) + " is '" + value + "'; it must be " + allowed;
  }

  static constexpr unsigned long long kLeastVram = 1ull << 20;
  static constexpr unsigned long long kMostVram = 1ull << 40;

  Options options_;
  std::string error_;
};

std::string& stored_environment_error() {
  static auto* const error = new std::string;
  return *error;
}

Runtime* make_runtime() {
  EnvironmentReader environment;
  const Options options = environment.read();
  auto* made = new Runtime(options, bridge().calls);
  if (!environment.error().empty()) {
    std::fprintf(stderr, "hipsim: no device: %s\n", environment.error().c_str());
    stored_environment_error() = environment.error();
    made->refuse_calls(Error::kNoDevice);
  }
  pthread_atfork([] { runtime().before_fork(); },
                 [] { runtime().after_fork_in_parent(); },
                 [] { runtime().after_fork_in_child(); });
  std::atexit([] { runtime().abandon(); });
  return made;
}

}  // namespace

Runtime& runtime() {
  static Runtime* const instance = make_runtime();
  return *instance;
}

const std::string& environment_error() { return stored_environment_error(); }

}  // namespace hipsim
