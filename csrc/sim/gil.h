// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <Python.h>

namespace sim {

inline bool python_is_finalizing() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0;
#else
  return _Py_IsFinalizing() != 0;
#endif
}

// This thread does not hold the GIL while one lives, whether it did before or not.
class WithoutGil {
 public:
  WithoutGil() {
    if (Py_IsInitialized() != 0 && !python_is_finalizing() && PyGILState_Check() != 0) {
      state_ = PyEval_SaveThread();
    }
  }
  ~WithoutGil() {
    if (state_ != nullptr) PyEval_RestoreThread(state_);
  }
  WithoutGil(const WithoutGil&) = delete;
  WithoutGil& operator=(const WithoutGil&) = delete;

 private:
  PyThreadState* state_ = nullptr;
};

}  // namespace sim
