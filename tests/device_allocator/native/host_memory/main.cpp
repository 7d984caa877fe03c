// SPDX-License-Identifier: Apache-2.0
#include <cstdio>

#include "machine.h"

// --list: the names of the cases. Else the library of a simulator, and the name of the
// case to run on it.
int main(int count, char** arguments) {
  if (count == 3) {
    host_memory::load_simulator(arguments[1]);
    return test::run_case(arguments[2]);
  }
  if (count != 2 || arguments[1] != std::string("--list")) {
    std::fprintf(stderr, "usage: host_memory_test --list | LIBRARY CASE\n");
    return 2;
  }
  test::list_cases();
  return 0;
}
