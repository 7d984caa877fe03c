// SPDX-License-Identifier: Apache-2.0
#include "engine/profile.h"

#include <map>
#include <set>
#include <string>

#include "engine/vram.h"
#include "test.h"

namespace hipsim {
namespace {

TEST(profiles_have_names_of_their_own_and_are_found) {
  std::set<std::string> names;
  for (const Profile& profile : profiles()) {
    CHECK(names.insert(profile.name).second);
    CHECK(find_profile(profile.name) == &profile);
  }
  CHECK(names.count("7.1") == 1);
  CHECK(find_profile("7") == nullptr && find_profile("") == nullptr);
}

TEST(versions_increase_within_a_vendor) {
  std::map<bool, int> newest;
  for (const Profile& profile : profiles()) {
    CHECK(profile.version > newest[profile.cuda]);
    newest[profile.cuda] = profile.version;
  }
  CHECK(newest.size() == 2);
  for (const auto& [cuda, version] : newest) {
    CHECK(default_profile(cuda).cuda == cuda);
    CHECK(default_profile(cuda).version == version);
  }
}

TEST(granularities_are_powers_of_two) {
  for (const Profile& profile : profiles()) {
    for (const size_t bytes : {profile.granularity, profile.recommended_granularity}) {
      CHECK(bytes >= kPage && (bytes & (bytes - 1)) == 0);
    }
    CHECK(profile.recommended_granularity >= profile.granularity);
  }
}

}  // namespace
}  // namespace hipsim
