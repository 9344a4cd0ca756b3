"""Launches of earlier calls, found by a signature: all that the checks, the plan and the compiled kernel depend on.

One cache serves matmul and attention, and holds two kinds of entries. The signature of *canonical operands* finds the
`tilestream.launch.launch.Launch`: a registered op looks it up. The signature of a *call* finds what is left to do for
an equal call: a call that went through once needs no check, no dispatch by torch and no plan the next time, unless
torch's dispatcher would have had something to do (`can_bypass_dispatcher`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.autograd import forward_ad

from tilestream.plan import limit as limits
from tilestream.runtime.properties import allows_tf32, context_units
from tilestream.trace.record import current

#: Types whose address and strides say all of a tensor, if it is not negated.
PLAIN = (torch.Tensor, torch.nn.Parameter)
#: Entries; with one more the cache starts anew. A cached call takes two: its launch, and what the call decides.
_MOST = 4 * 4096

T = TypeVar("T")


class LaunchCache(dict[object, object]):
    """What earlier calls decided, by signature. It holds plans and compiled kernels, and no tensor of a caller.

    Attributes
    ----------
    followers
        Called when it is cleared: what else was decided then is to be forgotten, too.
    """

    def __init__(self) -> None:
        super().__init__()
        self.followers: list[Callable[[], None]] = []

    def clear(self) -> None:
        """Forget all."""
        super().clear()
        for forget in self.followers:
            forget()

    def insert(self, key: object, found: T) -> T:
        """Keep ``found``, and return it."""
        if len(self) >= _MOST:
            self.clear()
        self[key] = found
        return found

    def of(self, op: str) -> list[Any]:
        """The entries of an op: see `signature`."""
        return [found for key, found in self.items() if isinstance(key, tuple) and key[0] == op]


launch_cache = LaunchCache()


def signature(
    op: str, tensors: Sequence[torch.Tensor | None], settings: object, limit: int | None = None
) -> tuple[object, ...]:
    """What decides a launch: each tensor's layout and alignment, the settings, and the state of the process.

    Parameters
    ----------
    op
        The op, and of which kind the entry is.
    tensors
        Operands, the one that tf32 may round first, which is given; None for one that is not.
    settings
        All else that the caller says.
    limit
        The workers' limit; None: the present one. See `tilestream.plan.limit`.
    """
    first = tensors[0]
    assert first is not None
    device = first.device
    return (
        op, settings, limits.limit() if limit is None else limit,
        context_units(device.index) if device.type == "cuda" else 0,
        first.dtype == torch.float32 and allows_tf32(),
        *[None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0) for x in tensors],
    )  # fmt: skip


def can_bypass_dispatcher(device: torch.device, tensors: Sequence[torch.Tensor | None]) -> bool:
    """Whether torch's dispatcher has nothing to do for a launch of ``tensors`` on ``device``: it would not see it."""
    gradients = torch.is_grad_enabled()
    if [x for x in tensors if x is not None and (not is_plain(x) or (gradients and x.requires_grad))]:
        return False
    return not (
        current() is not None  # traced
        or device.index != torch.cuda.current_device()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_autocast_enabled("cuda")
        or forward_ad._current_level >= 0
    )


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether its address and strides say all of it."""
    return type(tensor) in PLAIN and not tensor.is_neg()
