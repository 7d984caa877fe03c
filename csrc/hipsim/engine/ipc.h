// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "engine/vram.h"

namespace hipsim {

// What one process tells another about memory that it exports. Bridges hand it out in
// the 64 bytes of an IPC handle.
struct IpcHandle {
  uint64_t mark;
  uint64_t cookie;  // of the export; 0: nothing stands behind the handle
  uint64_t bytes;
  uint64_t offset;  // of the address for which the handle was asked
  int32_t process;
  int32_t device;
  int32_t memory_file;  // numbers of files in the exporting process
  int32_t table_file;
  uint8_t unused[16];
};
static_assert(sizeof(IpcHandle) == 64);

// The exporting side: holds a file that lists the pieces of the memory, so that
// another process can map the same ones. The handle is good while this lives.
class IpcExport {
 public:
  static std::optional<IpcExport> make(const Physical& memory, size_t bytes);
  IpcExport(IpcExport&& other) noexcept;
  IpcExport& operator=(IpcExport&&) = delete;
  ~IpcExport();

  IpcHandle handle(const Physical& memory, size_t offset) const;

 private:
  IpcExport(int file, uint64_t cookie, size_t bytes);

  int file_;
  uint64_t cookie_;
  size_t bytes_;
};

// A handle of this process that nobody can open.
IpcHandle make_empty_handle(int device, size_t bytes);

bool is_ipc_handle(const IpcHandle& handle);
bool is_own(const IpcHandle& handle);

// The importing side. Null when the exporter is gone, the export has ended, or its
// files may not be opened.
PhysicalRef open_ipc(const IpcHandle& handle);

}  // namespace hipsim
