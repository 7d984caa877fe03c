// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

#include "gpu/driver_api.h"

namespace memory {

// Page-locked host memory of exactly the size that was asked for, in whole pages.
// PyTorch's own allocator for such memory rounds up to a power of two and never gives
// any back. Memory that the driver does not lock serves too, with slower copies.
class HostArena {
 public:
  // The driver is asked to lock no more than this at once, because 512 GiB were seen to
  // fail (vLLM #51080).
  static constexpr size_t kMaxPiece = size_t{64} << 30;

  // Locked for every device; `device` only says where to call from, and none means the
  // current one. Throws std::invalid_argument for no bytes and std::bad_alloc where the
  // machine has no room.
  HostArena(size_t bytes, std::optional<int> device);
  ~HostArena();
  HostArena(const HostArena&) = delete;
  HostArena& operator=(const HostArena&) = delete;

  char* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  // Why the memory is not locked; empty when it is.
  const std::string& registration_error() const { return registration_error_; }

  // Where a copy that begins at `address` must end at the latest, so that it stays
  // within what was locked with one call; `end` where that does not matter.
  static const char* copy_end(const char* address, const char* end);

 private:
  void lock_pages();

  const size_t bytes_;
  const size_t mapped_bytes_;
  const std::optional<int> device_;
  char* data_;
  std::vector<char*> pieces_;
  std::string registration_error_;
};

}  // namespace memory
