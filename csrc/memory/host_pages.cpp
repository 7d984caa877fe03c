// SPDX-License-Identifier: Apache-2.0
#include "memory/host_pages.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <vector>

#include "gpu/driver_api.h"

namespace memory {

size_t page_bytes() {
  static const auto bytes = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  return bytes;
}

size_t whole_pages(size_t bytes) {
  const size_t page = page_bytes();
  const size_t rounded = (bytes + page - 1) / page * page;
  if (rounded < bytes) throw std::bad_alloc();
  return rounded;
}

namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE of Linux 5.14

// A locked exchange is a write from its first fault on, and leaves alone what another
// thread has written.
void touch_page(char* address) {
  char zero = 0;
  (void)__atomic_compare_exchange_n(address, &zero, char{0}, false, __ATOMIC_RELAXED,
                                    __ATOMIC_RELAXED);
}

// An older kernel, or a sandbox in its place, does not know the advice; and a write
// that changes nothing takes memory as any other does.
void populate(char* begin, char* end) {
  if (begin == end) return;
  const auto bytes = static_cast<size_t>(end - begin);
  if (madvise(begin, bytes, kPopulateWrite) == 0) return;
  if (errno == ENOMEM) {
    throw HostMemoryError("the machine has no memory left for " +
                          gpu::format_bytes(bytes) + " of host memory");
  }
  for (char* page = begin; page < end; page += page_bytes()) touch_page(page);
}

// Which pages of stretches of a huge page's size the kernel says are there.
class Residence {
 public:
  Residence(char* begin, size_t stretches)
      : stretches_(stretches), pages_(kPages * stretches) {
    is_known_ = mincore(begin, stretches * kHugePage, pages_.data()) == 0;
  }

  size_t stretches() const { return stretches_; }
  bool has_none(size_t stretch) const { return is_known_ && count(stretch) == 0; }
  bool has_all(size_t stretch) const { return is_known_ && count(stretch) == kPages; }

 private:
  static inline const size_t kPages = kHugePage / page_bytes();

  size_t count(size_t stretch) const {
    const auto page = pages_.begin() + static_cast<ptrdiff_t>(stretch * kPages);
    return static_cast<size_t>(
        std::count_if(page, page + static_cast<ptrdiff_t>(kPages),
                      [](unsigned char byte) { return byte & 1; }));
  }

  const size_t stretches_;
  std::vector<unsigned char> pages_;
  bool is_known_;
};

char* round_up(char* address, size_t unit) {
  return address + (unit - reinterpret_cast<uintptr_t>(address) % unit) % unit;
}

}  // namespace

size_t touch_pages(char* begin, size_t bytes) {
  char* const end = begin + bytes;
  char* const first = round_up(begin, kHugePage);
  if (first >= end) {
    populate(begin, end);
    return 0;
  }
  const Residence before(first, static_cast<size_t>(end - first) / kHugePage);
  for (size_t i = 0; i < before.stretches(); ++i) {
    if (before.has_none(i)) touch_page(first + i * kHugePage);
  }
  const Residence after(first, before.stretches());
  size_t huge = 0;
  char* populated = begin;  // up to here, or it is in huge pages
  for (size_t i = 0; i < before.stretches(); ++i) {
    if (!before.has_none(i) || !after.has_all(i)) continue;
    populate(populated, first + i * kHugePage);
    populated = first + (i + 1) * kHugePage;
    huge += kHugePage;
  }
  populate(populated, end);
  return huge;
}

bool drop_pages(char* begin, size_t bytes) {
  return madvise(begin, bytes, MADV_DONTNEED) == 0;
}

}  // namespace memory
