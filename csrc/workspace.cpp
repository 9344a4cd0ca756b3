#include "workspace.h"

#include <map>
#include <shared_mutex>

namespace tilestream {
namespace {

// Never destroyed: a thread may still launch while the process ends.
std::shared_mutex& mutex = *new std::shared_mutex;
auto& workspaces = *new std::map<StreamKey, std::shared_ptr<Workspace>>;
std::atomic<uint64_t> uses = 0;

}  // namespace

bool Workspace::holds(const WorkspaceNeed& need) const {
  return need.counters <= size.counters && need.counts <= size.counts && need.partials <= size.partials &&
         need.listed <= size.listed;
}

std::shared_ptr<Workspace> find_workspace(const StreamKey& key) {
  std::shared_lock lock(mutex);
  const auto found = workspaces.find(key);
  if (found == workspaces.end()) return nullptr;
  found->second->used.store(uses.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
  return found->second;
}

void give_workspace(
    const StreamKey& key, const std::array<void*, Workspace::kRegions>& addresses, const WorkspaceNeed& size) {
  std::shared_ptr<Workspace> workspace;
  {
    std::unique_lock lock(mutex);
    auto& kept = workspaces[key];
    if (kept == nullptr) kept = std::make_shared<Workspace>();
    kept->used.store(uses.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
    workspace = kept;
  }
  std::lock_guard own(workspace->mutex);  // alone: a launch on this stream may wait long, and others go on
  workspace->addresses = addresses;
  workspace->size = size;
  workspace->base = 0;
}

bool take_oldest_workspace(StreamKey* key) {
  std::unique_lock lock(mutex);
  auto oldest = workspaces.end();
  std::unique_lock<std::mutex> held;
  for (auto one = workspaces.begin(); one != workspaces.end(); ++one) {
    if (std::get<1>(one->first) == nullptr) continue;
    if (oldest != workspaces.end() && one->second->used >= oldest->second->used) continue;
    if (std::unique_lock own(one->second->mutex, std::try_to_lock); own) {
      oldest = one;
      held = std::move(own);
    }
  }
  if (oldest == workspaces.end()) return false;
  *key = oldest->first;
  const std::shared_ptr<Workspace> taken = std::move(oldest->second);  // until `held` is released
  taken->size = {-1, -1, -1, -1, -1};  // a thread that has found it before holds nothing now
  workspaces.erase(oldest);
  held.unlock();
  return true;
}

}  // namespace tilestream
