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

TEST(a_rectangle_goes_by_its_packets_whatever_its_size) {
  const auto engine = [](const Place& to, const Place& from, size_t width, size_t pitch,
                         bool prefer_sdma = false) {
    return plan_copy({}, side(to, {pitch, 0}), side(from, {pitch, 0}), {width, 2}, true,
                     prefer_sdma)
        .engine;
  };
  CHECK(engine(kDevicePlace, kRegistered, 16, 64) == CopyEngine::kSdma);
  CHECK(engine(kRegistered, kVirtualPlace, 16, 64) == CopyEngine::kSdma);
  CHECK(engine(kDevicePlace, kRegistered, 2, 64) == CopyEngine::kSdma);
  CHECK(engine(kDevicePlace, kRegistered, 16, 62) == CopyEngine::kSdma);
  CHECK(engine(kDevicePlace, kRegistered, 15, size_t{1} << 31) == CopyEngine::kBlit);
  CHECK(engine(kDevicePlace, kDevicePlace, 16, 64) == CopyEngine::kBlit);
  CHECK(engine(kRegistered, kRegistered, 16, 64) == CopyEngine::kBlit);
  CHECK(engine(kPageable, kPageable, 16, 64) == CopyEngine::kHost);
  CHECK(engine(kDevicePlace, kDevicePlace, 2, 62, true) == CopyEngine::kSdma);
  // The caller's word makes no packet hold it.
  CHECK(engine(kDevicePlace, kDevicePlace, 15, size_t{1} << 31, true) ==
        CopyEngine::kBlit);
  // What is staged goes through a buffer, so that its size decides.
  CHECK(engine(kDevicePlace, kPageable, 16, 64) == CopyEngine::kBlit);
  CHECK(engine(kDevicePlace, kPageable, 16384, 65536) == CopyEngine::kSdma);
}

TEST(a_copy_knows_its_packets) {
  const auto count = [](const Place& to, const Place& from, const Shape& shape,
                        bool pitched, bool sdma = true, bool prefer_sdma = false) {
    return plan_copy({0, sdma}, side(to, {64, 0}), side(from, {66, 0}), shape, pitched,
                     prefer_sdma)
        .packets;
  };
  CHECK_EQ(count(kDevicePlace, kRegistered, {16, 3}, true), 3);
  CHECK_EQ(count(kRegistered, kVirtualPlace, {16, 3}, true), 3);
  // Linear copies, kernels, and what goes through a buffer have none.
  CHECK_EQ(count(kDevicePlace, kRegistered, {48}, false), 0);
  CHECK_EQ(count(kDevicePlace, kRegistered, {16, 3}, true, false), 0);
  CHECK_EQ(count(kDevicePlace, kDevicePlace, {16, 3}, true), 0);
  CHECK_EQ(count(kDevicePlace, kPageable, {16, 3}, true), 0);
  CHECK_EQ(count(kDevicePlace, kDevicePlace, {16, 3}, true, true, true), 3);
}

TEST(many_rows_at_distances_without_packets_are_a_kernel) {
  const auto plan = [](const Place& to, const Shape& shape, size_t pitch, size_t most,
                       bool prefer_sdma = false) {
    EngineRule rule;
    rule.max_row_copies = most;
    return plan_copy(rule, side(to, {pitch, pitch * shape.height}),
                     side(to.on_device() ? kRegistered : kDevicePlace, {64, 0}), shape,
                     true, prefer_sdma);
  };
  for (const Place& to : {kDevicePlace, kRegistered}) {
    CHECK_EQ(plan(to, {16, 9}, 66, 9).packets, 9);
    CHECK_EQ(plan(to, {16, 3, 3}, 66, 9).packets, 9);
    CHECK_EQ(plan(to, {16, 1 << 14}, 66, 0).packets, 1 << 14);
    for (const Shape& shape : {Shape{16, 10}, Shape{16, 5, 2}}) {
      const Copy copy = plan(to, shape, 66, 9);
      CHECK(copy.engine == CopyEngine::kBlit && copy.packets == 0);
    }
    // What has packets for its distances may take more of them.
    CHECK_EQ(plan(to, {16, 1 << 18}, 64, 9).packets, 16);
    CHECK_EQ(plan(to, {16, 10}, 66, 9, true).packets, 10);
  }
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

constexpr size_t kRowPitch = size_t{1} << 19;    // elements
constexpr size_t kSlicePitch = size_t{1} << 28;  // elements
constexpr size_t kRowElements = size_t{1} << 14;
constexpr size_t kRows = size_t{1} << 14;
constexpr size_t kSlices = size_t{1} << 11;

size_t packets(Pitch to, Pitch from, const Shape& shape, uintptr_t to_address = 0,
               uintptr_t from_address = 0) {
  const size_t load = count_packets(side(kDevicePlace, to, to_address),
                                    side(kRegistered, from, from_address), shape);
  const size_t store = count_packets(side(kRegistered, from, from_address),
                                     side(kDevicePlace, to, to_address), shape);
  CHECK_EQ(load, store);
  return load;
}

size_t packets(Pitch both, const Shape& shape, uintptr_t address = 0) {
  return packets(both, both, shape, address, 0);
}

TEST(packets_want_addresses_of_four_bytes) {
  for (const size_t width : {1, 2, 3, 4, 6, 8, 16, 4093, 4096}) {
    CHECK_EQ(packets({4096, 0}, {width, 2}), 1);
  }
  for (const uintptr_t address : {4, 8, 12, 20}) {
    CHECK_EQ(packets({4096, 0}, {16, 2}, address), 1);
  }
  for (const uintptr_t address : {1, 2, 3, 6, 15}) {
    CHECK_EQ(packets({4096, 0}, {16, 2}, address), 0);
  }
}

TEST(rows_at_distances_that_packets_do_not_have_go_one_by_one) {
  CHECK_EQ(packets({4098, 0}, {16, 1}), 1);
  CHECK_EQ(packets({4098, 0}, {16, 7}), 7);
  CHECK_EQ(packets({4096, 0}, {4098, 0}, {16, 7}), 7);
  CHECK_EQ(packets({4096, 8194}, {16, 2, 5}), 10);
  // A copy of one row may begin anywhere.
  CHECK_EQ(packets({4098, 0}, {16, 7}, 1), 7);
}

TEST(elements_come_from_the_width_and_both_distances) {
  // In boxes a distance of rows has as many bits as there are.
  for (const size_t element : {4, 8, 16}) {
    const size_t most = kRowPitch * element;
    CHECK_EQ(packets({most, 2 * most}, {element, 2, 2}), 1);
    CHECK_EQ(packets({most + element, 2 * most + 2 * element}, {element, 2, 2}), 0);
    CHECK_EQ(packets({most, 2 * most}, {element / 2, 2, 2}), 0);
    CHECK_EQ(packets({most, 2 * most}, {1024, 2048}, {element, 2, 2}), 1);
    const size_t half = element / 2;
    const Pitch finer{1024 + half, 2 * (1024 + half)};
    CHECK_EQ(packets({most, 2 * most}, finer, {element, 2, 2}), half % 4 == 0 ? 0 : 4);
    // What an address is a multiple of does not count.
    CHECK_EQ(packets({most, 2 * most}, {element, 2, 2}, 4), 1);
  }
  CHECK_EQ(packets({kRowPitch, 0}, {3, 2}), 1);
}

TEST(a_plane_with_rows_too_far_apart_goes_as_slices) {
  CHECK_EQ(packets({kRowPitch, 0}, {4, 2 * kSlices}), 1);
  CHECK_EQ(packets({kRowPitch + 4, 0}, {4, 2 * kSlices}), 2);
  // One side is enough.
  CHECK_EQ(packets({kRowPitch + 4, 0}, {4, 0}, {4, 2 * kSlices + 1}), 3);
  for (const size_t element : {4, 8, 16}) {
    CHECK_EQ(packets({kSlicePitch * element, 0}, {element, 2}), 1);
    CHECK_EQ(packets({(kSlicePitch + 1) * element, 0}, {element, 2}), 0);
    CHECK_EQ(packets({kSlicePitch * element, 0}, {element / 2, 2}), 0);
    CHECK_EQ(packets({kSlicePitch * element, 0}, {4096, 0}, {element, 2}), 1);
    CHECK_EQ(packets({(kSlicePitch + 1) * element, 0}, {4096, 0}, {element, 2}), 0);
    // Who has one row goes no distance.
    CHECK_EQ(packets({(kSlicePitch + 1) * element, 0}, {element, 1}), 1);
  }
  CHECK_EQ(packets({4 * kSlicePitch, 0}, {3, 2}), 0);
}

TEST(distances_of_slices_have_a_limit_where_there_are_slices) {
  const Pitch far{1024, (kSlicePitch + 1) * 16};
  CHECK_EQ(packets({1024, kSlicePitch * 16}, {16, 2, 2}), 1);
  CHECK_EQ(packets(far, {16, 2, 2}), 0);
  CHECK_EQ(packets(far, {1024, 4096}, {16, 2, 2}), 0);
  CHECK_EQ(packets(far, {1024, 4096}, {16, 2, 1}), 1);
}

TEST(what_is_larger_than_a_packet_takes_several) {
  CHECK_EQ(packets({64, 64 * kRows}, {4, kRows}), 1);
  CHECK_EQ(packets({64, 64 * kRows}, {4, kRows + 1}), 2);
  CHECK_EQ(packets({64, 128}, {4, 2, kSlices}), 1);
  CHECK_EQ(packets({64, 128}, {4, 2, kSlices + 1}), 2);
  CHECK_EQ(packets({64, 64 * (kRows + 1)}, {4, kRows + 1, kSlices + 1}), 4);
  for (const size_t element : {4, 8, 16}) {
    const size_t most = kRowElements * element;
    const size_t pitch = most + element;  // and no larger element
    CHECK_EQ(packets({pitch, 0}, {most, 2}), 1);
    CHECK_EQ(packets({pitch, 0}, {most + element, 2}), 2);
    CHECK_EQ(packets({2 * pitch + element, 0}, {2 * most, 2}), 2);
    CHECK_EQ(packets({2 * pitch + element, 0}, {2 * most + element, 2}), 3);
  }
  // The strip that is left counts in smaller elements.
  CHECK_EQ(packets({kRowElements * 32, 0}, {kRowElements * 16 + 3, 2}), 2);
  CHECK_EQ(packets({kRowElements * 32, 0}, {kRowElements, 2}), 1);
  CHECK_EQ(packets({kRowElements * 32, 0}, {kRowElements - 1, 2}), 1);
  CHECK_EQ(packets({kRowElements * 32, 0}, {kRowElements + 1, 2}), 2);
}

TEST(strips_of_a_row_cover_it) {
  for_seeds(300, [](std::mt19937& random) {
    const size_t element = size_t{4} << random() % 3;
    const size_t width = 1 + random() % (element * kRowElements * 5);
    const size_t pitch = (width / element + 1) * element;
    // The model takes what the packet's field allows until nothing is left.
    const auto least = [&](size_t distance) {
      size_t strips = 0;
      for (size_t left = width; left > 0; ++strips) {
        size_t unit = 16;
        while (distance % unit != 0) unit /= 2;
        size_t exact = unit;
        while (left % exact != 0) exact /= 2;
        left = left / exact <= kRowElements
                   ? 0
                   : left - std::min(left / unit, kRowElements) * unit;
      }
      return strips;
    };
    CHECK_EQ(packets({pitch, 0}, {width, 2}), least(pitch));
    // A slice of its own goes no distance.
    CHECK_EQ(packets({pitch, 0}, {width, 1}), least(pitch > kRowPitch ? 0 : pitch));
  });
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
