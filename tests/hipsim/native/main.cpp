// SPDX-License-Identifier: Apache-2.0
#include <cstdio>
#include <string>

#include "engine/profile.h"
#include "test.h"

namespace test {

void expect(const char* file, int line, const char* call, hipsim::Error result,
            hipsim::Error expected) {
  expect(file, line, call, static_cast<uint64_t>(result),
         static_cast<uint64_t>(expected));
}

}  // namespace test

// --list: the names of the cases. --releases: the names of HIP's profiles, for other
// programs. Else the name of the case to run.
int main(int count, char** arguments) {
  const std::string word = count > 1 ? arguments[1] : "--list";
  if (word == "--list") {
    test::list_cases();
    return 0;
  }
  if (word == "--releases") {
    for (const hipsim::Profile& profile : hipsim::profiles()) {
      if (!profile.cuda) std::puts(profile.name);
    }
    return 0;
  }
  return test::run_case(word);
}
