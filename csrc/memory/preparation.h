// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <condition_variable>
#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "gpu/driver_api.h"
#include "memory/host_arena.h"
#include "memory/registrations.h"

namespace memory {

// How many threads prepare unless somebody says otherwise: some of the CPUs that they
// may run on are left to the thread that copies and to the driver's, and more than 12
// do not help. With 16 CPUs a first backup of 24 GiB to an H200's host took 0.84 s with
// 12 threads, 0.90 with 8 and 1.08 with 16.
size_t default_threads();

// Makes pieces of arenas ready in threads, in the order in which they are given. Where
// no thread can be started, whoever waits for a piece prepares it. Ends when no thread
// is at work any more, and without what had not been begun.
class Preparation {
 public:
  struct Piece {
    HostArena* arena;
    size_t index;
  };

  // At most so many threads, 0 for the default. Each first makes the device current.
  // The pieces that it makes ready are added to a list, which is whole at the end.
  Preparation(gpu::Driver& driver, int device, std::vector<Piece> pieces,
              size_t threads, std::vector<Piece>& made);
  ~Preparation();
  Preparation(const Preparation&) = delete;
  Preparation& operator=(const Preparation&) = delete;

  // Waits until the piece with this position in the list is ready. Throws what a thread
  // has met with first.
  void await(size_t position);
  // Waits for the threads. Throws what one has met with first, even if others have done
  // its part.
  void finish();

 private:
  void work();
  void join();
  bool take(size_t* position);
  void prepare(size_t position);

  gpu::Driver& driver_;
  const int device_;
  const std::vector<Piece> pieces_;
  Registrations registrations_;

  std::mutex mutex_;  // of what follows
  std::condition_variable changed_;
  size_t next_ = 0;
  bool is_over_ = false;
  std::vector<bool> is_ready_;
  std::vector<Piece>& made_;
  gpu::Failure failure_;

  std::vector<std::thread> threads_;
};

}  // namespace memory
