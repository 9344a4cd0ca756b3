"""`tilestream.distributed.moe`: a mixture of experts with the experts spread over the ranks.

::

    order = rows by expert                                                  moe_dispatch.sorted_rows
    rows of x to the ranks of their experts; through the experts; back      moe_dispatch, moe_experts
    out[token] = sum of weight * row, in the order of the token's choices

The backward pass sends the rows of x again, with the gradient's rows, and receives their gradients in the same way.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.compiler import is_compiling

from tilestream.arrival.flat import check_deadline
from tilestream.arrival.stream import open_streams
from tilestream.core.arguments import is_one_of
from tilestream.core.errors import kind_of
from tilestream.core.groups import MOST_GROUPS
from tilestream.core.operands import ACTIVATIONS
from tilestream.distributed import moe_experts
from tilestream.distributed.collective import agree
from tilestream.distributed.dispatch import FORMS, Form
from tilestream.distributed.group_state import Group, GroupState, groups_of, name_of, state_of, states_of
from tilestream.distributed.moe_dispatch import Compute, Rows, by_collectives, by_messages, sorted_rows
from tilestream.distributed.moe_experts import Experts, Part
from tilestream.distributed.moe_plan import MoePlan, plan_of
from tilestream.distributed.moe_repeats import PlainMixture, plain_mixture
from tilestream.distributed.request import running
from tilestream.distributed.symmetric import connect
from tilestream.kernels.cpu.epilogue import wide_dtype
from tilestream.ops import streamed
from tilestream.ops.checks import autocast, check_dense, refuse_tangents
from tilestream.ops.library import _alone, library
from tilestream.ops.limit import limit, within_limit
from tilestream.ops.sharding import is_dtensor
from tilestream.plan.grouped import refuse_invariance
from tilestream.runtime.channel import check_device
from tilestream.runtime.streams import is_capturing

_OP = "moe"
#: A router's choice: weights and experts, like the values and indices of ``torch.topk``.
Chosen = tuple[torch.Tensor, torch.Tensor]
Router = Chosen | Callable[[torch.Tensor], Chosen]
#: The limit of group sizes: groups may have any size.
_ANY = 1 << 30
#: The dtypes that the tensors may have.
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_WHOLE = (torch.int32, torch.int64)


def moe(
    x: torch.Tensor,
    router: Router,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    group: Group = None,
    *,
    activation: str | None = "silu",
    form: Form = "auto",
    deadline: float | None = None,
    most_tokens: int | None = None,
) -> torch.Tensor:
    """``sum(weight * (activation(x @ w1.T) * (x @ w3.T)) @ w2.T)`` over each token's experts, which the ranks share.

    All ranks of the group make the same call, each with any number of its own tokens. Each token is sent to the ranks
    of its experts, and the results are sent back. Over gloo an expert's products begin when the rows of the first rank
    have arrived. The ranks learn the numbers of rows during the call. There is no capacity, so no token is dropped.

    Parameters
    ----------
    x
        ``[..., H]``: this rank's tokens; float16, bfloat16, float32 or float64.
    router
        ``(weights, experts)``, each ``[..., top_k]`` or ``[rows of x, top_k]``, as ``torch.topk`` returns them: weights
        of any of these dtypes, and numbers of experts (int32 or int64). Or a function that computes them from ``x``.
        Experts are numbered over the ranks: rank r has ``r * E`` to ``(r + 1) * E - 1``.
    w1, w3
        ``[E, I, H]``: this rank's E experts. E is the same on each rank.
    w2
        ``[E, H, I]``.
    group
        The process group, of any size; None: the default group. Or a `torch.distributed.DeviceMesh` of one dimension.
    activation
        ``"silu"``, ``"gelu"``, ``"gelu_tanh"``, ``"relu"`` or None.
    form
        ``"fused"`` or ``"unfused"``, the same on all ranks; ``"auto"``: fused if the ranks have gloo's messages, or
        GPUs that reach each other and ``most_tokens``. See `plan_moe`.
    deadline
        Seconds after which the call stops waiting, and likewise the backward pass; None: the group's own timeout. A
        backend's own all-to-all always has the group's timeout. On GPUs it is that of each wait for a peer.
    most_tokens
        The most tokens that any rank gives to such a call, the same on all ranks. A fused call on GPUs needs it: it
        decides how much memory each rank lends the others for their rows. More tokens raise.

    Returns
    -------
    torch.Tensor
        ``[..., H]`` in x's dtype. Rows travel in x's dtype. The token's own rank weights and adds them in float32
        (float64 for float64), in the order of the token's choices.

    Raises
    ------
    ValueError, TypeError
        For invalid arguments, before anything is sent; or on every rank, if the ranks' calls differ.
    ArrivalTimeout
        If rows did not come in time. It names the reporting rank and the rank whose rows are missing. A fused call on
        GPUs does not wait: the next call on that device, or with that group, raises it, or `tilestream.check`; the
        result is NaN.
    GroupBroken
        If a peer was lost, or a rank has given up waiting: by every later call with the group, on all its ranks.
    NotImplementedError
        Under `tilestream.invariant`; while a CUDA graph is captured, if the call is unfused, as each backward pass is.

    Notes
    -----
    A fused call on GPUs reads no expert's number on the host: a token that chooses an expert that does not exist
    becomes NaN there. Other calls raise `ValueError`.

    All ranks must call backward, too. It sends ``x`` and the gradient, and recomputes the hidden rows. Gradients of the
    weights are sums over the rows of all ranks. There is no second derivative.

    Examples
    --------
    >>> chosen = (x @ gate.T).softmax(-1).topk(2)  # doctest: +SKIP
    >>> y = ts.distributed.moe(x, chosen, w1, w2, w3)  # doctest: +SKIP
    """
    weights, experts = _chosen(x, router)
    options = {"deadline": deadline, "most_tokens": most_tokens}
    plain = plain_mixture(x, weights, experts, w1, w2, w3, group, activation, form, **options)
    if plain is not None and (made := plain.repeated()) is not None:
        return made
    x, w1, w2, w3 = _checked(x, weights, experts, w1, w2, w3, activation, form)
    most = _most(most_tokens, x)
    seconds = -1.0 if deadline is None else check_deadline(deadline)
    name = name_of(_OP, _one_group(group), _ANY)
    rows, top_k = x.shape[:-1].numel(), experts.shape[-1]
    if plain is not None:
        flat = x.view(rows, x.shape[-1]), weights.view(rows, top_k), experts.view(rows, top_k)
        of_call = Experts(w1, w2, w3, activation or "none"), (name, form, seconds, limit(), most)
        if (pushed := _pushed(*flat, *of_call, plain)) is not None:
            return pushed.view(x.shape)
    result: torch.Tensor = moe_op(
        x.reshape(rows, x.shape[-1]), weights.reshape(rows, top_k), experts.reshape(rows, top_k), w1, w2, w3,
        activation or "none", name, form, seconds, limit(), most,
    )  # fmt: skip
    return result.view(x.shape)


def plan_moe(
    x: torch.Tensor,
    router: Router,
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
    group: Group = None,
    *,
    activation: str | None = "silu",
    form: Form = "auto",
    most_tokens: int | None = None,
) -> MoePlan:
    """The plan of a call of `moe`, without sending anything. ``print(plan.explain())`` states the reasons."""
    weights, experts = _chosen(x, router)
    x, w1, w2, w3 = _checked(x, weights, experts, w1, w2, w3, activation, form)
    (one,) = groups_of(_OP, _one_group(group))
    state, most = state_of(_OP, one, _ANY), _most(most_tokens, x)
    return plan_of(state, _OP, x, experts.shape[-1], w1, activation or "none", form, most)


def _most(most_tokens: int | None, x: torch.Tensor) -> int:
    """``most_tokens``, 0 for None; raise if ``x`` has more."""
    if most_tokens is None:
        return 0
    if isinstance(most_tokens, bool) or not isinstance(most_tokens, int) or most_tokens < 1:
        raise ValueError(f"{_OP}: most_tokens={most_tokens!r}; it must be a positive number of tokens, or None")
    if (tokens := x.shape[:-1].numel()) > most_tokens:
        raise ValueError(
            f"{_OP}: x has {tokens} tokens, and most_tokens={most_tokens}: give the most that any rank gives, the same "
            "on all ranks, or cut x"
        )
    return most_tokens


def _one_group(group: Group) -> Group:
    if not is_compiling() and len(groups_of(_OP, group)) != 1:
        raise ValueError(
            f"{_OP}: group: a mesh of two dimensions; its ranks are one group: give a part of it, mesh['ep']"
        )
    return group


def _chosen(x: torch.Tensor, router: Router) -> Chosen:
    """The router's weights and experts."""
    chosen = router(x) if callable(router) else router
    if not isinstance(chosen, Sequence) or len(chosen) != 2 or not all(isinstance(t, torch.Tensor) for t in chosen):
        raise TypeError(
            f"{_OP}: router {'made' if callable(router) else 'is'} {kind_of(chosen)}; it must be (weights, "
            "experts), as torch.topk returns them, or a function of x that returns them"
        )
    return chosen[0], chosen[1]


def _named(*tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a call by the names that messages give them."""
    return dict(zip(("x", "w1", "w2", "w3", "router's weights", "router's experts"), tensors, strict=True))


def _checked(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor,
    w3: torch.Tensor, activation: str | None, form: str,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    """``x`` and the experts' weights, converted as autocast requires.

    Raises
    ------
    ValueError, TypeError, NotImplementedError
        If an argument is wrong by itself, or does not fit the others.
    """
    tensors = _named(x, w1, w2, w3, weights, experts)
    for name, tensor in tensors.items():
        if is_dtensor(tensor):
            raise TypeError(f"{_OP}: {name} is a DTensor; each rank gives its own part: pass {name}.to_local()")
    if not is_compiling() and open_streams:
        streamed.refuse(_OP, **tensors)
    check_dense(_OP, "torch", tensors, len(tensors), _check_dtype, "dense tensors are multiplied: {name}.to_dense()")
    refuse_tangents(_OP, x, w1, w2, w3, weights, why="it has no forward-mode derivative")
    x, w1, w2, w3 = autocast(_OP, False, x, w1, w2, w3)
    for name, tensor in (("w1", w1), ("w2", w2), ("w3", w3)):
        if tensor.dtype != x.dtype:
            raise TypeError(f"{_OP}: {name} is {tensor.dtype}, x is {x.dtype}; they have one dtype")
    if x.dim() < 2:
        raise ValueError(f"{_OP}: x has {x.dim()} dimensions; it has at least 2: [..., H]: unsqueeze a token")
    if w1.dim() != 3 or w1.shape[2] != x.shape[-1] or 0 in w1.shape:
        raise ValueError(
            f"{_OP}: w1 has shape {list(w1.shape)}; it must be [E, I, {x.shape[-1]}] for x {list(x.shape)}, "
            "none of them 0"
        )
    for name, tensor, wanted in (("w2", w2, w1.mT.shape), ("w3", w3, w1.shape)):
        if tensor.shape != wanted:
            raise ValueError(f"{_OP}: {name} has shape {list(tensor.shape)}; with w1 {list(w1.shape)}: {list(wanted)}")
    rows = x.shape[:-1].numel()
    leading = (x.shape[:-1], (rows,))
    if weights.dim() < 2 or weights.shape != experts.shape or weights.shape[:-1] not in leading:
        raise ValueError(
            f"{_OP}: router: weights have shape {list(weights.shape)}, experts {list(experts.shape)}; both are "
            f"{[*x.shape[:-1], 'top_k']}, or {[rows, 'top_k']}"
        )
    if activation is not None and not is_one_of(activation, ACTIVATIONS[1:]):
        raise ValueError(f"{_OP}: activation={activation!r}; it must be None or one of {', '.join(ACTIVATIONS[1:])}")
    if not is_one_of(form, FORMS):
        raise ValueError(f"{_OP}: form={form!r}; it must be one of {', '.join(FORMS)}")
    if x.is_cuda and w1.shape[0] > MOST_GROUPS:
        raise ValueError(f"{_OP}: w1 has {w1.shape[0]} experts; a rank's GPU has at most {MOST_GROUPS}: use more ranks")
    refuse_invariance(_OP, limit(), "which mixtures over ranks do not keep yet")
    return x, w1, w2, w3


def _check_dtype(op: str, name: str, tensor: torch.Tensor) -> None:
    of_experts = name == "router's experts"
    if tensor.dtype not in (_WHOLE if of_experts else _FLOATS):
        names = ", ".join(str(dtype) for dtype in (_WHOLE if of_experts else _FLOATS))
        raise TypeError(f"{op}: {name} is {tensor.dtype}; it must be one of {names}")


# The registered ops ---------------------------------------------------------------------------------------------------

_SCHEMA = (
    "Tensor x, Tensor weights, Tensor experts, Tensor w1, Tensor w2, Tensor w3, str activation, str group, str form, "
    "float deadline, int worker_limit, int most_tokens"
)
library.define(f"moe({_SCHEMA}) -> Tensor", tags=_alone)
library.define(
    f"moe_backward(Tensor grad, bool of_experts, {_SCHEMA}) -> (Tensor, Tensor, Tensor, Tensor, Tensor)", tags=_alone
)
moe_op = torch.ops.tilestream.moe.default
moe_backward_op = torch.ops.tilestream.moe_backward.default


def _travel(
    op: str, x: torch.Tensor, chosen: torch.Tensor, sent: Callable[[torch.Tensor], Rows], e: Experts,
    how: Sequence[Any], compute: Compute, returned: Sequence[tuple[tuple[int, ...], torch.dtype]],
) -> Rows:  # fmt: skip
    """The results of the rows ``sent(order)`` in the order of the choices: ``[T * top_k, ...]`` each.

    ``returned``: the shape of a row and its dtype, for each result.
    """
    state, plan, seconds = _planned(op, x, chosen, e, *how)
    if x.is_cuda and is_capturing(x.device):
        why = "; ".join(refusal.why for refusal in plan.refused)
        raise NotImplementedError(
            f"{_OP}: a CUDA graph is captured, and the host reads how many rows go where: the call is unfused ({why})"
        )
    worker_limit = how[3]
    (order, place, _), counts = sorted_rows(chosen, e.w1.shape[0] * state.world, state.world)
    rows = sent(order)
    limited = within_limit(worker_limit) if worker_limit else contextlib.nullcontext()
    with limited, running(x.device.type, state):
        if plan.fused:
            back = tuple(x.new_empty((len(order), *shape), dtype=dtype) for shape, dtype in returned)
            by_messages(state, plan, counts, rows, back, compute, seconds)
        elif state.world == 1:
            back = compute((0, 0), rows, counts[0])
        else:
            back = by_collectives(state, plan, counts, rows, compute)
    return tuple(x[place] for x in back)


def _planned(
    op: str, x: torch.Tensor, chosen: torch.Tensor, e: Experts, group: str, form: str, deadline: float,
    worker_limit: int, most_tokens: int,
) -> tuple[GroupState, MoePlan, float]:  # fmt: skip
    """The group, a call's plan, and its deadline."""
    (state,) = states_of(_OP, group, _ANY)
    if x.is_cuda:
        check_device(x.device.index)
    state.check()
    plan = plan_of(state, op, x, chosen.shape[-1], e.w1, e.activation, form, most_tokens)
    return state, plan, check_deadline(state.timeout(x.device.type) if deadline < 0 else deadline)


def _pushed(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, e: Experts, how: Sequence[Any],
    plain: PlainMixture | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """The result of a call whose rows kernels push; None for other calls. ``plain``: as of `graph_experts.mix`."""
    if not x.is_cuda:
        return None
    state, plan, seconds = _planned(_OP, x, experts, e, *how)
    if not plan.fused:
        return None
    with running("cuda", state):
        if not state.connected:
            agree(state, plan, x.device)
            state.connected = True
            if connect(state, x.device):
                return None  # and from now on the plan says so
        from tilestream.distributed import graph_experts  # imports Triton

        with within_limit(how[3]) if how[3] else contextlib.nullcontext():
            return graph_experts.mix(state, plan, x, weights, experts, e, seconds, plain)


def _forward(
    x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor,
    activation: str, *how: Any,
) -> torch.Tensor:  # fmt: skip
    if open_streams:
        streamed.refuse(_OP, **_named(x, w1, w2, w3, weights, experts))
    e, top_k, width = Experts(w1, w2, w3, activation), experts.shape[1], x.shape[1]
    if (result := _pushed(x, weights, experts, e, how)) is not None:
        return result

    def compute(place: tuple[int, int], rows: Rows, counts: torch.Tensor) -> Rows:
        return (moe_experts.forward(e, rows[0], counts),)

    def sent(order: torch.Tensor) -> Rows:
        return (x[order // max(top_k, 1)],)

    (rows,) = _travel(_OP, x, experts, sent, e, how, compute, [((width,), x.dtype)])
    return _combined(rows.view(*experts.shape, width), weights).to(x.dtype)


def _combined(rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """The weighted sum of each token's rows ``[T, top_k, H]``, in a wide dtype and in the order of its choices."""
    wide = wide_dtype(rows.dtype)
    total = rows.new_zeros((rows.shape[0], rows.shape[2]), dtype=wide)
    for choice in range(rows.shape[1]):
        row = rows[:, choice].to(wide)
        total += row if weights is None else row * weights[:, choice, None].to(wide)
    return total


def _backward(
    grad: torch.Tensor, of_experts: bool, x: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor,
    w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor, activation: str, *how: Any,
) -> tuple[torch.Tensor, ...]:  # fmt: skip
    e, top_k, width, wide = Experts(w1, w2, w3, activation), experts.shape[1], x.shape[1], wide_dtype(x.dtype)
    parts: dict[tuple[int, int], Part] = {}

    def sent(order: torch.Tensor) -> Rows:
        token = order // max(top_k, 1)
        return x[token], grad.to(x.dtype)[token], weights.reshape(-1)[order].to(wide)

    def compute(place: tuple[int, int], rows: Rows, counts: torch.Tensor) -> Rows:
        own, of_own, factors = rows
        of_x, of_factors, parts[place] = moe_experts.backward(e, own, of_own, factors, counts)
        return of_x, of_factors

    of_rows, of_factors = _travel(
        "moe_backward", x, experts, sent, e, how, compute, [((width,), x.dtype), ((), wide)]
    )  # fmt: skip
    of_x = _combined(of_rows.view(*experts.shape, width), None).to(x.dtype)
    of_weights = of_factors.view(weights.shape).to(weights.dtype)
    if not of_experts:
        return of_x, of_weights, *(w.new_empty(0) for w in (w1, w2, w3))
    return of_x, of_weights, *moe_experts.weight_gradients([parts[place] for place in sorted(parts)])


def _fake_backward(grad: torch.Tensor, of_experts: bool, *args: Any) -> tuple[torch.Tensor, ...]:
    x, weights, _, *w = args[:6]
    return x.new_empty(x.shape), weights.new_empty(weights.shape), *(
        t.new_empty(t.shape if of_experts else 0) for t in w
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs[:6])
    ctx.how = inputs[6:]


def _gradients(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
    of_experts = any(ctx.needs_input_grad[3:6])
    of_x, of_weights, *of_w = moe_backward_op(grad, of_experts, *ctx.saved_tensors, *ctx.how)
    return of_x, of_weights, None, *(of_w if of_experts else [None] * 3), *[None] * len(ctx.how)


def _no_second(ctx: Any, *grads: torch.Tensor) -> None:
    raise NotImplementedError(f"{_OP}: it has no second derivative")


for _name, _run, _fake in (
    ("moe", _forward, lambda x, *others: x.new_empty(x.shape)), ("moe_backward", _backward, _fake_backward),
):  # fmt: skip
    for _device in ("CPU", "CUDA"):
        library.impl(_name, _run, _device)
    torch.library.register_fake(f"tilestream::{_name}", _fake, lib=library)
torch.library.register_autograd("tilestream::moe", _gradients, setup_context=_save, lib=library)
torch.library.register_autograd("tilestream::moe_backward", _no_second, lib=library)
