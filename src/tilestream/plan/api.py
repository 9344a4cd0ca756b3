"""`plan`: checks the caller's arguments and plans the problem that they describe."""

from __future__ import annotations

import operator
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

from tilestream.core.arguments import is_one_of, is_whole
from tilestream.core.chunks import Arriving
from tilestream.core.device import DeviceProperties, cpu_properties
from tilestream.core.gpu_specs import GPU_SPECS, named
from tilestream.core.order import TileOrder
from tilestream.core.schedule import Kind
from tilestream.plan import tma
from tilestream.plan.arrival_order import OrderName
from tilestream.plan.candidate import ONE_TILE, Asked, Refusal
from tilestream.plan.hooks import hooks
from tilestream.plan.limit import promising
from tilestream.plan.plan import Plan
from tilestream.plan.planner import plan_problem
from tilestream.plan.policy import cdna_tiles, hopper
from tilestream.plan.problem import FP8, ITEMSIZE, Problem, Scales, dtype_name, result_name, vector_of

#: What a caller may ask for as ``schedule=``.
SCHEDULES = ("auto", *get_args(Kind))
#: Torch's devices for which there is no backend.
OTHER_DEVICES = ("hpu", "ipu", "lazy", "maia", "meta", "mps", "mtia", "privateuseone", "vulkan", "xla", "xpu")
#: What a caller may ask for as ``scales=``.
SCALES: tuple[Scales, ...] = get_args(Scales)


def plan(
    m: int,
    n: int,
    k: int,
    *,
    batch: int = 1,
    dtype: object = "float32",
    b_dtype: object | None = None,
    out_dtype: object | None = None,
    scales: Scales = "none",
    use_fast_accum: bool = True,
    device: object = "cpu",
    workers: int | None = None,
    schedule: str = "auto",
    tile: tuple[int, int] | None = None,
    order: TileOrder | OrderName | None = None,
    queues: int | None = None,
    shares: int | None = None,
    arrival: Arriving | None = None,
    weight_arrival: Arriving | None = None,
    publish: Arriving | None = None,
    layout: str | None = None,
    backend: str | None = None,
    variant: str | None = None,
    stages: int | None = None,
    registers: tuple[int, int] | None = None,
    invariant: bool | None = None,
) -> Plan:
    """How ``[batch, m, k] @ [batch, k, n]`` would be run.

    Parameters
    ----------
    m, n, k, batch
        Extents, at least 0.
    dtype, b_dtype, out_dtype
        torch dtypes or their names. ``b_dtype``: B's, if it differs from A's; both then have 8 bits. Default of
        ``out_dtype``: the operands' dtype; bfloat16 for operands of 8 bits.
    scales
        What ``scale_a`` and ``scale_b`` of `tilestream.matmul` are. ``"tensor"``: one element each. ``"row"``: one a
        row of A and one a column of B. ``"none"``: not given.
    use_fast_accum
        As for `tilestream.matmul`.
    device
        ``"cpu"``, a GPU (``"cuda"``, ``"cuda:1"``, a ``torch.device``); or, for a plan without the device, its name
        (one of `tilestream.core.gpu_specs.GPU_SPECS`, as ``"h100"``, ``"b200"``, ``"mi300x"``) or its
        `DeviceProperties`.
    workers
        Number of workers. Default on a CPU: ``torch.get_num_threads()``, or the cores if torch has not been imported.
        Default on a GPU: the SMs of the current context (a green context has fewer than the device). At most what
        `tilestream.worker_limit` and TILESTREAM_WORKERS allow.
    schedule
        ``"static"``, ``"dynamic"``, ``"stream_k"``, or ``"auto"`` for the one the cost model favours.
    tile
        ``(rows, columns)`` of a tile; None: the cost model's choice.
    order
        Your own order of tiles, the same for each batch: a function ``(t, num_m, num_n) -> (pm, pn)``, or all tiles
        in order, as ids ``pm * num_n + pn`` or as pairs. Such a list needs ``tile``, which decides the number of tiles.
        Where an operand arrives also ``"arrival"``: items as their chunks arrive, the default of dynamic schedules;
        or ``"chunk_major"``: from the pivot on.
    queues, shares
        Force the number of queues (dynamic), and the number of shares that the last wave is cut into (stream_k).
    arrival, weight_arrival
        How A's rows, and B's columns (a weight's rows), arrive.
    publish
        The chunks of the result's rows that are signalled when they are complete: see `tilestream.matmul`. If no
        kernel signals them, each chunk has a launch of its own; the plan is that of the whole problem, and says why.
        Excludes operands that arrive, and schedules other than ``"auto"`` and ``"dynamic"``.
    layout
        Memory layout of A and B, in BLAS's letters: ``"n"`` is row-major, ``"t"`` the transpose of a row-major matrix.
        A linear layer with a weight ``[N, K]`` is ``"nt"``. The layout decides what a GPU can address if an extent is
        odd. Default: ``"nn"``; for 8 bits ``"nt"``, as tensor cores need it.
    backend
        GPUs: force ``"hopper"``, ``"cdna"`` or ``"portable"``. Default: on Hopper its own kernels where they support
        the problem, else the portable ones.
    variant, stages
        Hopper: force ``"cooperative"``, ``"triple"``, ``"ping_pong"``, ``"single"`` or ``"paired"``, and the depth of
        the ring.
        ``"paired"`` are two CTAs of a cluster, which no plan takes by itself: on an H100 they are slower. ``"triple"``
        are three consumers on tiles of 192 rows: on an H200 they gain nothing. CDNA:
        ``"direct"`` or ``"staged"``. The portable kernel on Hopper: ``"one_tile"``, programs that have a tile or a
        share of its K each, for small products.
    registers
        Hopper: force the registers of a thread of the load warp and of the math warps where there are two math loops:
        ``(40, 232)`` or ``(24, 240)``. The latter is for static and dynamic schedules whose ``queues`` are not forced,
        with nothing arriving.
    invariant
        Whether each row has the same bits whatever is computed beside it; None: as `tilestream.invariant` says.

    Raises
    ------
    ValueError, TypeError
        If an argument is out of range, or two exclude each other.
    NotImplementedError
        If there is no backend for the device, or the forced one does not support this problem. If ``invariant`` is
        True, and what is forced adds in another order.

    Examples
    --------
    >>> plan(2048, 2048, 2048, workers=2, schedule="dynamic", tile=(512, 512)).schedule.grid.tiles
    16
    """
    properties = device_properties(device)
    if isinstance(device, str) and named(device) is not None:
        device = properties
    m, n, k, batch = checked_extents({"m": m, "n": n, "k": k, "batch": batch}).values()
    for name, coming in (("arrival", arrival), ("weight_arrival", weight_arrival), ("publish", publish)):
        if coming is not None and not isinstance(coming, Arriving):
            raise TypeError(f"{name}={coming!r}; it must be a tilestream.Arrival, or None for what is there")
    name = dtype_name(dtype)
    other = name if b_dtype is None else dtype_name(b_dtype)
    layout = ("nt" if name in FP8 else "nn") if layout is None else layout
    if not is_one_of(layout, ("nn", "nt", "tn", "tt")):
        raise ValueError(
            f"layout={layout!r}; it must be 'nn', 'nt', 'tn' or 'tt': 't' for a transposed operand, A's first"
        )
    if not is_one_of(scales, SCALES):
        raise ValueError(f"scales={scales!r}; it must be one of {', '.join(SCALES)}")
    if not isinstance(use_fast_accum, bool):
        raise TypeError(f"use_fast_accum={use_fast_accum!r}; it must be True or False")
    default = None if isinstance(device, DeviceProperties) else default_workers(properties)
    asked = Asked(
        workers, schedule, tile, order, queues, shares, default, properties, backend, variant, stages, registers,
        promising(invariant),
    )  # fmt: skip
    arrives = arrival is not None or weight_arrival is not None
    asked = check_forced(asked, device, arrives)
    if publish is not None:
        check_publish("plan", schedule, arrives)
    on_cpu, rows, size = properties.backend == "cpu", tma.rows_of(m, n, k, layout), ITEMSIZE[name]
    no_tma = ("", "") if on_cpu else tma.refuse_each(m, n, k, layout, (name, other))
    result = result_name(name, None if out_dtype is None else dtype_name(out_dtype))
    by_tma = tma.store_major_of((m, n), (n, 1), m * n if batch > 1 else 0, ITEMSIZE[result]) is not None
    problem = Problem(
        m, n, k, batch, name, result,
        None if arrival is None else arrival.incoming(batch * m),
        None if weight_arrival is None else weight_arrival.incoming(n),
        tf32=name == "float32" and _uses_tf32(device, properties),
        aligned=on_cpu or all(row % 16 == 0 for row in rows),
        vectors=(1, 1) if on_cpu else (_vector_of(size, rows[0]), _vector_of(size, rows[1])),
        no_tma=no_tma[0] or no_tma[1], not_by_tma=tma.which(*no_tma),
        plain=on_cpu or (scales == "none" and by_tma), b_dtype=other if other != name else "", scales=scales,
        fast_accum=use_fast_accum or name not in FP8,
        publishes=None if publish is None else publish.published(batch * m),
        row_multiples=(128, 128) if on_cpu else (tma.row_multiple(rows[0] * size), tma.row_multiple(rows[1] * size)),
    )  # fmt: skip
    # An own order is not cached: the cache would keep alive what a function closes over, and take it for pure.
    cached = order is None or isinstance(order, str)
    make = plan_problem if cached else plan_problem.__wrapped__
    if publish is None:
        return make(problem, *asked)
    dynamic = asked._replace(schedule="dynamic") if schedule == "auto" and not on_cpu else asked
    try:
        return make(problem, *dynamic)
    except NotImplementedError as error:
        if not cached:
            raise
        whole = make(replace(problem, publishes=None), *asked)
        return replace(whole, refused=(*whole.refused, Refusal("one launch", f"{error}, each signalled behind it")))


def check_forced(asked: Asked, device: object, arrives: bool = False) -> Asked:
    """What the caller of `plan` asks, checked, with the backend that a forced variant, ring or split implies."""
    schedule, order, tile, backend = asked.schedule, asked.order, asked.tile, asked.backend
    variant, stages, registers, properties = asked.variant, asked.stages, asked.registers, asked.device
    assert properties is not None
    if not is_one_of(schedule, SCHEDULES):
        raise ValueError(f"schedule={schedule!r}; it must be one of {', '.join(SCHEDULES)}")
    if isinstance(order, str):
        if order not in get_args(OrderName):
            raise ValueError(f"order={order!r}; by name it is one of {', '.join(get_args(OrderName))}")
        if not arrives:
            raise ValueError(
                f"order={order!r}: nothing arrives; give arrival or weight_arrival, or your own order of tiles"
            )
    elif order is not None and not callable(order) and not isinstance(order, Sequence):
        raise TypeError(f"order={order!r}; it must be a function of a position, or a sequence of tiles")
    for name, value in (("workers", asked.workers), ("queues", asked.queues), ("shares", asked.shares)):
        if value is not None and (not is_whole(value) or value < 1):
            raise ValueError(f"{name}={value!r}; it must be a positive whole number, or None for the plan's choice")
    if tile is not None:
        if not isinstance(tile, tuple | list) or len(tile) != 2 or not all(is_whole(x) and x > 0 for x in tile):
            raise ValueError(f"tile={tile!r}; a tile has (rows, columns), both positive whole numbers")
        asked = asked._replace(tile=(operator.index(tile[0]), operator.index(tile[1])))
    if not is_one_of(backend, (None, "hopper", "cdna", "portable")):
        raise ValueError(f"backend={backend!r}; it must be 'hopper', 'cdna', 'portable', or None for the plan's choice")
    fast = "cdna" if properties.arch.startswith("gfx") else "hopper"
    variants = cdna_tiles.VARIANTS if fast == "cdna" else (*hopper.VARIANTS, ONE_TILE)
    if variant is not None and not is_one_of(variant, variants):
        raise ValueError(f"variant={variant!r}; it must be one of {', '.join(variants)}, or None for the plan's choice")
    if stages is not None and (not is_whole(stages) or stages < 2):
        raise ValueError(f"stages={stages!r}; a ring has two stages at least, or None for as many as fit")
    if properties.backend == "cpu":
        for name in ("backend", "variant", "stages", "registers"):
            if getattr(asked, name) is not None:
                raise ValueError(
                    f"{name}={getattr(asked, name)!r} with device={device!s}: it is for GPUs; leave it away"
                )
    if variant == ONE_TILE:
        for name in ("stages", "registers", "backend"):
            value = getattr(asked, name)
            if value not in (None, "portable"):
                raise ValueError(
                    f"{name}={value!r} with variant={ONE_TILE!r}: a portable kernel without it; leave it away"
                )
        return asked._replace(backend="portable")
    if backend == "portable" and (variant is not None or stages is not None):
        raise ValueError(
            f"variant={variant!r}, stages={stages!r} with backend='portable': only 'hopper' and 'cdna' have them; "
            "leave them away"
        )
    if registers is not None:
        if registers not in hopper.REGISTERS:
            raise ValueError(
                f"registers={registers!r}; it must be {' or '.join(map(str, hopper.REGISTERS))}, of a thread of the "
                "load warp and of the math warps, or None for the plan's choice"
            )
        if "hopper" not in (backend or fast):
            raise ValueError(f"registers={registers!r} with backend={backend or fast!r}: only 'hopper' splits them so")
    implied = backend is None and (variant is not None or stages is not None or registers is not None)
    return asked._replace(backend=fast) if implied else asked


def check_publish(op: str, schedule: str, arriving: bool) -> None:
    """Raise `ValueError` for what ``publish=`` excludes: operands that arrive, and schedules but auto and dynamic."""
    if arriving:
        raise ValueError(
            f"{op}: publish= with arrival=: after an expired deadline, NaN would be signalled as a result; leave "
            "publish= away, and signal after the call"
        )
    if schedule not in ("auto", "dynamic"):
        raise ValueError(
            f"{op}: schedule={schedule!r} with publish=; it must be 'auto' or 'dynamic': with these, one worker alone "
            "can finish while a reader of the result holds the other SMs"
        )


def default_workers(device: DeviceProperties) -> int | None:
    """The device's own number of workers, where it differs from its properties': torch's threads, on the CPU."""
    torch = sys.modules.get("torch")  # not imported only to count its threads
    return torch.get_num_threads() if torch is not None and device.backend == "cpu" else None


def _vector_of(size: int, row: int) -> int:
    """`vector_of` for rows of so many elements of ``size`` bytes."""
    return vector_of(size, lambda width: row % width == 0)


def _uses_tf32(device: object, properties: DeviceProperties) -> bool:
    on_nvidia = properties.arch.startswith("sm_") and not isinstance(device, DeviceProperties)
    return on_nvidia and hooks.allows_tf32()


def device_properties(device: object) -> DeviceProperties:
    """The properties of a device as `plan` takes it.

    Raises
    ------
    NotImplementedError
        If it is one of torch's for which there is no backend.
    ValueError
        If there is no such device.
    """
    if isinstance(device, DeviceProperties):
        return device
    kind, colon, index = str(device).partition(":")
    if kind == "cpu":
        return cpu_properties()
    if kind == "cuda":
        if colon and not index.isdecimal():
            raise ValueError(f"device={str(device)!r}; a GPU is 'cuda', or 'cuda:' and its number")
        return hooks.cuda_properties(int(index) if index else None)
    if (found := named(str(device))) is not None:
        return found
    if kind in OTHER_DEVICES:
        raise NotImplementedError(
            f"device={str(device)!r}: there are backends for the CPU and for CUDA and ROCm GPUs; use torch.matmul there"
        )
    raise ValueError(
        f"device={str(device)!r} is unknown: give 'cpu', 'cuda', 'cuda:1', a DeviceProperties, or, for "
        f"a plan without the GPU, one of {', '.join(GPU_SPECS)}"
    )


def checked_extents(extents: dict[str, int]) -> dict[str, int]:
    """Extents by name as Python's integers; `ValueError` if one is no whole number, or negative."""
    for name, extent in extents.items():
        if not is_whole(extent) or extent < 0:
            raise ValueError(f"{name}={extent!r}; an extent is a whole number, and not negative")
    return {name: operator.index(extent) for name, extent in extents.items()}
