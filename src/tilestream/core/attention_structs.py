"""The parts of attention, by name: what the kernels' functions hand each other, and what the host packs.

The schedule and the gate are those of `tilestream.core.structs`; a gate's ``rows`` are those of keys. All are run-time
values; what is compiled in is `tilestream.kernels.attention_config`. A row is a query position of one
query head, a *head tile* the ``PACK`` query heads of one K/V head that share a tile's rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Extents(NamedTuple):
    """What tiles are cut from: sequences, heads and the window."""

    #: starts, order: packed queries: int32 ``[sequences + 1]`` and ``[sequences]``, the list of
    #: `tilestream.kernels.device.varlen`; else None.
    starts: Any
    order: Any
    #: One more than there are: the last is the rows of packed queries behind the last sequence, which see no key.
    sequences: Any
    #: cu_seqlens_q, cu_seqlens_k: int32 ``[sequences]``: first row of each packed sequence, and the row behind the
    #: last; or None.
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqlens_k: Any  # int32 ``[sequences - 1]``: keys of each sequence; or None
    #: tokens_q, tokens_k: rows of the packed tensors.
    tokens_q: Any
    tokens_k: Any
    #: seqlen_q, seqlen_k: rows of a sequence that is not packed; of keys, the most that a sequence has.
    seqlen_q: Any
    seqlen_k: Any
    head_tiles: Any  # head tiles of a query block
    q_heads_per_kv: Any  # head tiles that share a K/V head
    shares: Any  # items that a tile's keys are split into
    #: left, right: keys that a query sees before and behind its diagonal, where the configuration has such a side.
    left: Any
    right: Any
    #: batch_rows_k, batch_rows_v: rows of the tensor from one sequence to the next, where copies count rows of the
    #: whole tensor; else 0.
    batch_rows_k: Any
    batch_rows_v: Any


class Tile(NamedTuple):
    """A tile of attention: consecutive query positions of a head tile, and the key blocks that they see."""

    #: pm, pn: its place in the grid of tiles.
    pm: Any
    pn: Any
    batch: Any  # sequence
    head: Any  # head tile; its first query head is ``head * PACK``
    share: Any  # of the tile's keys, where they are split
    first: Any  # first query position, in the sequence
    #: queries, keys: rows of the sequence.
    queries: Any
    keys: Any
    #: origin_q, origin_k, origin_v: row of the tensor that the sequence begins at.
    origin_q: Any
    origin_k: Any
    origin_v: Any
    #: begin, plain_begin, plain_end, end: key blocks, in the three runs of `tilestream.core.attention.key_blocks`.
    begin: Any
    plain_begin: Any
    plain_end: Any
    end: Any
    #: causal_offset_left, causal_offset_right: query position ``i`` sees keys ``[i + causal_offset_left, i +
    #: causal_offset_right)``. Either may be negative.
    causal_offset_left: Any
    causal_offset_right: Any


class Mask(NamedTuple):
    """Which of ``keys`` keys the rows of a tile see."""

    position: Any  # query position of each row, ``[rows]``
    #: keys, causal_offset_left, causal_offset_right: as of `Tile`.
    keys: Any
    causal_offset_left: Any
    causal_offset_right: Any


class Softmax(NamedTuple):
    """Online softmax of a tile's rows."""

    row_max: Any  # what is subtracted of a row's scores before `scale` multiplies them, ``[rows]``
    row_sum: Any  # sum of its weights, ``[rows]``
    o: Any  # sum of weighted values, ``[rows, columns]``


class Scores(NamedTuple):
    """What scores become, in base 2."""

    #: scale, softcap_scale: scores are multiplied by ``scale`` in the exponent. With a cap that is ``softcap * log2
    #: e``, and before it they become ``tanh(softcap_scale * scores)``, of ``softcap_scale = scale / softcap``.
    scale: Any
    softcap_scale: Any
    sinks: Any  # float32 ``[heads]``, or None


class Rows(NamedTuple):
    """A tensor of sequences, rows and heads (their columns are contiguous): pointer, or None, and strides."""

    at: Any
    batch: Any
    row: Any
    head: Any


class Scales(NamedTuple):
    """Scales of queries, keys and values, one a sequence and head: pointers or `Rows`; each of them or None."""

    q: Any
    k: Any
    v: Any


class Keys(NamedTuple):
    """Keys and values of a tile's sequence and head, in global memory."""

    #: k, v: `Rows` from the sequence's first on; of pages, from the first page on, with ``batch`` from page to page.
    k: Any
    v: Any
    #: table, pages: int32: the sequence's pages, and how many there are in all.
    table: Any
    pages: Any
    #: low, high: keys that some row of the tile sees. No other is read.
    low: Any
    high: Any


# Of the Hopper kernel ------------------------------------------------------------------------------------------------


class Pages(NamedTuple):
    """Keys in pages."""

    #: table, stride: int32 ``[sequences, pages of one]``, or None, and from one sequence's pages to the next's.
    table: Any
    stride: Any


class Source(NamedTuple):
    """Where the Hopper kernel's queries, keys and values come from."""

    #: q_map, k_map, v_map: tensor maps.
    q_map: Any
    k_map: Any
    v_map: Any
    extents: Any
    pages: Any
    #: page_rows_k, page_rows_v: rows of the tensor from one page to the next.
    page_rows_k: Any
    page_rows_v: Any
    scales: Any
    lse: Any
    gate: Any


class QkvRing(NamedTuple):
    """Stages of queries, keys and values, their barriers, and those of the consumers' turns."""

    q: Any
    k: Any
    v: Any
    q_full: Any
    q_empty: Any
    k_full: Any
    k_empty: Any
    v_full: Any
    v_empty: Any
    order: Any


class TileRing(NamedTuple):
    """The item ring: slots and their barriers; slots for a trace's places and for scales, or None; the trace's log."""

    slots: Any
    full: Any
    empty: Any
    places: Any
    scales: Any
    log: Any


class Output(NamedTuple):
    """Where a consumer's rows go: the output's tensor map, its strips in shared memory, the log-sum-exp."""

    map: Any
    buffers: Any
    lse: Any


class Step(NamedTuple):
    """`Softmax` and ``p``, the weights of the key block before, as `pack_p` gives them."""

    row_max: Any
    row_sum: Any
    o: Any
    p: Any


class RingPlace(NamedTuple):
    """Where a consumer stands in the ring of key blocks, and in the order of turns."""

    stage: Any
    phase: Any
    turn: Any


class KeyLoads(NamedTuple):
    """How keys, or values, are loaded: tensor map, stages as its boxes, barriers, rows of a page."""

    map: Any
    boxes: Any
    full: Any
    empty: Any
    page_rows: Any


class KeyRows(NamedTuple):
    """Rows of keys, or of values: their sequence, the row of the tensor it begins at, its keys, the K/V head."""

    batch: Any
    origin: Any
    keys: Any
    head: Any


class LastValues(NamedTuple):
    """A tile's last block of values, loaded after the next tile is taken: whether there is one, its rows, its key."""

    pending: Any
    rows: Any
    first: Any


class LoadPlace(NamedTuple):
    """Where the load loop stands: its `Place` in the rings of keys and of values, a ticket asked for, its `Passed`."""

    k: Any
    v: Any
    asked: Any
    passed: Any


# Of the CDNA kernel --------------------------------------------------------------------------------------------------


class KeyCopies(NamedTuple):
    """How keys, or values, are copied to shared memory."""

    x: Any  # `Rows` of `Keys`
    #: i, columns, rest: row, and column of its part, of what each lane copies; the last part's column, where it goes
    #: through registers.
    i: Any
    columns: Any
    rest: Any
    stages: Any  # shared memory, a part each


class Fetched(NamedTuple):
    """A key block in registers, keys and values a part each; and what the page table says of the next one's rows."""

    k: Any
    v: Any
    k_page: Any
    v_page: Any
