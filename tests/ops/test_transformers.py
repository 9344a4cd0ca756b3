"""`tilestream.register_attention` with Hugging Face's transformers itself, where it is installed: a small Llama.

What is asked of the registry's stand-in is in `test_attention_routes`.
"""

from __future__ import annotations

import pytest
import torch

import tilestream as ts
from tilestream.ops import attention_routes

transformers = pytest.importorskip("transformers", minversion="4.51")

TOKENS, PADDED, LAYERS = 37, 5, 2


@pytest.fixture
def taken(monkeypatch):
    """Calls that came here: whether each is causal."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs["causal"])
        return ts.attention(*args, **kwargs)

    monkeypatch.setattr(attention_routes, "attention", counted)
    return calls


@pytest.fixture(scope="module")
def llama():
    """Random weights; four heads, two of keys, of 16 columns."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(
        vocab_size=100, num_hidden_layers=LAYERS, max_position_embeddings=256, pad_token_id=0, **sizes
    )
    return transformers.LlamaForCausalLM(config).eval()


def both(model, run):
    """What a run gives with torch's attention, and with this."""
    found = []
    for name in ("sdpa", ts.register_attention()):
        model.set_attn_implementation(name)
        with torch.no_grad():
            found.append(run(model))
    return found


def padding(tokens: int) -> torch.Tensor:
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    mask[:, :tokens] = 0
    return mask


@pytest.mark.parametrize(
    ("mask", "comes"), [(None, True), (padding(0), True), (padding(PADDED), False)], ids=["none", "all", "padded"]
)
def test_logits_are_those_of_torchs_attention(llama, taken, mask, comes):
    ids = torch.randint(1, 100, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    right, ours = both(llama, lambda model: model(ids, attention_mask=mask).logits)
    torch.testing.assert_close(ours[:, PADDED:], right[:, PADDED:], rtol=1e-4, atol=1e-5)
    assert taken == [True] * (LAYERS if comes else 0), "a mask of padding goes to torch"


def test_tokens_are_those_of_torchs_attention(llama, taken):
    ids = torch.randint(1, 100, (2, TOKENS), generator=torch.Generator().manual_seed(2))
    right, ours = both(llama, lambda model: model.generate(ids, max_new_tokens=4, do_sample=False))
    assert torch.equal(ours, right)
    assert taken == [True] * LAYERS + [False] * (3 * LAYERS), "one query after the first tokens sees all keys"
