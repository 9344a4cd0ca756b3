#include "launch_table.h"

#include <algorithm>
#include <mutex>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

namespace tilestream {
namespace {

using Words = std::span<const int64_t>;

struct Hash {
  using is_transparent = void;
  size_t operator()(Words words) const {
    uint64_t hash = 0xcbf29ce484222325;  // FNV-1a by 8-byte words, then mixed: the low bits choose the bucket
    for (const int64_t word : words) hash = (hash ^ static_cast<uint64_t>(word)) * 0x100000001b3;
    return hash ^ hash >> 32;
  }
};

struct Equal {
  using is_transparent = void;
  bool operator()(Words one, Words other) const { return std::ranges::equal(one, other); }
};

// Never destroyed: a thread may still launch while the process ends.
std::shared_mutex& mutex = *new std::shared_mutex;
auto& entries = *new std::unordered_map<std::vector<int64_t>, std::shared_ptr<const Entry>, Hash, Equal>;
auto& numbers = *new std::unordered_map<std::vector<int64_t>, int64_t, Hash, Equal>;
size_t capacity = 8192;
int64_t newest_number = 0;

}  // namespace

std::shared_ptr<const Entry> find_entry(const Key& key) {
  if (key.overflows()) return nullptr;
  std::shared_lock lock(mutex);
  const auto found = entries.find(key.words());
  return found == entries.end() ? nullptr : found->second;
}

void insert_entry(const Key& key, std::shared_ptr<const Entry> entry) {
  if (key.overflows()) return;
  std::unique_lock lock(mutex);
  if (entries.size() >= capacity && !entries.contains(key.words())) entries.clear();
  entries[{key.words().begin(), key.words().end()}] = std::move(entry);
}

int64_t number_of(const Key& key) {
  if (key.overflows()) return 0;
  {
    std::shared_lock lock(mutex);
    if (const auto found = numbers.find(key.words()); found != numbers.end()) return found->second;
  }
  std::unique_lock lock(mutex);
  if (numbers.size() >= capacity) numbers.clear();
  const auto [place, is_new] = numbers.try_emplace({key.words().begin(), key.words().end()}, newest_number + 1);
  newest_number += is_new;
  return place->second;
}

void clear_table() {
  std::unique_lock lock(mutex);
  entries.clear();
}

size_t table_size() {
  std::shared_lock lock(mutex);
  return entries.size();
}

void set_table_capacity(size_t entries_at_most) {
  std::unique_lock lock(mutex);
  capacity = std::max<size_t>(entries_at_most, 1);
  entries.clear();
}

}  // namespace tilestream
