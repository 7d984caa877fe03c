// SPDX-License-Identifier: Apache-2.0
//
// What is in memory that nobody has written. HIP promises nothing, so all of this is
// about the simulator's switch: what must not depend on clean memory is tested with
// memory that is not.
#include <algorithm>
#include <functional>
#include <set>

#include "virtual_memory.h"

namespace contract {
namespace {

constexpr const char* kSource =
    "vllm#44972: amdgpu before 6.14 need not wipe what is released";

enum Stale { kClean = 0, kAsLeft = 1, kPoisoned = 2 };

constexpr unsigned char kPoison = 0xFF;

void need_simulator() {
  if (!simulated()) SKIP("HIP promises nothing");
}

// Memory of each kind: allocated, and mapped from a handle.
struct Kind {
  const char* name;

  // Gives fresh memory of kChunk to the function.
  std::function<void(const std::function<void(void*)>&)> with_memory;
};

const std::vector<Kind>& kinds() {
  static const std::vector<Kind> all = {
      {"hipMalloc",
       [](const std::function<void(void*)>& use) {
         DeviceMemory memory(kChunk);
         use(memory);
       }},
      {"hipMemCreate",
       [](const std::function<void(void*)>& use) {
         MappedMemory memory;
         use(memory.get());
       }},
  };
  return all;
}

// What memory holds that is had after other memory was filled and given back.
Bytes second_hand(const Kind& first, const Kind& second, unsigned char left) {
  first.with_memory([&](void* memory) { upload(memory, Bytes(kChunk, left)); });
  Bytes found;
  second.with_memory([&](void* memory) { found = download(memory, kChunk); });
  return found;
}

CASE(stale_memory, is_clean_unless_told_otherwise, kSource, hipMalloc, hipMemCreate) {
  need_simulator();
  for (const Kind& first : kinds()) {
    for (const Kind& second : kinds()) {
      EXPECT_BYTES(second_hand(first, second, 0x5A).data(), Bytes(kChunk, 0));
    }
  }
}

CASE(stale_memory, comes_back_as_it_was_left, kSource, hipMalloc, hipMemCreate, hipFree,
     hipMemRelease) {
  need_simulator();
  set_switch("stale_memory", kAsLeft);
  unsigned char left = 1;
  for (const Kind& first : kinds()) {
    for (const Kind& second : kinds()) {
      ++left;
      EXPECT_BYTES(second_hand(first, second, left).data(), Bytes(kChunk, left));
    }
  }
}

CASE(stale_memory, comes_poisoned, kSource, hipMalloc, hipMemCreate) {
  need_simulator();
  set_switch("stale_memory", kPoisoned);
  for (const Kind& first : kinds()) {
    for (const Kind& second : kinds()) {
      EXPECT_BYTES(second_hand(first, second, 0x5A).data(), Bytes(kChunk, kPoison));
    }
  }
}

CASE(stale_memory, is_clean_again, kSource, hipMalloc, hipMemCreate) {
  need_simulator();
  for (const Stale before : {kAsLeft, kPoisoned}) {
    for (const Kind& kind : kinds()) {
      set_switch("stale_memory", before);
      kind.with_memory([&](void* memory) { upload(memory, Bytes(kChunk, 0x5A)); });
      set_switch("stale_memory", kClean);
      kind.with_memory([&](void* memory) {
        EXPECT_BYTES(download(memory, kChunk).data(), Bytes(kChunk, 0));
      });
    }
  }
}

CASE(stale_memory, every_byte_is_poisoned, kSource, hipMalloc) {
  need_simulator();
  set_switch("stale_memory", kPoisoned);
  for (const size_t size : {size_t{1}, size_t{4095}, size_t{4097}, kChunk + 1}) {
    DeviceMemory memory(size);
    EXPECT_BYTES(download(memory, size).data(), Bytes(size, kPoison));
  }
}

CASE(stale_memory, of_every_device, kSource, hipMalloc, hipSetDevice) {
  need_simulator();
  set_switch("stale_memory", kPoisoned);
  for (int device = 0; device < device_count(); ++device) {
    CurrentDevice current(device);
    DeviceMemory memory(4096);
    EXPECT_BYTES(download(memory, 4096).data(), Bytes(4096, kPoison));
  }
}

CASE(stale_memory, what_is_in_use_keeps_its_bytes, kSource, hipMemMap, hipMemUnmap,
     hipMalloc) {
  need_simulator();
  const Bytes bytes = random_bytes(kChunk, 1);
  DeviceMemory allocated(kChunk);
  Chunk chunk(kChunk);
  Reservation range(2 * kChunk);
  upload(allocated, bytes);
  for (const Stale stale : {kClean, kAsLeft, kPoisoned, kClean}) {
    set_switch("stale_memory", stale);
    Mapping mapping(range.at(stale % 2 * kChunk), kChunk, chunk);
    void* const address = range.at(stale % 2 * kChunk);
    REQUIRE_OK(set_access(address, kChunk, hipMemAccessFlagsProtReadWrite));
    if (stale == kClean) upload(address, bytes);
    DeviceMemory fresh(kChunk);
    EXPECT_BYTES(download(address, kChunk).data(), bytes);
    EXPECT_BYTES(download(allocated, kChunk).data(), bytes);
  }
}

// Sleep and wake with what a wake forgets to restore.
CASE(stale_memory, a_wake_must_clear_what_it_does_not_restore, kSource, hipMemMap,
     hipMemset) {
  need_simulator();
  for (const Stale stale : {kAsLeft, kPoisoned}) {
    set_switch("stale_memory", stale);
    void* address = nullptr;
    {
      MappedMemory memory;
      address = memory.get();
      upload(address, Bytes(kChunk, 0x5A));
    }
    Reservation range(kChunk, address);
    REQUIRE_EQ(static_cast<void*>(range.at(0)), address);
    Chunk chunk(kChunk);
    Mapping mapping(address, kChunk, chunk);
    REQUIRE_OK(set_access(address, kChunk, hipMemAccessFlagsProtReadWrite));
    const Bytes uncleared = download(address, kChunk);
    EXPECT_EQ(uncleared, Bytes(kChunk, stale == kAsLeft ? 0x5A : kPoison));
    EXPECT_OK(hipMemset(address, 0, kChunk));
    EXPECT_OK(hipDeviceSynchronize());
    EXPECT_BYTES(download(address, kChunk).data(), Bytes(kChunk, 0));
  }
}

// On releases where a range keeps its memory, nobody else meets the bytes before the
// range is freed.
CASE(stale_memory, stays_with_a_range_that_keeps_its_memory,
     "legacy-rocm-build#6021; RS#4363", hipMemUnmap, hipMemAddressFree) {
  need_simulator();
  set_switch("stale_memory", kAsLeft);
  constexpr unsigned char kLeft = 0xA7;  // and nothing else here leaves that
  const bool is_kept = since(7, 2) && !since(7, 13);
  MappedMemory memory;
  upload(memory.get(), Bytes(kChunk, kLeft));
  memory.unmap();
  DeviceMemory other(kChunk);
  EXPECT_EQ(download(other, 1)[0] == kLeft, !is_kept);
}

}  // namespace
}  // namespace contract
