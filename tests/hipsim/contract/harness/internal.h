// SPDX-License-Identifier: Apache-2.0
//
// What the parts of the harness share; cases need a vendor's contract.h alone.
#pragma once

#include <spawn.h>

#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <vector>

#include "bridge/hipsim_control.h"
#include "harness/harness.h"

namespace contract {

// The simulator's controls; null on a real runtime.
struct Simulator {
  decltype(&hipsim_reset) reset = nullptr;
  decltype(&hipsim_set_switch) set_switch = nullptr;
  decltype(&hipsim_stats) stats = nullptr;
  decltype(&hipsim_profile_name) profile_name = nullptr;
  decltype(&hipsim_profile) profile = nullptr;
};

const Simulator& simulator();

// Empty on a real runtime.
std::map<std::string, uint64_t> all_stats();

std::vector<Case>& cases();
std::vector<Role>& roles();

// --- the case that runs --------------------------------------------------------------

void start_case();
std::string take_failures();
std::set<std::string> called_functions();
int live_holders();

std::vector<std::string> split(const std::string& text, const char* separators);

// --- processes -----------------------------------------------------------------------

// Where a process that this program starts tells how it gets on.
constexpr int kReportDescriptor = 3;

class Pipe {
 public:
  Pipe();
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe();

  int out() const { return ends_[0]; }
  int in() const { return ends_[1]; }

  // The caller closes it.
  int release_out();
  int release_in();

 private:
  int ends_[2] = {-1, -1};
};

// This program again. `redirections` are descriptors of this process, and what they are
// in the new one.
pid_t start(std::vector<std::string> words, std::vector<std::string> environment,
            const std::vector<std::pair<int, int>>& redirections);

// Kills it when it does not end in time.
Ending await(pid_t process, Seconds patience);

// False at the end of the input or when nothing came in time.
bool read_some(int descriptor, std::string* text, Seconds patience);
bool write_all(int descriptor, const std::string& text);

void forbid_core_files();

}  // namespace contract
