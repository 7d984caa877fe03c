// SPDX-License-Identifier: Apache-2.0
#include "engine/runtime.h"

#include <utility>

namespace hipsim {
namespace {

constexpr std::chrono::microseconds kMaxLatency = std::chrono::hours(1);

// As far from each other as the eight of a node with a switch for each.
constexpr int kFirstBus = 0x05;
constexpr int kBusStep = 0x20;

}  // namespace

Runtime::Runtime(const Options& options, std::vector<const char*> call_names)
    : options_(options),
      profile_(options.profile),
      calls_(std::move(call_names)),
      memory_(options.devices, options.vram_bytes) {
  let_host_in(options_.host_reads);
}

// The streams' work uses everything else.
Runtime::~Runtime() = default;

// HIP's device memory is in the host's reach, as through a large BAR.
void Runtime::let_host_in(bool allowed) {
  memory_.virtual_memory().let_host_in(allowed);
  memory_.let_host_in(allowed || !profile_->cuda);
}

// --- calls -------------------------------------------------------------------------

Error Runtime::enter(size_t call) {
  if (const Error refusal = refusal_; refusal != Error::kSuccess) return refusal;
  std::lock_guard lock(mutex_);
  return calls_.enter(call);
}

int Runtime::pci_bus(int device) { return kFirstBus + device * kBusStep; }

int Runtime::version() const { return profile().version; }

// --- control -----------------------------------------------------------------------

const Profile& Runtime::profile() const {
  std::lock_guard lock(mutex_);
  return *profile_;
}

void Runtime::reset(const Profile* profile) {
  // A refused process may be a forked child, which has no threads to wait for.
  if (refusal_ == Error::kSuccess) {
    scheduler_.skip_latency();
    scheduler_.drain_all();
  }
  std::lock_guard lock(mutex_);
  if (profile != nullptr) profile_ = profile;
  calls_.reset();
  switches_ = {};
  counters_ = {};
  captures_.reset();
  let_host_in(options_.host_reads);
  memory_.limit_registrations(std::nullopt);
  memory_.limit_locked_memory(std::nullopt);
  memory_.limit_locked_memory_by_rlimit(false);
  for (int device = 0; device < devices(); ++device) {
    memory_.vram(device).set_stale_pages(StalePages::kClean);
  }
  gpu_error_ = Error::kSuccess;
}

bool Runtime::fail(std::string_view call, uint64_t nth, Error error) {
  std::lock_guard lock(mutex_);
  return calls_.fail(call, nth, error);
}

bool Runtime::set_switch(std::string_view name, int64_t value) {
  std::lock_guard lock(mutex_);
  const std::pair<std::string_view, bool*> flags[] = {
      {"corrupt_loads", &switches_.corrupt_loads},
      {"host_device_pointers", &switches_.alias_host_pointers},
      {"one_mapping_copies", &switches_.one_mapping_copies},
      {"ignore_address_hints", &switches_.ignore_address_hints},
      {"no_virtual_memory", &switches_.no_virtual_memory},
      {"small_bar", &switches_.small_bar},
  };
  for (const auto& [flag, state] : flags) {
    if (name == flag) {
      *state = value != 0;
      return true;
    }
  }
  if (name == "host_reads" && (value == 0 || value == 1)) {
    let_host_in(value == 1);
    return true;
  }
  if (name == "locked_memory" && (value == 0 || value == 1)) {
    memory_.limit_locked_memory_by_rlimit(value == 1);
    return true;
  }
  if (value >= 0) {
    const auto limit = value == 0 ? std::nullopt : std::make_optional<size_t>(value);
    if (name == "max_registration_bytes") {
      memory_.limit_registrations(limit);
      return true;
    }
    if (name == "max_locked_bytes") {
      memory_.limit_locked_memory(limit);
      return true;
    }
  }
  if (value < 0 || value > kMaxLatency.count()) return false;
  if (name == "copy_latency_us") {
    switches_.copy_latency = std::chrono::microseconds(value);
    return true;
  }
  if (name == "fill_latency_us") {
    switches_.fill_latency = std::chrono::microseconds(value);
    return true;
  }
  if (name == "stale_memory" && value <= static_cast<int>(StalePages::kPoisoned)) {
    for (int device = 0; device < devices(); ++device) {
      memory_.vram(device).set_stale_pages(static_cast<StalePages>(value));
    }
    return true;
  }
  return false;
}

std::vector<std::pair<std::string, uint64_t>> Runtime::stats() const {
  constexpr const char* kEngineNames[kCopyEngines] = {"sdma", "blit", "host"};
  constexpr const char* kDirectionNames[kDirections] = {"h2d", "d2h", "d2d", "h2h"};
  constexpr const char* kHostMemoryNames[kHostMemories] = {"pageable", "registered",
                                                           "allocated"};
  std::lock_guard lock(mutex_);
  const Usage& usage = memory_.usage();
  const VirtualUsage& virtual_usage = memory_.virtual_memory().usage();
  std::vector<std::pair<std::string, uint64_t>> stats = {
      {"streams", streams_.size()},
      {"events", events_.size()},
      {"device_allocations", usage.device_allocations},
      {"device_bytes", usage.device_bytes},
      {"registered_ranges", usage.registered_ranges},
      {"registered_bytes", usage.registered_bytes},
      {"host_allocations", usage.host_allocations},
      {"host_allocation_bytes", usage.host_allocation_bytes},
      {"reservations", virtual_usage.reservations},
      {"reserved_bytes", virtual_usage.reserved_bytes},
      {"handles", virtual_usage.handles},
      {"handle_bytes", virtual_usage.handle_bytes},
      {"mappings", virtual_usage.mappings},
      {"mapped_bytes", virtual_usage.mapped_bytes},
      {"captures", captures_.live()},
      {"graphs", graphs_.size()},
      {"executables", executables_.size()},
      {"imports", usage.imports},
      {"imported_bytes", usage.imported_bytes},
      {"batch_calls", counters_.batch_calls},
      {"batch_copies", counters_.batch_copies},
      {"staged_copies", counters_.staged.copies},
      {"staged_bytes", counters_.staged.bytes},
      {"pitched_copies", counters_.pitched.copies},
      {"pitched_bytes", counters_.pitched.bytes},
      {"pitched_packets", counters_.pitched_packets},
      {"fills", counters_.fills.copies},
      {"filled_bytes", counters_.fills.bytes},
      {"pending_faults", calls_.pending()},
      {"memory_faults", counters_.memory_faults},
      {"ipc_exports", counters_.ipc_exports},
      {"ipc_virtual_exports", counters_.ipc_virtual_exports},
      {"ipc_failed_imports", counters_.ipc_failed_imports},
  };
  for (int engine = 0; engine < kCopyEngines; ++engine) {
    for (int direction = 0; direction < kDirections; ++direction) {
      const std::string name =
          std::string(kEngineNames[engine]) + "." + kDirectionNames[direction];
      const Tally& tally = counters_.copies[engine][direction];
      stats.emplace_back("copies." + name, tally.copies);
      stats.emplace_back("bytes." + name, tally.bytes);
    }
  }
  for (int memory = 0; memory < kHostMemories; ++memory) {
    for (const Direction direction :
         {Direction::kHostToDevice, Direction::kDeviceToHost}) {
      const auto index = static_cast<int>(direction);
      const std::string name =
          std::string(kHostMemoryNames[memory]) + "." + kDirectionNames[index];
      const Tally& tally = counters_.host_copies[memory][index];
      stats.emplace_back("host_copies." + name, tally.copies);
      stats.emplace_back("host_bytes." + name, tally.bytes);
    }
  }
  for (size_t call = 0; call < calls_.names().size(); ++call) {
    stats.emplace_back(std::string("calls.") + calls_.names()[call],
                       calls_.count(call));
  }
  return stats;
}

void Runtime::abandon() {
  if (refusal_ == Error::kSuccess) scheduler_.abandon();
}

// --- fork --------------------------------------------------------------------------

void Runtime::before_fork() {
  memory_in_use_.fork_lock().lock();
  mutex_.lock();
  scheduler_.fork_lock().lock();
}

void Runtime::after_fork_in_parent() {
  scheduler_.fork_lock().unlock();
  mutex_.unlock();
  memory_in_use_.fork_lock().unlock();
}

void Runtime::after_fork_in_child() {
  const VirtualUsage& virtual_usage = memory_.virtual_memory().usage();
  if (scheduler_.active() || !events_.empty() || !graphs_.empty() ||
      !executables_.empty() || !memory_.is_empty() || virtual_usage.reservations != 0 ||
      virtual_usage.handles != 0) {
    refusal_ = Error::kNotInitialized;
  }
  for (int device = 0; device < devices(); ++device) {
    memory_.vram(device).forget_file();
  }
  memory_in_use_.forget_everybody();
  scheduler_.fork_lock().unlock();
  mutex_.unlock();
  memory_in_use_.fork_lock().unlock();
}

}  // namespace hipsim
