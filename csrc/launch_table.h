// Recipes by key: all that decides a launch but addresses. The table is bounded, keeps no tensor, and threads share it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "recipe.h"

namespace tilestream {

// A key under construction: integers, of which there is room for a call with seven operands of eight dimensions.
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

// A launch, and the output that it writes.
struct Entry {
  std::unique_ptr<const Recipe> recipe;
  std::vector<int64_t> sizes, strides;  // of a fresh output
  int32_t dtype;
};

// The entry of a key, null if there is none. It lives on with the caller while the table is cleared.
std::shared_ptr<const Entry> find_entry(const Key& key);

// Insert or replace. A table that is full is emptied first.
void insert_entry(const Key& key, std::shared_ptr<const Entry> entry);

void clear_table();
size_t table_size();
void set_table_capacity(size_t entries);

}  // namespace tilestream
