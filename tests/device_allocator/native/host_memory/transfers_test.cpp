// SPDX-License-Identifier: Apache-2.0
//
// Transfers beside each other, and beside whatever else uses their arenas. The thread
// sanitizer is half of each case.
#include <atomic>
#include <chrono>
#include <thread>
#include <utility>

#include "machine.h"

namespace host_memory {
namespace {

using memory::Progress;
using memory::TransferOptions;

constexpr size_t kPieces = kRange / kPiece;
constexpr int kRounds = 5;

TransferOptions with_threads(size_t threads, Progress* progress = nullptr) {
  TransferOptions options;
  options.threads = threads;
  options.progress = progress;
  return options;
}

TEST(pieces_are_prepared_while_copies_run) {
  for (const size_t threads : {1, 4, 64}) {
    Machine machine;
    Block block(machine, 1);
    const Arena arena = HostArena::make(kRange, kPiece);
    const Copies copies = block.copies(arena->data());
    machine.reset();
    machine.set_switch("copy_latency_us", 100);
    Progress progress;
    machine.back_up(copies, with_threads(threads, &progress));
    CHECK(block.is_in(copies));
    CHECK_EQ(progress.done, kRange);
    CHECK_EQ(arena->prepared(), kRange);
    CHECK_EQ(arena->registered(), kRange);
    CHECK_EQ(machine.copied("registered"), kRange);
    CHECK_EQ(machine.count(machine.calls.register_host), kPieces);
    block.wipe();
    machine.restore(copies, {}, with_threads(0, &progress));
    CHECK_EQ(progress.done, 2 * kRange);
    CHECK(block.is_there());
    // Later sleeps find the pieces ready.
    block.change(2);
    machine.back_up(copies, with_threads(threads));
    CHECK(block.is_in(copies));
    CHECK_EQ(machine.count(machine.calls.register_host), kPieces);
  }
}

TEST(pieces_of_huge_pages) {
  constexpr size_t kHuge = size_t{2} << 20;
  Machine machine;
  Block block(machine, 1);
  const Arena arena = HostArena::make(3 * kHuge - kRange, kHuge);
  Copies copies;
  for (size_t at = 0; at < arena->bytes(); at += kRange) {
    copies = copies + block.copies(arena->data() + at);
  }
  for (int round = 0; round < kRounds; ++round) {
    {
      const Beside reader([&] { CHECK(arena->huge() <= arena->prepared()); });
      machine.back_up(copies, with_threads(3));
    }
    CHECK(block.is_in(copies));
    CHECK_EQ(arena->huge() % kHuge, 0);
    CHECK_EQ(arena->registered(), arena->bytes());
    release(*arena);
    CHECK_EQ(arena->huge(), 0);
  }
}

void go_round(Machine& machine, Block& block, HostArena& arena, unsigned seed) {
  const Copies copies = block.copies(arena.data());
  machine.back_up(copies, with_threads(3));
  CHECK(block.is_in(copies));
  block.wipe();
  machine.restore(copies);
  CHECK(block.is_there());
  release(arena);
  block.change(seed);
}

TEST(two_transfers_on_two_arenas) {
  Machine machine;
  const auto user = [&](unsigned seed) {
    Block block(machine, seed);
    const Arena arena = HostArena::make(kRange, kPiece);
    for (int round = 0; round < kRounds; ++round) {
      go_round(machine, block, *arena, ++seed);
    }
  };
  at_once([&] { user(100); }, [&] { user(200); });
}

// Each piece holds a half of either block's copies, and both find it cold.
TEST(two_transfers_on_one_arena) {
  Machine machine;
  Block first(machine, 1);
  Block second(machine, 2);
  const Arena arena = HostArena::make(2 * kRange, kPiece);
  const size_t copies_each = 2 * kPieces;
  const Copies of_first = first.copies(arena->data(), copies_each, kPiece);
  const Copies of_second =
      second.copies(arena->data() + kPiece / 2, copies_each, kPiece);
  for (int round = 0; round < kRounds; ++round) {
    machine.reset();
    Progress progress;
    at_once([&] { machine.back_up(of_first, with_threads(2, &progress)); },
            [&] { machine.back_up(of_second, with_threads(2, &progress)); });
    CHECK(first.is_in(of_first) && second.is_in(of_second));
    CHECK_EQ(progress.done, 2 * kRange);
    CHECK_EQ(machine.count(machine.calls.register_host), copies_each);
    CHECK_EQ(arena->registered(), arena->bytes());
    first.wipe();
    second.wipe();
    at_once([&] { machine.restore(of_first); }, [&] { machine.restore(of_second); });
    CHECK(first.is_there() && second.is_there());
    release(*arena);
  }
}

// What is staged for the one becomes registered for the other meanwhile.
TEST(a_transfer_in_beside_one_out_of_the_same_pieces) {
  Machine machine;
  Block first(machine, 1);
  Block second(machine, 2);
  const Arena arena = HostArena::make(2 * kRange, kPiece);
  const Copies of_first = first.copies(arena->data(), 2 * kPieces, kPiece);
  const Copies of_second =
      second.copies(arena->data() + kPiece / 2, 2 * kPieces, kPiece);
  for (int round = 0; round < kRounds; ++round) {
    machine.set_switch("max_registration_bytes", 1);
    machine.back_up(of_first + of_second, with_threads(2));
    CHECK(arena->registered() == 0 && arena->prepared() == arena->bytes());
    CHECK(!arena->registration_error().empty());
    machine.set_switch("max_registration_bytes", 0);
    first.wipe();
    second.change(10 + static_cast<unsigned>(round));
    Progress in;
    Progress out;
    at_once([&] { machine.restore(of_first, {}, with_threads(0, &in)); },
            [&] { machine.back_up(of_second, with_threads(2, &out)); });
    CHECK(first.is_there() && second.is_in(of_second));
    CHECK_EQ(in.done, kRange);
    CHECK_EQ(out.done, kRange);
    CHECK_EQ(arena->registered(), arena->bytes());
    CHECK(arena->registration_error().empty());
    release(*arena);
  }
}

TEST(fills_beside_copies) {
  for (const bool registers : {true, false}) {
    Machine machine;
    Block kept(machine, 1);
    Block lost(machine, 2);
    const Arena arena = HostArena::make(kRange, kPiece);
    const Copies copies = kept.copies(arena->data());
    machine.set_switch("max_registration_bytes", registers ? 0 : 1);
    machine.back_up(copies);
    CHECK_EQ(arena->registered(), registers ? kRange : 0);
    kept.wipe();
    machine.set_switch("copy_latency_us", 200);
    Progress progress;
    machine.restore(copies, lost.fills(), with_threads(0, &progress));
    CHECK_EQ(progress.done, kRange);
    CHECK(kept.is_there() && !lost.is_there());
    Bytes found(kRange, 1);
    machine.back_up(lost.copies(reinterpret_cast<char*>(found.data())));
    CHECK(found == Bytes(kRange, 0));
  }
}

TEST(one_transfer_of_two_devices) {
  for (const bool registers : {true, false}) {
    Machine machine;
    Block first(machine, 1, 0);
    Block second(machine, 2, 1);
    const Arena arena = HostArena::make(2 * kRange, kPiece);
    const Copies copies =
        first.copies(arena->data()) + second.copies(arena->data() + kRange);
    machine.set_switch("max_registration_bytes", registers ? 0 : 1);
    machine.back_up(copies, with_threads(3));
    CHECK(first.is_in({copies[0]}) && second.is_in({copies[1]}));
    first.wipe();
    second.wipe();
    machine.restore(copies);
    CHECK(first.is_there() && second.is_there());
  }
}

TEST(progress_and_reports_beside_a_transfer) {
  Machine machine;
  Block block(machine, 1);
  const Arena arena = HostArena::make(kRange, kPiece);
  const Copies copies = block.copies(arena->data());
  for (int round = 0; round < kRounds; ++round) {
    Progress progress;
    TransferOptions options = with_threads(3, &progress);
    options.window = 4 * kPiece;
    size_t before = 0;
    {
      const Beside reader([&] {
        const size_t done = progress.done;
        CHECK(before <= done && done <= kRange);
        before = done;
        const size_t registered = arena->registered();
        CHECK(registered <= arena->prepared());
        CHECK(arena->missing(0, kRange) <= kRange - registered);
        CHECK(arena->registration_error().empty());
      });
      machine.back_up(copies, options);
    }
    CHECK(block.is_in(copies));
    CHECK_EQ(arena->missing(0, kRange), 0);
    release(*arena);
  }
}

TEST(arenas_come_and_go_beside_a_transfer) {
  Machine machine;
  Block block(machine, 1);
  Block other(machine, 2);
  const Arena arena = HostArena::make(kRange, kPiece);
  const Copies copies = block.copies(arena->data());
  const Beside others([&] {
    const Arena passing = HostArena::make(kRange / 2, 2 * kPiece);
    const auto host = reinterpret_cast<uintptr_t>(passing->data());
    machine.back_up({{other.address(), kRange / 2, host}}, with_threads(2));
    CHECK(other.is_in({{other.address(), kRange / 2, host}}));
  });
  for (int round = 0; round < kRounds; ++round) {
    machine.back_up(copies, with_threads(2));
    CHECK(block.is_in(copies));
    release(*arena);
  }
}

// Nobody but the transfer has the arena any more.
TEST(an_arena_lives_as_long_as_its_transfer) {
  Machine machine;
  Block block(machine, 1);
  machine.set_switch("copy_latency_us", 5'000);
  Arena arena = HostArena::make(kRange, kPiece);
  const std::weak_ptr<HostArena> known = arena;
  Progress progress;
  std::thread transfer([&, copies = block.copies(arena->data())] {
    machine.back_up(copies, with_threads(2, &progress));
  });
  while (arena->prepared() == 0) std::this_thread::yield();
  arena.reset();
  transfer.join();
  CHECK(known.expired());
  CHECK_EQ(progress.done, kRange);
  CHECK_EQ(machine.stat("registered_ranges"), 0);
}

// --- giving back beside transfers
// ------------------------------------------------------

// A transfer whose copies are under way until it is told to end.
class HeldTransfer {
 public:
  HeldTransfer(Machine& machine, const Copies& copies) : machine_(machine) {
    const uint64_t waits = machine.count(machine.calls.synchronize_stream);
    machine.set_switch("copy_latency_us", 60'000'000);
    thread_ = std::thread([this, copies] {
      machine_.back_up(copies, with_threads(2, &progress_));
      is_over_ = true;
    });
    while (machine.count(machine.calls.synchronize_stream) == waits) {
      std::this_thread::yield();
    }
  }
  ~HeldTransfer() { end(); }

  void end() {
    machine_.reset();
    if (thread_.joinable()) thread_.join();
  }
  bool is_over() const { return is_over_; }
  uint64_t done() const { return progress_.done; }

 private:
  Machine& machine_;
  Progress progress_;
  std::atomic<bool> is_over_ = false;
  std::thread thread_;
};

// Unregistered, here and there, because the driver waits for all work before it gives a
// registration up.
TEST(release_waits_for_the_transfers_of_its_own_arena) {
  Machine machine;
  Block block(machine, 1);
  const Arena arena = HostArena::make(kRange, kRange / 2);
  machine.set_switch("max_registration_bytes", 1);
  HeldTransfer transfer(machine, block.copies(arena->data()));
  std::atomic<bool> is_released = false;
  std::thread releasing([&] {
    release(*arena);
    is_released = true;
  });
  // Long enough for a release that does not wait.
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  const bool has_waited = !is_released;
  transfer.end();
  releasing.join();
  CHECK(has_waited);
  CHECK_EQ(transfer.done(), kRange);
  CHECK_EQ(arena->prepared(), 0);
}

TEST(release_beside_a_transfer_of_another_arena) {
  Machine machine;
  Block block(machine, 1);
  const Arena arena = HostArena::make(kRange, kRange / 2);
  const Arena other = HostArena::make(kRange, kPiece);
  machine.set_switch("max_registration_bytes", 1);
  machine.back_up(block.copies(other->data()));
  machine.set_switch("max_registration_bytes", 0);
  const Copies copies = block.copies(arena->data());
  {
    HeldTransfer transfer(machine, copies);
    release(*other);
    CHECK(!transfer.is_over());
  }
  CHECK(block.is_in(copies));
}

TEST(a_piece_that_was_given_back_is_empty) {
  Machine machine;
  Block block(machine, 1);
  const Arena arena = HostArena::make(kRange - 100, kPiece);
  const Copies copies = {
      {block.address(), kRange - 100, reinterpret_cast<uintptr_t>(arena->data())}};
  machine.back_up(copies);
  // Whole pieces only, and the last one counts with its end.
  CHECK_EQ(arena->release(1, 3 * kPiece), 2 * kPiece);
  CHECK_EQ(arena->release(kRange - 2 * kPiece, 2 * kPiece - 100), 2 * kPiece - 100);
  CHECK_EQ(arena->prepared(), kRange - 100 - (4 * kPiece - 100));
  CHECK_EQ(arena->registered(), arena->prepared());
  CHECK_EQ(arena->missing(0, 3 * kPiece), 2 * kPiece);
  for (const size_t offset : {kPiece, 2 * kPiece, kRange - kPiece}) {
    CHECK_EQ(arena->data()[offset], 0);
  }
  CHECK(block.is_in(
      {{block.address(), kPiece, reinterpret_cast<uintptr_t>(arena->data())}}));
  machine.back_up(copies);
  CHECK(block.is_in(copies));
}

}  // namespace
}  // namespace host_memory
