// SPDX-License-Identifier: Apache-2.0
#include "engine/gate.h"

#include <atomic>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include "test.h"

namespace hipsim {
namespace {

using test::kMoment;
using test::Latch;

TEST(a_gate_is_shared) {
  Gate gate;
  gate.lock_shared();
  Latch inside;
  std::thread other([&] {
    std::shared_lock lock(gate);
    inside.open();
  });
  CHECK(inside.wait());
  other.join();
  gate.unlock_shared();
}

TEST(a_gate_held_alone_keeps_everybody_out) {
  Gate gate;
  gate.lock();
  Latch shared;
  Latch alone;
  std::thread reader([&] {
    std::shared_lock lock(gate);
    shared.open();
  });
  std::thread writer([&] {
    std::lock_guard lock(gate);
    alone.open();
  });
  CHECK(!shared.wait(kMoment) && !alone.wait(std::chrono::milliseconds(0)));
  gate.unlock();
  CHECK(shared.wait() && alone.wait());
  reader.join();
  writer.join();
}

TEST(a_gate_that_is_shared_is_not_held_alone) {
  Gate gate;
  gate.lock_shared();
  gate.lock_shared();
  Latch alone;
  std::thread writer([&] {
    std::lock_guard lock(gate);
    alone.open();
  });
  gate.unlock_shared();
  CHECK(!alone.wait(kMoment));
  gate.unlock_shared();
  CHECK(alone.wait());
  writer.join();
}

// While the writer waits nobody comes in, so that those who are inside are the last.
TEST(a_writer_is_not_starved) {
  Gate gate;
  gate.lock_shared();
  Latch alone;
  std::thread writer([&] {
    std::lock_guard lock(gate);
    alone.open();
  });
  std::vector<std::thread> readers;
  bool kept_out = false;
  // The first of them may be there before the writer is.
  for (int i = 0; i < 200 && !kept_out; ++i) {
    auto done = std::make_shared<Latch>();
    readers.emplace_back([&gate, done] {
      std::shared_lock lock(gate);
      done->open();
    });
    kept_out = !done->wait(kMoment);
  }
  CHECK(kept_out && !alone.wait(std::chrono::milliseconds(0)));
  gate.unlock_shared();
  CHECK(alone.wait());
  writer.join();
  for (std::thread& reader : readers) reader.join();
}

TEST(a_writer_gets_in_between_readers_that_never_rest) {
  Gate gate;
  std::atomic<bool> stop{false};
  std::vector<std::thread> readers;
  for (int i = 0; i < 3; ++i) {
    readers.emplace_back([&] {
      while (!stop) std::shared_lock lock(gate);
    });
  }
  Latch done;
  std::thread writer([&] {
    for (int round = 0; round < 100; ++round) std::lock_guard lock(gate);
    done.open();
  });
  CHECK(done.wait());
  stop = true;
  writer.join();
  for (std::thread& reader : readers) reader.join();
}

TEST(a_gate_forgets_who_is_inside) {
  Gate gate;
  gate.lock_shared();
  gate.forget_everybody();
  gate.lock();
  gate.forget_everybody();
  gate.lock_shared();
  gate.unlock_shared();
  gate.lock();
}

TEST(a_gate_guards_what_it_should) {
  Gate gate;
  int value = 0;  // the thread sanitizer watches it
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int turn = 0; turn < 500; ++turn) {
        {
          std::lock_guard lock(gate);
          ++value;
        }
        std::shared_lock lock(gate);
        CHECK(value > 0);
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(value == 4 * 500);
}

}  // namespace
}  // namespace hipsim
