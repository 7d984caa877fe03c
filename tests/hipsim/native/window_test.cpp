// SPDX-License-Identifier: Apache-2.0
#include "engine/window.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <random>
#include <vector>

#include "engine/vram.h"
#include "test.h"

namespace hipsim {
namespace {

using test::for_seeds;
using test::is_readable;
using test::is_writable;

constexpr size_t kPages = 32;
constexpr size_t kBytes = kPages * kPage;

uintptr_t take(Window& window, size_t bytes, size_t alignment = kPage,
               uintptr_t wish = 0) {
  const std::optional<uintptr_t> address = window.take(bytes, alignment, wish);
  CHECK(address.has_value());
  return *address;
}

char* pointer(uintptr_t address) { return reinterpret_cast<char*>(address); }

TEST(a_window_is_made_at_its_first_use) {
  Window window(kBytes);
  CHECK(!window.touches(0, SIZE_MAX) && !window.touches(kPage, kPage));
  const uintptr_t base = take(window, 1);
  CHECK(window.touches(base, 1));
}

TEST(a_window_knows_its_ends) {
  Window window(kBytes);
  const uintptr_t base = take(window, kBytes);
  // The simulator's own window follows and is nobody else's either.
  const uintptr_t end = base + 2 * kBytes;
  CHECK(window.touches(base - 1, 2) && window.touches(end - 1, 1));
  CHECK(window.touches(base - kPage, 4 * kBytes) && window.touches(base + kBytes, 1));
  CHECK(!window.touches(base - 1, 1) && !window.touches(end, 1));
}

TEST(addresses_are_taken_in_turn) {
  Window window(kBytes);
  const uintptr_t base = take(window, 1);
  CHECK_EQ(take(window, kPage + 1), base + kPage);
  window.give_back(base);
  CHECK_EQ(take(window, kPage), base + 3 * kPage);
  window.give_back(base + kPage);
  CHECK_EQ(take(window, kBytes - 4 * kPage), base + 4 * kPage);
  CHECK_EQ(take(window, kPage), base);  // all the others came first
}

TEST(gaps_are_found_behind_the_end) {
  Window window(kBytes);
  const uintptr_t base = take(window, kPage);
  for (size_t i = 1; i < kPages; ++i) take(window, kPage);
  CHECK(!window.take(kPage));
  window.give_back(base + 5 * kPage);
  window.give_back(base + 6 * kPage);
  window.give_back(base + 9 * kPage);
  CHECK(!window.take(3 * kPage));
  CHECK_EQ(take(window, 2 * kPage), base + 5 * kPage);
  CHECK_EQ(take(window, kPage), base + 9 * kPage);
  CHECK(!window.take(1));
}

TEST(a_window_has_no_room_for_more_than_itself) {
  Window window(kBytes);
  for (const size_t bytes : {kBytes + 1, size_t{1} << 63, SIZE_MAX, SIZE_MAX - kPage}) {
    CHECK(!window.take(bytes));
  }
  CHECK(!window.take(kPage, 2 * kBytes));
  CHECK(!window.take(kPage, size_t{1} << 63));
  take(window, kBytes);
  CHECK(!window.take(1));
}

TEST(addresses_are_aligned) {
  Window window(kBytes);
  take(window, kPage);
  for (size_t alignment = kPage; alignment <= 8 * kPage; alignment *= 2) {
    CHECK_EQ(take(window, kPage, alignment) % alignment, 0);
  }
}

TEST(a_wish_comes_true_where_nobody_is) {
  Window window(kBytes);
  const uintptr_t base = take(window, kPage);
  const uintptr_t middle = base + 10 * kPage;
  CHECK_EQ(take(window, 2 * kPage, kPage, middle), middle);
  for (const uintptr_t taken : {base, middle, middle + kPage, middle - kPage}) {
    CHECK(take(window, 2 * kPage, kPage, taken) != taken);
  }
  window.give_back(middle);
  CHECK_EQ(take(window, 2 * kPage, kPage, middle), middle);
  CHECK_EQ(take(window, kPage, kPage, base + kBytes - kPage), base + kBytes - kPage);
}

TEST(a_wish_outside_or_between_is_passed_over) {
  Window window(kBytes);
  const uintptr_t base = take(window, kPage);
  const uintptr_t wishes[] = {
      base + kPage + 1,         // no page begins there
      base + kBytes,            // the simulator's own window
      base + kBytes - kPage,    // one page only
      base - kPage,             // in front of it
      UINTPTR_MAX - kPage + 1,  // the end of everything
  };
  for (const uintptr_t wish : wishes) {
    const uintptr_t address = take(window, 2 * kPage, kPage, wish);
    CHECK(address != wish && address - base < kBytes);
    window.give_back(address);
  }
  const uintptr_t odd = base + (base % (2 * kPage) == 0 ? kPage : 2 * kPage);
  CHECK(take(window, kPage, 2 * kPage, odd) != odd);
}

TEST(a_wish_does_not_move_the_turn) {
  Window window(kBytes);
  const uintptr_t base = take(window, kPage);
  take(window, kPage, kPage, base + 20 * kPage);
  CHECK_EQ(take(window, kPage), base + kPage);
}

// The model is a flag for each page.
TEST(a_window_follows_a_byte_map) {
  for_seeds(40, [](std::mt19937& random) {
    Window window(kBytes);
    const uintptr_t base = take(window, kPage);
    std::vector<size_t> sizes(kPages, 0);  // of what begins at the page
    std::vector<bool> model(kPages, false);
    model[0] = true;
    sizes[0] = 1;
    const auto is_free = [&](size_t first, size_t pages) {
      return first + pages <= kPages &&
             std::none_of(model.begin() + first, model.begin() + first + pages,
                          [](bool taken) { return taken; });
    };
    for (int step = 0; step < 400; ++step) {
      const size_t page = random() % kPages;
      if (random() % 2 && sizes[page] != 0) {
        window.give_back(base + page * kPage);
        std::fill_n(model.begin() + page, sizes[page], false);
        sizes[page] = 0;
        continue;
      }
      const size_t pages = 1 + random() % 6;
      const size_t alignment = kPage << (random() % 3);
      const uintptr_t wish = random() % 2 ? base + page * kPage : 0;
      const auto aligned = [&](size_t first) {
        return (base + first * kPage) % alignment == 0;
      };
      bool room = false;
      for (size_t first = 0; first < kPages; ++first) {
        room = room || (aligned(first) && is_free(first, pages));
      }
      const std::optional<uintptr_t> address =
          window.take(pages * kPage - random() % kPage, alignment, wish);
      CHECK(address.has_value() == room);
      if (!address) continue;
      const size_t first = (*address - base) / kPage;
      CHECK(*address % kPage == 0 && aligned(first) && is_free(first, pages));
      CHECK(wish == 0 || *address == wish || !aligned(page) || !is_free(page, pages));
      std::fill_n(model.begin() + first, pages, true);
      sizes[first] = pages;
    }
  });
}

// --- mappings ----------------------------------------------------------------------

// Memory whose pages are apart: 0, 2, 4.
PhysicalRef make_pieces(Vram& vram) {
  std::vector<PhysicalRef> pages(6);
  for (PhysicalRef& page : pages) CHECK_OK(vram.allocate(kPage, &page));
  for (const size_t i : {0, 2, 4}) pages[i].reset();
  PhysicalRef memory;
  CHECK_OK(vram.allocate(3 * kPage, &memory));
  CHECK_EQ(memory->extents.size(), 3);
  return memory;
}

TEST(mapped_memory_is_whole_from_both_windows) {
  Vram vram(0, 8 * kPage);
  Window window(kBytes);
  const PhysicalRef memory = make_pieces(vram);
  const uintptr_t address = take(window, memory->bytes);
  CHECK(window.map(address, *memory, PROT_READ | PROT_WRITE));
  for (size_t i = 0; i < memory->bytes; ++i) {
    pointer(address)[i] = static_cast<char>(i / kPage + i);
  }
  CHECK(std::memcmp(pointer(window.reach(address)), pointer(address), memory->bytes) ==
        0);
  pointer(window.reach(address))[2 * kPage] = 99;
  CHECK(pointer(address)[2 * kPage] == 99);
  window.unmap(address, memory->bytes);
}

TEST(the_hosts_protection_stops_the_host_alone) {
  Vram vram(0, 8 * kPage);
  Window window(kBytes);
  const PhysicalRef memory = make_pieces(vram);
  const uintptr_t address = take(window, memory->bytes);
  char* host = pointer(address) + kPage;
  char* own = pointer(window.reach(address)) + kPage;
  CHECK(!is_readable(host) && !is_readable(own));
  CHECK(window.map(address, *memory, PROT_NONE));
  CHECK(!is_readable(host) && is_writable(own));
  CHECK(window.protect(address, memory->bytes, PROT_READ));
  CHECK(is_readable(host) && !is_writable(host) && is_writable(own));
  CHECK(window.protect(address, memory->bytes, PROT_READ | PROT_WRITE));
  CHECK(is_writable(host) && is_writable(own));
  window.unmap(address, memory->bytes);
  CHECK(!is_readable(host) && !is_readable(own));
}

TEST(a_mapping_that_fails_leaves_nothing) {
  Vram vram(0, 8 * kPage);
  Window window(kBytes);
  const PhysicalRef memory = make_pieces(vram);
  Physical wrong(0, 3 * kPage);
  wrong.file = memory->file;
  wrong.extents = {memory->extents[0], memory->extents[1], {1, kPage}};
  wrong.owner = nullptr;
  const uintptr_t address = take(window, wrong.bytes);
  CHECK(!window.map(address, wrong, PROT_READ));
  wrong.file = -1;  // the Vram's to close
  for (size_t page = 0; page < 3; ++page) {
    CHECK(!is_readable(pointer(address) + page * kPage));
    CHECK(!is_readable(pointer(window.reach(address)) + page * kPage));
  }
  CHECK(window.map(address, *memory, PROT_READ));
}

TEST(mappings_share_their_memory) {
  Vram vram(0, 8 * kPage);
  Window window(kBytes);
  PhysicalRef memory;
  CHECK_OK(vram.allocate(kPage, &memory));
  const uintptr_t first = take(window, kPage);
  const uintptr_t second = take(window, kPage);
  CHECK(window.map(first, *memory, PROT_READ | PROT_WRITE));
  CHECK(window.map(second, *memory, PROT_READ));
  *pointer(first) = 5;
  CHECK(*pointer(second) == 5);
}

TEST(a_child_inherits_no_device_memory) {
  Vram vram(0, 8 * kPage);
  Window window(kBytes);
  PhysicalRef memory;
  CHECK_OK(vram.allocate(kPage, &memory));
  const uintptr_t address = take(window, kPage);
  CHECK(window.map(address, *memory, PROT_READ | PROT_WRITE));
  const uintptr_t both[] = {address, window.reach(address)};
  for (const uintptr_t each : both) CHECK(is_readable(pointer(each)));
  const auto count_readable = [](const void* argument) {
    const auto* addresses = static_cast<const uintptr_t*>(argument);
    return int{is_readable(pointer(addresses[0]))} + is_readable(pointer(addresses[1]));
  };
  CHECK_EQ(test::in_child(count_readable, both), 0);
}

TEST(a_windows_addresses_end_with_it) {
  Vram vram(0, 8 * kPage);
  PhysicalRef memory;
  CHECK_OK(vram.allocate(kPage, &memory));
  char* host = nullptr;
  {
    Window window(kBytes);
    const uintptr_t address = take(window, kPage);
    CHECK(window.map(address, *memory, PROT_READ | PROT_WRITE));
    host = pointer(address);
    CHECK(is_readable(host));
  }
  CHECK(!is_readable(host));
}

}  // namespace
}  // namespace hipsim
