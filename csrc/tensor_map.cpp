#include "tensor_map.h"

namespace tilestream {

bool TensorMap::encode(void* address, TensorMapBytes* map) const {
  static constexpr uint32_t ones[kMaxRank] = {1, 1, 1, 1, 1};
  constexpr int no_interleave = 0;
  const int code = driver().encode_tiled(
      map, element_type, rank, address, extents, strides, box, ones, no_interleave, swizzle, promotion, fill);
  if (clears_bit_21) map->words[1] &= ~(uint64_t{1} << 21);
  return code == kSuccess;
}

}  // namespace tilestream
