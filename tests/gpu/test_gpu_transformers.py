"""`tilestream.register_attention` on a GPU: small models of transformers beside their eager attention.

In 16 bits, which the Hopper kernel takes, an answer may be twice as far from eager attention in float32 as eager
attention in 16 bits is. In float32, by the portable kernel, generated tokens are the same.
"""

from __future__ import annotations

import copy

import pytest
import torch

import tilestream as ts
from model_families import FAMILIES, model_of, tokens

transformers = pytest.importorskip("transformers", minversion="5.4", reason="needs transformers 5.4")

DEVICE = "cuda"
OURS = "tilestream"
LEFT, STEPS = 6, 5


@pytest.fixture(autouse=True)
def registered():
    """The name is known; float32 is not multiplied as tf32, in which eager attention would be the less exact one."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    ts.register_attention(OURS)
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def mask_of(padded: bool) -> torch.Tensor:
    """The first of two sequences is shorter, and padded on the left."""
    mask = torch.ones(2, 21, dtype=torch.int64, device=DEVICE)
    mask[0, : LEFT * padded] = 0
    return mask


def logits(model, attention: str, mask: torch.Tensor) -> torch.Tensor:
    """Of the tokens that are no padding."""
    model.set_attn_implementation(attention)
    with torch.no_grad():
        out = model(tokens().to(DEVICE), attention_mask=mask).logits[mask.bool()].float()
    assert out.isfinite().all()  # waits for the GPU
    ts.check()
    return out


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_keep_the_error_rule(family, dtype, padded):
    mask, wide = mask_of(padded), copy.deepcopy(model_of(family)).to(DEVICE)
    narrow = copy.deepcopy(wide).to(dtype)
    wide.load_state_dict(narrow.state_dict())  # the same weights
    right = logits(wide, "eager", mask)
    of_eager, of_ours = ((logits(narrow, name, mask) - right).norm() for name in ("eager", OURS))
    assert of_eager < 0.3 * right.norm(), "else the rule would say nothing"
    assert of_ours <= 2 * of_eager + torch.finfo(dtype).eps * right.norm()


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_are_those_of_eager(family, cache):
    """With padding on the left, past the window."""
    model = copy.deepcopy(model_of(family)).to(DEVICE)

    def generated(attention: str) -> torch.Tensor:
        model.set_attn_implementation(attention)
        made = model.generate(
            tokens(2).to(DEVICE), attention_mask=mask_of(True), max_new_tokens=STEPS, do_sample=False,
            eos_token_id=None, cache_implementation=cache, disable_compile=True, return_dict_in_generate=True,
            output_logits=True,
        )  # fmt: skip
        out = torch.stack(made.logits)
        assert out.isfinite().all()
        ts.check()
        return out

    torch.testing.assert_close(generated(OURS), generated("eager"), rtol=2e-3, atol=2e-3)


@pytest.mark.timeout(400)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
def test_a_compiled_forward_pass(family):
    model = copy.deepcopy(model_of(family)).to(DEVICE)
    whole = mask_of(False).bool()
    right = logits(model, "eager", whole)
    model.set_attn_implementation(OURS)
    with torch.no_grad():
        found = torch.compile(model)(tokens().to(DEVICE), use_cache=True).logits[whole]
    assert found.isfinite().all()
    ts.check()
    torch.testing.assert_close(found, right, rtol=2e-3, atol=2e-3)
