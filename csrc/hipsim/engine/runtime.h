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
#include <string_view>
#include <utility>
#include <vector>

#include "engine/address_space.h"
#include "engine/call_log.h"
#include "engine/capture.h"
#include "engine/copy.h"
#include "engine/error.h"
#include "engine/gate.h"
#include "engine/ipc.h"
#include "engine/profile.h"
#include "engine/scheduler.h"
#include "engine/virtual_memory.h"

namespace hipsim {

// Note [The simulated runtime]
//
// Runtime is what a bridge translates its calls to: devices, memory, streams, events,
// copies, captures and IPC, with the accounting and the faults of a test beside them.
// It knows releases only through their Profile and no struct or symbol of HIP or CUDA.
//
// One lock guards everything but the streams, which have the scheduler's. The order
// is: the gate of memory in use, this lock, then the scheduler's. A caller never waits
// for a stream while it holds this lock, because running operations take it to account
// for themselves. A call that ends the life of something first takes it out of the
// tables, then waits for the work that uses it, then lets it go.
//
// Virtual memory may go while work that names it is still queued. A copy therefore
// looks its addresses up once more when it runs, and shares the gate while it moves
// bytes, so that memory never goes in the middle.
//
// A GPU memory fault ends the process on hardware. Here it is an error that stays:
// every later call returns it and nothing that is queued runs, until reset().

// Streams, events and graphs are named by numbers that are never used twice, so that a
// stale name is an error and not another object. Stream 0 is the null stream.

struct Options {
  const Profile* profile = &default_profile();

  // A node of MI300X or MI355X has eight.
  int devices = 8;
  size_t vram_bytes = size_t{8} << 30;
  EngineRule engines;
  bool host_reads = false;
};

// What a thread has chosen, which calls depend on. `device` also names the null stream
// that stream 0 is.
struct Caller {
  int device = 0;
  CaptureMode capture_mode = CaptureMode::kGlobal;
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
  kCopyPreferOverlap = 0x1,
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

// A rectangle or a box of bytes on both sides, as the caller gave it.
struct PitchedCopy {
  void* destination;
  Pitch destination_pitch;
  const void* source;
  Pitch source_pitch;
  Shape shape;
};

// A request for physical memory. `valid` is the bridge's word on fields that the
// engine has no name for.
struct AllocationRequest {
  bool valid = true;
  int device = 0;
  unsigned handle_types = 0;
  size_t bytes = 0;
  bool for_network = false;  // makes no difference here, and is told

  // In the vendor's numbers; it is told too.
  unsigned type = 0;
};

// HIP's bits for them, and CUDA's.
constexpr unsigned kHandleTypePosixFile = 1;
constexpr unsigned kHandleTypesOfWindows = 2 | 4;
constexpr unsigned kHandleTypeFabric = 8;

class Runtime {
 public:
  Runtime(const Options& options, std::vector<const char*> call_names);
  Runtime(const Runtime&) = delete;
  Runtime& operator=(const Runtime&) = delete;
  ~Runtime();

  // --- calls -----------------------------------------------------------------------
  // The start of a call: counts it and says whether it shall fail. kNoDevice or
  // kNotInitialized when the runtime is of no use in this process.
  Error enter(size_t call);

  // The memory fault that stays, or kSuccess.
  Error gpu_error() const { return gpu_error_; }

  // Every later enter() returns `reason`.
  void refuse_calls(Error reason) { refusal_ = reason; }

  // --- devices ---------------------------------------------------------------------
  // Where a device sits, in the only PCI domain, at function 0 of device 0.
  static int pci_bus(int device);

  int version() const;
  int devices() const { return options_.devices; }
  bool has_device(int device) const { return device >= 0 && device < devices(); }
  Error synchronize_device(const Caller& caller);

  // --- memory ----------------------------------------------------------------------
  Error allocate(const Caller& caller, size_t bytes, void** pointer);
  Error release(const Caller& caller, void* pointer);
  Error allocate_host(const Caller& caller, size_t bytes, void** pointer);
  Error release_host(const Caller& caller, void* pointer);
  Error register_host(const Caller& caller, void* pointer, size_t bytes,
                      bool flags_are_known);
  Error unregister_host(const Caller& caller, void* pointer);
  Error device_pointer(const void* host, void** pointer) const;
  void memory_info(int device, size_t* free, size_t* total) const;

  // Does a device know registered host memory by another address than the host?
  bool aliases_host_pointers() const;
  bool has_large_bar() const;

  // The memory that holds the byte: an allocation, a mapping, or registered host
  // memory. kNotFound for any other address.
  Error address_range(const void* pointer, void** base, size_t* bytes) const;

  // --- virtual memory --------------------------------------------------------------
  bool has_virtual_memory() const;
  Error granularity(int device, bool recommended, size_t* bytes) const;
  Error reserve(size_t bytes, size_t alignment, void* wish, void** pointer);
  Error free_addresses(void* pointer, size_t bytes);
  Error create(const Caller& caller, const AllocationRequest& request, Handle* handle);
  Error release_handle(Handle handle);
  Error retain_handle(const void* pointer, Handle* handle);
  Error describe_handle(Handle handle, AllocationRequest* request) const;
  Error map(void* pointer, size_t bytes, size_t offset, Handle handle);
  Error unmap(const Caller& caller, void* pointer, size_t bytes);
  Error set_access(void* pointer, size_t bytes, const std::vector<AccessGrant>& grants);
  Error access_of(const void* pointer, int device, Access* access) const;

  // --- streams and events ----------------------------------------------------------
  Handle create_stream(int device, StreamKind kind);
  Error destroy_stream(Handle stream);
  Error query_stream(const Caller& caller, Handle stream);
  Error synchronize_stream(const Caller& caller, Handle stream);
  Error wait_event(const Caller& caller, Handle stream, Handle event);

  // An event is its device's: streams of others do not record it.
  Handle create_event(int device, bool timing);
  Error destroy_event(Handle event);
  Error record_event(const Caller& caller, Handle event, Handle stream);
  Error query_event(const Caller& caller, Handle event);
  Error synchronize_event(const Caller& caller, Handle event);
  Error elapsed_time(Handle start, Handle end, float* milliseconds);

  // --- copies ----------------------------------------------------------------------
  Error copy(const Caller& caller, void* destination, const void* source, size_t bytes,
             CopyKind kind, Handle stream, bool blocking);
  Error copy_pitched(const Caller& caller, const PitchedCopy& copy, CopyKind kind,
                     Handle stream, bool blocking);
  Error copy_batch(const Caller& caller, const Batch& batch, Handle stream);
  Error fill(const Caller& caller, void* destination, int value, size_t bytes,
             Handle stream, bool blocking);

  // Where a failing batch says that no single copy is to blame.
  static constexpr size_t kNoIndex = static_cast<size_t>(-1);

  // A fault that a test placed on a batch counts as a failure of its first copy.
  void blame_first_copy(const Batch& batch) const;

  // --- capture ---------------------------------------------------------------------
  Error begin_capture(Handle stream, CaptureMode mode);

  // With a null `graph` nobody gets what was captured.
  Error end_capture(Handle stream, Handle* graph);

  // The capture's name is 0 unless the status is kActive.
  Error capture_status(Handle stream, CaptureStatus* status, uint64_t* id) const;

  // Of the legacy stream of CUDA's context: none, or an error.
  Error legacy_capture_status(const Caller& caller) const;

  // The nodes' names follow each other from `first`.
  Error graph_nodes(Handle graph, Handle* first, size_t* count) const;
  Error destroy_graph(Handle graph);
  Error instantiate(const Caller& caller, Handle graph, Handle* executable);
  Error launch(const Caller& caller, Handle executable, Handle stream);
  Error destroy_executable(const Caller& caller, Handle executable);

  // --- IPC -------------------------------------------------------------------------
  Error export_memory(const void* pointer, IpcHandle* handle);
  Error import_memory(const IpcHandle& handle, void** pointer);
  Error close_import(void* pointer);

  // --- control ---------------------------------------------------------------------
  const Profile& profile() const;

  // Waits for the work in flight. Null keeps the profile; faults, counters, switches
  // and a GPU memory fault go, and captures are invalidated; what is allocated and
  // created stays.
  void reset(const Profile* profile);
  bool fail(std::string_view call, uint64_t nth, Error error);

  // False for a switch or a value that there is not.
  bool set_switch(std::string_view name, int64_t value);
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
    std::optional<std::chrono::microseconds> fill_latency;
    bool alias_host_pointers = false;
    bool one_mapping_copies = false;
    bool ignore_address_hints = false;
    bool no_virtual_memory = false;
    bool small_bar = false;
  };
  struct StreamEntry {
    StreamRef stream;
    int device;
    bool blocking;
  };
  struct Recording {
    Point point;
    std::chrono::steady_clock::time_point time;
  };
  struct Event {
    int device;
    bool timing;
    std::shared_ptr<Recording> recording;
    std::optional<CapturedPoint> captured;
    Handle stream = 0;
  };
  struct GraphEntry {
    std::shared_ptr<const Graph> graph;
    Handle first_node;
  };
  struct Executable {
    std::shared_ptr<const Graph> graph;
    int device;
    size_t charged;
  };
  struct Import {
    void* pointer;
    size_t count;
  };
  struct Tally {
    uint64_t copies = 0;
    uint64_t bytes = 0;
  };
  struct Counters {
    uint64_t batch_calls = 0;
    uint64_t batch_copies = 0;
    Tally staged;
    Tally pitched;
    uint64_t pitched_packets = 0;
    Tally fills;
    uint64_t memory_faults = 0;
    uint64_t ipc_exports = 0;
    uint64_t ipc_virtual_exports = 0;
    uint64_t ipc_failed_imports = 0;
    std::array<std::array<Tally, kDirections>, kCopyEngines> copies;
    std::array<std::array<Tally, kDirections>, kHostMemories> host_copies;
  };
  using Copies = std::shared_ptr<const std::vector<Copy>>;

  Handle new_handle() { return next_handle_ += 16; }

  void let_host_in(bool allowed);

  // --- memory, with the lock held where not said otherwise -------------------------
  // Ends memory that `forget` takes out of the address space, when no work uses it.
  // Takes the lock.
  using Forget = std::optional<Place> (AddressSpace::*)(const void*);
  std::optional<Place> release_by(Forget forget, const void* pointer);
  Error release_allocation(const Caller& caller, Forget forget, void* pointer);
  Error forbid_unsafe_call(const Caller& caller);

  // --- streams ---------------------------------------------------------------------
  // The device that does the stream's work.
  int device_of(const Caller& caller, Handle stream) const;

  // Null for a stream that there is not.
  StreamRef find_stream(const Caller& caller, Handle stream);

  // May the thread ask how far this event or stream is?
  Error check_event_poll(const Caller& caller, const Event& event);
  Error check_stream_poll(const Caller& caller, Handle stream);

  // --- work ------------------------------------------------------------------------
  // Where work goes, to a stream or into a capture, and for which device.
  struct Target {
    StreamRef stream;
    Handle handle = 0;
    bool captures = false;

    // Whose rights the call has, and the device that does the work.
    Caller caller;
    int device = 0;
  };
  Error find_target(const Caller& caller, Handle stream, Target* target);

  // The point at which the work will be done; none when it was captured.
  std::optional<Point> enqueue(const Target& target, const Work& work);

  // The blocking streams of CUDA's context, which its legacy stream is ordered with.
  Captures::Meant ordered_with_legacy_stream(const Caller& caller) const;

  // Work of the legacy stream, and a call that waits for it, while anything captures.
  Error forbid_legacy_work(const Caller& caller);
  Error forbid_synchronous_call(const Caller& caller);

  Error locate(const Caller& caller, Side* side, size_t extent, bool pitched,
               bool write) const;
  Error plan(const Caller& caller, Side to, Side from, const Shape& shape, bool pitched,
             bool prefer_sdma, Copy* copy) const;
  Error check_attributes(const Batch& batch) const;
  Error plan_batch(const Caller& caller, const Batch& batch,
                   std::vector<Copy>* copies) const;
  Error submit_copy(const Target& target, const Copy& copy, bool blocking,
                    std::unique_lock<std::mutex> lock);
  Work copy_work(Copies copies);
  Work memory_fault_work();

  // At the time when work runs, and without the lock.
  void run_copies(const std::vector<Copy>& copies, int device, bool corrupt,
                  const std::atomic<bool>& abandoned);
  bool may_touch(const Side& side, size_t extent, int device, bool write) const;
  void raise_memory_fault();
  void account(const std::vector<Copy>& copies, size_t made);

  const Options options_;
  std::atomic<Error> refusal_{Error::kSuccess};
  std::atomic<Error> gpu_error_{Error::kSuccess};

  Gate memory_in_use_;
  mutable std::mutex mutex_;
  const Profile* profile_;
  CallLog calls_;
  Switches switches_;
  Counters counters_;
  AddressSpace memory_;
  Handle next_handle_ = 0x10000;
  std::map<Handle, StreamEntry> streams_;
  std::map<Handle, Event> events_;
  Captures captures_;
  std::map<Handle, GraphEntry> graphs_;
  std::map<Handle, Executable> executables_;
  std::map<uintptr_t, IpcExport> exports_;
  std::map<uint64_t, Import> imports_;

  // Last, so that its threads end before what they use.
  Scheduler scheduler_;
};

}  // namespace hipsim
