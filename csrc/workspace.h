// The words that launches count with and keep parts of results in, one set for each (device, stream, context).
//
// Python allocates them and keeps the tensors (`tilestream.launch.native`); here are their addresses, and the base that
// the counters of the next launch start from (invariants 4 and 8 of docs/design.md).
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <tuple>

namespace tilestream {

// What a launch needs of a workspace; all 0 if it uses none. `tickets` is how far its counters can rise.
struct WorkspaceNeed {
  int64_t tickets = 0;
  int64_t counters = 0;  // 8-byte words
  int64_t counts = 0;    // 4-byte words
  int64_t partials = 0;  // floats
  int64_t listed = 0;    // 4-byte words of either half of a list

  bool any() const { return tickets != 0 || counters != 0 || counts != 0 || partials != 0 || listed != 0; }
};

struct Workspace {
  static constexpr int kRegions = 5;  // counters, counts, partials, and a list's halves: starts, order

  std::mutex mutex;  // held from the reading of `base` until the launch has been issued
  std::array<void*, kRegions> addresses{};
  WorkspaceNeed size;
  int64_t base = 0;
  std::atomic<uint64_t> used = 0;  // when it was used last: of two workspaces the later has the higher number

  bool holds(const WorkspaceNeed& need) const;
};

// Device, stream, context.
using StreamKey = std::tuple<int32_t, void*, int64_t>;

// The workspace of a stream, from now on the one used last; null if Python has given none.
std::shared_ptr<Workspace> find_workspace(const StreamKey& key);

// Give a stream words, of which counters and counts are zero, in place of those that it had.
void give_workspace(
    const StreamKey& key, const std::array<void*, Workspace::kRegions>& addresses, const WorkspaceNeed& size);

// Take its words back from the stream that used them longest ago, so that Python can free them: no later launch gets
// them. Default streams keep theirs, and so does a stream that a thread is launching on now. False if there is no other.
bool take_oldest_workspace(StreamKey* key);

}  // namespace tilestream
