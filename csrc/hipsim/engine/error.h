// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace hipsim {

// The numbers that HIP and CUDA have in common, so that a bridge converts with a
// cast. A fault may carry any other number: a value of this type need not be one
// of the enumerators.
enum class Error : int {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kNotInitialized = 3,
  kInvalidCopyDirection = 21,
  kNoDevice = 100,
  kInvalidDevice = 101,
  kInvalidHandle = 400,
  kNotReady = 600,
  kIllegalAddress = 700,
  kContextIsDestroyed = 709,
  kHostMemoryAlreadyRegistered = 712,
  kHostMemoryNotRegistered = 713,
  kNotSupported = 801,
};

}  // namespace hipsim
