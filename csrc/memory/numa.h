// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace memory {

constexpr const char* kPciDevices = "/sys/bus/pci/devices";

// The NUMA node next to a device of the PCI bus; none where the kernel does not tell.
// One that knows of a single node says 0 or nothing, and either way it is the same.
std::optional<int> numa_node(const std::string& bus_id,
                             const std::string& devices = kPciDevices);

// Has the memory of pages that are touched later come from a node, as long as that has
// some left; whether the kernel agreed.
bool prefer_numa_node(char* begin, size_t bytes, int node);

}  // namespace memory
