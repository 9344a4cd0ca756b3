// The ops of the native call path, by torch's stable ABI.
//
// A call that is equal to an earlier one, but for addresses, is launched from here; the `try_` ops return None, or
// false, for any other. Python then checks the call, plans, compiles, launches, and has a `remember_` op keep the
// recipe. So nothing is checked here but what a key does not say: where operands lie.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <array>
#include <bit>
#include <cmath>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <tuple>
#include <utility>
#include <vector>

#include "launch_table.h"
#include "overlap.h"
#include "program.h"
#include "recipe.h"

namespace tilestream {
namespace {

using torch::stable::Tensor;

constexpr int64_t kAlignment = 16;  // bytes; kernels are compiled for addresses that are multiples of it or not

int32_t dtype_of(const Tensor& x) {
  int32_t dtype;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(x.get(), &dtype));
  return dtype;
}

int32_t device_type_of(const Tensor& x) {
  int32_t type;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(x.get(), &type));
  return type;
}

std::span<const int64_t> span_of(const torch::stable::IntHeaderOnlyArrayRef& values) {
  return {values.data(), values.size()};
}

Place place_of(const Tensor& x, void* address) {
  return {
      reinterpret_cast<uint64_t>(address), static_cast<int64_t>(x.element_size()), span_of(x.sizes()),
      span_of(x.strides())};
}

// An operand that is read; null if it is not given.
struct Read {
  Operand operand;
  const Tensor* tensor;
};

const Tensor* pointer_to(const std::optional<Tensor>& x) { return x.has_value() ? &*x : nullptr; }

bool in_float32(double x) { return !std::isfinite(x) || std::abs(x) <= std::numeric_limits<float>::max(); }

// A product as the public ops take it: torch's dimensions and strides, nothing brought to a canonical form.
struct Matmul {
  int64_t op;  // which public op: they check differently
  Tensor a, b;
  std::optional<Tensor> bias, residual, scale_a, scale_b;
  double alpha, beta;
  int64_t options;  // activation, schedule, result dtype, precisions: see `tilestream.ops.native`
  int64_t workers, limit;

  const Tensor& first() const { return a; }

  // What decides a launch beside the operands. Kernels are compiled for alpha = 1 or any other; with beta = 0 the
  // residual is not read; a factor beyond float32 is Python's to refuse.
  std::array<int64_t, 7> numbers() const {
    return {op, options, workers, limit, int64_t{alpha == 1.0}, int64_t{beta == 0.0},
            int64_t{in_float32(alpha) && in_float32(beta)}};
  }

  void give(Given& given) const { given.factors = {alpha, beta}; }

  std::array<Read, 6> reads() const {
    return {{{kA, &a}, {kB, &b}, {kBias, pointer_to(bias)}, {kResidual, pointer_to(residual)},
             {kScaleA, pointer_to(scale_a)}, {kScaleB, pointer_to(scale_b)}}};
  }

  // Whether an operand may be the output itself, and one that is not read may lie anywhere.
  bool may_be(Operand operand, bool same) const { return operand == kResidual && (same || beta == 0.0); }
};

// Attention, likewise: heads where the caller has them.
struct Attention {
  Tensor q, k, v;
  int64_t options;  // layout, diagonal, log-sum-exp, schedule, precision: see `tilestream.ops.native`
  std::optional<Tensor> cu_seqlens_q, cu_seqlens_k, block_table, seqlens_k;
  int64_t max_seqlen_q, max_seqlen_k;
  double scale, softcap;
  int64_t left, right;
  std::optional<Tensor> sinks, scale_q, scale_k, scale_v;
  int64_t workers, splits, limit;

  static constexpr int64_t kOp = -1;  // no public op of `Matmul`

  const Tensor& first() const { return q; }

  // Scale and soft cap are constants of a launch.
  std::array<int64_t, 11> numbers() const {
    return {kOp, options, workers, limit, left, right, max_seqlen_q, max_seqlen_k, splits,
            std::bit_cast<int64_t>(scale), std::bit_cast<int64_t>(softcap)};
  }

  void give(Given&) const {}

  std::array<Read, 11> reads() const {
    return {{{kQ, &q}, {kK, &k}, {kV, &v}, {kCuSeqlensQ, pointer_to(cu_seqlens_q)},
             {kCuSeqlensK, pointer_to(cu_seqlens_k)}, {kBlockTable, pointer_to(block_table)},
             {kSeqlensK, pointer_to(seqlens_k)}, {kSinks, pointer_to(sinks)}, {kScaleQ, pointer_to(scale_q)},
             {kScaleK, pointer_to(scale_k)}, {kScaleV, pointer_to(scale_v)}}};
  }

  bool may_be(Operand, bool) const { return false; }
};

// The join of two attentions, likewise.
struct Merge {
  Tensor o_a, lse_a, o_b, lse_b;
  int64_t layout;

  static constexpr int64_t kOp = -2;

  const Tensor& first() const { return o_a; }

  std::array<int64_t, 2> numbers() const { return {kOp, layout}; }

  void give(Given&) const {}

  std::array<Read, 4> reads() const { return {{{kOA, &o_a}, {kLseA, &lse_a}, {kOB, &o_b}, {kLseB, &lse_b}}}; }

  bool may_be(Operand, bool) const { return false; }
};

// A grouped product: `a` is what the groups divide along rows, or along K with `b`. So of divided columns, whose launch
// is that of the transposes, it is the caller's b.
struct Grouped {
  Tensor a, b, offsets;
  int64_t options;  // as of `Matmul`
  std::optional<Tensor> bias, scale_a, scale_b;
  int64_t workers, limit;

  static constexpr int64_t kOp = -3;

  const Tensor& first() const { return a; }

  std::array<int64_t, 4> numbers() const { return {kOp, options, workers, limit}; }

  void give(Given&) const {}

  std::array<Read, 6> reads() const {
    return {{{kA, &a}, {kB, &b}, {kOffsets, &offsets}, {kBias, pointer_to(bias)}, {kScaleA, pointer_to(scale_a)},
             {kScaleB, pointer_to(scale_b)}}};
  }

  bool may_be(Operand, bool) const { return false; }
};

// A call of which an operand arrives, or whose rows are published.
template <typename Op>
struct Gated {
  static constexpr int64_t kGated = 1 << 8;  // is added to the op's number
  static constexpr size_t kChunkings = 4;
  static constexpr size_t kNumbers = std::tuple_size_v<decltype(std::declval<Op>().numbers())>;

  Op op;
  std::vector<int64_t> chunking;  // numbers of the chunkings of rows, of columns, of what is published; of local rows

  const Tensor& first() const { return op.first(); }

  std::array<int64_t, kNumbers + kChunkings> numbers() const {
    if (chunking.size() != kChunkings) throw std::invalid_argument("a gated call has four numbers of chunkings");
    std::array<int64_t, kNumbers + kChunkings> all;
    std::ranges::copy(chunking, std::ranges::copy(op.numbers(), all.begin()).out);
    all[0] += kGated;
    return all;
  }

  void give(Given& given) const { op.give(given); }
  auto reads() const { return op.reads(); }
  bool may_be(Operand operand, bool same) const { return op.may_be(operand, same); }
};

void add_tensor(Key& key, const Tensor& x, const void* address) {
  const auto sizes = x.sizes();
  const bool aligned = reinterpret_cast<uint64_t>(address) % kAlignment == 0;
  key.add(1 + static_cast<int64_t>(sizes.size()));  // 0 stands for a tensor that is not given
  key.add(
      int64_t{dtype_of(x)} << 32 | int64_t{device_type_of(x)} << 16 | int64_t{x.get_device_index() & 0xff} << 8 |
      int64_t{aligned});
  for (const int64_t size : sizes) key.add(size);
  for (const int64_t stride : x.strides()) key.add(stride);
}

// A call's key, the addresses of its operands, and what they are on.
struct Call {
  Key key;
  Given given;
  int32_t device;
  int64_t context;

  // False if there is no launch to be found: the operands' device is not the current one.
  template <typename Op>
  bool read(const Op& x, const Tensor* out) {
    device = x.first().get_device_index();
    if (driver().launch == nullptr || !context_of(device, &context)) return false;
    x.give(given);
    key.add(context);
    for (const int64_t number : x.numbers()) key.add(number);
    for (const auto& [operand, tensor] : x.reads()) {
      add(operand, tensor, tensor == nullptr ? nullptr : const_cast<void*>(tensor->const_data_ptr()));
    }
    add(kOut, out, out == nullptr ? nullptr : out->mutable_data_ptr());
    return true;
  }

 private:
  void add(Operand operand, const Tensor* x, void* address) {
    given.addresses[operand] = address;
    if (x == nullptr) {
      key.add(0);
    } else {
      add_tensor(key, *x, address);
    }
  }
};

// Whether `out` may share memory with what is read.
template <typename Op>
bool overlaps(const Op& x, const Tensor& out, const Given& given) {
  const Place written = place_of(out, given.addresses[kOut]);
  for (const auto& [operand, tensor] : x.reads()) {
    if (tensor == nullptr) continue;
    const Place read = place_of(*tensor, given.addresses[operand]);
    if (!may_overlap(read, written)) continue;
    if (!x.may_be(operand, dtype_of(*tensor) == dtype_of(out) && same_elements(read, written))) return true;
  }
  return false;
}

Layout layout_of(const Tensor& x) {
  const auto sizes = x.sizes(), strides = x.strides();
  return {{sizes.begin(), sizes.end()}, {strides.begin(), strides.end()}, dtype_of(x)};
}

Tensor allocate(const Layout& layout, const Tensor& like, int32_t device) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(layout.sizes.size()), layout.sizes.data(), layout.strides.data(), layout.dtype,
      device_type_of(like), device, &handle));
  return Tensor(handle);
}

// What was launched, and the outputs that are fresh.
struct Made {
  bool launched = false;
  std::optional<Tensor> out, lse;
};

// The entry of a call, which is read; null if the call is Python's.
template <typename Op>
std::shared_ptr<const Entry> find(const Op& x, const Tensor* out, Call& call) {
  if (!call.read(x, out)) return nullptr;
  auto entry = find_entry(call.key);
  return entry != nullptr && out != nullptr && overlaps(x, *out, call.given) ? nullptr : entry;
}

// Launch what was found for a call, on the device of `like`; `into`: into the caller's output.
Made launch_entry(const std::shared_ptr<const Entry>& found, Call& call, const Tensor& like, bool into) {
  const Entry& entry = *found;
  Made made;
  const auto fresh = [&](const Layout& layout, Operand operand) {
    Tensor tensor = allocate(layout, like, call.device);
    call.given.addresses[operand] = tensor.mutable_data_ptr();
    return tensor;
  };
  if (!into) made.out = fresh(entry.out, kOut);
  if (entry.lse.has_value()) made.lse = fresh(*entry.lse, kLse);
  if (!entry.recipe->issue(call.given, call.device, call.context)) return {};
  made.launched = true;
  launched(found, call.given);
  return made;
}

template <typename Op>
Made launch(const Op& x, const Tensor* out) {
  Call call;
  const auto entry = find(x, out, call);
  return entry == nullptr ? Made{} : launch_entry(entry, call, x.first(), out != nullptr);
}

// The gated call that this thread has found last.
struct Found {
  int64_t ticket = 0;
  std::shared_ptr<const Entry> entry;
  Call call;
  bool into = false;
};

thread_local Found found;

// A ticket for `launch_found` if an equal call is launched from here, else 0; odd if its kernel reads local rows where
// they are. What has to come before a launch (waits of streams, say) is done only where one follows.
template <typename Op>
int64_t find_gated(const std::optional<Tensor>& out, Op op, std::vector<int64_t> chunking) {
  found.call = {};
  found.entry = find(Gated<Op>{std::move(op), std::move(chunking)}, pointer_to(out), found.call);
  if (found.entry == nullptr) return 0;
  found.into = out.has_value();
  found.ticket += 2;
  return found.ticket | int64_t{found.entry->recipe->reads(kLocal)};
}

// Launch it. `like` is one of its operands. `words`: `kWords`, and the address of the local rows. Nothing is launched if
// the thread has found another call since.
std::tuple<bool, std::optional<Tensor>, std::optional<Tensor>> launch_found(
    Tensor like, int64_t ticket, std::vector<int64_t> words) {
  const std::shared_ptr<const Entry> entry = std::move(found.entry);
  found.entry = nullptr;
  if (entry == nullptr || (ticket & ~int64_t{1}) != found.ticket) return {false, std::nullopt, std::nullopt};
  if (words.size() != kWords + 1) throw std::invalid_argument("a gated call has another number of words");
  std::copy_n(words.begin(), kWords, found.call.given.words.begin());
  found.call.given.addresses[kLocal] = reinterpret_cast<void*>(words.back());
  Made made = launch_entry(entry, found.call, like, found.into);
  return {made.launched, std::move(made.out), std::move(made.lse)};
}

template <typename Op>
bool remember(std::span<const int64_t> recipe, const Tensor& out, const Tensor* lse, bool into, const Op& x) {
  Call call;
  if (!call.read(x, into ? &out : nullptr) || call.key.overflows()) return false;
  Entry entry{std::make_unique<const Recipe>(recipe), layout_of(out), std::nullopt};
  if (lse != nullptr) entry.lse = layout_of(*lse);
  insert_entry(call.key, std::make_shared<const Entry>(std::move(entry)));
  return true;
}

// The ops, with their arguments in the schemas' order -----------------------------------------------------------------

#define MATMUL_PARAMETERS                                                                                           \
  int64_t op, Tensor a, Tensor b, std::optional<Tensor> bias, std::optional<Tensor> residual,                       \
      std::optional<Tensor> scale_a, std::optional<Tensor> scale_b, double alpha, double beta, int64_t options,     \
      int64_t workers, int64_t limit
#define MATMUL_ARGUMENTS                                                                                            \
  Matmul {                                                                                                          \
    op, std::move(a), std::move(b), std::move(bias), std::move(residual), std::move(scale_a), std::move(scale_b),   \
        alpha, beta, options, workers, limit                                                                        \
  }

// A product with no more than a bias, by the public op: the arguments that it leaves out would cost time.
template <int64_t kOp>
Matmul plain(Tensor a, Tensor b, std::optional<Tensor> bias) {
  return {kOp, std::move(a), std::move(b), std::move(bias), {}, {}, {}, 1.0, 1.0, 0, 0, 0};
}

template <int64_t kOp>
std::optional<Tensor> try_plain(Tensor a, Tensor b, std::optional<Tensor> bias) {
  return launch(plain<kOp>(std::move(a), std::move(b), std::move(bias)), nullptr).out;
}

template <int64_t kOp>
bool try_plain_out(Tensor out, Tensor a, Tensor b, std::optional<Tensor> bias) {
  return launch(plain<kOp>(std::move(a), std::move(b), std::move(bias)), &out).launched;
}

std::optional<Tensor> try_matmul(MATMUL_PARAMETERS) { return launch(MATMUL_ARGUMENTS, nullptr).out; }

bool try_matmul_out(Tensor out, MATMUL_PARAMETERS) { return launch(MATMUL_ARGUMENTS, &out).launched; }

bool remember_matmul(std::vector<int64_t> recipe, Tensor result, bool into, MATMUL_PARAMETERS) {
  return remember(recipe, result, nullptr, into, MATMUL_ARGUMENTS);
}

int64_t find_gated_matmul(std::optional<Tensor> out, std::vector<int64_t> chunking, MATMUL_PARAMETERS) {
  return find_gated(out, MATMUL_ARGUMENTS, std::move(chunking));
}

bool remember_gated_matmul(
    std::vector<int64_t> recipe, Tensor result, bool into, std::vector<int64_t> chunking, MATMUL_PARAMETERS) {
  return remember(recipe, result, nullptr, into, Gated<Matmul>{MATMUL_ARGUMENTS, std::move(chunking)});
}

#define ATTENTION_PARAMETERS                                                                                        \
  Tensor q, Tensor k, Tensor v, int64_t options, std::optional<Tensor> cu_seqlens_q,                                \
      std::optional<Tensor> cu_seqlens_k, std::optional<Tensor> block_table, std::optional<Tensor> seqlens_k,       \
      int64_t max_seqlen_q, int64_t max_seqlen_k, double scale, double softcap, int64_t left, int64_t right,        \
      std::optional<Tensor> sinks, std::optional<Tensor> scale_q, std::optional<Tensor> scale_k,                    \
      std::optional<Tensor> scale_v, int64_t workers, int64_t splits, int64_t limit
#define ATTENTION_ARGUMENTS                                                                                         \
  Attention {                                                                                                       \
    std::move(q), std::move(k), std::move(v), options, std::move(cu_seqlens_q), std::move(cu_seqlens_k),            \
        std::move(block_table), std::move(seqlens_k), max_seqlen_q, max_seqlen_k, scale, softcap, left, right,      \
        std::move(sinks), std::move(scale_q), std::move(scale_k), std::move(scale_v), workers, splits, limit        \
  }

std::tuple<std::optional<Tensor>, std::optional<Tensor>> try_attention(ATTENTION_PARAMETERS) {
  Made made = launch(ATTENTION_ARGUMENTS, nullptr);
  return {std::move(made.out), std::move(made.lse)};
}

std::tuple<bool, std::optional<Tensor>> try_attention_out(Tensor out, ATTENTION_PARAMETERS) {
  Made made = launch(ATTENTION_ARGUMENTS, &out);
  return {made.launched, std::move(made.lse)};
}

Attention plain_attention(Tensor q, Tensor k, Tensor v, int64_t options) {
  return {std::move(q), std::move(k), std::move(v), options, {}, {}, {}, {}, -1, -1, 0.0, 0.0, -1, -1, {}, {}, {}, {},
          0, 0, 0};
}

std::optional<Tensor> try_plain_attention(Tensor q, Tensor k, Tensor v, int64_t options) {
  return launch(plain_attention(std::move(q), std::move(k), std::move(v), options), nullptr).out;
}

bool try_plain_attention_out(Tensor out, Tensor q, Tensor k, Tensor v, int64_t options) {
  return launch(plain_attention(std::move(q), std::move(k), std::move(v), options), &out).launched;
}

bool remember_attention(
    std::vector<int64_t> recipe, Tensor result, std::optional<Tensor> lse, bool into, ATTENTION_PARAMETERS) {
  return remember(recipe, result, pointer_to(lse), into, ATTENTION_ARGUMENTS);
}

int64_t find_gated_attention(std::optional<Tensor> out, std::vector<int64_t> chunking, ATTENTION_PARAMETERS) {
  return find_gated(out, ATTENTION_ARGUMENTS, std::move(chunking));
}

bool remember_gated_attention(
    std::vector<int64_t> recipe, Tensor result, std::optional<Tensor> lse, bool into, std::vector<int64_t> chunking,
    ATTENTION_PARAMETERS) {
  return remember(
      recipe, result, pointer_to(lse), into, Gated<Attention>{ATTENTION_ARGUMENTS, std::move(chunking)});
}

std::tuple<std::optional<Tensor>, std::optional<Tensor>> try_merge_attention(
    Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, int64_t layout) {
  Made made = launch(Merge{std::move(o_a), std::move(lse_a), std::move(o_b), std::move(lse_b), layout}, nullptr);
  return {std::move(made.out), std::move(made.lse)};
}

bool remember_merge_attention(
    std::vector<int64_t> recipe, Tensor result, Tensor lse, Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b,
    int64_t layout) {
  const Merge merge{std::move(o_a), std::move(lse_a), std::move(o_b), std::move(lse_b), layout};
  return remember(recipe, result, &lse, false, merge);
}

#define GROUPED_PARAMETERS                                                                                          \
  Tensor a, Tensor b, Tensor offsets, int64_t options, std::optional<Tensor> bias, std::optional<Tensor> scale_a,   \
      std::optional<Tensor> scale_b, int64_t workers, int64_t limit
#define GROUPED_ARGUMENTS                                                                                           \
  Grouped {                                                                                                         \
    std::move(a), std::move(b), std::move(offsets), options, std::move(bias), std::move(scale_a),                   \
        std::move(scale_b), workers, limit                                                                          \
  }

std::optional<Tensor> try_grouped(GROUPED_PARAMETERS) { return launch(GROUPED_ARGUMENTS, nullptr).out; }

bool try_grouped_out(Tensor out, GROUPED_PARAMETERS) { return launch(GROUPED_ARGUMENTS, &out).launched; }

bool remember_grouped(std::vector<int64_t> recipe, Tensor result, bool into, GROUPED_PARAMETERS) {
  return remember(recipe, result, nullptr, into, GROUPED_ARGUMENTS);
}

// A number of these tensors' dtypes, devices, alignments, sizes and strides; no other ones ever have it. 0: they have
// none. The calls between ranks know by it that a call equals an earlier one.
int64_t number_layouts(
    Tensor a, Tensor b, std::optional<Tensor> c, std::optional<Tensor> d, std::optional<Tensor> e) {
  Key key;
  for (const Tensor* x : {&std::as_const(a), &std::as_const(b), pointer_to(c), pointer_to(d), pointer_to(e)}) {
    if (x == nullptr) {
      key.add(0);
    } else {
      add_tensor(key, *x, x->const_data_ptr());
    }
  }
  return number_of(key);
}

// An op that makes nothing, whatever it is given.
template <auto kOp>
struct Declined;

template <typename Result, typename... Arguments, Result (*kOp)(Arguments...)>
struct Declined<kOp> {
  static Result call(Arguments...) { return Result{}; }
};

}  // namespace
}  // namespace tilestream

#define MATMUL_SCHEMA                                                                                                \
  "int op, Tensor a, Tensor b, Tensor? bias=None, Tensor? residual=None, Tensor? scale_a=None, "                     \
  "Tensor? scale_b=None, float alpha=1, float beta=1, int options=0, int workers=0, int limit=0"
// The arguments that calls give most often stand in front: a call leaves out those behind its last one.
#define ATTENTION_SCHEMA                                                                                             \
  "Tensor q, Tensor k, Tensor v, int options=0, Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, "              \
  "Tensor? block_table=None, Tensor? seqlens_k=None, int max_seqlen_q=-1, int max_seqlen_k=-1, float scale=0, "      \
  "float softcap=0, int left=-1, int right=-1, Tensor? sinks=None, Tensor? scale_q=None, Tensor? scale_k=None, "     \
  "Tensor? scale_v=None, int workers=0, int splits=0, int limit=0"
#define MERGE_SCHEMA "Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b, int layout"
#define GROUPED_SCHEMA                                                                                               \
  "Tensor a, Tensor b, Tensor offsets, int options=0, Tensor? bias=None, Tensor? scale_a=None, "                     \
  "Tensor? scale_b=None, int workers=0, int limit=0"
#define PLAIN_SCHEMA "Tensor a, Tensor b, Tensor? bias=None"
#define PLAIN_ATTENTION_SCHEMA "Tensor q, Tensor k, Tensor v, int options=0"

// The public ops of a product, and the registered op that compiled graphs call: they check differently.
#define EACH_PUBLIC_OP(X) X(matmul, 0) X(mm, 1) X(bmm, 2) X(addmm, 3) X(linear, 4) X(gemm, 5)

STABLE_TORCH_LIBRARY_FRAGMENT(tilestream, m) {
#define DEFINE_PLAIN(op, number)                              \
  m.def("try_plain." #op "(" PLAIN_SCHEMA ") -> Tensor?"); \
  m.def("try_plain_out." #op "(Tensor(a!) out, " PLAIN_SCHEMA ") -> bool");
  EACH_PUBLIC_OP(DEFINE_PLAIN)
  m.def("try_matmul(" MATMUL_SCHEMA ") -> Tensor?");
  m.def("try_matmul_out(Tensor(a!) out, " MATMUL_SCHEMA ") -> bool");
  m.def("remember_matmul(int[] recipe, Tensor result, bool into, " MATMUL_SCHEMA ") -> bool");
  m.def("find_gated_matmul(Tensor? out, int[] chunking, " MATMUL_SCHEMA ") -> int");
  m.def("launch_found(Tensor like, int ticket, int[] words) -> (bool, Tensor?, Tensor?)");
  m.def("remember_gated_matmul(int[] recipe, Tensor result, bool into, int[] chunking, " MATMUL_SCHEMA ") -> bool");
  m.def("try_plain_attention(" PLAIN_ATTENTION_SCHEMA ") -> Tensor?");
  m.def("try_plain_attention_out(Tensor(a!) out, " PLAIN_ATTENTION_SCHEMA ") -> bool");
  m.def("try_attention(" ATTENTION_SCHEMA ") -> (Tensor?, Tensor?)");
  m.def("try_attention_out(Tensor(a!) out, " ATTENTION_SCHEMA ") -> (bool, Tensor?)");
  m.def("remember_attention(int[] recipe, Tensor result, Tensor? lse, bool into, " ATTENTION_SCHEMA ") -> bool");
  m.def("find_gated_attention(Tensor? out, int[] chunking, " ATTENTION_SCHEMA ") -> int");
  m.def(
      "remember_gated_attention(int[] recipe, Tensor result, Tensor? lse, bool into, int[] chunking, " ATTENTION_SCHEMA
      ") -> bool");
  m.def("try_merge_attention(" MERGE_SCHEMA ") -> (Tensor?, Tensor?)");
  m.def("remember_merge_attention(int[] recipe, Tensor result, Tensor lse, " MERGE_SCHEMA ") -> bool");
  m.def("try_grouped(" GROUPED_SCHEMA ") -> Tensor?");
  m.def("try_grouped_out(Tensor(a!) out, " GROUPED_SCHEMA ") -> bool");
  m.def("remember_grouped(int[] recipe, Tensor result, bool into, " GROUPED_SCHEMA ") -> bool");
  m.def("number_layouts(Tensor a, Tensor b, Tensor? c=None, Tensor? d=None, Tensor? e=None) -> int");
}

#define CALLED(...) TORCH_BOX(&tilestream::__VA_ARGS__)
#define DECLINED(...) TORCH_BOX((&tilestream::Declined<&tilestream::__VA_ARGS__>::call))
#define PLAIN_CALLED(op, number)                              \
  m.impl("try_plain." #op, CALLED(try_plain<number>)); \
  m.impl("try_plain_out." #op, CALLED(try_plain_out<number>));
#define PLAIN_DECLINED(op, number)                              \
  m.impl("try_plain." #op, DECLINED(try_plain<number>)); \
  m.impl("try_plain_out." #op, DECLINED(try_plain_out<number>));

// The tests' GPU is the CPU.
#ifndef TILESTREAM_DEVICE_KEY
#define TILESTREAM_DEVICE_KEY CUDA
#define TILESTREAM_AUTOCAST_KEY AutocastCUDA
#endif

STABLE_TORCH_LIBRARY_IMPL(tilestream, TILESTREAM_DEVICE_KEY, m) {
  EACH_PUBLIC_OP(PLAIN_CALLED)
  m.impl("try_matmul", CALLED(try_matmul));
  m.impl("try_matmul_out", CALLED(try_matmul_out));
  m.impl("remember_matmul", CALLED(remember_matmul));
  m.impl("find_gated_matmul", CALLED(find_gated_matmul));
  m.impl("launch_found", CALLED(launch_found));
  m.impl("remember_gated_matmul", CALLED(remember_gated_matmul));
  m.impl("try_plain_attention", CALLED(try_plain_attention));
  m.impl("try_plain_attention_out", CALLED(try_plain_attention_out));
  m.impl("try_attention", CALLED(try_attention));
  m.impl("try_attention_out", CALLED(try_attention_out));
  m.impl("remember_attention", CALLED(remember_attention));
  m.impl("find_gated_attention", CALLED(find_gated_attention));
  m.impl("remember_gated_attention", CALLED(remember_gated_attention));
  m.impl("try_merge_attention", CALLED(try_merge_attention));
  m.impl("remember_merge_attention", CALLED(remember_merge_attention));
  m.impl("try_grouped", CALLED(try_grouped));
  m.impl("try_grouped_out", CALLED(try_grouped_out));
  m.impl("remember_grouped", CALLED(remember_grouped));
  m.impl("number_layouts", CALLED(number_layouts));
}

// Where something between the caller and the kernel has to see a call, the call is Python's, and no recipe is made of it:
// what traces the call would take that into its graph.
#define DECLINE_AT(key)                                                     \
  STABLE_TORCH_LIBRARY_IMPL(tilestream, key, m) {                           \
    EACH_PUBLIC_OP(PLAIN_DECLINED)                                          \
    m.impl("try_matmul", DECLINED(try_matmul));                             \
    m.impl("try_matmul_out", DECLINED(try_matmul_out));                     \
    m.impl("find_gated_matmul", DECLINED(find_gated_matmul));               \
    m.impl("try_plain_attention", DECLINED(try_plain_attention));           \
    m.impl("try_plain_attention_out", DECLINED(try_plain_attention_out));   \
    m.impl("try_attention", DECLINED(try_attention));                       \
    m.impl("try_attention_out", DECLINED(try_attention_out));               \
    m.impl("find_gated_attention", DECLINED(find_gated_attention));         \
    m.impl("try_merge_attention", DECLINED(try_merge_attention));           \
    m.impl("remember_matmul", DECLINED(remember_matmul));                   \
    m.impl("remember_gated_matmul", DECLINED(remember_gated_matmul));       \
    m.impl("remember_attention", DECLINED(remember_attention));             \
    m.impl("remember_gated_attention", DECLINED(remember_gated_attention)); \
    m.impl("remember_merge_attention", DECLINED(remember_merge_attention)); \
    m.impl("try_grouped", DECLINED(try_grouped));                           \
    m.impl("try_grouped_out", DECLINED(try_grouped_out));                   \
    m.impl("remember_grouped", DECLINED(remember_grouped));                 \
    m.impl("number_layouts", DECLINED(number_layouts));                     \
  }

DECLINE_AT(Python)  // a dispatch mode, or a tensor subclass
DECLINE_AT(FuncTorchDynamicLayerFrontMode)  // a transform of torch.func
DECLINE_AT(TILESTREAM_AUTOCAST_KEY)
DECLINE_AT(Tracer)
DECLINE_AT(PythonDispatcher)
DECLINE_AT(Functionalize)
DECLINE_AT(Negative)
DECLINE_AT(ZeroTensor)
