// SPDX-License-Identifier: Apache-2.0
#include "engine/virtual_memory.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "test.h"

namespace hipsim {
namespace {

using test::for_seeds;
using test::is_readable;
using test::is_writable;

constexpr size_t kVram = 64 * kPage;
constexpr size_t kWindow = size_t{16} << 20;

// The parts that the runtime puts together, on one device.
struct Memory {
  Window window{kWindow};
  Vram vram{0, kVram};
  VirtualMemory virtual_memory{window};

  VirtualMemory* operator->() { return &virtual_memory; }

  uintptr_t reserve(size_t pages) {
    uintptr_t address = 0;
    CHECK_OK(virtual_memory.reserve(pages * kPage, kPage, 0, &address));
    return address;
  }
  Handle create(size_t pages) {
    PhysicalRef memory;
    CHECK_OK(vram.allocate(pages * kPage, &memory));
    return virtual_memory.add_handle(std::move(memory));
  }
  Handle map(uintptr_t address, size_t pages) {
    const Handle handle = create(pages);
    CHECK_OK(virtual_memory.map(address, pages * kPage, handle));
    return handle;
  }
  Error grant(uintptr_t address, size_t pages, int device, Access access) {
    return virtual_memory.set_access(address, pages * kPage, {{device, access}});
  }
  char* own(uintptr_t address) {
    return reinterpret_cast<char*>(window.reach(address));
  }
};

char* pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

// --- reservations ------------------------------------------------------------------

TEST(reservations_are_freed_by_their_base) {
  Memory memory;
  const uintptr_t base = memory.reserve(4);
  CHECK_EQ(memory->reserved_bytes(base), 4 * kPage);
  CHECK_EQ(memory->reserved_bytes(base + kPage), 0);
  CHECK_ERROR(memory->free_addresses(base + kPage), kInvalidValue);
  CHECK_ERROR(memory->free_addresses(0), kInvalidValue);
  CHECK_OK(memory->free_addresses(base));
  CHECK_ERROR(memory->free_addresses(base), kInvalidValue);
  CHECK_EQ(memory->usage().reservations, 0);
  CHECK_EQ(memory->usage().reserved_bytes, 0);
}

TEST(addresses_run_out) {
  Memory memory;
  uintptr_t address = 0;
  CHECK_ERROR(memory->reserve(kWindow + kPage, kPage, 0, &address), kOutOfMemory);
  CHECK_OK(memory->reserve(kWindow, kPage, 0, &address));
  uintptr_t more = 0;
  CHECK_ERROR(memory->reserve(kPage, kPage, 0, &more), kOutOfMemory);
  CHECK_OK(memory->free_addresses(address));
  CHECK_OK(memory->reserve(kPage, kPage, address + 3 * kPage, &more));
  CHECK_EQ(more, address + 3 * kPage);
}

TEST(a_reservation_with_a_mapping_stays) {
  Memory memory;
  const uintptr_t base = memory.reserve(4);
  memory.map(base + kPage, 1);
  CHECK_ERROR(memory->free_addresses(base), kUnknown);
  CHECK(memory->find(base + kPage).has_value());
  CHECK_OK(memory->unmap(base + kPage, kPage, false));
  CHECK_OK(memory->free_addresses(base));
}

// --- mappings ----------------------------------------------------------------------

TEST(a_handle_is_mapped_whole_and_within_one_reservation) {
  Memory memory;
  const uintptr_t base = memory.reserve(4);
  const uintptr_t next = memory.reserve(4);
  CHECK_EQ(next, base + 4 * kPage);
  const Handle handle = memory.create(2);
  CHECK_ERROR(memory->map(base, kPage, handle), kInvalidValue);
  CHECK_ERROR(memory->map(base, 3 * kPage, handle), kInvalidValue);
  CHECK_ERROR(memory->map(base + 1, 2 * kPage, handle), kInvalidValue);
  CHECK_ERROR(memory->map(base + 3 * kPage, 2 * kPage, handle), kInvalidValue);
  CHECK_ERROR(memory->map(next + 3 * kPage, 2 * kPage, handle), kInvalidValue);
  CHECK_ERROR(memory->map(next + 4 * kPage, 2 * kPage, handle), kInvalidValue);
  CHECK_ERROR(memory->map(base - kPage, 2 * kPage, handle), kInvalidValue);
  CHECK_ERROR(memory->map(base, 2 * kPage, handle + 1), kInvalidValue);
  CHECK_EQ(memory->usage().mappings, 0);
  CHECK_OK(memory->map(base + 2 * kPage, 2 * kPage, handle));
  CHECK_OK(memory->release_handle(handle));
  CHECK_ERROR(memory->map(base, 2 * kPage, handle), kInvalidValue);
}

TEST(mappings_do_not_overlap) {
  Memory memory;
  const uintptr_t base = memory.reserve(8);
  memory.map(base + 2 * kPage, 2);
  const Handle handle = memory.create(2);
  for (const size_t page : {1, 2, 3}) {
    CHECK_ERROR(memory->map(base + page * kPage, 2 * kPage, handle), kInvalidValue);
  }
  const Handle large = memory.create(4);
  CHECK_ERROR(memory->map(base + kPage, 4 * kPage, large), kInvalidValue);
  CHECK_OK(memory->map(base, 2 * kPage, handle));
  CHECK_OK(memory->map(base + 4 * kPage, 4 * kPage, large));
  CHECK_EQ(memory->usage().mapped_bytes, 8 * kPage);
}

TEST(only_whole_mappings_are_unmapped) {
  Memory memory;
  const uintptr_t base = memory.reserve(10);
  memory.map(base, 2);
  memory.map(base + 2 * kPage, 3);
  memory.map(base + 6 * kPage, 2);  // behind a hole
  const auto refused = [&](size_t page, size_t pages) {
    CHECK_ERROR(memory->unmap(base + page * kPage, pages * kPage, false),
                kInvalidValue);
  };
  refused(0, 1);   // a part
  refused(1, 1);   // the rest of one
  refused(1, 4);   // begins within one
  refused(0, 3);   // ends within one
  refused(0, 6);   // ends in the hole
  refused(0, 8);   // a hole in the middle
  refused(5, 1);   // nothing there
  refused(6, 4);   // more than there is
  refused(10, 2);  // past the end
  CHECK_ERROR(memory->unmap(base, 2 * kPage - 1, false), kInvalidValue);
  CHECK_ERROR(memory->unmap(base, SIZE_MAX, false), kInvalidValue);
  CHECK_EQ(memory->usage().mappings, 3);
  CHECK_OK(memory->unmap(base, 5 * kPage, false));
  CHECK_EQ(memory->usage().mappings, 1);
  CHECK(!memory->find(base) && memory->find(base + 7 * kPage));
  CHECK_OK(memory->unmap(base + 6 * kPage, 2 * kPage, false));
  CHECK_EQ(memory->usage().mapped_bytes, 0);
}

TEST(the_mapping_that_holds_a_byte_is_found) {
  Memory memory;
  const uintptr_t base = memory.reserve(4);
  memory.map(base + kPage, 2);
  CHECK(!memory->find(base) && !memory->find(base + kPage - 1));
  for (const size_t offset : {kPage, 2 * kPage, 3 * kPage - 1}) {
    const auto found = memory->find(base + offset);
    CHECK(found && found->base == base + kPage && found->mapping->bytes == 2 * kPage);
  }
  CHECK(!memory->find(base + 3 * kPage) && !memory->find(0));
}

TEST(neighbouring_mappings_cover_a_range_of_one_reservation) {
  Memory memory;
  const uintptr_t base = memory.reserve(4);
  const uintptr_t next = memory.reserve(2);
  CHECK_EQ(next, base + 4 * kPage);
  memory.map(base, 1);
  memory.map(base + kPage, 3);
  memory.map(next, 2);
  CHECK(memory->covers(base, 4 * kPage) && memory->covers(base + 5, 2 * kPage));
  CHECK(memory->covers(next, 2 * kPage) && memory->covers(base, 0));
  CHECK(!memory->covers(base, 4 * kPage + 1));
  CHECK(!memory->covers(next, 2 * kPage + 1));
  CHECK(!memory->covers(base, SIZE_MAX));
  CHECK_OK(memory->unmap(base, kPage, false));
  CHECK(!memory->covers(base, 1) && memory->covers(base + kPage, 3 * kPage));
}

TEST(ranges_run_over_the_ends_that_they_may) {
  Memory memory;
  const uintptr_t base = memory.reserve(2);
  const uintptr_t next = memory.reserve(3);
  CHECK_EQ(next, base + 2 * kPage);
  memory.map(base, 1);
  memory.map(base + kPage, 1);
  memory.map(next, 2);
  struct Range {
    size_t offset;
    size_t bytes;
    bool runs[3];  // over nothing, mappings' ends, reservations' ends
  };
  constexpr Range kRanges[] = {
      {0, kPage, {true, true, true}},
      {5, kPage - 5, {true, true, true}},
      {0, kPage + 1, {false, true, true}},
      {kPage - 1, 2, {false, true, true}},
      {0, 2 * kPage, {false, true, true}},
      {2 * kPage, 2 * kPage, {true, true, true}},
      {2 * kPage - 1, 2, {false, false, true}},
      {0, 4 * kPage, {false, false, true}},
      {0, 4 * kPage + 1, {false, false, false}},
      {4 * kPage, 1, {false, false, false}},
  };
  CHECK_OK(memory->set_access(base, 2 * kPage, {{0, Access::kRead}}));
  CHECK_OK(memory->set_access(next, 2 * kPage, {{0, Access::kReadWrite}}));
  for (const Range& range : kRanges) {
    for (const int over : {0, 1, 2}) {
      const auto crossing = static_cast<Crossing>(over);
      const uintptr_t address = base + range.offset;
      const bool runs = range.runs[over];
      CHECK(memory->covers(address, range.bytes, crossing) == runs);
      CHECK(memory->permits(address, range.bytes, 0, false, crossing) == runs);
      const bool writes = runs && address >= next;
      CHECK(memory->permits(address, range.bytes, 0, true, crossing) == writes);
    }
  }
}

// --- handles -----------------------------------------------------------------------

TEST(memory_lives_as_long_as_something_names_it) {
  Memory memory;
  const uintptr_t base = memory.reserve(4);
  const Handle handle = memory.map(base, 2);
  CHECK_OK(memory->map(base + 2 * kPage, 2 * kPage, handle));
  *memory.own(base) = 7;
  CHECK(*memory.own(base + 2 * kPage) == 7);
  CHECK_OK(memory->release_handle(handle));
  CHECK_ERROR(memory->release_handle(handle), kInvalidValue);
  CHECK_EQ(memory->usage().handles, 0);
  CHECK_EQ(memory->usage().handle_bytes, 0);
  CHECK_OK(memory->unmap(base, 2 * kPage, false));
  CHECK_EQ(memory.vram.free_bytes(), kVram - 2 * kPage);
  CHECK(*memory.own(base + 2 * kPage) == 7);
  CHECK_OK(memory->unmap(base + 2 * kPage, 2 * kPage, false));
  CHECK_EQ(memory.vram.free_bytes(), kVram);
}

TEST(a_handle_keeps_memory_that_is_not_mapped) {
  Memory memory;
  const uintptr_t base = memory.reserve(2);
  const Handle handle = memory.map(base, 2);
  *memory.own(base) = 7;
  CHECK_OK(memory->unmap(base, 2 * kPage, false));
  CHECK_EQ(memory.vram.free_bytes(), kVram - 2 * kPage);
  CHECK_OK(memory->map(base, 2 * kPage, handle));
  CHECK(*memory.own(base) == 7);
}

TEST(a_retained_handle_is_released_twice) {
  Memory memory;
  const uintptr_t base = memory.reserve(2);
  const Handle handle = memory.map(base, 2);
  Handle again = 0;
  CHECK_OK(memory->retain_handle(base + kPage + 1, true, &again));
  CHECK_EQ(again, handle);
  CHECK_EQ(memory->usage().handles, 1);
  CHECK_OK(memory->release_handle(handle));
  CHECK(memory->memory_of(handle) != nullptr);
  CHECK_OK(memory->release_handle(handle));
  CHECK(memory->memory_of(handle) == nullptr);
  CHECK_ERROR(memory->release_handle(handle), kInvalidValue);
}

TEST(a_handle_told_without_a_reference_is_released_once) {
  Memory memory;
  const uintptr_t base = memory.reserve(2);
  const Handle handle = memory.map(base, 2);
  Handle told = 0;
  CHECK_OK(memory->retain_handle(base, false, &told));
  CHECK_EQ(told, handle);
  CHECK_OK(memory->release_handle(handle));
  CHECK_ERROR(memory->release_handle(handle), kInvalidValue);
  CHECK_ERROR(memory->retain_handle(base, false, &told), kInvalidValue);
}

TEST(memory_without_a_handle_gets_one) {
  Memory memory;
  const uintptr_t base = memory.reserve(2);
  const Handle handle = memory.map(base, 2);
  CHECK_OK(memory->release_handle(handle));
  Handle made = 0;
  CHECK_OK(memory->retain_handle(base, true, &made));
  CHECK(made != handle);
  CHECK_EQ(memory->usage().handle_bytes, 2 * kPage);
  CHECK_OK(memory->unmap(base, 2 * kPage, false));
  CHECK_OK(memory->map(base, 2 * kPage, made));
  Handle none = 5;
  CHECK_ERROR(memory->retain_handle(base + 2 * kPage, true, &none), kInvalidValue);
  CHECK_EQ(none, 5);
}

TEST(held_memory_comes_back_with_its_addresses) {
  Memory memory;
  const uintptr_t base = memory.reserve(4);
  const Handle handle = memory.map(base, 2);
  memory.map(base + 2 * kPage, 2);
  CHECK_OK(memory->release_handle(handle));
  CHECK_OK(memory->unmap(base, 2 * kPage, true));
  CHECK_EQ(memory.vram.free_bytes(), kVram - 4 * kPage);
  CHECK_EQ(memory->usage().mappings, 1);
  memory.map(base, 2);  // the addresses are free, the memory is not
  CHECK_EQ(memory.vram.free_bytes(), kVram - 6 * kPage);
  CHECK_OK(memory->unmap(base, 4 * kPage, false));
  CHECK_EQ(memory.vram.free_bytes(), kVram - 6 * kPage);
  CHECK_OK(memory->free_addresses(base));
  CHECK_EQ(memory.vram.free_bytes(), kVram - 4 * kPage);  // two handles are left
}

// --- access ------------------------------------------------------------------------

TEST(access_is_none_until_it_is_set_and_again_after_unmap) {
  Memory memory;
  const uintptr_t base = memory.reserve(2);
  const Handle handle = memory.map(base, 2);
  CHECK(memory->access_of(base, 0) == Access::kNone);
  CHECK(!memory->permits(base, 1, 0, false));
  CHECK_OK(memory.grant(base, 2, 0, Access::kReadWrite));
  CHECK(memory->access_of(base + 5, 0) == Access::kReadWrite);
  CHECK(memory->access_of(base, 1) == Access::kNone);
  CHECK_OK(memory->unmap(base, 2 * kPage, false));
  CHECK(!memory->access_of(base, 0));
  CHECK_OK(memory->map(base, 2 * kPage, handle));
  CHECK(memory->access_of(base, 0) == Access::kNone);
  CHECK(!memory->access_of(base + 2 * kPage, 0) && !memory->access_of(0, 0));
}

TEST(access_is_set_for_whole_mappings) {
  Memory memory;
  const uintptr_t base = memory.reserve(6);
  memory.map(base, 2);
  memory.map(base + 2 * kPage, 2);
  const auto refused = [&](size_t page, size_t pages) {
    CHECK_ERROR(memory.grant(base + page * kPage, pages, 0, Access::kRead),
                kInvalidValue);
  };
  refused(0, 1);
  refused(1, 1);
  refused(0, 3);
  refused(0, 5);
  refused(4, 2);
  CHECK(memory->access_of(base, 0) == Access::kNone);
  CHECK_OK(memory.grant(base, 4, 0, Access::kRead));
  CHECK(memory->access_of(base + 3 * kPage, 0) == Access::kRead);
}

TEST(permission_is_that_of_every_mapping) {
  Memory memory;
  const uintptr_t base = memory.reserve(4);
  memory.map(base, 2);
  memory.map(base + 2 * kPage, 2);
  CHECK_OK(memory.grant(base, 2, 0, Access::kReadWrite));
  CHECK_OK(memory.grant(base + 2 * kPage, 2, 0, Access::kRead));
  CHECK(memory->permits(base, 4 * kPage, 0, false));
  CHECK(!memory->permits(base, 4 * kPage, 0, true));
  CHECK(memory->permits(base, 2 * kPage, 0, true));
  CHECK(!memory->permits(base, 2 * kPage, 1, false));
  CHECK(!memory->permits(base, 4 * kPage + 1, 0, false));
  CHECK_OK(memory.grant(base, 2, 0, Access::kNone));
  CHECK(!memory->permits(base, 1, 0, false));
}

TEST(the_last_of_several_grants_counts) {
  Memory memory;
  const uintptr_t base = memory.reserve(2);
  memory.map(base, 2);
  CHECK_OK(memory->set_access(
      base, 2 * kPage,
      {{0, Access::kReadWrite}, {1, Access::kRead}, {0, Access::kRead}}));
  CHECK(memory->access_of(base, 0) == Access::kRead);
  CHECK(memory->access_of(base, 1) == Access::kRead);
}

TEST(the_host_needs_a_grant_of_its_own) {
  Memory memory;
  const uintptr_t base = memory.reserve(2);
  memory.map(base, 1);
  memory.map(base + kPage, 1);
  CHECK_OK(memory.grant(base, 2, 0, Access::kReadWrite));
  CHECK(!is_readable(pointer(base)));
  CHECK_OK(memory.grant(base, 1, kHostLocation, Access::kRead));
  CHECK(is_readable(pointer(base)) && !is_writable(pointer(base)));
  CHECK(!is_readable(pointer(base + kPage)));
  CHECK_OK(memory.grant(base, 2, kHostLocation, Access::kReadWrite));
  CHECK(is_writable(pointer(base)) && is_writable(pointer(base + kPage)));
  CHECK_OK(memory.grant(base, 2, kHostLocation, Access::kNone));
  CHECK(!is_readable(pointer(base)));
}

TEST(the_host_gets_in_behind_a_device_where_it_is_let) {
  Memory memory;
  const uintptr_t base = memory.reserve(2);
  memory.map(base, 2);
  memory->let_host_in(true);
  CHECK(!is_readable(pointer(base)));
  CHECK_OK(memory.grant(base, 2, 1, Access::kRead));
  CHECK(is_readable(pointer(base)) && !is_writable(pointer(base)));
  CHECK_OK(memory.grant(base, 2, 0, Access::kReadWrite));
  CHECK(is_writable(pointer(base)));
  memory->let_host_in(false);
  CHECK(is_writable(pointer(base)));  // counts for grants from now on
  CHECK_OK(memory.grant(base, 2, 0, Access::kReadWrite));
  CHECK(!is_readable(pointer(base)));
}

TEST(users_are_owners_and_those_with_access) {
  Memory memory;
  const uintptr_t base = memory.reserve(4);
  memory.map(base, 2);
  memory.map(base + 2 * kPage, 2);
  using Devices = std::set<int>;
  CHECK(memory->users(base, 4 * kPage) == Devices{0});
  CHECK_OK(memory.grant(base + 2 * kPage, 2, 3, Access::kRead));
  CHECK_OK(memory.grant(base, 4, kHostLocation, Access::kReadWrite));
  CHECK_OK(memory.grant(base, 4, 2, Access::kNone));
  CHECK(memory->users(base, 2 * kPage) == Devices{0});
  CHECK((memory->users(base, 4 * kPage) == Devices{0, 3}));
  CHECK(memory->users(base + 4 * kPage, kPage).empty());
}

// --- all of it ---------------------------------------------------------------------

// The model of a reservation is, for each page, the first page of its mapping, the
// mapping's handle and device 0's access.
TEST(virtual_memory_follows_a_page_map) {
  constexpr size_t kPages = 16;
  struct Page {
    bool mapped = false;
    size_t first = 0;
    Handle handle = 0;
    Access access = Access::kNone;
  };
  for_seeds(30, [](std::mt19937& random) {
    Memory memory;
    const uintptr_t base = memory.reserve(kPages);
    std::vector<Page> model(kPages);
    std::map<Handle, size_t> sizes;  // of live handles, in pages

    const auto pick_handle = [&] {
      return std::next(sizes.begin(), random() % sizes.size());
    };
    const auto is_whole = [&](size_t first, size_t pages) {
      for (size_t i = first; i < first + pages; ++i) {
        if (i >= kPages || !model[i].mapped) return false;
      }
      const size_t end = first + pages;
      return model[first].first == first &&
             (end == kPages || !model[end].mapped || model[end].first == end);
    };
    for (int step = 0; step < 300; ++step) {
      const size_t page = random() % kPages;
      const size_t pages = 1 + random() % 5;
      const uintptr_t address = base + page * kPage;
      const size_t choice = random() % 6;
      if (choice == 0 && memory.vram.free_bytes() >= pages * kPage) {
        sizes[memory.create(pages)] = pages;
      } else if (choice == 1 && !sizes.empty()) {
        const auto victim = pick_handle();
        CHECK_OK(memory->release_handle(victim->first));
        sizes.erase(victim);
      } else if (choice <= 3 && !sizes.empty()) {
        const auto [handle, size] = *pick_handle();
        bool room = page + size <= kPages;
        for (size_t i = page; room && i < page + size; ++i) room = !model[i].mapped;
        CHECK((memory->map(address, size * kPage, handle) == Error::kSuccess) == room);
        for (size_t i = page; room && i < page + size; ++i) {
          model[i] = {true, page, handle, Access::kNone};
        }
      } else if (choice == 4) {
        const bool whole = is_whole(page, pages);
        CHECK((memory->unmap(address, pages * kPage, false) == Error::kSuccess) ==
              whole);
        if (whole) std::fill_n(model.begin() + page, pages, Page{});
      } else {
        const bool whole = is_whole(page, pages);
        const Access access = random() % 2 ? Access::kRead : Access::kReadWrite;
        CHECK((memory.grant(address, pages, 0, access) == Error::kSuccess) == whole);
        for (size_t i = page; whole && i < page + pages; ++i) model[i].access = access;
      }

      bool covered = true;
      bool readable = true;
      for (size_t i = page; i < page + pages; ++i) {
        covered = covered && i < kPages && model[i].mapped;
        readable = readable && covered && model[i].access != Access::kNone;
      }
      CHECK(memory->covers(address, pages * kPage) == covered);
      CHECK(memory->permits(address, pages * kPage, 0, false) == readable);
      const auto found = memory->find(address);
      CHECK(found.has_value() == model[page].mapped);
      if (found) CHECK_EQ(found->base, base + model[page].first * kPage);
    }
    size_t mappings = 0;
    for (size_t i = 0; i < kPages; ++i)
      mappings += model[i].mapped && model[i].first == i;
    CHECK_EQ(memory->usage().mappings, mappings);
    CHECK_EQ(memory->usage().handles, sizes.size());
  });
}

}  // namespace
}  // namespace hipsim
