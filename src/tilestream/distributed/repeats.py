"""Equal calls between ranks, prepared once and issued by one native call.

Most calls of a program repeat an earlier one with other addresses. The usual way of a call checks its arguments, looks
its decision up, and walks through the protocol of its op: some 400 steps of Python. `plain_call` finds by a few steps
whether a call repeats an earlier one: its key holds all that decides a call. A `Repeat` is what the earlier calls have
prepared: for each slot a `tilestream.launch.native_program.NativeProgram` with all operations and launches.

The first calls of a kind take the usual way, and prepare the slots that they use. So does each call that a repeat
cannot serve: with scales, a bias, an activation, gradients, or another dtype than float16 and bfloat16; under capture;
in a transform or a mode of torch; where a blocking launch (CUDA_LAUNCH_BLOCKING) needs the operations one by one; or
without the extension.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
from torch.compiler import is_compiling

from tilestream.core.protocols import gather
from tilestream.distributed.dispatch import on_trial
from tilestream.distributed.group_state import Group, GroupState, known_state
from tilestream.distributed.program import more
from tilestream.launch.cache import launch_cache
from tilestream.launch.native_program import NativeProgram, Part
from tilestream.ops import native
from tilestream.ops.inline import PLAIN, unseen
from tilestream.plan.limit import limit
from tilestream.runtime import shutdown
from tilestream.runtime.channel import check_device

if TYPE_CHECKING:
    from tilestream.distributed.call_queue import CallQueue

logger = logging.getLogger(__name__)

native.FILES.add(__file__)

#: The most right operands of a call.
_MOST_BS = 4
#: The most repeats of a group.
_MOST_REPEATS = 1024
_DTYPES = (torch.bfloat16, torch.float16)
_blocks = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") not in ("", "0")


R = TypeVar("R", bound="Repeat")
#: What a repeated gather gives: all ranks' rows where they are asked for, and the products.
Gathered = tuple[torch.Tensor | None, list[torch.Tensor]]


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
    """

    state: GroupState
    key: tuple[object, ...]
    a: torch.Tensor
    bs: tuple[torch.Tensor, ...]
    dim: int
    deadline: float | None

    def repeated(self) -> Any:
        """The result of a `Repeat`; None if there is none, or it cannot serve this call."""
        found: Repeat | None = self.state.repeats.get(self.key)
        return None if found is None else found.run(self)

    @property
    def seconds(self) -> float:
        """The deadline; by default the group's own timeout."""
        return self.state.timeout("cuda") if self.deadline is None else float(self.deadline)


def plain_call(
    op: str, group: Group, a: Any, b: Any, dim: Any, deadline: Any, *options: Any
) -> PlainCall | None:  # fmt: skip
    """A call that may repeat an earlier one; None for one that takes the usual way.

    Parameters
    ----------
    a, b, dim, deadline, options
        The caller's arguments, not checked: the call is equal to an earlier one that was checked, or it is Python's.
    """
    if is_compiling():
        return None
    extension = native.loaded()
    if extension is None or _blocks or type(a) not in PLAIN or not a.is_cuda or a.dtype not in _DTYPES:
        return None
    bs = (b,) if type(b) in PLAIN else tuple(b) if type(b) in (list, tuple) else ()
    if not 0 < len(bs) <= _MOST_BS:
        return None
    gradients = torch.is_grad_enabled()
    for x in bs:
        if type(x) not in PLAIN or (gradients and x.requires_grad):
            return None
    if (gradients and a.requires_grad) or not unseen() or native.is_watched():
        return None
    if type(dim) is not int:
        return None
    if deadline is not None and not (type(deadline) in (int, float) and 0 < deadline < math.inf):
        return None
    state = known_state(group)
    if state is None or on_trial() is not None:
        return None
    try:
        number = extension.number_layouts(a, *bs)
        key = op, number, launch_cache.generation, type(b) in PLAIN, dim, deadline is None, limit(), *options
        # Equal values of other types are other options: 1 is no bool.
        key += tuple(map(type, options))
        hash(key)
    except (TypeError, *native.REFUSALS):
        return None
    return PlainCall(state, key, a, bs, dim, deadline) if number else None


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
        if torch.cuda.current_device() != self._index or torch.cuda.is_current_stream_capturing():
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
