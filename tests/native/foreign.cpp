// Loads the library in a process without Python, and calls what Python calls through ctypes.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>

namespace {

void* library = nullptr;

template <typename Function>
Function* found(const char* name) {
  void* symbol = dlsym(library, name);
  if (symbol == nullptr) std::fprintf(stderr, "%s\n", dlerror());
  return reinterpret_cast<Function*>(symbol);
}

}  // namespace

int main(int, char** arguments) {
  library = dlopen(arguments[1], RTLD_NOW);
  if (library == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  const char* driver = arguments[2];
  auto* open = found<const char*(const char*, const char*)>("tilestream_open");
  auto* size = found<int64_t()>("tilestream_size");
  auto* clear = found<void()>("tilestream_clear");
  auto* context = found<int64_t(int32_t)>("tilestream_context");
  auto* give = found<int32_t(int32_t, void*, void* const*, const int64_t*)>("tilestream_give_workspace");
  if (open("libnone.so", driver) == nullptr || context(0) != -1) return 2;
  if (const char* why = open(driver, driver)) return std::fprintf(stderr, "%s\n", why), 3;
  if (context(0) != -1) return 4;  // a fresh thread
  library = dlopen(driver, RTLD_NOW);
  found<void(int, int, unsigned long long, void*)>("fake_thread")(0, 1, 1, nullptr);
  if (context(0) != 1 || context(1) != -1) return 4;
  void* const addresses[5] = {};
  const int64_t sizes[4] = {8, 4, 16, 0};
  if (give(0, nullptr, addresses, sizes) != 1 || give(1, nullptr, addresses, sizes) != 0) return 5;
  clear();
  if (size() != 0) return 6;
  std::puts("found, given, cleared");
}
