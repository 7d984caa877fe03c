// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "device_source.h"

namespace sim {

// PyTorch's: the first number names a pool that a capture made for itself, the second
// one that the user made.
using PoolId = std::pair<std::uint64_t, std::uint64_t>;

struct Segment;

struct Block {
  Segment* segment;
  std::size_t offset;
  std::size_t bytes;
  std::size_t requested = 0;
  bool allocated = false;

  char* data() const;
};

struct Pool;

// One piece of the source's memory, which blocks divide without a gap.
struct Segment {
  Pool* pool;
  char* data;
  std::size_t bytes;
  bool small;
  std::map<std::size_t, Block> blocks;

  bool is_free() const {
    return blocks.size() == 1 && !blocks.begin()->second.allocated;
  }
};

struct BySize {
  bool operator()(const Block* a, const Block* b) const;
};

using FreeBlocks = std::set<Block*, BySize>;

struct Pool {
  PoolId id;
  std::shared_ptr<DeviceSource> source;
  int uses = 0;
  std::map<char*, Segment> segments;
  std::array<FreeBlocks, 2> free;  // of large segments, of small ones
};

struct BlockInfo {
  std::uintptr_t address;
  std::size_t bytes;
  std::size_t requested;
  bool allocated;
};

struct SegmentInfo {
  PoolId pool;
  std::uintptr_t address;
  bool small;
  std::vector<BlockInfo> blocks;
};

// Note [Pools of device memory]
//
// Sleep mode sees device memory through the pools of PyTorch's caching allocator: what
// is a segment, which tensors share one, when one goes back to `my_free`, and which are
// free when a pool is trimmed. PyTorch's CPU build has no such allocator, and this one
// follows its rules (c10/cuda/CUDACachingAllocator.cpp): sizes are multiples of 512
// bytes; up to 1 MiB comes from segments of 2 MiB, up to 10 MiB from segments of 20
// MiB, more from a segment of its own in steps of 2 MiB; the smallest free block that
// is large enough is taken, and split where the rest is of use. A free segment stays in
// its pool while anybody uses the pool: a MemPool, an open scope, a graph. After that
// the next empty_cache, the pool's own death or the next lack of memory gives it back.
// A free block keeps the bytes it had, and nobody touches them.
//
// Different from PyTorch's:
// - A pool has no streams. Kernels are host code and are done when they return, so
//   whatever a block's last tensor did is over; an asynchronous copy is not, and must
//   be waited for before its tensor goes.
// - There is no default pool: memory outside of pools is the source's own.
// - Who waits for the allocator lets go of the GIL, and who calls the source does too,
//   since the source may want it (`my_malloc` and `my_free` call Python). The mutex
//   stays locked in such a call, as PyTorch's does: who holds a lock that the callbacks
//   want must not allocate, free or empty the cache.
class CachingAllocator {
 public:
  // Never destroyed, since tensors may go after everything else.
  static CachingAllocator& instance();

  // A pool that one MemPool uses.
  void create(PoolId id, std::shared_ptr<DeviceSource> source);

  // One more use of the pool, which is made on `source` if there is none. Throws if
  // the pool is being allocated to already, as PyTorch does.
  void begin(PoolId id, const std::shared_ptr<DeviceSource>& source);

  // It is no longer allocated to; the use stays.
  void end(PoolId id);

  // One use less.
  void release(PoolId id);

  // Throws c10::OutOfMemoryError, and whatever the source throws.
  Block* allocate(PoolId id, std::size_t bytes);
  void free(Block* block) noexcept;

  // Gives back the free segments of pools that nobody uses: of one pool, or of all.
  // Returns their number.
  std::size_t empty_cache(std::optional<PoolId> id);

  int uses(PoolId id);
  std::vector<SegmentInfo> snapshot(std::optional<PoolId> id);

  // Whose segment an address lies in.
  std::optional<PoolId> pool_of(std::uintptr_t address);

 private:
  using Lock = std::unique_lock<std::recursive_mutex>;

  Lock lock();
  Segment* add_segment(Pool& pool, std::size_t bytes);
  void* ask_source(Pool& pool, std::size_t bytes);
  void give_back(Pool& pool, Segment& segment);
  std::size_t release_free_segments(std::optional<PoolId> id);

  // Recursive: a callback of the source runs Python, which may drop tensors.
  std::recursive_mutex mutex_;
  std::map<PoolId, Pool> pools_;
  std::set<PoolId> open_;
};

}  // namespace sim
