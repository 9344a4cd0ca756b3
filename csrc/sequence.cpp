#include "sequence.h"

#include <algorithm>
#include <stdexcept>
#include <string>

#include "driver.h"

namespace tilestream {
namespace {

constexpr int64_t kVersion = 2;
constexpr size_t kMaxOperations = 1 << 16, kMaxSlots = 1 << 12, kHead = 2, kIntegers = 9, kMaxBatch = 32;

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(std::string("sequence: ") + why); }

void* pointer(uint64_t value) { return reinterpret_cast<void*>(value); }

// Whether one of `count` words, `stride` bytes apart, is greater than `most`. GPUs may write them now.
bool is_any_greater(uint64_t address, uint64_t stride, uint64_t count, int64_t most) {
  for (uint64_t i = 0; i < count; i++) {
    if (*reinterpret_cast<const volatile int64_t*>(address + i * stride) > most) return true;
  }
  return false;
}

}  // namespace

Sequence::Sequence(std::span<const int64_t> integers) {
  if (!driver().issues_sequences()) refuse("the driver lacks a function");
  if (integers.size() < kHead || (integers.size() - kHead) % kIntegers != 0) refuse("another length");
  if (integers[0] != kVersion) refuse("another version");
  if (integers[1] < 0 || static_cast<uint64_t>(integers[1]) > kMaxSlots) refuse("too many slots");
  slots_ = static_cast<size_t>(integers[1]);
  const size_t count = (integers.size() - kHead) / kIntegers;
  if (count > kMaxOperations) refuse("too many operations");
  operations_.reserve(count);
  for (auto left = integers.subspan(kHead); !left.empty(); left = left.subspan(kIntegers)) {
    if (left[0] < 0 || left[0] > static_cast<int64_t>(Kind::kCheck)) refuse("a kind of operation is unknown");
    Operation made{static_cast<Kind>(left[0]), {}, 0};
    for (size_t i = 0; i < made.operands.size(); i++) {
      const int64_t slot = left[1 + 2 * i];
      if (slot >= integers[1]) refuse("an operand is of a slot that is not there");
      made.operands[i] = {slot, static_cast<uint64_t>(left[2 + 2 * i])};
    }
    operations_.push_back(made);
  }
  if (driver().batch != nullptr) join_batches();
}

void Sequence::join_batches() {
  const auto is_word = [](const Operation& x) { return x.kind == Kind::kWrite || x.kind == Kind::kWait; };
  for (size_t i = operations_.size(); i-- > 0;) {
    Operation& x = operations_[i];
    if (!is_word(x)) continue;
    const Operation* next = i + 1 < operations_.size() ? &operations_[i + 1] : nullptr;
    const bool joins = next != nullptr && is_word(*next) && next->operands[0] == x.operands[0];
    x.batch = joins ? std::min(next->batch + 1, kMaxBatch) : 1;
  }
}

int Sequence::issue_batch(std::span<const uint64_t> slots, size_t first) const {
  std::array<MemoryOperation, kMaxBatch> batch;
  const auto of_batch = std::span(operations_).subspan(first, operations_[first].batch);
  for (size_t i = 0; i < of_batch.size(); i++) {
    const auto& [kind, operands, _] = of_batch[i];
    const auto what = kind == Kind::kWrite ? MemoryOperation::kWrite : MemoryOperation::kWait;
    batch[i] = {what, operands[1].of(slots), static_cast<uint32_t>(operands[2].of(slots)), 0, 0, 0};
  }
  void* const stream = pointer(of_batch[0].operands[0].of(slots));
  return driver().batch(stream, static_cast<uint32_t>(of_batch.size()), batch.data(), 0);
}

size_t Sequence::issue(std::span<const uint64_t> slots, size_t first, int* code) const {
  *code = kSuccess;
  if (is_forked() || slots.size() != slots_) return first;
  const Driver& gpu = driver();
  for (size_t i = first; i < operations_.size(); i++) {
    const Operation& operation = operations_[i];
    if (operation.batch > 1) {
      *code = issue_batch(slots, i);
      if (*code != kSuccess) return i;
      i += operation.batch - 1;
      continue;
    }
    const auto value = [&](size_t operand) { return operation.operands[operand].of(slots); };
    void* const stream = pointer(value(0));  // or what the operation has in its place
    switch (operation.kind) {
      case Kind::kCopyIn:
        *code = gpu.copy_in(value(1), pointer(value(2)), value(3), stream);
        break;
      case Kind::kCopyAcross:
        *code = gpu.copy_across(value(1), value(2), value(3), stream);
        break;
      case Kind::kWrite:
        *code = gpu.write(stream, value(1), static_cast<uint32_t>(value(2)), 0);
        break;
      case Kind::kWait:
        *code = gpu.wait(stream, value(1), static_cast<uint32_t>(value(2)), 0);
        break;
      case Kind::kRecord:
        *code = gpu.record_event(pointer(value(1)), stream);
        break;
      case Kind::kWaitEvent:
        *code = gpu.wait_event(stream, pointer(value(1)), 0);
        break;
      case Kind::kAwaitEvent:
        *code = gpu.await_event(stream);
        break;
      case Kind::kCheck:
        if (is_any_greater(value(0), value(1), value(2), static_cast<int64_t>(value(3)))) *code = kStopped;
        break;
    }
    if (*code != kSuccess) return i;
  }
  return operations_.size();
}

}  // namespace tilestream
