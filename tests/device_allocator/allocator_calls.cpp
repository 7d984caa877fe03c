// SPDX-License-Identifier: Apache-2.0
// What PyTorch does around an allocator's functions: its exceptions become an error.

#include <sys/types.h>

#include <cstddef>
#include <cstring>
#include <exception>

using Malloc = void* (*)(ssize_t, int, void*);

namespace {

void copy_text(const char* text, char* error, size_t room) {
  std::strncpy(error, text, room - 1);
  error[room - 1] = '\0';
}

}  // namespace

// `error` is empty unless `allocate` threw.
extern "C" void* call_malloc(Malloc allocate, ssize_t size, int device, char* error,
                             size_t room) {
  error[0] = '\0';
  try {
    return allocate(size, device, nullptr);
  } catch (const std::exception& thrown) {
    copy_text(thrown.what(), error, room);
  } catch (...) {
    copy_text("not a std::exception", error, room);
  }
  return nullptr;
}
