// SPDX-License-Identifier: Apache-2.0
//
// Note [Device memory for CPU tensors]
// On the simulator kernels are host code, so every tensor is a CPU tensor, and only
// its address tells device memory from host memory. This module puts an allocator in
// front of PyTorch's own CPU allocator: what a thread allocates inside a scope comes
// from that scope's memory, everything else from the allocator that was there before.
// An allocation carries the memory it came from, so it may be freed by any thread,
// after its scope, with or without the GIL, and while the interpreter exits; for the
// same reason the allocators themselves are never destroyed.
#include <c10/core/CPUAllocator.h>
#include <c10/util/Exception.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>

#include "caching_allocator.h"
#include "device_source.h"

namespace py = pybind11;
using sim::Block;
using sim::CachingAllocator;
using sim::DeviceSource;
using sim::PoolId;
using sim::SegmentInfo;

namespace {

constexpr int kSuccess = 0;
constexpr int kOutOfMemory = 2;  // hipErrorOutOfMemory
constexpr int kRelaxed = 2;      // hipStreamCaptureModeRelaxed

template <typename Function>
Function* function_at(std::uintptr_t address, const char* name) {
  if (address == 0) throw std::invalid_argument(std::string(name) + " has no address");
  return reinterpret_cast<Function*>(address);
}

// --- sources -----------------------------------------------------------------------

class HipMalloc final : public DeviceSource {
 public:
  HipMalloc(std::uintptr_t malloc_address, std::uintptr_t free_address)
      : malloc_(function_at<Malloc>(malloc_address, "hipMalloc")),
        free_(function_at<Free>(free_address, "hipFree")) {}

  const char* name() const override { return "hipMalloc"; }

  void* allocate(std::size_t bytes) override {
    void* data = nullptr;
    const int error = malloc_(&data, bytes);
    if (error == kOutOfMemory) return nullptr;
    TORCH_CHECK(error == kSuccess, "hipMalloc of ", bytes, " bytes failed with error ",
                error);
    return data;
  }

  void free(void* data, std::size_t) noexcept override {
    if (const int error = free_(data); error != kSuccess) {
      std::fprintf(stderr, "hipFree(%p) failed with error %d\n", data, error);
    }
  }

 private:
  using Malloc = int(void**, std::size_t);
  using Free = int(void*);
  Malloc* malloc_;
  Free* free_;
};

// The functions that PyTorch's CUDAPluggableAllocator takes out of a library.
class Pluggable final : public DeviceSource {
 public:
  Pluggable(std::uintptr_t malloc_address, std::uintptr_t free_address)
      : malloc_(function_at<Malloc>(malloc_address, "the pluggable malloc")),
        free_(function_at<Free>(free_address, "the pluggable free")) {}

  const char* name() const override { return "the pluggable malloc"; }

  void* allocate(std::size_t bytes) override {
    return malloc_(static_cast<ssize_t>(bytes), kDevice, nullptr);
  }

  void free(void* data, std::size_t bytes) noexcept override {
    try {
      free_(data, static_cast<ssize_t>(bytes), kDevice, nullptr);
    } catch (const std::exception& error) {
      std::fprintf(stderr, "the pluggable free of %p failed: %s\n", data, error.what());
    }
  }

 private:
  using Malloc = void*(ssize_t, int, void*);
  using Free = void(void*, ssize_t, int, void*);
  static constexpr int kDevice = 0;  // a process has one device
  Malloc* malloc_;
  Free* free_;
};

// --- scopes ------------------------------------------------------------------------

struct HostMemory {};

using Place = std::variant<HostMemory, std::shared_ptr<DeviceSource>, PoolId>;

using ExchangeMode = int(unsigned*);  // hipThreadExchangeStreamCaptureMode

struct Frame {
  Place place;
  ExchangeMode* exchange;  // of a capture
  Frame* outer;
};

thread_local Frame* innermost = nullptr;

ExchangeMode* exchange_of_capture() {
  for (Frame* frame = innermost; frame != nullptr; frame = frame->outer) {
    if (frame->exchange != nullptr) return frame->exchange;
  }
  return nullptr;
}

// While one lives, what this thread's capture forbids is allowed: an allocation must
// not break it, as in PyTorch.
class Relaxed {
 public:
  explicit Relaxed(ExchangeMode* exchange) : exchange_(exchange) {
    if (exchange_ != nullptr) exchange_(&mode_);
  }
  ~Relaxed() {
    if (exchange_ != nullptr) exchange_(&mode_);
  }
  Relaxed(const Relaxed&) = delete;
  Relaxed& operator=(const Relaxed&) = delete;

 private:
  ExchangeMode* exchange_;
  unsigned mode_ = kRelaxed;
};

// --- the allocator in front of PyTorch's -------------------------------------------

struct OwnAllocation {
  std::shared_ptr<DeviceSource> source;
  void* data;
  std::size_t bytes;
};

void free_own(void* context) {
  const std::unique_ptr<OwnAllocation> own(static_cast<OwnAllocation*>(context));
  own->source->free(own->data, own->bytes);
}

void free_block(void* context) {
  CachingAllocator::instance().free(static_cast<Block*>(context));
}

c10::DataPtr allocate_own(const std::shared_ptr<DeviceSource>& source,
                          std::size_t bytes) {
  auto own = std::make_unique<OwnAllocation>(OwnAllocation{source, nullptr, bytes});
  const Relaxed relaxed(exchange_of_capture());
  own->data = source->allocate(bytes);
  if (own->data == nullptr &&
      CachingAllocator::instance().empty_cache(std::nullopt) > 0) {
    own->data = source->allocate(bytes);
  }
  TORCH_CHECK_WITH(OutOfMemoryError, own->data != nullptr,
                   "HIP out of memory: ", source->name(), " of ", bytes,
                   " bytes failed");
  void* data = own->data;
  return {data, own.release(), &free_own, c10::Device(c10::kCPU)};
}

c10::DataPtr allocate_block(PoolId pool, std::size_t bytes) {
  const Relaxed relaxed(exchange_of_capture());
  Block* block = CachingAllocator::instance().allocate(pool, bytes);
  return {block->data(), block, &free_block, c10::Device(c10::kCPU)};
}

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
    if (innermost == nullptr || bytes == 0) return host_->allocate(bytes);
    const Place& place = innermost->place;
    if (const auto* source = std::get_if<std::shared_ptr<DeviceSource>>(&place)) {
      return allocate_own(*source, bytes);
    }
    if (const auto* pool = std::get_if<PoolId>(&place)) {
      return allocate_block(*pool, bytes);
    }
    return host_->allocate(bytes);
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
  explicit Scope(Place place) : place_(std::move(place)) {}

  void enter() { push(nullptr); }

  void exit(const py::args&) {
    // A thread has frames of its own only, so this also refuses another thread.
    // Captures do not count: they may end within scopes that began inside of them.
    Frame* top = innermost;
    while (top != nullptr && top->exchange != nullptr) top = top->outer;
    if (frame_ == nullptr || frame_ != top) {
      throw std::runtime_error(
          "a device memory scope is left by the thread that entered it, innermost "
          "first");
    }
    pop();
  }

 protected:
  void push(ExchangeMode* exchange) {
    if (frame_ != nullptr) {
      throw std::runtime_error("this device memory scope has been entered already");
    }
    ScopedAllocator::install();
    frame_ = innermost = new Frame{place_, exchange, innermost};
  }

  bool is_of_this_thread() const {
    const Frame* frame = innermost;
    while (frame != nullptr && frame != frame_) frame = frame->outer;
    return frame != nullptr;
  }

  void pop() {
    Frame** link = &innermost;
    while (*link != frame_) link = &(*link)->outer;
    *link = frame_->outer;
    delete std::exchange(frame_, nullptr);
  }

 private:
  const Place place_;
  Frame* frame_ = nullptr;
};

// What the thread that captures allocates between a begin and an end.
class CaptureScope : public Scope {
 public:
  CaptureScope(PoolId pool, std::uintptr_t exchange_address)
      : Scope(pool),
        exchange_(function_at<ExchangeMode>(exchange_address,
                                            "hipThreadExchangeStreamCaptureMode")) {}

  void begin() { push(exchange_); }

  void end() {
    if (!is_of_this_thread()) {
      throw std::runtime_error("a capture is ended by the thread that began it");
    }
    pop();
  }

 private:
  ExchangeMode* exchange_;
};

// --- for Python --------------------------------------------------------------------

py::dict describe(const SegmentInfo& segment) {
  py::list blocks;
  std::size_t total = 0, allocated = 0, requested = 0;
  for (const sim::BlockInfo& block : segment.blocks) {
    total += block.bytes;
    allocated += block.allocated ? block.bytes : 0;
    requested += block.requested;
    blocks.append(
        py::dict(py::arg("address") = block.address, py::arg("size") = block.bytes,
                 py::arg("requested_size") = block.requested,
                 py::arg("state") = block.allocated ? "active_allocated" : "inactive",
                 py::arg("frames") = py::list()));
  }
  return py::dict(py::arg("device") = 0, py::arg("address") = segment.address,
                  py::arg("total_size") = total, py::arg("allocated_size") = allocated,
                  py::arg("active_size") = allocated,
                  py::arg("requested_size") = requested, py::arg("stream") = 0,
                  py::arg("segment_type") = segment.small ? "small" : "large",
                  py::arg("segment_pool_id") = segment.pool,
                  py::arg("is_expandable") = false, py::arg("frames") = py::list(),
                  py::arg("blocks") = blocks);
}

py::list snapshot(std::optional<PoolId> pool) {
  py::list segments;
  for (const SegmentInfo& segment : CachingAllocator::instance().snapshot(pool)) {
    segments.append(describe(segment));
  }
  return segments;
}

}  // namespace

PYBIND11_MODULE(device_memory, module) {
  module.doc() = "Device memory for CPU tensors, by scope and in pools.";

  py::class_<DeviceSource, std::shared_ptr<DeviceSource>>(module, "DeviceSource");
  py::class_<HipMalloc, DeviceSource, std::shared_ptr<HipMalloc>>(
      module, "HipMalloc", "Memory from the hipMalloc and hipFree at two addresses.")
      .def(py::init<std::uintptr_t, std::uintptr_t>(), py::arg("malloc_address"),
           py::arg("free_address"));
  py::class_<Pluggable, DeviceSource, std::shared_ptr<Pluggable>>(
      module, "Pluggable",
      "Memory from `void* malloc(ssize_t size, int device, void* stream)` and `void "
      "free(void* data, ssize_t size, int device, void* stream)` at two addresses.")
      .def(py::init<std::uintptr_t, std::uintptr_t>(), py::arg("malloc_address"),
           py::arg("free_address"));

  py::class_<Scope>(module, "Scope",
                    "Within it, this thread's CPU tensors lie in device memory.")
      .def("__enter__", &Scope::enter)
      .def("__exit__", &Scope::exit);
  py::class_<CaptureScope>(module, "CaptureScope",
                           "Between its begin and end, this thread's CPU tensors lie "
                           "in a pool, and what that allocates breaks no capture.")
      .def(py::init<PoolId, std::uintptr_t>(), py::arg("pool"),
           py::arg("exchange_address"))
      .def("begin", &CaptureScope::begin)
      .def("end", &CaptureScope::end);
  module.def("host_scope", [] { return std::make_unique<Scope>(HostMemory{}); });
  module.def(
      "source_scope",
      [](std::shared_ptr<DeviceSource> source) {
        return std::make_unique<Scope>(std::move(source));
      },
      py::arg("source"));
  module.def(
      "pool_scope", [](PoolId pool) { return std::make_unique<Scope>(pool); },
      py::arg("pool"));

  module.def(
      "create_pool",
      [](PoolId pool, std::shared_ptr<DeviceSource> source) {
        CachingAllocator::instance().create(pool, std::move(source));
      },
      py::arg("pool"), py::arg("source"));
  module.def(
      "begin_pool",
      [](PoolId pool, const std::shared_ptr<DeviceSource>& source) {
        CachingAllocator::instance().begin(pool, source);
      },
      py::arg("pool"), py::arg("source"));
  module.def(
      "end_pool", [](PoolId pool) { CachingAllocator::instance().end(pool); },
      py::arg("pool"));
  module.def(
      "release_pool", [](PoolId pool) { CachingAllocator::instance().release(pool); },
      py::arg("pool"));
  module.def(
      "pool_uses", [](PoolId pool) { return CachingAllocator::instance().uses(pool); },
      py::arg("pool"));
  module.def(
      "empty_cache",
      [](std::optional<PoolId> pool) {
        return CachingAllocator::instance().empty_cache(pool);
      },
      py::arg("pool") = py::none());
  module.def("snapshot", &snapshot, py::arg("pool") = py::none());
  module.def(
      "pool_of",
      [](std::uintptr_t address) {
        return CachingAllocator::instance().pool_of(address);
      },
      py::arg("address"));
}
