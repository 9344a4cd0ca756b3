#include "workspace.h"

#include <map>
#include <memory>
#include <shared_mutex>
#include <tuple>

namespace tilestream {
namespace {

using Place = std::tuple<int32_t, void*, int64_t>;

// Never destroyed: a thread may still launch while the process ends.
std::shared_mutex& mutex = *new std::shared_mutex;
auto& workspaces = *new std::map<Place, std::unique_ptr<Workspace>>;

}  // namespace

bool Workspace::holds(const WorkspaceNeed& need) const {
  return need.counters <= size.counters && need.counts <= size.counts && need.partials <= size.partials;
}

Workspace* find_workspace(int32_t device, void* stream, int64_t context) {
  std::shared_lock lock(mutex);
  const auto found = workspaces.find({device, stream, context});
  return found == workspaces.end() ? nullptr : found->second.get();
}

void give_workspace(
    int32_t device, void* stream, int64_t context, uint64_t counters, uint64_t counts, uint64_t partials,
    const WorkspaceNeed& size) {
  std::unique_lock lock(mutex);
  auto& workspace = workspaces[{device, stream, context}];
  if (workspace == nullptr) workspace = std::make_unique<Workspace>();
  std::lock_guard own(workspace->mutex);
  workspace->counters = counters;
  workspace->counts = counts;
  workspace->partials = partials;
  workspace->size = size;
  workspace->base = 0;
}

}  // namespace tilestream
