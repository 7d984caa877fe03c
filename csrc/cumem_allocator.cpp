// SPDX-License-Identifier: Apache-2.0
//
// Note [Python's lock]
// The module's functions and my_malloc and my_free let go of Python's global lock
// around everything that asks the driver or waits for another thread that does, and
// take it only for the two callbacks and with nothing else held. PyTorch calls
// my_malloc and my_free with the mutex of its allocator held, so a callback must not
// wait for a thread that may be waiting for that, and what they do themselves waits for
// no copy and no device of another thread (Note [Claims]). What PyTorch's mutex and
// Python's lock can do to each other is left as it is with every pluggable allocator: a
// thread that drops a tensor waits for the mutex with the lock held, where PyTorch does
// not let go of it, and my_malloc's callback needs the lock.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/types.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "gpu/driver_api.h"
#include "memory/host_arena.h"
#include "memory/numa.h"
#include "memory/progress.h"
#include "memory/range_table.h"
#include "memory/transfer.h"
#include "python/lock.h"

namespace py = pybind11;

namespace {

using gpu::Address;
using gpu::Driver;
using memory::HostArena;
using memory::Progress;
using memory::RangeTable;
using python::or_hang;
using python::Unlocked;
using python::without_lock;

RangeTable& ranges() { return RangeTable::of_process(); }

// Calls a callback, whatever error is in flight around it.
template <typename Use>
auto ask_python(Use use) {
  return or_hang([&] {
    const PyGILState_STATE state = PyGILState_Ensure();
    struct Release {
      const PyGILState_STATE state;
      ~Release() { PyGILState_Release(state); }
    };
    const Release released{state};
    const py::error_scope saved;
    return use();
  });
}

py::object call(const py::object& callback, const py::object& argument) {
  PyObject* const answer =
      or_hang([&] { return PyObject_CallOneArg(callback.ptr(), argument.ptr()); });
  if (answer == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(answer);
}

// --- chunks --------------------------------------------------------------------------

// How vLLM reads VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE, and its default.
constexpr const char* kChunkVariable = "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE";
constexpr unsigned long long kMebibyte = 1ULL << 20;
constexpr unsigned long long kDefaultChunkMebibytes = 256;

struct ChunkSetting {
  unsigned long long bytes;
  std::optional<std::string> problem;
};

ChunkSetting chunk_setting() {
  const char* const text = std::getenv(kChunkVariable);
  if (text == nullptr) return {kDefaultChunkMebibytes * kMebibyte, {}};
  const auto problem = [text](const std::string& what, unsigned long long mebibytes) {
    return std::string(kChunkVariable) + "=\"" + text + "\" " + what + "; using " +
           std::to_string(mebibytes) + " MiB. Set it to a number of MiB, such as " +
           std::to_string(kDefaultChunkMebibytes) + ", or leave it unset.";
  };
  const auto fall_back = [&](const std::string& what) -> ChunkSetting {
    return {kDefaultChunkMebibytes * kMebibyte, problem(what, kDefaultChunkMebibytes)};
  };
  char* end = nullptr;
  errno = 0;
  const unsigned long long mebibytes = std::strtoull(text, &end, 0);
  if (end == text) return fall_back("is not a number");
  if (errno != 0 || mebibytes > ULLONG_MAX / kMebibyte)
    return fall_back("is too large");
  if (mebibytes == 0) return fall_back("is no size of a chunk");
  if (*end == '\0') return {mebibytes * kMebibyte, {}};
  return {mebibytes * kMebibyte,
          problem(std::string("ends in \"") + end + "\", which is ignored", mebibytes)};
}

size_t chunk_bytes(const Driver& driver) {
  return driver.vendor() == gpu::Vendor::kHip ? chunk_setting().bytes : SIZE_MAX;
}

// --- handles -------------------------------------------------------------------------

py::tuple as_handle(const RangeTable::Entry& entry, gpu::Vendor vendor) {
  if (vendor == gpu::Vendor::kCuda) {
    return py::make_tuple(entry.device, entry.bytes, entry.address,
                          entry.chunks.front().slot);
  }
  py::list chunks;
  for (const auto& chunk : entry.chunks) {
    chunks.append(py::make_tuple(chunk.slot, chunk.bytes));
  }
  return py::make_tuple(entry.device, entry.bytes, entry.address, chunks);
}

std::vector<uintptr_t> slots_of(const py::object& handle, gpu::Vendor vendor) {
  try {
    if (vendor == gpu::Vendor::kCuda) return {handle.cast<uintptr_t>()};
    std::vector<uintptr_t> slots;
    for (const auto& [slot, bytes] :
         handle.cast<std::vector<std::pair<uintptr_t, size_t>>>()) {
      slots.push_back(slot);
    }
    return slots;
  } catch (const py::cast_error&) {
    throw py::type_error(vendor == gpu::Vendor::kCuda
                             ? "the handle must be the address of a slot, as an int"
                             : "the handle must be a list of (slot address, bytes)");
  }
}

// A handle is what the range was announced with, in every part.
void check_handle(int device, size_t bytes, Address address, const py::object& handle) {
  const gpu::Vendor vendor = Driver::get().vendor();
  const std::vector<uintptr_t> slots = slots_of(handle, vendor);
  const RangeTable::Entry known = without_lock([&] { return ranges().entry(address); });
  const bool same_slots =
      std::equal(slots.begin(), slots.end(), known.chunks.begin(), known.chunks.end(),
                 [](uintptr_t slot, const RangeTable::Entry::Chunk& chunk) {
                   return slot == chunk.slot;
                 });
  if (known.device != device || known.bytes != bytes || !same_slots) {
    throw py::value_error("the range at " + gpu::format_address(address) + " has " +
                          gpu::format_bytes(known.bytes) + " on device " +
                          std::to_string(known.device) +
                          ", and another handle than the one given");
  }
}

void create_and_map(int device, size_t bytes, Address address,
                    const py::object& handle) {
  check_handle(device, bytes, address, handle);
  without_lock([&] { ranges().map(Driver::get(), address); });
}

void unmap_and_release(int device, size_t bytes, Address address,
                       const py::object& handle) {
  check_handle(device, bytes, address, handle);
  without_lock([&] { ranges().suspend(Driver::get(), {address}); });
}

// --- callbacks -----------------------------------------------------------------------

// Kept for ever: PyTorch frees memory after the interpreter has gone, too.
struct Callbacks {
  py::object malloc;
  py::object free;
};

Callbacks& callbacks() {
  static auto* const instance = new Callbacks;
  return *instance;
}

void init_module(py::object malloc_callback, py::object free_callback) {
  for (const py::object& each : {malloc_callback, free_callback}) {
    if (PyCallable_Check(each.ptr()) == 0) {
      throw py::type_error("init_module takes two callables");
    }
  }
  callbacks() = {std::move(malloc_callback), std::move(free_callback)};
}

// Bytes of the environment, as Python has them in os.environ.
py::object as_text(const std::string& bytes) {
  return py::reinterpret_steal<py::object>(PyUnicode_DecodeFSDefaultAndSize(
      bytes.data(), static_cast<py::ssize_t>(bytes.size())));
}

// What a callback raised, as text; the error itself must not leave Python's lock.
std::string message_of(const py::error_already_set& error) {
  std::string text = error.what();
  return text.substr(0, text.find("\n\nAt:"));
}

void announce(const RangeTable::Entry& entry, gpu::Vendor vendor) {
  ask_python([&] {
    const py::object callback = callbacks().malloc;
    if (!callback) throw std::runtime_error("init_module was not called");
    try {
      call(callback, as_handle(entry, vendor));
    } catch (const py::error_already_set& error) {
      throw std::runtime_error("the callback for " + gpu::format_bytes(entry.bytes) +
                               " raised " + message_of(error));
    }
  });
}

// Whether the range is to be freed now. Its user keeps it otherwise.
bool may_free(Address address) {
  return ask_python([&] {
    const py::object callback = callbacks().free;
    if (!callback) return true;
    try {
      return !call(callback, py::int_(address)).is_none();
    } catch (const py::error_already_set& error) {
      throw std::runtime_error("the range is kept, because the callback raised " +
                               message_of(error));
    }
  });
}

void* allocate(ssize_t size, int device) {
  if (size <= 0) {
    throw std::invalid_argument("cannot allocate " + std::to_string(size) + " bytes");
  }
  Driver& driver = Driver::get();
  const RangeTable::Entry entry =
      ranges().allocate(driver, device, static_cast<size_t>(size), chunk_bytes(driver));
  try {
    if (!python::is_alive()) throw std::runtime_error("Python has ended");
    announce(entry, driver.vendor());
  } catch (...) {
    try {
      ranges().free_unused(driver, entry.address);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "cumem: %s\n", error.what());
    }
    throw;
  }
  return reinterpret_cast<void*>(entry.address);
}

// --- the module's types --------------------------------------------------------------

// What the last reference to an arena gives back is given back without Python's lock.
std::shared_ptr<HostArena> released_without_lock(std::shared_ptr<HostArena> arena) {
  HostArena* const pointer = arena.get();
  return {pointer, [arena = std::move(arena)](HostArena*) mutable {
            const Unlocked unlocked;
            arena.reset();
          }};
}

std::shared_ptr<HostArena> make_arena(py::ssize_t size, py::ssize_t piece_size,
                                      std::optional<int> node) {
  if (size <= 0) {
    throw py::value_error("a host arena has at least one byte, not " +
                          std::to_string(size));
  }
  if (piece_size <= 0) {
    throw py::value_error("a piece of a host arena has whole pages, not " +
                          std::to_string(piece_size) + " bytes");
  }
  if (node && *node < 0) {
    throw py::value_error("there is no NUMA node " + std::to_string(*node));
  }
  const auto bytes = static_cast<size_t>(size);
  try {
    return released_without_lock(without_lock(
        [&] { return HostArena::make(bytes, static_cast<size_t>(piece_size), node); }));
  } catch (const std::bad_alloc&) {
    const std::string text =
        "the kernel refuses addresses for " + gpu::format_bytes(bytes) +
        " of host memory. They count against the limit on the address space "
        "(RLIMIT_AS, ulimit -v), and with vm.overcommit_memory=2 against what the "
        "kernel commits to: raise it";
    PyErr_SetString(PyExc_MemoryError, text.c_str());
    throw py::error_already_set();
  }
}

memory::TransferOptions transfer_options(const std::shared_ptr<Progress>& progress,
                                         size_t threads, size_t window) {
  if (window == 0) throw py::value_error("a window has at least one byte");
  return {progress.get(), threads, window};
}

std::optional<int> numa_node(int device) {
  return without_lock([&]() -> std::optional<int> {
    std::string bus_id;
    if (!Driver::get().bus_id(device, &bus_id).ok()) return std::nullopt;
    return memory::numa_node(bus_id);
  });
}

PyObject* driver_error = nullptr;
PyObject* out_of_memory_error = nullptr;
PyObject* driver_not_found_error = nullptr;

PyObject* make_error_type(py::module_& module, const char* name, PyObject* base,
                          const char* text) {
  const std::string full = py::cast<std::string>(module.attr("__name__")) + "." + name;
  PyObject* const type = PyErr_NewExceptionWithDoc(full.c_str(), text, base, nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, type);
  return type;
}

void set_driver_error(PyObject* type, const gpu::DriverError& error) {
  const py::object made = py::reinterpret_borrow<py::object>(type)(error.what());
  const auto free = error.memory ? std::optional(error.memory->free) : std::nullopt;
  const auto total = error.memory ? std::optional(error.memory->total) : std::nullopt;
  made.attr("call") = error.status.call;
  made.attr("error_name") = error.name;
  made.attr("error_number") = error.status.error;
  made.attr("device") = error.subject.device;
  made.attr("size") = error.subject.bytes;
  made.attr("free") = free;
  made.attr("total") = total;
  PyErr_SetObject(type, made.ptr());
}

void translate(std::exception_ptr thrown) {
  try {
    if (thrown) std::rethrow_exception(thrown);
  } catch (const gpu::OutOfMemoryError& error) {
    set_driver_error(out_of_memory_error, error);
  } catch (const gpu::DriverError& error) {
    set_driver_error(driver_error, error);
  } catch (const gpu::DriverNotFoundError& error) {
    PyErr_SetString(driver_not_found_error, error.what());
  }
}

void define_errors(py::module_& module) {
  driver_error = make_error_type(
      module, "DriverError", PyExc_RuntimeError,
      "A call of the GPU driver failed: `call`, `error_name`, `error_number`, and as "
      "far as known `device`, `size` (bytes asked for), `free` and `total` (bytes of "
      "the device's memory).");
  for (const char* const name : {"device", "size", "free", "total"}) {
    py::reinterpret_borrow<py::object>(driver_error).attr(name) = py::none();
  }
  out_of_memory_error = make_error_type(module, "OutOfMemoryError", driver_error,
                                        "The device or its driver has no memory left.");
  driver_not_found_error =
      make_error_type(module, "DriverNotFoundError", PyExc_RuntimeError,
                      "This process has no driver of HIP or CUDA.");
  py::register_local_exception_translator(&translate);
}

bool supports_virtual_memory(Driver& driver, int device) {
  return without_lock([&] {
    bool answer = false;
    const gpu::Status status = driver.supports_virtual_memory(device, &answer);
    if (!status.ok()) gpu::throw_if(driver.failure(status, {device, {}}));
    return answer;
  });
}

void define_driver(py::module_& module) {
  py::class_<Driver, std::unique_ptr<Driver, py::nodelete>>(
      module, "Driver", py::module_local(), "The driver that this process uses.")
      .def_property_readonly(
          "vendor",
          [](const Driver& driver) {
            return driver.vendor() == gpu::Vendor::kHip ? "hip" : "cuda";
          },
          "\"hip\" or \"cuda\".")
      .def_property_readonly(
          "version",
          [](Driver& driver) { return without_lock([&] { return driver.version(); }); },
          "hipRuntimeGetVersion or cuDriverGetVersion; 0 when the driver does not say.")
      .def_property_readonly("path", &Driver::path, "The library's file.")
      .def_property_readonly(
          "frees_memory_with_address",
          [](Driver& driver) {
            return without_lock([&] { return driver.frees_memory_with_address(); });
          },
          "Memory is the device's again only when its addresses are freed.")
      .def_property_readonly(
          "maps_for_host",
          [](Driver& driver) {
            return without_lock([&] { return driver.maps_for_host(); });
          },
          "Mapped memory can be read by the host.")
      .def("supports_virtual_memory", &supports_virtual_memory, py::arg("device"),
           "Raises DriverError.");
}

}  // namespace

// --- what PyTorch's CUDAPluggableAllocator calls -------------------------------------

extern "C" {

// Null when the device has no memory, which PyTorch takes for a sign to free its caches
// and try again. Anything else that fails is thrown, and nothing is left of it.
__attribute__((visibility("default"))) void* my_malloc(ssize_t size, int device,
                                                       void*) {
  const Unlocked unlocked;
  try {
    return allocate(size, device);
  } catch (const gpu::OutOfMemoryError& error) {
    std::fprintf(stderr, "cumem: no memory for an allocation of %zd bytes: %s\n", size,
                 error.what());
    return nullptr;
  } catch (const std::exception& error) {
    throw std::runtime_error(std::string("cumem: allocating ") + std::to_string(size) +
                             " bytes on device " + std::to_string(device) +
                             " failed: " + error.what());
  }
}

__attribute__((visibility("default"))) void my_free(void* pointer, ssize_t size, int,
                                                    void*) {
  const Unlocked unlocked;
  const auto address = reinterpret_cast<Address>(pointer);
  try {
    if (python::is_alive() && !may_free(address)) return;
    ranges().free(Driver::get(), address);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "cumem: freeing %zd bytes at %s failed: %s\n", size,
                 gpu::format_address(address).c_str(), error.what());
  }
}

}  // extern "C"

PYBIND11_MODULE(cumem_allocator, module) {
  module.doc() =
      "Device memory that can be taken away and given back at the same address.\n\n"
      "A range is a reservation of addresses, with physical memory or without. PyTorch "
      "makes and frees ranges with my_malloc and my_free; the functions here map and "
      "suspend them. What fails to be given back is tried again with later calls.";
  define_errors(module);
  define_driver(module);

  module.def(
      "driver", []() -> Driver& { return without_lock(&Driver::get); },
      py::return_value_policy::reference,
      "The driver of this process. Raises DriverNotFoundError.");
  module.def(
      "init_module", &init_module, py::arg("malloc_callback"), py::arg("free_callback"),
      "Sets what is called with the handle (device, bytes, address, slots) of each "
      "new range, and with the address of each range that is freed; None as the "
      "latter's answer keeps the range, for `free`. Raises TypeError.");
  module.def("python_create_and_map", &create_and_map, py::arg("device"),
             py::arg("size"), py::arg("ptr"), py::arg("handle"),
             "Gives a range new memory, or leaves it as it was. Raises DriverError, "
             "ValueError for a handle of no live range, RuntimeError for one that is "
             "mapped or whose addresses were taken.");
  module.def("python_unmap_and_release", &unmap_and_release, py::arg("device"),
             py::arg("size"), py::arg("ptr"), py::arg("handle"),
             "`suspend` of one range, by its handle.");
  module.def(
      "suspend",
      [](const std::vector<Address>& addresses) {
        without_lock([&] { ranges().suspend(Driver::get(), addresses); });
      },
      py::arg("ptrs"),
      "Takes the memory of ranges away and keeps their addresses, when the work of "
      "their devices is done. Raises DriverError: either no range has changed, or all "
      "are unmapped, and what the driver did not take back is tried again later "
      "(`is_mapped` tells). RuntimeError for addresses that were taken.");
  py::class_<Progress, std::shared_ptr<Progress>>(
      module, "Progress", py::module_local(),
      "How far a transfer is, for another thread to look at while it runs.")
      .def(py::init<>())
      .def_property_readonly(
          "started", [](const Progress& progress) { return progress.started.load(); },
          "A transfer has begun and let go of Python's lock: whoever keeps the lock "
          "now keeps nobody from copying.")
      .def_property_readonly(
          "done", [](const Progress& progress) { return progress.done.load(); },
          "Bytes that are copied; fills do not count.");
  module.def(
      "back_up",
      [](const std::vector<RangeTable::Copy>& copies,
         const std::shared_ptr<Progress>& progress, size_t threads, size_t window) {
        const auto options = transfer_options(progress, threads, window);
        without_lock([&] {
          if (progress != nullptr) progress->started = true;
          ranges().copy_out(Driver::get(), copies, options);
        });
      },
      py::arg("copies"), py::arg("progress") = py::none(), py::arg("threads") = 0,
      py::arg("window") = memory::TransferOptions::kWindow,
      "Copies (device address, bytes, host address) from the device to the host, and "
      "waits. Pieces of arenas that are not ready are prepared by up to `threads` "
      "threads, 0 for three quarters of the CPUs, 1 to 12. At most `window` bytes "
      "are queued on a stream. Raises DriverError, ValueError for what is in no range "
      "and RuntimeError for what is not mapped; pieces that have become ready stay so "
      "then. Raises MemoryError where the host has no memory left, and gives back what "
      "it has newly taken.");
  module.def(
      "restore",
      [](const std::vector<RangeTable::Copy>& copies,
         const std::vector<RangeTable::Fill>& zeros,
         const std::shared_ptr<Progress>& progress, size_t window) {
        const auto options = transfer_options(progress, 0, window);
        without_lock([&] {
          if (progress != nullptr) progress->started = true;
          ranges().copy_in(Driver::get(), copies, zeros, options);
        });
      },
      py::arg("copies"), py::arg("zeros"), py::arg("progress") = py::none(),
      py::arg("window") = memory::TransferOptions::kWindow,
      "Copies (device address, bytes, host address) from the host to the device, "
      "zeroes (device address, bytes), and waits. Raises what `back_up` does.");
  module.def("numa_node", &numa_node, py::arg("device"),
             "The NUMA node next to a device, or None where it is not known. Raises "
             "DriverNotFoundError.");
  module.def(
      "free",
      [](Address address) {
        without_lock([&] { ranges().free(Driver::get(), address); });
      },
      py::arg("ptr"),
      "Gives a range back, with its addresses, when the work of its device is done. "
      "Raises ValueError, and DriverError when the driver did not take everything, "
      "which is tried again later.");
  module.def(
      "release_pending",
      [] { return without_lock([] { return ranges().retry(Driver::get()); }); },
      "Tries again to give back what failed to be; how many things are left.");
  module.def(
      "chunk_setting",
      [] {
        const ChunkSetting setting = chunk_setting();
        return py::make_tuple(setting.bytes,
                              setting.problem ? as_text(*setting.problem) : py::none());
      },
      "Bytes of a chunk as VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE says, and what is wrong with "
      "it, or None.");
  module.def(
      "chunks",
      [](Address address) {
        std::vector<size_t> bytes;
        const auto entry = without_lock([&] { return ranges().entry(address); });
        for (const auto& chunk : entry.chunks) bytes.push_back(chunk.bytes);
        return bytes;
      },
      py::arg("ptr"), "Bytes of each chunk of a range, in order. Raises ValueError.");
  module.def(
      "is_mapped",
      [](Address address) {
        return without_lock([&] { return ranges().is_mapped(address); });
      },
      py::arg("ptr"), "Whether a range has memory. Raises ValueError.");
  module.def(
      "ranges", [] { return without_lock([] { return ranges().addresses(); }); },
      "The addresses of all live ranges.");

  py::class_<HostArena, std::shared_ptr<HostArena>>(
      module, "HostArena", py::module_local(), py::buffer_protocol(),
      "Host memory of exact size, for as long as somebody refers to it. It costs "
      "nothing until `back_up` makes pieces of it ready, and registers them.")
      .def(py::init(&make_arena), py::arg("size"),
           py::arg("piece_size") = HostArena::kPieceBytes, py::arg("node") = py::none(),
           "Bytes, and the NUMA node to take them from as far as it has some. Raises "
           "ValueError for a size below 1 or pieces that are not of whole pages, and "
           "MemoryError where the machine refuses the addresses.")
      .def_property_readonly("address",
                             [](const HostArena& arena) {
                               return reinterpret_cast<uintptr_t>(arena.data());
                             })
      .def_property_readonly("size", &HostArena::bytes, "In bytes.")
      .def_property_readonly("piece_size", &HostArena::piece_bytes, "In bytes.")
      .def_property_readonly("node", &HostArena::node,
                             "The NUMA node that is preferred, or None.")
      .def_property_readonly(
          "prepared",
          [](const HostArena& arena) {
            return without_lock([&] { return arena.prepared(); });
          },
          "Bytes of the pieces that are ready.")
      .def_property_readonly(
          "registered",
          [](const HostArena& arena) {
            return without_lock([&] { return arena.registered(); });
          },
          "Bytes of the pieces that the driver has registered.")
      .def_property_readonly(
          "huge",
          [](const HostArena& arena) {
            return without_lock([&] { return arena.huge(); });
          },
          "Bytes that the ready pieces have in huge pages.")
      .def_property_readonly(
          "registration_error",
          [](const HostArena& arena) -> std::optional<std::string> {
            const std::string text =
                without_lock([&] { return arena.registration_error(); });
            if (text.empty()) return std::nullopt;
            return text;
          },
          "The driver's last refusal; None when every ready piece is registered.")
      .def(
          "missing",
          [](const HostArena& arena, size_t offset, size_t size) {
            return without_lock([&] { return arena.missing(offset, size); });
          },
          py::arg("offset"), py::arg("size"),
          "Bytes that a backup of `size` bytes at `offset` would newly take from the "
          "host: those of the pieces it touches that are not ready. Raises ValueError.")
      .def(
          "release",
          [](HostArena& arena, size_t offset, size_t size) {
            return without_lock([&] { return arena.release(offset, size); });
          },
          py::arg("offset"), py::arg("size"),
          "Gives back the memory of the whole pieces within `size` bytes at `offset`, "
          "and returns how many bytes that are. What was in them is lost. A piece that "
          "the driver does not unregister stays as it is. Raises ValueError.")
      .def_buffer([](HostArena& arena) {
        return py::buffer_info(reinterpret_cast<uint8_t*>(arena.data()),
                               static_cast<py::ssize_t>(arena.bytes()));
      });
}
