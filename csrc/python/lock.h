// SPDX-License-Identifier: Apache-2.0
//
// Note [The end of Python]
// A thread other than the main one that asks for Python's global lock when the
// interpreter ends does not get it: up to Python 3.13 it is ended by unwinding its
// stack, which terminates the process at the first destructor on the way, and PyTorch
// frees memory in destructors. It hangs here instead, as Python 3.14 has it, until the
// process is gone; what it holds, PyTorch's mutex for one, it holds until then.
#pragma once

#include <Python.h>
#include <cxxabi.h>
#include <unistd.h>

namespace python {

// Python can run code, now and until the caller's thread says otherwise.
inline bool is_alive() {
#if PY_VERSION_HEX >= 0x030D0000
  return Py_IsInitialized() != 0 && Py_IsFinalizing() == 0;
#else
  return Py_IsInitialized() != 0 && _Py_IsFinalizing() == 0;
#endif
}

// A call of Python, whose end of the thread ends here.
template <typename Call>
auto or_hang(Call call) {
  try {
    return call();
  } catch (abi::__forced_unwind&) {
    for (;;) pause();
  }
}

// Lets go of Python's lock where the thread has it, as a caller from C++ may, and has
// to: at Python's end the one thread that still has it keeps it.
class Unlocked {
 public:
  Unlocked() {
    if (is_alive() && PyGILState_Check() != 0) thread_ = PyEval_SaveThread();
  }
  ~Unlocked() {
    if (thread_ == nullptr) return;
    or_hang([this] { return PyEval_RestoreThread(thread_); });
  }
  Unlocked(const Unlocked&) = delete;
  Unlocked& operator=(const Unlocked&) = delete;

 private:
  PyThreadState* thread_ = nullptr;
};

template <typename Work>
decltype(auto) without_lock(Work work) {
  const Unlocked unlocked;
  return work();
}

}  // namespace python
