"""Equal mixtures of experts whose rows kernels push, prepared once and issued by one native call. See `repeats`.

The usual way of such a call takes some twenty launches, each by Python. A `MixtureRepeat` learns them from a call: what
each of the host's actions launches, and on which stream. The next equal calls sort the choices, and issue the rest by a
`tilestream.launch.native_program.NativeProgram`.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_compiling

from tilestream.arrival.stream import open_streams
from tilestream.distributed import repeats
from tilestream.distributed.group_state import Group, GroupState, known_state
from tilestream.distributed.moe_experts import Experts, stacked
from tilestream.distributed.program import CALLING, EPOCH, Host, Program, more
from tilestream.distributed.repeats import Repeat
from tilestream.launch.cache import launch_cache
from tilestream.launch.choices import sort
from tilestream.launch.layout import Layout
from tilestream.launch.native_program import Launched, NativeProgram, Part, Patch, keeping
from tilestream.launch.observe import observe
from tilestream.ops import native
from tilestream.ops.inline import PLAIN, unseen
from tilestream.plan.limit import limit
from tilestream.runtime.sequence import Record, Slot, WaitEvent
from tilestream.runtime.sequence import Sequence as Operations
from tilestream.runtime.streams import current_stream

if TYPE_CHECKING:
    from tilestream.distributed.graph_calls import GraphQueue

logger = logging.getLogger(__name__)

native.FILES.add(__file__)

_DTYPES = (torch.bfloat16, torch.float16)
#: The stream that pushes: the second value of an issue, as of `graph_calls.GraphQueue.run`.
_SIDE = EPOCH
#: The values of an issue behind the streams.
_X, _ORDER, _STARTS, _PLACE, _WEIGHTS, _OUT, _W1, _W3, _W2, _HIDDEN, _UP = map(more, range(11))
_COMPUTED = 11
#: The alignment of what an issue allocates together, in bytes.
_ALIGNED = 256


class PlainMixture(NamedTuple):
    """A mixture of plain tensors.

    Attributes
    ----------
    key
        All that decides it: equal calls differ only in contents and addresses.
    choices
        Experts of each token.
    """

    state: GroupState
    key: tuple[object, ...]
    x: torch.Tensor
    weights: torch.Tensor
    choices: torch.Tensor
    w1: torch.Tensor
    w2: torch.Tensor
    w3: torch.Tensor

    def repeated(self) -> torch.Tensor | None:
        """The result of a repeat; None if there is none, or it cannot serve this call."""
        found: MixtureRepeat | None = self.state.repeats.get(self.key)
        return None if found is None else found.run(self)  # type: ignore[arg-type]


def plain_mixture(
    x: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, w3: torch.Tensor,
    group: Group, *options: Any, deadline: Any, most_tokens: Any,
) -> PlainMixture | None:  # fmt: skip
    """A call that may repeat an earlier one; None for one that takes the usual way. Its arguments are not checked."""
    if is_compiling() or type(most_tokens) is not int or open_streams:
        return None
    extension = native.loaded()
    if extension is None or repeats._blocks or type(x) not in PLAIN or not x.is_cuda or x.dtype not in _DTYPES:
        return None
    gradients = torch.is_grad_enabled()
    for one in (x, weights, choices, w1, w2, w3):
        if type(one) not in PLAIN or (gradients and one.requires_grad):
            return None
    if not unseen() or native.is_watched():
        return None
    if deadline is not None and not (type(deadline) in (int, float) and 0 < deadline < math.inf):
        return None
    state = known_state(group)
    if state is None:
        return None
    try:
        if not (x.is_contiguous() and weights.is_contiguous() and choices.is_contiguous()):
            return None
        numbers = extension.number_layouts(x, weights, choices, w1, w2), extension.number_layouts(w1, w3)
        seconds = state.timeout("cuda") if deadline is None else float(deadline)
        halves = w3.data_ptr() - w1.data_ptr() == w1.shape[-2] * w1.stride(-2) * w1.element_size()
        key = "moe", *numbers, halves, launch_cache.generation, limit(), most_tokens, seconds, *options
        hash(key)
    except (TypeError, IndexError, *native.REFUSALS):
        return None
    return PlainMixture(state, key, x, weights, choices, w1, w2, w3) if all(numbers) else None


class MixtureRepeat(Repeat):
    """Equal mixtures of one group.

    Parameters
    ----------
    queue
        What issues them.
    layout, e
        Of all of them; the experts' memory may be another in each.
    """

    def __init__(self, queue: GraphQueue, layout: Layout, e: Experts) -> None:
        super().__init__(queue.device)
        self._queue, self._layout, self._hidden = queue, layout, e.w1.shape[1]
        self._halves = e.activation == "silu" and stacked(e.w1, e.w3) is not None
        self._program: NativeProgram | None = None
        #: What the kernels of the program count with, and its signals.
        self._keep: object = None
        #: What each of the host's actions has launched: by the extension, and by Python; `multiply_rows` of the last.
        self._launched: dict[str, tuple[list[Launched], Sequence[Any]]] = {}
        self._multiplied: Sequence[Any] = ()

    def learn(self, program: Program, host: Host, run: Callable[[Program, Host], None], keep: object) -> None:
        """Issue a call by ``run``, and prepare its repeats if all of its launches can be repeated.

        ``keep``: has the memory that launches are given, and lives as long as the repeat.
        """
        self._launched.clear()
        try:
            run(program, {name: self._watched(name, action) for name, action in host.items()})
            try:
                self._program, self._keep = self._prepared(program), keep
            except (KeyError, ValueError) as error:
                logger.debug("no repeat: %s", error)
        finally:
            self._launched.clear()

    def multiply(self, gate: torch.Tensor, up: torch.Tensor, ends: torch.Tensor) -> None:
        """Launch `multiply_rows` between products, as `learn` has to see it."""
        from tilestream.launch.portable.experts import multiply_rows  # imports Triton

        with observe() as seen:
            multiply_rows(gate, up, ends)
        self._multiplied = seen.issued

    def _watched(self, name: str, action: Callable[[], object]) -> Callable[[], object]:
        def watched() -> None:
            if name.startswith("compute"):
                self._multiplied = ()
                with keeping() as products:
                    action()
                self._launched[name] = products, self._multiplied
            else:
                with observe() as seen:
                    action()
                self._launched[name] = [], seen.issued

        return watched

    def _prepared(self, program: Program) -> NativeProgram | None:
        """A program with what the host's actions have launched; None if Python has made a product."""
        ended, count = self._queue.ended.cuda_event, _COMPUTED + self._layout.world
        values = more(count).index
        parts: list[Part] = [Operations(values, [WaitEvent(CALLING, ended)])]
        for part in program:
            if not isinstance(part, str):
                parts.append(part)
                continue
            (products, issued), (stream, patches) = self._launched[part], self._patches(part)
            # Rows are multiplied between the last product and those before it.
            launches = [*products[:-1], *_of_python(issued), *products[-1:]]
            if len(launches) != len(patches) and (launches or part != "add"):  # without tokens nothing is added
                return None
            parts += [(one, given, stream) for one, given in zip(launches, patches, strict=False)]
        parts.append(Operations(values, [Record(CALLING, ended)]))
        return NativeProgram(values, parts)

    def _patches(self, action: str) -> tuple[Slot, list[list[Patch]]]:
        """The stream of an action, and the patches of each of its launches."""
        name, _, source = action.partition(" ")
        computed = more(_COMPUTED + int(source)) if source else _OUT
        if name == "push":
            return _SIDE, [[Patch("x", _X), Patch("order", _ORDER), Patch("starts", _STARTS)]]
        if name == "return":
            return _SIDE, [[Patch("results", computed)]]
        if name == "add":
            places = [Patch("weights", _WEIGHTS), Patch("place", _PLACE), Patch("starts", _STARTS), Patch("out", _OUT)]
            return CALLING, [places]
        if name != "compute":
            return CALLING, [[]]
        gate = [Patch("b", _W1), Patch("out", _HIDDEN)]
        down = [Patch("a", _HIDDEN), Patch("b", _W2), Patch("out", computed)]
        if self._halves:
            return CALLING, [gate, down]
        return CALLING, [
            gate, [Patch("b", _W3), Patch("out", _UP)], [Patch("gate", _HIDDEN), Patch("up", _UP)], down,
        ]  # fmt: skip

    def issue(self, call: PlainMixture) -> torch.Tensor | None:  # type: ignore[override]
        """See `Repeat`: the result."""
        program, queue, layout = self._program, self._queue, self._layout
        if program is None or queue.flags.aborted():
            return None
        x, device = call.x, self._queue.device
        chosen = sort(call.choices, layout.world * layout.experts)
        out = torch.empty_like(x)
        wide, narrow = (
            -(-layout.capacity * width * layout.itemsize // _ALIGNED) * _ALIGNED
            for width in (self._hidden, layout.width)
        )
        # Products of one source after another share the hidden rows; the side stream reads each one's results.
        memory = torch.empty(2 * wide + layout.world * narrow, dtype=torch.uint8, device=device)
        begin = memory.data_ptr()
        tensors = (x, *chosen[::2], chosen.place, call.weights, out, call.w1, call.w3, call.w2)
        computed = (begin + 2 * wide + source * narrow for source in range(layout.world))
        calling = current_stream(device)
        program.progress = None
        try:
            of_call = calling.cuda_stream, queue.side.cuda_stream, 0, 0, *(one.data_ptr() for one in tensors)
            if not program.issue(x.get_device(), *of_call, begin, begin + wide, *computed):
                return None
        except BaseException as error:
            if program.recover(error) < len(program):
                queue.give_up(error, calling)
            raise
        return out


def _of_python(issued: Sequence[Any]) -> list[Launched]:
    """The launches of kernels that Python has issued.

    Raises
    ------
    ValueError
        If only Triton can launch one of them.
    """
    if None in issued:
        raise ValueError("a launch that only Triton can make")
    return [Launched.of_kernel(one) for one in issued]
