// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

#include "engine/virtual_memory.h"

namespace hipsim {

// What hipMemUnmap waits for before it takes the memory away.
enum class UnmapWaits { kNothing, kNullStream, kDevices };

// What a release does with the attributes of a batch: refuse them, check them and
// ignore the flags, or honour the flags too.
enum class BatchAttributes { kRefused, kChecked, kHonoured };

// One release of a runtime: what it calls itself, and where it differs from the
// others.
struct Profile {
  const char* name = "";

  // hipRuntimeGetVersion: major * 10'000'000 + minor * 100'000 + patch;
  // cuDriverGetVersion: major * 1000 + minor * 10.
  int version = 0;

  // A driver of the other vendor, for the bridge that has its symbols.
  bool cuda = false;

  // --- batches ---------------------------------------------------------------------
  // A loop over single copies: it wants a place for the failing index, and what comes
  // before that index is copied. Later releases check the whole batch first.
  bool batch_is_a_loop = false;
  BatchAttributes batch_attributes = BatchAttributes::kHonoured;

  // The most copies that one batch may send to the blit kernel before the kernel's
  // descriptors overrun their buffer; 0 is no limit.
  size_t max_blit_batch = 0;

  // --- pitched copies --------------------------------------------------------------
  // The most rows that go over the link one by one, where packets for rectangles have
  // no such distance; more are the kernel's. 0 is no limit.
  size_t max_row_copies = 0;

  // --- virtual memory --------------------------------------------------------------
  // What copies and fills run over; HIP's pitched ones stay in a mapping.
  Crossing copies_cross = Crossing::kMappings;

  size_t granularity = 0;
  size_t recommended_granularity = 0;

  // Memory is the device's again when its address range is freed, not when it is
  // unmapped.
  bool unmap_keeps_memory = false;

  // A mapping that failed is not reported.
  bool map_failure_is_silent = false;

  // hipMemRetainAllocationHandle takes a reference. Before, the handle that it tells is
  // the caller's own one.
  bool retain_takes_reference = true;

  // Host access can be asked for.
  bool host_access = true;
  UnmapWaits unmap_waits = UnmapWaits::kDevices;

  // --- capture ---------------------------------------------------------------------
  // Asynchronous work on the null stream is refused while a stream captures, and
  // invalidates the captures.
  bool legacy_work_breaks_captures = false;

  // A stream whose capture ended invalidated can be used again.
  bool invalid_capture_ends = true;

  // --- IPC -------------------------------------------------------------------------
  // Virtual memory is refused; else a handle comes back that nobody can open.
  bool ipc_refuses_virtual = true;
};

const std::vector<Profile>& profiles();

// Null for a name that is not in the table.
const Profile* find_profile(std::string_view name);

// The newest release of a vendor in the table.
const Profile& default_profile(bool cuda = false);

}  // namespace hipsim
