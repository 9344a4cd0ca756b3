"""`tilestream.register_attention` with Hugging Face's transformers itself: small random models beside their eager code.

One file, because the import of transformers takes seconds.
"""

from __future__ import annotations

import copy
import logging
import random
import warnings
from types import SimpleNamespace

import pytest
import torch

import tilestream as ts
from model_families import FAMILIES, LAYERS, LLAMA, WINDOW, model_of, tokens
from tilestream.ops import attention_routes, attention_transformers

transformers = pytest.importorskip("transformers", minversion="5.4", reason="pip install '.[dev]' brings transformers")
masking = pytest.importorskip("transformers.masking_utils")

TOKENS, PADDED, STEPS = 21, 6, 3
CAPPED, WITH_SINKS = ("gemma2",), ("gpt_oss",)
OURS = "tilestream"


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Products this small take longer with more, and by far where cores are busy."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def taken(monkeypatch):
    """The calls that came here, by their options."""
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return ts.attention(*args, **kwargs)

    monkeypatch.setattr(attention_transformers, "attention", counted)
    attention_routes.say_once.cache_clear()
    assert ts.register_attention() == OURS
    return calls


@pytest.fixture
def said(caplog):
    """Why calls went to torch."""
    caplog.set_level(logging.INFO, "tilestream.ops")
    return lambda: [record.getMessage() for record in caplog.records if "goes to torch" in record.getMessage()]


def padding(kind):
    """Of the first of two sequences."""
    mask = torch.ones(2, TOKENS, dtype=torch.int64)
    where = {"left": slice(0, PADDED), "right": slice(TOKENS - PADDED, TOKENS), "holes": slice(3, PADDED), "no": []}
    mask[0, where[kind]] = 0
    return mask


def both(model, run, taken):
    """What a run gives with eager attention, and with this."""
    model.set_attn_implementation("eager")
    expected = run(model)
    model.set_attn_implementation(OURS)
    taken.clear()
    return expected, run(model)


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


# Forward passes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "no", "left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_eager(family, kind, taken, said):
    mask, model = kind and padding(kind), model_of(family)
    with torch.no_grad():
        expected, found = both(model, lambda model: model(tokens(), attention_mask=mask).logits, taken)
    real = torch.ones(2, TOKENS, dtype=torch.bool) if mask is None else mask.bool()
    close(found[real], expected[real])
    assert not said()
    windows = tuple(call["window"] for call in taken)
    assert windows == tuple(w and (w - 1, 0) for w in FAMILIES[family][3]), "a call a layer, with its window"
    for call in taken:
        assert (call["seqlens_k"] is not None) == (kind == "left"), "what is right of the last token hides itself"
        assert (call["softcap"] is not None) == (family in CAPPED)
        assert (call["sinks"] is not None) == (family in WITH_SINKS)


def test_the_window_padding_cap_and_sinks_matter():
    """Without one of them the logits above differ by more than the tolerance."""
    with torch.no_grad():
        for family, change in (("mistral", {"sliding_window": None}), ("gemma2", {"attn_logit_softcapping": None})):
            cls, config, sizes, _ = FAMILIES[family]
            other = getattr(transformers, cls)(getattr(transformers, config)(**{**sizes, **change})).eval()
            other.load_state_dict(model_of(family).state_dict())
            for model in (other, model_of(family)):
                model.set_attn_implementation("eager")
            differ = other(tokens()).logits - model_of(family)(tokens()).logits
            assert differ.abs().max() > 1e-2, family
        llama = model_of("llama")
        differ = (llama(tokens()).logits - llama(tokens(), attention_mask=padding("left")).logits)[0, PADDED:]
        assert differ.abs().max() > 1e-2
        sinks = [layer.self_attn.sinks for layer in model_of("gpt_oss").model.layers]
        assert all(x.abs().max() > 0.1 for x in sinks)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_prompt_in_chunks(family, taken, said):
    """The second chunk's queries stand behind the first one's keys, in a cache of all keys or of a window's."""

    def run(model):
        cache = transformers.DynamicCache(config=model.config)
        parts = tokens().split([13, 7, 1], 1)
        return torch.cat([model(part, past_key_values=cache).logits for part in parts], 1)

    with torch.no_grad():
        close(*reversed(both(model_of(family), run, taken)))
    assert len(taken) == 3 * LAYERS
    assert not said()


@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_are_those_of_eager(family, cache, taken, said):
    """With padding on the left, past the window."""

    def run(model):
        made = model.generate(
            tokens(2), attention_mask=padding("left"), max_new_tokens=STEPS, do_sample=False, eos_token_id=None,
            cache_implementation=cache, disable_compile=True, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return torch.stack(made.logits)

    expected, found = both(model_of(family), run, taken)
    close(found, expected)
    assert len(taken) == STEPS * LAYERS
    assert not said()


ENCODERS = {
    "bert": ("BertModel", "BertConfig", {}),
    "modernbert": ("ModernBertModel", "ModernBertConfig", {
        "local_attention": 8, "global_attn_every_n_layers": 2, "cls_token_id": 1, "sep_token_id": 2,
    }),
}  # fmt: skip


@pytest.mark.parametrize("kind", [None, "left", "right", "holes"])
@pytest.mark.parametrize("family", ENCODERS)
def test_encoders(family, kind, taken, said):
    cls, config, more = ENCODERS[family]
    sizes = {key: x for key, x in LLAMA.items() if key != "num_key_value_heads"}
    torch.manual_seed(0)
    model = getattr(transformers, cls)(getattr(transformers, config)(**{**sizes, **more})).eval()
    mask = kind and padding(kind)
    with torch.no_grad():
        expected, found = both(model, lambda m: m(tokens(), attention_mask=mask).last_hidden_state, taken)
    real = torch.ones(2, TOKENS, dtype=torch.bool) if mask is None else mask.bool()
    close(found[real], expected[real])
    # Of windows on both sides of queries that end behind the last key, a layer of two goes to torch.
    assert len(taken) == (0 if kind == "holes" else 1 if (family, kind) == ("modernbert", "right") else LAYERS)
    assert bool(said()) == (len(taken) < LAYERS)


# What goes elsewhere --------------------------------------------------------------------------------------------------


def _whole_mask():
    """A mask of the caller's own: two blocks."""
    place = torch.arange(TOKENS)
    own = (place[:, None] // 9 == place // 9) & (place <= place[:, None])
    return torch.where(own, 0.0, torch.finfo(torch.float32).min).expand(2, 1, -1, -1)


ELSEWHERE = {
    "holes": ({"attention_mask": padding("holes")}, "attention_mask= with holes"),
    "short": ({"attention_mask": padding("no")[:, :-1], "use_cache": True}, "attention_mask= of fewer tokens"),
    "own": ({"attention_mask": _whole_mask()}, "a mask of rows and keys"),
    "packed": (
        {"position_ids": torch.cat((torch.arange(9), torch.arange(12)))[None], "use_cache": False},
        "packed position_ids",
    ),
}


@pytest.mark.parametrize(
    ("family", "what"),
    [(family, what) for family in ("llama", "mistral", "gemma2") for what in ELSEWHERE] + [("gpt_oss", "own")],
)
def test_other_masks_go_to_torch_and_why(family, what, taken, said):
    how, why = ELSEWHERE[what]
    if what == "own" and None in FAMILIES[family][3] and WINDOW in FAMILIES[family][3]:
        how = {"attention_mask": dict.fromkeys(("full_attention", "sliding_attention"), how["attention_mask"])}
    with torch.no_grad():
        for _ in range(2):
            expected, found = both(model_of(family), lambda model: model(tokens(), **how).logits, taken)
    mask = how.get("attention_mask")
    real = mask.bool() if what == "holes" else torch.ones(2, TOKENS, dtype=torch.bool)
    close(found[real], expected[real])
    assert not taken
    assert sum(why in line for line in said()) == 1, "once"


def test_the_promise_of_equal_bits_is_kept_or_refused(taken):
    """Layers with a gradient stay here then; a mask of rows and keys is refused, or torch's operations keep it."""
    how, model, gemma = {"attention_mask": _whole_mask()}, *(copy.deepcopy(model_of(x)) for x in ("llama", "gemma2"))
    model.set_attn_implementation(OURS)
    gemma.set_attn_implementation(OURS)
    with ts.invariant():
        model(tokens()).logits.sum().backward()
        assert len(taken) == LAYERS
        with pytest.raises(NotImplementedError, match=r"under tilestream\.invariant: attn_mask="):
            model(tokens(), **how)
    with ts.use_invariant_torch(), torch.no_grad():
        how = {"attention_mask": dict.fromkeys(("full_attention", "sliding_attention"), how["attention_mask"])}
        whole = gemma(tokens(), **how).logits
        one = {"attention_mask": {kind: mask[:1] for kind, mask in how["attention_mask"].items()}}
        assert torch.equal(gemma(tokens()[:1], **one).logits, whole[:1])


def test_dropout_and_biases_go_to_torch(taken, said):
    """T5 adds a bias to its scores; dropout draws its own numbers."""
    torch.manual_seed(0)
    t5 = transformers.T5EncoderModel(
        transformers.T5Config(d_model=64, d_kv=16, d_ff=64, num_layers=1, num_heads=4, vocab_size=99)
    ).eval()
    mask = padding("right")
    with torch.no_grad():
        expected, found = both(t5, lambda model: model(tokens(), attention_mask=mask).last_hidden_state, taken)
        close(found[mask.bool()], expected[mask.bool()])
        q = torch.randn(1, 2, 16, 8)
        for softcap in (None, 5.0):
            out, _ = transformers.AttentionInterface()[OURS](torch.nn.Module(), q, q, q, None, 0.5, softcap=softcap)
            assert out.shape == (1, 16, 2, 8)
            assert (out - ts.attention(q, q, q, layout="bhsd", causal=True, softcap=softcap).transpose(1, 2)).any()
    assert not taken
    assert [line.rsplit(": ")[-1] for line in said()] == ["position_bias=", "dropout"]


@pytest.mark.parametrize("name", ["indices", "block_indices", "sinks"])
def test_a_layer_that_selects_keys_is_refused(name):
    """Models fold this into the mask for "sdpa" and "eager", by those names."""
    q = torch.randn(1, 2, 16, 8)
    with pytest.raises(NotImplementedError, match=rf'Module passes {name}=.*"sdpa" or "eager"'):
        transformers.AttentionInterface()[OURS](torch.nn.Module(), q, q, q, None, **{name: q})


def test_keys_that_a_model_adds_to_its_mask():
    """DeepSeek-V4 adds compressed ones; a mask that is None would make them keys like the others."""
    sizes = {
        "vocab_size": 99, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 1,
        "head_dim": 32, "q_lora_rank": 32, "moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "sliding_window": 8, "o_groups": 2, "o_lora_rank": 16, "index_n_heads": 2, "index_head_dim": 16,
        "index_topk": 4, "layer_types": ["sliding_attention", "heavily_compressed_attention"],
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 4},
    }  # fmt: skip
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip("a transformers without DeepSeek-V4")
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**sizes)).eval()
    model.set_attn_implementation(OURS)
    for count in (7, 21):  # within its window, and more
        with pytest.raises(NotImplementedError, match=r'DeepSeek-V4.*"eager"'), torch.no_grad():
            model(tokens()[:, :count], use_cache=False)


def test_a_key_range_that_a_model_changes():
    q = torch.randn(1, 2, 5, 8)
    with pytest.raises(NotImplementedError, match=r'Module has changed its mask.*\(1, 1, 5, 9\): .*"sdpa" or "eager"'):
        transformers.AttentionInterface()[OURS](torch.nn.Module(), q, q, q, torch.zeros(1, 1, 5, 9, dtype=torch.int32))


@pytest.mark.parametrize(
    ("config", "count"),
    [
        ({"num_hidden_layers": 7}, 7), ({"num_spatial_layers": 12, "num_temporal_layers": 4}, 16), ({}, 1),
        ({"num_hidden_layers": None}, 1), ({"num_hidden_layers": [4]}, 1), ({"num_hidden_layers": -1}, 1),
    ],
)  # fmt: skip
def test_layers_of_a_config(config, count):
    assert attention_transformers._layers(SimpleNamespace(**config)) == count
    assert attention_transformers._layers(None) == 1


@pytest.mark.parametrize("kind", ["no", "left"])
@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_gradients(family, kind, taken, said):
    """Torch computes them: its function, or its operations where there is a cap or there are sinks."""
    same_gradients(family, kind, taken)
    assert not taken
    assert len(said()) == 1


@pytest.mark.parametrize("kind", ["no", "left"])
@pytest.mark.parametrize("family", [*CAPPED, *WITH_SINKS])
def test_gradients_of_many_scores(family, kind, taken, said, monkeypatch):
    """With a cap or sinks they are computed here if all layers have more than torch may keep."""
    config, rows = model_of(family).config, tokens().numel() * tokens().shape[1]
    scores = LAYERS * rows * config.num_attention_heads
    monkeypatch.setattr("tilestream.ops.attention_transformers.KEPT_SCORES", scores)
    same_gradients(family, kind, taken)
    assert not taken
    assert len(said()) == 1
    monkeypatch.setattr("tilestream.ops.attention_transformers.KEPT_SCORES", scores - 1)
    same_gradients(family, kind, taken)
    assert len(taken) == LAYERS
    assert len(said()) == 1


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_operations_are_one_graph_for_any_dropout(dropout):
    """A compiler that takes numbers for symbols cannot compare the probability and choose by it."""
    q = torch.randn(1, 2, 5, 8)

    def layer(q, dropout):
        return attention_transformers._by_operations(q, q, q, None, dropout, None, 30.0, None, None)

    def seeded(function, *of):
        torch.manual_seed(0)
        return function(*of)

    compiled = torch.compile(layer, backend="eager", fullgraph=True, dynamic=True)
    assert torch.equal(seeded(compiled, q, dropout), seeded(layer, q, dropout))
    assert torch.equal(seeded(layer, q, dropout), layer(q, 0.0)) == (not dropout)


def same_gradients(family, kind, taken):
    """Assert that a model's gradients are those of eager code."""
    mask = padding(kind)
    # What padding predicts differs: a row that sees nothing is 0 here, and a mean in eager code.
    labels = tokens().masked_fill(mask == 0, -100)
    labels[0, PADDED] = -100

    def run(model):
        model.zero_grad()
        model(tokens(), attention_mask=mask, labels=labels).loss.backward()
        return {name: x.grad for name, x in model.named_parameters() if x.grad is not None}

    expected, found = both(model_of(family), run, taken)
    assert expected.keys() == found.keys()
    for name, right in expected.items():
        error = (found[name] - right).norm()
        assert error <= 1e-4 * right.norm() + 1e-6, name


def test_a_chunk_with_gradients_keeps_its_diagonal(taken):
    """Torch's own causal mask would begin at the first key."""

    def run(model):
        cache = transformers.DynamicCache(config=model.config)
        return torch.cat([model(part, past_key_values=cache).logits for part in tokens().split([13, 8], 1)], 1)

    close(*reversed(both(model_of("llama"), run, taken)))
    assert not taken


# Key ranges -----------------------------------------------------------------------------------------------------------


def test_key_ranges_are_transformers_masks():
    """Of any queries, keys, windows, paddings and caches."""
    draw, ranges = random.Random(0), 0
    fns = masking.causal_mask_function, masking.bidirectional_mask_function
    for _ in range(300):
        full, window = draw.random() < 0.3, draw.choice([None, 1, 3, 8])
        q_length, kv_offset = draw.randint(1, 9), draw.choice([0, 0, 4])
        q_offset = 0 if full else draw.randint(kv_offset, kv_offset + 7)
        kv_length = q_length if full else q_offset + q_length - kv_offset + draw.choice([0, 0, 5])
        kv_offset = 0 if full else kv_offset
        fn = fns[full]
        if window is not None:
            name = "sliding_window_bidirectional_mask_function" if full else "sliding_window_causal_mask_function"
            fn = getattr(masking, name)(window)
        mask = None
        if draw.random() < 0.7:
            mask = torch.ones(3, q_offset + q_length, dtype=torch.bool)
            for row in mask:
                begin, end = sorted(draw.choices(range(q_offset + q_length + 1), k=2))
                row[: begin * draw.randint(0, 1)] = False
                row[end if draw.random() < 0.3 else len(row) :] = False
        call = {
            "batch_size": 3, "q_length": q_length, "kv_length": kv_length, "kv_offset": kv_offset,
            "q_offset": torch.tensor(q_offset) if draw.random() < 0.3 else q_offset, "mask_function": fn,
            "attention_mask": mask, "local_size": window, "allow_is_causal_skip": not full,
            "allow_is_bidirectional_skip": full, "config": transformers.MistralConfig(sliding_window=window),
        }  # fmt: skip
        keys = attention_transformers._mask(masking.sdpa_mask, lambda x: False, lambda *_: None, **call)
        if keys is not None and keys.dtype == torch.bool:
            continue  # what cannot be described was built
        ranges += 1
        right = masking.sdpa_mask(**{**call, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        query, key = torch.empty(3, 1, q_length, 8), torch.empty(3, 1, kv_length, 8)
        if keys is None and full:
            assert right.all(), call
            continue
        shown = attention_transformers._as_mask(keys, query, key, not full).expand_as(right)
        row = torch.arange(q_length) + q_offset
        real = torch.ones(3, q_length, dtype=torch.bool) if mask is None or full else mask[:, row]
        assert torch.equal(shown[:, 0][real], right[:, 0][real]), call
    assert ranges > 200


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"use_vmap": True}, "a mask function of the model's own"),
        ({"mask_function": masking.or_masks(masking.causal_mask_function)}, "a mask function of the model's own"),
        ({"mask_function": masking.and_masks(masking.causal_mask_function), "local_size": 5}, "of the model's own"),
        ({"allow_is_causal_skip": False, "q_length": 4, "kv_length": 4}, "a model that changes its mask"),
        ({"q_offset": 3, "kv_length": 2}, "4 tokens, 2 of them keys"),
        ({"chunk": 4, "kv_length": 9, "q_offset": 8}, "chunks of 4 tokens"),
        ({"chunk": 4, "kv_length": 3, "q_offset": 2}, None),
    ],
)
def test_what_no_key_range_describes(change, why):
    chunk, config = change.get("chunk"), transformers.MistralConfig(sliding_window=3)
    if chunk:
        config.attention_chunk_size = chunk
        fn = masking.chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64))
        change = {**{key: x for key, x in change.items() if key != "chunk"}, "mask_function": fn, "local_size": chunk}
    call = {"batch_size": 1, "q_length": 1, "kv_length": 1, "mask_function": masking.causal_mask_function,
            "config": config, **change}  # fmt: skip
    found = attention_transformers._key_range(lambda x: False, **call)
    assert found is None if why is None else why in found


# torch.compile --------------------------------------------------------------------------------------------------------


class Compiler:
    """Compiles models to one graph, and keeps the graphs. Each warning is an error."""

    def __init__(self):
        self.graphs = []

    def __call__(self, model, dynamic=None):
        return torch.compile(model, fullgraph=True, backend=self._backend, dynamic=dynamic)

    def _backend(self, graph, inputs):
        self.graphs.append(graph)
        return graph.forward

    def calls(self):
        """How often each graph calls attention here."""
        return [sum("tilestream.attention" in str(node.target) for node in g.graph.nodes) for g in self.graphs]


@pytest.fixture
def compiler(monkeypatch):
    monkeypatch.setattr(attention_transformers, "attention", ts.attention)  # a count would be a guard
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield Compiler()
    torch._dynamo.reset()


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_compiled_forward_pass(family, said, compiler):
    """With a cache; without one, transformers cannot tell whether position_ids are packed."""
    model = model_of(family)
    with torch.no_grad():
        expected, found = both(model, lambda m: (compiler(m) if ours(m) else m)(tokens(), use_cache=True).logits, [])
    close(found, expected)
    assert compiler.calls() == [LAYERS]
    assert not said()


def ours(model):
    return model.config._attn_implementation == OURS


@pytest.mark.parametrize("family", ["gemma2", "gpt_oss"])
def test_a_compiled_forward_pass_whose_numbers_are_symbols(family, said, compiler):
    model = model_of(family)
    with torch.no_grad():
        expected, found = both(
            model, lambda m: (compiler(m, dynamic=True) if ours(m) else m)(tokens(), use_cache=True).logits, []
        )
    close(found, expected)
    assert compiler.calls() == [LAYERS]
    assert not said()


def test_dropout_in_a_compiled_model(said, compiler):
    name, config, sizes, _ = FAMILIES["gemma2"]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**{**sizes, "attention_dropout": 0.25})).train()
    model.set_attn_implementation(OURS)

    def logits(run):
        torch.manual_seed(1)
        return run(tokens(), use_cache=True).logits

    assert torch.equal(logits(compiler(model, dynamic=True)), logits(model))
    assert sum("goes to torch: dropout" in line for line in said()) == 1


def test_a_compiled_forward_pass_cannot_look_at_padding(said, compiler):
    model, mask = model_of("llama"), padding("left")

    def run(model):
        model = compiler(model) if ours(model) else model
        return model(tokens(), attention_mask=mask, use_cache=True).logits[mask.bool()]

    with torch.no_grad():
        close(*reversed(both(model, run, [])))
    assert compiler.calls() == [0]
    assert sum("attention_mask= in a compiled function" in line for line in said()) == 1


@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_compiled_steps_on_a_static_cache(family, said, compiler):
    """As ``generate`` does it: masks are made outside of the graph, and one graph serves all steps."""
    model = model_of(family)

    def run(name, step):
        model.set_attn_implementation(name)
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
        mask = padding("left")
        logits = [model(tokens(), attention_mask=mask, past_key_values=cache).logits[:, -1:]]
        for token in range(3, 6):
            mask = torch.cat((mask, mask.new_ones(2, 1)), 1)
            made = masking.create_masks_for_generate(model.config, torch.empty(2, 1, 0), mask, cache)
            places = (mask.sum(1) - 1)[:, None]
            ids = torch.full((2, 1), token)
            logits.append(step(ids, attention_mask=made, past_key_values=cache, position_ids=places).logits)
        return torch.cat(logits, 1)

    with torch.no_grad():
        close(run(OURS, compiler(model)), run("eager", model))
    assert not said()
    assert compiler.calls() == [LAYERS] * len(compiler.graphs)
    # A cache of a window counts its tokens in Python: transformers' step is compiled again for that.
    assert len(compiler.graphs) == (1 if family == "llama" else 2)


# On a GPU -------------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("cache", [None, "static"])
@pytest.mark.parametrize("family", FAMILIES)
def test_generated_logits_on_a_gpu(family, cache, taken, said):
    """In bfloat16; at most twice as far from float32 as eager attention, and a little."""
    model, mask = copy.deepcopy(model_of(family)).cuda(), padding("left").cuda()

    def run(attention, dtype):
        model.to(dtype).set_attn_implementation(attention)
        made = model.generate(
            tokens(2).cuda(), attention_mask=mask, max_new_tokens=STEPS, min_new_tokens=STEPS, do_sample=False,
            cache_implementation=cache, disable_compile=True, return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        return made.logits[0].float(), made.sequences  # later logits are of tokens that may differ

    right, _ = run("eager", torch.float32)
    eager, _ = run("eager", torch.bfloat16)
    taken.clear()
    found, sequences = run(OURS, torch.bfloat16)
    ts.check()
    assert sequences.shape == (2, TOKENS + STEPS)
    assert (found - right).norm() <= 2 * (eager - right).norm() + 1e-2 * right.norm()
    assert len(taken) == STEPS * LAYERS
    assert not said()


# Registration ---------------------------------------------------------------------------------------------------------


def test_an_older_transformers_is_refused(monkeypatch):
    monkeypatch.setattr(masking, "sdpa_mask", lambda batch_size, cache_position, kv_length: None)
    with pytest.raises(ImportError, match=r"not told where queries begin; it registers with .* 5\.4 or later"):
        ts.register_attention()
