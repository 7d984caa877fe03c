// SPDX-License-Identifier: Apache-2.0
//
// Note [Host arenas]
// An arena is address space of exact size, and costs nothing until it is used. It is
// taken into use piece by piece: a piece is ready once its pages have memory, and as a
// rule the driver has registered it then. Both take longer than copying to it does, and
// memory that has no pages yet registers several times as slowly; so the thread that
// has touched a piece registers it, several work side by side, and copies go to the
// pieces that are ready meanwhile (Note [Transfers]). PyTorch's own allocator for such
// memory rounds up to a power of two and never gives any back.
//
// A piece that the driver refuses is ready all the same, and its copies take a detour
// (memory/staging.h). The next transfer out tries it again. Small pieces serve another
// end, too: 512 GiB in one call were seen to fail (vLLM #51080).
//
// Transfers share an arena, each with a `Use` of it. What release() takes, none may be
// copying, so it waits for the end of every use.
//
// A process that is forked off has no arena. The kernel copies what a driver has pinned
// at the fork itself, not when it is written to, which would take as much host memory
// as the whole backup and stop the caller for as long; and a child has no use for what
// only the driver of its parent can copy. So an arena that ends in a child leaves alone
// what has come to its addresses there.
#pragma once

#include <condition_variable>
#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <vector>

#include "gpu/driver_api.h"
#include "memory/registrations.h"

namespace memory {

// Host memory for backups. Thread-safe.
class HostArena {
 public:
  // A multiple of a huge page. A first backup of 24 GiB by 12 threads of an H200's host
  // took 0.84 s with it, 1.04 with 32 MiB and 1.00 with 128.
  static constexpr size_t kPieceBytes = size_t{64} << 20;

  // Memory next to a NUMA node where one is given, as far as it has some. Throws
  // std::invalid_argument for no bytes or pieces that are not of whole pages, and
  // std::bad_alloc where the machine refuses the addresses.
  static std::shared_ptr<HostArena> make(size_t bytes, size_t piece_bytes = kPieceBytes,
                                         std::optional<int> node = std::nullopt);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  size_t piece_bytes() const { return piece_bytes_; }
  // None where the kernel did not agree, too.
  std::optional<int> node() const { return node_; }

  size_t piece_at(const char* address) const {
    return static_cast<size_t>(address - data_) / piece_bytes_;
  }
  const char* piece_end(size_t piece) const;

  // Makes a piece ready, and registers it as long as that is tried. Waits for another
  // thread that is doing so. The device, which is the calling thread's current one, is
  // where the memory is unregistered from. Only within a use. Returns whether it was
  // this call that made it ready. Throws HostMemoryError.
  bool prepare(size_t piece, gpu::Driver& driver, int device,
               Registrations& registrations);
  bool is_registered(size_t piece) const;

  // Bytes of the pieces that are ready, and of those that are registered.
  size_t prepared() const;
  size_t registered() const;
  // Bytes that the ready pieces have in huge pages (Note [Touching]).
  size_t huge() const;
  // Bytes of the pieces that a backup of `bytes` at `offset` would have to make ready.
  // Throws std::invalid_argument for what is not within the arena.
  size_t missing(size_t offset, size_t bytes) const;
  size_t missing(size_t piece) const;
  // The driver's last refusal; empty when every ready piece is registered.
  std::string registration_error() const;

  // Gives back the memory of the whole pieces within a part of the arena, of which the
  // contents are lost, and returns the bytes. A piece that the driver does not
  // unregister stays as it is. Throws std::invalid_argument.
  size_t release(size_t offset, size_t bytes);

  // A transfer, by any address that is its own, is about to write to a piece.
  void write_to(size_t piece, const void* transfer);
  // release() of a piece that no other transfer has written to since it was empty.
  size_t release_own(size_t piece, const void* transfer);

  // For as long as there is one, the arena lives and nothing of it is released. One
  // thread's.
  class Use {
   public:
    explicit Use(std::shared_ptr<HostArena> arena)
        : arena_(std::move(arena)), lock_(arena_->uses_) {}

   private:
    std::shared_ptr<HostArena> arena_;
    std::shared_lock<std::shared_mutex> lock_;
  };

  // Host memory from some address on.
  struct Stretch {
    std::shared_ptr<HostArena> arena;  // null: in none
    size_t bytes;                      // to its end, or to where the next one begins
  };
  static Stretch from(const char* address);

 private:
  struct Piece {
    bool is_busy = false;  // some thread is preparing it
    bool is_ready = false;
    bool is_registered = false;
    size_t huge_bytes = 0;
  };

  HostArena(size_t bytes, size_t piece_bytes, std::optional<int> node);

  char* piece_data(size_t piece) const { return data_ + piece * piece_bytes_; }
  size_t mapped_bytes(size_t piece) const;
  size_t used_bytes(size_t piece) const;
  void check_within(size_t offset, size_t bytes) const;
  template <typename Predicate>
  size_t count_bytes(Predicate predicate) const;
  bool register_piece(size_t piece, gpu::Driver& driver, Registrations& registrations);
  gpu::Status unregister(size_t first, size_t end);
  size_t release_pieces(size_t first, size_t end);

  const size_t bytes_;
  const size_t mapped_bytes_;
  const size_t piece_bytes_;
  char* data_ = nullptr;
  std::optional<int> node_;
  const int process_;  // that has made it

  std::shared_mutex uses_;

  mutable std::mutex mutex_;  // of what follows
  std::condition_variable prepared_;
  std::vector<Piece> pieces_;
  std::vector<const void*> writers_;  // of the pieces
  std::optional<int> device_;
  std::string registration_error_;
};

}  // namespace memory
