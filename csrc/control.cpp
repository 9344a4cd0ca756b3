// What Python calls through ctypes: `tilestream.launch.native`, `tilestream.launch.native_program`,
// `tilestream.runtime.sequence`, `tilestream.runtime.producer`.
#include <algorithm>
#include <array>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "driver.h"
#include "launch_table.h"
#include "producer.h"
#include "program.h"
#include "sequence.h"
#include "workspace.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// What `make` makes, to be freed; null, with `*why` valid until this thread's next call, if it refuses.
template <typename Make>
void* made_by(Make make, const char** why) {
  static thread_local std::string said;
  try {
    return make();
  } catch (const std::exception& error) {
    said = error.what();
    *why = said.c_str();
    return nullptr;
  }
}

}  // namespace

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
  tilestream::give_workspace({device, stream, context}, regions, {0, sizes[0], sizes[1], sizes[2], sizes[3]});
  return 1;
}

// Take its words back from the stream that used them longest ago: its device, handle and context. False if none is left
// but default streams' and those that are launched on now. The caller frees what it has allocated on that stream.
EXPORT int32_t tilestream_take_workspace(int64_t* place) {
  tilestream::StreamKey taken;
  if (tilestream::is_forked() || !tilestream::take_oldest_workspace(&taken)) return 0;
  place[0] = std::get<0>(taken);
  place[1] = reinterpret_cast<int64_t>(std::get<1>(taken));
  place[2] = std::get<2>(taken);
  return 1;
}

// A sequence of `count` integers, to be freed; null, with `*why` valid until this thread's next call, if there is none.
EXPORT void* tilestream_sequence_make(const int64_t* integers, int64_t count, const char** why) {
  return made_by([&] { return new tilestream::Sequence({integers, static_cast<size_t>(count)}); }, why);
}

// Issue the operations from `first` on: see `Sequence::issue`.
EXPORT int64_t tilestream_sequence_issue(const void* sequence, const uint64_t* slots, int64_t first, int32_t* code) {
  const auto& issued = *static_cast<const tilestream::Sequence*>(sequence);
  return static_cast<int64_t>(issued.issue({slots, issued.slots()}, static_cast<size_t>(first), code));
}

EXPORT void tilestream_sequence_free(void* sequence) { delete static_cast<tilestream::Sequence*>(sequence); }

// A producer, to be freed; null, with `*why`, as for a sequence.
EXPORT void* tilestream_producer_make(const char** why) {
  return made_by([] { return new tilestream::Producer(); }, why);
}

EXPORT void tilestream_producer_free(void* producer) { delete static_cast<tilestream::Producer*>(producer); }

// Begin a job of `count` integers: see `Producer::start`. Null, or why it is refused, valid until this thread's next
// call.
EXPORT const char* tilestream_producer_start(void* producer, const int64_t* integers, int64_t count) {
  const char* why = nullptr;
  const auto start = [&] {
    static_cast<tilestream::Producer*>(producer)->start({integers, static_cast<size_t>(count)});
    return producer;
  };
  made_by(start, &why);
  return why;
}

EXPORT void tilestream_producer_wake(void* producer) { static_cast<tilestream::Producer*>(producer)->wake(); }

EXPORT void tilestream_producer_stop(void* producer) { static_cast<tilestream::Producer*>(producer)->stop(); }

EXPORT int32_t tilestream_producer_is_busy(const void* producer) {
  return static_cast<const tilestream::Producer*>(producer)->is_busy();
}

// Whether the job has ended, after at most so many nanoseconds.
EXPORT int32_t tilestream_producer_wait(void* producer, int64_t nanoseconds) {
  return static_cast<tilestream::Producer*>(producer)->wait(nanoseconds);
}

// The five integers of `Producer::Result`.
EXPORT void tilestream_producer_result(const void* producer, int64_t* words) {
  const auto result = static_cast<const tilestream::Producer*>(producer)->result();
  words[0] = static_cast<int64_t>(result.end);
  words[1] = result.experts;
  words[2] = static_cast<int64_t>(result.operation);
  words[3] = result.code;
  words[4] = result.cpu_nanoseconds;
}

// Whether this thread's launches are kept from now on; forgets those that were kept.
EXPORT void tilestream_keep_launches(int32_t keep) { tilestream::keep_launches(keep != 0); }

// The oldest launch that was kept and not taken, to be freed; null if there is none.
EXPORT void* tilestream_take_kept() { return tilestream::take_kept().release(); }

// A launch by a recipe of `count` integers, to be freed, that is given nothing; null, with `*why`, as for a sequence.
EXPORT void* tilestream_launch_make(const int64_t* recipe, int64_t count, const char** why) {
  const auto make = [&] {
    tilestream::Entry entry{
        std::make_unique<const tilestream::Recipe>(std::span(recipe, static_cast<size_t>(count))), {}, std::nullopt};
    return new tilestream::Launched{std::make_shared<const tilestream::Entry>(std::move(entry)), {}};
  };
  return made_by(make, why);
}

EXPORT void tilestream_launch_free(void* launch) { delete static_cast<tilestream::Launched*>(launch); }

// A program of `count` integers, to be freed; null, with `*why`, as for a sequence.
EXPORT void* tilestream_program_make(const int64_t* integers, int64_t count, const char** why) {
  return made_by([&] { return new tilestream::Program({integers, static_cast<size_t>(count)}); }, why);
}

// Issue the parts from `first` on: see `Program::issue`. Returns the number of parts that are issued. `stopped`: the
// issued operations of the next one, the code, and that number once more, as an interrupt may lose what is returned.
EXPORT int64_t tilestream_program_issue(
    const void* program, const uint64_t* values, int32_t device, int64_t first, int64_t* stopped) {
  const auto& issued = *static_cast<const tilestream::Program*>(program);
  const auto progress = issued.issue({values, issued.values()}, device, static_cast<size_t>(first));
  stopped[0] = static_cast<int64_t>(progress.operations);
  stopped[1] = progress.code;
  stopped[2] = static_cast<int64_t>(progress.parts);
  return static_cast<int64_t>(progress.parts);
}

EXPORT void tilestream_program_free(void* program) { delete static_cast<tilestream::Program*>(program); }
