// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <new>
#include <string>
#include <utility>

namespace memory {

// The machine has no room for pages that were promised.
class HostMemoryError : public std::bad_alloc {
 public:
  explicit HostMemoryError(std::string text) : text_(std::move(text)) {}
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  std::string text_;
};

// Bytes of a small page.
size_t page_bytes();

// Rounded up to whole pages. Throws std::bad_alloc where that is too much.
size_t whole_pages(size_t bytes);

constexpr size_t kHugePage = size_t{2} << 20;

// Note [Touching]
// A page gets its memory when it is first written to, and what that takes is clearing
// it. On an H200's host 12 threads do so at 50 to 58 GB/s with a write to each huge
// page, and at 19 to 34 with MADV_POPULATE_WRITE, which goes through a huge page by
// small ones. So each stretch of a huge page's size is written to once, and the kernel
// is asked whether all of it is there then. What is not, where it gave small pages, and
// what does not fill a stretch, is populated.
//
// A page of zeros that a read maps counts as there, although it is nobody's memory. So
// nothing is read first: before Linux 6.12 a write after a read gave one small page of
// a huge stretch, with 511 times the page of zeros beside it. And a stretch of which
// some was there already is populated, which is all where a sandbox says that every
// page is always there.

// Puts memory behind pages without changing what they hold, and returns how many bytes
// of it were found there at once with the first write to a stretch: those of huge
// pages. Throws HostMemoryError.
size_t touch_pages(char* begin, size_t bytes);

// Gives the memory behind pages back; whether the kernel did.
bool drop_pages(char* begin, size_t bytes);

}  // namespace memory
