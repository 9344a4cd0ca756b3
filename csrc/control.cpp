// What Python calls through ctypes: `tilestream.launch.native`.
#include <cstdint>
#include <string>

#include "driver.h"
#include "launch_table.h"
#include "workspace.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Find the driver. Null, or why it cannot be used: valid until this thread's next call.
EXPORT const char* tilestream_open(const char* driver_library, const char* torch_library) {
  static thread_local std::string why;
  why = tilestream::open_driver(driver_library, torch_library);
  return why.empty() ? nullptr : why.c_str();
}

EXPORT void tilestream_clear() { tilestream::clear_table(); }

EXPORT int64_t tilestream_size() { return static_cast<int64_t>(tilestream::table_size()); }

EXPORT void tilestream_set_capacity(int64_t entries) {
  tilestream::set_table_capacity(entries < 1 ? 1 : static_cast<size_t>(entries));
}

// Give a stream of the current context words: addresses of zeroed counters and counts, and of partials, and how many.
// False if the thread has no context of this device.
EXPORT int32_t tilestream_give_workspace(
    int32_t device, void* stream, const uint64_t* addresses, const int64_t* sizes) {
  int64_t context = 0;
  if (tilestream::driver().launch == nullptr || !tilestream::context_of(device, &context)) return 0;
  tilestream::give_workspace(
      device, stream, context, addresses[0], addresses[1], addresses[2], {1, sizes[0], sizes[1], sizes[2]});
  return 1;
}
