// SPDX-License-Identifier: Apache-2.0
#include "engine/ipc.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace hipsim {
namespace {

constexpr uint64_t kMark = 0x6d69737069486970;  // says that a handle is the simulator's

struct TableHead {
  uint64_t mark;
  uint64_t cookie;
  uint64_t extents;
};

uint64_t random_cookie() {
  uint64_t cookie = 0;
  while (cookie == 0) {
    if (getrandom(&cookie, sizeof cookie, 0) != sizeof cookie) cookie = 0;
  }
  return cookie;
}

bool write_all(int file, const void* data, size_t bytes, off_t offset) {
  return pwrite(file, data, bytes, offset) == static_cast<ssize_t>(bytes);
}

bool read_all(int file, void* data, size_t bytes, off_t offset) {
  return pread(file, data, bytes, offset) == static_cast<ssize_t>(bytes);
}

int open_file_of(const IpcHandle& handle, int number, int flags) {
  const std::string path =
      "/proc/" + std::to_string(handle.process) + "/fd/" + std::to_string(number);
  return open(path.c_str(), flags | O_CLOEXEC | O_NONBLOCK);
}

// The pieces that the table of the handle's export lists; none if it is another's.
std::vector<Extent> read_table(int file, const IpcHandle& handle) {
  TableHead head{};
  if (!read_all(file, &head, sizeof head, 0) || head.mark != kMark ||
      head.cookie != handle.cookie ||
      head.extents > whole_pages(handle.bytes) / kPage) {
    return {};
  }
  std::vector<Extent> extents(head.extents);
  const size_t bytes = extents.size() * sizeof(Extent);
  if (!read_all(file, extents.data(), bytes, sizeof head)) return {};
  return extents;
}

}  // namespace

std::optional<IpcExport> IpcExport::make(const Physical& memory, size_t bytes) {
  const int file = memfd_create("hipsim-export", MFD_CLOEXEC);
  if (file < 0) return std::nullopt;
  IpcExport made(file, random_cookie(), bytes);
  const TableHead head{kMark, made.cookie_, memory.extents.size()};
  const size_t table = memory.extents.size() * sizeof(Extent);
  if (!write_all(file, &head, sizeof head, 0) ||
      !write_all(file, memory.extents.data(), table, sizeof head)) {
    return std::nullopt;
  }
  return made;
}

IpcExport::IpcExport(int file, uint64_t cookie, size_t bytes)
    : file_(file), cookie_(cookie), bytes_(bytes) {}

IpcExport::IpcExport(IpcExport&& other) noexcept
    : file_(std::exchange(other.file_, -1)),
      cookie_(other.cookie_),
      bytes_(other.bytes_) {}

IpcExport::~IpcExport() {
  if (file_ >= 0) close(file_);
}

IpcHandle IpcExport::handle(const Physical& memory, size_t offset) const {
  return {kMark,         cookie_,     bytes_, offset, getpid(),
          memory.device, memory.file, file_,  {}};
}

IpcHandle make_empty_handle(int device, size_t bytes) {
  return {kMark, 0, bytes, 0, getpid(), device, -1, -1, {}};
}

bool is_ipc_handle(const IpcHandle& handle) { return handle.mark == kMark; }

bool is_own(const IpcHandle& handle) { return handle.process == getpid(); }

PhysicalRef open_ipc(const IpcHandle& handle) {
  if (handle.cookie == 0 || handle.process <= 0) return nullptr;
  const int table = open_file_of(handle, handle.table_file, O_RDONLY);
  if (table < 0) return nullptr;
  std::vector<Extent> extents = read_table(table, handle);
  close(table);
  size_t total = 0;
  for (const Extent& extent : extents) total += extent.bytes;
  if (total == 0 || total != whole_pages(handle.bytes)) return nullptr;
  const int file = open_file_of(handle, handle.memory_file, O_RDWR);
  if (file < 0) return nullptr;
  auto memory = std::make_shared<Physical>(handle.device, total);
  memory->file = file;
  memory->extents = std::move(extents);
  return memory;
}

}  // namespace hipsim
