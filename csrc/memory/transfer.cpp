// SPDX-License-Identifier: Apache-2.0
#include "memory/transfer.h"

#include <algorithm>
#include <array>
#include <exception>
#include <initializer_list>
#include <iterator>
#include <map>
#include <memory>
#include <set>
#include <utility>

#include "memory/device_stream.h"
#include "memory/host_arena.h"
#include "memory/host_pages.h"
#include "memory/preparation.h"
#include "memory/staging.h"

namespace memory {
namespace {

using Parts = std::vector<Part>;

// Its end is the end of all that was queued.
class Transfer {
 public:
  Transfer(gpu::Driver& driver, Direction direction, const TransferOptions& options)
      : driver_(driver), direction_(direction), options_(options), scope_(driver) {}

  // Each device of the parts is idle when this returns.
  void wait_for_devices(std::initializer_list<const Parts*> lists);
  void copy(const Part& part);
  void fill(const Part& part);
  // Begins to take a detour with these, or copies them where there is none to be had.
  void stage(const Parts& parts);
  void finish();

 private:
  static constexpr size_t kStreams = 2;

  struct Streams {
    std::array<std::unique_ptr<DeviceStream>, kStreams> copies;
    size_t turn = 0;
    std::unique_ptr<DeviceStream> fills;
  };

  DeviceStream& use(std::unique_ptr<DeviceStream>& stream, int device);
  gpu::Failure wait(int device, DeviceStream& stream);

  gpu::Driver& driver_;
  const Direction direction_;
  const TransferOptions options_;
  gpu::DeviceScope scope_;
  std::map<int, Streams> streams_;
  std::vector<std::unique_ptr<Staging>> stagings_;
};

void Transfer::wait_for_devices(std::initializer_list<const Parts*> lists) {
  std::set<int> devices;
  for (const Parts* parts : lists) {
    for (const Part& part : *parts) devices.insert(part.device);
  }
  for (const int device : devices) {
    gpu::Status status = scope_.use(device);
    if (status.ok()) status = driver_.synchronize_device();
    if (!status.ok()) gpu::throw_if(driver_.failure(status, {device, {}}));
  }
}

DeviceStream& Transfer::use(std::unique_ptr<DeviceStream>& stream, int device) {
  if (stream == nullptr) {
    stream = std::make_unique<DeviceStream>(driver_, scope_, device);
  } else if (const gpu::Status entered = scope_.use(device); !entered.ok()) {
    gpu::throw_if(driver_.failure(entered, {device, {}}));
  }
  return *stream;
}

gpu::Failure Transfer::wait(int device, DeviceStream& stream) {
  const size_t bytes = stream.queued();
  const gpu::Status waited = stream.wait(scope_);
  if (!waited.ok()) return driver_.failure(waited, {device, {}});
  if (options_.progress != nullptr) options_.progress->done += bytes;
  return nullptr;
}

void Transfer::copy(const Part& part) {
  Streams& streams = streams_[part.device];
  DeviceStream& stream = use(streams.copies[streams.turn], part.device);
  streams.turn = (streams.turn + 1) % kStreams;
  if (stream.queued() > 0 && stream.queued() + part.bytes > options_.window) {
    gpu::throw_if(wait(part.device, stream));
  }
  stream.copy(direction_, part);
}

void Transfer::fill(const Part& part) {
  use(streams_[part.device].fills, part.device).zero(part);
}

void Transfer::stage(const Parts& parts) {
  std::map<int, Parts> by_device;
  for (const Part& part : parts) by_device[part.device].push_back(part);
  for (auto& [device, own] : by_device) {
    auto staging = std::make_unique<Staging>(driver_, scope_, direction_, device,
                                             std::move(own), options_.progress);
    if (staging->is_refused()) {
      for (const Part& part : staging->parts()) copy(part);
    } else {
      stagings_.push_back(std::move(staging));
    }
  }
}

void Transfer::finish() {
  gpu::Failure first;
  for (const auto& staging : stagings_) {
    try {
      staging->finish();
    } catch (...) {
      gpu::keep_first(first, std::current_exception());
    }
  }
  for (auto& [device, streams] : streams_) {
    for (const auto& stream : streams.copies) {
      if (stream != nullptr) gpu::keep_first(first, wait(device, *stream));
    }
    if (streams.fills == nullptr) continue;
    if (const gpu::Status filled = streams.fills->wait(scope_); !filled.ok()) {
      gpu::keep_first(first, driver_.failure(filled, {device, {}}));
    }
  }
  gpu::throw_if(first);
}

// What of the copies' pieces is not registered, each once.
struct Unready {
  std::vector<Preparation::Piece> pieces;
  std::map<std::pair<HostArena*, size_t>, size_t> positions;

  explicit Unready(const Parts& parts) {
    for (const Part& part : parts) {
      if (part.arena == nullptr || part.arena->is_registered(part.piece)) continue;
      const std::pair piece(part.arena, part.piece);
      if (!positions.emplace(piece, pieces.size()).second) continue;
      pieces.push_back({part.arena, part.piece});
    }
  }
};

bool is_direct(const Part& part) {
  return part.arena == nullptr || part.arena->is_registered(part.piece);
}

void copy_out(gpu::Driver& driver, const Parts& parts, const Unready& unready,
              const TransferOptions& options, std::vector<Preparation::Piece>& made) {
  Transfer transfer(driver, Direction::kOut, options);
  transfer.wait_for_devices({&parts});
  Parts staged;
  {
    Preparation preparation(driver, parts.front().device, unready.pieces,
                            options.threads, made);
    for (const Part& part : parts) {
      const auto position = unready.positions.find({part.arena, part.piece});
      if (position != unready.positions.end()) preparation.await(position->second);
      if (is_direct(part)) {
        transfer.copy(part);
      } else {
        staged.push_back(part);
      }
    }
    preparation.finish();
  }
  transfer.stage(staged);
  transfer.finish();
}

}  // namespace

void copy_out(gpu::Driver& driver, const std::vector<Span>& copies,
              const TransferOptions& options) {
  ArenasInUse arenas;
  const Parts parts = arenas.split(driver, copies, options.window);
  if (parts.empty()) return;
  for (const Part& part : parts) {
    if (part.arena != nullptr) part.arena->write_to(part.piece, &arenas);
  }
  const Unready unready(parts);
  size_t missing = 0;
  for (const auto& piece : unready.pieces) missing += piece.arena->missing(piece.index);
  std::vector<Preparation::Piece> made;
  try {
    copy_out(driver, parts, unready, options, made);
  } catch (const HostMemoryError&) {
    arenas.end();
    size_t released = 0;
    for (const auto& piece : made) {
      released += piece.arena->release_own(piece.index, &arenas);
    }
    throw HostMemoryError(
        "the machine has no memory left: " + gpu::format_bytes(released) + " of the " +
        gpu::format_bytes(missing) +
        " that a backup takes were had, and are given back. Free host memory, raise "
        "the container's limit, or sleep at level 2, which backs nothing up");
  }
}

void copy_in(gpu::Driver& driver, const std::vector<Span>& copies,
             const std::vector<Span>& zeros, const TransferOptions& options) {
  ArenasInUse arenas;
  const Parts parts = arenas.split(driver, copies, options.window);
  const Parts fills = split_fills(driver, zeros);
  Transfer transfer(driver, Direction::kIn, options);
  transfer.wait_for_devices({&parts, &fills});
  // Once and for all: a transfer out may be registering the same pieces.
  Parts direct, staged;
  std::partition_copy(parts.begin(), parts.end(), std::back_inserter(direct),
                      std::back_inserter(staged), &is_direct);
  transfer.stage(staged);
  for (const Part& part : fills) transfer.fill(part);
  for (const Part& part : direct) transfer.copy(part);
  transfer.finish();
}

}  // namespace memory
