// CUTLASS's grouped GEMM for Hopper (its example 57) as a library of C functions: a peer of the section "grouped".
// `cutlass.py` compiles it, once for each of its configurations, with -DCONFIG=0, 1, ...; the functions of all have one
// name, and a library has one configuration.
//
// The counts of rows are read on the device: no problem shape is given on the host. `create` makes what a call needs
// (pointers, strides, shapes, tensor maps' room), outside of what is timed, and `run` launches one kernel.

#include <cstdint>
#include <vector>

#include "cutlass/cutlass.h"
#include "cutlass/version.h"
#include "cute/tensor.hpp"
#include "cutlass/epilogue/collective/collective_builder.hpp"
#include "cutlass/gemm/collective/collective_builder.hpp"
#include "cutlass/gemm/device/gemm_universal_adapter.h"
#include "cutlass/gemm/dispatch_policy.hpp"
#include "cutlass/gemm/group_array_problem_shape.hpp"
#include "cutlass/gemm/kernel/gemm_universal.hpp"

using namespace cute;

// Swapped: the kernel's M is our N, so that few rows fill a tile of few columns.
template <bool Swapped, bool Cooperative, class Tile, class Cluster>
struct Configuration {
  using Element = cutlass::bfloat16_t;
  static constexpr int kAlignment = 8;
  using Shape = cutlass::gemm::GroupProblemShape<cute::Shape<int, int, int>>;
  using LayoutOut = std::conditional_t<Swapped, cutlass::layout::ColumnMajor, cutlass::layout::RowMajor>;
  using Kernel = std::conditional_t<
      Cooperative, cutlass::gemm::KernelPtrArrayTmaWarpSpecializedCooperative,
      cutlass::gemm::KernelPtrArrayTmaWarpSpecializedPingpong>;
  using EpilogueSchedule = std::conditional_t<
      Cooperative, cutlass::epilogue::PtrArrayTmaWarpSpecializedCooperative,
      cutlass::epilogue::PtrArrayTmaWarpSpecializedPingpong>;
  using Epilogue = typename cutlass::epilogue::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Tile, Cluster,
      cutlass::epilogue::collective::EpilogueTileAuto, float, float, void, LayoutOut*, kAlignment, Element, LayoutOut*,
      kAlignment, EpilogueSchedule,
      cutlass::epilogue::fusion::LinearCombination<Element, float>>::CollectiveOp;
  using Mainloop = typename cutlass::gemm::collective::CollectiveBuilder<
      cutlass::arch::Sm90, cutlass::arch::OpClassTensorOp, Element, cutlass::layout::RowMajor*, kAlignment, Element,
      cutlass::layout::ColumnMajor*, kAlignment, float, Tile, Cluster,
      cutlass::gemm::collective::StageCountAutoCarveout<static_cast<int>(sizeof(typename Epilogue::SharedStorage))>,
      Kernel>::CollectiveOp;
  using Gemm = cutlass::gemm::device::GemmUniversalAdapter<
      cutlass::gemm::kernel::GemmUniversal<Shape, Mainloop, Epilogue>>;
  static constexpr bool kSwapped = Swapped;
};

#ifndef CONFIG
#error "-DCONFIG= names a configuration"
#elif CONFIG == 0
using Chosen = Configuration<false, true, Shape<_256, _128, _64>, Shape<_2, _1, _1>>;
#elif CONFIG == 1
using Chosen = Configuration<false, true, Shape<_128, _256, _64>, Shape<_2, _1, _1>>;
#elif CONFIG == 2
using Chosen = Configuration<false, false, Shape<_128, _128, _64>, Shape<_1, _2, _1>>;
#elif CONFIG == 3
using Chosen = Configuration<true, false, Shape<_128, _16, _128>, Shape<_1, _1, _1>>;
#endif

using Gemm = Chosen::Gemm;
using StrideA = typename Gemm::GemmKernel::InternalStrideA;
using StrideB = typename Gemm::GemmKernel::InternalStrideB;
using StrideD = typename Gemm::GemmKernel::InternalStrideD;
using Problem = typename Chosen::Shape::UnderlyingProblemShape;

namespace {

template <class T>
T* on_device(const std::vector<T>& values, std::vector<void*>& kept) {
  void* made = nullptr;
  if (cudaMalloc(&made, values.size() * sizeof(T)) != cudaSuccess) return nullptr;
  kept.push_back(made);
  cudaMemcpy(made, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice);
  return static_cast<T*>(made);
}

// A stride of rows without a gap; CUTLASS has it as one number beside compile-time ones.
template <class Stride>
Stride packed(int64_t elements) {
  Stride made{};
  if constexpr (is_static_v<std::decay_t<decltype(get<0>(made))>>) {
    get<1>(made) = elements;
  } else {
    get<0>(made) = elements;
  }
  return made;
}

struct Call {
  Gemm gemm;
  std::vector<void*> kept;
};

}  // namespace

extern "C" {

// A call of rows [sum(sizes), k] and weights [groups, n, k]; null if CUTLASS refuses it, and why in `status`.
void* create(int groups, const int* sizes, int n, int k, const void* rows, const void* weights, void* out, int* status) {
  using Element = Chosen::Element;
  std::vector<Problem> problems;
  std::vector<const Element*> a, b;
  std::vector<Element*> d;
  std::vector<StrideA> stride_a;
  std::vector<StrideB> stride_b;
  std::vector<StrideD> stride_d;
  int64_t begin = 0;
  for (int group = 0; group < groups; ++group) {
    const int m = sizes[group];
    const auto* x = static_cast<const Element*>(rows) + begin * k;
    const auto* w = static_cast<const Element*>(weights) + int64_t(group) * n * k;
    const int first = Chosen::kSwapped ? n : m, second = Chosen::kSwapped ? m : n;
    problems.push_back({first, second, k});
    a.push_back(Chosen::kSwapped ? w : x);
    b.push_back(Chosen::kSwapped ? x : w);
    d.push_back(static_cast<Element*>(out) + begin * n);
    stride_a.push_back(packed<StrideA>(k));
    stride_b.push_back(packed<StrideB>(k));
    stride_d.push_back(packed<StrideD>(n));
    begin += m;
  }
  auto* call = new Call;
  auto& kept = call->kept;
  cutlass::KernelHardwareInfo hardware;
  cudaGetDevice(&hardware.device_id);
  hardware.sm_count = cutlass::KernelHardwareInfo::query_device_multiprocessor_count(hardware.device_id);
  typename Gemm::Arguments arguments{};
  arguments.mode = cutlass::gemm::GemmUniversalMode::kGrouped;
  arguments.problem_shape = {groups, on_device(problems, kept), nullptr};
  arguments.mainloop = {on_device(a, kept), on_device(stride_a, kept), on_device(b, kept), on_device(stride_b, kept)};
  arguments.epilogue.ptr_D = on_device(d, kept);
  arguments.epilogue.dD = on_device(stride_d, kept);
  arguments.epilogue.thread.alpha = 1.0f;
  arguments.epilogue.thread.beta = 0.0f;
  arguments.hw_info = hardware;
  void* workspace = nullptr;
  cudaMalloc(&workspace, Gemm::get_workspace_size(arguments) + 1);
  kept.push_back(workspace);
  auto said = call->gemm.can_implement(arguments);
  if (said == cutlass::Status::kSuccess) said = call->gemm.initialize(arguments, workspace);
  *status = static_cast<int>(said);
  if (said == cutlass::Status::kSuccess) return call;
  for (void* one : kept) cudaFree(one);
  delete call;
  return nullptr;
}

int run(void* call, void* stream) {
  return static_cast<int>(static_cast<Call*>(call)->gemm.run(static_cast<cudaStream_t>(stream)));
}

void destroy(void* call) {
  for (void* one : static_cast<Call*>(call)->kept) cudaFree(one);
  delete static_cast<Call*>(call);
}

const char* version() {
#define TEXT(x) #x
#define SAID(x, y, z) TEXT(x) "." TEXT(y) "." TEXT(z)
  return SAID(CUTLASS_MAJOR, CUTLASS_MINOR, CUTLASS_PATCH);
}

}  // extern "C"
