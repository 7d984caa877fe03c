// SPDX-License-Identifier: Apache-2.0
#include "injection.h"

#include <sys/mman.h>

#include <cerrno>
#include <climits>
#include <cstddef>
#include <system_error>

namespace host_memory {
namespace {

constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE

std::atomic<int> threads_left = INT_MAX;
std::atomic<int> addresses_left = INT_MAX;
std::atomic<int> pages_left = INT_MAX;
std::atomic<int> pages_error = 0;
std::atomic<int> failures = 0;

// Is this call one too many?
bool is_spent(std::atomic<int>& left) {
  if (left == INT_MAX || left.fetch_sub(1) > 0) return false;
  ++failures;
  return true;
}

}  // namespace

Injection::Injection() { failures = 0; }

Injection::~Injection() { threads_left = addresses_left = pages_left = INT_MAX; }

void Injection::let_threads_start(int count) { threads_left = count; }

void Injection::let_addresses_be_had(int count) { addresses_left = count; }

void Injection::let_pages_be_populated(int count, int error) {
  pages_error = error;
  pages_left = count;
}

int Injection::count() const { return failures; }

}  // namespace host_memory

// The linker hands the calls of these objects over (CMakeLists.txt). A std::thread of
// libstdc++ starts with this one, which takes a unique_ptr by reference.
#define START_THREAD                                        \
  "_ZNSt6thread15_M_start_threadESt10unique_ptrINS_6_State" \
  "ESt14default_deleteIS1_EEPFvvE"

extern "C" {

void* __real_mmap(void* wish, size_t bytes, int protection, int flags, int file,
                  off_t offset);
int __real_madvise(void* begin, size_t bytes, int advice);
void really_start_thread(void* thread, void* state,
                         void (*depend)()) __asm__("__real_" START_THREAD);
void start_thread(void* thread, void* state,
                  void (*depend)()) __asm__("__wrap_" START_THREAD);

void* __wrap_mmap(void* wish, size_t bytes, int protection, int flags, int file,
                  off_t offset) {
  if (!host_memory::is_spent(host_memory::addresses_left)) {
    return __real_mmap(wish, bytes, protection, flags, file, offset);
  }
  errno = ENOMEM;
  return MAP_FAILED;
}

int __wrap_madvise(void* begin, size_t bytes, int advice) {
  if (advice == host_memory::kPopulateWrite &&
      host_memory::is_spent(host_memory::pages_left)) {
    errno = host_memory::pages_error;
    return -1;
  }
  return __real_madvise(begin, bytes, advice);
}

void start_thread(void* thread, void* state, void (*depend)()) {
  if (host_memory::is_spent(host_memory::threads_left)) {
    throw std::system_error(EAGAIN, std::generic_category());
  }
  really_start_thread(thread, state, depend);
}

}  // extern "C"
