// SPDX-License-Identifier: Apache-2.0
//
// Note [Programs of bytes]
//
// An input is a program: a release, then calls of HIP one after the other, each with
// the bytes that choose its arguments. Most arguments make sense, so that a program
// comes far; the others are null, stale, of another kind, out of range, or enormous.
// What HIP reads and writes itself without asking anybody is always there: structs,
// arrays, results, and host memory as far as a copy reaches.
//
// After each program everything is given back, and the simulator must agree that
// nothing is left and all memory is free.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <string>
#include <vector>

#include "bridge/hip_api.h"
#include "bridge/hipsim_control.h"

namespace {

constexpr size_t kPage = 4096;
constexpr size_t kArena = 16 * kPage;
constexpr size_t kVram = size_t{4} << 20;
constexpr int kDevices = 8;

// A copy that reaches this far is refused on any device, so that its other side may be
// host memory that ends before.
constexpr size_t kEnormous = size_t{1} << 30;

alignas(kPage) unsigned char arena[kArena];

[[noreturn]] void complain(const char* what, uint64_t value) {
  std::fprintf(stderr, "%s: %llu\n", what, static_cast<unsigned long long>(value));
  std::abort();
}

// --- bytes -------------------------------------------------------------------------

class Reader {
 public:
  Reader(const uint8_t* data, size_t size) : next_(data), left_(size) {}
  bool done() const { return left_ == 0; }
  uint8_t byte() {
    if (done()) return 0;
    --left_;
    return *next_++;
  }
  uint32_t number() {
    uint32_t value = 0;
    for (int i = 0; i < 4; ++i) value = value << 8 | byte();
    return value;
  }
  bool rarely() { return byte() % 16 == 15; }

 private:
  const uint8_t* next_;
  size_t left_;
};

// --- programs ----------------------------------------------------------------------

struct Range {
  char* begin;
  size_t bytes;
};

// The footprint of a box: from its first byte past its last, or enormous.
size_t footprint(size_t width, size_t height, size_t depth, size_t row, size_t slice) {
  if (width == 0 || height == 0 || depth == 0) return 0;
  const auto far = [](size_t steps, size_t distance) {
    return distance != 0 && steps >= kEnormous / distance;
  };
  if (far(depth - 1, slice) || far(height - 1, row) || width >= kEnormous) {
    return kEnormous;
  }
  return std::min(kEnormous, (depth - 1) * slice + (height - 1) * row + width);
}

class Program {
 public:
  explicit Program(Reader reader) : reader_(reader) {
    std::vector<const char*> releases;
    while (const char* name = hipsim_profile_name(releases.size())) {
      releases.push_back(name);
    }
    hipsim_reset(releases[reader_.byte() % releases.size()]);
    if (reader_.byte() % 8 != 0) furnish();
  }

  void run() {
    while (!reader_.done()) step();
  }

  void end();

 private:
  void furnish();
  void step();
  void fork_capture();
  void use_memory(uint8_t call);
  void use_virtual_memory(uint8_t call);
  void use_stream(uint8_t call);
  void use_event(uint8_t call);
  void use_capture(uint8_t call);
  void use_ipc(uint8_t call);
  void copy(uint8_t call);
  void copy_box(bool blocking);
  void copy_batch();
  void ask(uint8_t call);
  void control(uint8_t call);

  // --- arguments -------------------------------------------------------------------
  template <typename Value>
  Value any(const std::vector<Value>& values) {
    return values.empty() ? Value{} : values[reader_.byte() % values.size()];
  }

  // A live one; rarely null, made up, ended, or of another kind.
  template <typename Handle>
  Handle any_handle(const std::vector<Handle>& live) {
    if (!reader_.rarely()) return any(live);
    switch (reader_.byte() % 4) {
      case 0:
        return nullptr;
      case 1:
        return reinterpret_cast<Handle>(uintptr_t{reader_.byte()});
      default:
        return reinterpret_cast<Handle>(any(reader_.byte() % 2 ? ended_ : stale_));
    }
  }

  size_t any_size() {
    constexpr size_t kSizes[] = {kPage,
                                 2 * kPage,
                                 3 * kPage,
                                 1,
                                 16,
                                 64,
                                 0,
                                 kPage - 1,
                                 kPage + 1,
                                 4 * kPage,
                                 16385,
                                 2,
                                 3,
                                 7,
                                 100,
                                 16384,
                                 65536,
                                 kVram / 2,
                                 kVram,
                                 kVram + kPage,
                                 kEnormous,
                                 1ul << 36,
                                 1ul << 40,
                                 1ul << 62,
                                 1ul << 63,
                                 0xFFFFFFFF,
                                 1ul << 31,
                                 SIZE_MAX,
                                 SIZE_MAX - 1,
                                 SIZE_MAX - kPage + 1};
    const uint8_t choice = reader_.byte();
    if (choice >= 224) return reader_.number() % (4 * kPage);
    const size_t likely = choice < 160 ? 10 : std::size(kSizes);
    return kSizes[choice % likely];
  }

  size_t any_offset() {
    constexpr size_t kOffsets[] = {0, 0, 0, 1, 4, 16, 64, kPage - 1, kPage, 2 * kPage};
    return kOffsets[reader_.byte() % std::size(kOffsets)];
  }

  // Of device memory, whatever has become of it.
  char* device_address() {
    char* base = nullptr;
    switch (reader_.byte() % 8) {
      case 0:
      case 1:
      case 2:
        base = static_cast<char*>(any(allocations_));
        break;
      case 3:
      case 4:
        base = any(mappings_).begin;
        break;
      case 5:
        base = any(reservations_).begin;
        break;
      case 6:
        base = static_cast<char*>(any(aliases_));
        break;
      default:
        return reader_.rarely() ? nullptr : static_cast<char*>(any(stale_));
    }
    return base == nullptr ? nullptr : base + any_offset();
  }

  Range host_range() {
    if (!locked_.empty() && reader_.byte() % 4 == 0) return any(locked_);
    const size_t offset = reader_.byte() % 16 * 256;
    return {reinterpret_cast<char*>(arena) + offset, kArena - offset};
  }

  // One side of a copy that reaches `bytes` far. Host memory has to have them.
  char* side(size_t bytes, bool other_is_device) {
    if (reader_.byte() % 2 == 0) {
      const Range host = host_range();
      if (bytes <= host.bytes || (bytes >= kEnormous && other_is_device)) {
        on_host_ = true;
        return host.begin;
      }
    }
    on_host_ = false;
    return device_address();
  }

  struct Sides {
    char* to;
    char* from;
  };
  Sides sides(size_t to_bytes, size_t from_bytes) {
    char* from = side(from_bytes, false);
    const bool from_device = !on_host_;
    return {side(to_bytes, from_device && from_bytes >= kEnormous), from};
  }

  hipMemcpyKind any_kind() {
    return static_cast<hipMemcpyKind>(reader_.rarely() ? reader_.number()
                                                       : reader_.byte() % 6);
  }
  hipStream_t any_stream() {
    return reader_.byte() % 4 == 0 ? nullptr : any_handle(streams_);
  }
  int any_device() {
    return reader_.rarely() ? static_cast<int>(reader_.number())
                            : reader_.byte() % (kDevices + 1);
  }
  hipMemAllocationProp any_properties() {
    hipMemAllocationProp properties{};
    properties.type = reader_.rarely()
                          ? static_cast<hipMemAllocationType>(reader_.number())
                          : hipMemAllocationTypePinned;
    properties.location.type = reader_.rarely()
                                   ? static_cast<hipMemLocationType>(reader_.byte())
                                   : hipMemLocationTypeDevice;
    properties.location.id = any_device();
    properties.requestedHandleTypes = static_cast<hipMemAllocationHandleType>(
        reader_.rarely() ? reader_.number() : reader_.byte() % 2);
    return properties;
  }

  // Null now and then: HIP looks at it before it writes.
  template <typename Value>
  Value* out(Value* result) {
    return reader_.rarely() ? nullptr : result;
  }

  // --- what there is ---------------------------------------------------------------
  template <typename Value>
  static void keep(std::vector<Value>& values, Value made) {
    if (made != nullptr) values.push_back(made);
  }
  template <typename Value>
  static void drop(std::vector<Value>& values, Value value, std::vector<void*>& to) {
    const auto found = std::find(values.begin(), values.end(), value);
    if (found == values.end()) return;
    values.erase(found);
    to.push_back(value);
  }
  static bool drop(std::vector<Range>& ranges, const void* begin) {
    const auto found = std::find_if(ranges.begin(), ranges.end(),
                                    [&](const Range& r) { return r.begin == begin; });
    if (found == ranges.end()) return false;
    ranges.erase(found);
    return true;
  }

  Reader reader_;
  bool on_host_ = false;
  std::vector<void*> allocations_;
  std::vector<void*> aliases_;
  std::vector<Range> locked_;
  std::vector<Range> registered_;
  std::vector<Range> reservations_;
  std::vector<Range> mappings_;
  std::vector<hipMemGenericAllocationHandle_t> handles_;
  std::vector<hipStream_t> streams_;
  std::vector<hipEvent_t> events_;
  std::vector<hipGraph_t> graphs_;
  std::vector<hipGraphExec_t> executables_;
  std::vector<void*> imports_;

  // Handles of what is no more, and device addresses. The latter may be an end of a
  // copy, because the simulator knows them for what they are.
  std::vector<void*> ended_;
  std::vector<void*> stale_;
};

// Something of everything, without which most calls have nothing to do.
void Program::furnish() {
  void* made = nullptr;
  for (const unsigned flags : {hipStreamDefault, hipStreamNonBlocking}) {
    hipStream_t stream = nullptr;
    hipEvent_t event = nullptr;
    hipStreamCreateWithFlags(&stream, flags);
    hipEventCreate(&event);
    keep(streams_, stream);
    keep(events_, event);
  }
  hipMalloc(&made, 2 * kPage);
  keep(allocations_, made);
  hipMemAllocationProp properties{};
  properties.type = hipMemAllocationTypePinned;
  properties.location.type = hipMemLocationTypeDevice;
  const hipMemAccessDesc grant{properties.location, hipMemAccessFlagsProtReadWrite};
  hipMemGenericAllocationHandle_t handle = nullptr;
  hipMemCreate(&handle, kPage, &properties, 0);
  hipMemAddressReserve(&made, 4 * kPage, 0, nullptr, 0);
  hipMemMap(made, kPage, 0, handle, 0);
  hipMemSetAccess(made, kPage, &grant, 1);
  keep(handles_, handle);
  reservations_.push_back({static_cast<char*>(made), 4 * kPage});
  mappings_.push_back({static_cast<char*>(made), kPage});
}

void Program::step() {
  const uint8_t group = reader_.byte();
  const uint8_t call = reader_.byte();
  switch (group % 16) {
    case 0:
    case 1:
      return use_memory(call);
    case 2:
    case 3:
    case 4:
      return use_virtual_memory(call);
    case 5:
      return use_stream(call);
    case 6:
    case 7:
      return use_event(call);
    case 8:
    case 9:
      return use_capture(call);
    case 10:
      return use_ipc(call);
    case 11:
    case 12:
      return copy(call);
    case 13:
      return call % 2 ? copy_batch() : copy_box(call % 4 == 0);
    case 14:
      return call % 2 ? ask(call / 2) : control(call / 2);
    default:
      return fork_capture();
  }
}

// --- memory ------------------------------------------------------------------------

void Program::use_memory(uint8_t call) {
  void* made = nullptr;
  switch (call % 8) {
    case 0:
    case 1:
      hipMalloc(out(&made), any_size());
      keep(allocations_, made);
      break;
    case 2: {
      void* pointer = reader_.rarely() ? device_address() : any(allocations_);
      if (hipFree(pointer) == hipSuccess) drop(allocations_, pointer, stale_);
      break;
    }
    case 3: {
      const size_t bytes = any_size();
      if (bytes >= kEnormous && bytes < 1ul << 40) break;  // the machine might have it
      hipHostMalloc(out(&made), bytes, reader_.byte());
      if (made != nullptr) locked_.push_back({static_cast<char*>(made), bytes});
      break;
    }
    case 4: {
      void* pointer = reader_.rarely() ? device_address() : any(locked_).begin;
      const hipError_t error = hipHostFree(pointer);
      // It may be gone although work that it waited for was a memory fault.
      if (error == hipErrorIllegalAddress) ended_.push_back(pointer);
      if (error == hipSuccess || error == hipErrorIllegalAddress) {
        drop(locked_, pointer);
      }
      break;
    }
    case 5: {
      const Range host = host_range();
      char* begin = reader_.rarely() ? device_address() : host.begin;
      const size_t bytes = any_size();
      if (begin == host.begin && bytes > host.bytes && bytes != SIZE_MAX) break;
      const unsigned flags = reader_.rarely() ? reader_.number() : 0;
      const hipError_t error = hipHostRegister(begin, bytes, flags);
      // Other work may have been a memory fault meanwhile.
      if (error == hipSuccess || error == hipErrorIllegalAddress) {
        registered_.push_back({begin, bytes});
      }
      break;
    }
    case 6: {
      void* pointer = reader_.rarely() ? device_address() : any(registered_).begin;
      if (hipHostUnregister(pointer) == hipSuccess) drop(registered_, pointer);
      break;
    }
    case 7: {
      char* host = any(registered_).begin;
      hipHostGetDevicePointer(out(&made), host, reader_.rarely());
      // The same address is host memory, of which a copy must not take too much.
      if (made != host) keep(aliases_, made);
      break;
    }
  }
}

// --- virtual memory ----------------------------------------------------------------

void Program::use_virtual_memory(uint8_t call) {
  const size_t bytes = reader_.byte() % 4 == 0 ? any_size() : kPage;
  char* address = reader_.rarely() ? device_address() : any(reservations_).begin;
  if (address != nullptr) address += reader_.byte() % 4 * kPage;
  switch (call % 12) {
    case 0: {
      void* made = nullptr;
      const size_t size = reader_.byte() % 2 ? 4 * kPage : any_size();
      hipMemAddressReserve(out(&made), size, reader_.rarely() ? any_size() : 0,
                           reader_.rarely() ? address : nullptr, reader_.rarely());
      if (made != nullptr) reservations_.push_back({static_cast<char*>(made), size});
      break;
    }
    case 1: {
      const Range range = any(reservations_);
      char* begin = reader_.rarely() ? device_address() : range.begin;
      if (hipMemAddressFree(begin, reader_.rarely() ? any_size() : range.bytes) ==
          hipSuccess) {
        if (drop(reservations_, begin)) stale_.push_back(begin);
      }
      break;
    }
    case 2:
    case 3: {
      hipMemGenericAllocationHandle_t handle = nullptr;
      const hipMemAllocationProp properties = any_properties();
      hipMemCreate(out(&handle), bytes, reader_.rarely() ? nullptr : &properties,
                   reader_.rarely());
      keep(handles_, handle);
      break;
    }
    case 4: {
      const auto handle = any_handle(handles_);
      if (hipMemRelease(handle) == hipSuccess) drop(handles_, handle, ended_);
      break;
    }
    case 5:
    case 6: {
      const size_t offset = reader_.rarely() ? any_size() : 0;
      const hipError_t error =
          hipMemMap(address, bytes, offset, any_handle(handles_), reader_.rarely());
      mappings_.push_back({address, bytes});
      if (error != hipSuccess) break;
      [[fallthrough]];
    }
    case 7: {
      std::vector<hipMemAccessDesc> grants(1 + reader_.byte() % 3);
      for (hipMemAccessDesc& grant : grants) {
        grant.location.type = reader_.rarely()
                                  ? static_cast<hipMemLocationType>(reader_.byte())
                                  : hipMemLocationTypeDevice;
        grant.location.id = reader_.rarely() ? any_device() : reader_.byte() % 2;
        grant.flags = reader_.rarely() ? static_cast<hipMemAccessFlags>(reader_.byte())
                                       : hipMemAccessFlagsProtReadWrite;
      }
      hipMemSetAccess(address, bytes, reader_.rarely() ? nullptr : grants.data(),
                      reader_.rarely() ? 0 : grants.size());
      break;
    }
    case 8: {
      const Range range = any(mappings_);
      const bool whole = !reader_.rarely();
      char* begin = whole ? range.begin : address;
      if (hipMemUnmap(begin, whole ? range.bytes : bytes) == hipSuccess && whole) {
        drop(mappings_, begin);
      }
      break;
    }
    case 9: {
      unsigned long long flags = 0;
      const hipMemLocation location{
          reader_.rarely() ? hipMemLocationTypeHost : hipMemLocationTypeDevice,
          any_device()};
      hipMemGetAccess(out(&flags), reader_.rarely() ? nullptr : &location, address);
      break;
    }
    case 10: {
      hipMemGenericAllocationHandle_t handle = nullptr;
      hipMemRetainAllocationHandle(out(&handle), address);
      keep(handles_, handle);
      break;
    }
    case 11: {
      hipMemAllocationProp properties{};
      hipMemGetAllocationPropertiesFromHandle(out(&properties), any_handle(handles_));
      size_t granularity = 0;
      properties = any_properties();
      hipMemGetAllocationGranularity(
          out(&granularity), reader_.rarely() ? nullptr : &properties,
          static_cast<hipMemAllocationGranularity_flags>(reader_.byte() % 3));
      break;
    }
  }
}

// --- streams and events ------------------------------------------------------------

void Program::use_stream(uint8_t call) {
  hipStream_t stream = nullptr;
  switch (call % 8) {
    case 0:
      hipStreamCreate(out(&stream));
      keep(streams_, stream);
      break;
    case 1:
    case 2:
      hipStreamCreateWithFlags(out(&stream), reader_.byte() % 3);
      keep(streams_, stream);
      break;
    case 3:
      hipStreamCreateWithPriority(out(&stream), reader_.byte() % 2,
                                  static_cast<int>(reader_.number()));
      keep(streams_, stream);
      break;
    case 4:
      stream = any_handle(streams_);
      if (hipStreamDestroy(stream) == hipSuccess) drop(streams_, stream, ended_);
      break;
    case 5:
      hipStreamQuery(any_stream());
      break;
    case 6:
      hipStreamSynchronize(any_stream());
      break;
    case 7:
      hipDeviceSynchronize();
      break;
  }
}

void Program::use_event(uint8_t call) {
  hipEvent_t event = nullptr;
  switch (call % 8) {
    case 0:
      hipEventCreate(out(&event));
      keep(events_, event);
      break;
    case 1:
      hipEventCreateWithFlags(out(&event), reader_.rarely() ? reader_.number() : 2);
      keep(events_, event);
      break;
    case 2:
      event = any_handle(events_);
      if (hipEventDestroy(event) == hipSuccess) drop(events_, event, ended_);
      break;
    case 3:
    case 4:
      hipEventRecord(any_handle(events_), any_stream());
      break;
    case 5:
      hipStreamWaitEvent(any_stream(), any_handle(events_),
                         reader_.rarely() ? reader_.byte() : 0);
      break;
    case 6:
      hipEventQuery(any_handle(events_));
      hipEventSynchronize(any_handle(events_));
      break;
    case 7: {
      float milliseconds = 0;
      hipEventElapsedTime(out(&milliseconds), any_handle(events_), any_handle(events_));
      break;
    }
  }
}

// --- capture -----------------------------------------------------------------------

void Program::use_capture(uint8_t call) {
  hipGraph_t graph = nullptr;
  hipGraphExec_t executable = nullptr;
  switch (call % 10) {
    case 0:
    case 1:
      hipStreamBeginCapture(
          any_stream(), static_cast<hipStreamCaptureMode>(
                            reader_.rarely() ? reader_.number() : reader_.byte() % 3));
      break;
    case 2:
    case 3:
      hipStreamEndCapture(any_stream(), out(&graph));
      keep(graphs_, graph);
      break;
    case 4: {
      hipStreamCaptureStatus status = hipStreamCaptureStatusNone;
      unsigned long long id = 0;
      hipStreamIsCapturing(any_stream(), out(&status));
      hipStreamGetCaptureInfo(any_stream(), out(&status), out(&id));
      break;
    }
    case 5: {
      auto mode = static_cast<hipStreamCaptureMode>(
          reader_.rarely() ? reader_.number() : reader_.byte() % 3);
      hipThreadExchangeStreamCaptureMode(out(&mode));
      break;
    }
    case 6: {
      hipGraphNode_t nodes[4];
      size_t count = reader_.byte() % 5;
      hipGraphGetNodes(any_handle(graphs_), out(nodes), out(&count));
      graph = any_handle(graphs_);
      if (reader_.byte() % 2 && hipGraphDestroy(graph) == hipSuccess)
        drop(graphs_, graph, ended_);
      break;
    }
    case 7: {
      char log[8];
      hipGraphNode_t node = nullptr;
      if (reader_.byte() % 2) {
        hipGraphInstantiate(out(&executable), any_handle(graphs_), out(&node), out(log),
                            sizeof log);
      } else {
        hipGraphInstantiateWithFlags(out(&executable), any_handle(graphs_),
                                     reader_.rarely() ? reader_.number() : 0);
      }
      keep(executables_, executable);
      break;
    }
    case 8:
      hipGraphLaunch(any_handle(executables_), any_stream());
      break;
    case 9:
      executable = any_handle(executables_);
      if (hipGraphExecDestroy(executable) == hipSuccess)
        drop(executables_, executable, ended_);
      break;
  }
}

// A capture that spreads to a second stream, with calls in between that may spoil it.
void Program::fork_capture() {
  const hipStream_t origin = any(streams_);
  const hipStream_t other = any(streams_);
  const hipEvent_t event = any(events_);
  hipStreamBeginCapture(origin, static_cast<hipStreamCaptureMode>(reader_.byte() % 3));
  hipEventRecord(event, origin);
  if (reader_.rarely()) step();
  hipStreamWaitEvent(other, event, 0);
  hipMemsetAsync(any(allocations_), 1, 16, other);
  if (reader_.rarely()) hipEventQuery(event);
  if (!reader_.rarely()) {
    hipEventRecord(event, other);
    hipStreamWaitEvent(origin, event, 0);
  }
  if (reader_.rarely()) step();
  hipGraph_t graph = nullptr;
  hipGraphExec_t executable = nullptr;
  hipStreamEndCapture(reader_.rarely() ? other : origin, &graph);
  keep(graphs_, graph);
  hipGraphInstantiateWithFlags(&executable, graph, 0);
  keep(executables_, executable);
  hipGraphLaunch(executable, any_stream());
}

// --- memory of other processes -----------------------------------------------------

void Program::use_ipc(uint8_t call) {
  hipIpcMemHandle_t handle{};
  void* made = nullptr;
  char* address = device_address();
  switch (call % 4) {
    case 0:
      hipIpcGetMemHandle(out(&handle), address);
      break;
    case 1:
      hipIpcGetMemHandle(&handle, address);
      reinterpret_cast<uint8_t*>(&handle)[reader_.byte() % sizeof handle] ^=
          reader_.byte();
      hipIpcOpenMemHandle(out(&made), handle, reader_.rarely() ? reader_.byte() : 1);
      keep(imports_, made);
      break;
    case 2:
      for (size_t i = 0; i < sizeof handle; ++i) {
        reinterpret_cast<uint8_t*>(&handle)[i] = reader_.byte();
      }
      hipIpcOpenMemHandle(out(&made), handle, 1);
      keep(imports_, made);
      break;
    case 3:
      hipIpcCloseMemHandle(imports_.empty() ? address : any(imports_));
      break;
  }
}

// --- copies ------------------------------------------------------------------------

void Program::copy(uint8_t call) {
  const size_t bytes = any_size();
  const auto [to, from] = sides(bytes, bytes);
  switch (call % 8) {
    case 0:
      hipMemset(to, reader_.byte(), bytes);
      break;
    case 1:
      hipMemsetAsync(to, reader_.byte(), bytes, any_stream());
      break;
    case 2:
    case 3:
      hipMemcpy(to, from, bytes, any_kind());
      break;
    case 4:
    case 5:
      hipMemcpyAsync(to, from, bytes, any_kind(), any_stream());
      break;
    default: {
      const size_t width = any_size();
      const size_t height = reader_.rarely() ? any_size() : reader_.byte() % 4;
      const auto pitch = [&] { return reader_.byte() % 2 ? kPage : any_size(); };
      const size_t to_pitch = pitch();
      const size_t from_pitch = pitch();
      const auto [plane_to, plane_from] =
          sides(footprint(width, height, 1, to_pitch, 0),
                footprint(width, height, 1, from_pitch, 0));
      if (call % 8 == 6) {
        hipMemcpy2D(plane_to, to_pitch, plane_from, from_pitch, width, height,
                    any_kind());
      } else {
        hipMemcpy2DAsync(plane_to, to_pitch, plane_from, from_pitch, width, height,
                         any_kind(), any_stream());
      }
    }
  }
}

void Program::copy_box(bool blocking) {
  hipMemcpy3DParms box{};
  const auto length = [&] {
    return reader_.rarely() ? any_size() : reader_.byte() % 5;
  };
  box.extent = {length() * 16, length(), length()};
  size_t reach[2];
  hipPos* const positions[] = {&box.dstPos, &box.srcPos};
  hipPitchedPtr* const pointers[] = {&box.dstPtr, &box.srcPtr};
  for (int i = 0; i < 2; ++i) {
    hipPos& position = *positions[i];
    hipPitchedPtr& pointer = *pointers[i];
    if (reader_.rarely()) position = {length(), length(), length()};
    pointer.pitch = reader_.byte() % 4 == 0 ? any_size() : 256;
    pointer.xsize = reader_.byte() % 2 ? any_size() : 0;
    pointer.ysize = length();
    const size_t row = pointer.pitch != 0 ? pointer.pitch : box.extent.width;
    const size_t rows = pointer.ysize != 0 ? pointer.ysize : box.extent.height;
    const bool far = position.x >= kEnormous || position.y >= kEnormous ||
                     position.z >= kEnormous || row >= kEnormous || rows >= kEnormous;
    const size_t slice = far ? kEnormous : row * rows;
    const size_t lead =
        footprint(position.x + 1, position.y + 1, position.z + 1, row, slice);
    const size_t body =
        footprint(box.extent.width, box.extent.height, box.extent.depth, row, slice);
    reach[i] = std::min(kEnormous, far ? kEnormous : lead + body);
  }
  const auto [to, from] = sides(reach[0], reach[1]);
  box.dstPtr.ptr = to;
  box.srcPtr.ptr = from;
  box.kind = any_kind();
  if (reader_.rarely()) box.dstArray = reinterpret_cast<hipArray_t>(arena);
  const hipMemcpy3DParms* parameters = reader_.rarely() ? nullptr : &box;
  if (blocking) {
    hipMemcpy3D(parameters);
  } else {
    hipMemcpy3DAsync(parameters, any_stream());
  }
}

void Program::copy_batch() {
  // More than the blit kernel takes, now and then.
  const size_t count = reader_.rarely() ? 8200 : reader_.byte() % 6;
  std::vector<void*> destinations(count);
  std::vector<void*> sources(count);
  std::vector<size_t> sizes(count);
  for (size_t i = 0; i < count; ++i) {
    if (i >= 8) {
      destinations[i] = destinations[0];
      sources[i] = sources[0];
      sizes[i] = sizes[0];
      continue;
    }
    sizes[i] = any_size();
    const auto [to, from] = sides(sizes[i], sizes[i]);
    destinations[i] = to;
    sources[i] = from;
  }
  std::vector<hipMemcpyAttributes> attributes(reader_.byte() % 4);
  std::vector<size_t> firsts(attributes.size());
  for (size_t i = 0; i < attributes.size(); ++i) {
    attributes[i].srcAccessOrder = static_cast<decltype(attributes[i].srcAccessOrder)>(
        reader_.rarely() ? reader_.number() : 1 + reader_.byte() % 3);
    attributes[i].flags =
        reader_.rarely() ? reader_.number() : reader_.byte() % 2 * 256;
    firsts[i] = reader_.rarely() ? any_size() : i;
  }
  size_t fail_index = 0;
  // Arrays that are there have the entries that the call is told.
  const bool without_arrays = reader_.rarely();
  const size_t told = without_arrays ? any_size() : count;
  const size_t sets =
      reader_.rarely() ? std::max(told, size_t{4}) + 1 : attributes.size();
  const bool without_sets = sets > attributes.size() || reader_.rarely();
  hipMemcpyBatchAsync(without_arrays ? nullptr : destinations.data(), sources.data(),
                      without_arrays ? nullptr : sizes.data(), told,
                      without_sets ? nullptr : attributes.data(),
                      without_sets ? nullptr : firsts.data(), sets, out(&fail_index),
                      any_stream());
}

// --- the rest ----------------------------------------------------------------------

void Program::ask(uint8_t call) {
  int value = 0;
  char text[16];
  size_t bytes = 0;
  size_t total = 0;
  switch (call % 8) {
    case 0:
      hipInit(reader_.rarely());
      hipRuntimeGetVersion(out(&value));
      hipDriverGetVersion(out(&value));
      break;
    case 1:
      hipGetErrorName(static_cast<hipError_t>(reader_.number()));
      hipGetErrorString(static_cast<hipError_t>(reader_.number()));
      hipGetErrorString(hipGetLastError());
      break;
    case 2:
      hipPeekAtLastError();
      hipGetDeviceCount(out(&value));
      break;
    case 3:
      hipSetDevice(any_device());
      hipGetDevice(out(&value));
      break;
    case 4:
      hipDeviceGetAttribute(
          out(&value), static_cast<hipDeviceAttribute_t>(reader_.byte()), any_device());
      hipDeviceGetPCIBusId(out(text), reader_.byte() % (sizeof text + 1), any_device());
      break;
    case 5:
      hipDeviceGetStreamPriorityRange(out(&value), out(&value));
      break;
    case 6:
      hipMemGetInfo(out(&bytes), out(&total));
      break;
    case 7: {
      hipDeviceptr_t base = nullptr;
      hipMemGetAddressRange(out(&base), out(&bytes), device_address());
      break;
    }
  }
}

void Program::control(uint8_t call) {
  constexpr const char* kSwitches[] = {"corrupt_loads",        "host_device_pointers",
                                       "one_mapping_copies",   "host_reads",
                                       "copy_latency_us",      "fill_latency_us",
                                       "stale_memory",         "no_such_switch",
                                       "ignore_address_hints", "max_registration_bytes",
                                       "max_locked_bytes",     "locked_memory",
                                       "no_virtual_memory",    "small_bar"};
  hipsim_stat stats[3];
  switch (call % 4) {
    case 0:
      hipsim_set_switch(kSwitches[reader_.byte() % std::size(kSwitches)],
                        static_cast<int8_t>(reader_.byte()) / 8);
      break;
    case 1:
      hipsim_fail(hipsim_call_name(reader_.byte()), reader_.byte() % 3,
                  static_cast<int>(reader_.byte()));
      break;
    case 2:
      if (reader_.rarely()) hipsim_reset(hipsim_profile_name(reader_.byte() % 8));
      break;
    case 3:
      hipsim_stats(stats, reader_.byte() % 4);
      break;
  }
}

// --- the end -----------------------------------------------------------------------

void Program::end() {
  hipsim_reset(nullptr);
  auto mode = hipStreamCaptureModeGlobal;
  hipThreadExchangeStreamCaptureMode(&mode);
  for (const auto executable : executables_) hipGraphExecDestroy(executable);
  for (const auto graph : graphs_) hipGraphDestroy(graph);
  for (const auto stream : streams_) hipStreamDestroy(stream);
  for (const auto event : events_) hipEventDestroy(event);
  for (void* import : imports_) hipIpcCloseMemHandle(import);
  for (const Range& range : mappings_) hipMemUnmap(range.begin, range.bytes);
  for (const Range& range : reservations_) hipMemAddressFree(range.begin, range.bytes);
  for (const auto handle : handles_) hipMemRelease(handle);
  for (void* pointer : allocations_) hipFree(pointer);
  for (const Range& range : locked_) hipHostFree(range.begin);
  for (void* pointer : ended_) hipHostFree(pointer);
  for (const Range& range : registered_) hipHostUnregister(range.begin);

  constexpr const char* kLive[] = {
      "streams",      "events",  "device_allocations", "registered_ranges",
      "reservations", "handles", "host_allocations",   "mappings",
      "captures",     "graphs",  "executables",        "imports"};
  std::vector<hipsim_stat> stats(hipsim_stats(nullptr, 0));
  hipsim_stats(stats.data(), stats.size());
  for (const char* live : kLive) {
    const auto found = std::find_if(stats.begin(), stats.end(), [&](const auto& each) {
      return std::strcmp(each.name, live) == 0;
    });
    if (found == stats.end()) complain("there is no such statistic", 0);
    if (found->value != 0) complain(live, found->value);
  }
  for (int device = 0; device < kDevices; ++device) {
    size_t free = 0;
    size_t total = 0;
    hipSetDevice(device);
    hipMemGetInfo(&free, &total);
    if (free != total || total != kVram) complain("bytes are missing", total - free);
  }
  hipSetDevice(0);
  hipGetLastError();
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  setenv("HIPSIM_VRAM_BYTES", std::to_string(kVram).c_str(), 1);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Program program(Reader(data, size));
  program.run();
  program.end();
  return 0;
}

// Copies of a program that orders none of its streams race with each other, and that is
// the program's fault.
extern "C" const char* __tsan_default_suppressions() {
  return "race:hipsim::perform\nrace:hipsim::Runtime::fill\n";
}
