// SPDX-License-Identifier: Apache-2.0
#include "machine.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "hipsim/bridge/hipsim_control.h"
#include "memory/leftovers.h"

namespace host_memory {
namespace {

constexpr Calls kHip = {
    "hipSetDevice",         "hipDeviceSynchronize", "hipStreamCreateWithFlags",
    "hipStreamSynchronize", "hipStreamDestroy",     "hipMemcpyAsync",
    "hipMemcpyAsync",       "hipMemsetAsync",       "hipHostRegister",
    "hipHostUnregister",    "hipHostMalloc",        "hipHostFree"};

constexpr Calls kCuda = {
    "cuCtxSetCurrent",      "cuCtxSynchronize",   "cuStreamCreate",
    "cuStreamSynchronize",  "cuStreamDestroy_v2", "cuMemcpyDtoHAsync_v2",
    "cuMemcpyHtoDAsync_v2", "cuMemsetD8Async",    "cuMemHostRegister_v2",
    "cuMemHostUnregister",  "cuMemHostAlloc",     "cuMemFreeHost"};

void* simulator = nullptr;

template <typename Function>
Function* control(Function*, const char* name) {
  auto* const found = reinterpret_cast<Function*>(dlsym(simulator, name));
  if (found == nullptr) test::fail(__FILE__, __LINE__, std::string("no ") + name);
  return found;
}

#define CONTROL(name) control(static_cast<decltype(&(name))>(nullptr), #name)

void fill_randomly(Bytes& bytes, unsigned seed) {
  uint64_t state = seed * 0x9E3779B97F4A7C15u + 1;
  for (size_t i = 0; i < bytes.size(); i += sizeof state) {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    std::memcpy(&bytes[i], &state, std::min(sizeof state, bytes.size() - i));
  }
}

}  // namespace

void load_simulator(const char* library) {
  simulator = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (simulator != nullptr) return;
  std::fprintf(stderr, "%s\n", dlerror());
  std::exit(2);
}

// --- the machine ---------------------------------------------------------------------

Machine::Machine()
    : driver(gpu::Driver::get()),
      ranges(memory::RangeTable::of_process()),
      calls(is_hip() ? kHip : kCuda) {
  reset();
}

Machine::~Machine() {
  reset();
  settle();
  for (const char* name : {"streams", "registered_ranges", "host_allocations",
                           "reservations", "handles", "mappings"}) {
    if (stat(name) != 0) test::fail(__FILE__, __LINE__, std::string("left: ") + name);
  }
}

void Machine::reset() { CHECK(CONTROL(hipsim_reset)(nullptr) == 0); }

void Machine::fail(const char* call, uint64_t nth, int error) {
  CHECK(CONTROL(hipsim_fail)(call, nth, error) == 0);
}

void Machine::set_switch(const char* name, int64_t value) {
  CHECK(CONTROL(hipsim_set_switch)(name, value) == 0);
}

uint64_t Machine::stat(const std::string& name) const {
  const auto read = CONTROL(hipsim_stats);
  std::vector<hipsim_stat> all(read(nullptr, 0));
  read(all.data(), all.size());
  for (const hipsim_stat& each : all) {
    if (name == each.name) return each.value;
  }
  test::fail(__FILE__, __LINE__, "no statistic " + name);
}

uint64_t Machine::count(const char* call) const {
  return stat(std::string("calls.") + call);
}

uint64_t Machine::copied(const char* memory) const {
  const std::string name = std::string("host_bytes.") + memory;
  return stat(name + ".h2d") + stat(name + ".d2h");
}

void Machine::back_up(const Copies& copies, const memory::TransferOptions& options) {
  ranges.copy_out(driver, copies, options);
}

void Machine::restore(const Copies& copies, const Fills& zeros,
                      const memory::TransferOptions& options) {
  ranges.copy_in(driver, copies, zeros, options);
}

void Machine::settle() { CHECK_EQ(ranges.retry(driver), 0); }

// --- what is on it -------------------------------------------------------------------

Block::Block(Machine& machine, unsigned seed, int device)
    : machine_(machine),
      address_(machine.ranges.allocate(machine.driver, device, kRange, kChunk).address),
      contents_(kRange) {
  change(seed);
}

Block::~Block() { machine_.ranges.free(machine_.driver, address_); }

Copies Block::copies(char* host) const { return copies(host, 1, 0); }

Copies Block::copies(char* host, size_t count, size_t stride) const {
  Copies made;
  const size_t bytes = kRange / count;
  for (size_t i = 0; i < count; ++i) {
    made.emplace_back(address_ + i * bytes, bytes,
                      reinterpret_cast<uintptr_t>(host + i * stride));
  }
  return made;
}

void Block::change(unsigned seed) {
  fill_randomly(contents_, seed);
  write();
}

void Block::write() {
  machine_.restore(copies(reinterpret_cast<char*>(contents_.data())));
}

void Block::wipe() { machine_.restore({}, fills()); }

bool Block::is_there() const {
  Bytes found(kRange);
  machine_.back_up(copies(reinterpret_cast<char*>(found.data())));
  return found == contents_;
}

bool Block::is_in(const Copies& copies) const {
  return std::all_of(copies.begin(), copies.end(), [&](const auto& copy) {
    const auto& [address, bytes, host] = copy;
    return std::memcmp(reinterpret_cast<const char*>(host),
                       contents_.data() + (address - address_), bytes) == 0;
  });
}

Copies operator+(Copies one, const Copies& other) {
  one.insert(one.end(), other.begin(), other.end());
  return one;
}

void release(HostArena& arena) {
  CHECK_EQ(arena.release(0, arena.bytes()), arena.bytes());
  CHECK(arena.prepared() == 0 && arena.registered() == 0);
}

}  // namespace host_memory
