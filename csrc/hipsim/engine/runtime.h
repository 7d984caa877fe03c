// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "engine/address_space.h"
#include "engine/call_log.h"
#include "engine/copy.h"
#include "engine/error.h"
#include "engine/profile.h"
#include "engine/scheduler.h"

namespace hipsim {

// Note [The simulated runtime]
//
// Runtime is what a bridge translates its calls to: devices, memory, streams, events
// and copies, with the accounting and the faults of a test beside them. It knows
// releases only through their Profile and no struct or symbol of HIP or CUDA.
//
// One lock guards everything but the streams, which have the scheduler's. The order
// is: this lock, then the scheduler's. A caller never waits for a stream while it
// holds this lock, because running operations take it to account for themselves. A
// call that ends the life of something first takes it out of the tables, then waits
// for the work that uses it, then lets it go.
//
// A GPU memory fault ends the process on hardware. Here it is an error that stays:
// every later call returns it and nothing that is queued runs, until reset().
//
// What it does not model: speed, caches, kernels, memory that several processes
// share, and the order in which a source may be read early.

// Streams and events are named by numbers that are never used twice, so that a stale
// name is an error and not another object. 0 is the null stream.
using Handle = uintptr_t;

struct Options {
  const Profile* profile = &default_profile();

  // A node of MI300X or MI355X has eight.
  int devices = 8;
  size_t vram_bytes = size_t{8} << 30;
  EngineRule engines;
};

// HIP's numbers for them, and CUDA's.
enum class CopyKind : unsigned {
  kHostToHost = 0,
  kHostToDevice = 1,
  kDeviceToHost = 2,
  kDeviceToDevice = 3,
  kDefault = 4,
  kDeviceToDeviceNoCu = 1024,
};

enum SourceAccessOrder : uint32_t {
  kSourceAccessStream = 1,
  kSourceAccessDuringApiCall = 2,
  kSourceAccessAny = 3,
};

enum CopyFlags : uint32_t {
  kCopyPreferSdma = 0x100,
  kCopySwap = 0x200,
  kCopyIndirectSource = 0x400,
  kCopyIndirectDestination = 0x800,
};

struct CopyAttributes {
  uint32_t source_access_order;
  uint32_t flags;
};

// The arguments of a batch as the caller gave them: nothing is checked yet.
struct Batch {
  void* const* destinations;
  const void* const* sources;
  const size_t* sizes;
  size_t count;

  // One entry for each of `attribute_count`, or none when the caller gave no array
  // or more attributes than copies.
  std::vector<CopyAttributes> attributes;
  const size_t* first_copies;
  size_t attribute_count;

  size_t* fail_index;
};

class Runtime {
 public:
  Runtime(const Options& options, std::vector<const char*> call_names);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;

  // --- calls -----------------------------------------------------------------------
  // The start of a call: counts it and says whether it shall fail. kNoDevice or
  // kNotInitialized when the runtime is of no use in this process.
  Error enter(size_t call);

  // The memory fault that stays, or kSuccess.
  Error gpu_error() const { return gpu_error_; }

  // Every later enter() returns `reason`.
  void refuse_calls(Error reason) { refusal_ = reason; }

  // --- devices ---------------------------------------------------------------------
  int version() const;
  int devices() const { return options_.devices; }
  bool has_device(int device) const { return device >= 0 && device < devices(); }
  void synchronize_device(int device) { scheduler_.drain_device(device); }

  // --- memory ----------------------------------------------------------------------
  Error allocate(int device, size_t bytes, void** pointer);
  Error release(void* pointer);
  Error allocate_host(size_t bytes, void** pointer);
  Error release_host(void* pointer);
  Error register_host(void* pointer, size_t bytes);
  Error unregister_host(void* pointer);
  void memory_info(int device, size_t* free, size_t* total) const;

  // --- streams and events ----------------------------------------------------------
  Handle create_stream(int device, StreamKind kind);
  Error destroy_stream(Handle stream);
  Error query_stream(Handle stream, int device);
  Error synchronize_stream(Handle stream, int device);
  Error wait_event(Handle stream, int device, Handle event);

  Handle create_event(bool timing);
  Error destroy_event(Handle event);
  Error record_event(Handle event, Handle stream, int device);
  Error query_event(Handle event);
  Error synchronize_event(Handle event);
  Error elapsed_time(Handle start, Handle end, float* milliseconds);

  // --- copies ----------------------------------------------------------------------
  // `device` names the null stream that stream 0 is.
  Error copy(void* destination, const void* source, size_t bytes, CopyKind kind,
             Handle stream, int device, bool blocking);
  Error copy_batch(const Batch& batch, Handle stream, int device);
  Error fill(void* destination, int value, size_t bytes, Handle stream, int device,
             bool blocking);

  // Where a failing batch says that no single copy is to blame.
  static constexpr size_t kNoIndex = static_cast<size_t>(-1);

  // A fault that a test placed on a batch counts as a failure of its first copy.
  void blame_first_copy(const Batch& batch) const;

  // --- control ---------------------------------------------------------------------
  const Profile& profile() const;

  // Waits for the work in flight. Null keeps the profile; faults, counters, switches
  // and a GPU memory fault go; what is allocated and created stays.
  void reset(const Profile* profile);
  bool fail(std::string_view call, uint64_t nth, Error error);
  void corrupt_loads(bool on);
  void copy_latency(std::chrono::microseconds latency);
  std::vector<std::pair<std::string, uint64_t>> stats() const;

  // See Scheduler::abandon.
  void abandon();

  // --- fork ------------------------------------------------------------------------
  // A child has none of the parent's threads and none of its device memory. If there
  // was anything to lose, its calls are refused; else it starts afresh.
  void before_fork();
  void after_fork_in_parent();
  void after_fork_in_child();

 private:
  struct Switches {
    bool corrupt_loads = false;
    std::chrono::microseconds copy_latency{0};
  };
  struct Recording {
    Point point;
    std::chrono::steady_clock::time_point time;
  };
  struct Event {
    bool timing;
    std::shared_ptr<Recording> recording;
  };
  struct Tally {
    uint64_t copies = 0;
    uint64_t bytes = 0;
  };
  struct Counters {
    uint64_t batch_calls = 0;
    uint64_t batch_copies = 0;
    Tally staged;
    uint64_t memory_faults = 0;
    std::array<std::array<Tally, kDirections>, kCopyEngines> copies;
  };

  // Ends memory that `forget` takes out of the address space, when no work uses it.
  Error release_by(std::optional<Place> (AddressSpace::*forget)(const void*),
                   void* pointer);
  StreamRef find_stream(Handle stream, int device);
  std::shared_ptr<Recording> last_recording(Handle event, bool* known) const;
  Error locate(const void* destination, Place* to, const void* source, Place* from,
               size_t bytes) const;
  Error check_attributes(const Batch& batch) const;
  Error plan_batch(const Batch& batch, std::vector<Copy>* copies) const;
  Operation copy_operation(std::vector<Copy> copies);
  Operation memory_fault();
  void account(const std::vector<Copy>& copies, size_t made);

  const Options options_;
  std::atomic<Error> refusal_{Error::kSuccess};
  std::atomic<Error> gpu_error_{Error::kSuccess};

  mutable std::mutex mutex_;
  const Profile* profile_;
  CallLog calls_;
  Switches switches_;
  Counters counters_;
  AddressSpace memory_;
  Handle next_handle_ = 0x10000;
  std::map<Handle, StreamRef> streams_;
  std::map<Handle, Event> events_;

  // Last, so that its threads end before what they use.
  Scheduler scheduler_;
};

}  // namespace hipsim
