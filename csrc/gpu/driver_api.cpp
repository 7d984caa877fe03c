// SPDX-License-Identifier: Apache-2.0
#include "gpu/driver_api.h"

#include <dlfcn.h>
#include <link.h>

#include <array>
#include <atomic>
#include <cinttypes>
#include <cstdio>
#include <map>
#include <mutex>
#include <string_view>
#include <utility>

#include "gpu/driver_abi.h"

namespace gpu {
namespace {

constexpr int kOutOfMemory = 2;  // hipErrorOutOfMemory and CUDA_ERROR_OUT_OF_MEMORY

std::string format_unit(size_t bytes) {
  constexpr std::array<const char*, 4> kUnits = {"KiB", "MiB", "GiB", "TiB"};
  double value = static_cast<double>(bytes) / 1024;
  size_t unit = 0;
  for (; value >= 1024 && unit + 1 < kUnits.size(); ++unit) value /= 1024;
  char text[64];
  std::snprintf(text, sizeof text, "%.1f %s", value, kUnits[unit]);
  return text;
}

// --- the libraries of this process ---------------------------------------------------

// The first mapped library whose file name begins with `stem`, in the order of loading;
// empty when there is none. A wheel may have put a hash between stem and ending.
std::string mapped_library(std::string_view stem) {
  struct Search {
    std::string_view stem;
    std::string found;
  } search{stem, {}};
  dl_iterate_phdr(
      [](dl_phdr_info* info, size_t, void* data) {
        auto* const search = static_cast<Search*>(data);
        const std::string_view path = info->dlpi_name;
        const std::string_view name = path.substr(path.rfind('/') + 1);
        if (name.substr(0, search->stem.size()) != search->stem ||
            name.find(".so") == std::string_view::npos) {
          return 0;
        }
        search->found = path;
        return 1;
      },
      &search);
  return search.found;
}

// A library that stays loaded.
class Library {
 public:
  explicit Library(void* handle) : handle_(handle) {}

  template <typename Function>
  void look_up(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
    if (function == nullptr) {
      throw DriverNotFoundError(
          std::string("the GPU driver of this process is too old or broken: ") +
          dlerror());
    }
  }

  // Null where the library lacks it.
  template <typename Function>
  void look_up_if_any(Function*& function, const char* name) const {
    function = reinterpret_cast<Function*>(dlsym(handle_, name));
  }

 private:
  void* handle_;
};

// The longest name of a device on its bus that is asked for, with its end: domains of
// more than four digits are known.
constexpr int kBusIdBytes = 64;

template <typename Function>
std::string path_of(Function* function) {
  Dl_info info{};
  const bool found = dladdr(reinterpret_cast<void*>(function), &info) != 0;
  return found && info.dli_fname != nullptr ? info.dli_fname : "";
}

// What a driver has last said to be. It is asked each time, which costs nothing, and
// twice before an older answer is taken: whoever does not know the release takes it for
// an old one, and leaves out what a newer one needs.
class Version {
 public:
  template <typename Ask>
  int get(Ask ask) {
    int version = 0;
    if (ask(&version) == 0 || ask(&version) == 0) known_.store(version);
    return known_.load();
  }

 private:
  std::atomic<int> known_ = 0;
};

}  // namespace

// --- HIP -----------------------------------------------------------------------------

namespace hip {
namespace {

// major * 10'000'000 + minor * 100'000 + patch, as hipRuntimeGetVersion has it.
constexpr int kHip72 = 70'200'000;
constexpr int kHip713 = 71'300'000;

#define GPU_FUNCTION(name, result, arguments) result(*name) arguments = nullptr;
#define GPU_LOOK_UP(name, result, arguments) library.look_up(name, #name);
#define GPU_LOOK_UP_IF_ANY(name, result, arguments) library.look_up_if_any(name, #name);

struct Functions {
  explicit Functions(const Library& library){
      GPU_HIP_FUNCTIONS(GPU_LOOK_UP) GPU_HIP_OPTIONAL_FUNCTIONS(GPU_LOOK_UP_IF_ANY)}

  GPU_HIP_FUNCTIONS(GPU_FUNCTION) GPU_HIP_OPTIONAL_FUNCTIONS(GPU_FUNCTION)
};

// An address or a handle.
void* as_pointer(uintptr_t number) { return reinterpret_cast<void*>(number); }

MemAllocationProp device_memory(int device) {
  MemAllocationProp properties{};
  properties.type = kAllocationPinned;
  properties.location = {kLocationDevice, device};
  return properties;
}

class HipDriver final : public Driver {
 public:
  explicit HipDriver(const Library& library) : hip_(library) {}

  Vendor vendor() const override { return Vendor::kHip; }

  std::string path() const override { return path_of(hip_.hipMemCreate); }

  int version() override {
    return version_.get([&](int* version) {
      return status("hipRuntimeGetVersion", hip_.hipRuntimeGetVersion(version)).error;
    });
  }

  bool frees_memory_with_address() override { return version() < kHip713; }

  bool maps_for_host() override { return version() >= kHip72; }

  Status supports_virtual_memory(int device, bool* answer) override {
    int value = 0;
    const Status asked =
        status("hipDeviceGetAttribute",
               hip_.hipDeviceGetAttribute(&value, kVirtualMemorySupported, device));
    *answer = asked.ok() && value != 0;
    return asked;
  }

  bool copies_across_mappings() const override { return false; }

  Status bus_id(int device, std::string* id) override {
    constexpr const char* kCall = "hipDeviceGetPCIBusId";
    if (hip_.hipDeviceGetPCIBusId == nullptr) return {kCall, kNotSupported};
    char text[kBusIdBytes] = "";
    const Status asked =
        status(kCall, hip_.hipDeviceGetPCIBusId(text, kBusIdBytes, device));
    *id = text;
    return asked;
  }

  Status current_place(Place* place) override {
    int device = 0;
    const Status asked = status("hipGetDevice", hip_.hipGetDevice(&device));
    *place = static_cast<Place>(device);
    return asked;
  }

  Status place_of(int device, Place* place) override {
    *place = static_cast<Place>(device);
    return {};
  }

  Status enter(Place place) override {
    return status("hipSetDevice", hip_.hipSetDevice(static_cast<int>(place)));
  }

  bool is_nowhere(Place) const override { return false; }

  Status synchronize_device() override {
    return status("hipDeviceSynchronize", hip_.hipDeviceSynchronize());
  }

  Status memory_info(MemoryInfo* info) override {
    return status("hipMemGetInfo", hip_.hipMemGetInfo(&info->free, &info->total));
  }

  Status create_stream(gpu::Stream* stream) override {
    return status("hipStreamCreateWithFlags",
                  hip_.hipStreamCreateWithFlags(stream, kStreamNonBlocking));
  }

  Status synchronize_stream(gpu::Stream stream) override {
    return status("hipStreamSynchronize", hip_.hipStreamSynchronize(stream));
  }

  Status destroy_stream(gpu::Stream stream) override {
    return status("hipStreamDestroy", hip_.hipStreamDestroy(stream));
  }

  Status copy_to_host(void* host, Address source, size_t bytes,
                      gpu::Stream stream) override {
    return status("hipMemcpyAsync", hip_.hipMemcpyAsync(host, as_pointer(source), bytes,
                                                        kDeviceToHost, stream));
  }

  Status copy_to_device(Address target, const void* host, size_t bytes,
                        gpu::Stream stream) override {
    return status("hipMemcpyAsync", hip_.hipMemcpyAsync(as_pointer(target), host, bytes,
                                                        kHostToDevice, stream));
  }

  Status copy_rectangle(const Rectangle& copy, gpu::Stream stream) override {
    if (copy.is_plane()) {
      return status("hipMemcpy2DAsync",
                    hip_.hipMemcpy2DAsync(as_pointer(copy.target), copy.target_pitch,
                                          as_pointer(copy.source), copy.source_pitch,
                                          copy.width, copy.rows, kByAddress, stream));
    }
    Copy3D box{};
    box.srcPtr = {as_pointer(copy.source), copy.source_pitch, copy.width,
                  copy.source_lines};
    box.dstPtr = {as_pointer(copy.target), copy.target_pitch, copy.width,
                  copy.target_lines};
    box.extent = {copy.width, 1, copy.rows};
    box.kind = kByAddress;
    return status("hipMemcpy3DAsync", hip_.hipMemcpy3DAsync(&box, stream));
  }

  Status zero(Address target, size_t bytes, gpu::Stream stream) override {
    return status("hipMemsetAsync",
                  hip_.hipMemsetAsync(as_pointer(target), 0, bytes, stream));
  }

  Status register_host(void* host, size_t bytes) override {
    return status("hipHostRegister",
                  hip_.hipHostRegister(host, bytes, kHostRegisterPortable));
  }

  Status unregister_host(void* host) override {
    return status("hipHostUnregister", hip_.hipHostUnregister(host));
  }

  Status allocate_host(void** host, size_t bytes) override {
    constexpr const char* kCall = "hipHostMalloc";
    if (hip_.hipHostMalloc == nullptr || hip_.hipHostFree == nullptr) {
      return {kCall, kNotSupported};
    }
    return status(kCall, hip_.hipHostMalloc(host, bytes, kHostMallocPortable));
  }

  Status free_host(void* host) override {
    return status("hipHostFree", hip_.hipHostFree(host));
  }

  Status granularity(int device, size_t* bytes) override {
    const MemAllocationProp properties = device_memory(device);
    return status(
        "hipMemGetAllocationGranularity",
        hip_.hipMemGetAllocationGranularity(bytes, &properties, kGranularityMinimum));
  }

  size_t alignment(size_t granularity) const override { return granularity; }

  Status reserve(Address* address, size_t bytes, size_t alignment,
                 Address wish) override {
    void* pointer = nullptr;
    const Status asked = status(
        "hipMemAddressReserve",
        hip_.hipMemAddressReserve(&pointer, bytes, alignment, as_pointer(wish), 0));
    *address = reinterpret_cast<Address>(pointer);
    return asked;
  }

  Status free_address(Address address, size_t bytes) override {
    return status("hipMemAddressFree",
                  hip_.hipMemAddressFree(as_pointer(address), bytes));
  }

  // It answers hipErrorUnknown then.
  bool keeps_addresses_of_mappings() const override { return true; }

  Status create(gpu::Handle* handle, size_t bytes, int device) override {
    const MemAllocationProp properties = device_memory(device);
    Handle made = nullptr;
    const Status asked =
        status("hipMemCreate", hip_.hipMemCreate(&made, bytes, &properties, 0));
    *handle = asked.ok() ? reinterpret_cast<gpu::Handle>(made) : 0;
    return asked;
  }

  Status release(gpu::Handle handle) override {
    return status("hipMemRelease", hip_.hipMemRelease(as_pointer(handle)));
  }

  Status map(Address address, size_t bytes, gpu::Handle handle) override {
    return status("hipMemMap",
                  hip_.hipMemMap(as_pointer(address), bytes, 0, as_pointer(handle), 0));
  }

  Status unmap(Address address, size_t bytes) override {
    return status("hipMemUnmap", hip_.hipMemUnmap(as_pointer(address), bytes));
  }

  Status allow_access(Address address, size_t bytes, int device) override {
    const std::array<MemAccessDesc, 2> access = {{
        {{kLocationDevice, device}, kAccessReadWrite},
        {{kLocationHost, 0}, kAccessReadWrite},
    }};
    return status("hipMemSetAccess",
                  hip_.hipMemSetAccess(as_pointer(address), bytes, access.data(),
                                       maps_for_host() ? 2 : 1));
  }

 protected:
  std::string error_name(int error) override {
    const char* const name = hip_.hipGetErrorName(error);
    return name != nullptr ? name : "";
  }

  std::string error_text(int error) override {
    const char* const text = hip_.hipGetErrorString(error);
    return text != nullptr ? text : "";
  }

 private:
  Status status(const char* call, Error error) const {
    if (error != kSuccess) (void)hip_.hipGetLastError();
    return {call, error};
  }

  const Functions hip_;
  Version version_;
};

}  // namespace
}  // namespace hip

// --- CUDA ----------------------------------------------------------------------------

namespace cuda {
namespace {

struct Functions {
  explicit Functions(const Library& library){
      GPU_CUDA_FUNCTIONS(GPU_LOOK_UP) GPU_CUDA_OPTIONAL_FUNCTIONS(GPU_LOOK_UP_IF_ANY)}

  GPU_CUDA_FUNCTIONS(GPU_FUNCTION) GPU_CUDA_OPTIONAL_FUNCTIONS(GPU_FUNCTION)
};

#undef GPU_FUNCTION
#undef GPU_LOOK_UP
#undef GPU_LOOK_UP_IF_ANY

class CudaDriver final : public Driver {
 public:
  explicit CudaDriver(const Library& library) : cuda_(library) {}

  Vendor vendor() const override { return Vendor::kCuda; }

  std::string path() const override { return path_of(cuda_.cuMemCreate); }

  int version() override {
    return version_.get(
        [&](int* version) { return cuda_.cuDriverGetVersion(version); });
  }

  bool frees_memory_with_address() override { return false; }

  bool maps_for_host() override { return false; }

  Status supports_virtual_memory(int device, bool* answer) override {
    Device named = 0;
    const Status found = name_device(device, &named);
    *answer = found.ok() && attribute(kVirtualMemorySupported, named);
    return found;
  }

  bool copies_across_mappings() const override { return true; }

  Status bus_id(int device, std::string* id) override {
    constexpr const char* kCall = "cuDeviceGetPCIBusId";
    if (cuda_.cuDeviceGetPCIBusId == nullptr) return {kCall, kNotSupported};
    Device named = 0;
    if (const Status found = name_device(device, &named); !found.ok()) return found;
    char text[kBusIdBytes] = "";
    const Error error = cuda_.cuDeviceGetPCIBusId(text, kBusIdBytes, named);
    *id = text;
    return {kCall, error};
  }

  Status current_place(Place* place) override {
    if (const Status ready = initialise(); !ready.ok()) return ready;
    Context context = nullptr;
    const Error error = cuda_.cuCtxGetCurrent(&context);
    *place = reinterpret_cast<Place>(context);
    return {"cuCtxGetCurrent", error};
  }

  // The primary context is the one that PyTorch works in. It is retained once a device
  // and for good: memory outlives whoever asked for it.
  Status place_of(int device, Place* place) override {
    const std::lock_guard lock(mutex_);
    const auto known = contexts_.find(device);
    if (known != contexts_.end()) {
      *place = reinterpret_cast<Place>(known->second);
      return {};
    }
    Device named = 0;
    if (const Status found = name_device(device, &named); !found.ok()) return found;
    Context context = nullptr;
    const Error error = cuda_.cuDevicePrimaryCtxRetain(&context, named);
    if (error == kSuccess) contexts_[device] = context;
    *place = reinterpret_cast<Place>(context);
    return {"cuDevicePrimaryCtxRetain", error};
  }

  Status enter(Place place) override {
    return {"cuCtxSetCurrent", cuda_.cuCtxSetCurrent(reinterpret_cast<Context>(place))};
  }

  bool is_nowhere(Place place) const override { return place == 0; }

  Status synchronize_device() override {
    return {"cuCtxSynchronize", cuda_.cuCtxSynchronize()};
  }

  Status memory_info(MemoryInfo* info) override {
    return {"cuMemGetInfo_v2", cuda_.cuMemGetInfo_v2(&info->free, &info->total)};
  }

  Status create_stream(gpu::Stream* stream) override {
    return {"cuStreamCreate", cuda_.cuStreamCreate(stream, kStreamNonBlocking)};
  }

  Status synchronize_stream(gpu::Stream stream) override {
    return {"cuStreamSynchronize", cuda_.cuStreamSynchronize(stream)};
  }

  Status destroy_stream(gpu::Stream stream) override {
    return {"cuStreamDestroy_v2", cuda_.cuStreamDestroy_v2(stream)};
  }

  Status copy_to_host(void* host, gpu::Address source, size_t bytes,
                      gpu::Stream stream) override {
    return {"cuMemcpyDtoHAsync_v2",
            cuda_.cuMemcpyDtoHAsync_v2(host, source, bytes, stream)};
  }

  Status copy_to_device(gpu::Address target, const void* host, size_t bytes,
                        gpu::Stream stream) override {
    return {"cuMemcpyHtoDAsync_v2",
            cuda_.cuMemcpyHtoDAsync_v2(target, host, bytes, stream)};
  }

  Status copy_rectangle(const Rectangle& copy, gpu::Stream stream) override {
    if (copy.is_plane()) {
      Copy2D plane{};
      place(copy, &plane);
      plane.Height = copy.rows;
      return {"cuMemcpy2DAsync_v2", cuda_.cuMemcpy2DAsync_v2(&plane, stream)};
    }
    Copy3D box{};
    place(copy, &box);
    box.srcHeight = copy.source_lines;
    box.dstHeight = copy.target_lines;
    box.Height = 1;
    box.Depth = copy.rows;
    return {"cuMemcpy3DAsync_v2", cuda_.cuMemcpy3DAsync_v2(&box, stream)};
  }

  Status zero(gpu::Address target, size_t bytes, gpu::Stream stream) override {
    return {"cuMemsetD8Async", cuda_.cuMemsetD8Async(target, 0, bytes, stream)};
  }

  Status register_host(void* host, size_t bytes) override {
    return {"cuMemHostRegister_v2",
            cuda_.cuMemHostRegister_v2(host, bytes, kHostRegisterPortable)};
  }

  Status unregister_host(void* host) override {
    return {"cuMemHostUnregister", cuda_.cuMemHostUnregister(host)};
  }

  Status allocate_host(void** host, size_t bytes) override {
    constexpr const char* kCall = "cuMemHostAlloc";
    if (cuda_.cuMemHostAlloc == nullptr || cuda_.cuMemFreeHost == nullptr) {
      return {kCall, kNotSupported};
    }
    return {kCall, cuda_.cuMemHostAlloc(host, bytes, kHostAllocPortable)};
  }

  Status free_host(void* host) override {
    return {"cuMemFreeHost", cuda_.cuMemFreeHost(host)};
  }

  Status granularity(int device, size_t* bytes) override {
    MemAllocationProp properties{};
    if (const Status found = describe(device, &properties); !found.ok()) return found;
    return {
        "cuMemGetAllocationGranularity",
        cuda_.cuMemGetAllocationGranularity(bytes, &properties, kGranularityMinimum)};
  }

  size_t alignment(size_t) const override { return 0; }

  Status reserve(gpu::Address* address, size_t bytes, size_t alignment,
                 gpu::Address wish) override {
    Address reserved = 0;
    const Error error = cuda_.cuMemAddressReserve(&reserved, bytes, alignment, wish, 0);
    *address = reserved;
    return {"cuMemAddressReserve", error};
  }

  Status free_address(gpu::Address address, size_t bytes) override {
    return {"cuMemAddressFree", cuda_.cuMemAddressFree(address, bytes)};
  }

  bool keeps_addresses_of_mappings() const override { return false; }

  // A handle that goes to other nodes is asked for where the device knows of such, and
  // one that is a file of this node where it turns out that they may not be had, as
  // without an NVLink fabric. Other libraries of the process export what they find.
  Status create(gpu::Handle* handle, size_t bytes, int device) override {
    MemAllocationProp properties{};
    if (const Status found = describe(device, &properties); !found.ok()) return found;
    properties.allocFlags.gpuDirectRDMACapable =
        attribute(kRdmaSupported, properties.location.id) ? 1 : 0;
    if (has_fabric(device, properties.location.id)) {
      properties.requestedHandleTypes = kHandleFabric;
      const Status made = create(handle, bytes, properties);
      if (made.error != kNotPermitted && made.error != kNotSupported) return made;
      const std::lock_guard lock(mutex_);
      fabric_[device] = Fabric::kRefused;
    }
    if (is_fabric_refused(device)) properties.requestedHandleTypes = kHandlePosixFile;
    return create(handle, bytes, properties);
  }

  Status release(gpu::Handle handle) override {
    return {"cuMemRelease", cuda_.cuMemRelease(handle)};
  }

  Status map(gpu::Address address, size_t bytes, gpu::Handle handle) override {
    return {"cuMemMap", cuda_.cuMemMap(address, bytes, 0, handle, 0)};
  }

  Status unmap(gpu::Address address, size_t bytes) override {
    return {"cuMemUnmap", cuda_.cuMemUnmap(address, bytes)};
  }

  Status allow_access(gpu::Address address, size_t bytes, int device) override {
    Device named = 0;
    if (const Status found = name_device(device, &named); !found.ok()) return found;
    const MemAccessDesc access{{kLocationDevice, named}, kAccessReadWrite};
    return {"cuMemSetAccess", cuda_.cuMemSetAccess(address, bytes, &access, 1)};
  }

 protected:
  std::string error_name(int error) override {
    const char* name = nullptr;
    return cuda_.cuGetErrorName(error, &name) == kSuccess && name ? name : "";
  }

  std::string error_text(int error) override {
    const char* text = nullptr;
    return cuda_.cuGetErrorString(error, &text) == kSuccess && text ? text : "";
  }

 private:
  enum class Fabric { kAbsent, kPresent, kRefused };

  // Not before somebody uses a device: a process that has called it cannot fork any
  // more.
  Status initialise() {
    if (initialised_.load()) return {};
    const Status done{"cuInit", cuda_.cuInit(0)};
    initialised_.store(done.ok());
    return done;
  }

  Status name_device(int ordinal, Device* device) {
    if (const Status ready = initialise(); !ready.ok()) return ready;
    return {"cuDeviceGet", cuda_.cuDeviceGet(device, ordinal)};
  }

  Status describe(int device, MemAllocationProp* properties) {
    Device named = 0;
    const Status found = name_device(device, &named);
    properties->type = kAllocationPinned;
    properties->location = {kLocationDevice, named};
    return found;
  }

  template <typename Copy>
  static void place(const Rectangle& rectangle, Copy* copy) {
    copy->srcMemoryType = copy->dstMemoryType = kByAddress;
    copy->srcDevice = rectangle.source;
    copy->dstDevice = rectangle.target;
    copy->srcPitch = rectangle.source_pitch;
    copy->dstPitch = rectangle.target_pitch;
    copy->WidthInBytes = rectangle.width;
  }

  // A driver that does not know an attribute does not have what it stands for.
  bool attribute(Attribute name, Device device) const {
    int value = 0;
    return cuda_.cuDeviceGetAttribute(&value, name, device) == kSuccess && value != 0;
  }

  bool has_fabric(int device, Device named) {
    const std::lock_guard lock(mutex_);
    const auto known = fabric_.find(device);
    if (known != fabric_.end()) return known->second == Fabric::kPresent;
    int value = 0;
    if (cuda_.cuDeviceGetAttribute(&value, kFabricSupported, named) != kSuccess) {
      return false;
    }
    fabric_[device] = value != 0 ? Fabric::kPresent : Fabric::kAbsent;
    return value != 0;
  }

  bool is_fabric_refused(int device) {
    const std::lock_guard lock(mutex_);
    const auto known = fabric_.find(device);
    return known != fabric_.end() && known->second == Fabric::kRefused;
  }

  Status create(gpu::Handle* handle, size_t bytes,
                const MemAllocationProp& properties) {
    Handle made = 0;
    const Error error = cuda_.cuMemCreate(&made, bytes, &properties, 0);
    *handle = error == kSuccess ? made : 0;
    return {"cuMemCreate", error};
  }

  const Functions cuda_;
  Version version_;
  std::atomic<bool> initialised_ = false;
  std::mutex mutex_;
  std::map<int, Context> contexts_;
  std::map<int, Fabric> fabric_;
};

}  // namespace
}  // namespace cuda

// --- which one -----------------------------------------------------------------------

namespace {

void* open_mapped(const std::string& path) {
  return path.empty() ? nullptr : dlopen(path.c_str(), RTLD_NOW | RTLD_NOLOAD);
}

// A stream or an address belongs to the library that made it, so what PyTorch has
// loaded decides, and the loader's search path only where nothing is loaded: PyTorch's
// CUDA build loads the driver with the first use of a device.
Driver* find_driver() {
  void* const hip = open_mapped(mapped_library("libamdhip64"));
  void* cuda = open_mapped(mapped_library("libcuda.so"));
  const bool prefers_cuda =
      mapped_library("libc10_hip").empty() && !mapped_library("libc10_cuda").empty();
  if (hip != nullptr && (cuda == nullptr || !prefers_cuda)) {
    return new hip::HipDriver(Library(hip));
  }
  if (cuda == nullptr) cuda = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (cuda == nullptr) {
    throw DriverNotFoundError(
        "this process has no GPU driver: libamdhip64 is not loaded, and libcuda.so.1 "
        "is neither loaded nor to be found");
  }
  return new cuda::CudaDriver(Library(cuda));
}

}  // namespace

Driver& Driver::get() {
  static std::mutex mutex;
  static Driver* found = nullptr;
  const std::lock_guard lock(mutex);
  if (found == nullptr) found = find_driver();
  return *found;
}

// --- errors --------------------------------------------------------------------------

std::string describe(const Failure& failure) {
  try {
    throw_if(failure);
    return "";
  } catch (const std::exception& error) {
    return error.what();
  } catch (...) {
    return "unknown error";
  }
}

std::string format_address(Address address) {
  char text[32];
  std::snprintf(text, sizeof text, "0x%" PRIxPTR, address);
  return text;
}

std::string format_bytes(size_t bytes) {
  return std::to_string(bytes) + " bytes (" + format_unit(bytes) + ")";
}

Failure Driver::failure(Status status, const Subject& subject) {
  std::optional<MemoryInfo> memory;
  if (subject.device) {
    MemoryInfo info;
    DeviceScope scope(*this);
    if (scope.use(*subject.device).ok() && memory_info(&info).ok()) memory = info;
  }
  const std::string known = error_name(status.error);
  const std::string name = known.empty() ? "unknown error" : known;
  const std::string meaning = error_text(status.error);
  std::string text = std::string(status.call) + " failed: " + name + " (" +
                     std::to_string(status.error) + ")";
  if (!meaning.empty()) text += ": " + meaning;
  if (subject.bytes) text += "; " + format_bytes(*subject.bytes);
  if (subject.device) {
    text += (subject.bytes ? " on device " : "; device ");
    text += std::to_string(*subject.device);
  }
  if (memory) {
    text += ", of which " + format_unit(memory->free) + " of " +
            format_unit(memory->total) + " are free";
  }
  if (status.error == kOutOfMemory) {
    return std::make_exception_ptr(
        OutOfMemoryError(text, status, name, subject, memory));
  }
  return std::make_exception_ptr(DriverError(text, status, name, subject, memory));
}

// --- scopes --------------------------------------------------------------------------

Status DeviceScope::remember() {
  if (before_) return {};
  Driver::Place place = 0;
  const Status asked = driver_.current_place(&place);
  if (asked.ok()) before_ = now_ = place;
  return asked;
}

Status DeviceScope::enter(Driver::Place place) {
  if (place == now_) return {};
  const Status entered = driver_.enter(place);
  if (entered.ok()) now_ = place;
  return entered;
}

Status DeviceScope::use(int device) {
  Driver::Place place = 0;
  if (const Status known = remember(); !known.ok()) return known;
  if (const Status found = driver_.place_of(device, &place); !found.ok()) return found;
  return enter(place);
}

Status DeviceScope::use_any() {
  if (const Status known = remember(); !known.ok()) return known;
  return driver_.is_nowhere(now_) ? use(0) : Status{};
}

DeviceScope::~DeviceScope() {
  if (!before_) return;
  // Twice, because the thread goes on in the wrong place otherwise.
  if (enter(*before_).ok()) return;
  if (const Status left = enter(*before_); !left.ok()) {
    std::fprintf(stderr,
                 "cumem: %s failed with error %d: this thread stays on the device that "
                 "was worked on\n",
                 left.call, left.error);
  }
}

}  // namespace gpu
