"""Equal calls between ranks, prepared once and issued by one native call.

Most calls of a program repeat an earlier one with other addresses. The usual way of a call checks its arguments, looks
its decision up, and walks through the protocol of its op: some 400 steps of Python. `plain_call` finds by a few steps
whether a call repeats an earlier one: its key holds all that decides a call. A `Repeat` is what the earlier calls have
prepared: for each slot a `tilestream.launch.native_program.NativeProgram` with all operations and launches.

The first calls of a kind take the usual way, and prepare the slots that they use. So does each call that a repeat
cannot serve: with gradients, or of a dtype of 32 bits or more; under capture; in a transform or a mode of torch; where
a blocking launch (CUDA_LAUNCH_BLOCKING) needs the operations one by one; or without the extension.
"""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.compiler import is_compiling

from tilestream.core.protocols import gather
from tilestream.distributed.dispatch import on_trial
from tilestream.distributed.group_state import Group, GroupState, known_state
from tilestream.distributed.program import more
from tilestream.distributed.request import one_a_row
from tilestream.launch.cache import launch_cache
from tilestream.launch.native_program import NativeProgram, Part
from tilestream.ops import native
from tilestream.ops.inline import PLAIN, seen_above
from tilestream.ops.scales import FP8_DTYPES
from tilestream.plan.limit import limit
from tilestream.runtime import shutdown, streams
from tilestream.runtime.channel import check_device

if TYPE_CHECKING:
    from tilestream.distributed.call_queue import CallQueue

logger = logging.getLogger(__name__)

native.FILES.add(__file__)

#: The most right operands of a call.
_MOST_BS = 4
#: The most repeats of a group.
_MOST_REPEATS = 1024
_DTYPES = (torch.bfloat16, torch.float16, *FP8_DTYPES)
#: Types of options: no two values of these are equal and mean another call, as 1 and True do.
_OPTIONS = frozenset((str, bool, type(None), torch.dtype))
#: The most tensors that the extension numbers together.
_MOST_NUMBERED = 5
_blocks = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


R = TypeVar("R", bound="Repeat")
Tensors = Sequence[torch.Tensor | None]
#: What a repeated gather gives: all ranks' rows where they are asked for, and the products.
Gathered = tuple[torch.Tensor | None, list[torch.Tensor]]


class Extras(NamedTuple):
    """What a call has beside its operands: one value for each right operand, None for those without.

    Attributes
    ----------
    scale_a
        The caller's: one element, or one a row.
    """

    biases: Tensors
    activations: Sequence[str | None]
    scale_a: torch.Tensor | None
    scales_b: Tensors

    @classmethod
    def given(cls, count: int, bias: Any, activation: Any, scale_a: Any, scale_b: Any) -> Extras | None:
        """The caller's arguments for ``count`` right operands; None if the usual way has to look at them."""
        biases, scales_b = ([x] * count if x is None else [x] if type(x) in PLAIN else x for x in (bias, scale_b))
        activations = [activation] * count if activation is None or type(activation) is str else activation
        for each in (biases, scales_b, activations):
            if type(each) not in (list, tuple) or len(each) != count:
                return None
        if any(x is not None and type(x) is not str for x in activations):
            return None
        names = tuple(None if x == "none" else x for x in activations)
        return cls(tuple(biases), names, scale_a, tuple(scales_b))

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors that are given, in order."""
        return [x for x in (*self.biases, self.scale_a, *self.scales_b) if x is not None]

    @property
    def form(self) -> tuple[object, ...]:
        """What is given, beside the tensors' layouts."""
        given = tuple(x is not None for x in (*self.biases, self.scale_a, *self.scales_b))
        return *given, *self.activations


#: Of a call that has none of them.
NO_EXTRAS = Extras((None,) * _MOST_BS, (None,) * _MOST_BS, None, (None,) * _MOST_BS)


class PlainCall(NamedTuple):
    """A call of plain tensors.

    Attributes
    ----------
    key
        All that decides it: equal calls differ only in contents, addresses and a deadline's length.
    dim
        The dimension of ``a`` that is cut.
    deadline
        In seconds; None: the group's own timeout.
    extras
        Biases, activations and scales.
    """

    state: GroupState
    key: tuple[object, ...]
    a: torch.Tensor
    bs: tuple[torch.Tensor, ...]
    dim: int
    deadline: float | None
    extras: Extras = NO_EXTRAS

    def repeated(self) -> Any:
        """The result of a `Repeat`; None if there is none, or it cannot serve this call."""
        found: Repeat | None = self.state.repeats.get(self.key)
        return None if found is None else found.run(self)

    def scales_of_rows(self) -> torch.Tensor | None:
        """The own scales, one a row, contiguous; None without them. Memory behind work of the current stream."""
        scale = self.extras.scale_a
        return None if scale is None else one_a_row(scale, (*self.a.shape[:-1], 1)).contiguous()

    @property
    def seconds(self) -> float:
        """The deadline; by default the group's own timeout."""
        return self.state.timeout("cuda") if self.deadline is None else float(self.deadline)


def plain_call(
    op: str, group: Group, a: Any, b: Any, dim: Any, deadline: Any, *options: Any,
    extras: tuple[Any, Any, Any, Any] | None = None,
) -> PlainCall | None:  # fmt: skip
    """A call that may repeat an earlier one; None for one that takes the usual way.

    Parameters
    ----------
    a, b, dim, deadline, options
        The caller's arguments, not checked: the call is equal to an earlier one that was checked, or it is Python's.
    extras
        Likewise: bias, activation, scale_a and scale_b; None if there is none of them.
    """
    if is_compiling():
        return None
    extension = native.loaded()
    if extension is None or _blocks or type(a) not in PLAIN or not a.is_cuda or a.dtype not in _DTYPES:
        return None
    bs = (b,) if type(b) in PLAIN else tuple(b) if type(b) in (list, tuple) else ()
    if not 0 < len(bs) <= _MOST_BS:
        return None
    more = NO_EXTRAS if extras is None else Extras.given(len(bs), *extras)
    if more is None:
        return None
    gradients, tensors = torch.is_grad_enabled(), bs if extras is None else (*bs, *more.tensors)
    for x in tensors:
        if type(x) not in PLAIN or (gradients and x.requires_grad):
            return None
    if (gradients and a.requires_grad) or seen_above() or native.is_watched() or type(dim) is not int:
        return None
    for option in options:
        if type(option) not in _OPTIONS:
            return None
    if deadline is not None and not (type(deadline) in (int, float) and 0 < deadline < math.inf):
        return None
    state = known_state(group)
    if state is None or on_trial() is not None:
        return None
    try:
        number = extension.number_layouts(a, *bs)
        if extras is not None:
            options = *options, more.form, _numbers(extension, more.tensors)
    except native.REFUSALS:
        return None
    if not number:
        return None
    key = op, number, launch_cache.generation, type(b) in PLAIN, dim, deadline is None, limit(), *options
    return PlainCall(state, key, a, bs, dim, deadline, more)


def _numbers(extension: Any, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Numbers of the layouts of any number of tensors."""
    parts = [tensors[i : i + _MOST_NUMBERED] for i in range(0, len(tensors), _MOST_NUMBERED)]
    found = tuple(extension.number_layouts(*(part if len(part) > 1 else (*part, *part))) for part in parts)
    if not all(found):
        raise ValueError("a layout without a number")
    return found


def fresh(device: torch.device, shape: Sequence[int], dtype: torch.dtype) -> Callable[[], torch.Tensor]:
    """Makes contiguous tensors of this shape, on ``device``, which is the current one whenever one is made."""
    # What Inductor's code calls: it has neither torch's parser of arguments nor its dispatcher.
    make = getattr(torch._C._dynamo.guards, f"_empty_strided_{device.type}", None)
    if make is None:
        return functools.partial(torch.empty, tuple(shape), dtype=dtype, device=device)
    return functools.partial(make, tuple(shape), torch.empty(shape, device="meta").stride(), dtype)


class Repeat:
    """Equal calls of one kind in one group.

    Parameters
    ----------
    device
        The calls' GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._index = device.index

    @classmethod
    def of(cls: type[R], call: PlainCall, *given: Any) -> R:
        """The group's repeat of such calls, made at the first one; ``given``: the arguments of this class."""
        repeats = call.state.repeats
        found: R | None = repeats.get(call.key)
        if found is None:
            if len(repeats) >= _MOST_REPEATS:
                repeats.clear()
            found = repeats[call.key] = cls(*given)
        return found

    def run(self, call: PlainCall) -> Any:
        """Issue the call; returns its result. None, with nothing issued, if it has to take the usual way."""
        check_device(self._index)  # first, because an expiry says more than a broken group
        if streams.current_device() != self._index or torch.cuda.is_current_stream_capturing():
            return None
        state = call.state
        with shutdown.call(), state.lock:
            # Another thread's call may have replaced the memory that this repeat has addresses of.
            is_known = state.repeats.get(call.key) is self
            made = self.issue(call) if is_known and not state.broken else None
            state.repeated += made is not None
            return made

    def issue(self, call: PlainCall) -> Any:
        """`run`, in the group's call."""
        raise NotImplementedError


class ProgramRepeat(Repeat):
    """Equal calls that a call queue issues, each by one native program.

    Parameters
    ----------
    queue
        The call queue, with the epoch of the last call.
    """

    def __init__(self, queue: CallQueue) -> None:
        super().__init__(queue.device)
        self._calls = queue
        #: By slot.
        self.programs: list[NativeProgram | None] = [None] * gather.SLOTS

    def keep(self, slot: int, count: int, parts: Sequence[Part | str]) -> None:
        """Keep the program of a slot, if it can be repeated.

        Parameters
        ----------
        count
            The number of values of an issue beside those of its sequences.
        parts
            Sequences, and launches with their patches; a name of the host's action cannot be repeated.
        """
        made = [part for part in parts if not isinstance(part, str)]
        if len(made) == len(parts):
            try:
                self.programs[slot] = NativeProgram(more(count).index, made)
            except ValueError as error:
                logger.debug("no repeat: %s", error)

    def issue(self, call: PlainCall) -> Any:
        """See `Repeat`."""
        slot = self._calls.next_slot
        program = self.programs[slot]
        return None if program is None else self.issue_by(program, call, slot)

    def issue_by(self, program: NativeProgram, call: PlainCall, slot: int) -> Any:
        """Issue the call by the slot's program."""
        raise NotImplementedError
