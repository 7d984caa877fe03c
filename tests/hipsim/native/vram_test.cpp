// SPDX-License-Identifier: Apache-2.0
#include "engine/vram.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <optional>
#include <random>
#include <vector>

#include "test.h"

namespace hipsim {
namespace {

using test::for_seeds;

PhysicalRef take(Vram& vram, size_t bytes) {
  PhysicalRef memory;
  CHECK_OK(vram.allocate(bytes, &memory));
  return memory;
}

unsigned char byte_at(const Physical& memory, size_t offset) {
  unsigned char byte = 0;
  CHECK(pread(memory.file, &byte, 1, static_cast<off_t>(offset)) == 1);
  return byte;
}

void set_byte(const Physical& memory, size_t offset, unsigned char byte) {
  CHECK(pwrite(memory.file, &byte, 1, static_cast<off_t>(offset)) == 1);
}

std::vector<size_t> pages_of(const Physical& memory) {
  std::vector<size_t> pages;
  for (const Extent& extent : memory.extents) {
    CHECK(extent.bytes > 0 && extent.bytes % kPage == 0 && extent.offset % kPage == 0);
    for (size_t done = 0; done < extent.bytes; done += kPage) {
      pages.push_back((extent.offset + done) / kPage);
    }
  }
  return pages;
}

TEST(device_memory_is_charged_in_whole_pages) {
  Vram vram(3, 64 * kPage + 5);
  CHECK_EQ(vram.bytes(), 64 * kPage);
  PhysicalRef memory = take(vram, 1);
  CHECK(memory->bytes == kPage && memory->device == 3);
  CHECK_EQ(vram.free_bytes(), 63 * kPage);
  PhysicalRef more;
  CHECK_ERROR(vram.allocate(SIZE_MAX, &more), kOutOfMemory);
  CHECK_ERROR(vram.allocate(SIZE_MAX - kPage, &more), kOutOfMemory);
  CHECK_ERROR(vram.allocate(63 * kPage + 1, &more), kOutOfMemory);
  CHECK(!more);
  more = take(vram, 63 * kPage);
  CHECK_EQ(vram.free_bytes(), 0);
  PhysicalRef none;
  CHECK_ERROR(vram.allocate(1, &none), kOutOfMemory);
  memory.reset();
  more.reset();
  CHECK_EQ(vram.free_bytes(), 64 * kPage);
}

TEST(out_of_memory_is_exact_when_memory_is_in_pieces) {
  Vram vram(0, 64 * kPage);
  std::vector<PhysicalRef> singles;
  for (int i = 0; i < 64; ++i) singles.push_back(take(vram, kPage));
  for (int i = 0; i < 64; i += 2) singles[i].reset();
  CHECK_EQ(vram.free_bytes(), 32 * kPage);
  PhysicalRef more;
  CHECK_ERROR(vram.allocate(32 * kPage + 1, &more), kOutOfMemory);
  const PhysicalRef pieces = take(vram, 32 * kPage);
  CHECK_EQ(pieces->extents.size(), 32);
  CHECK_ERROR(vram.allocate(1, &more), kOutOfMemory);
}

TEST(the_lowest_free_pages_that_suit_come_first) {
  Vram vram(0, 8 * kPage);
  using Pages = std::vector<size_t>;
  PhysicalRef first = take(vram, 2 * kPage);
  const PhysicalRef second = take(vram, 2 * kPage);
  CHECK((pages_of(*second) == Pages{2, 3}));
  first.reset();
  PhysicalRef third = take(vram, 3 * kPage);
  CHECK((pages_of(*third) == Pages{4, 5, 6}));  // in one piece
  CHECK(pages_of(*take(vram, kPage)) == Pages{0});
  CHECK((pages_of(*take(vram, 3 * kPage)) == Pages{0, 1, 7}));
}

TEST(neighbours_become_one_piece) {
  for_seeds(20, [](std::mt19937& random) {
    Vram vram(0, 32 * kPage);
    std::vector<PhysicalRef> parts;
    while (vram.free_bytes() > 0) {
      const size_t pages = 1 + random() % 4;
      parts.push_back(take(vram, std::min(pages * kPage, vram.free_bytes())));
    }
    std::shuffle(parts.begin(), parts.end(), random);
    parts.clear();
    const PhysicalRef whole = take(vram, 32 * kPage);
    CHECK_EQ(whole->extents.size(), 1);
  });
}

TEST(charges_are_memory_too) {
  Vram vram(0, 4 * kPage);
  CHECK(!vram.charge(4 * kPage + 1));
  CHECK(vram.charge(4 * kPage) && vram.free_bytes() == 0);
  PhysicalRef memory;
  CHECK_ERROR(vram.allocate(1, &memory), kOutOfMemory);
  CHECK(!vram.charge(1) && vram.charge(0));
  vram.refund(kPage);
  memory = take(vram, kPage);
  CHECK_ERROR(vram.allocate(1, &memory), kOutOfMemory);
  vram.refund(3 * kPage);
  memory.reset();
  CHECK_EQ(take(vram, 4 * kPage)->extents.size(), 1);
}

TEST(memory_that_is_not_a_devices_outlives_it) {
  const int file = open("/dev/null", O_RDWR | O_CLOEXEC);
  CHECK(file >= 0);
  {
    Physical imported(0, kPage);
    imported.file = file;
  }
  CHECK(fcntl(file, F_GETFD) == -1);  // closed with it
}

// --- stale pages -------------------------------------------------------------------

unsigned char first_byte_of_new_memory(Vram& vram) {
  const PhysicalRef memory = take(vram, 2 * kPage);
  const unsigned char last = byte_at(*memory, 2 * kPage - 1);
  CHECK(last == byte_at(*memory, 0));
  return last;
}

void leave(Vram& vram, unsigned char byte) {
  const PhysicalRef memory = take(vram, 2 * kPage);
  set_byte(*memory, 0, byte);
  set_byte(*memory, 2 * kPage - 1, byte);
}

TEST(new_memory_is_clean_as_left_or_poisoned) {
  Vram vram(0, 4 * kPage);
  leave(vram, 7);
  CHECK_EQ(first_byte_of_new_memory(vram), 0);
  vram.set_stale_pages(StalePages::kAsLeft);
  CHECK_EQ(first_byte_of_new_memory(vram), 0);  // what was freed before was wiped
  leave(vram, 8);
  CHECK_EQ(first_byte_of_new_memory(vram), 8);
  vram.set_stale_pages(StalePages::kPoisoned);
  CHECK_EQ(first_byte_of_new_memory(vram), kPoison);
  leave(vram, 9);
  vram.set_stale_pages(StalePages::kClean);
  CHECK_EQ(first_byte_of_new_memory(vram), 0);
}

TEST(poison_is_in_every_byte) {
  Vram vram(0, size_t{3} << 20);
  vram.set_stale_pages(StalePages::kPoisoned);
  const PhysicalRef memory = take(vram, (size_t{2} << 20) + kPage);
  std::vector<unsigned char> bytes(memory->bytes);
  CHECK(pread(memory->file, bytes.data(), bytes.size(), 0) ==
        static_cast<ssize_t>(bytes.size()));
  CHECK(std::count(bytes.begin(), bytes.end(), kPoison) ==
        static_cast<ssize_t>(bytes.size()));
}

// --- all of it ---------------------------------------------------------------------

struct Page {
  bool owned = false;
  unsigned char byte = 0;
};

// In a row, if there are so many anywhere.
std::vector<size_t> lowest_free_pages(const std::vector<Page>& model, size_t count) {
  std::vector<size_t> row;
  std::vector<size_t> any;
  for (size_t i = 0; i < model.size() && row.size() < count; ++i) {
    if (model[i].owned) {
      row.clear();
    } else {
      row.push_back(i);
      if (any.size() < count) any.push_back(i);
    }
  }
  return row.size() == count ? row : any;
}

// The model is an owner and a byte for each page.
TEST(vram_follows_a_byte_map) {
  constexpr size_t kPages = 48;
  for_seeds(40, [](std::mt19937& random) {
    Vram vram(0, kPages * kPage);
    std::vector<Page> model(kPages);
    std::vector<PhysicalRef> live;
    StalePages stale = StalePages::kClean;
    size_t charged = 0;

    const auto free_pages = [&] {
      return static_cast<size_t>(std::count_if(
          model.begin(), model.end(), [](const Page& page) { return !page.owned; }));
    };
    const auto allocate = [&] {
      const size_t bytes = 1 + random() % (kPages * kPage / 3);
      const size_t pages = whole_pages(bytes) / kPage;
      PhysicalRef memory;
      const bool room = pages * kPage + charged <= free_pages() * kPage;
      CHECK((vram.allocate(bytes, &memory) == Error::kSuccess) == room);
      if (!room) return;
      const std::vector<size_t> expected = lowest_free_pages(model, pages);
      CHECK(pages_of(*memory) == expected);
      for (size_t i = 1; i < memory->extents.size(); ++i) {
        const Extent& before = memory->extents[i - 1];
        CHECK(before.offset + before.bytes < memory->extents[i].offset);
      }
      for (const size_t page : expected) {
        model[page].owned = true;
        if (stale == StalePages::kClean) model[page].byte = 0;
        if (stale == StalePages::kPoisoned) model[page].byte = kPoison;
        CHECK_EQ(byte_at(*memory, page * kPage), model[page].byte);
      }
      live.push_back(std::move(memory));
    };
    const auto write = [&](const Physical& memory) {
      for (const size_t page : pages_of(memory)) {
        model[page].byte = static_cast<unsigned char>(random());
        set_byte(memory, page * kPage, model[page].byte);
      }
    };
    const auto release = [&](size_t index) {
      for (const size_t page : pages_of(*live[index])) {
        model[page].owned = false;
        if (stale == StalePages::kClean) model[page].byte = 0;
      }
      live.erase(live.begin() + static_cast<ptrdiff_t>(index));
    };

    for (int step = 0; step < 300; ++step) {
      const size_t choice = random() % 10;
      if (choice < 4) {
        allocate();
      } else if (choice < 7 && !live.empty()) {
        release(random() % live.size());
      } else if (choice == 7 && !live.empty()) {
        write(*live[random() % live.size()]);
      } else if (choice == 8) {
        stale = static_cast<StalePages>(random() % 3);
        vram.set_stale_pages(stale);
      } else if (charged > 0 && random() % 2) {
        vram.refund(charged);
        charged = 0;
      } else {
        const size_t bytes = random() % (4 * kPage);
        const bool room = charged + bytes <= free_pages() * kPage;
        CHECK(vram.charge(bytes) == room);
        if (room) charged += bytes;
      }
      CHECK_EQ(vram.free_bytes(), free_pages() * kPage - charged);
    }
  });
}

}  // namespace
}  // namespace hipsim
