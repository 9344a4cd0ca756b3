// Whether two tensors may share a byte; the rules of `tilestream.ops.overlap`.
#pragma once

#include <cstdint>
#include <span>

namespace tilestream {

// A tensor in memory; strides in elements.
struct Place {
  uint64_t address;
  int64_t element_size;
  std::span<const int64_t> sizes, strides;
};

// False only if it is certain that no byte is in both.
bool may_overlap(const Place& x, const Place& y);

// Whether both are the same elements in the same order.
bool same_elements(const Place& x, const Place& y);

}  // namespace tilestream
