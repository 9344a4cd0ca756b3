// The ops of the native call path, by torch's stable ABI.
//
// A call that is equal to an earlier one, but for addresses, is launched from here; `try_matmul` returns None, and
// `try_matmul_out` false, for any other. Python then checks the call, plans, compiles, launches, and has
// `remember_matmul` keep the recipe. So nothing is checked here but what a key does not say: where operands lie.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/tensor.h>

#include <initializer_list>
#include <memory>
#include <optional>
#include <vector>

#include "launch_table.h"
#include "overlap.h"
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

// A product as the public ops take it: torch's dimensions and strides, nothing brought to a canonical form.
struct Matmul {
  int64_t op;  // which public op: they check differently
  Tensor a, b;
  std::optional<Tensor> bias, residual, scale_a, scale_b;
  double alpha, beta;
  int64_t options;  // activation, schedule, result dtype, precisions: see `tilestream.launch.native.options_of`
  int64_t workers, limit;
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
  bool read(const Matmul& x, const Tensor* out) {
    device = x.a.get_device_index();
    if (driver().launch == nullptr || !context_of(device, &context)) return false;
    given.factors = {x.alpha, x.beta};
    // Kernels are compiled for alpha = 1 or any other; with beta = 0 the residual is not read.
    for (const int64_t word :
         {x.op, x.options, x.workers, x.limit, context, int64_t{x.alpha == 1.0}, int64_t{x.beta == 0.0}}) {
      key.add(word);
    }
    const std::optional<Tensor>* optional[] = {&x.bias, &x.residual, &x.scale_a, &x.scale_b};
    add_read(0, x.a);
    add_read(1, x.b);
    for (int i = 0; i < 4; i++) {
      if (optional[i]->has_value()) {
        add_read(3 + i, **optional[i]);
      } else {
        key.add(0);
      }
    }
    if (out == nullptr) {
      key.add(0);
    } else {
      given.addresses[2] = out->mutable_data_ptr();
      add_tensor(key, *out, given.addresses[2]);
    }
    return true;
  }

 private:
  void add_read(int operand, const Tensor& x) {
    const void* address = x.const_data_ptr();
    given.addresses[operand] = const_cast<void*>(address);
    add_tensor(key, x, address);
  }
};

// Whether `out` may share memory with what is read. The residual may be the output itself.
bool overlaps(const Matmul& x, const Tensor& out, const Given& given) {
  const Place written = place_of(out, given.addresses[2]);
  const auto meets = [&](const Tensor& read, int operand) {
    return may_overlap(place_of(read, given.addresses[operand]), written);
  };
  if (meets(x.a, 0) || meets(x.b, 1)) return true;
  if (x.residual.has_value() && x.beta != 0.0) {
    const bool same = dtype_of(*x.residual) == dtype_of(out) &&
                      same_elements(place_of(*x.residual, given.addresses[4]), written);
    if (!same && meets(*x.residual, 4)) return true;
  }
  return (x.bias && meets(*x.bias, 3)) || (x.scale_a && meets(*x.scale_a, 5)) || (x.scale_b && meets(*x.scale_b, 6));
}

Tensor allocate(const Entry& entry, const Tensor& like, int32_t device) {
  AtenTensorHandle handle;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(
      static_cast<int64_t>(entry.sizes.size()), entry.sizes.data(), entry.strides.data(), entry.dtype,
      device_type_of(like), device, &handle));
  return Tensor(handle);
}

std::optional<Tensor> launch(const Matmul& x) {
  Call call;
  if (!call.read(x, nullptr)) return std::nullopt;
  const auto entry = find_entry(call.key);
  if (entry == nullptr) return std::nullopt;
  Tensor out = allocate(*entry, x.a, call.device);
  call.given.addresses[2] = out.mutable_data_ptr();
  if (!entry->recipe->issue(call.given, call.device, call.context)) return std::nullopt;
  return out;
}

bool launch_out(const Tensor& out, const Matmul& x) {
  Call call;
  if (!call.read(x, &out)) return false;
  const auto entry = find_entry(call.key);
  if (entry == nullptr || overlaps(x, out, call.given)) return false;
  return entry->recipe->issue(call.given, call.device, call.context);
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

std::optional<Tensor> try_matmul(MATMUL_PARAMETERS) { return launch(MATMUL_ARGUMENTS); }

bool try_matmul_out(Tensor out, MATMUL_PARAMETERS) { return launch_out(out, MATMUL_ARGUMENTS); }

bool remember_matmul(std::vector<int64_t> recipe, Tensor result, bool into, MATMUL_PARAMETERS) {
  Call call;
  if (!call.read(MATMUL_ARGUMENTS, into ? &result : nullptr) || call.key.overflows()) return false;
  const auto sizes = result.sizes(), strides = result.strides();
  Entry entry{
      std::make_unique<const Recipe>(recipe), {sizes.begin(), sizes.end()}, {strides.begin(), strides.end()},
      dtype_of(result)};
  insert_entry(call.key, std::make_shared<const Entry>(std::move(entry)));
  return true;
}

}  // namespace
}  // namespace tilestream

#define MATMUL_SCHEMA                                                                                                \
  "int op, Tensor a, Tensor b, Tensor? bias=None, Tensor? residual=None, Tensor? scale_a=None, "                     \
  "Tensor? scale_b=None, float alpha=1, float beta=1, int options=0, int workers=0, int limit=0"

STABLE_TORCH_LIBRARY_FRAGMENT(tilestream, m) {
  m.def("try_matmul(" MATMUL_SCHEMA ") -> Tensor?");
  m.def("try_matmul_out(Tensor(a!) out, " MATMUL_SCHEMA ") -> bool");
  m.def("remember_matmul(int[] recipe, Tensor result, bool into, " MATMUL_SCHEMA ") -> bool");
}

STABLE_TORCH_LIBRARY_IMPL(tilestream, CUDA, m) {
  m.impl("try_matmul", TORCH_BOX(&tilestream::try_matmul));
  m.impl("try_matmul_out", TORCH_BOX(&tilestream::try_matmul_out));
  m.impl("remember_matmul", TORCH_BOX(&tilestream::remember_matmul));
}
