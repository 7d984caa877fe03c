// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>

namespace host_memory {

// What of the system's calls fails for the code under test, until the end of this. One
// at a time.
class Injection {
 public:
  Injection();
  ~Injection();
  Injection(const Injection&) = delete;
  Injection& operator=(const Injection&) = delete;

  // No thread starts after so many more.
  void let_threads_start(int count);
  // No addresses are to be had after so many more times.
  void let_addresses_be_had(int count);
  // Pages cannot be populated after so many more times, for this reason.
  void let_pages_be_populated(int count, int error);

  // How often something failed.
  int count() const;
};

}  // namespace host_memory
