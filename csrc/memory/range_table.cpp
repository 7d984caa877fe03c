// SPDX-License-Identifier: Apache-2.0
#include "memory/range_table.h"

#include <algorithm>
#include <functional>
#include <iterator>
#include <string>
#include <utility>

#include "memory/leftovers.h"
#include "memory/transfer.h"

namespace memory {
namespace {

size_t round_up(size_t bytes, size_t unit) {
  const size_t rounded = (bytes + unit - 1) / unit * unit;
  if (rounded < bytes) {
    throw std::invalid_argument(gpu::format_bytes(bytes) +
                                " are more than there can be");
  }
  return rounded;
}

RangeTable::Entry describe(const VmmRange& range) {
  RangeTable::Entry entry{range.device(), range.bytes(), range.address(), {}};
  for (size_t i = 0; i < range.chunk_count(); ++i) {
    entry.chunks.push_back(
        {reinterpret_cast<uintptr_t>(range.slot(i)), range.chunk_bytes(i)});
  }
  return entry;
}

Failure synchronize(gpu::Driver& driver, DeviceScope& scope, int device) {
  gpu::Status status = scope.use(device);
  if (status.ok()) status = driver.synchronize_device();
  return status.ok() ? nullptr : driver.failure(status, {device, {}});
}

}  // namespace

RangeTable& RangeTable::of_process() {
  static auto* const instance = new RangeTable;
  return *instance;
}

// Ranges that are the caller's alone until its end.
class RangeTable::Claim {
 public:
  using Ranges = std::vector<VmmRange*>;

  // `find` is called with the table locked, and again whenever it has had to wait,
  // since a range may be gone then.
  Claim(RangeTable& table, const std::function<Ranges()>& find) : table_(table) {
    std::unique_lock lock(table_.mutex_);
    table_.claim_ended_.wait(lock, [&] {
      ranges_ = find();
      return std::none_of(ranges_.begin(), ranges_.end(), [&](const VmmRange* range) {
        return table_.claimed_.count(range) != 0;
      });
    });
    table_.claimed_.insert(ranges_.begin(), ranges_.end());
  }

  ~Claim() {
    const std::lock_guard lock(table_.mutex_);
    for (const VmmRange* range : ranges_) table_.claimed_.erase(range);
    table_.claim_ended_.notify_all();
  }

  Claim(const Claim&) = delete;
  Claim& operator=(const Claim&) = delete;

  // As they were found, in that order.
  const Ranges& ranges() const { return ranges_; }

 private:
  RangeTable& table_;
  Ranges ranges_;
};

// --- finding -------------------------------------------------------------------------

VmmRange& RangeTable::at(gpu::Address address) const {
  const auto found = ranges_.find(address);
  if (found == ranges_.end()) {
    throw NoSuchRange(gpu::format_address(address) +
                      " is not the address of a live range");
  }
  return *found->second;
}

VmmRange& RangeTable::around(gpu::Address address, size_t bytes) const {
  auto found = ranges_.upper_bound(address);
  if (found != ranges_.begin()) {
    VmmRange& range = *(--found)->second;
    const size_t offset = address - range.address();
    if (offset < range.bytes() && bytes <= range.bytes() - offset) return range;
  }
  throw NoSuchRange(gpu::format_bytes(bytes) + " at " + gpu::format_address(address) +
                    " are not within a live range");
}

bool RangeTable::meets_another(gpu::Address address, size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto after = ranges_.lower_bound(address);
  if (after != ranges_.end() && after->first - address < bytes) return true;
  if (after == ranges_.begin()) return false;
  const auto& [start, before] = *std::prev(after);
  return address - start < before->bytes();
}

RangeTable::Entry RangeTable::entry(gpu::Address address) const {
  const std::lock_guard lock(mutex_);
  return describe(at(address));
}

bool RangeTable::is_mapped(gpu::Address address) const {
  std::unique_lock lock(mutex_);
  claim_ended_.wait(lock, [&] { return claimed_.count(&at(address)) == 0; });
  return at(address).is_mapped();
}

std::vector<gpu::Address> RangeTable::addresses() const {
  const std::lock_guard lock(mutex_);
  std::vector<gpu::Address> addresses;
  for (const auto& [address, range] : ranges_) addresses.push_back(address);
  return addresses;
}

// --- what has failed before ----------------------------------------------------------

// Of ranges that nobody else is working on. The errors were told when they came first.
size_t RangeTable::settle(gpu::Driver& driver, bool may_wait) {
  std::list<Dying> gone;  // outlives the claim on what is in it
  std::vector<VmmRange*> live;
  std::vector<Dying*> dying;
  const auto is_free = [&](const VmmRange& range) {
    return claimed_.count(&range) == 0;
  };
  const Claim claim(*this, [&] {
    std::vector<VmmRange*> all;
    for (const auto& [address, range] : ranges_) {
      if (is_free(*range) && range->is_unsettled()) live.push_back(range.get());
    }
    all = live;
    for (Dying& each : dying_) {
      if (!is_free(*each.range) || !(each.is_idle || may_wait)) continue;
      dying.push_back(&each);
      all.push_back(each.range.get());
    }
    return all;
  });

  DeviceScope scope(driver);
  for (VmmRange* range : live) (void)range->settle(scope);
  for (Dying* each : dying) (void)give_back(driver, *each, scope);

  const std::lock_guard lock(mutex_);
  for (auto each = dying_.begin(); each != dying_.end();) {
    const auto next = std::next(each);
    const bool is_mine = std::find(dying.begin(), dying.end(), &*each) != dying.end();
    if (is_mine && each->range->is_gone()) gone.splice(gone.end(), dying_, each);
    each = next;
  }
  const auto left = std::count_if(
      live.begin(), live.end(), [](VmmRange* range) { return range->is_unsettled(); });
  return static_cast<size_t>(left) + dying_.size();
}

size_t RangeTable::retry(gpu::Driver& driver) {
  const size_t left = Leftovers::of_process().retry(driver);
  return left + settle(driver, true);
}

Failure RangeTable::give_back(gpu::Driver& driver, Dying& dying, DeviceScope& scope) {
  if (!dying.is_idle) {
    if (const Failure failure = synchronize(driver, scope, dying.range->device())) {
      return failure;
    }
    dying.is_idle = true;
  }
  return dying.range->free(scope);
}

void RangeTable::keep(Dying dying) {
  const std::lock_guard lock(mutex_);
  dying_.push_back(std::move(dying));
}

// --- operations ----------------------------------------------------------------------

RangeTable::Entry RangeTable::allocate(gpu::Driver& driver, int device, size_t bytes,
                                       size_t chunk_bytes) {
  settle(driver, false);
  DeviceScope scope(driver);
  size_t granularity = 0;
  gpu::Status status = scope.use(device);
  if (status.ok()) status = driver.granularity(device, &granularity);
  if (!status.ok()) gpu::throw_if(driver.failure(status, {device, bytes}));

  const size_t all = round_up(bytes, granularity);
  const size_t chunk = round_up(std::min(chunk_bytes, all), granularity);
  auto range =
      std::make_unique<VmmRange>(driver, scope, device, all, chunk, granularity);
  const gpu::Address address = range->address();
  Failure failure;
  if (meets_another(address, all)) {
    failure = std::make_exception_ptr(std::runtime_error(
        "the driver gave out address " + gpu::format_address(address) +
        ", which a sleeping allocation will come back to"));
  } else {
    failure = range->map(scope);
  }
  if (failure) {
    (void)range->free(scope);
    if (!range->is_gone()) keep({std::move(range), true});
    gpu::throw_if(failure);
  }
  const Entry entry = describe(*range);
  const std::lock_guard lock(mutex_);
  ranges_[address] = std::move(range);
  return entry;
}

void RangeTable::free(gpu::Driver& driver, gpu::Address address) {
  remove(driver, address, true);
}

void RangeTable::free_unused(gpu::Driver& driver, gpu::Address address) {
  remove(driver, address, false);
}

void RangeTable::remove(gpu::Driver& driver, gpu::Address address, bool may_be_in_use) {
  Dying dying{nullptr, true};  // outlives the claim
  const Claim claim(*this, [&] { return Claim::Ranges{&at(address)}; });
  settle(driver, false);
  {
    // At once out of the table: its addresses may be another's before this is over.
    const std::lock_guard lock(mutex_);
    dying.range = std::move(ranges_.extract(address).mapped());
  }
  dying.is_idle = !(may_be_in_use && dying.range->is_mapped());
  DeviceScope scope(driver);
  const Failure failure = give_back(driver, dying, scope);
  if (!dying.range->is_gone()) keep(std::move(dying));
  gpu::throw_if(failure);
}

void RangeTable::map(gpu::Driver& driver, gpu::Address address) {
  const Claim claim(*this, [&] { return Claim::Ranges{&at(address)}; });
  VmmRange& range = *claim.ranges().front();
  if (range.is_mapped()) {
    throw std::runtime_error("the range at " + gpu::format_address(address) +
                             " is already mapped");
  }
  settle(driver, false);
  DeviceScope scope(driver);
  if (const gpu::Status entered = scope.use(range.device()); !entered.ok()) {
    gpu::throw_if(driver.failure(entered, {range.device(), range.bytes()}));
  }
  gpu::throw_if(range.map(scope));
}

void RangeTable::suspend(gpu::Driver& driver,
                         const std::vector<gpu::Address>& addresses) {
  const std::set<gpu::Address> named(addresses.begin(), addresses.end());
  const Claim claim(*this, [&] {
    Claim::Ranges found;
    for (const gpu::Address address : named) found.push_back(&at(address));
    return found;
  });
  retry(driver);
  std::vector<VmmRange*> mapped, asleep;
  std::set<int> devices;
  for (VmmRange* range : claim.ranges()) {
    (range->is_mapped() ? mapped : asleep).push_back(range);
    if (range->is_mapped()) devices.insert(range->device());
  }

  DeviceScope scope(driver);
  for (const int device : devices) gpu::throw_if(synchronize(driver, scope, device));
  for (auto range = mapped.begin(); range != mapped.end(); ++range) {
    const Failure failure = (*range)->unmap(scope);
    if (!failure) continue;
    while (range != mapped.begin()) (void)(*--range)->remap(scope);
    gpu::throw_if(failure);
  }
  Failure first;
  for (VmmRange* range : mapped) gpu::keep_first(first, range->release(scope));
  for (VmmRange* range : asleep) gpu::keep_first(first, range->settle(scope));
  gpu::throw_if(first);
}

// --- transfers -----------------------------------------------------------------------

namespace {

// A part of a range that the caller has claimed.
Span span(const VmmRange& range, gpu::Address address, size_t bytes, uintptr_t host) {
  if (!range.is_mapped()) {
    throw std::runtime_error("the range at " + gpu::format_address(range.address()) +
                             " is not mapped");
  }
  return {&range, address - range.address(), bytes, reinterpret_cast<char*>(host)};
}

}  // namespace

void RangeTable::copy_out(gpu::Driver& driver, const std::vector<Copy>& copies,
                          const TransferOptions& options) {
  const Claim claim(*this, [&] {
    Claim::Ranges found;
    for (const auto& [address, bytes, host] : copies) {
      found.push_back(&around(address, bytes));
    }
    return found;
  });
  std::vector<Span> spans;
  for (const auto& [address, bytes, host] : copies) {
    spans.push_back(span(*claim.ranges()[spans.size()], address, bytes, host));
  }
  retry(driver);
  memory::copy_out(driver, spans, options);
}

void RangeTable::copy_in(gpu::Driver& driver, const std::vector<Copy>& copies,
                         const std::vector<Fill>& zeros,
                         const TransferOptions& options) {
  const Claim claim(*this, [&] {
    Claim::Ranges found;
    for (const auto& [address, bytes, host] : copies) {
      found.push_back(&around(address, bytes));
    }
    for (const auto& [address, bytes] : zeros) {
      found.push_back(&around(address, bytes));
    }
    return found;
  });
  auto range = claim.ranges().begin();
  std::vector<Span> spans, fills;
  for (const auto& [address, bytes, host] : copies) {
    spans.push_back(span(**range++, address, bytes, host));
  }
  for (const auto& [address, bytes] : zeros) {
    fills.push_back(span(**range++, address, bytes, 0));
  }
  retry(driver);
  memory::copy_in(driver, spans, fills, options);
}

}  // namespace memory
