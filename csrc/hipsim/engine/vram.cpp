// SPDX-License-Identifier: Apache-2.0
#include "engine/vram.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>

namespace hipsim {

Physical::~Physical() {
  if (owner != nullptr) {
    owner->give_back(extents);
  } else if (file >= 0) {
    close(file);
  }
}

Vram::Vram(int device, size_t bytes)
    : device_(device), bytes_(bytes / kPage * kPage), free_bytes_(bytes_) {
  free_[0] = bytes_;
}

Vram::~Vram() {
  if (file_ >= 0) close(file_);
}

bool Vram::open_file() {
  if (file_ >= 0) return true;
  const int file = memfd_create("hipsim", MFD_CLOEXEC);
  if (file < 0) return false;
  if (ftruncate(file, static_cast<off_t>(bytes_)) != 0) {
    close(file);
    return false;
  }
  file_ = file;
  return true;
}

Error Vram::allocate(size_t bytes, PhysicalRef* memory) {
  if (bytes > free_bytes_ || whole_pages(bytes) > free_bytes_ || !open_file()) {
    return Error::kOutOfMemory;
  }
  auto made = std::make_shared<Physical>(device_, whole_pages(bytes));
  made->extents = choose(made->bytes);
  take(made->extents);
  made->file = file_;
  made->owner = this;
  for (const Extent& extent : made->extents) {
    if (stale_ == StalePages::kClean) wipe(extent);
    if (stale_ == StalePages::kPoisoned && !poison(extent)) return Error::kOutOfMemory;
  }
  *memory = std::move(made);
  return Error::kSuccess;
}

void Vram::forget_file() {
  if (file_ >= 0) close(file_);
  file_ = -1;
}

bool Vram::charge(size_t bytes) {
  if (bytes > free_bytes_) return false;
  free_bytes_ -= bytes;
  return true;
}

void Vram::set_stale_pages(StalePages stale) { stale_ = stale; }

// One piece if one is large enough, because each costs the machine two mappings, of
// which it has not many. The free bytes are at most what the list holds, so the list
// never ends before the request is met.
std::vector<Extent> Vram::choose(size_t bytes) const {
  for (const auto& [offset, size] : free_) {
    if (size >= bytes) return {{offset, bytes}};
  }
  std::vector<Extent> chosen;
  for (const auto& [offset, size] : free_) {
    chosen.push_back({offset, std::min(size, bytes)});
    bytes -= chosen.back().bytes;
    if (bytes == 0) break;
  }
  return chosen;
}

// A chosen piece begins where a free one does. Nothing is lost when memory for the
// list runs out.
void Vram::take(const std::vector<Extent>& extents) {
  const Extent& last = extents.back();
  const size_t rest = free_.at(last.offset) - last.bytes;
  if (rest > 0) free_[last.offset + last.bytes] = rest;
  for (const Extent& extent : extents) {
    free_.erase(extent.offset);
    free_bytes_ -= extent.bytes;
  }
}

void Vram::give_back(const std::vector<Extent>& extents) {
  for (const Extent& extent : extents) {
    if (stale_ == StalePages::kClean) wipe(extent);
    free_bytes_ += extent.bytes;
    auto placed = free_.emplace(extent.offset, extent.bytes).first;
    if (const auto next = std::next(placed);
        next != free_.end() && placed->first + placed->second == next->first) {
      placed->second += next->second;
      free_.erase(next);
    }
    if (placed == free_.begin()) continue;
    const auto before = std::prev(placed);
    if (before->first + before->second == placed->first) {
      before->second += placed->second;
      free_.erase(placed);
    }
  }
}

// Gives the pages back to the machine; they read as zeroes.
void Vram::wipe(const Extent& extent) {
  fallocate(file_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
            static_cast<off_t>(extent.offset), static_cast<off_t>(extent.bytes));
}

bool Vram::poison(const Extent& extent) {
  const std::vector<unsigned char> pattern(std::min(extent.bytes, size_t{1} << 20),
                                           kPoison);
  for (size_t done = 0; done < extent.bytes;) {
    const ssize_t written =
        pwrite(file_, pattern.data(), std::min(pattern.size(), extent.bytes - done),
               static_cast<off_t>(extent.offset + done));
    if (written <= 0) return false;
    done += static_cast<size_t>(written);
  }
  return true;
}

}  // namespace hipsim
