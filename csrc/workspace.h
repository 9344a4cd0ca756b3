// The words that dynamic and stream-K launches count with, one set for each (device, stream, context).
//
// Python allocates them and keeps the tensors (`tilestream.launch.native`); here are their addresses, and the base that
// the counters of the next launch start from (invariants 4 and 8 of docs/design.md).
#pragma once

#include <cstdint>
#include <mutex>

namespace tilestream {

// What a launch needs of a workspace. `tickets` is how far its counters can rise; 0 if it uses no workspace.
struct WorkspaceNeed {
  int64_t tickets = 0;
  int64_t counters = 0;  // 8-byte words
  int64_t counts = 0;    // 4-byte words
  int64_t partials = 0;  // floats
};

struct Workspace {
  std::mutex mutex;  // held from the reading of `base` until the launch has been issued
  uint64_t counters = 0, counts = 0, partials = 0;  // addresses
  WorkspaceNeed size;
  int64_t base = 0;

  bool holds(const WorkspaceNeed& need) const;
};

// The workspace of a stream; null if Python has given none.
Workspace* find_workspace(int32_t device, void* stream, int64_t context);

// Give a stream zeroed words, in place of those that it had.
void give_workspace(
    int32_t device, void* stream, int64_t context, uint64_t counters, uint64_t counts, uint64_t partials,
    const WorkspaceNeed& size);

}  // namespace tilestream
