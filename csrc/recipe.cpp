#include "recipe.h"

#include <algorithm>
#include <cstring>
#include <mutex>
#include <stdexcept>
#include <string>

namespace tilestream {
namespace {

constexpr int64_t kVersion = 3;
thread_local int launch_code = kSuccess;
constexpr size_t kMaxKernels = 4, kMaxParameters = 256;
constexpr int kAttributeWords = sizeof(LaunchAttribute) / sizeof(int64_t);

[[noreturn]] void refuse(const char* why) { throw std::invalid_argument(std::string("recipe: ") + why); }

}  // namespace

// Reads the integers one after another.
class Reader {
 public:
  explicit Reader(std::span<const int64_t> integers) : left_(integers) {}

  int64_t next() {
    if (left_.empty()) refuse("it ends too early");
    const int64_t value = left_.front();
    left_ = left_.subspan(1);
    return value;
  }

  size_t count(size_t most) {
    const int64_t value = next();
    if (value < 0 || static_cast<uint64_t>(value) > most) refuse("a count is out of range");
    return static_cast<size_t>(value);
  }

  template <typename Value>
  void into(Value* values, size_t count) {
    for (size_t i = 0; i < count; i++) values[i] = static_cast<Value>(next());
  }

  bool ended() const { return left_.empty(); }

 private:
  std::span<const int64_t> left_;
};

namespace {

TensorMap read_tensor_map(Reader& reader) {
  TensorMap map{};
  map.element_type = static_cast<int>(reader.next());
  map.rank = static_cast<uint32_t>(reader.count(TensorMap::kMaxRank));
  reader.into(map.extents, map.rank);
  reader.into(map.strides, map.rank);
  reader.into(map.box, map.rank);
  map.swizzle = static_cast<int>(reader.next());
  map.promotion = static_cast<int>(reader.next());
  map.fill = static_cast<int>(reader.next());
  map.clears_bit_21 = reader.next() != 0;
  return map;
}

}  // namespace

Kernel::Kernel(Reader& reader, bool counts) {
  function_ = reinterpret_cast<void*>(reader.next());
  reader.into(config_.grid, 3);
  reader.into(config_.block, 3);
  config_.shared_bytes = static_cast<uint32_t>(reader.next());
  attributes_.resize(reader.count(8));
  for (LaunchAttribute& attribute : attributes_) {
    int64_t words[kAttributeWords];
    reader.into(words, kAttributeWords);
    std::memcpy(&attribute, words, sizeof attribute);
  }
  const size_t count = reader.count(kMaxParameters);
  size_t end = 0;
  for (size_t i = 0; i < count; i++) {
    const size_t size = reader.count(sizeof(TensorMapBytes)), alignment = reader.count(alignof(TensorMapBytes));
    const int64_t kind = reader.next();
    if (size == 0 || alignment == 0) refuse("a parameter has no size or no alignment");
    const size_t offset = (end + alignment - 1) / alignment * alignment;
    end = offset + size;
    if (end > kMaxBytes) refuse("the parameters are larger than a launch takes");
    template_.resize(end);
    offsets_.push_back(offset);
    Slot slot{static_cast<Kind>(kind), offset, size, 0, 0, {}};
    switch (slot.kind) {
      case Kind::kConstant: {
        if (size > sizeof(int64_t)) refuse("a constant is larger than 8 bytes");
        const int64_t value = reader.next();
        std::memcpy(template_.data() + offset, &value, size);
        continue;
      }
      case Kind::kBase:
        break;
      case Kind::kFactor:
        slot.index = reader.count(Given::kFactors - 1);
        break;
      case Kind::kWord:
        slot.index = reader.count(kWords - 1);
        break;
      case Kind::kAddress:
      case Kind::kTensorMap:
        slot.index = reader.count(kOperands + Workspace::kRegions - 1);
        slot.behind = reader.next();
        if (slot.kind == Kind::kTensorMap) {
          if (driver().encode_tiled == nullptr) refuse("a parameter is a tensor map, which the driver does not have");
          slot.map = read_tensor_map(reader);
        }
        break;
      default:
        refuse("a kind of parameter is unknown");
    }
    const bool is_map = slot.kind == Kind::kTensorMap, is_address = slot.kind == Kind::kAddress;
    if (is_map ? size != sizeof(TensorMapBytes) : size != 8 && (size != 4 || is_address)) {
      refuse("a parameter has another size than its kind");
    }
    const bool of_workspace = slot.kind == Kind::kBase || ((is_map || is_address) && slot.index >= kOperands);
    if (of_workspace && !counts) refuse("a parameter is of the workspace, and the launch needs none");
    slots_.push_back(slot);
  }
  config_.attribute_count = static_cast<uint32_t>(attributes_.size());
}

bool Kernel::launch(const Given& given, void* stream) const {
  alignas(TensorMapBytes) std::byte parameters[kMaxBytes];
  void* addresses[kMaxParameters];
  std::memcpy(parameters, template_.data(), template_.size());
  for (size_t i = 0; i < offsets_.size(); i++) addresses[i] = parameters + offsets_[i];
  for (const Slot& slot : slots_) {
    if (!fill(slot, given, parameters)) return false;
  }
  LaunchConfig config = config_;
  config.stream = stream;
  config.attributes = attributes_.data();
  launch_code = driver().launch(&config, function_, addresses, nullptr);
  return launch_code == kSuccess;
}

bool Kernel::reads(Operand operand) const {
  return std::ranges::any_of(slots_, [&](const Slot& slot) {
    return (slot.kind == Kind::kAddress || slot.kind == Kind::kTensorMap) && slot.index == static_cast<size_t>(operand);
  });
}

bool Kernel::fill(const Slot& slot, const Given& given, std::byte* parameters) const {
  std::byte* const place = parameters + slot.offset;
  const auto put = [&](const auto& value) { std::memcpy(place, &value, sizeof value); };
  const auto address = [&]() -> void* { return static_cast<std::byte*>(given.addresses[slot.index]) + slot.behind; };
  switch (slot.kind) {
    case Kind::kAddress:
      put(address());
      break;
    case Kind::kBase:
      if (slot.size == 4) {
        put(static_cast<int32_t>(given.base));
      } else {
        put(given.base);
      }
      break;
    case Kind::kFactor:
      if (slot.size == 4) {
        put(static_cast<float>(given.factors[slot.index]));
      } else {
        put(given.factors[slot.index]);
      }
      break;
    case Kind::kWord:
      if (slot.size == 4) {
        put(static_cast<int32_t>(given.words[slot.index]));
      } else {
        put(given.words[slot.index]);
      }
      break;
    case Kind::kTensorMap:
      return slot.map.encode(address(), reinterpret_cast<TensorMapBytes*>(place));
    case Kind::kConstant:
      break;
  }
  return true;
}

int last_launch_code() { return launch_code; }

Recipe::Recipe(std::span<const int64_t> integers) {
  Reader reader(integers);
  if (reader.next() != kVersion) refuse("another version");
  need_ = {reader.next(), reader.next(), reader.next(), reader.next(), reader.next()};
  const size_t count = reader.count(kMaxKernels);
  if (count == 0) refuse("it has no kernel");
  for (size_t i = 0; i < count; i++) kernels_.emplace_back(reader, need_.any());
  if (!reader.ended()) refuse("it is too long");
}

bool Recipe::reads(Operand operand) const {
  return std::ranges::any_of(kernels_, [&](const Kernel& kernel) { return kernel.reads(operand); });
}

bool Recipe::issue(Given& given, int32_t device, int64_t context) const {
  void* stream = nullptr;
  if (driver().current_stream(device, &stream) != kSuccess) return false;
  if (need_.any()) {  // a captured launch has words of its own: `tilestream.runtime.device_workspace.captured_words`
    int capturing = 0;
    if (driver().stream_is_capturing(stream, &capturing) != kSuccess || capturing != 0) return false;
  }
  return issue_on(stream, given, device, context);
}

bool Recipe::issue_on(void* stream, Given& given, int32_t device, int64_t context) const {
  size_t launched = 0;
  const auto launch_all = [&] {
    while (launched < kernels_.size() && kernels_[launched].launch(given, stream)) launched++;
    return launched == kernels_.size();
  };
  if (!need_.any()) return launch_all();
  const std::shared_ptr<Workspace> workspace = find_workspace({device, stream, context});
  if (workspace == nullptr) return false;
  std::lock_guard lock(workspace->mutex);
  if (!workspace->holds(need_)) return false;
  std::ranges::copy(workspace->addresses, given.addresses.begin() + kOperands);
  given.base = workspace->base;
  const bool all = launch_all();
  if (launched > 0) workspace->base += need_.tickets;  // also where only a kernel behind it failed
  return all;
}

bool Recipe::has_words(void* stream, int32_t device, int64_t context) const {
  if (!need_.any()) return true;
  const std::shared_ptr<Workspace> workspace = find_workspace({device, stream, context});
  if (workspace == nullptr) return false;
  std::lock_guard lock(workspace->mutex);
  return workspace->holds(need_);
}

}  // namespace tilestream
