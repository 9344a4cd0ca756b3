// Recipes by key: all that decides a launch but addresses. The table is bounded, keeps no tensor, and threads share it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <vector>

#include "recipe.h"

namespace tilestream {

// A key under construction: integers, of which there is room for seven operands of eight dimensions, or twelve of four.
class Key {
 public:
  void add(int64_t word) {
    if (size_ < words_.size()) {
      words_[size_++] = word;
    } else {
      overflows_ = true;
    }
  }

  // Whether the words did not fit: such a call has no key.
  bool overflows() const { return overflows_; }
  std::span<const int64_t> words() const { return {words_.data(), size_}; }

 private:
  std::array<int64_t, 144> words_;
  size_t size_ = 0;
  bool overflows_ = false;
};

// How a fresh output lies in memory.
struct Layout {
  std::vector<int64_t> sizes, strides;
  int32_t dtype;
};

// A launch, and the outputs that it writes.
struct Entry {
  std::unique_ptr<const Recipe> recipe;
  Layout out;
  std::optional<Layout> lse;
};

// The entry of a key, null if there is none. It lives on with the caller while the table is cleared.
std::shared_ptr<const Entry> find_entry(const Key& key);

// Insert or replace. A table that is full is emptied first.
void insert_entry(const Key& key, std::shared_ptr<const Entry> entry);

// The number of a key, from 1 on; no other key ever has it. 0 if it overflows.
int64_t number_of(const Key& key);

void clear_table();
size_t table_size();
void set_table_capacity(size_t entries);

}  // namespace tilestream
