// A program: sequences of the driver's operations, and launches between them, issued by one call.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <variant>
#include <vector>

#include "launch_table.h"
#include "sequence.h"

namespace tilestream {

// A launch that was issued, with what it was given.
struct Launched {
  std::shared_ptr<const Entry> entry;
  Given given;
};

// Whether this thread's launches are kept from now on; forgets those that were kept.
void keep_launches(bool keep);

// Called for each launch that was issued from the table.
void launched(const std::shared_ptr<const Entry>& entry, const Given& given);

// The oldest launch that was kept and not taken; null if there is none.
std::unique_ptr<Launched> take_kept();

class Program {
 public:
  // How far an issue has come: parts that are issued; of the next one, a sequence, its operations; and why it ended.
  struct Progress {
    size_t parts, operations;
    int code;  // `kSuccess`, `kDeclined`, `kNotLaunched`, `Sequence::kStopped`, or the driver's
  };
  static constexpr int kDeclined = -1;     // nothing was issued now: the rest is Python's
  static constexpr int kNotLaunched = -2;  // the next part is a launch for which the driver was not asked

  // Throws std::invalid_argument. The integers are those of `tilestream.launch.native_program`: the version; the number
  // of values; of each part its kind, the address of its `Sequence` or `Launched`, of a launch the value that is its
  // stream's handle, and the number of its patches; of each patch what it sets (an address, or a word), the index of
  // that, a value or -1, and a constant. Sequences must outlive the program.
  explicit Program(std::span<const int64_t> integers);

  // Issue the parts from `first` on, on a device. The first value is the handle of the caller's stream. A sequence
  // gets as many of the values as it has slots. Declined in a forked process and without a context of the device, and
  // before the first part also if the caller's stream is captured, and where a stream lacks its launch's words.
  Progress issue(std::span<const uint64_t> values, int32_t device, size_t first) const;

  size_t values() const { return values_; }

 private:
  struct Patch {
    bool is_word;
    size_t index;
    int64_t value;  // negative: none
    uint64_t constant;
  };

  struct Launch {
    std::shared_ptr<const Entry> entry;
    Given given;
    size_t stream;  // the value that is its handle
    std::vector<Patch> patches;
  };

  bool may_begin(std::span<const uint64_t> values, int32_t device, int64_t context) const;

  size_t values_;
  std::vector<std::variant<const Sequence*, Launch>> parts_;
};

}  // namespace tilestream
