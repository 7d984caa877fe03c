// SPDX-License-Identifier: Apache-2.0
//
// Runs inputs of the fuzzer without the fuzzer, so that any compiler will do:
//   hipsim_fuzz_replay COUNT [FIRST]   inputs made of the seeds FIRST, FIRST + 1, ...
//   hipsim_fuzz_replay PATH...         files, and all files of folders
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments);
extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size);

namespace {

// No input that works takes this long.
constexpr unsigned kPatienceSeconds = 30;

// The last name on stderr is that of the input that ended the process.
void run(const std::string& name, const std::vector<uint8_t>& input) {
  std::fprintf(stderr, "%s\n", name.c_str());
  alarm(kPatienceSeconds);
  LLVMFuzzerTestOneInput(input.data(), input.size());
}

void run_file(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  run(path, {std::istreambuf_iterator<char>(file), {}});
}

std::vector<uint8_t> make_input(unsigned seed) {
  std::mt19937 random(seed);
  std::vector<uint8_t> input(50 + random() % 1500);
  std::generate(input.begin(), input.end(), std::ref(random));
  return input;
}

}  // namespace

int main(int count, char** arguments) {
  LLVMFuzzerInitialize(&count, &arguments);
  size_t inputs = 0;
  const std::string first = count > 1 ? arguments[1] : "1000";
  if (first.find_first_not_of("0123456789") == std::string::npos) {
    const unsigned seed = count > 2 ? std::stoul(arguments[2]) : 0;
    for (; inputs < std::stoul(first); ++inputs) {
      const auto each = static_cast<unsigned>(seed + inputs);
      run("seed " + std::to_string(each), make_input(each));
    }
  } else {
    for (int i = 1; i < count; ++i) {
      if (std::filesystem::is_directory(arguments[i])) {
        for (const auto& entry : std::filesystem::directory_iterator(arguments[i])) {
          run_file(entry.path());
          ++inputs;
        }
      } else {
        run_file(arguments[i]);
        ++inputs;
      }
    }
  }
  std::printf("%zu inputs\n", inputs);
  return 0;
}
