"""`tilestream.use_invariant_torch`: torch's own functions give a row the same bits alone and in a batch, on the CPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import tilestream as ts


def rand(*shape, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


W, BIAS, RESIDUAL = rand(48, 33), rand(33), rand(70, 33)
CALLS = {
    "mm": lambda x, rows: torch.mm(x, W),
    "method": lambda x, rows: x.mm(W),
    "operator": lambda x, rows: x @ W,
    "matmul": lambda x, rows: torch.matmul(x, W),
    "mm by name": lambda x, rows: torch.mm(input=x, mat2=W),
    "linalg.matmul": lambda x, rows: torch.linalg.matmul(x, W),
    "addmm": lambda x, rows: torch.addmm(RESIDUAL[rows], x, W, beta=0.5),
    "linear": lambda x, rows: F.linear(x, W.t(), BIAS),
    "linear by name": lambda x, rows: F.linear(input=x, weight=W.t(), bias=BIAS),
    "sum": lambda x, rows: x.sum(-1),
    "mean": lambda x, rows: x.mean(-1),
    "mean, kept": lambda x, rows: torch.mean(x, 1, keepdim=True),
    "softmax": lambda x, rows: F.softmax(x, dim=-1),
    "log_softmax": lambda x, rows: x.log_softmax(-1),
    "rms_norm": lambda x, rows: F.rms_norm(x, (48,), rand(48), 1e-6),
    "layer_norm": lambda x, rows: F.layer_norm(x, (48,), rand(48), rand(48)),
    "torch.layer_norm": lambda x, rows: torch.layer_norm(x, (48,), rand(48), rand(48)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_has_its_own_bits(name, dtype, monkeypatch):
    for operand in ("W", "BIAS", "RESIDUAL"):
        monkeypatch.setitem(globals(), operand, globals()[operand].to(dtype))
    if dtype == torch.bfloat16 and "norm" in name:
        monkeypatch.setitem(globals(), "rand", lambda *shape: torch.ones(shape, dtype=dtype))
    x, call = rand_of(70, 48).to(dtype), CALLS[name]
    want = call(x, slice(None))
    with ts.use_invariant_torch():
        made = call(x, slice(None))
        one = call(x[7:9], slice(7, 9))
    assert torch.equal(one, made[7:9])
    assert made.dtype == want.dtype
    torch.testing.assert_close(made, want, atol=2e-2 if dtype == torch.bfloat16 else 1e-5, rtol=2e-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_least_number_of_a_norm_is_torchs(dtype):
    """Rows so small that it decides; 16 bits have float32's, as they are computed in that."""
    x = (1e-3 * rand_of(20, 8)).to(dtype)
    want = F.rms_norm(x, (8,))
    with ts.use_invariant_torch():
        torch.testing.assert_close(F.rms_norm(x, (8,)), want)


def rand_of(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(("name", "keepdim"), [("sum", False), ("mean", False), ("mean", True)])
@pytest.mark.parametrize("dim", [(), None, 1, -2, (2, 0), [0, 1, 2]], ids=str)
def test_sums_of_any_dimensions_are_torchs(name, dim, keepdim):
    x, empty = rand(3, 4, 5), torch.zeros(0, 4, 0)
    with ts.use_invariant_torch():
        made, of_none = (getattr(t, name)(dim, keepdim) for t in (x, empty))
    torch.testing.assert_close(made, getattr(x, name)(dim, keepdim))
    torch.testing.assert_close(of_none, getattr(empty, name)(dim, keepdim), equal_nan=True)


def test_sums_go_through_torchs_transforms():
    x = rand(4, 5, 6)
    with ts.use_invariant_torch():
        made = torch.vmap(torch.func.grad(lambda t: t.mean(-1).softmax(-1)[0]))(x)
    torch.testing.assert_close(made, torch.vmap(torch.func.grad(lambda t: t.mean(-1).softmax(-1)[0]))(x))


def test_batches_and_attention():
    a, b = rand(3, 20, 16), rand(3, 16, 24)
    q, k = rand(2, 4, 30, 16), rand(2, 4, 30, 8 * 2)
    with ts.use_invariant_torch():
        assert torch.equal(torch.bmm(a, b)[1:2], torch.bmm(a[1:2], b[1:2]))
        whole = F.scaled_dot_product_attention(q, k, k, is_causal=True)
        assert torch.equal(F.scaled_dot_product_attention(q[1:], k[1:], k[1:], is_causal=True), whole[1:])
        short = F.scaled_dot_product_attention(q[:, :, :9], k[:, :, :9], k[:, :, :9], is_causal=True)
        assert torch.equal(short, whole[:, :, :9])
    torch.testing.assert_close(whole, F.scaled_dot_product_attention(q, k, k, is_causal=True))


def test_gradients_are_torchs():
    x = rand(6, 48).requires_grad_()
    weight = rand(48).requires_grad_()

    def loss():
        y = F.rms_norm(x, (48,), weight, 1e-6) @ W
        return (y.log_softmax(-1) * y.softmax(-1)).mean(-1).sum()

    want = torch.autograd.grad(loss(), (x, weight))
    with ts.use_invariant_torch():
        made = torch.autograd.grad(loss(), (x, weight))
    for mine, theirs in zip(made, want, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-3)


class Block(nn.Module):
    """A decoder's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.RMSNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.head = nn.Linear(32, 50)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return self.head(x).log_softmax(-1)


def test_a_models_logits_are_the_same_alone_and_in_a_batch():
    torch.manual_seed(0)
    model, prompts = Block(), torch.randn(5, 11, 32)
    with torch.no_grad(), ts.use_invariant_torch():
        whole = model(prompts)
        for i in range(5):
            assert torch.equal(model(prompts[i : i + 1]), whole[i : i + 1])


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda x: torch.einsum("ij,jk->ik", x, x.t()), "einsum"),
        (lambda x: torch.mv(x, x[0]), "mv"),
        (lambda x: F.conv1d(x[None], x[:, :, None]), "conv1d"),
        (lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], torch.zeros(1, 8, 8)), "attn_mask="),
        (lambda x: x.double().mean(-1), "mean under use_invariant_torch: torch.float64"),
        (lambda x: F.softmax(x), "dim=None; name the dimension"),
        (
            lambda x: x.double().softmax(1),
            "^softmax under use_invariant_torch: torch.float64; rows are added in float32",
        ),
        (lambda x: x.double().log_softmax(1), "^log_softmax under use_invariant_torch: torch.float64"),
        (lambda x: x.double().sum(1), "^sum under use_invariant_torch: torch.float64"),
        (lambda x: torch.einsum("ij,jk->ik", [x, x]), "einsum"),
        (lambda x: torch.linalg.multi_dot([x, x, x]), "multi_dot"),
        (lambda x: F.conv1d(input=x[None], weight=x[:, :, None]), "conv1d"),
        (lambda x: torch.dot(x[0], x[1]), "dot"),
        (lambda x: torch.sum(x, 1, out=x[0]), r"sum under use_invariant_torch\(\) got an unexpected .* 'out'"),
        (lambda x: torch.mm(input=x.double(), mat2=x.double()), "float64 under"),
        (lambda x: torch.addmm(input=x.double(), mat1=x.double(), mat2=x.double()), "float64 under"),
        (lambda x: F.linear(input=x.double(), weight=x.double()), "float64 under"),
        (lambda x: torch.linalg.matmul(x.double(), x.double()), "float64 under"),
        (lambda x: torch._grouped_mm(x, x[None], torch.tensor([8], dtype=torch.int32)), "_grouped_mm"),
        (lambda x: nn.MultiheadAttention(8, 2)(x, x, x), "multi_head_attention_forward"),
        (lambda x: nn.LSTM(8, 8)(x), "lstm"),
        (lambda x: F.layer_norm(x, (4,)), r"normalized_shape=\[4\]; input has shape \[8, 8\]"),
        (lambda x: x.mean(2), r"dim=2; x has 2 dimensions: \[8, 8\]"),
    ],
)
def test_what_cannot_be_promised_is_refused(call, name):
    x = rand(8, 8)
    with ts.use_invariant_torch(), pytest.raises((NotImplementedError, ValueError, IndexError, TypeError), match=name):
        call(x)


def test_the_block_ends():
    x = rand(4, 8)
    with ts.use_invariant_torch():
        assert ts.plan(8, 8, 8).promise
    assert not ts.plan(8, 8, 8).promise
    assert torch.equal(torch.einsum("ij,kj->ik", x, x), torch.einsum("ij,kj->ik", x, x))
