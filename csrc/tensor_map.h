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

  // The map of such a tensor at `address`. False if the driver refuses.
  bool encode(void* address, TensorMapBytes* map) const;
};

}  // namespace tilestream
