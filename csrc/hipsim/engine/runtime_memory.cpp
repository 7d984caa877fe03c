// SPDX-License-Identifier: Apache-2.0
#include <algorithm>
#include <mutex>
#include <utility>

#include "engine/runtime.h"

namespace hipsim {
namespace {

uintptr_t as_number(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer);
}

bool is_power_of_two(size_t number) { return (number & (number - 1)) == 0; }

}  // namespace

Error Runtime::forbid_unsafe_call(const Caller& caller) {
  return captures_.forbid_unsafe_call(caller.capture_mode, std::this_thread::get_id(),
                                      profile_->cuda);
}

// --- memory ------------------------------------------------------------------------

Error Runtime::allocate(const Caller& caller, size_t bytes, void** pointer) {
  std::lock_guard lock(mutex_);
  if (const Error error = forbid_unsafe_call(caller); error != Error::kSuccess) {
    return error;
  }
  *pointer = nullptr;
  return bytes == 0 ? Error::kSuccess : memory_.allocate(caller.device, bytes, pointer);
}

Error Runtime::allocate_host(const Caller& caller, size_t bytes, void** pointer) {
  std::lock_guard lock(mutex_);
  if (const Error error = forbid_unsafe_call(caller); error != Error::kSuccess) {
    return error;
  }
  *pointer = nullptr;
  return bytes == 0 ? Error::kSuccess : memory_.allocate_host(bytes, pointer);
}

std::optional<Place> Runtime::release_by(Forget forget, const void* pointer) {
  std::optional<Place> place;
  {
    std::lock_guard lock(mutex_);
    place = (memory_.*forget)(pointer);
    if (place) exports_.erase(place->base);
  }
  if (!place) return place;
  scheduler_.drain_all();
  std::lock_guard alone(memory_in_use_);
  std::lock_guard lock(mutex_);
  memory_.unmap(*place);
  return place;
}

Error Runtime::release_allocation(const Caller& caller, Forget forget, void* pointer) {
  {
    std::lock_guard lock(mutex_);
    if (const Error error = forbid_unsafe_call(caller); error != Error::kSuccess) {
      return error;
    }
  }
  const bool done = pointer == nullptr || release_by(forget, pointer);
  return done ? Error::kSuccess : Error::kInvalidValue;
}

Error Runtime::release(const Caller& caller, void* pointer) {
  return release_allocation(caller, &AddressSpace::forget_device, pointer);
}

Error Runtime::release_host(const Caller& caller, void* pointer) {
  return release_allocation(caller, &AddressSpace::forget_host_allocation, pointer);
}

Error Runtime::register_host(const Caller& caller, void* pointer, size_t bytes,
                             bool flags_are_known) {
  std::lock_guard lock(mutex_);
  if (const Error error = forbid_unsafe_call(caller); error != Error::kSuccess) {
    return error;
  }
  if (!flags_are_known) return Error::kInvalidValue;
  return memory_.register_host(pointer, bytes, switches_.alias_host_pointers);
}

Error Runtime::unregister_host(const Caller& caller, void* pointer) {
  {
    std::lock_guard lock(mutex_);
    if (const Error error = forbid_unsafe_call(caller); error != Error::kSuccess) {
      return error;
    }
  }
  if (pointer == nullptr) return Error::kInvalidValue;
  if (release_by(&AddressSpace::forget_registration, pointer)) return Error::kSuccess;
  std::lock_guard lock(mutex_);
  void* known = nullptr;
  return profile_->cuda && memory_.device_pointer(pointer, &known) == Error::kSuccess
             ? Error::kInvalidValue
             : Error::kHostMemoryNotRegistered;
}

Error Runtime::device_pointer(const void* host, void** pointer) const {
  std::lock_guard lock(mutex_);
  return memory_.device_pointer(host, pointer);
}

bool Runtime::aliases_host_pointers() const {
  std::lock_guard lock(mutex_);
  return switches_.alias_host_pointers;
}

bool Runtime::has_large_bar() const {
  std::lock_guard lock(mutex_);
  return !switches_.small_bar;
}

void Runtime::memory_info(int device, size_t* free, size_t* total) const {
  std::lock_guard lock(mutex_);
  *free = memory_.vram(device).free_bytes();
  *total = memory_.vram(device).bytes();
}

Error Runtime::address_range(const void* pointer, void** base, size_t* bytes) const {
  std::lock_guard lock(mutex_);
  Place place;
  if (pointer == nullptr ||
      memory_.locate(pointer, 1, Crossing::kNothing, &place) != Error::kSuccess ||
      place.kind == MemoryKind::kPageableHost) {
    return Error::kNotFound;
  }
  *base = reinterpret_cast<void*>(place.base);
  *bytes = place.bytes;
  return Error::kSuccess;
}

// --- virtual memory ----------------------------------------------------------------

bool Runtime::has_virtual_memory() const {
  std::lock_guard lock(mutex_);
  return !switches_.no_virtual_memory;
}

Error Runtime::granularity(int device, bool recommended, size_t* bytes) const {
  if (!has_virtual_memory()) return Error::kNotSupported;
  if (!has_device(device)) return Error::kInvalidValue;
  const Profile& release = profile();
  *bytes = recommended ? release.recommended_granularity : release.granularity;
  return Error::kSuccess;
}

Error Runtime::reserve(size_t bytes, size_t alignment, void* wish, void** pointer) {
  std::lock_guard lock(mutex_);
  if (switches_.no_virtual_memory) return Error::kNotSupported;
  if (bytes == 0 || bytes % profile_->granularity != 0 || !is_power_of_two(alignment)) {
    return Error::kInvalidValue;
  }
  // HIP checks the alignment and passes it on to nobody.
  const size_t passed_on = profile_->cuda ? std::max(alignment, profile_->granularity)
                                          : profile_->granularity;
  if (profile_->cuda && as_number(wish) % profile_->granularity != 0) {
    return Error::kInvalidValue;
  }
  const uintptr_t hint = switches_.ignore_address_hints ? 0 : as_number(wish);
  uintptr_t address = 0;
  const Error error =
      memory_.virtual_memory().reserve(bytes, passed_on, hint, &address);
  if (error == Error::kSuccess) *pointer = reinterpret_cast<void*>(address);
  return error;
}

Error Runtime::free_addresses(void* pointer, size_t bytes) {
  std::lock_guard alone(memory_in_use_);
  std::lock_guard lock(mutex_);
  if (bytes == 0) return Error::kInvalidValue;
  VirtualMemory& memory = memory_.virtual_memory();
  // HIP does not look at the size.
  if (profile_->cuda && memory.reserved_bytes(as_number(pointer)) != bytes) {
    return Error::kInvalidValue;
  }
  const Error error = memory.free_addresses(as_number(pointer));
  return profile_->cuda && error == Error::kUnknown ? Error::kInvalidValue : error;
}

Error Runtime::create(const Caller& caller, const AllocationRequest& request,
                      Handle* handle) {
  std::lock_guard lock(mutex_);
  if (switches_.no_virtual_memory) return Error::kNotSupported;
  if (!request.valid || request.bytes == 0) return Error::kInvalidValue;
  if (!has_device(request.device)) return Error::kInvalidDevice;
  if (profile_->cuda) {
    // Bits that have no meaning pass.
    if ((request.handle_types & kHandleTypesOfWindows) != 0) {
      return Error::kInvalidValue;
    }
    if ((request.handle_types & kHandleTypeFabric) != 0) return Error::kNotPermitted;
  } else if ((request.handle_types & ~kHandleTypePosixFile) != 0) {
    return Error::kNotSupported;
  }
  if (request.bytes > memory_.vram(request.device).bytes()) return Error::kOutOfMemory;
  if (request.bytes % profile_->granularity != 0) return Error::kInvalidValue;

  // HIP only records the device that the caller names: the memory is that of the
  // current one.
  const int device = profile_->cuda ? request.device : caller.device;
  PhysicalRef memory;
  const Error error = memory_.vram(device).allocate(request.bytes, &memory);
  if (error != Error::kSuccess) return error;
  memory->type = request.type;
  memory->location = request.device;
  memory->handle_types = request.handle_types;
  memory->for_network = request.for_network;
  *handle = memory_.virtual_memory().add_handle(std::move(memory));
  return Error::kSuccess;
}

Error Runtime::release_handle(Handle handle) {
  std::lock_guard lock(mutex_);
  return memory_.virtual_memory().release_handle(handle);
}

Error Runtime::retain_handle(const void* pointer, Handle* handle) {
  std::lock_guard lock(mutex_);
  return memory_.virtual_memory().retain_handle(
      as_number(pointer), profile_->retain_takes_reference, handle);
}

Error Runtime::describe_handle(Handle handle, AllocationRequest* request) const {
  std::lock_guard lock(mutex_);
  const PhysicalRef memory = memory_.virtual_memory().memory_of(handle);
  if (!memory) return Error::kInvalidValue;
  *request = {true,          memory->location,    memory->handle_types,
              memory->bytes, memory->for_network, memory->type};
  return Error::kSuccess;
}

Error Runtime::map(void* pointer, size_t bytes, size_t offset, Handle handle) {
  std::lock_guard lock(mutex_);
  VirtualMemory& memory = memory_.virtual_memory();
  const PhysicalRef physical = memory.memory_of(handle);
  if (pointer == nullptr || bytes == 0 || !physical) return Error::kInvalidValue;
  if (offset != 0 || physical->bytes != bytes) {
    return profile_->cuda ? Error::kNotSupported : Error::kInvalidValue;
  }
  if (profile_->cuda && as_number(pointer) % profile_->granularity != 0) {
    return Error::kInvalidValue;
  }
  const Error error = memory.map(as_number(pointer), bytes, handle);
  if (error == Error::kSuccess || profile_->cuda) return error;
  return profile_->map_failure_is_silent ? Error::kSuccess : Error::kOutOfMemory;
}

Error Runtime::unmap(const Caller& caller, void* pointer, size_t bytes) {
  if (pointer == nullptr || bytes == 0) return Error::kInvalidValue;
  const uintptr_t address = as_number(pointer);
  std::set<int> users;
  UnmapWaits waits = UnmapWaits::kNothing;
  StreamRef null_stream;
  {
    std::lock_guard lock(mutex_);
    waits = profile_->unmap_waits;
    users = memory_.virtual_memory().users(address, bytes);
    if (waits == UnmapWaits::kNullStream) null_stream = find_stream(caller, 0);
  }
  if (waits == UnmapWaits::kNullStream) scheduler_.drain(null_stream);
  if (waits == UnmapWaits::kDevices) {
    for (const int device : users) scheduler_.drain_device(device);
  }
  std::lock_guard alone(memory_in_use_);
  std::lock_guard lock(mutex_);
  return memory_.virtual_memory().unmap(address, bytes, profile_->unmap_keeps_memory);
}

Error Runtime::set_access(void* pointer, size_t bytes,
                          const std::vector<AccessGrant>& grants) {
  std::lock_guard lock(mutex_);
  if (pointer == nullptr || bytes == 0 || grants.empty()) return Error::kInvalidValue;
  for (const AccessGrant& grant : grants) {
    const bool host = grant.device == kHostLocation;
    const bool known = host ? profile_->host_access : has_device(grant.device);
    const bool sound = grant.access == Access::kNone || grant.access == Access::kRead ||
                       grant.access == Access::kReadWrite;
    if (!known || !sound) return Error::kInvalidValue;
  }
  return memory_.virtual_memory().set_access(as_number(pointer), bytes, grants);
}

Error Runtime::access_of(const void* pointer, int device, Access* access) const {
  std::lock_guard lock(mutex_);
  if (pointer == nullptr || !has_device(device)) return Error::kInvalidValue;
  Place place;
  if (profile_->cuda &&
      memory_.locate(pointer, 1, Crossing::kNothing, &place) == Error::kSuccess &&
      place.kind == MemoryKind::kDevice) {
    *access = Access::kNone;
    return Error::kSuccess;
  }
  const auto found = memory_.virtual_memory().access_of(as_number(pointer), device);
  if (!found) return Error::kInvalidValue;
  *access = *found;
  return Error::kSuccess;
}

// --- IPC ---------------------------------------------------------------------------

Error Runtime::export_memory(const void* pointer, IpcHandle* handle) {
  std::lock_guard lock(mutex_);
  Place place;
  if (pointer == nullptr ||
      memory_.locate(pointer, 1, Crossing::kNothing, &place) != Error::kSuccess) {
    return Error::kInvalidValue;
  }
  if (place.kind == MemoryKind::kVirtual) {
    counters_.ipc_virtual_exports += 1;
    if (profile_->ipc_refuses_virtual) return Error::kInvalidValue;
    *handle = make_empty_handle(place.device, place.bytes);
    return Error::kSuccess;
  }
  const PhysicalRef memory = memory_.allocation_memory(place);
  if (!memory) return Error::kInvalidValue;
  auto it = exports_.find(place.base);
  if (it == exports_.end()) {
    std::optional<IpcExport> made = IpcExport::make(*memory, place.bytes);
    if (!made) return Error::kOutOfMemory;
    it = exports_.emplace(place.base, std::move(*made)).first;
  }
  counters_.ipc_exports += 1;
  // A handle of CUDA's is that of the whole allocation.
  const size_t offset = profile_->cuda ? 0 : as_number(pointer) - place.base;
  *handle = it->second.handle(*memory, offset);
  return Error::kSuccess;
}

Error Runtime::import_memory(const IpcHandle& handle, void** pointer) {
  std::lock_guard lock(mutex_);
  const auto refuse = [&](Error error) {
    counters_.ipc_failed_imports += 1;
    return error;
  };
  if (handle.bytes == 0) return refuse(Error::kInvalidValue);
  if (!is_ipc_handle(handle)) return refuse(Error::kInvalidDevicePointer);
  if (handle.offset >= handle.bytes || !has_device(handle.device)) {
    return refuse(Error::kInvalidValue);
  }
  if (is_own(handle)) return refuse(Error::kInvalidContext);
  const auto known = imports_.find(handle.cookie);
  if (known != imports_.end()) {
    known->second.count += 1;
    *pointer = static_cast<char*>(known->second.pointer) + handle.offset;
    return Error::kSuccess;
  }
  PhysicalRef memory = open_ipc(handle);
  if (!memory) return refuse(Error::kInvalidDevicePointer);
  void* base = nullptr;
  // HIP's are counted in pages.
  const size_t bytes = profile_->cuda ? handle.bytes : memory->bytes;
  const Error error = memory_.import(std::move(memory), bytes, &base);
  if (error != Error::kSuccess) return refuse(error);
  imports_[handle.cookie] = {base, 1};
  *pointer = static_cast<char*>(base) + handle.offset;
  return Error::kSuccess;
}

Error Runtime::close_import(void* pointer) {
  void* base = nullptr;
  {
    std::lock_guard lock(mutex_);
    Place place;
    if (pointer == nullptr ||
        memory_.locate(pointer, 1, Crossing::kNothing, &place) != Error::kSuccess) {
      return Error::kInvalidValue;
    }
    const auto it = std::find_if(
        imports_.begin(), imports_.end(),
        [&](const auto& each) { return as_number(each.second.pointer) == place.base; });
    if (it == imports_.end()) return Error::kInvalidValue;
    if (--it->second.count > 0) return Error::kSuccess;
    base = it->second.pointer;
    imports_.erase(it);
  }
  release_by(&AddressSpace::forget_import, base);
  return Error::kSuccess;
}

}  // namespace hipsim
