// SPDX-License-Identifier: Apache-2.0
#include <unistd.h>

#include <algorithm>
#include <array>
#include <csignal>
#include <cstdio>
#include <exception>
#include <optional>

#include "harness/internal.h"

namespace contract {
namespace {

// The statistics that say what is live, and that a clean case leaves as they were.
constexpr std::array kLive = {
    "streams",
    "events",
    "device_allocations",
    "device_bytes",
    "registered_ranges",
    "registered_bytes",
    "host_allocations",
    "host_allocation_bytes",
    "reservations",
    "reserved_bytes",
    "handles",
    "handle_bytes",
    "mappings",
    "mapped_bytes",
    "captures",
    "graphs",
    "executables",
    "imports",
    "imported_bytes",
};

std::vector<std::string> profiles() {
  std::vector<std::string> names;
  while (const char* name = simulator().profile_name(names.size())) {
    names.emplace_back(name);
  }
  return names;
}

std::string full_name(const Case& each) {
  return std::string(each.group) + "." + each.name;
}

std::vector<std::string> covered(const Case& each) { return split(each.covers, ", "); }

// --- running a case ------------------------------------------------------------------

enum class Outcome { kPassed, kFailed, kSkipped };

void start_afresh(const std::optional<std::string>& profile) {
  if (simulated()) simulator().reset(profile ? profile->c_str() : nullptr);
  kVendor.begin();
  if (simulated()) simulator().reset(nullptr);  // the counters
  start_case();
}

void check_what_is_left(const std::map<std::string, uint64_t>& before,
                        int holders_before) {
  if (simulated()) {
    const auto after = all_stats();
    for (const std::string name : kLive) {
      const uint64_t now = after.at(name);
      const uint64_t then = before.at(name);
      if (now == then) continue;
      report({}, "leaves " + name + ": " + describe(now) + " live, " + describe(then) +
                     " before");
    }
  }
  if (live_holders() != holders_before) report({}, "leaves holders that own something");
}

void check_coverage(const Case& each) {
  auto stats = all_stats();
  const std::set<std::string> called = called_functions();
  for (const std::string& function : covered(each)) {
    if (stats["calls." + function] == 0 && called.count(function) == 0) {
      report({}, "covers " + function + " and did not call it");
    }
  }
}

std::optional<std::string> missing_function(const Case& each) {
  for (const std::string& function : covered(each)) {
    if (!exported(function.c_str())) return function;
  }
  return std::nullopt;
}

Outcome run_body(const Case& each, std::string* reason) {
  if (const auto function = missing_function(each)) {
    *reason = "there is no " + *function;
    return simulated() ? Outcome::kFailed : Outcome::kSkipped;
  }
  const auto before = all_stats();
  const int holders_before = live_holders();
  bool ended = true;
  try {
    each.body();
    ended = false;
  } catch (const Skipped& skip) {
    *reason = skip.reason;
  } catch (const Ended&) {
  } catch (const std::exception& error) {
    report({}, std::string("threw: ") + error.what());
  }
  if (simulated() && !ended) check_coverage(each);
  check_what_is_left(before, holders_before);
  if (const std::string failures = take_failures(); !failures.empty()) {
    *reason = failures;
    return Outcome::kFailed;
  }
  return ended ? Outcome::kSkipped : Outcome::kPassed;
}

void print(Outcome outcome, const Case& each, const std::string& reason) {
  constexpr const char* kWords[] = {"PASS", "FAIL", "SKIP"};
  std::printf("%s %s%s%s\n", kWords[static_cast<int>(outcome)], full_name(each).c_str(),
              reason.empty() ? "" : " ", reason.c_str());
  std::fflush(stdout);
}

Outcome run_case(const Case& each, const std::optional<std::string>& profile) {
  std::string reason;
  Outcome outcome = Outcome::kFailed;
  try {
    start_afresh(profile);
    outcome = run_body(each, &reason);
  } catch (const Ended&) {
    reason = take_failures();
  }
  print(outcome, each, reason);
  return outcome;
}

int run_role(const Role& role, const Arguments& arguments,
             const std::optional<std::string>& profile) {
  forbid_core_files();
  if (simulated() && profile) simulator().reset(profile->c_str());
  int status = kExpectationFailed;
  try {
    status = role.body(arguments);
  } catch (const Skipped& skip) {
    report({}, "a child cannot skip: " + skip.reason);
  } catch (const Ended&) {
  } catch (const std::exception& error) {
    report({}, std::string("threw: ") + error.what());
  }
  std::string text;
  for (const auto& [stat, value] : all_stats()) {
    if (value != 0 && stat.rfind("calls.", 0) == 0) text += stat.substr(6) + "\n";
  }
  for (const std::string& function : called_functions()) text += function + "\n";
  write_all(kReportDescriptor, text);
  const std::string failures = take_failures();
  if (failures.empty()) return status;
  std::fprintf(stderr, "in the child %s: %s\n", role.name, failures.c_str());
  return kExpectationFailed;
}

// --- the command line ----------------------------------------------------------------

// Some of the runs of all chosen cases on all chosen releases, in that order.
struct Part {
  size_t first;
  size_t count;
};

struct Selection {
  bool list = false;
  bool all_profiles = false;
  bool alone = false;
  bool here = false;
  std::optional<std::string> profile;
  std::vector<std::string> names;  // groups and cases
  std::optional<std::string> role;
  Arguments role_arguments;
  Seconds patience{60};
  std::optional<Part> part;
};

constexpr const char* kUsage =
    "usage: contract [--list] [--profile NAME | --all-profiles] [--alone | --here] "
    "[--patience SECONDS] [--group GROUP]... [GROUP | GROUP.CASE]...\n"
    "  --list           one case a line: name, functions it covers, source\n"
    "  --profile NAME   on the simulator: this release\n"
    "  --all-profiles   on the simulator: every release in turn\n"
    "  --alone          each case in a process of its own\n"
    "  --here           all cases in this process, for a debugger\n"
    "  --patience N     seconds that a case may take, else 60\n";

constexpr int kRefused = 2;

int refuse(const std::string& what) {
  std::fprintf(stderr, "contract: %s\n%s", what.c_str(), kUsage);
  return kRefused;
}

std::optional<size_t> number(const std::string& word) {
  const bool digits = !word.empty() && word.size() < 10 &&
                      word.find_first_not_of("0123456789") == std::string::npos;
  return digits ? std::optional<size_t>(std::stoul(word)) : std::nullopt;
}

bool parse(const std::vector<std::string>& words, Selection* selection) {
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    const size_t values = words.size() - i - 1;
    if (word == "--list") {
      selection->list = true;
    } else if (word == "--all-profiles") {
      selection->all_profiles = true;
    } else if (word == "--alone") {
      selection->alone = true;
    } else if (word == "--here") {
      selection->here = true;
    } else if (word == "--profile" && values >= 1) {
      selection->profile = words[++i];
    } else if (word == "--group" && values >= 1) {
      selection->names.push_back(words[++i]);
    } else if (word == "--patience" && values >= 1) {
      const auto seconds = number(words[++i]);
      if (!seconds) return false;
      selection->patience = Seconds(*seconds);
    } else if (word == "--part" && values >= 2) {
      const auto first = number(words[++i]);
      const auto count = number(words[++i]);
      if (!first || !count) return false;
      selection->part = {*first, *count};
    } else if (word == "--child" && values >= 1) {
      selection->role = words[++i];
      selection->role_arguments.assign(words.begin() + static_cast<long>(i) + 1,
                                       words.end());
      return true;
    } else if (word.substr(0, 1) != "-") {
      selection->names.push_back(word);
    } else {
      return false;
    }
  }
  return true;
}

bool wanted(const Selection& selection, const Case& each) {
  const auto& names = selection.names;
  if (names.empty()) return each.group != kSelfTest;
  return std::any_of(names.begin(), names.end(), [&](const std::string& name) {
    return name == each.group || name == full_name(each);
  });
}

std::vector<Case> select(const Selection& selection) {
  std::vector<Case> chosen;
  std::copy_if(cases().begin(), cases().end(), std::back_inserter(chosen),
               [&](const Case& each) { return wanted(selection, each); });
  std::stable_sort(chosen.begin(), chosen.end(), [](const Case& a, const Case& b) {
    return std::string_view(a.group) < b.group;
  });
  return chosen;
}

std::vector<std::optional<std::string>> releases(const Selection& selection) {
  if (!selection.all_profiles || !simulated()) return {selection.profile};
  const std::vector<std::string> names = profiles();
  return {names.begin(), names.end()};
}

int list(const std::vector<Case>& chosen) {
  for (const Case& each : chosen) {
    std::printf("%s\t%s\t%s\n", full_name(each).c_str(), each.covers, each.source);
  }
  return 0;
}

void print_release() {
  std::printf("%s%s%s\n", kVendor.release().c_str(),
              simulated() ? ", simulated as " : "",
              simulated() ? simulator().profile() : "");
  std::fflush(stdout);
}

// --- in which process ----------------------------------------------------------------

using Report = std::function<void(Outcome)>;

void run_here(const Selection& selection, const std::vector<Case>& chosen,
              const Part& part, const Report& report_outcome) {
  const auto all_releases = releases(selection);
  for (size_t i = part.first; i < part.first + part.count; ++i) {
    const auto& profile = all_releases.at(i / chosen.size());
    if (i % chosen.size() == 0) {
      start_afresh(profile);
      print_release();
    }
    report_outcome(run_case(chosen[i % chosen.size()], profile));
  }
}

// A process that runs a part of the cases and tells of each when it is over.
class Worker {
 public:
  Worker(std::vector<std::string> words, const Part& part) {
    const std::string first = std::to_string(part.first);
    const std::string count = std::to_string(part.count);
    words.insert(words.end(), {"--part", first, count});
    Pipe outcomes;
    process_ = start(words, {}, {{outcomes.in(), kReportDescriptor}});
    outcomes_ = outcomes.release_out();
  }
  Worker(const Worker&) = delete;
  Worker& operator=(const Worker&) = delete;
  ~Worker() { close(outcomes_); }

  // None when the process ended or the case took too long.
  std::optional<Outcome> next(Seconds patience) {
    if (told_.empty() && !read_some(outcomes_, &told_, patience)) return {};
    const char outcome = told_.front();
    told_.erase(0, 1);
    return static_cast<Outcome>(outcome - '0');
  }
  Ending end(Seconds patience) { return await(process_, patience); }

 private:
  pid_t process_ = -1;
  int outcomes_ = -1;
  std::string told_;
};

int work(const Selection& selection, const std::vector<Case>& chosen) {
  forbid_core_files();
  run_here(selection, chosen, *selection.part, [](Outcome outcome) {
    write_all(kReportDescriptor, std::to_string(static_cast<int>(outcome)));
  });
  return 0;
}

int conclude(const std::array<int, 3>& counts) {
  const auto& [passed, failed, skipped] = counts;
  std::printf("%d passed, %d failed, %d skipped\n", passed, failed, skipped);
  return failed == 0 ? 0 : 1;
}

// A case that ends its process is a failure, and no reason to leave out the others.
int supervise(const Selection& selection, const std::vector<std::string>& words,
              const std::vector<Case>& chosen) {
  std::array<int, 3> counts = {};
  const auto count = [&](Outcome outcome) { counts[static_cast<int>(outcome)] += 1; };
  const size_t runs = releases(selection).size() * chosen.size();
  const bool alone = selection.alone || (kVendor.alone && !simulated());
  int status = 0;
  for (size_t next = 0; next < runs;) {
    const size_t end = alone ? next + 1 : runs;
    Worker worker(words, {next, end - next});
    auto deadline = Clock::now() + selection.patience;
    while (next < end) {
      const auto outcome = worker.next(selection.patience);
      if (!outcome) break;
      count(*outcome);
      ++next;
      deadline = Clock::now() + selection.patience;
    }
    const bool late = next < end && Clock::now() >= deadline;
    const Ending ending = worker.end(late ? Seconds(0) : kPatience);
    if (next < end) {
      const Case& each = chosen[next % chosen.size()];
      print(Outcome::kFailed, each,
            !ending.in_time      ? "not over in time"
            : ending.signal != 0 ? "ended by signal " + describe(ending.signal)
                                 : "ended its process");
      count(Outcome::kFailed);
      ++next;
    } else if (!(ending == 0)) {
      std::fprintf(stderr, "contract: behind its last case: %s\n",
                   describe(ending).c_str());
      status = 1;
    }
  }
  return std::max(status, conclude(counts));
}

int run(const std::vector<std::string>& words) {
  Selection selection;
  if (!parse(words, &selection)) return refuse("what is wanted?");
  if (selection.profile && simulated()) {
    const auto names = profiles();
    if (std::find(names.begin(), names.end(), *selection.profile) == names.end()) {
      return refuse("no profile " + *selection.profile);
    }
  }
  signal(SIGPIPE, SIG_IGN);
  if (selection.role) {
    const auto role =
        std::find_if(roles().begin(), roles().end(),
                     [&](const Role& each) { return each.name == *selection.role; });
    if (role == roles().end()) return refuse("no role " + *selection.role);
    return run_role(*role, selection.role_arguments, selection.profile);
  }
  const std::vector<Case> chosen = select(selection);
  if (chosen.empty()) return refuse("no such case");
  if (selection.list) return list(chosen);
  if (selection.part) return work(selection, chosen);
  if (kVendor.count_devices() == 0) {
    std::fprintf(stderr, "contract: there is no device\n");
    return kRefused;
  }
  if (!selection.here) return supervise(selection, words, chosen);
  std::array<int, 3> counts = {};
  run_here(selection, chosen, {0, releases(selection).size() * chosen.size()},
           [&](Outcome outcome) { counts[static_cast<int>(outcome)] += 1; });
  return conclude(counts);
}

}  // namespace
}  // namespace contract

int main(int count, char** arguments) {
  return contract::run({arguments + 1, arguments + count});
}
