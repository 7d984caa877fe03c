// SPDX-License-Identifier: Apache-2.0
#include "memory/numa.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cctype>
#include <climits>
#include <cstdio>
#include <memory>

namespace memory {
namespace {

constexpr int kPreferred = 1;  // MPOL_PREFERRED of linux/mempolicy.h
constexpr size_t kWordBits = sizeof(unsigned long) * CHAR_BIT;
constexpr size_t kNodes = 1024;  // the most that Linux can be built for

}  // namespace

std::optional<int> numa_node(const std::string& bus_id, const std::string& devices) {
  std::string name = bus_id;
  std::transform(name.begin(), name.end(), name.begin(),
                 [](unsigned char c) { return static_cast<char>(std::tolower(c)); });
  const std::string path = devices + "/" + name + "/numa_node";
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen(path.c_str(), "re"),
                                                   &std::fclose);
  int node = -1;
  if (!file || std::fscanf(file.get(), "%d", &node) != 1 || node < 0) {
    return std::nullopt;
  }
  return node;
}

// Without libnuma, which a machine need not have.
bool prefer_numa_node(char* begin, size_t bytes, int node) {
  if (node < 0 || static_cast<size_t>(node) >= kNodes) return false;
  const auto bit = static_cast<size_t>(node);
  std::array<unsigned long, kNodes / kWordBits> nodes{};
  nodes[bit / kWordBits] = 1UL << (bit % kWordBits);
  // The kernel leaves out the last bit of as many as it is told of.
  return syscall(SYS_mbind, begin, bytes, kPreferred, nodes.data(), kNodes + 1, 0) == 0;
}

}  // namespace memory
