// SPDX-License-Identifier: Apache-2.0
#include <string_view>

#include "bridge/cuda_api.h"
#include "bridge/cuda_call.h"

using hipsim::api;
using hipsim::Call;
using hipsim::Caller;
using hipsim::Error;
using hipsim::Needs;
using hipsim::Runtime;

namespace {

struct EntryPoint {
  std::string_view symbol;
  void* function;
};

const EntryPoint kEntryPoints[] = {
    {"cuGetErrorName", reinterpret_cast<void*>(&cuGetErrorName)},
    {"cuGetErrorString", reinterpret_cast<void*>(&cuGetErrorString)},
#define HIPSIM_ENTRY_POINT(name) {#name, reinterpret_cast<void*>(&name)},
    HIPSIM_CALLS(HIPSIM_ENTRY_POINT)
#undef HIPSIM_ENTRY_POINT
};

// A name stands for its newest form. Only the batch changed after the oldest release
// that has all of the others; a version is 1000 * major + 10 * minor.
constexpr std::string_view kBatch = "cuMemcpyBatchAsync";
constexpr int kBatchSince = 12080;
constexpr int kShortBatchSince = 13000;

bool stands_for(std::string_view name, std::string_view symbol, int version) {
  if (name == kBatch) {
    return symbol == (version >= kShortBatchSince ? "cuMemcpyBatchAsync_v2" : kBatch);
  }
  constexpr std::string_view kSuffix = "_v2";
  return symbol == name || (symbol.size() == name.size() + kSuffix.size() &&
                            symbol.substr(0, name.size()) == name &&
                            symbol.substr(name.size()) == kSuffix);
}

}  // namespace

// A caller who has no place for the status has only the result to tell by.
CUresult cuGetProcAddress_v2(const char* symbol, void** function, int version,
                             uint64_t flags, CUdriverProcAddressQueryResult* status) {
  constexpr uint64_t kKnown =
      CU_GET_PROC_ADDRESS_LEGACY_STREAM | CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
  return api(Needs::kNothing, Call::cuGetProcAddress_v2, [=](Runtime&, const Caller&) {
    if (symbol == nullptr || function == nullptr || (flags & ~kKnown) != 0) {
      return Error::kInvalidValue;
    }
    const std::string_view name = symbol;
    auto found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    *function = nullptr;
    for (const EntryPoint& each : kEntryPoints) {
      if (!stands_for(name, each.symbol, version)) continue;
      found = CU_GET_PROC_ADDRESS_SUCCESS;
      *function = each.function;
    }
    if (name == kBatch && version < kBatchSince) {
      found = CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
      *function = nullptr;
    }
    if (status != nullptr) *status = found;
    return *function == nullptr && status == nullptr ? Error::kNotFound
                                                     : Error::kSuccess;
  });
}
