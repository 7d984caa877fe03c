// SPDX-License-Identifier: Apache-2.0
#include "engine/call_log.h"

#include "test.h"

namespace hipsim {
namespace {

TEST(calls_fail_when_told) {
  CallLog log({"f", "g"});
  CHECK(!log.fail("h", 1, Error::kOutOfMemory) && !log.fail("f", 0, Error::kNotReady));
  CHECK_OK(log.enter(0));
  CHECK(log.fail("f", 2, Error::kOutOfMemory) && log.fail("f", 1, Error::kNoDevice));
  CHECK_OK(log.enter(1));
  CHECK_EQ(log.pending(), 2);
  CHECK_ERROR(log.enter(0), kNoDevice);
  CHECK_ERROR(log.enter(0), kOutOfMemory);
  CHECK_EQ(log.pending(), 0);
  CHECK_OK(log.enter(0));
  CHECK(log.count(0) == 4 && log.count(1) == 1);
  CHECK(log.fail("f", 1, Error::kNoDevice));
  CHECK_EQ(log.pending(), 1);
  log.reset();
  CHECK_EQ(log.pending(), 0);
  CHECK_OK(log.enter(0));
  CHECK_EQ(log.count(0), 1);
}

}  // namespace
}  // namespace hipsim
