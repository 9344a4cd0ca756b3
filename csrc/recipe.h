// A recipe: how to launch one compiled kernel for operands of one layout, made once by Python.
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

// What a call gives, in the order that `tilestream.launch.native.OPERANDS` names them.
struct Given {
  static constexpr int kOperands = 7;  // a, b, out, bias, residual, scale_a, scale_b
  static constexpr int kFactors = 2;   // alpha, beta

  std::array<void*, kOperands> addresses{};
  std::array<double, kFactors> factors{};
};

class Recipe {
 public:
  static constexpr size_t kMaxBytes = 4096;  // of all parameters: the limit of a kernel launch

  // From the integers that `tilestream.launch.native.Recipe.integers` makes. Throws std::invalid_argument.
  explicit Recipe(std::span<const int64_t> integers);
  Recipe(const Recipe&) = delete;
  Recipe& operator=(const Recipe&) = delete;

  // Launch on torch's current stream of the device. False if Python has to do it: the stream has no words or is being
  // captured, or the driver refuses, and Python's own launch says why.
  bool issue(const Given& given, int32_t device, int64_t context) const;

 private:
  enum class Kind : int64_t { kConstant, kOperand, kWorkspace, kBase, kFactor, kTensorMap };

  // A parameter that each launch fills in.
  struct Slot {
    Kind kind;
    size_t offset;
    size_t size;
    size_t index;  // which operand, address of the workspace, factor; of a tensor map, its operand
    TensorMap map;
  };

  bool launch(const Given& given, const Workspace* workspace, void* stream) const;
  bool fill(const Slot& slot, const Given& given, const Workspace* workspace, std::byte* parameters) const;

  void* function_;
  LaunchConfig config_{};
  std::vector<LaunchAttribute> attributes_;
  WorkspaceNeed need_;
  std::vector<std::byte> template_;  // all parameters; those of `slots_` are zero
  std::vector<size_t> offsets_;
  std::vector<Slot> slots_;
};

}  // namespace tilestream
