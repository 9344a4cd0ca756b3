// A recipe: how to launch compiled kernels, one behind another, for operands of one layout; made once by Python.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "driver.h"
#include "tensor_map.h"
#include "workspace.h"

namespace tilestream {

class Reader;

// Operands of all ops, in the order that `tilestream.launch.native.OPERANDS` names them.
enum Operand : int {
  kA, kB, kOut, kBias, kResidual, kScaleA, kScaleB,
  kQ, kK, kV, kLse, kSinks, kScaleQ, kScaleK, kScaleV, kCuSeqlensQ, kCuSeqlensK, kBlockTable, kSeqlensK,
  kOA, kLseA, kOB, kLseB,
  kOffsets,  // where the groups of a grouped product end
  kLocal,  // rows of A that this GPU has already, outside of A
  kOperands
};

// What a launch is told of the chunks that it waits for or publishes and that differs from call to call, in the order of
// `tilestream.launch.observe.WORDS`.
constexpr int kWords = 13;

// What a call gives.
struct Given {
  static constexpr int kFactors = 2;  // alpha, beta

  std::array<void*, kOperands + Workspace::kRegions> addresses{};  // those of the workspace: `Recipe::issue`
  std::array<double, kFactors> factors{};
  std::array<int64_t, kWords> words{};
  int64_t base = 0;  // that the counters start from
};

// A compiled kernel with its grid, and where each of its parameters comes from.
class Kernel {
 public:
  static constexpr size_t kMaxBytes = 4096;  // of all parameters: the limit of a kernel launch

  // Throws std::invalid_argument. `counts`: whether its launch has a workspace.
  Kernel(Reader& reader, bool counts);

  // False if the driver refuses.
  bool launch(const Given& given, void* stream) const;

  bool reads(Operand operand) const;

 private:
  enum class Kind : int64_t { kConstant, kAddress, kBase, kFactor, kTensorMap, kWord };

  // A parameter that each launch fills in.
  struct Slot {
    Kind kind;
    size_t offset;
    size_t size;
    size_t index;    // which address, factor or word
    int64_t behind;  // bytes that are added to an address
    TensorMap map;
  };

  bool fill(const Slot& slot, const Given& given, std::byte* parameters) const;

  void* function_;
  LaunchConfig config_{};  // without stream and attributes
  std::vector<LaunchAttribute> attributes_;
  std::vector<std::byte> template_;  // all parameters; those of `slots_` are zero
  std::vector<size_t> offsets_;
  std::vector<Slot> slots_;
};

// The driver's answer to this thread's last launch.
int last_launch_code();

class Recipe {
 public:
  // From the integers that `tilestream.launch.native.recipe_of` makes. Throws std::invalid_argument.
  explicit Recipe(std::span<const int64_t> integers);

  // Launch on torch's current stream of the device. False if Python has to do it: the stream has no words or is being
  // captured, or the driver refuses, and Python's own launch says why. Fills in what `given` has of the workspace.
  bool issue(Given& given, int32_t device, int64_t context) const;

  // Likewise, on a stream that is not being captured.
  bool issue_on(void* stream, Given& given, int32_t device, int64_t context) const;

  // Whether the stream has the words that a launch needs.
  bool has_words(void* stream, int32_t device, int64_t context) const;

  // Whether a kernel is given the operand's address.
  bool reads(Operand operand) const;

 private:
  WorkspaceNeed need_;
  std::vector<Kernel> kernels_;
};

}  // namespace tilestream
