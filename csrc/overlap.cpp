#include "overlap.h"

namespace tilestream {
namespace {

// Bytes from the first to the last, modulo rows of `length` bytes (0: not modulo anything).
int64_t span_of(const Place& x, int64_t length = 0) {
  int64_t bytes = x.element_size;
  for (size_t i = 0; i < x.sizes.size(); i++) {
    const int64_t stride = x.strides[i] * x.element_size;
    if (length == 0 || stride % length != 0) bytes += (x.sizes[i] - 1) * stride;
  }
  return bytes;
}

bool is_empty(const Place& x) {
  for (const int64_t size : x.sizes) {
    if (size == 0) return true;
  }
  return false;
}

}  // namespace

bool may_overlap(const Place& x, const Place& y) {
  if (is_empty(x) || is_empty(y)) return false;
  if (x.address + span_of(x) <= y.address || y.address + span_of(y) <= x.address) return false;
  // In rows of one length, columns that do not meet: x begins behind y's last column and ends before the next row.
  for (size_t i = 0; i < y.sizes.size(); i++) {
    const int64_t length = y.strides[i] * y.element_size;
    if (y.sizes[i] <= 1 || length <= 0) continue;
    int64_t offset = static_cast<int64_t>(x.address - y.address) % length;
    if (offset < 0) offset += length;
    if (span_of(y, length) <= offset && offset + span_of(x, length) <= length) return false;
  }
  return true;
}

bool same_elements(const Place& x, const Place& y) {
  if (x.address != y.address || x.element_size != y.element_size) return false;
  size_t i = 0, j = 0;
  while (true) {  // dimensions of extent 1 count for nothing
    while (i < x.sizes.size() && x.sizes[i] == 1) i++;
    while (j < y.sizes.size() && y.sizes[j] == 1) j++;
    if (i == x.sizes.size() || j == y.sizes.size()) return i == x.sizes.size() && j == y.sizes.size();
    if (x.sizes[i] != y.sizes[j] || x.strides[i] != y.strides[j]) return false;
    i++, j++;
  }
}

}  // namespace tilestream
