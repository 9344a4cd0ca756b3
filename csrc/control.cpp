// What Python calls through ctypes: `tilestream.launch.native`, `tilestream.runtime.sequence`.
#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <string>

#include "driver.h"
#include "launch_table.h"
#include "sequence.h"
#include "workspace.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

// Find the driver. Null, or why it cannot be used: valid until this thread's next call.
EXPORT const char* tilestream_open(const char* driver_library, const char* torch_library) {
  static thread_local std::string why;
  why = tilestream::open_driver(driver_library, torch_library);
  return why.empty() ? nullptr : why.c_str();
}

EXPORT void tilestream_clear() {
  if (!tilestream::is_forked()) tilestream::clear_table();
}

EXPORT int64_t tilestream_size() {
  return tilestream::is_forked() ? 0 : static_cast<int64_t>(tilestream::table_size());
}

EXPORT void tilestream_set_capacity(int64_t entries) {
  if (!tilestream::is_forked()) tilestream::set_table_capacity(entries < 1 ? 1 : static_cast<size_t>(entries));
}

// The number of the thread's current context of a device; -1 if it has none.
EXPORT int64_t tilestream_context(int32_t device) {
  int64_t context = 0;
  return tilestream::driver().launch != nullptr && tilestream::context_of(device, &context) ? context : -1;
}

// Give a stream of the current context words: addresses of zeroed counters and counts, of partials, and of a list's
// halves; how many counters, counts and partials there are, and how long a half is. False if the thread has no context
// of this device.
EXPORT int32_t tilestream_give_workspace(
    int32_t device, void* stream, void* const* addresses, const int64_t* sizes) {
  int64_t context = 0;
  if (tilestream::driver().launch == nullptr || !tilestream::context_of(device, &context)) return 0;
  std::array<void*, tilestream::Workspace::kRegions> regions;
  std::copy_n(addresses, regions.size(), regions.begin());
  tilestream::give_workspace(device, stream, context, regions, {0, sizes[0], sizes[1], sizes[2], sizes[3]});
  return 1;
}

// A sequence of `count` integers, to be freed; null, with `*why` valid until this thread's next call, if there is none.
EXPORT void* tilestream_sequence_make(const int64_t* integers, int64_t count, const char** why) {
  static thread_local std::string said;
  try {
    return new tilestream::Sequence({integers, static_cast<size_t>(count)});
  } catch (const std::exception& error) {
    said = error.what();
    *why = said.c_str();
    return nullptr;
  }
}

// Issue the operations from `first` on: see `Sequence::issue`.
EXPORT int64_t tilestream_sequence_issue(const void* sequence, const uint64_t* slots, int64_t first, int32_t* code) {
  const auto& issued = *static_cast<const tilestream::Sequence*>(sequence);
  return static_cast<int64_t>(issued.issue({slots, issued.slots()}, static_cast<size_t>(first), code));
}

EXPORT void tilestream_sequence_free(void* sequence) { delete static_cast<tilestream::Sequence*>(sequence); }
