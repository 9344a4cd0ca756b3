// Tensor maps: the 128 bytes by which the tensor memory accelerator knows a tensor and the boxes that it copies.
#pragma once

#include <cstdint>

#include "driver.h"

namespace tilestream {

// All of a tensor map but the address. Dimensions stand innermost first, as the driver has them.
struct TensorMap {
  static constexpr int kMaxRank = 5;

  int element_type;
  uint32_t rank;
  uint64_t extents[kMaxRank];
  uint64_t strides[kMaxRank];  // bytes, of all dimensions but the innermost
  uint32_t box[kMaxRank];
  int swizzle;
  int promotion;
  int fill;
  bool clears_bit_21;  // the map of a small tensor under a driver up to 13.1: see `tilestream.launch.tensor_map`
  uint64_t number = next_number();  // this one's, or that of the map that it is a copy of

  // The map of such a tensor at `address`. False if the driver refuses. Each thread keeps the last ones: an allocator
  // gives out the same addresses again and again, and the driver takes 0.3 us for a map.
  bool encode(void* address, TensorMapBytes* map) const;

 private:
  static uint64_t next_number();
};

}  // namespace tilestream
