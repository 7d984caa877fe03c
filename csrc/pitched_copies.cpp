// SPDX-License-Identifier: Apache-2.0
//
// Note [Many copies, one call]
// A load of 128 blocks is some hundreds of rectangles, and the drivers take them one by
// one. Queueing them from Python would hold the interpreter's lock against the thread
// that schedules decode each time, so a whole table goes down in one call that lets go
// of the lock until the last one is queued. The call makes no device current: whoever
// owns the stream has done so, and choosing one here could make a context on a device
// that the process does not use.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <string>
#include <tuple>

#include "gpu/driver_api.h"
#include "python/lock.h"

namespace py = pybind11;

namespace {

using gpu::Driver;
using gpu::Rectangle;

constexpr py::ssize_t kColumns = 8;
static_assert(sizeof(Rectangle) == kColumns * sizeof(uint64_t),
              "a row of the table is a Rectangle");

void check(const py::buffer_info& table) {
  const auto refuse = [](const std::string& what) {
    throw py::value_error("the table of rectangles must be " + what);
  };
  if (!table.item_type_is_equivalent_to<uint64_t>()) {
    refuse("of uint64, not of format '" + table.format + "'");
  }
  if (table.ndim != 2 || table.shape[1] != kColumns) {
    std::string shape;
    for (const py::ssize_t length : table.shape) {
      shape += (shape.empty() ? "" : ", ") + std::to_string(length);
    }
    refuse("of shape [n, 8], not [" + shape + "]");
  }
  const py::ssize_t rows = table.shape[0];
  if ((rows > 0 && table.strides[1] != table.itemsize) ||
      (rows > 1 && table.strides[0] != kColumns * table.itemsize)) {
    refuse("C-contiguous");
  }
}

// The index of a rectangle, the error's number, and the call.
using Refusal = std::tuple<size_t, int, std::string>;

std::optional<Refusal> submit(const py::buffer& buffer, uintptr_t stream) {
  const py::buffer_info table = buffer.request();
  check(table);
  const auto* row = static_cast<const unsigned char*>(table.ptr);
  const auto count = static_cast<size_t>(table.shape[0]);
  const python::Unlocked unlocked;
  Driver& driver = Driver::get();
  for (size_t i = 0; i < count; ++i, row += sizeof(Rectangle)) {
    Rectangle rectangle;
    std::memcpy(&rectangle, row, sizeof rectangle);
    const gpu::Status status =
        driver.copy_rectangle(rectangle, reinterpret_cast<gpu::Stream>(stream));
    if (!status.ok()) return Refusal(i, status.error, status.call);
  }
  return std::nullopt;
}

constexpr const char* kSubmitDoc =
    R"(Queues copies of rectangles on a stream, in the order of the table.

Python's lock is released until the last one is queued. The calling thread must have the
stream's device current.

Args:
    table: A C-contiguous buffer of uint64 [n, 8] with the columns destination, source,
        width, rows, pitch of the destination, pitch of the source, lines of the
        destination, lines of the source. Addresses may be of device memory or of
        registered host memory; width and pitches are bytes. A row lies pitch * lines
        bytes behind the one before it. Where lines are 1 on both sides the call is
        hipMemcpy2DAsync or cuMemcpy2DAsync, else the 3-D call of one line a slice.
    stream: hipStream_t or CUstream as a number; 0 is the null stream.

Returns:
    None when all are queued. Else the index of the first one that the driver refused,
    the error's number and the name of the call: what is before it stays queued, and
    nothing behind it is tried. On HIP the thread's last error is taken back.

Raises:
    TypeError: The table is no buffer, or the stream no number that is 0 or more.
    ValueError: The table is a buffer, but not as above.
    RuntimeError: The process has no GPU driver, or one that lacks a function.)";

}  // namespace

PYBIND11_MODULE(pitched_copies, module) {
  module.doc() = "Copies of rectangles on a stream of HIP or CUDA, many in one call.";
  module.def("submit", &submit, py::arg("table"), py::arg("stream"), kSubmitDoc);
}
