// SPDX-License-Identifier: Apache-2.0
// Frees memory as a destructor does while Python unwinds: with an error that is set.
// Declared here because a build of Python may have no headers beside it.
#include <sys/types.h>

extern "C" {

extern void* PyExc_KeyError;
void PyErr_SetString(void* type, const char* text);

void free_while_raising(void (*free)(void*, ssize_t, int, void*), void* pointer) {
  PyErr_SetString(PyExc_KeyError, "in flight");
  free(pointer, 0, 0, nullptr);
}

}  // extern "C"
