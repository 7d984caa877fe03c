// SPDX-License-Identifier: Apache-2.0
#include "bridge/instance.h"

#include <pthread.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace hipsim {
namespace {

using Setting = std::pair<std::string, int64_t>;

// A switch that HIPSIM_SWITCHES can set: by one of its words, which stand for 0, 1,
// ..., or by a number up to `most` where it has none. host_reads has its own variable.
struct Switch {
  const char* name;
  std::vector<const char*> words;
  int64_t most = 0;

  std::string allowed() const {
    if (words.empty()) return "a number from 0 to " + std::to_string(most);
    std::string text;
    for (const char* word : words) text += (text.empty() ? "" : " or ") + quoted(word);
    return text;
  }

 private:
  static std::string quoted(const char* word) { return std::string("'") + word + "'"; }
};

const std::vector<Switch>& switches() {
  static constexpr int64_t kHourUs = 3600 * int64_t{1000000};
  static auto* const all = new std::vector<Switch>{
      {"corrupt_loads", {"0", "1"}},
      {"copy_latency_us", {}, kHourUs},
      {"fill_latency_us", {}, kHourUs},
      {"host_device_pointers", {"0", "1"}},
      {"one_mapping_copies", {"0", "1"}},
      {"ignore_address_hints", {"0", "1"}},
      {"no_virtual_memory", {"0", "1"}},
      {"small_bar", {"0", "1"}},
      {"max_registration_bytes", {}, std::numeric_limits<int64_t>::max()},
      {"max_locked_bytes", {}, std::numeric_limits<int64_t>::max()},
      {"locked_memory", {"unlimited", "rlimit"}},
      {"stale_memory", {"clean", "as_left", "poisoned"}},
  };
  return *all;
}

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
    read_switches();
    read_engines();
    return options_;
  }
  const std::string& error() const { return error_; }
  const std::vector<Setting>& settings() const { return settings_; }

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

  void read_switches() {
    const char* text = environment("HIPSIM_SWITCHES");
    if (text == nullptr) return;
    for (std::string_view rest = text; !rest.empty();) {
      const size_t comma = rest.find(',');
      read_switch(rest.substr(0, comma), text);
      rest.remove_prefix(comma == rest.npos ? rest.size() : comma + 1);
    }
  }

  void read_switch(std::string_view setting, const char* text) {
    const size_t equals = setting.find('=');
    const std::string name(setting.substr(0, equals));
    std::string names;
    for (const Switch& each : switches()) {
      names += std::string(" ") + each.name;
      if (name != each.name) continue;
      const std::string value(equals == setting.npos ? "" : setting.substr(equals + 1));
      if (const int64_t number = read_value(each, value); number >= 0) {
        settings_.emplace_back(name, number);
      } else {
        reject("HIPSIM_SWITCHES", text,
               "a list of name=value, where " + name + " is " + each.allowed());
      }
      return;
    }
    reject("HIPSIM_SWITCHES", text,
           "a list of name=value with commas between them, and these names:" + names);
  }

  // Negative where it is not allowed.
  static int64_t read_value(const Switch& each, const std::string& value) {
    for (size_t i = 0; i < each.words.size(); ++i) {
      if (value == each.words[i]) return static_cast<int64_t>(i);
    }
    unsigned long long number = 0;
    if (!each.words.empty() || !parse_number(value.c_str(), &number)) return -1;
    return number <= static_cast<unsigned long long>(each.most)
               ? static_cast<int64_t>(number)
               : -1;
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
  std::vector<Setting> settings_;
  std::string error_;
};

std::vector<Setting>& stored_settings() {
  static auto* const settings = new std::vector<Setting>;
  return *settings;
}

void apply_settings(Runtime& runtime) {
  for (const auto& [name, value] : stored_settings()) runtime.set_switch(name, value);
}

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
  stored_settings() = environment.settings();
  apply_settings(*made);
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

void start_over(const Profile* profile) {
  runtime().reset(profile);
  apply_settings(runtime());
}

const std::string& environment_error() { return stored_environment_error(); }

}  // namespace hipsim
