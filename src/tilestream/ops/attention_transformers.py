"""`register_attention`: attention layers of Hugging Face's transformers, computed by `tilestream.attention`.

A model of transformers calls two functions by the name of its attention: `_mask` once a forward pass and kind of layer,
`_attention` once a layer with what `_mask` returned. Most masks are a causal diagonal or none, a window, and for each
sequence one run of keys: left of it lies padding, right of it what a static cache has not filled yet. `_mask` describes
such a mask by a **key range** instead of building ``[B, 1, Sq, Sk]``, an int32 tensor ``[B, kind, 1 + window, 2]``::

    keys[b, 0, 0]      the first key of sequence b, and how many it has from there to its last query's own
    keys.shape[1] - 1  bits: _LATER: some sequence does not begin at key 0; _FEWER: some has fewer keys than there are;
                       _FULL: there is no diagonal
    keys.shape[2] - 1  keys of the window, 0 if there is none

The shape holds what a plan needs on the host: reading it synchronises nothing, and `torch.compile` guards it. It is a
tensor of four dimensions because models, caches, checkpoints and ``generate`` pass masks of that kind on untouched.

Other masks are built by transformers, and such calls go to its ``"sdpa"``. Torch's function knows no soft cap and no
sinks; such layers are computed by torch's operations then (`_by_operations`). A log line says why, once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from tilestream.ops.attention import attention
from tilestream.ops.attention_routes import say_once, unfit, wants_gradient
from tilestream.ops.invariant_torch import use_invariant_torch
from tilestream.ops.limit import limit
from tilestream.plan.limit import is_invariant

#: Bits of a key range's kind.
_LATER, _FEWER, _FULL = 1, 2, 4
#: The most scores of a model's layers whose gradients torch's operations compute. They keep 8 bytes a score with a soft
#: cap, 6 with sinks, of all layers at once: 8 GiB. On an H200 a step of 4 layers of Gemma-2-9B with 2^30 scores in all
#: took 89 ms by operations, 160 with `tilestream.attention`. Of 4 layers of gpt-oss-20b with 2^32 scores, which are
#: beyond it, eager attention took 234 ms, and `tilestream.attention` 307.
KEPT_SCORES = 2**30
#: Arguments of layers that select keys, or have sinks a token: models fold them into the mask for the implementations
#: that they know by name.
_UNKNOWN = ("indices", "block_indices", "sinks")
#: Arguments that transformers' "sdpa" handles.
_OF_SDPA = ("position_bias", "cache", "output_attentions")


def register_attention(name: str = "tilestream") -> str:
    """Make `tilestream.attention` known to Hugging Face's transformers, as ``attn_implementation=name``.

    Sliding windows, soft caps, attention sinks, padded batches, static and dynamic caches run here without a mask of
    rows and keys. Layers that need a gradient go to transformers' ``"sdpa"``, whose backward pass is faster, unless
    they have a soft cap or sinks. These are computed by torch's operations, as models' ``"eager"`` does, up to 2^30
    scores (layers * sequences * heads * rows * keys), of which torch keeps 8 bytes each; and beyond here, in bounded
    memory. Dropout, packed ``position_ids``, and masks of a model's own go to torch at any size: to ``"sdpa"``, or with
    a soft cap or sinks to operations. The logger ``"tilestream"`` says at level INFO what goes there and why, once.
    Under `tilestream.invariant` layers with a gradient run here, and what the promise does not hold for raises
    `NotImplementedError`.

    Returns
    -------
    str
        The name, for ``AutoModel.from_pretrained(..., attn_implementation=...)`` or ``set_attn_implementation``.

    Raises
    ------
    ImportError
        If there is no transformers, or one before 5.4.

    Notes
    -----
    A layer that selects its keys (``indices=``), or attends to compressed ones, raises `NotImplementedError` when it
    runs.
    """
    try:
        from transformers import AttentionInterface, AttentionMaskInterface
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.masking_utils import sdpa_mask
        from transformers.utils.import_utils import is_tracing

        if "q_length" not in inspect.signature(sdpa_mask).parameters:
            raise ImportError("its mask functions are not told where queries begin")
    except ImportError as error:
        raise ImportError(
            f"register_attention: {error}; it registers with Hugging Face's transformers, 5.4 or later: pip install "
            "-U transformers"
        ) from None
    say = torch.compiler.assume_constant_result(_say)  # a compiled function says it when it is compiled
    AttentionInterface.register(name, functools.partial(_attention, sdpa_attention_forward, say))
    AttentionMaskInterface.register(name, functools.partial(_mask, sdpa_mask, is_tracing, say))
    return name


def _say(what: str, why: str) -> bool:
    say_once(what, why)
    return True


# Masks ----------------------------------------------------------------------------------------------------------------


def _mask(
    build: Callable[..., Any], is_tracing: Callable[..., bool], say: Callable[[str, str], Any], **call: Any
) -> torch.Tensor | None:
    """As transformers calls it: None where each query sees all keys up to its own, a key range, or a mask."""
    if getattr(call.get("config"), "compress_rates", None):
        raise NotImplementedError(
            "tilestream for transformers: the model (DeepSeek-V4) attends to compressed keys, too, which it adds to "
            'its mask and keys itself: use attn_implementation="eager" for it'
        )
    found = _key_range(is_tracing, **call)
    if isinstance(found, str):
        say("a mask of transformers", found)
        # Without these, None would stand for a diagonal from the first key.
        made: torch.Tensor = build(**{**call, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False})
        return made
    return found


def _key_range(
    is_tracing: Callable[..., bool], *, q_length: int, kv_length: int, batch_size: int, mask_function: Any,
    q_offset: Any = 0, kv_offset: int = 0, attention_mask: torch.Tensor | None = None, device: Any = "cpu", **call: Any,
) -> torch.Tensor | str | None:  # fmt: skip
    """The key range of a mask, None where it hides nothing but what is behind a query, or why there is no range.

    Query ``i`` is the sequence's token ``q_offset + i``, key ``j`` its token ``kv_offset + j``.
    """
    kind, window, why = _pattern(mask_function, q_length, kv_offset + kv_length, **call)
    if why:
        return why
    keys = q_offset + q_length - kv_offset  # a tensor where a static cache counts
    if kind & _FULL:
        if window and keys != kv_length:
            return "a window on both sides, and not a key for each query"
        keys = kv_length
    if isinstance(keys, int):
        if keys > kv_length:
            return f"{keys} tokens, {kv_length} of them keys"
        window = window if keys > window else 0
    first = None
    if attention_mask is not None:
        if is_tracing(attention_mask):
            return "attention_mask= in a compiled function, which cannot look at it"
        first, last, why = _runs(attention_mask[:, kv_offset : kv_offset + kv_length], keys)
        if why:
            return why
        if last is not None and kind & _FULL:
            if window:
                return "padding, and a window on both sides"
            keys = last
    every = first is None and isinstance(keys, int) and keys == kv_length
    if every and not window:
        return None
    begin = torch.zeros(batch_size, dtype=torch.int32, device=device) if first is None else first.int()
    count = (keys - begin).to(device=device, dtype=torch.int32)
    kind |= _LATER * (first is not None) | _FEWER * (not every)
    return torch.stack((begin, count), -1)[:, None, None].expand(-1, 1 + kind, 1 + window, -1)


def _pattern(
    mask_function: Any, q_length: int, tokens: int, *, config: Any = None, local_size: int | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, use_vmap: bool = False, **_: Any,
) -> tuple[int, int, str]:  # fmt: skip
    """The kind and the window of a mask function of transformers, or why it has none.

    Functions made of several are closures of one name, which transformers' other arguments tell apart.
    """
    own = "a mask function of the model's own"
    kind = _FULL * allow_is_bidirectional_skip
    if use_vmap:
        return kind, 0, own
    # Of one query, the flag is False for each cache that can be compiled.
    if not (allow_is_causal_skip or allow_is_bidirectional_skip or q_length == 1):
        return kind, 0, "packed position_ids, or a model that changes its mask"
    if mask_function.__name__ == ("bidirectional_mask_function" if kind else "causal_mask_function"):
        return kind, 0, ""
    chunk = getattr(config, "attention_chunk_size", None)
    if mask_function.__name__ != "and_mask" or local_size is None:
        return kind, 0, own
    if chunk is not None:
        return kind, 0, "" if local_size == chunk and tokens <= chunk else f"chunks of {chunk} tokens"
    return (kind, local_size, "") if local_size == getattr(config, "sliding_window", None) else (kind, 0, own)


def _runs(shown: torch.Tensor, keys: Any) -> tuple[torch.Tensor | None, torch.Tensor | None, str]:
    """The first key of each sequence, None if all begin at 0; behind their last, None if all have ``keys``; or why not.

    On a GPU this waits for the mask, as transformers' own mask functions do; once more where there is padding.
    """
    if isinstance(keys, int) and shown.shape[1] >= keys and shown[:, :keys].all():
        return None, None, ""
    place = torch.arange(shown.shape[1], device=shown.device)
    shown = shown & (place < keys)
    last = torch.where(shown, place + 1, 0).amax(1)
    first = torch.where(shown, place, last[:, None]).amin(1)
    holes = last - first != shown.sum(1)
    short = torch.full_like(last, shown.shape[1]) < keys
    is_later, ends, has_holes, is_short = torch.stack((first > 0, last != keys, holes, short)).any(1).tolist()
    if has_holes or is_short:
        return None, None, "attention_mask= with holes" if has_holes else "attention_mask= of fewer tokens than keys"
    return first if is_later else None, last if ends else None, ""


def _is_range(mask: torch.Tensor | None) -> bool:
    return mask is not None and mask.dtype == torch.int32 and mask.dim() == 4 and mask.shape[-1] == 2


def _as_mask(keys: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor, causal: bool) -> torch.Tensor:
    """The mask ``[B, 1, Sq, Sk]`` of a key range, or of none: which keys each query sees."""
    rows, columns = query.shape[2], key.shape[2]
    place = torch.arange(columns, device=query.device)
    row = torch.arange(rows, device=query.device)[:, None] - rows
    if keys is None:
        return (place <= row + columns)[None, None]
    begin, count = keys[:, 0, 0].long()[..., None, None, None].unbind(1)
    window, own = keys.shape[2] - 1, row + begin + count
    shown = (place >= begin) & (place < begin + count)
    if causal:
        shown = shown & (place <= own)
    if window:
        shown = shown & ((place > own - window) if causal else ((place - own).abs() <= window))
    return shown


# Layers ---------------------------------------------------------------------------------------------------------------


def _attention(
    sdpa: Callable[..., Any], say: Callable[[str, str], Any], module: Any, query: torch.Tensor, key: torch.Tensor,
    value: torch.Tensor, attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
    is_causal: bool | None = None, softcap: float | None = None, s_aux: torch.Tensor | None = None, **more: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """As transformers calls it: ``[B, H, S, D]`` in, ``[B, S, H, D]`` out, and no weights.

    The mask is the authority on what is seen, as for ``"sdpa"``: a layer's ``sliding_window=`` is not looked at.
    """
    for name in _UNKNOWN:
        if more.get(name) is not None:
            raise NotImplementedError(
                f"tilestream for transformers: {type(module).__name__} passes {name}=, which tilestream.attention has "
                'not: use attn_implementation="sdpa" or "eager" for this model'
            )
    promises = is_invariant(limit())
    ranged, several = _is_range(attention_mask), query.shape[2] > 1
    if attention_mask is not None and attention_mask.dtype == torch.int32 and not ranged:
        raise NotImplementedError(
            f"tilestream for transformers: {type(module).__name__} has changed its mask, a key range, to "
            f'{tuple(attention_mask.shape)}: use attn_implementation="sdpa" or "eager" for this model'
        )
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if ranged:
        assert attention_mask is not None
        causal = not (attention_mask.shape[1] - 1) & _FULL
    beyond_torch = bool(softcap) or s_aux is not None
    trains = not promises and wants_gradient(query, key, value)
    if attention_mask is not None and not ranged:
        why = "a mask of rows and keys"
    elif dropout:
        why = "dropout"
    elif given := [name for name in _OF_SDPA if more.get(name) is not None and more[name] is not False]:
        why = f"{given[0]}="
    elif trains and not beyond_torch:
        why = "it needs a gradient, which torch's function computes faster"
    elif trains and _kept(module, query, key) <= KEPT_SCORES:
        why = "it needs a gradient through a soft cap or sinks, which torch's operations compute faster"
    else:
        why = unfit(query, key, value)
    if not why:
        return _ours(query, key, value, attention_mask, causal and several, scaling, softcap, s_aux), None
    say("attention of transformers", why)
    if ranged or (attention_mask is None and causal and several and (beyond_torch or query.shape[2] != key.shape[2])):
        attention_mask = _as_mask(attention_mask, query, key, causal)
    # Under a promise torch's functions keep it, or raise.
    with use_invariant_torch() if promises else contextlib.nullcontext():
        if beyond_torch:
            return _by_operations(
                query, key, value, attention_mask, dropout, scaling, softcap, s_aux, more.get("position_bias")
            ), None
        answer: tuple[torch.Tensor, None] = sdpa(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=causal, **more
        )
    return answer


def _kept(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor) -> int:
    """The scores that torch keeps for gradients if its operations compute each layer of ``module``'s stack."""
    return _layers(getattr(module, "config", None)) * query.shape[0] * query.shape[1] * query.shape[2] * key.shape[2]


def _layers(config: object) -> int:
    """The layers that a config names, also by kind, as ``num_spatial_layers``; 1 if it names none."""
    named = getattr(config, "num_hidden_layers", None)
    if isinstance(named, int) and named > 0:
        return named
    kinds = [
        value for name, value in getattr(config, "__dict__", {}).items()
        if name.startswith("num_") and name.endswith("_layers") and isinstance(value, int) and value > 0
    ]  # fmt: skip
    return sum(kinds) or 1


def _ours(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, keys: torch.Tensor | None, causal: bool,
    scaling: float | None, softcap: float | None, sinks: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """`tilestream.attention` of a layer; keys of padded sequences are moved to the front."""
    seqlens = window = None
    if keys is not None:
        keys = keys.expand(query.shape[0], -1, -1, -1)
        kind, width = keys.shape[1] - 1, keys.shape[2] - 1
        if width:
            window = (width, width) if kind & _FULL else (width - 1, 0)
        if kind & _LATER:
            place = torch.arange(key.shape[2], device=key.device) + keys[:, 0, 0, 0, None]
            place = place.clamp(max=key.shape[2] - 1)
            batch = torch.arange(key.shape[0], device=key.device)[:, None]
            key, value = (x.transpose(1, 2)[batch, place].transpose(1, 2) for x in (key, value))
        seqlens = keys[:, 0, 0, 1].contiguous() if kind & _FEWER else None
    return attention(
        query, key, value, layout="bhsd", causal=causal, window=window, scale=scaling, softcap=softcap or None,
        sinks=sinks, seqlens_k=seqlens,
    ).transpose(1, 2)  # fmt: skip


def _by_operations(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, dropout: float,
    scaling: float | None, softcap: float | None, sinks: torch.Tensor | None, bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """Attention with a soft cap or sinks and any mask, in torch's operations, as models' "eager" has it."""
    shared = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(shared, 1), value.repeat_interleave(shared, 1)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores if bias is None else scores + bias
    if mask is not None:
        hidden = torch.finfo(scores.dtype).min
        scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype)[:, None, None].expand(*scores.shape[:-1], 1)), -1)
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(query.dtype)[..., : key.shape[2]]
    if dropout:
        weights = torch.dropout(weights, dropout, True)
    return (weights @ value).transpose(1, 2)
