// SPDX-License-Identifier: Apache-2.0
#pragma once

#define HIPSIM_EXPORT extern "C" __attribute__((visibility("default")))
