// SPDX-License-Identifier: Apache-2.0
#include "memory/host_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <numeric>
#include <stdexcept>
#include <utility>

#include "memory/host_pages.h"
#include "memory/leftovers.h"
#include "memory/numa.h"

namespace memory {
namespace {

gpu::Status enter(gpu::DeviceScope& scope, std::optional<int> device) {
  return device ? scope.use(*device) : scope.use_any();
}

// Addresses without memory, from the beginning of a huge page on.
char* reserve(size_t bytes) {
  const size_t most = bytes + kHugePage;
  if (most < bytes) throw std::bad_alloc();
  void* const mapped = mmap(nullptr, most, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  auto* const begin = static_cast<char*>(mapped);
  const size_t before =
      (kHugePage - reinterpret_cast<uintptr_t>(begin) % kHugePage) % kHugePage;
  if (before > 0) munmap(begin, before);
  munmap(begin + before + bytes, kHugePage - before);
  return begin + before;
}

// The arenas of this process, by address.
class Arenas {
 public:
  static Arenas& of_process() {
    static auto* const instance = new Arenas;
    return *instance;
  }

  void add(const std::shared_ptr<HostArena>& arena) {
    const std::lock_guard lock(mutex_);
    arenas_[arena->data()] = {arena, arena->data() + arena->bytes()};
  }

  void remove(const char* begin) {
    const std::lock_guard lock(mutex_);
    arenas_.erase(begin);
  }

  HostArena::Stretch from(const char* address) const {
    const std::lock_guard lock(mutex_);
    const auto next = arenas_.upper_bound(address);
    if (next != arenas_.begin()) {
      const auto& [arena, end] = std::prev(next)->second;
      if (address < end) return {arena.lock(), distance(address, end)};
    }
    if (next != arenas_.end()) return {nullptr, distance(address, next->first)};
    return {nullptr, SIZE_MAX};
  }

 private:
  struct Entry {
    std::weak_ptr<HostArena> arena;
    const char* end;
  };

  static size_t distance(const char* from, const char* to) {
    return reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from);
  }

  mutable std::mutex mutex_;
  std::map<const char*, Entry> arenas_;
};

gpu::Status unregister_host(gpu::Driver& driver, gpu::DeviceScope& scope,
                            std::optional<int> device, char* begin) {
  const gpu::Status entered = enter(scope, device);
  return entered.ok() ? driver.unregister_host(begin) : entered;
}

struct Mapping {
  char* begin;
  size_t bytes;
};

// What writers_ has where several transfers have written.
constexpr char kSeveral = 0;

}  // namespace

// --- its life ------------------------------------------------------------------------

std::shared_ptr<HostArena> HostArena::make(size_t bytes, size_t piece_bytes,
                                           std::optional<int> node) {
  std::shared_ptr<HostArena> arena(new HostArena(bytes, piece_bytes, node));
  Arenas::of_process().add(arena);
  return arena;
}

HostArena::HostArena(size_t bytes, size_t piece_bytes, std::optional<int> node)
    : bytes_(bytes),
      mapped_bytes_(whole_pages(bytes)),
      piece_bytes_(piece_bytes),
      process_(getpid()) {
  if (bytes == 0) throw std::invalid_argument("a host arena has at least one byte");
  if (piece_bytes == 0 || piece_bytes % page_bytes() != 0) {
    throw std::invalid_argument("a piece of a host arena has whole pages of " +
                                std::to_string(page_bytes()) + " bytes, not " +
                                std::to_string(piece_bytes) + " bytes");
  }
  data_ = reserve(mapped_bytes_);
  try {
    pieces_.resize((mapped_bytes_ - 1) / piece_bytes + 1);
    writers_.resize(pieces_.size());
  } catch (...) {
    munmap(data_, mapped_bytes_);
    throw;
  }
  (void)madvise(data_, mapped_bytes_, MADV_HUGEPAGE);
  (void)madvise(data_, mapped_bytes_, MADV_DONTFORK);
  if (node && prefer_numa_node(data_, mapped_bytes_, *node)) node_ = node;
}

HostArena::~HostArena() {
  Arenas::of_process().remove(data_);
  if (getpid() != process_) return;
  const gpu::Status refusal = unregister(0, pieces_.size());
  std::vector<Mapping> left;
  size_t left_bytes = 0;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (pieces_[i].is_registered) {
      left.push_back({piece_data(i), mapped_bytes(i)});
      left_bytes += mapped_bytes(i);
    } else {
      munmap(piece_data(i), mapped_bytes(i));
    }
  }
  if (left.empty()) return;
  gpu::Driver& driver = gpu::Driver::get();
  std::fprintf(stderr,
               "cumem: %s; %s of host memory stay registered until that succeeds\n",
               gpu::describe(driver.failure(refusal, {})).c_str(),
               gpu::format_bytes(left_bytes).c_str());
  Leftovers::of_process().add(
      [left, device = device_, &driver](gpu::DeviceScope& scope) mutable {
        const auto is_gone = [&](const Mapping& each) {
          if (!unregister_host(driver, scope, device, each.begin).ok()) return false;
          munmap(each.begin, each.bytes);
          return true;
        };
        left.erase(std::remove_if(left.begin(), left.end(), is_gone), left.end());
        return left.empty();
      });
}

HostArena::Stretch HostArena::from(const char* address) {
  return Arenas::of_process().from(address);
}

// --- pieces --------------------------------------------------------------------------

size_t HostArena::mapped_bytes(size_t piece) const {
  return std::min(piece_bytes_, mapped_bytes_ - piece * piece_bytes_);
}

size_t HostArena::used_bytes(size_t piece) const {
  return std::min(piece_bytes_, bytes_ - piece * piece_bytes_);
}

const char* HostArena::piece_end(size_t piece) const {
  return piece_data(piece) + used_bytes(piece);
}

bool HostArena::prepare(size_t piece, gpu::Driver& driver, int device,
                        Registrations& registrations) {
  {
    std::unique_lock lock(mutex_);
    prepared_.wait(lock, [&] { return !pieces_[piece].is_busy; });
    if (pieces_[piece].is_registered) return false;
    pieces_[piece].is_busy = true;
    if (!device_) device_ = device;
  }
  // Nobody else writes to a piece that is busy.
  Piece now = pieces_[piece];
  now.is_busy = false;
  const bool was_ready = now.is_ready;
  const auto settle = [&] {
    const std::lock_guard lock(mutex_);
    pieces_[piece] = now;
    prepared_.notify_all();
  };
  try {
    if (!now.is_ready) {
      now.huge_bytes = touch_pages(piece_data(piece), mapped_bytes(piece));
      now.is_ready = true;
    }
    now.is_registered = register_piece(piece, driver, registrations);
  } catch (...) {
    if (!now.is_ready) (void)drop_pages(piece_data(piece), mapped_bytes(piece));
    settle();
    throw;
  }
  settle();
  return !was_ready;
}

bool HostArena::register_piece(size_t piece, gpu::Driver& driver,
                               Registrations& registrations) {
  if (registrations.are_tried()) {
    const size_t bytes = mapped_bytes(piece);
    const gpu::Status status = driver.register_host(piece_data(piece), bytes);
    if (status.ok()) {
      registrations.succeeded();
      return true;
    }
    registrations.refused(gpu::describe(driver.failure(status, {{}, bytes})));
  }
  const std::lock_guard lock(mutex_);
  registration_error_ = registrations.last_refusal();
  return false;
}

bool HostArena::is_registered(size_t piece) const {
  const std::lock_guard lock(mutex_);
  return pieces_[piece].is_registered;
}

// --- reports -------------------------------------------------------------------------

template <typename Predicate>
size_t HostArena::count_bytes(Predicate predicate) const {
  const std::lock_guard lock(mutex_);
  size_t bytes = 0;
  for (size_t i = 0; i < pieces_.size(); ++i) {
    if (predicate(pieces_[i])) bytes += used_bytes(i);
  }
  return bytes;
}

size_t HostArena::prepared() const {
  return count_bytes([](const Piece& piece) { return piece.is_ready; });
}

size_t HostArena::registered() const {
  return count_bytes([](const Piece& piece) { return piece.is_registered; });
}

size_t HostArena::huge() const {
  const std::lock_guard lock(mutex_);
  return std::accumulate(
      pieces_.begin(), pieces_.end(), size_t{0},
      [](size_t sum, const Piece& piece) { return sum + piece.huge_bytes; });
}

void HostArena::check_within(size_t offset, size_t bytes) const {
  if (offset > bytes_ || bytes > bytes_ - offset) {
    throw std::invalid_argument(
        gpu::format_bytes(bytes) + " from offset " + std::to_string(offset) +
        " on are not within a host arena of " + gpu::format_bytes(bytes_));
  }
}

size_t HostArena::missing(size_t offset, size_t bytes) const {
  check_within(offset, bytes);
  if (bytes == 0) return 0;
  const std::lock_guard lock(mutex_);
  size_t missing = 0;
  for (size_t i = offset / piece_bytes_; i <= (offset + bytes - 1) / piece_bytes_;
       ++i) {
    if (!pieces_[i].is_ready) missing += used_bytes(i);
  }
  return missing;
}

size_t HostArena::missing(size_t piece) const {
  const std::lock_guard lock(mutex_);
  return pieces_[piece].is_ready ? 0 : used_bytes(piece);
}

std::string HostArena::registration_error() const {
  const std::lock_guard lock(mutex_);
  const bool is_refused = std::any_of(
      pieces_.begin(), pieces_.end(),
      [](const Piece& piece) { return piece.is_ready && !piece.is_registered; });
  return is_refused ? registration_error_ : "";
}

// --- giving back ---------------------------------------------------------------------

// Pieces that the driver refuses stay registered; the last refusal.
gpu::Status HostArena::unregister(size_t first, size_t end) {
  gpu::Status refusal;
  std::optional<gpu::DeviceScope> scope;
  for (size_t i = first; i < end; ++i) {
    if (!pieces_[i].is_registered) continue;
    gpu::Driver& driver = gpu::Driver::get();
    if (!scope) scope.emplace(driver);
    const gpu::Status gone = unregister_host(driver, *scope, device_, piece_data(i));
    if (!gone.ok()) {
      refusal = gone;
      continue;
    }
    const std::lock_guard lock(mutex_);
    pieces_[i].is_registered = false;
  }
  return refusal;
}

// Within no use but with the lock on all of them.
size_t HostArena::release_pieces(size_t first, size_t end) {
  const gpu::Status refusal = unregister(first, end);
  if (!refusal.ok()) {
    std::fprintf(stderr,
                 "cumem: %s; host memory that was to be given back stays registered\n",
                 gpu::describe(gpu::Driver::get().failure(refusal, {})).c_str());
  }
  size_t released = 0, kept = 0;
  int problem = 0;
  for (size_t i = first; i < end; ++i) {
    if (!pieces_[i].is_ready || pieces_[i].is_registered) continue;
    if (!drop_pages(piece_data(i), mapped_bytes(i))) {
      problem = errno;
      kept += used_bytes(i);
      continue;
    }
    released += used_bytes(i);
    const std::lock_guard lock(mutex_);
    pieces_[i] = {};
    writers_[i] = nullptr;
  }
  if (kept > 0) {
    std::fprintf(stderr,
                 "cumem: madvise failed: %s; %s of host memory that were to be given "
                 "back stay taken\n",
                 std::strerror(problem), gpu::format_bytes(kept).c_str());
  }
  return released;
}

size_t HostArena::release(size_t offset, size_t bytes) {
  check_within(offset, bytes);
  const std::unique_lock alone(uses_);
  const size_t first = offset / piece_bytes_ + (offset % piece_bytes_ != 0);
  const size_t end =
      offset + bytes == bytes_ ? pieces_.size() : (offset + bytes) / piece_bytes_;
  return release_pieces(first, end);
}

void HostArena::write_to(size_t piece, const void* transfer) {
  const std::lock_guard lock(mutex_);
  const void*& writer = writers_[piece];
  writer = writer == nullptr || writer == transfer ? transfer : &kSeveral;
}

size_t HostArena::release_own(size_t piece, const void* transfer) {
  const std::unique_lock alone(uses_);
  return writers_[piece] == transfer ? release_pieces(piece, piece + 1) : 0;
}

}  // namespace memory
