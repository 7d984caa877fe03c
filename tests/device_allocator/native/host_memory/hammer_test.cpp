// SPDX-License-Identifier: Apache-2.0
#include <array>
#include <chrono>
#include <random>

#include "machine.h"
#include "memory/host_pages.h"

namespace host_memory {
namespace {

using namespace std::chrono_literals;

constexpr size_t kUsers = 3;
constexpr size_t kArenas = 2;
constexpr auto kTime = 700ms;

// Several users of two arenas, each with places of its own in all pieces of both, and a
// third arena that somebody gives back all the time. Whatever fails is tried again.
class Hammer {
 public:
  Hammer() {
    const size_t bytes = kPiece / kShare * kRange;
    for (unsigned user = 0; user < kUsers; ++user) {
      blocks_.push_back(std::make_unique<Block>(machine_, user));
    }
    for (Arena& arena : arenas_) arena = HostArena::make(bytes, kPiece);
    passing_ = HostArena::make(bytes, kPiece);
  }

  void run() {
    const auto end = std::chrono::steady_clock::now() + kTime;
    const Beside faults([=] { disturb(end); });
    const Beside releases([this] {
      (void)passing_->release(0, passing_->bytes());
      std::this_thread::sleep_for(2ms);
    });
    std::vector<std::thread> threads;
    for (unsigned user = 0; user < kUsers; ++user) {
      threads.emplace_back([=] { use(user, end); });
    }
    for (std::thread& thread : threads) thread.join();
    CHECK(rounds_ >= kUsers);
  }

 private:
  // As often as it takes: an error is one of those that were asked for.
  template <typename Body>
  void try_hard(Body body) {
    for (;;) {
      try {
        body();
        return;
      } catch (const gpu::DriverError& error) {
        CHECK_EQ(error.status.error, kError);
      }
    }
  }

  Copies places(const Block& block, HostArena& arena, unsigned user) const {
    return block.copies(arena.data() + user * kShare, kRange / kShare, kPiece);
  }

  void use(unsigned user, std::chrono::steady_clock::time_point end) {
    std::mt19937 random(user);
    Block& block = *blocks_[user];
    do {
      HostArena& arena = *arenas_[random() % kArenas];
      const Copies copies = places(block, arena, user);
      memory::TransferOptions options;
      options.threads = 1 + random() % 3;
      if (random() % 2 == 0) options.window = 2 * kPiece;
      try_hard([&] { machine_.back_up(copies, options); });
      CHECK(block.is_in(copies));
      if (random() % 2 == 0) {
        try_hard([&] { machine_.back_up(places(block, *passing_, user), options); });
      }
      try_hard([&] { block.wipe(); });
      try_hard([&] { machine_.restore(copies, {}, options); });
      bool is_there = false;
      try_hard([&] { is_there = block.is_there(); });
      CHECK(is_there);
      try_hard([&] { block.change(random()); });
      ++rounds_;
    } while (std::chrono::steady_clock::now() < end);
  }

  // One fault at a time, so that somebody comes through.
  void disturb(std::chrono::steady_clock::time_point end) {
    const Calls& calls = machine_.calls;
    const char* const all[] = {calls.register_host, calls.unregister_host,
                               calls.allocate_host, calls.copy_out,
                               calls.copy_in,       calls.create_stream,
                               calls.fill,          calls.synchronize_stream};
    if (std::chrono::steady_clock::now() < end &&
        machine_.stat("pending_faults") == 0) {
      machine_.fail(all[random_() % std::size(all)], 1 + random_() % 50, kError);
      machine_.set_switch("max_registration_bytes", random_() % 3 == 0 ? 1 : 0);
    }
    std::this_thread::sleep_for(2ms);
  }

  static constexpr int kError = 999;
  static constexpr size_t kShare = kPiece / 4;  // of a user

  Machine machine_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::array<Arena, kArenas> arenas_;
  Arena passing_;
  std::mt19937 random_{1};
  std::atomic<size_t> rounds_ = 0;
};

TEST(everything_at_once) {
  Hammer hammer;
  hammer.run();
}

}  // namespace
}  // namespace host_memory
