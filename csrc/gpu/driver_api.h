// SPDX-License-Identifier: Apache-2.0
//
// Note [The driver table]
// The calls that this project makes of a GPU, for both vendors behind one interface.
// The functions are looked up at run time, in the library that the process uses
// already, so one binary serves HIP, CUDA and the simulators of both, and building it
// takes no SDK. A call answers with a Status and keeps no state; what becomes of a
// failure is for the caller to say, who may have something to undo first. After a
// failing call of HIP the thread's last error is taken back, for whoever asks for it
// next would take it for his own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <stdexcept>
#include <string>

namespace gpu {

using Address = uintptr_t;
// A driver's name for physical memory, as wide as both vendors have it; 0 is none.
using Handle = uint64_t;
using Stream = void*;

enum class Vendor { kHip, kCuda };

// What a call of the driver said; 0 is success for both vendors.
struct [[nodiscard]] Status {
  const char* call = "";
  int error = 0;

  bool ok() const { return error == 0; }
};

// What a failing call was about.
struct Subject {
  std::optional<int> device;
  std::optional<size_t> bytes;
};

struct MemoryInfo {
  size_t free = 0;
  size_t total = 0;
};

// Rows of one width, each pitch * lines bytes behind the one before it, on either side.
// Lines of 1 and 1 are a plane, whose pitch is 2^31 - 1 at most by the devices' word:
// HIP's tests want more refused, CUDA's driver was seen to take it. Others are a box of
// slices that have one row each: their distance is that of the slices, which may be
// wider.
struct Rectangle {
  Address target;
  Address source;
  size_t width;  // bytes
  size_t rows;
  size_t target_pitch;  // bytes
  size_t source_pitch;
  size_t target_lines;
  size_t source_lines;

  bool is_plane() const { return target_lines == 1 && source_lines == 1; }
};

class DriverError : public std::runtime_error {
 public:
  DriverError(const std::string& text, Status status, std::string name, Subject subject,
              std::optional<MemoryInfo> memory)
      : std::runtime_error(text),
        status(status),
        name(std::move(name)),
        subject(subject),
        memory(memory) {}

  const Status status;
  const std::string name;
  const Subject subject;
  const std::optional<MemoryInfo> memory;
};

class OutOfMemoryError : public DriverError {
 public:
  using DriverError::DriverError;
};

class DriverNotFoundError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// An error that has been described where it happened and may be thrown later, when what
// came before it is undone. Null is success.
using Failure = std::exception_ptr;

inline void keep_first(Failure& first, const Failure& next) {
  if (!first) first = next;
}

inline void throw_if(const Failure& failure) {
  if (failure) std::rethrow_exception(failure);
}

// Its message, for a log line.
std::string describe(const Failure& failure);

// "0x7f12a0000000"
std::string format_address(Address address);

// "268435456 bytes (256.0 MiB)"
std::string format_bytes(size_t bytes);

class Driver {
 public:
  // The one of this process, found at the first call that finds one. Throws
  // DriverNotFoundError.
  static Driver& get();

  virtual ~Driver() = default;
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;

  virtual Vendor vendor() const = 0;
  virtual std::string path() const = 0;

  // hipRuntimeGetVersion, or cuDriverGetVersion; 0 until the driver has said.
  virtual int version() = 0;

  // Memory that was unmapped and released is the device's again only when its address
  // range is freed: legacy-rocm-build#6021, fixed in HIP 7.13 by rocm-systems#4363.
  virtual bool frees_memory_with_address() = 0;

  // The host may be given access to a mapping (HIP 7.2, rocm-systems#1620), and has to
  // be: PyTorch reads scalars through the large BAR.
  virtual bool maps_for_host() = 0;

  virtual Status supports_virtual_memory(int device, bool* answer) = 0;

  // One copy may span neighbouring mappings. HIP checks a copy against the object that
  // holds its first byte, and which of several mappings' objects that is, is not
  // established.
  virtual bool copies_across_mappings() const = 0;

  // Where the device is on the PCI bus, as "0000:c1:00.0", in either case. Not
  // supported by a driver that lacks the function.
  virtual Status bus_id(int device, std::string* id) = 0;

  // Of a status that is not ok; asks the device how much memory is free.
  Failure failure(Status status, const Subject& subject);

  // --- where calls go to: a device of HIP, a context of CUDA -------------------------
  using Place = uintptr_t;
  virtual Status current_place(Place* place) = 0;
  virtual Status place_of(int device, Place* place) = 0;
  virtual Status enter(Place place) = 0;
  // No device is current, and one has to be.
  virtual bool is_nowhere(Place place) const = 0;

  // --- of the current device
  // -----------------------------------------------------------
  virtual Status synchronize_device() = 0;
  virtual Status memory_info(MemoryInfo* info) = 0;
  virtual Status create_stream(Stream* stream) = 0;  // a non-blocking one
  virtual Status synchronize_stream(Stream stream) = 0;
  virtual Status destroy_stream(Stream stream) = 0;
  virtual Status copy_to_host(void* host, Address source, size_t bytes,
                              Stream stream) = 0;
  virtual Status copy_to_device(Address target, const void* host, size_t bytes,
                                Stream stream) = 0;
  // From and to any memory that the driver knows.
  virtual Status copy_rectangle(const Rectangle& rectangle, Stream stream) = 0;
  virtual Status zero(Address target, size_t bytes, Stream stream) = 0;
  virtual Status register_host(void* host, size_t bytes) = 0;  // for every device
  virtual Status unregister_host(void* host) = 0;
  // Page-locked for every device. Not supported by a driver that lacks the functions.
  virtual Status allocate_host(void** host, size_t bytes) = 0;
  virtual Status free_host(void* host) = 0;

  // --- virtual memory
  // ------------------------------------------------------------------
  virtual Status granularity(int device, size_t* bytes) = 0;
  // What a reservation is asked to be aligned to: 0 leaves it to the driver.
  virtual size_t alignment(size_t granularity) const = 0;
  virtual Status reserve(Address* address, size_t bytes, size_t alignment,
                         Address wish) = 0;
  virtual Status free_address(Address address, size_t bytes) = 0;
  // free_address() is known to refuse a range in which anything is mapped.
  virtual bool keeps_addresses_of_mappings() const = 0;
  virtual Status create(Handle* handle, size_t bytes, int device) = 0;
  virtual Status release(Handle handle) = 0;
  virtual Status map(Address address, size_t bytes, Handle handle) = 0;
  virtual Status unmap(Address address, size_t bytes) = 0;
  // For the device, and for the host where maps_for_host().
  virtual Status allow_access(Address address, size_t bytes, int device) = 0;

 protected:
  virtual std::string error_name(int error) = 0;
  virtual std::string error_text(int error) = 0;
};

// Makes devices current, and puts back what was current before.
class DeviceScope {
 public:
  explicit DeviceScope(Driver& driver) : driver_(driver) {}
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

  Status use(int device);
  // Whichever is current, or the first where none is.
  Status use_any();

 private:
  Status remember();
  Status enter(Driver::Place place);

  Driver& driver_;
  std::optional<Driver::Place> before_;
  Driver::Place now_ = 0;
};

}  // namespace gpu
