// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "case.h"
#include "gpu/driver_api.h"
#include "memory/host_arena.h"
#include "memory/range_table.h"

namespace host_memory {

using Bytes = std::vector<unsigned char>;
using memory::HostArena;
using Copies = std::vector<memory::RangeTable::Copy>;
using Fills = std::vector<memory::RangeTable::Fill>;
using Arena = std::shared_ptr<HostArena>;

// Loads the library of a vendor's simulator, which is the process's driver from then
// on.
void load_simulator(const char* library);

// Of a range, of its chunks (CUDA's driver has none that small), and of a piece.
constexpr size_t kRange = size_t{512} << 10;
constexpr size_t kChunk = kRange / 4;
constexpr size_t kPiece = kRange / 32;

// The functions of the vendor's driver, by what they do here.
struct Calls {
  const char* enter;
  const char* synchronize_device;
  const char* create_stream;
  const char* synchronize_stream;
  const char* destroy_stream;
  const char* copy_out;
  const char* copy_in;
  const char* fill;
  const char* register_host;
  const char* unregister_host;
  const char* allocate_host;
  const char* free_host;
};

// The simulated machine of this process. At its end nothing may be left of what was
// made on it.
class Machine {
 public:
  Machine();
  ~Machine();
  Machine(const Machine&) = delete;
  Machine& operator=(const Machine&) = delete;

  // Counters, faults and switches begin anew.
  void reset();
  // The nth call from now on fails.
  void fail(const char* call, uint64_t nth, int error = 2);
  void set_switch(const char* name, int64_t value);
  uint64_t stat(const std::string& name) const;
  uint64_t count(const char* call) const;
  // Bytes that went over the link to or from such memory of the host.
  uint64_t copied(const char* memory) const;
  bool is_hip() const { return driver.vendor() == gpu::Vendor::kHip; }

  void back_up(const Copies& copies, const memory::TransferOptions& options = {});
  void restore(const Copies& copies, const Fills& zeros = {},
               const memory::TransferOptions& options = {});

  // Tries again what the driver did not take back; nothing may be left of it.
  void settle();

  gpu::Driver& driver;
  memory::RangeTable& ranges;
  const Calls& calls;
};

// The first kRange bytes of a range of a device, and what is in them.
class Block {
 public:
  Block(Machine& machine, unsigned seed, int device = 0);
  ~Block();
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  gpu::Address address() const { return address_; }

  // All of it, from some host address on.
  Copies copies(char* host) const;
  // In `count` pieces of equal size, `stride` bytes from each other on the host.
  Copies copies(char* host, size_t count, size_t stride) const;
  Fills fills() const { return {{address_, kRange}}; }

  // Other contents on the device than before.
  void change(unsigned seed);
  void wipe();
  // Puts the contents there again.
  void write();
  // Are the contents on the device, and where the copies have put them?
  bool is_there() const;
  bool is_in(const Copies& copies) const;

 private:
  Machine& machine_;
  gpu::Address address_;
  Bytes contents_;
};

Copies operator+(Copies one, const Copies& other);

// Runs something in a thread until it is asked to end, or the other way round.
class Beside {
 public:
  // `body` is called again and again.
  template <typename Body>
  explicit Beside(Body body)
      : thread_([this, body] {
          do {
            body();
          } while (!is_over_);
        }) {}
  ~Beside() {
    is_over_ = true;
    thread_.join();
  }

 private:
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
};

// Runs the bodies at once, each in a thread of its own.
template <typename... Bodies>
void at_once(Bodies... bodies) {
  std::vector<std::thread> threads;
  (threads.emplace_back(bodies), ...);
  for (std::thread& thread : threads) thread.join();
}

// Gives an arena back to where it begins.
void release(HostArena& arena);

}  // namespace host_memory
