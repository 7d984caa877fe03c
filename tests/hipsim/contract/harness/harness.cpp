// SPDX-License-Identifier: Apache-2.0
#include "harness/harness.h"

#include <dlfcn.h>
#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <new>
#include <random>
#include <sstream>
#include <thread>

#include "harness/internal.h"

namespace contract {
namespace {

std::atomic<int> g_holders{0};

std::mutex g_mutex;
std::string g_failures;
std::set<std::string> g_called;
std::vector<std::string> g_about;

template <typename Function>
void look_up(const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(RTLD_DEFAULT, name));
}

}  // namespace

// --- the runtime under test ----------------------------------------------------------

bool simulated() { return simulator().reset != nullptr; }

const Simulator& simulator() {
  static const Simulator found = [] {
    Simulator controls;
    look_up("hipsim_reset", &controls.reset);
    look_up("hipsim_set_switch", &controls.set_switch);
    look_up("hipsim_stats", &controls.stats);
    look_up("hipsim_profile_name", &controls.profile_name);
    look_up("hipsim_profile", &controls.profile);
    return controls;
  }();
  return found;
}

std::map<std::string, uint64_t> all_stats() {
  std::map<std::string, uint64_t> stats;
  if (!simulated()) return stats;
  std::vector<hipsim_stat> entries(simulator().stats(nullptr, 0));
  simulator().stats(entries.data(), entries.size());
  for (const hipsim_stat& entry : entries) stats[entry.name] = entry.value;
  return stats;
}

bool exported(const char* function) { return dlsym(RTLD_DEFAULT, function) != nullptr; }

void set_switch(const char* name, int64_t value) {
  if (simulated() && simulator().set_switch(name, value) != 0) {
    report(CONTRACT_HERE, std::string("the simulator refuses the switch ") + name);
    throw Ended{};
  }
}

uint64_t stat(const std::string& name) {
  if (!simulated()) return 0;
  const auto stats = all_stats();
  const auto found = stats.find(name);
  if (found == stats.end()) {
    report(CONTRACT_HERE, "the simulator has no statistic " + name);
    throw Ended{};
  }
  return found->second;
}

void need_devices(int count) {
  if (kVendor.count_devices() < count) {
    SKIP("there are fewer devices than " + describe(count));
  }
}

// --- the case that runs --------------------------------------------------------------

std::vector<Case>& cases() {
  static std::vector<Case> all;
  return all;
}

Registration::Registration(const Case& made) { cases().push_back(made); }

void start_case() {
  std::lock_guard lock(g_mutex);
  g_called.clear();
  g_failures.clear();
  g_about.clear();
}

std::string take_failures() {
  std::lock_guard lock(g_mutex);
  return std::exchange(g_failures, {});
}

std::set<std::string> called_functions() {
  std::lock_guard lock(g_mutex);
  return g_called;
}

int live_holders() { return g_holders; }

std::vector<std::string> split(const std::string& text, const char* separators) {
  std::vector<std::string> parts;
  for (size_t begin = text.find_first_not_of(separators); begin != std::string::npos;) {
    const size_t end = text.find_first_of(separators, begin);
    parts.push_back(text.substr(begin, end - begin));
    begin = text.find_first_not_of(separators, end);
  }
  return parts;
}

// --- expectations --------------------------------------------------------------------

void called(const char* function) {
  std::lock_guard lock(g_mutex);
  g_called.insert(function);
}

void report(Where where, const std::string& what) {
  std::lock_guard lock(g_mutex);
  if (!g_failures.empty()) g_failures += "; ";
  if (where.file != nullptr) {
    const char* slash = std::strrchr(where.file, '/');
    g_failures += slash == nullptr ? where.file : slash + 1;
    g_failures += ":" + std::to_string(where.line) + ": ";
  }
  for (const std::string& each : g_about) g_failures += each + ": ";
  g_failures += what;
}

About::About(const std::string& what) {
  std::lock_guard lock(g_mutex);
  g_about.push_back(what);
}

About::~About() {
  std::lock_guard lock(g_mutex);
  g_about.pop_back();
}

std::string describe(bool value) { return value ? "true" : "false"; }

std::string describe(double value) { return std::to_string(value); }

std::string describe(const void* value) {
  std::ostringstream text;
  text << value;
  return text.str();
}

std::string describe(const char* value) { return describe(std::string(value)); }

std::string describe(const std::string& value) { return "'" + value + "'"; }

std::string describe(const std::vector<unsigned char>& value) {
  return std::to_string(value.size()) + " bytes beginning with " +
         to_hex(value.data(), std::min<size_t>(value.size(), 8));
}

std::string describe(const Ending& ending) {
  if (!ending.in_time) return "a child that was killed because it took too long";
  if (ending.signal != 0) return "a child ended by signal " + describe(ending.signal);
  return "a child's status " + describe(ending.status);
}

bool expect_bytes(Where where, const char* text, const void* actual,
                  const std::vector<unsigned char>& expected) {
  const auto* bytes = static_cast<const unsigned char*>(actual);
  const auto differs = std::mismatch(expected.begin(), expected.end(), bytes);
  if (differs.first == expected.end()) return true;
  const auto index = static_cast<size_t>(differs.first - expected.begin());
  report(where, std::string(text) + ": byte " + describe(index) + " of " +
                    describe(expected.size()) + " is " +
                    describe(static_cast<int>(bytes[index])) + ", not " +
                    describe(static_cast<int>(expected[index])));
  return false;
}

// --- things that clean up after themselves -------------------------------------------

Counted::Counted() { ++g_holders; }
Counted::~Counted() { --g_holders; }

namespace {

void* map_pages(size_t bytes) {
  void* pages =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (pages == MAP_FAILED) throw std::bad_alloc();
  return pages;
}

}  // namespace

Pages::Pages(size_t bytes) : base_(map_pages(bytes)), size_(bytes) {}

Pages::~Pages() { munmap(base_, size_); }

unsigned char* Pages::at(size_t offset) const {
  return static_cast<unsigned char*>(base_) + offset;
}

// --- bytes ---------------------------------------------------------------------------

Bytes random_bytes(size_t count, unsigned seed) {
  std::mt19937 random(seed);
  Bytes bytes(count);
  for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
  return bytes;
}

std::string to_hex(const void* bytes, size_t count) {
  constexpr const char* kDigits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    const unsigned char byte = static_cast<const unsigned char*>(bytes)[i];
    text += kDigits[byte / 16];
    text += kDigits[byte % 16];
  }
  return text;
}

Bytes from_hex(const std::string& text) {
  Bytes bytes;
  for (size_t i = 0; i + 1 < text.size(); i += 2) {
    bytes.push_back(
        static_cast<unsigned char>(std::stoi(text.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

// --- time ----------------------------------------------------------------------------

bool wait_until(const std::function<bool()>& answer, Seconds patience) {
  const auto deadline = Clock::now() + patience;
  while (!answer()) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  return true;
}

}  // namespace contract
