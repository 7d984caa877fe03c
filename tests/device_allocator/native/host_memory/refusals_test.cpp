// SPDX-License-Identifier: Apache-2.0
//
// What the driver and the machine refuse, one thing after the other: what was copied is
// right all the same, or nothing is lost for the next try.
#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <functional>
#include <new>

#include "injection.h"
#include "machine.h"
#include "memory/host_pages.h"
#include "memory/leftovers.h"

namespace host_memory {
namespace {

using memory::Leftovers;
using memory::Progress;
using memory::TransferOptions;

constexpr size_t kPieces = 8;
constexpr size_t kLarge = kRange / kPieces;

TransferOptions with_threads(size_t threads) {
  TransferOptions options;
  options.threads = threads;
  return options;
}

// A block with an arena of its own.
struct Backup {
  explicit Backup(Machine& machine, size_t piece = kLarge)
      : machine(machine),
        block(machine, 1),
        arena(HostArena::make(kRange, piece)),
        copies(block.copies(arena->data())) {
    machine.reset();
  }

  void out(size_t threads = 3) {
    machine.back_up(copies, with_threads(threads));
    CHECK(block.is_in(copies));
    CHECK_EQ(arena->prepared(), kRange);
  }

  void in() {
    block.wipe();
    machine.restore(copies);
    CHECK(block.is_there());
  }

  Machine& machine;
  Block block;
  Arena arena;
  const Copies copies;
};

// --- registrations
// ---------------------------------------------------------------------

TEST(each_registration_refused) {
  Machine machine;
  Backup backup(machine);
  for (uint64_t nth = 1; nth <= kPieces; ++nth) {
    machine.reset();
    machine.fail(machine.calls.register_host, nth);
    backup.out();
    CHECK_EQ(backup.arena->registered(), kRange - kLarge);
    CHECK(backup.arena->registration_error().find(machine.calls.register_host) !=
          std::string::npos);
    CHECK_EQ(machine.copied("registered"), kRange - kLarge);
    CHECK_EQ(machine.copied("allocated"), kLarge);
    CHECK_EQ(machine.copied("pageable"), 0);
    backup.in();
    // The next transfer tries that piece again, and no other.
    const uint64_t asked = machine.count(machine.calls.register_host);
    backup.block.change(static_cast<unsigned>(nth));
    backup.out();
    CHECK_EQ(machine.count(machine.calls.register_host), asked + 1);
    CHECK_EQ(backup.arena->registered(), kRange);
    CHECK(backup.arena->registration_error().empty());
    release(*backup.arena);
  }
}

TEST(every_registration_refused) {
  Machine machine;
  Backup backup(machine, kPiece);
  machine.set_switch("max_registration_bytes", 1);
  backup.out(1);
  CHECK_EQ(machine.count(machine.calls.register_host), 2);
  CHECK_EQ(machine.count(machine.calls.allocate_host), 8);
  CHECK_EQ(machine.stat("host_allocations"), 0);
  CHECK_EQ(machine.copied("allocated"), kRange);
  backup.in();
  // Several threads may have asked already when the second refusal comes.
  machine.reset();
  machine.set_switch("max_registration_bytes", 1);
  backup.out(4);
  CHECK(machine.count(machine.calls.register_host) <= 2 + 3);
  CHECK_EQ(backup.arena->registered(), 0);
}

// --- the ring
// --------------------------------------------------------------------------

TEST(slots_of_what_the_machine_locks) {
  // What may be locked, and the slots that come of it: of a chunk's size, or of half of
  // that, which is the least.
  struct Limit {
    size_t bytes;
    uint64_t most;
  };
  constexpr size_t kHalf = kChunk / 2;
  for (const Limit& limit : {Limit{kHalf, 1}, Limit{kChunk, 1}, Limit{3 * kHalf, 2},
                             Limit{5 * kHalf, 3}, Limit{2 * kRange, 4}}) {
    Machine machine;
    Backup backup(machine, kChunk);
    machine.set_switch("max_locked_bytes", static_cast<int64_t>(limit.bytes));
    machine.set_switch("max_registration_bytes", 1);
    machine.set_switch("copy_latency_us", 20);
    backup.out();
    CHECK_EQ(machine.copied("allocated"), kRange);
    const uint64_t slots = machine.count(machine.calls.free_host);
    CHECK_EQ(slots, limit.most);
    backup.in();
    CHECK_EQ(machine.stat("host_allocations"), 0);
  }
}

TEST(no_slot_at_all) {
  Machine machine;
  Backup backup(machine);
  machine.set_switch("max_locked_bytes", 1);
  backup.out();
  CHECK_EQ(machine.copied("pageable"), kRange);
  machine.reset();
  machine.set_switch("max_locked_bytes", 1);
  backup.in();
  CHECK_EQ(machine.copied("allocated") + machine.copied("registered"), 0);
  CHECK_EQ(backup.arena->registered(), 0);
}

TEST(each_slot_refused) {
  Machine machine;
  Backup backup(machine, kChunk);
  for (uint64_t nth = 1; nth <= 9; ++nth) {
    machine.reset();
    machine.set_switch("max_registration_bytes", 1);
    machine.fail(machine.calls.allocate_host, nth);
    backup.out();
    CHECK_EQ(machine.copied("allocated"), kRange);
    backup.in();
  }
}

// --- giving back
// -----------------------------------------------------------------------

TEST(each_unregistration_refused) {
  Machine machine;
  Backup backup(machine);
  for (uint64_t nth = 1; nth <= kPieces; ++nth) {
    machine.reset();
    backup.out();
    machine.fail(machine.calls.unregister_host, nth, 1);
    CHECK_EQ(backup.arena->release(0, kRange), kRange - kLarge);
    CHECK_EQ(backup.arena->registered(), kLarge);
    CHECK_EQ(backup.arena->prepared(), kLarge);
    CHECK_EQ(machine.stat("registered_bytes"), kLarge);
    backup.out();
    backup.in();
    release(*backup.arena);
  }
}

TEST(an_arena_that_stays_registered) {
  for (uint64_t nth = 1; nth <= kPieces; ++nth) {
    Machine machine;
    Block block(machine, 1);
    Arena arena = HostArena::make(kRange, kLarge);
    machine.back_up(block.copies(arena->data()));
    machine.fail(machine.calls.unregister_host, nth, 1);
    arena.reset();
    CHECK_EQ(Leftovers::of_process().count(), 1);
    CHECK_EQ(machine.stat("registered_bytes"), kLarge);
    machine.settle();
    CHECK_EQ(machine.stat("registered_ranges"), 0);
  }
}

// --- the system
// ------------------------------------------------------------------------

TEST(threads_that_do_not_start) {
  for (const bool registers : {true, false}) {
    for (int count = 0; count < 4; ++count) {
      Machine machine;
      Backup backup(machine, kPiece);
      machine.set_switch("max_registration_bytes", registers ? 0 : 1);
      Injection injection;
      injection.let_threads_start(count);
      backup.out(3);
      backup.in();
      // Three to prepare, and for what is staged one a slot.
      CHECK(injection.count() >= (registers && count >= 3 ? 0 : 1));
    }
  }
}

TEST(addresses_that_are_not_to_be_had) {
  const auto is_refused = [](size_t bytes) {
    try {
      (void)HostArena::make(bytes);
      return false;
    } catch (const std::bad_alloc&) {
      return true;
    }
  };
  Machine machine;
  for (const size_t bytes : {SIZE_MAX, SIZE_MAX - (size_t{1} << 20), SIZE_MAX / 2}) {
    CHECK(is_refused(bytes));
  }
  Injection injection;
  injection.let_addresses_be_had(0);
  CHECK(is_refused(kRange));
  CHECK_EQ(injection.count(), 1);
}

// The advice that older kernels do not know. What is ready keeps what it holds.
TEST(pages_that_are_written_to_be_had) {
  Machine machine;
  Block first(machine, 1);
  Block second(machine, 2);
  const Arena arena = HostArena::make(2 * kRange, kPiece);
  const size_t count = 2 * kRange / kPiece;
  const Copies of_first = first.copies(arena->data(), count, kPiece);
  const Copies of_second = second.copies(arena->data() + kPiece / 2, count, kPiece);
  Injection injection;
  injection.let_pages_be_populated(0, EINVAL);
  machine.set_switch("max_registration_bytes", 1);
  machine.back_up(of_first);
  CHECK_EQ(injection.count(), static_cast<int>(count));
  // Ready, and refused again beside copies that go there.
  for (int round = 0; round < 3; ++round) {
    at_once([&] { machine.back_up(of_first, with_threads(2)); },
            [&] { machine.back_up(of_second, with_threads(2)); });
    CHECK(first.is_in(of_first) && second.is_in(of_second));
  }
  machine.set_switch("max_registration_bytes", 0);
  machine.back_up(of_second);
  CHECK(first.is_in(of_first) && second.is_in(of_second));
  release(*arena);
  at_once([&] { machine.back_up(of_first, with_threads(2)); },
          [&] { machine.back_up(of_second, with_threads(2)); });
  CHECK(first.is_in(of_first) && second.is_in(of_second));
}

TEST(pages_that_are_not_to_be_had) {
  for (const size_t threads : {1, 3}) {
    for (int count = 0; count < static_cast<int>(kPieces); ++count) {
      Machine machine;
      Backup backup(machine);
      {
        Injection injection;
        injection.let_pages_be_populated(count, ENOMEM);
        bool is_told = false;
        try {
          machine.back_up(backup.copies, with_threads(threads));
        } catch (const memory::HostMemoryError&) {
          is_told = true;
        }
        CHECK(is_told);
      }
      CHECK(backup.arena->prepared() < kRange);
      CHECK_EQ(machine.stat("streams"), 0);
      backup.out();
      backup.in();
    }
  }
}

// --- the driver, call by call
// ----------------------------------------------------------

enum class Way { kRegistered, kStaged };

// Transfers in which one call after the other fails, in whatever thread it is made.
// They end, nothing is left of them, and the next one is right.
class FailingTransfers {
 public:
  explicit FailingTransfers(Way way)
      : way_(way),
        backup_(machine_, kRange / 3 / memory::page_bytes() * memory::page_bytes()),
        other_(machine_, 2) {}

  void out() {
    const auto back_up = [&] { machine_.back_up(backup_.copies, with_threads(2)); };
    const auto is_right = [&] { return backup_.block.is_in(backup_.copies); };
    fail_each_call([&] { release(*backup_.arena); }, back_up, is_right);
  }

  void in() {
    const auto restore = [&] { machine_.restore(backup_.copies, other_.fills()); };
    const auto is_right = [&] { return backup_.block.is_there(); };
    fail_each_call([&] { backup_.block.wipe(); }, restore, is_right);
  }

 private:
  template <typename Prepare, typename Transfer, typename IsRight>
  void fail_each_call(Prepare prepare, Transfer transfer, IsRight is_right) {
    const Calls& calls = machine_.calls;
    begin();
    backup_.out();
    for (const char* call :
         {calls.enter, calls.synchronize_device, calls.create_stream,
          calls.synchronize_stream, calls.destroy_stream, calls.copy_out, calls.copy_in,
          calls.fill, calls.allocate_host, calls.free_host}) {
      bool was_made = true;
      for (uint64_t nth = 1; was_made; ++nth) {
        prepare();
        begin();
        machine_.fail(call, nth, 999);
        const bool is_well = ends_well(transfer);
        was_made = machine_.stat("pending_faults") == 0;
        begin();
        machine_.settle();
        CHECK_EQ(machine_.stat("streams"), 0);
        CHECK_EQ(machine_.stat("host_allocations"), 0);
        if (is_well) CHECK(is_right());
        transfer();
        CHECK(is_right());
      }
    }
  }

  void begin() {
    machine_.reset();
    machine_.set_switch("max_registration_bytes", way_ == Way::kStaged ? 1 : 0);
  }

  static bool ends_well(const std::function<void()>& transfer) {
    try {
      transfer();
      return true;
    } catch (const gpu::DriverError&) {
      return false;
    }
  }

  const Way way_;
  Machine machine_;
  Backup backup_;
  Block other_;
};

TEST(each_call_of_a_transfer_out_fails) { FailingTransfers(Way::kRegistered).out(); }

TEST(each_call_of_a_staged_transfer_out_fails) { FailingTransfers(Way::kStaged).out(); }

TEST(each_call_of_a_transfer_in_fails) { FailingTransfers(Way::kRegistered).in(); }

TEST(each_call_of_a_staged_transfer_in_fails) { FailingTransfers(Way::kStaged).in(); }

}  // namespace
}  // namespace host_memory
