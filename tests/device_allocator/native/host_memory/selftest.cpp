// SPDX-License-Identifier: Apache-2.0
//
// What the sanitizers and the tests must not let pass.
#include "machine.h"

namespace host_memory {
namespace {

SELF_TEST(race_with_a_copy) {
  Machine machine;
  machine.set_switch("copy_latency_us", 20'000);
  const Block block(machine, 1);
  const Arena arena = HostArena::make(kRange, kPiece);
  std::thread other([&] { machine.back_up(block.copies(arena->data())); });
  arena->data()[kRange / 2] = 1;
  other.join();
}

SELF_TEST(copy_past_the_end) {
  Machine machine;
  const Block block(machine, 1);
  Bytes too_small(kRange - 1);
  machine.back_up(block.copies(reinterpret_cast<char*>(too_small.data())));
}

SELF_TEST(host_memory_left_registered) {
  Machine machine;
  static char memory[4096];
  gpu::DeviceScope scope(machine.driver);
  CHECK(scope.use_any().ok());
  CHECK(machine.driver.register_host(memory, sizeof memory).ok());
}

SELF_TEST(wrong_byte) {
  Machine machine;
  const Block block(machine, 1);
  const Arena arena = HostArena::make(kRange, kPiece);
  const Copies copies = block.copies(arena->data());
  machine.back_up(copies);
  arena->data()[kRange - 1] ^= 1;
  CHECK(block.is_in(copies));
}

}  // namespace
}  // namespace host_memory
