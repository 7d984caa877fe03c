// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>

#include "engine/vram.h"

namespace hipsim {

// Note [Memories kept apart]
//
// All device addresses lie in one window of address space that is reserved at first
// use and holds nothing else; what is not mapped is PROT_NONE. So an address alone
// says which memory it names: inside the window it is a device address, valid only
// where an allocation or a mapping is; outside it is the host's, registered or
// pageable. The window is larger than all devices together and its addresses are
// handed out in turn, so that a pointer to freed memory stays an error for long
// instead of naming somebody else's allocation.
//
// Beside it lies a second window of the same size, in which the simulator itself
// reaches the same memory. What the host may do with a device address is therefore a
// protection of the first window alone and stops no copy.
//
// Neither is inherited over fork(), as the memory of a real device is not.
//
// Not thread-safe: its owner locks.
class Window {
 public:
  explicit Window(size_t bytes) : bytes_(bytes) {}
  Window(const Window&) = delete;
  Window& operator=(const Window&) = delete;
  ~Window();

  // Addresses that nobody else has, a whole number of pages; at `wish` if that is
  // free. None when there is no gap.
  std::optional<uintptr_t> take(size_t bytes, size_t alignment = kPage,
                                uintptr_t wish = 0);
  void give_back(uintptr_t address);

  // Either window.
  bool touches(uintptr_t begin, size_t bytes) const {
    return base_ != 0 && begin < base_ + 2 * bytes_ && begin + bytes > base_;
  }

  // Where the simulator finds the byte of a device address.
  uintptr_t reach(uintptr_t address) const { return address + bytes_; }

  // `protection` (PROT_*) is the host's. False, and nothing mapped, when the machine
  // has no room for another mapping.
  bool map(uintptr_t address, const Physical& memory, int protection);
  bool protect(uintptr_t address, size_t bytes, int protection);
  void unmap(uintptr_t address, size_t bytes);

 private:
  bool reserve();
  bool is_free(uintptr_t address, size_t bytes) const;

  const size_t bytes_;
  uintptr_t base_ = 0;
  uintptr_t next_ = 0;
  std::map<uintptr_t, size_t> taken_;
};

}  // namespace hipsim
