// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string_view>
#include <vector>

namespace hipsim {

// One release of the HIP runtime: what it calls itself, and where it differs from
// the others.
struct Profile {
  const char* name;

  // hipRuntimeGetVersion: major * 10'000'000 + minor * 100'000 + patch.
  int version;

  // hipMemcpyBatchAsync is a loop over single copies: it wants a place for the
  // failing index, and what comes before that index is copied. Later releases
  // check the whole batch first.
  bool batch_is_a_loop;

  // hipMemcpyBatchAsync takes attributes (else a non-zero count of them is
  // hipErrorNotSupported).
  bool batch_attributes;

  // The attribute flags hipMemcpyFlagExtPreferCE and hipMemcpyFlagExtOp* have a
  // meaning. A release in which they have none ignores them without a word.
  bool extended_flags;

  // The most copies that one batch may send to the blit kernel before the kernel's
  // descriptors overrun their buffer; 0 is no limit.
  size_t max_blit_batch;
};

const std::vector<Profile>& profiles();

// Null for a name that is not in the table.
const Profile* find_profile(std::string_view name);

// The newest release in the table.
const Profile& default_profile();

}  // namespace hipsim
