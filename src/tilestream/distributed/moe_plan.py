"""`MoePlan`: the form of a mixture of experts across ranks, with the reasons."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from tilestream.distributed.group_state import MOST_RANKS, GroupState
from tilestream.distributed.plan import AgreedPlan
from tilestream.distributed.planner import UNPREPARED, backend_of
from tilestream.distributed.symmetric import why_not
from tilestream.launch.layout import Layout
from tilestream.plan.candidate import Refusal
from tilestream.plan.explain import number
from tilestream.plan.problem import dtype_name
from tilestream.runtime.properties import cuda_properties

#: SMs that push rows and results beside products. Between two H200 one pushes 10 to 20 GB/s, and a link has 310 GB/s
#: with rows or results both ways: 22 SMs were as fast as more, and up to 25 % faster than 16.
PUSHERS = 24
#: At least so many SMs are left for each one that pushes.
_OTHERS = 4
#: The share of a GPU's memory that rows of a call may take.
_MOST_MEMORY = 0.25
_FUSED: Mapping[str, str] = {
    "gloo": "each source's rows are multiplied as they come, part by part, and sent back",
    "symmetric memory": (
        "kernels push the rows into the ranks' memory, and the results back; each source's rows are multiplied when "
        "they are there; no host reads how many there are, so CUDA graphs may hold the call"
    ),
}


@dataclass(frozen=True)
class MoePlan(AgreedPlan):
    """The plan of a mixture of experts across ranks.

    Attributes
    ----------
    rank, world
        This process's rank, and the number of ranks.
    transport
        ``"gloo"``: messages with all ranks at once; ``"symmetric memory"``: kernels that write to the ranks' GPUs;
        ``"collective"``: an all-to-all in each direction.
    refused
        The reasons why the call is not fused; empty if it is.
    agreed
        The values that the ranks compare.
    layout
        The memory that a rank gives to the others' kernels; None for other transports.
    pushers
        SMs that push rows and results; 0 for other transports.
    """

    rank: int
    world: int
    transport: str
    refused: tuple[Refusal, ...]
    agreed: Mapping[str, object]
    layout: Layout | None = None
    pushers: int = 0

    @property
    def op(self) -> str:
        """The op's name."""
        return str(self.agreed["op"])

    def explain(self) -> str:
        """The choices, and the refused ones, in words."""
        how = (
            f"fused: {_FUSED[self.transport]}" if self.fused else
            "unfused: an all-to-all of the counts, one of the rows, the experts, an all-to-all back; the host reads "
            "the counts"
        )  # fmt: skip
        lines = [
            ("form", f"{how}, by {self.transport}"),
            ("agreed", ", ".join(f"{name} {value}" for name, value in self.agreed.items())),
        ]
        if self.layout is not None and self.fused:
            lines += [
                ("memory", f"{number(self.layout.size / 1e9)} GB of each GPU, for the rows of {self.world} ranks"),
                ("pushers", f"{self.pushers} SMs"),
                ("backward", "unfused: it sends the rows again by all-to-all; the host reads the counts"),
            ]
        lines += [("refused", f"{refusal.what}: {refusal.why}") for refusal in self.refused]
        return "\n".join([f"moe, {self.world} ranks", *(f"  {name:<9} {text}" for name, text in lines)])


def plan_of(
    state: GroupState, op: str, x: torch.Tensor, top_k: int, w1: torch.Tensor, activation: str, form: str,
    most_tokens: int,
) -> MoePlan:  # fmt: skip
    """The plan of a call, or of its backward pass, without sending anything. ``most_tokens``: 0 if it is not given."""
    experts, hidden, width = w1.shape
    backend, why, transport = backend_of(state, x.device), "", "symmetric memory" if x.is_cuda else "gloo"
    layout = Layout(state.world, experts, most_tokens * top_k, width, x.element_size())
    if form == "unfused":
        why = 'the caller asks for form="unfused"'
    elif state.world == 1:
        why = "one rank: nothing travels"
    elif x.is_cuda:
        why = _why_not_pushed(state, op, x, layout, most_tokens)
    elif backend != "gloo":
        why = f"{backend} on the CPU; messages of gloo are what overlaps there"
    agreed: dict[str, object] = {
        "op": op, "x": f"[..., {width}] {dtype_name(x.dtype)}", "top_k": top_k, "experts": experts, "hidden": hidden,
        "activation": activation, "form": "unfused" if why else "fused",
    }  # fmt: skip
    if most_tokens:
        agreed["most_tokens"] = most_tokens
    refused = (Refusal("fused", why),) if why else ()
    if why or not x.is_cuda:
        return MoePlan(state.rank, state.world, "collective" if why else transport, refused, agreed)
    pushers = max(1, min(PUSHERS, cuda_properties(x.device.index).workers // (1 + _OTHERS)))
    plan = MoePlan(state.rank, state.world, transport, (), agreed, layout, pushers)
    if state.capture(x) and plan.handshake not in state.prepared:
        return replace(plan, transport="collective", refused=(Refusal("fused", UNPREPARED),))
    return plan


def _why_not_pushed(state: GroupState, op: str, x: torch.Tensor, layout: Layout, most_tokens: int) -> str:
    """The reason why kernels do not push the rows of GPUs; empty if they do."""
    if op != "moe":
        return "the backward pass sends rows by all-to-all"
    if not most_tokens:
        return "no most_tokens= is given, which says how much memory the rows of each rank need on the others' GPUs"
    if state.world > MOST_RANKS:
        return f"{state.world} ranks; up to {MOST_RANKS} push into each other's memory"
    if not layout.capacity:
        return "no token has an expert: nothing travels"
    if why := why_not(state, x):
        return why
    whole = int(torch.cuda.get_device_properties(x.device).total_memory)
    if layout.size > _MOST_MEMORY * whole:
        return (
            f"most_tokens={most_tokens}: the rows of {state.world} ranks need {number(layout.size / 1e9)} GB of each "
            f"GPU; at most a quarter of its {number(whole / 1e9)} GB is taken: give fewer tokens a call"
        )
    return ""
