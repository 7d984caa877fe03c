// SPDX-License-Identifier: Apache-2.0
//
// Note [Device memory for CPU tensors]
// On the simulator kernels are host code, so every tensor is a CPU tensor, and only
// its address tells device memory from host memory. This module puts an allocator in
// front of PyTorch's own CPU allocator: what a thread allocates inside a scope comes
// from that scope's device memory, everything else from the allocator that was there
// before. An allocation carries the memory it came from, so it may be freed by any
// thread, after its scope, with or without the GIL, and while the interpreter exits;
// for the same reason the allocator itself is never destroyed.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

namespace {

class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;
  // Throws c10::OutOfMemoryError.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void free(void* data, std::size_t bytes) noexcept = 0;
};

class HipMalloc final : public DeviceMemory {
 public:
  HipMalloc(std::uintptr_t malloc_address, std::uintptr_t free_address)
      : malloc_(reinterpret_cast<Malloc>(malloc_address)),
        free_(reinterpret_cast<Free>(free_address)) {
    if (malloc_ == nullptr || free_ == nullptr) {
      throw std::invalid_argument("hipMalloc and hipFree need an address each");
    }
  }

  void* allocate(std::size_t bytes) override {
    void* data = nullptr;
    const int error = malloc_(&data, bytes);
    TORCH_CHECK_WITH(OutOfMemoryError, error == 0, "hipMalloc of ", bytes,
                     " bytes failed with error ", error);
    return data;
  }

  void free(void* data, std::size_t) noexcept override {
    if (const int error = free_(data); error != 0) {
      std::fprintf(stderr, "hipFree(%p) failed with error %d\n", data, error);
    }
  }

 private:
  using Malloc = int (*)(void**, std::size_t);
  using Free = int (*)(void*);
  Malloc malloc_;
  Free free_;
};

struct Allocation {
  std::shared_ptr<DeviceMemory> memory;
  void* data;
  std::size_t bytes;
};

void release(void* context) {
  const std::unique_ptr<Allocation> allocation(static_cast<Allocation*>(context));
  allocation->memory->free(allocation->data, allocation->bytes);
}

struct Frame {
  std::shared_ptr<DeviceMemory> memory;
  Frame* outer;
};

thread_local Frame* innermost = nullptr;

class ScopedAllocator final : public c10::Allocator {
 public:
  static void install() {
    static const bool installed = [] {
      auto* allocator = new ScopedAllocator(c10::GetCPUAllocator());
      c10::SetCPUAllocator(allocator);
      return c10::GetCPUAllocator() == allocator;
    }();
    if (!installed) {
      throw std::runtime_error(
          "PyTorch kept another CPU allocator; device memory cannot be served");
    }
  }

  c10::DataPtr allocate(std::size_t bytes) override {
    if (innermost == nullptr || bytes == 0) {
      return host_->allocate(bytes);
    }
    auto allocation =
        std::make_unique<Allocation>(Allocation{innermost->memory, nullptr, bytes});
    allocation->data = allocation->memory->allocate(bytes);
    void* data = allocation->data;
    return {data, allocation.release(), &release, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return host_->raw_deleter(); }

  void copy_data(void* destination, const void* source,
                 std::size_t bytes) const override {
    default_copy_data(destination, source, bytes);
  }

 private:
  explicit ScopedAllocator(c10::Allocator* host) : host_(host) {}

  c10::Allocator* host_;
};

class Scope {
 public:
  explicit Scope(std::shared_ptr<DeviceMemory> memory) : memory_(std::move(memory)) {}

  void enter() {
    if (frame_ != nullptr) {
      throw std::runtime_error("this device memory scope has been entered already");
    }
    ScopedAllocator::install();
    frame_ = innermost = new Frame{memory_, innermost};
  }

  void exit(const py::args&) {
    // A thread has frames of its own only, so this also refuses another thread.
    if (frame_ == nullptr || frame_ != innermost) {
      throw std::runtime_error(
          "a device memory scope is left by the thread that entered it, innermost "
          "first");
    }
    innermost = frame_->outer;
    delete std::exchange(frame_, nullptr);
  }

 private:
  const std::shared_ptr<DeviceMemory> memory_;
  Frame* frame_ = nullptr;
};

}  // namespace

PYBIND11_MODULE(device_memory, module) {
  module.doc() = "Device memory for CPU tensors, by scope.";
  py::class_<DeviceMemory, std::shared_ptr<DeviceMemory>>(module, "DeviceMemory");
  py::class_<HipMalloc, DeviceMemory, std::shared_ptr<HipMalloc>>(
      module, "HipMalloc", "Memory from the hipMalloc and hipFree at two addresses.")
      .def(py::init<std::uintptr_t, std::uintptr_t>(), py::arg("malloc_address"),
           py::arg("free_address"));
  py::class_<Scope>(module, "Scope",
                    "Within it, this thread's CPU tensors lie in `memory`.")
      .def(py::init<std::shared_ptr<DeviceMemory>>(), py::arg("memory"))
      .def("__enter__", &Scope::enter)
      .def("__exit__", &Scope::exit);
}
