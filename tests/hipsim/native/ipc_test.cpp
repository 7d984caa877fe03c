// SPDX-License-Identifier: Apache-2.0
#include "engine/ipc.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <random>
#include <vector>

#include "engine/window.h"
#include "test.h"

namespace hipsim {
namespace {

using test::for_seeds;

constexpr size_t kPages = 16;

// Memory of every second page.
PhysicalRef allocate_in_pieces(Vram& vram, size_t pages) {
  std::vector<PhysicalRef> all(2 * pages);
  for (PhysicalRef& page : all) CHECK_OK(vram.allocate(kPage, &page));
  for (size_t i = 0; i < all.size(); i += 2) all[i].reset();
  PhysicalRef memory;
  CHECK_OK(vram.allocate(pages * kPage, &memory));
  CHECK_EQ(memory->extents.size(), pages);
  return memory;
}

bool same_pieces(const Physical& one, const Physical& other) {
  return one.bytes == other.bytes && one.extents.size() == other.extents.size() &&
         std::memcmp(one.extents.data(), other.extents.data(),
                     one.extents.size() * sizeof(Extent)) == 0;
}

char* map(Window& window, const Physical& memory) {
  const auto address = window.take(memory.bytes);
  CHECK(address && window.map(*address, memory, PROT_READ | PROT_WRITE));
  return reinterpret_cast<char*>(*address);
}

// A process may open its own handles here; the runtime is what refuses them.
TEST(memory_in_pieces_is_the_same_on_the_other_side) {
  Vram vram(2, 2 * kPages * kPage);
  const PhysicalRef memory = allocate_in_pieces(vram, kPages);
  const auto exported = IpcExport::make(*memory, kPages * kPage - 100);
  CHECK(exported.has_value());
  const IpcHandle handle = exported->handle(*memory, 123);
  CHECK(is_ipc_handle(handle) && is_own(handle));
  CHECK(handle.offset == 123 && handle.bytes == kPages * kPage - 100);
  CHECK_EQ(handle.device, 2);
  const PhysicalRef opened = open_ipc(handle);
  CHECK(opened && same_pieces(*opened, *memory) && opened->device == 2);

  Window window(size_t{1} << 20);
  char* original = map(window, *memory);
  char* import = map(window, *opened);
  for (size_t i = 0; i < memory->bytes; i += 97)
    original[i] = static_cast<char>(i % 251);
  CHECK(std::memcmp(original, import, memory->bytes) == 0);
  import[kPage * 3] = 77;
  CHECK(original[kPage * 3] == 77);
}

TEST(a_handle_is_good_while_its_export_lives) {
  Vram vram(0, kPages * kPage);
  PhysicalRef memory;
  CHECK_OK(vram.allocate(kPage, &memory));
  IpcHandle handle{};
  {
    const auto exported = IpcExport::make(*memory, kPage);
    CHECK(exported.has_value());
    handle = exported->handle(*memory, 0);
    CHECK(open_ipc(handle) != nullptr);
    const auto second = IpcExport::make(*memory, kPage);
    CHECK(second && second->handle(*memory, 0).cookie != handle.cookie);
  }
  CHECK(open_ipc(handle) == nullptr);
  // Another export may get the file's number; its cookie is another.
  const auto later = IpcExport::make(*memory, kPage);
  CHECK(later && open_ipc(handle) == nullptr);
}

TEST(an_empty_handle_opens_nothing) {
  const IpcHandle handle = make_empty_handle(3, kPage);
  CHECK(is_ipc_handle(handle) && is_own(handle) && handle.cookie == 0);
  CHECK(handle.device == 3 && handle.bytes == kPage);
  CHECK(open_ipc(handle) == nullptr);
}

TEST(imported_memory_outlives_the_exporters_interest) {
  Vram vram(0, kPages * kPage);
  PhysicalRef memory;
  CHECK_OK(vram.allocate(kPage, &memory));
  PhysicalRef opened;
  {
    const auto exported = IpcExport::make(*memory, kPage);
    opened = open_ipc(exported->handle(*memory, 0));
  }
  Window window(size_t{1} << 20);
  *map(window, *opened) = 5;
  const int file = opened->file;
  opened.reset();
  CHECK(fcntl(file, F_GETFD) == -1);
  CHECK(*map(window, *memory) == 5);
}

TEST(wrong_handles_open_nothing) {
  Vram vram(0, 2 * kPages * kPage);
  const PhysicalRef memory = allocate_in_pieces(vram, kPages);
  const auto exported = IpcExport::make(*memory, memory->bytes);
  const IpcHandle right = exported->handle(*memory, 0);
  CHECK(open_ipc(right) != nullptr);
  const auto refused = [&](auto change) {
    IpcHandle wrong = right;
    change(wrong);
    CHECK(open_ipc(wrong) == nullptr);
  };
  refused([](IpcHandle& handle) { handle.cookie = 0; });
  refused([](IpcHandle& handle) { handle.cookie += 1; });
  refused([](IpcHandle& handle) { handle.bytes += kPage; });
  refused([](IpcHandle& handle) { handle.bytes -= kPage; });
  refused([](IpcHandle& handle) { handle.bytes = 0; });
  refused([](IpcHandle& handle) { handle.bytes = SIZE_MAX; });
  refused([](IpcHandle& handle) { handle.bytes = size_t{1} << 62; });
  refused([](IpcHandle& handle) { handle.process = 0; });
  refused([](IpcHandle& handle) { handle.process = -1; });
  refused([](IpcHandle& handle) { handle.process = 0x7FFFFFFF; });
  refused([](IpcHandle& handle) { handle.table_file = handle.memory_file; });
  refused([](IpcHandle& handle) { handle.table_file = -1; });
  refused([](IpcHandle& handle) { handle.table_file = 100000; });
  refused([](IpcHandle& handle) { handle.memory_file = -1; });
  refused([](IpcHandle& handle) { handle.memory_file = 100000; });
}

// Only what does not say where the memory is may be wrong.
TEST(garbage_opens_nothing_else) {
  Vram vram(0, 2 * kPages * kPage);
  const PhysicalRef memory = allocate_in_pieces(vram, kPages);
  const auto exported = IpcExport::make(*memory, memory->bytes);
  const IpcHandle right = exported->handle(*memory, 0);
  for_seeds(300, [&](std::mt19937& random) {
    IpcHandle wrong = right;
    unsigned char bytes[sizeof wrong];
    std::memcpy(bytes, &wrong, sizeof bytes);
    for (size_t i = 1 + random() % 4; i > 0; --i) {
      bytes[random() % sizeof bytes] ^= static_cast<unsigned char>(1 << random() % 8);
    }
    if (random() % 8 == 0) {
      for (unsigned char& byte : bytes) byte = static_cast<unsigned char>(random());
    }
    std::memcpy(&wrong, bytes, sizeof bytes);
    // Other files of this process are not the test's to open.
    if (wrong.memory_file != right.memory_file) return;
    const PhysicalRef opened = open_ipc(wrong);
    CHECK(!opened || same_pieces(*opened, *memory));
    CHECK(!opened || wrong.cookie == right.cookie);
  });
}

TEST(a_mark_tells_handles_from_garbage) {
  CHECK(!is_ipc_handle(IpcHandle{}));
  IpcHandle handle = make_empty_handle(0, 1);
  handle.mark ^= 1;
  CHECK(!is_ipc_handle(handle));
  handle = make_empty_handle(0, 1);
  handle.process += 1;
  CHECK(is_ipc_handle(handle) && !is_own(handle));
}

TEST(another_process_opens_the_memory_while_its_owner_lives) {
  int handles[2];
  int goodbye[2];
  CHECK(pipe(handles) == 0 && pipe(goodbye) == 0);
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    close(goodbye[1]);
    Vram vram(1, 2 * kPages * kPage);
    const PhysicalRef memory = allocate_in_pieces(vram, kPages);
    Window window(size_t{1} << 20);
    std::strcpy(map(window, *memory) + 5 * kPage, "of the child");
    const auto exported = IpcExport::make(*memory, memory->bytes);
    const IpcHandle handle = exported->handle(*memory, 5 * kPage);
    CHECK(write(handles[1], &handle, sizeof handle) == sizeof handle);
    char word = 0;
    CHECK(read(goodbye[0], &word, 1) == 0);
    _exit(0);
  }
  close(goodbye[0]);
  IpcHandle handle{};
  CHECK(read(handles[0], &handle, sizeof handle) == sizeof handle);
  CHECK(!is_own(handle) && handle.process == child);
  {
    const PhysicalRef opened = open_ipc(handle);
    CHECK(opened && opened->extents.size() == kPages && opened->device == 1);
    Window window(size_t{1} << 20);
    CHECK(std::strcmp(map(window, *opened) + handle.offset, "of the child") == 0);
    close(goodbye[1]);
    int status = 0;
    CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status));
    CHECK_EQ(WEXITSTATUS(status), 0);
    CHECK(std::strcmp(map(window, *opened) + handle.offset, "of the child") == 0);
  }
  CHECK(open_ipc(handle) == nullptr);
}

}  // namespace
}  // namespace hipsim
