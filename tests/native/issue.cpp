// Launches one recipe twice over the fake driver, without Python or torch, and prints what the driver was given: the
// bytes are to be the same on every kind of machine.
#include <dlfcn.h>

#include <array>
#include <cstdint>
#include <cstdio>
#include <vector>

#include "../../csrc/driver.h"
#include "../../csrc/recipe.h"
#include "../../csrc/workspace.h"

using namespace tilestream;

namespace {

template <typename Function>
Function* of(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

void* at(uint64_t address) { return reinterpret_cast<void*>(address); }

constexpr int64_t kFunction = 0x1000;
enum : int64_t { kConstant, kAddress, kBase, kFactor, kMap };
const int64_t kInts[] = {
    2, 11, 8, 4, 16, 0,                                // version; tickets and words
    1, kFunction, 7, 2, 1, 384, 1, 1, 1000,            // one kernel: function, grid, block, shared memory
    1, 6, 1, 0, 0, 0, 0, 0, 0, 0,                      // an attribute of nine integers
    8,                                                 // parameters: size, alignment, kind, what the kind takes
    128, 64, kMap, kA, 0, 9, 2, 64, 16, 128, 128, 64, 8, 3, 2, 0, 1,
    8, 8, kAddress, kOut, 24,                          //
    8, 8, kAddress, kOperands + 2, -8,                 // partials
    4, 4, kBase,                                       //
    8, 8, kBase,                                       //
    4, 4, kFactor, 0,                                  //
    8, 8, kFactor, 1,                                  //
    1, 1, kConstant, -1,
};
const int64_t kSizes[] = {128, 8, 8, 4, 8, 4, 8, 1};

}  // namespace

int main(int, char** arguments) {
  const char* path = arguments[1];
  if (const std::string why = open_driver(path, path); !why.empty()) return std::fprintf(stderr, "%s\n", why.c_str()), 1;
  void* fake = dlopen(path, RTLD_NOW);
  of<void(int, int, unsigned long long, void*)>(fake, "fake_thread")(0, 1, 5, at(0x77));
  of<void(void*, const int64_t*, int64_t)>(fake, "fake_function")(at(kFunction), kSizes, std::size(kSizes));
  const Recipe recipe(kInts);
  const std::array<void*, Workspace::kRegions> words = {at(0x100), at(0x200), at(0x300), at(0x400), at(0x500)};
  give_workspace({0, at(0x77), 5}, words, {0, 8, 4, 16, 0});
  for (int i = 0; i < 2; i++) {
    Given given;
    given.addresses[kA] = at(0x7f0000000040 + 512 * i);
    given.addresses[kOut] = at(0x7f0000100000);
    given.factors = {0.375, -2.5};
    int64_t context = 0;
    if (!context_of(0, &context) || !recipe.issue(given, 0, context)) return 2;
    std::vector<unsigned char> bytes(8192);
    bytes.resize(of<int64_t(int64_t, unsigned char*, int64_t)>(fake, "fake_launch")(i, bytes.data(), 8192));
    for (const unsigned char byte : bytes) std::printf("%02x", byte);
    std::puts("");
  }
}
