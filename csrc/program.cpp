#include "program.h"

#include <deque>
#include <stdexcept>
#include <string>

#include "driver.h"

namespace tilestream {
namespace {

constexpr int64_t kVersion = 2;
constexpr int64_t kSequence = 0, kLaunch = 1, kAddress = 0, kWord = 1;
constexpr size_t kMaxValues = 1 << 8, kMaxParts = 1 << 10, kMaxPatches = 1 << 6;

thread_local bool keeps = false;
thread_local std::deque<std::unique_ptr<Launched>> kept;

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(std::string("program: ") + why); }

}  // namespace

void keep_launches(bool keep) {
  keeps = keep;
  kept.clear();
}

void launched(const std::shared_ptr<const Entry>& entry, const Given& given) {
  if (keeps) kept.push_back(std::make_unique<Launched>(Launched{entry, given}));
}

std::unique_ptr<Launched> take_kept() {
  if (kept.empty()) return nullptr;
  std::unique_ptr<Launched> first = std::move(kept.front());
  kept.pop_front();
  return first;
}

Program::Program(std::span<const int64_t> integers) {
  const auto next = [&] {
    if (integers.empty()) refuse("it ends too early");
    const int64_t value = integers.front();
    integers = integers.subspan(1);
    return value;
  };
  const auto count = [&](size_t most) {
    const int64_t value = next();
    if (value < 0 || static_cast<uint64_t>(value) > most) refuse("a count is out of range");
    return static_cast<size_t>(value);
  };
  if (next() != kVersion) refuse("another version");
  values_ = count(kMaxValues);
  if (values_ == 0) refuse("it has no stream");
  for (size_t left = count(kMaxParts); left > 0; left--) {
    const int64_t kind = next(), address = next();
    if (address == 0) refuse("a part is missing");
    if (kind == kSequence) {
      const auto* sequence = reinterpret_cast<const Sequence*>(address);
      if (sequence->slots() > values_) refuse("a sequence has more slots than there are values");
      if (next() != 0) refuse("a sequence has no patches");
      parts_.emplace_back(sequence);
      continue;
    }
    if (kind != kLaunch) refuse("a kind of part is unknown");
    const auto& kept_launch = *reinterpret_cast<const Launched*>(address);
    const int64_t stream = next();
    if (stream < 0 || stream >= static_cast<int64_t>(values_)) refuse("a stream is of a value that is not there");
    Launch launch{kept_launch.entry, kept_launch.given, static_cast<size_t>(stream), {}};
    for (size_t patches = count(kMaxPatches); patches > 0; patches--) {
      const int64_t what = next();
      if (what != kAddress && what != kWord) refuse("a kind of patch is unknown");
      const size_t index = count(what == kWord ? kWords - 1 : kOperands - 1);
      const int64_t value = next();
      if (value >= static_cast<int64_t>(values_)) refuse("a patch is of a value that is not there");
      launch.patches.push_back({what == kWord, index, value, static_cast<uint64_t>(next())});
    }
    parts_.emplace_back(std::move(launch));
  }
  if (!integers.empty()) refuse("it is too long");
}

bool Program::may_begin(std::span<const uint64_t> values, int32_t device, int64_t context) const {
  const auto stream_of = [&](size_t value) { return reinterpret_cast<void*>(values[value]); };
  int capturing = 0;
  if (driver().stream_is_capturing(stream_of(0), &capturing) != kSuccess || capturing != 0) return false;
  for (const auto& part : parts_) {
    const auto* launch = std::get_if<Launch>(&part);
    if (launch != nullptr && !launch->entry->recipe->has_words(stream_of(launch->stream), device, context)) {
      return false;
    }
  }
  return true;
}

Program::Progress Program::issue(std::span<const uint64_t> values, int32_t device, size_t first) const {
  if (is_forked() || driver().launch == nullptr || values.size() != values_) return {first, 0, kDeclined};
  int64_t context = 0;
  if (!context_of(device, &context)) return {first, 0, kDeclined};
  if (first == 0 && !may_begin(values, device, context)) return {first, 0, kDeclined};
  for (size_t i = first; i < parts_.size(); i++) {
    if (const auto* sequence = std::get_if<const Sequence*>(&parts_[i])) {
      int code = kSuccess;
      const size_t done = (*sequence)->issue(values.first((*sequence)->slots()), 0, &code);
      if (done != (*sequence)->size()) return {i, done, code};
      continue;
    }
    const auto& launch = std::get<Launch>(parts_[i]);
    Given given = launch.given;
    for (const Patch& patch : launch.patches) {
      const uint64_t value = patch.value < 0 ? patch.constant : values[static_cast<size_t>(patch.value)] + patch.constant;
      if (patch.is_word) {
        given.words[patch.index] = static_cast<int64_t>(value);
      } else {
        given.addresses[patch.index] = reinterpret_cast<void*>(value);
      }
    }
    void* const stream = reinterpret_cast<void*>(values[launch.stream]);
    if (!launch.entry->recipe->issue_on(stream, given, device, context)) {
      const int code = last_launch_code();
      return {i, 0, code == kSuccess ? kNotLaunched : code};
    }
  }
  return {parts_.size(), 0, kSuccess};
}

}  // namespace tilestream
