// SPDX-License-Identifier: Apache-2.0
// The kernel as far as preparing host memory goes, in front of the real one: an older
// one, one without memory, one without threads. For LD_PRELOAD.
#include <dlfcn.h>
#include <pthread.h>
#include <sys/mman.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <thread>

namespace {

constexpr int kPopulateWrite = 23;

std::atomic<int> populate_error = 0;
std::atomic<int> populate_first = 0;
std::atomic<int> populate_last = 0;
std::atomic<int> populates = 0;
std::atomic<int> populate_held = 0;
std::atomic<int> drop_error = 0;
std::atomic<int> threads_left = -1;

template <typename Function>
Function* real(Function*, const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

// Whether a std::thread was made there: its argument begins with a table of functions.
bool is_of_module(void* argument) {
  Dl_info info{};
  if (argument == nullptr || dladdr(*static_cast<void**>(argument), &info) == 0) {
    return false;
  }
  return std::strstr(info.dli_fname, "cumem_allocator") != nullptr;
}

}  // namespace

#define REAL(name) real(&name, #name)

extern "C" {

// --- what a test sets ----------------------------------------------------------------

// The advice to populate is refused with `error`, from the nth time on, `count` times.
void refuse_populate(int error, int nth, int count) {
  populates = 0;
  populate_first = nth;
  populate_last = nth + count - 1;
  populate_error = error;
}

// The nth advice from now on takes as long as this stands; 0 ends it.
void hold_populate(int nth) {
  if (nth != 0) populates = 0;
  populate_held = nth;
}

// How often it was given since then.
int count_populates() { return populates; }

// Memory is not taken back, with `error`; 0 ends it.
void refuse_drop(int error) { drop_error = error; }

// The module starts no more than `count` threads from now on; the simulator, any.
void allow_threads(int count) { threads_left = count; }

// --- libc ----------------------------------------------------------------------------

int madvise(void* begin, size_t bytes, int advice) noexcept {
  if (advice == kPopulateWrite) {
    const int nth = ++populates;
    while (nth == populate_held) {
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (nth >= populate_first && nth <= populate_last) {
      errno = populate_error;
      return -1;
    }
  }
  if (advice == MADV_DONTNEED && drop_error != 0) {
    errno = drop_error;
    return -1;
  }
  return REAL(madvise)(begin, bytes, advice);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                   void* (*start)(void*), void* argument) noexcept {
  if (is_of_module(argument)) {
    if (threads_left == 0) return EAGAIN;
    if (threads_left > 0) --threads_left;
  }
  return REAL(pthread_create)(thread, attributes, start, argument);
}

}  // extern "C"
