// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "case.h"
#include "engine/error.h"

namespace test {

void expect(const char* file, int line, const char* call, hipsim::Error result,
            hipsim::Error expected);

#define CHECK_ERROR(call, error) \
  ::test::expect(__FILE__, __LINE__, #call, call, ::hipsim::Error::error)
#define CHECK_OK(call) CHECK_ERROR(call, kSuccess)

}  // namespace test
