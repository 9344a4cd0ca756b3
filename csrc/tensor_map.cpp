#include "tensor_map.h"

#include <array>
#include <atomic>

namespace tilestream {
namespace {

struct Encoded {
  uint64_t number = 0;
  void* address = nullptr;
  TensorMapBytes map;
};

constexpr size_t kKept = 64;
thread_local std::array<Encoded, kKept> kept;

}  // namespace

uint64_t TensorMap::next_number() {
  static std::atomic<uint64_t> last = 0;
  return ++last;
}

bool TensorMap::encode(void* address, TensorMapBytes* map) const {
  // Allocators give out multiples of 512 bytes.
  Encoded& found = kept[(number + reinterpret_cast<uintptr_t>(address) / 512) % kKept];
  if (found.number != number || found.address != address) {
    static constexpr uint32_t ones[kMaxRank] = {1, 1, 1, 1, 1};
    constexpr int no_interleave = 0;
    found.number = 0;
    const int code = driver().encode_tiled(
        &found.map, element_type, rank, address, extents, strides, box, ones, no_interleave, swizzle, promotion, fill);
    if (code != kSuccess) return false;
    if (clears_bit_21) found.map.words[1] &= ~(uint64_t{1} << 21);
    found.number = number;
    found.address = address;
  }
  *map = found.map;
  return true;
}

}  // namespace tilestream
