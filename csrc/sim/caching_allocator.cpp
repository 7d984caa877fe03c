// SPDX-License-Identifier: Apache-2.0
#include "caching_allocator.h"

#include <c10/util/Exception.h>

#include <stdexcept>
#include <string>
#include <tuple>

#include "gil.h"

namespace sim {
namespace {

// The constants of Note [Pools of device memory].
constexpr std::size_t kMiB = std::size_t{1} << 20;
constexpr std::size_t kBlockStep = 512;
constexpr std::size_t kLargestSmallBlock = kMiB;
constexpr std::size_t kSmallSegment = 2 * kMiB;
constexpr std::size_t kOwnSegmentFrom = 10 * kMiB;
constexpr std::size_t kLargeSegment = 20 * kMiB;
constexpr std::size_t kOwnSegmentStep = 2 * kMiB;

std::size_t round_up(std::size_t bytes, std::size_t step) {
  return (bytes + step - 1) / step * step;
}

std::size_t segment_bytes(std::size_t block) {
  if (block <= kLargestSmallBlock) return kSmallSegment;
  if (block < kOwnSegmentFrom) return kLargeSegment;
  return round_up(block, kOwnSegmentStep);
}

FreeBlocks& free_blocks(Segment& segment) { return segment.pool->free[segment.small]; }

std::string to_string(PoolId id) {
  return "(" + std::to_string(id.first) + ", " + std::to_string(id.second) + ")";
}

// The rest of a block becomes a free block where it is worth one.
void split(Block& block, std::size_t bytes) {
  Segment& segment = *block.segment;
  const std::size_t rest = block.bytes - bytes;
  if (segment.small ? rest < kBlockStep : rest <= kLargestSmallBlock) return;
  const std::size_t offset = block.offset + bytes;
  block.bytes = bytes;
  Block& after = segment.blocks[offset];
  after = {&segment, offset, rest};
  free_blocks(segment).insert(&after);
}

// Joins two neighbours; the second one is gone then. Neither is in the free list.
void absorb(Block& block, Block& after) {
  block.bytes += after.bytes;
  block.segment->blocks.erase(after.offset);
}

// Joins a free block with its free neighbours; what is left is in the free list.
void put_back(Block& freed) {
  Segment& segment = *freed.segment;
  FreeBlocks& free = free_blocks(segment);
  auto it = segment.blocks.find(freed.offset);
  const auto next = std::next(it);
  if (next != segment.blocks.end() && !next->second.allocated) {
    free.erase(&next->second);
    absorb(freed, next->second);
  }
  if (it != segment.blocks.begin()) {
    Block& before = std::prev(it)->second;
    if (!before.allocated) {
      free.erase(&before);
      absorb(before, freed);
      free.insert(&before);
      return;
    }
  }
  free.insert(&freed);
}

}  // namespace

char* Block::data() const { return segment->data + offset; }

bool BySize::operator()(const Block* a, const Block* b) const {
  return std::make_tuple(a->bytes, a->data()) < std::make_tuple(b->bytes, b->data());
}

CachingAllocator& CachingAllocator::instance() {
  static auto* allocator = new CachingAllocator;
  return *allocator;
}

CachingAllocator::Lock CachingAllocator::lock() {
  Lock lock(mutex_, std::try_to_lock);
  if (!lock.owns_lock()) {
    const WithoutGil without;
    lock.lock();
  }
  return lock;
}

// --- pools -------------------------------------------------------------------------

void CachingAllocator::create(PoolId id, std::shared_ptr<DeviceSource> source) {
  const Lock held = lock();
  Pool& pool = pools_[id];
  pool.id = id;
  pool.source = std::move(source);
  ++pool.uses;
}

void CachingAllocator::begin(PoolId id, const std::shared_ptr<DeviceSource>& source) {
  const Lock held = lock();
  if (open_.count(id) != 0) {
    throw std::runtime_error("the pool " + to_string(id) +
                             " is being allocated to already");
  }
  Pool& pool = pools_[id];
  if (pool.source == nullptr) {
    pool.id = id;
    pool.source = source;
  }
  ++pool.uses;
  open_.insert(id);
}

void CachingAllocator::end(PoolId id) {
  const Lock held = lock();
  open_.erase(id);
}

void CachingAllocator::release(PoolId id) {
  const Lock held = lock();
  const auto it = pools_.find(id);
  if (it == pools_.end() || it->second.uses == 0) {
    throw std::runtime_error("nobody uses the pool " + to_string(id));
  }
  --it->second.uses;
}

int CachingAllocator::uses(PoolId id) {
  const Lock held = lock();
  const auto it = pools_.find(id);
  return it == pools_.end() ? 0 : it->second.uses;
}

// --- allocation --------------------------------------------------------------------

Block* CachingAllocator::allocate(PoolId id, std::size_t bytes) {
  const Lock held = lock();
  Pool& pool = pools_.at(id);
  const std::size_t rounded = round_up(bytes, kBlockStep);
  FreeBlocks& free = pool.free[rounded <= kLargestSmallBlock];
  Segment wanted{};
  Block key{&wanted, 0, rounded};
  auto it = free.lower_bound(&key);
  if (it == free.end()) {
    // Its only block may be taken at once: nobody else has the lock, and a callback of
    // the source could only have made more room.
    Segment* segment = add_segment(pool, rounded);
    it = free.find(&segment->blocks.begin()->second);
  }
  Block* block = *it;
  free.erase(it);
  split(*block, rounded);
  block->allocated = true;
  block->requested = bytes;
  return block;
}

void CachingAllocator::free(Block* block) noexcept {
  Lock held;
  if (python_is_finalizing()) {
    // A thread that waits for the GIL may hold the lock for ever then; the process
    // ends, and its memory with it.
    held = Lock(mutex_, std::try_to_lock);
    if (!held.owns_lock()) return;
  } else {
    held = lock();
  }
  block->allocated = false;
  block->requested = 0;
  put_back(*block);
}

// --- segments ----------------------------------------------------------------------

Segment* CachingAllocator::add_segment(Pool& pool, std::size_t bytes) {
  const std::size_t whole = segment_bytes(bytes);
  void* memory = ask_source(pool, whole);
  if (memory == nullptr) {
    release_free_segments(std::nullopt);
    memory = ask_source(pool, whole);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, memory != nullptr,
                   "HIP out of memory: ", pool.source->name(), " of ", whole,
                   " bytes failed, for a tensor of ", bytes, " bytes in the pool ",
                   to_string(pool.id));
  auto* data = static_cast<char*>(memory);
  Segment& segment = pool.segments[data];
  segment = {&pool, data, whole, bytes <= kLargestSmallBlock, {}};
  Block& block = segment.blocks[0];
  block = {&segment, 0, whole};
  free_blocks(segment).insert(&block);
  return &segment;
}

void* CachingAllocator::ask_source(Pool& pool, std::size_t bytes) {
  const WithoutGil without;
  return pool.source->allocate(bytes);
}

void CachingAllocator::give_back(Pool& pool, Segment& segment) {
  char* data = segment.data;
  const std::size_t bytes = segment.bytes;
  free_blocks(segment).erase(&segment.blocks.begin()->second);
  pool.segments.erase(data);
  const WithoutGil without;
  pool.source->free(data, bytes);
}

std::size_t CachingAllocator::release_free_segments(std::optional<PoolId> id) {
  std::size_t released = 0;
  // From the start after each one: the source's callback may free further blocks.
  for (auto it = pools_.begin(); it != pools_.end();) {
    Pool& pool = it->second;
    Segment* free = nullptr;
    if (pool.uses == 0 && (!id || *id == pool.id)) {
      for (auto& [address, segment] : pool.segments) {
        if (segment.is_free()) free = &segment;
      }
    }
    if (free != nullptr) {
      ++pool.uses;  // so that the callback cannot end it
      give_back(pool, *free);
      --pool.uses;
      ++released;
      it = pools_.begin();
    } else if (pool.uses == 0 && pool.segments.empty()) {
      it = pools_.erase(it);
    } else {
      ++it;
    }
  }
  return released;
}

std::size_t CachingAllocator::empty_cache(std::optional<PoolId> id) {
  const Lock held = lock();
  return release_free_segments(id);
}

// --- reports -----------------------------------------------------------------------

std::vector<SegmentInfo> CachingAllocator::snapshot(std::optional<PoolId> id) {
  const Lock held = lock();
  std::vector<SegmentInfo> infos;
  for (const auto& [pool_id, pool] : pools_) {
    if (id && *id != pool_id) continue;
    for (const auto& [address, segment] : pool.segments) {
      SegmentInfo& info = infos.emplace_back();
      info.pool = pool_id;
      info.address = reinterpret_cast<std::uintptr_t>(address);
      info.small = segment.small;
      for (const auto& [offset, block] : segment.blocks) {
        info.blocks.push_back({reinterpret_cast<std::uintptr_t>(block.data()),
                               block.bytes, block.requested, block.allocated});
      }
    }
  }
  return infos;
}

std::optional<PoolId> CachingAllocator::pool_of(std::uintptr_t address) {
  const Lock held = lock();
  for (const auto& [id, pool] : pools_) {
    auto it = pool.segments.upper_bound(reinterpret_cast<char*>(address));
    if (it == pool.segments.begin()) continue;
    const Segment& segment = std::prev(it)->second;
    if (address - reinterpret_cast<std::uintptr_t>(segment.data) < segment.bytes) {
      return id;
    }
  }
  return std::nullopt;
}

}  // namespace sim
