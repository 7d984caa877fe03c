// SPDX-License-Identifier: Apache-2.0
#include "memory/host_arena.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <mutex>
#include <new>
#include <stdexcept>

#include "memory/leftovers.h"

namespace memory {
namespace {

size_t whole_pages(size_t bytes) {
  const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  const size_t rounded = (bytes + page - 1) / page * page;
  if (rounded < bytes) throw std::bad_alloc();
  return rounded;
}

gpu::Status enter(gpu::DeviceScope& scope, std::optional<int> device) {
  return device ? scope.use(*device) : scope.use_any();
}

// The arenas of this process, by address.
class Arenas {
 public:
  static Arenas& of_process() {
    static auto* const instance = new Arenas;
    return *instance;
  }

  void add(const char* begin, size_t bytes) {
    const std::lock_guard lock(mutex_);
    ends_[begin] = begin + bytes;
  }

  void remove(const char* begin) {
    const std::lock_guard lock(mutex_);
    ends_.erase(begin);
  }

  const char* copy_end(const char* address, const char* end) {
    const std::lock_guard lock(mutex_);
    auto arena = ends_.upper_bound(address);
    if (arena == ends_.begin()) return end;
    --arena;
    if (address >= arena->second) return end;
    const auto offset = static_cast<size_t>(address - arena->first);
    const char* const piece_end =
        arena->first + (offset / HostArena::kMaxPiece + 1) * HostArena::kMaxPiece;
    return std::min(end, piece_end);
  }

 private:
  std::mutex mutex_;
  std::map<const char*, const char*> ends_;
};

// Takes back what was locked, the last piece first; false where some is left.
bool unlock(std::vector<char*>& pieces, gpu::Driver& driver, gpu::Status* problem) {
  while (!pieces.empty()) {
    *problem = driver.unregister_host(pieces.back());
    if (!problem->ok()) return false;
    pieces.pop_back();
  }
  return true;
}

}  // namespace

HostArena::HostArena(size_t bytes, std::optional<int> device)
    : bytes_(bytes), mapped_bytes_(whole_pages(bytes)), device_(device) {
  if (bytes == 0) throw std::invalid_argument("a host arena has at least one byte");
  void* const mapped = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapped == MAP_FAILED) throw std::bad_alloc();
  data_ = static_cast<char*>(mapped);
  Arenas::of_process().add(data_, mapped_bytes_);
  lock_pages();
}

void HostArena::lock_pages() {
  try {
    gpu::Driver& driver = gpu::Driver::get();
    gpu::DeviceScope scope(driver);
    gpu::Status status = enter(scope, device_);
    for (size_t at = 0; status.ok() && at < mapped_bytes_; at += kMaxPiece) {
      const size_t bytes = std::min(kMaxPiece, mapped_bytes_ - at);
      status = driver.register_host(data_ + at, bytes);
      if (status.ok()) {
        pieces_.push_back(data_ + at);
      } else {
        registration_error_ = gpu::describe(driver.failure(status, {{}, bytes}));
      }
    }
    if (status.ok()) return;
    if (registration_error_.empty()) {
      registration_error_ = gpu::describe(driver.failure(status, {}));
    }
    // Half an arena that is locked is of no use to anybody. What stays locked now is
    // unlocked with the arena.
    gpu::Status ignored;
    (void)unlock(pieces_, driver, &ignored);
  } catch (const gpu::DriverNotFoundError& error) {
    registration_error_ = error.what();
  }
}

HostArena::~HostArena() {
  Arenas::of_process().remove(data_);
  if (!pieces_.empty()) {
    gpu::Driver& driver = gpu::Driver::get();
    gpu::DeviceScope scope(driver);
    gpu::Status status = enter(scope, device_);
    if (!status.ok() || !unlock(pieces_, driver, &status)) {
      std::fprintf(
          stderr,
          "cumem: %s; %s of host memory at %p stay locked until that succeeds\n",
          gpu::describe(driver.failure(status, {})).c_str(),
          gpu::format_bytes(bytes_).c_str(), static_cast<void*>(data_));
      Leftovers::of_process().add([pieces = pieces_, device = device_, data = data_,
                                   bytes = mapped_bytes_,
                                   &driver](gpu::DeviceScope& again) mutable {
        gpu::Status left;
        if (!enter(again, device).ok() || !unlock(pieces, driver, &left)) return false;
        munmap(data, bytes);
        return true;
      });
      return;
    }
  }
  munmap(data_, mapped_bytes_);
}

const char* HostArena::copy_end(const char* address, const char* end) {
  return Arenas::of_process().copy_end(address, end);
}

}  // namespace memory
