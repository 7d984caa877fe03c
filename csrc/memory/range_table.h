// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <tuple>
#include <vector>

#include "gpu/driver_api.h"
#include "memory/transfer.h"
#include "memory/vmm_range.h"

namespace memory {

// A range was named that does not exist.
class NoSuchRange : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

// Note [Claims]
// PyTorch calls my_malloc with the mutex of its allocator held, so an allocation must
// not wait for work on a device or for a copy of another thread. The mutex here guards
// the table alone, and no call of the driver is made under it. Who works on ranges that
// are in the table claims them first, all at once, and whoever else names one of them
// waits for the claim to end; an allocation names none. What a range is (address, size,
// chunks) never changes and is read without a claim, what becomes of it (mapped or not)
// is not.
//
// Every function first tries again what has failed before; an error that one throws is
// about what it was asked for. Some of that needs a wait for a device, or is refused
// while a graph is captured and spoils the capture: it is left to the functions that
// wait for devices themselves.

// The ranges of this process. Thread-safe. No function but `allocate` may be called by
// whoever holds what the holder of a claim may be waiting for.
class RangeTable {
 public:
  // device address, bytes, host address
  using Copy = std::tuple<gpu::Address, size_t, uintptr_t>;
  using Fill = std::tuple<gpu::Address, size_t>;

  // What is known of a range to its user.
  struct Entry {
    int device;
    size_t bytes;
    gpu::Address address;
    struct Chunk {
      uintptr_t slot;
      size_t bytes;
    };
    std::vector<Chunk> chunks;
  };

  static RangeTable& of_process();

  // A new range with memory, of `bytes` rounded up to the device's granularity, as are
  // `chunk_bytes`.
  Entry allocate(gpu::Driver& driver, int device, size_t bytes, size_t chunk_bytes);
  // Waits for the device of a range that is mapped.
  void free(gpu::Driver& driver, gpu::Address address);
  // `free` of a range that no work can be using.
  void free_unused(gpu::Driver& driver, gpu::Address address);

  void map(gpu::Driver& driver, gpu::Address address);
  // See `suspend` of the Python module.
  void suspend(gpu::Driver& driver, const std::vector<gpu::Address>& addresses);

  void copy_out(gpu::Driver& driver, const std::vector<Copy>& copies,
                const TransferOptions& options = {});
  void copy_in(gpu::Driver& driver, const std::vector<Copy>& copies,
               const std::vector<Fill>& zeros, const TransferOptions& options = {});

  // Tries everything again; how much is left, without what is claimed.
  size_t retry(gpu::Driver& driver);

  Entry entry(gpu::Address address) const;
  bool is_mapped(gpu::Address address) const;
  std::vector<gpu::Address> addresses() const;

 private:
  class Claim;

  // Freed by its user, and not yet by the driver.
  struct Dying {
    std::unique_ptr<VmmRange> range;
    bool is_idle;  // no work on the device is using it
  };

  VmmRange& at(gpu::Address address) const;
  VmmRange& around(gpu::Address address, size_t bytes) const;
  bool meets_another(gpu::Address address, size_t bytes) const;
  size_t settle(gpu::Driver& driver, bool may_wait);
  void remove(gpu::Driver& driver, gpu::Address address, bool may_be_in_use);
  Failure give_back(gpu::Driver& driver, Dying& dying, gpu::DeviceScope& scope);
  void keep(Dying dying);

  mutable std::mutex mutex_;
  mutable std::condition_variable claim_ended_;
  std::set<const VmmRange*> claimed_;
  std::map<gpu::Address, std::unique_ptr<VmmRange>> ranges_;
  std::list<Dying> dying_;
};

}  // namespace memory
