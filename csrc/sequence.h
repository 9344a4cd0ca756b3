// A sequence: operations of the driver, one behind another, on several streams. Prepared once and issued often: its
// operands are constants, or a value of the issue plus a constant.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace tilestream {

class Sequence {
 public:
  // Throws std::invalid_argument. The integers are those of `tilestream.runtime.sequence`: the version, the number of
  // slots, and for each operation its kind and four operands of two integers each: a slot, or -1, and a constant.
  explicit Sequence(std::span<const int64_t> integers);

  // Issue the operations from `first` on; returns the number of the first one that was not issued. That is the number
  // of operations, or that of the one which the driver refuses, with `*code`: of a batch, the first one. A captured
  // stream takes them into its graph. A forked process issues nothing.
  size_t issue(std::span<const uint64_t> slots, size_t first, int* code) const;

  // The code of an operation that stops the issue: a word of host memory is greater than it may be.
  static constexpr int kStopped = -3;

  size_t size() const { return operations_.size(); }
  size_t slots() const { return slots_; }

 private:
  enum class Kind : int64_t { kCopyIn, kCopyAcross, kWrite, kWait, kRecord, kWaitEvent, kAwaitEvent, kCheck };

  struct Operand {
    int64_t slot;  // negative: none
    uint64_t constant;

    bool operator==(const Operand&) const = default;
    uint64_t of(std::span<const uint64_t> slots) const {
      return slot < 0 ? constant : slots[static_cast<size_t>(slot)] + constant;
    }
  };

  struct Operation {
    Kind kind;
    std::array<Operand, 4> operands;
    size_t batch;  // from here on, writes and waits of one stream that the driver takes together; 0 or 1: none
  };

  void join_batches();
  int issue_batch(std::span<const uint64_t> slots, size_t first) const;

  size_t slots_;
  std::vector<Operation> operations_;
};

}  // namespace tilestream
