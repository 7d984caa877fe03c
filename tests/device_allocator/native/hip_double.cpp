// SPDX-License-Identifier: Apache-2.0
// A HIP runtime in front of the simulator, for what HIP was seen to do and the
// simulator does not. What is not here is the simulator's.
#include <dlfcn.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>

#include "gpu/driver_abi.h"

namespace hip = gpu::hip;

namespace {

constexpr hip::Error kInvalidValue = 1;
constexpr hip::Error kOutOfMemory = 2;
constexpr size_t kPage = 4096;

size_t granularity = kPage;
bool are_reservations_misaligned = false;
uintptr_t only_address = 0;
int silent_map = 0;
bool are_addresses_reused = false;
std::atomic<uintptr_t> last_freed = 0;
std::string bus_id;

template <typename Function>
Function* real(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

#define REAL(name) real(&name, #name)

extern "C" {

// --- what a test sets ----------------------------------------------------------------

// Reservations refuse an alignment, and without one are not aligned to `bytes`.
void misalign_reservations(size_t bytes) {
  granularity = bytes;
  are_reservations_misaligned = true;
}

// Reservations that wish for an address are refused, and others get this one; 0 ends
// it.
void reserve_only(uintptr_t address) { only_address = address; }

// The nth mapping from now on is not made, and nobody is told.
void fail_silently(int nth) { silent_map = nth; }

// Addresses go to who asks first after they were freed, which takes its time.
void reuse_addresses(int whether) { are_addresses_reused = whether != 0; }

// Every device is there on the bus.
void place_devices(const char* where) { bus_id = where; }

// --- HIP -----------------------------------------------------------------------------

hip::Error hipMemGetAllocationGranularity(size_t* bytes, const hip::MemAllocationProp*,
                                          hip::Granularity) {
  *bytes = granularity;
  return hip::kSuccess;
}

hip::Error hipMemAddressFree(void* pointer, size_t bytes) {
  const hip::Error error = REAL(hipMemAddressFree)(pointer, bytes);
  if (are_addresses_reused && error == hip::kSuccess) {
    last_freed = reinterpret_cast<uintptr_t>(pointer);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return error;
}

hip::Error hipMemAddressReserve(void** pointer, size_t bytes, size_t alignment,
                                void* wish, unsigned long long flags) {
  const auto reserve = REAL(hipMemAddressReserve);
  if (only_address != 0) {
    if (wish != nullptr) return kOutOfMemory;
    return reserve(pointer, bytes, alignment, reinterpret_cast<void*>(only_address),
                   flags);
  }
  if (are_addresses_reused && wish == nullptr) {
    wish = reinterpret_cast<void*>(last_freed.load());
  }
  if (!are_reservations_misaligned) {
    return reserve(pointer, bytes, alignment, wish, flags);
  }
  if (alignment != 0) return kInvalidValue;
  const hip::Error error = reserve(pointer, bytes, 0, wish, flags);
  if (error != hip::kSuccess) return error;
  if (reinterpret_cast<uintptr_t>(*pointer) % granularity != 0) return error;
  REAL(hipMemAddressFree)(*pointer, bytes);
  return reserve(pointer, bytes, 0, static_cast<char*>(*pointer) + kPage, flags);
}

hip::Error hipMemMap(void* pointer, size_t bytes, size_t offset, hip::Handle handle,
                     unsigned long long flags) {
  if (silent_map > 0 && --silent_map == 0) return hip::kSuccess;
  return REAL(hipMemMap)(pointer, bytes, offset, handle, flags);
}

hip::Error hipDeviceGetPCIBusId(char* id, int length, int device) {
  if (bus_id.empty()) return REAL(hipDeviceGetPCIBusId)(id, length, device);
  const int needed =
      std::snprintf(id, static_cast<size_t>(length), "%s", bus_id.c_str());
  return needed < length ? hip::kSuccess : kInvalidValue;
}

}  // extern "C"
