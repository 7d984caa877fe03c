// SPDX-License-Identifier: Apache-2.0
#include "engine/copy.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "test.h"

namespace hipsim {
namespace {

using test::for_seeds;

const Place kDevicePlace{MemoryKind::kDevice, 0, 0, 0, 0};
const Place kVirtualPlace{MemoryKind::kVirtual, 0, 0, 0, 0};
const Place kRegistered{MemoryKind::kRegisteredHost, -1, 0, 0, 0};
const Place kPageable{};

Side side(const Place& place, Pitch pitch = {}, uintptr_t address = 0) {
  return {address, pitch, place};
}

// --- engines -----------------------------------------------------------------------

TEST(engines_are_chosen_by_rule) {
  struct Row {
    Place to;
    Place from;
    size_t bytes;
    bool prefer_sdma;
    CopyEngine engine;
    Direction direction;
    bool staged;
  };
  const auto sdma = CopyEngine::kSdma;
  const auto blit = CopyEngine::kBlit;
  const auto load = Direction::kHostToDevice;
  const auto store = Direction::kDeviceToHost;
  const auto within = Direction::kDeviceToDevice;
  const Row rows[] = {
      {kDevicePlace, kRegistered, 16384, false, blit, load, false},
      {kDevicePlace, kRegistered, 16385, false, sdma, load, false},
      {kVirtualPlace, kRegistered, 16385, false, sdma, load, false},
      {kRegistered, kDevicePlace, 16384, false, blit, store, false},
      {kRegistered, kDevicePlace, 16385, false, sdma, store, false},
      {kDevicePlace, kRegistered, 1, true, sdma, load, false},
      {kDevicePlace, kDevicePlace, 1 << 20, false, blit, within, false},
      {kVirtualPlace, kDevicePlace, 1, true, sdma, within, false},
      {kDevicePlace, kPageable, 16385, false, sdma, load, true},
      {kPageable, kDevicePlace, 1, false, blit, store, true},
      {kRegistered, kRegistered, 1 << 20, false, blit, Direction::kHostToHost, false},
      {kRegistered, kPageable, 1, false, blit, Direction::kHostToHost, true},
      {kPageable, kPageable, 1, true, CopyEngine::kHost, Direction::kHostToHost, false},
  };
  for (const Row& row : rows) {
    const auto plan = [&](const EngineRule& rule) {
      return plan_copy(rule, side(row.to), side(row.from), {row.bytes}, false,
                       row.prefer_sdma);
    };
    const Copy copy = plan(EngineRule{});
    CHECK(copy.engine == row.engine && copy.direction == row.direction);
    CHECK(copy.staged == row.staged && copy.shape.bytes() == row.bytes);
    CHECK(plan({16384, false}).engine == (row.engine == sdma ? blit : row.engine));
  }
  const Copy small =
      plan_copy({0, true}, side(kDevicePlace), side(kRegistered), {1}, false, false);
  CHECK(small.engine == sdma);
}

TEST(a_rectangle_is_one_packet_whatever_its_size) {
  const auto engine = [](const Place& to, const Place& from, size_t width, size_t pitch,
                         bool prefer_sdma = false) {
    return plan_copy({}, side(to, {pitch, 0}), side(from, {pitch, 0}), {width, 2}, true,
                     prefer_sdma)
        .engine;
  };
  CHECK(engine(kDevicePlace, kRegistered, 16, 64) == CopyEngine::kSdma);
  CHECK(engine(kRegistered, kVirtualPlace, 16, 64) == CopyEngine::kSdma);
  CHECK(engine(kDevicePlace, kRegistered, 2, 64) == CopyEngine::kSdma);
  CHECK(engine(kDevicePlace, kRegistered, 16, 62) == CopyEngine::kBlit);
  CHECK(engine(kDevicePlace, kDevicePlace, 16, 64) == CopyEngine::kBlit);
  CHECK(engine(kRegistered, kRegistered, 16, 64) == CopyEngine::kBlit);
  CHECK(engine(kPageable, kPageable, 16, 64) == CopyEngine::kHost);
  CHECK(engine(kDevicePlace, kDevicePlace, 2, 62, true) == CopyEngine::kSdma);
  // What is staged goes through a buffer, so that its size decides.
  CHECK(engine(kDevicePlace, kPageable, 16, 64) == CopyEngine::kBlit);
  CHECK(engine(kDevicePlace, kPageable, 16384, 65536) == CopyEngine::kSdma);
}

TEST(a_direction_has_two_ends) {
  CHECK(direction_of(kVirtualPlace, kDevicePlace) == Direction::kDeviceToDevice);
  CHECK(direction_of(kPageable, kVirtualPlace) == Direction::kDeviceToHost);
  CHECK(direction_of(kVirtualPlace, kPageable) == Direction::kHostToDevice);
  CHECK(direction_of(kRegistered, kPageable) == Direction::kHostToHost);
}

TEST(an_extent_ends_with_the_last_row) {
  const Side box = side(kPageable, {100, 1000});
  CHECK_EQ(box.extent({7}), 7);
  CHECK_EQ(box.extent({7, 3}), 207);
  CHECK_EQ(box.extent({7, 3, 2}), 1207);
}

TEST(a_box_begins_where_its_position_says) {
  CHECK_EQ(box_address(1000, 100, 10, 3, 2, 1).value(), 1000 + 1000 + 200 + 3);
  CHECK_EQ(box_address(1000, 100, 10, 0, 0, 0).value(), 1000);
  CHECK_EQ(box_address(1000, 0, 0, 5, 9, 9).value(), 1005);
  constexpr size_t kHalf = size_t{1} << 63;
  CHECK(!box_address(1, 1, 1, SIZE_MAX, 0, 0));
  CHECK(!box_address(1, kHalf, 1, 0, 2, 0));
  CHECK(!box_address(1, kHalf, 1, 0, 0, 2));
  CHECK(!box_address(1, kHalf, 2, 0, 0, 0));
  CHECK(!box_address(SIZE_MAX, 1, 1, 0, 1, 0));
}

// --- packets -----------------------------------------------------------------------

bool both_fit(Pitch pitch, const Shape& shape, uintptr_t address = 0) {
  return fits_packet(side(kDevicePlace, pitch, address), side(kRegistered, pitch),
                     shape);
}

TEST(packets_want_addresses_and_distances_of_four_bytes) {
  for (const size_t width : {1, 2, 3, 4, 6, 8, 16, 4093, 4096}) {
    CHECK(both_fit({4096, 0}, {width, 2}));
  }
  for (const uintptr_t address : {4, 8, 12, 20}) {
    CHECK(both_fit({4096, 0}, {16, 2}, address));
  }
  for (const uintptr_t address : {1, 2, 3, 6, 15}) {
    CHECK(!both_fit({4096, 0}, {16, 2}, address));
    const Side odd = side(kRegistered, {4096, 0}, address);
    CHECK(!fits_packet(side(kDevicePlace, {4096, 0}), odd, {16, 2}));
  }
  CHECK(!both_fit({4098, 0}, {16, 2}));
  CHECK(!both_fit({4096, 8194}, {16, 2, 2}));
  // A distance that is never gone does not matter.
  CHECK(both_fit({4098, 0}, {16, 1}));
  CHECK(both_fit({4096, 8194}, {16, 2, 1}));
}

TEST(one_packet_holds_rows_up_to_their_pitch) {
  constexpr size_t kElements = size_t{1} << 19;
  // More rows than a packet has slices, so that the pitch of a row is what counts.
  constexpr size_t kRows = 2048;
  for (const size_t element : {4, 8, 16}) {
    CHECK(both_fit({(kElements - 1) * element, 0}, {element, kRows}));
    CHECK(!both_fit({kElements * element, 0}, {element, kRows}));
  }
  // Widths that are odd make elements small.
  CHECK(both_fit({kElements - 4, 0}, {3, kRows}));
  CHECK(!both_fit({kElements, 0}, {3, kRows}));
  CHECK(both_fit({kElements, 0}, {6, kRows}));
  CHECK(!both_fit({2 * kElements, 0}, {6, kRows}));
  // The smallest unit of all counts: the width, an address, the other pitch.
  CHECK(!both_fit({kElements * 16 - 16, 0}, {8, kRows}));
  CHECK(!both_fit({kElements * 16 - 16, 0}, {16, kRows}, 4));
  const Side wide = side(kDevicePlace, {(kElements - 1) * 16, 0});
  CHECK(fits_packet(wide, side(kRegistered, {1024, 0}), {16, kRows}));
  CHECK(!fits_packet(wide, side(kRegistered, {1032, 0}), {16, kRows}));
}

TEST(rows_too_far_apart_go_as_slices) {
  constexpr size_t kFar = size_t{1} << 28;  // elements
  for (const size_t element : {4, 8, 16}) {
    CHECK(both_fit({(kFar - 1) * element, 0}, {element, 2047}));
    CHECK(!both_fit({(kFar - 1) * element, 0}, {element, 2048}));
    CHECK(!both_fit({kFar * element, 0}, {element, 2}));
    CHECK(both_fit({kFar * element, 0}, {element, 1}));
  }
  const Side far = side(kDevicePlace, {(kFar - 1) * 16, 0});
  const Side near = side(kRegistered, {4096, 0});
  CHECK(fits_packet(far, near, {16, 2047}) && fits_packet(near, far, {16, 2047}));
  CHECK(!fits_packet(far, near, {16, 2048}) && !fits_packet(near, far, {16, 2048}));
}

TEST(one_packet_holds_slices_up_to_their_number_and_pitch) {
  constexpr size_t kRow = size_t{1} << 19;
  constexpr size_t kSlice = size_t{1} << 28;
  CHECK(both_fit({(kRow - 1) * 16, (kSlice - 1) * 16}, {16, 2, 2047}));
  CHECK(!both_fit({(kRow - 1) * 16, (kSlice - 1) * 16}, {16, 2, 2048}));
  CHECK(!both_fit({(kRow - 1) * 16, kSlice * 16}, {16, 2, 2}));
  CHECK(!both_fit({kRow * 16, (kSlice - 1) * 16}, {16, 2, 2}));
  const Side large = side(kDevicePlace, {1024, kSlice * 16});
  const Side small = side(kRegistered, {1024, 4096});
  CHECK(!fits_packet(large, small, {16, 2, 2}) &&
        !fits_packet(small, large, {16, 2, 2}));
  CHECK(fits_packet(large, small, {16, 2, 1}));
}

// --- bytes -------------------------------------------------------------------------

bool run(const Copy& copy, bool corrupt = false) {
  std::atomic<bool> stop{false};
  return perform(copy, corrupt, stop);
}

Copy plain(void* to, const void* from, const Shape& shape, Direction direction) {
  const auto placed = [](const void* pointer) {
    Side made;
    made.place.reach = reinterpret_cast<uintptr_t>(pointer);
    return made;
  };
  return {placed(to), placed(from), shape, false, direction, CopyEngine::kBlit, false};
}

TEST(copies_move_corrupt_and_stop) {
  unsigned char source[4] = {1, 2, 3, 4};
  unsigned char loaded[4] = {};
  unsigned char stored[4] = {};
  const Copy load = plain(loaded, source, {4}, Direction::kHostToDevice);
  const Copy store = plain(stored, source, {4}, Direction::kDeviceToHost);
  CHECK(run(load) && std::memcmp(loaded, source, 4) == 0);
  CHECK(run(load, true) && run(store, true));
  for (int i = 0; i < 4; ++i) {
    CHECK(loaded[i] == static_cast<unsigned char>(~source[i]));
    CHECK(stored[i] == source[i]);
  }
  std::memset(stored, 0, 4);
  std::atomic<bool> stop{true};
  CHECK(!perform(store, false, stop) && stored[0] == 0);
}

TEST(overlapping_bytes_arrive_as_they_were) {
  unsigned char bytes[8] = {0, 1, 2, 3, 4, 5, 6, 7};
  CHECK(run(plain(bytes + 2, bytes, {6}, Direction::kDeviceToDevice)));
  const unsigned char moved[8] = {0, 1, 0, 1, 2, 3, 4, 5};
  CHECK(std::memcmp(bytes, moved, 8) == 0);
}

TEST(pitched_copies_follow_a_byte_loop) {
  for_seeds(200, [](std::mt19937& random) {
    const Shape shape{1 + random() % 9, 1 + random() % 5, 1 + random() % 4};
    const auto pitch = [&] {
      const size_t row = shape.width + random() % 7;
      return Pitch{row, row * (shape.height + random() % 3)};
    };
    const Pitch to = pitch();
    const Pitch from = pitch();
    const size_t bytes = 16 * 7 * 4;
    std::vector<unsigned char> source(bytes);
    std::generate(source.begin(), source.end(), std::ref(random));
    std::vector<unsigned char> target(bytes, 0xEE);
    std::vector<unsigned char> expected = target;
    const bool corrupt = random() % 2;
    for (size_t z = 0; z < shape.depth; ++z) {
      for (size_t y = 0; y < shape.height; ++y) {
        for (size_t x = 0; x < shape.width; ++x) {
          const unsigned char byte = source[z * from.slice + y * from.row + x];
          expected[z * to.slice + y * to.row + x] =
              corrupt ? static_cast<unsigned char>(~byte) : byte;
        }
      }
    }
    Copy copy = plain(target.data(), source.data(), shape, Direction::kHostToDevice);
    copy.to.pitch = to;
    copy.from.pitch = from;
    CHECK(run(copy, corrupt));
    CHECK(target == expected);
  });
}

}  // namespace
}  // namespace hipsim
