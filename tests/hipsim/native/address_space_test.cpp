// SPDX-License-Identifier: Apache-2.0
#include "engine/address_space.h"

#include <sys/resource.h>

#include <cstring>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "test.h"

namespace hipsim {
namespace {

using test::at;
using test::is_readable;

constexpr size_t kVram = 64 * kPage;
constexpr size_t kWindow = size_t{256} << 30;  // the least, whatever the memory

Error locate(const AddressSpace& memory, const void* pointer, size_t bytes,
             Place* place, Crossing crossing = Crossing::kMappings) {
  return memory.locate(pointer, bytes, crossing, place);
}

void* allocate(AddressSpace& memory, int device, size_t bytes) {
  void* pointer = nullptr;
  CHECK_OK(memory.allocate(device, bytes, &pointer));
  return pointer;
}

// Takes all addresses but for `bytes`, so that they come round soon.
void narrow_window(AddressSpace& memory, size_t bytes) {
  uintptr_t address = 0;
  CHECK_OK(memory.virtual_memory().reserve(kWindow - bytes, kPage, 0, &address));
}

// --- device memory -----------------------------------------------------------------

TEST(device_addresses_are_checked_by_allocation) {
  AddressSpace memory(2, kVram);
  void* first = allocate(memory, 0, 100);
  void* second = allocate(memory, 1, kPage);
  std::memset(first, 1, 100);
  std::memset(second, 2, kPage);

  Place place;
  CHECK_OK(locate(memory, first, 100, &place));
  CHECK(place.kind == MemoryKind::kDevice && place.device == 0 && place.on_device());
  CHECK(place.bytes == 100 && *reinterpret_cast<char*>(place.reach) == 1);
  CHECK_OK(locate(memory, at(first, 99), 1, &place));
  CHECK_EQ(place.base, reinterpret_cast<uintptr_t>(first));
  CHECK_ERROR(locate(memory, at(first, 99), 2, &place), kInvalidValue);
  CHECK_ERROR(locate(memory, at(first, 100), 1, &place), kInvalidValue);
  CHECK_OK(locate(memory, second, kPage, &place));
  CHECK(place.device == 1 && *reinterpret_cast<char*>(place.reach) == 2);
  CHECK_ERROR(locate(memory, second, kPage + 1, &place), kInvalidValue);
  CHECK_ERROR(locate(memory, second, SIZE_MAX, &place), kInvalidValue);

  CHECK(!memory.forget_device(at(first, 1)));
  const auto forgotten = memory.forget_device(first);
  CHECK(forgotten && forgotten->bytes == 100);
  CHECK_ERROR(locate(memory, first, 1, &place), kInvalidValue);
  static_cast<char*>(first)[0] = 3;  // still mapped
  memory.unmap(*forgotten);
  CHECK(!memory.forget_device(first));
  CHECK(!is_readable(first));
  CHECK_ERROR(locate(memory, first, 1, &place), kInvalidValue);
}

TEST(device_memory_is_limited_in_pages) {
  AddressSpace memory(2, kVram);
  for (int i = 0; i < 64; ++i) allocate(memory, 0, 1);
  void* more = nullptr;
  CHECK_ERROR(memory.allocate(0, 1, &more), kOutOfMemory);
  CHECK_ERROR(memory.allocate(0, SIZE_MAX, &more), kOutOfMemory);
  CHECK_EQ(memory.vram(0).free_bytes(), 0);
  CHECK_EQ(memory.vram(1).free_bytes(), kVram);
  CHECK_ERROR(memory.allocate(1, kVram + 1, &more), kOutOfMemory);
  CHECK_OK(memory.allocate(1, kVram, &more));
  CHECK_EQ(memory.usage().device_allocations, 65);
  CHECK_EQ(memory.usage().device_bytes, 64 + kVram);
}

TEST(memory_without_an_address_goes_back) {
  AddressSpace memory(1, kVram);
  narrow_window(memory, kPage);
  allocate(memory, 0, kPage);
  void* more = nullptr;
  CHECK_ERROR(memory.allocate(0, kPage, &more), kOutOfMemory);
  CHECK_EQ(memory.vram(0).free_bytes(), kVram - kPage);
  CHECK_EQ(memory.usage().device_allocations, 1);
}

TEST(addresses_return_late_and_fresh) {
  AddressSpace memory(1, kVram);
  narrow_window(memory, 4 * kVram);
  std::set<void*> seen;
  size_t rounds = 0;
  for (;; ++rounds) {
    void* pointer = allocate(memory, 0, kVram / 4);
    CHECK(*static_cast<char*>(pointer) == 0);
    *static_cast<char*>(pointer) = 1;
    memory.unmap(*memory.forget_device(pointer));
    if (!seen.insert(pointer).second) break;
  }
  CHECK_EQ(rounds, 16);
}

TEST(addresses_are_not_free_while_work_uses_them) {
  AddressSpace memory(2, size_t{1} << 20);
  narrow_window(memory, size_t{4} << 20);
  void* first = allocate(memory, 0, 1 << 20);
  const std::optional<Place> place = memory.forget_device(first);
  CHECK(place.has_value());
  CHECK(!memory.forget_device(first).has_value());
  Place found;
  CHECK_ERROR(locate(memory, first, 1, &found), kInvalidValue);
  CHECK(memory.allocation_memory(*place) == nullptr);
  for (int turn = 0; turn < 20; ++turn) {
    void* other = allocate(memory, 1, 1 << 20);
    CHECK(other != first);
    memory.unmap(*memory.forget_device(other));
  }
  memory.unmap(*place);
  CHECK_EQ(memory.vram(0).free_bytes(), size_t{1} << 20);
  allocate(memory, 0, 1 << 20);
}

// --- host memory -------------------------------------------------------------------

TEST(host_ranges_do_not_overlap) {
  AddressSpace memory(1, kVram);
  std::vector<char> buffer(1000);
  char* base = buffer.data();
  const auto add = [&](void* pointer, size_t bytes) {
    return memory.register_host(pointer, bytes, false);
  };
  CHECK_OK(add(base + 100, 100));
  CHECK_ERROR(add(base + 100, 100), kHostMemoryAlreadyRegistered);
  CHECK_ERROR(add(base + 199, 1), kHostMemoryAlreadyRegistered);
  CHECK_ERROR(add(base, 101), kHostMemoryAlreadyRegistered);
  CHECK_ERROR(add(base, 1000), kHostMemoryAlreadyRegistered);
  CHECK_OK(add(base, 100));
  CHECK_OK(add(base + 200, 100));
  CHECK_ERROR(add(nullptr, 1), kInvalidValue);
  CHECK_ERROR(add(base + 500, 0), kInvalidValue);
  CHECK_ERROR(add(base + 500, SIZE_MAX), kInvalidValue);

  Place place;
  CHECK_OK(locate(memory, base + 150, 50, &place));
  CHECK(place.kind == MemoryKind::kRegisteredHost && !place.on_device());
  CHECK_EQ(place.reach, reinterpret_cast<uintptr_t>(base + 150));
  CHECK_ERROR(locate(memory, base + 150, 51, &place), kInvalidValue);
  CHECK_OK(locate(memory, base + 300, 700, &place));
  CHECK(place.kind == MemoryKind::kPageableHost);

  CHECK(!memory.forget_registration(base + 101));
  CHECK(memory.forget_registration(base + 100));
  CHECK(!memory.forget_registration(base + 100));
  CHECK_EQ(memory.usage().registered_ranges, 2);
  CHECK_EQ(memory.usage().registered_bytes, 200);
}

TEST(page_locked_memory_is_no_registration) {
  AddressSpace memory(1, kVram);
  void* host = nullptr;
  CHECK_OK(memory.allocate_host(10, &host));
  CHECK_ERROR(memory.allocate_host(SIZE_MAX, &host), kOutOfMemory);
  CHECK_ERROR(memory.register_host(host, 10, false), kHostMemoryAlreadyRegistered);
  CHECK(!memory.forget_registration(host));
  CHECK(!memory.forget_host_allocation(at(host, 1)));
  void* same = nullptr;
  CHECK_OK(memory.device_pointer(at(host, 9), &same));
  CHECK(same == at(host, 9));
  CHECK_ERROR(memory.device_pointer(at(host, 10), &same), kInvalidValue);
  const auto place = memory.forget_host_allocation(host);
  CHECK(place && is_readable(host));
  memory.unmap(*place);
  CHECK(!is_readable(host));
  CHECK_EQ(memory.usage().host_allocations, 0);
  CHECK_EQ(memory.usage().host_allocation_bytes, 0);
}

TEST(memory_that_is_not_there_cannot_be_registered) {
  AddressSpace memory(1, kVram);
  void* host = nullptr;
  CHECK_OK(memory.allocate_host(kPage, &host));
  memory.unmap(*memory.forget_host_allocation(host));
  CHECK_ERROR(memory.register_host(host, 1, false), kInvalidValue);
  CHECK_ERROR(memory.register_host(reinterpret_cast<void*>(kPage), kPage, false),
              kInvalidValue);
  std::vector<char> buffer(kPage);
  CHECK_ERROR(memory.register_host(buffer.data(), size_t{1} << 46, false),
              kInvalidValue);
}

TEST(what_was_found_is_held_until_it_is_unmapped) {
  AddressSpace memory(1, kVram);
  CHECK(memory.still_holds({}));
  void* device = allocate(memory, 0, kPage);
  void* host = nullptr;
  CHECK_OK(memory.allocate_host(kPage, &host));
  Place on_device;
  Place locked;
  CHECK_OK(locate(memory, at(device, 5), 1, &on_device));
  CHECK_OK(locate(memory, at(host, 5), 1, &locked));
  const auto device_place = memory.forget_device(device);
  const auto host_place = memory.forget_host_allocation(host);
  CHECK(memory.still_holds(on_device) && memory.still_holds(locked));
  memory.unmap(*device_place);
  memory.unmap(*host_place);
  CHECK(!memory.still_holds(on_device) && !memory.still_holds(locked));
}

TEST(the_simulators_own_addresses_are_nobody_elses) {
  AddressSpace memory(1, kVram);
  void* device = allocate(memory, 0, kPage);
  Place place;
  CHECK_OK(locate(memory, device, 1, &place));
  Place own;
  CHECK_ERROR(locate(memory, reinterpret_cast<void*>(place.reach), 1, &own),
              kInvalidValue);
  uintptr_t rest = 0;
  CHECK_OK(memory.virtual_memory().reserve(kWindow - kPage, kPage, 0, &rest));
  CHECK_ERROR(locate(memory, reinterpret_cast<void*>(rest + kWindow - kPage), 1, &own),
              kInvalidValue);
}

TEST(device_memory_cannot_be_registered) {
  AddressSpace memory(1, kVram);
  void* device = allocate(memory, 0, kPage);
  Place place;
  CHECK_OK(locate(memory, device, 1, &place));
  CHECK_ERROR(memory.register_host(device, kPage, false), kInvalidValue);
  CHECK_ERROR(memory.register_host(at(device, 40 * kPage), kPage, true), kInvalidValue);
  void* own = reinterpret_cast<void*>(place.reach);
  CHECK_ERROR(memory.register_host(own, kPage, false), kInvalidValue);
  CHECK(!memory.forget_host_allocation(device) && !memory.forget_registration(device));
}

TEST(a_device_has_an_address_of_its_own_for_host_memory) {
  AddressSpace memory(1, kVram);
  std::vector<char> buffer(3 * kPage);
  char* host = buffer.data() + 100;
  CHECK_OK(memory.register_host(host, kPage, true));
  void* alias = nullptr;
  CHECK_OK(memory.device_pointer(host, &alias));
  CHECK(alias != host);
  // Hardware maps pages, so the offset in the page stays.
  CHECK_EQ(reinterpret_cast<uintptr_t>(alias) % kPage,
           reinterpret_cast<uintptr_t>(host) % kPage);
  void* inside = nullptr;
  CHECK_OK(memory.device_pointer(host + 7, &inside));
  CHECK(inside == at(alias, 7));

  Place by_alias;
  Place by_host;
  CHECK_OK(locate(memory, at(alias, 7), kPage - 7, &by_alias));
  CHECK_OK(locate(memory, host + 7, kPage - 7, &by_host));
  CHECK(by_alias.kind == MemoryKind::kRegisteredHost && !by_alias.on_device());
  CHECK(by_alias.reach == by_host.reach);
  CHECK_EQ(by_alias.reach, reinterpret_cast<uintptr_t>(host + 7));
  CHECK_ERROR(locate(memory, at(alias, 7), kPage - 6, &by_alias), kInvalidValue);
  CHECK(!memory.forget_device(alias) && !memory.forget_registration(alias));

  const auto place = memory.forget_registration(host);
  CHECK(place.has_value());
  CHECK_ERROR(locate(memory, alias, 1, &by_alias), kInvalidValue);
  CHECK_ERROR(memory.device_pointer(host, &inside), kInvalidValue);
  CHECK(!memory.forget_registration(host));
  CHECK(memory.still_holds(by_host));
  CHECK_ERROR(memory.register_host(host, kPage, true), kHostMemoryAlreadyRegistered);
  memory.unmap(*place);
  CHECK(!memory.still_holds(by_host));
  CHECK_OK(memory.register_host(host, kPage, true));
  CHECK(!memory.still_holds(by_host));  // it is another registration
  CHECK_OK(memory.device_pointer(host, &inside));
  CHECK_OK(locate(memory, inside, kPage, &by_alias));
}

TEST(a_registration_has_a_limit_if_there_is_one) {
  AddressSpace memory(1, kVram);
  std::vector<char> buffer(1000);
  char* base = buffer.data();
  memory.limit_registrations(100);
  CHECK_ERROR(memory.register_host(base, 101, false), kOutOfMemory);
  CHECK_ERROR(memory.register_host(nullptr, 101, false), kInvalidValue);
  CHECK_OK(memory.register_host(base, 100, false));
  CHECK_ERROR(memory.register_host(base, 101, false), kHostMemoryAlreadyRegistered);
  memory.limit_registrations(std::nullopt);
  CHECK_OK(memory.register_host(base + 100, 900, false));
}

TEST(locked_memory_may_have_a_limit) {
  AddressSpace memory(1, kVram);
  std::vector<char> buffer(1000);
  char* base = buffer.data();
  void* locked = nullptr;
  Place place;
  memory.limit_locked_memory(100);
  CHECK_ERROR(memory.register_host(base, 101, false), kOutOfMemory);
  CHECK_ERROR(memory.allocate_host(101, &locked), kOutOfMemory);
  CHECK_OK(memory.register_host(base, 60, false));
  CHECK_ERROR(memory.allocate_host(41, &locked), kOutOfMemory);
  CHECK_OK(memory.allocate_host(40, &locked));
  CHECK_OK(locate(memory, locked, 40, &place));
  CHECK(place.allocated);
  CHECK_OK(locate(memory, base, 60, &place));
  CHECK(!place.allocated);
  CHECK_ERROR(memory.register_host(base + 60, 1, false), kOutOfMemory);
  CHECK_EQ(memory.usage().registered_bytes + memory.usage().host_allocation_bytes, 100);

  // What is forgotten is locked until it is unmapped.
  const auto registration = memory.forget_registration(base);
  CHECK_ERROR(memory.allocate_host(1, &locked), kOutOfMemory);
  memory.unmap(*registration);
  CHECK_OK(memory.register_host(base, 60, true));
  CHECK_ERROR(memory.register_host(base + 60, 1, false), kOutOfMemory);
  memory.unmap(*memory.forget_host_allocation(locked));
  CHECK_OK(memory.register_host(base + 60, 40, false));

  // A limit below what is there already refuses all, and takes nothing away.
  memory.limit_locked_memory(10);
  CHECK_ERROR(memory.allocate_host(1, &locked), kOutOfMemory);
  CHECK_OK(locate(memory, base, 60, &place));
  memory.limit_locked_memory(std::nullopt);
  CHECK_OK(memory.register_host(base + 100, 900, false));
}

TEST(the_process_may_have_a_limit_of_locked_memory) {
  AddressSpace memory(1, kVram);
  std::vector<char> buffer(3 * kPage);
  const auto set_limit = [](rlim_t bytes) {
    rlimit limit{};
    CHECK(getrlimit(RLIMIT_MEMLOCK, &limit) == 0);
    limit.rlim_cur = bytes;
    CHECK(setrlimit(RLIMIT_MEMLOCK, &limit) == 0);
  };
  const auto lock = [&](size_t bytes) {
    const Error error = memory.register_host(buffer.data(), bytes, false);
    if (error == Error::kSuccess) {
      memory.unmap(*memory.forget_registration(buffer.data()));
    }
    return error;
  };
  set_limit(kPage);
  CHECK_OK(lock(2 * kPage));
  memory.limit_locked_memory_by_rlimit(true);
  CHECK_OK(lock(kPage));
  CHECK_ERROR(lock(kPage + 1), kOutOfMemory);
  void* locked = nullptr;
  CHECK_ERROR(memory.allocate_host(kPage + 1, &locked), kOutOfMemory);
  memory.limit_locked_memory(100);
  CHECK_ERROR(lock(101), kOutOfMemory);
  memory.limit_locked_memory(3 * kPage);
  CHECK_ERROR(lock(kPage + 1), kOutOfMemory);
  set_limit(0);
  CHECK_ERROR(lock(1), kOutOfMemory);
  memory.limit_locked_memory_by_rlimit(false);
  CHECK_OK(lock(2 * kPage));
}

TEST(aliases_give_their_addresses_back) {
  AddressSpace memory(1, kVram);
  narrow_window(memory, 3 * kPage);
  std::vector<char> buffer(4 * kPage);
  char* page =
      buffer.data() + kPage - reinterpret_cast<uintptr_t>(buffer.data()) % kPage;
  for (int turn = 0; turn < 10; ++turn) {
    CHECK_OK(memory.register_host(page + 10, 2 * kPage, true));  // three pages
    CHECK_ERROR(memory.register_host(page + 10 + 2 * kPage, 10, true), kOutOfMemory);
    memory.unmap(*memory.forget_registration(page + 10));
  }
  CHECK_EQ(memory.usage().registered_ranges, 0);
}

// --- virtual memory ----------------------------------------------------------------

TEST(mappings_are_located_one_by_one_or_together) {
  AddressSpace memory(2, kVram);
  VirtualMemory& virtual_memory = memory.virtual_memory();
  uintptr_t base = 0;
  CHECK_OK(virtual_memory.reserve(4 * kPage, kPage, 0, &base));
  for (const int device : {0, 1}) {
    PhysicalRef physical;
    CHECK_OK(memory.vram(device).allocate(kPage, &physical));
    const Handle handle = virtual_memory.add_handle(std::move(physical));
    CHECK_OK(virtual_memory.map(base + device * kPage, kPage, handle));
  }
  void* pointer = reinterpret_cast<void*>(base);
  Place place;
  CHECK_OK(locate(memory, at(pointer, 10), 2 * kPage - 10, &place));
  CHECK(place.kind == MemoryKind::kVirtual && place.device == 0 && place.on_device());
  CHECK(place.base == base && place.bytes == kPage);
  constexpr auto kOne = Crossing::kNothing;
  CHECK_ERROR(locate(memory, at(pointer, 10), 2 * kPage - 10, &place, kOne),
              kInvalidValue);
  CHECK_OK(locate(memory, at(pointer, 10), kPage - 10, &place, kOne));
  CHECK_OK(locate(memory, at(pointer, kPage), kPage, &place, kOne));
  CHECK_EQ(place.device, 1);
  CHECK_ERROR(locate(memory, pointer, 2 * kPage + 1, &place), kInvalidValue);
  CHECK_ERROR(locate(memory, at(pointer, 2 * kPage), 1, &place), kInvalidValue);
  CHECK(!memory.forget_device(pointer));
  CHECK(memory.allocation_memory(place) == nullptr);
}

TEST(the_host_gets_in_where_it_is_let) {
  AddressSpace memory(1, kVram);
  void* open = allocate(memory, 0, kPage);
  memory.let_host_in(false);
  void* closed = allocate(memory, 0, kPage);
  CHECK(is_readable(open) && !is_readable(closed));  // as it was when it was made
  Place place;
  CHECK_OK(locate(memory, closed, 1, &place));
  CHECK(is_readable(reinterpret_cast<void*>(place.reach)));
}

// --- imports -----------------------------------------------------------------------

TEST(imported_memory_is_forgotten_as_such) {
  AddressSpace memory(1, kVram);
  void* original = allocate(memory, 0, kPage);
  Place place;
  CHECK_OK(locate(memory, original, 1, &place));
  void* imported = nullptr;
  CHECK_OK(memory.import(memory.allocation_memory(place), 100, &imported));
  static_cast<char*>(original)[5] = 5;
  CHECK(static_cast<char*>(imported)[5] == 5);
  CHECK_OK(locate(memory, imported, 100, &place));
  CHECK_ERROR(locate(memory, imported, 101, &place), kInvalidValue);
  CHECK(place.kind == MemoryKind::kDevice &&
        memory.allocation_memory(place) == nullptr);
  CHECK(!memory.forget_device(imported) && !memory.forget_import(original));
  CHECK_EQ(memory.usage().imported_bytes, 100);
  memory.unmap(*memory.forget_import(imported));
  CHECK_EQ(memory.usage().imports, 0);
  CHECK(static_cast<char*>(original)[5] == 5 && !is_readable(imported));
}

// --- all of it ---------------------------------------------------------------------

TEST(address_space_follows_a_model) {
  AddressSpace memory(1, kVram);
  narrow_window(memory, 8 * kVram);
  std::map<char*, size_t> model;
  std::mt19937 random(7);
  size_t charged = 0;
  for (int step = 0; step < 5000; ++step) {
    if (random() % 2 == 0) {
      const size_t bytes = 1 + random() % (6 * kPage);
      void* pointer = nullptr;
      const bool room = charged + whole_pages(bytes) <= kVram;
      CHECK((memory.allocate(0, bytes, &pointer) == Error::kSuccess) == room);
      if (room) {
        const auto next = model.lower_bound(at(pointer, 0));
        CHECK(next == model.end() || at(pointer, whole_pages(bytes)) <= next->first);
        model[at(pointer, 0)] = bytes;
        charged += whole_pages(bytes);
      }
    } else if (!model.empty()) {
      auto victim = std::next(model.begin(), random() % model.size());
      const auto place = memory.forget_device(victim->first);
      CHECK(place && place->bytes == victim->second);
      memory.unmap(*place);
      charged -= whole_pages(victim->second);
      model.erase(victim);
    }
    CHECK_EQ(memory.vram(0).free_bytes(), kVram - charged);
  }
}

}  // namespace
}  // namespace hipsim
