"""The structs of attention, which the kernels' functions pass and the host packs.

The schedule and the gate are those of `tilestream.core.structs`; a gate's ``rows`` are rows of keys. All fields are
run-time values; `tilestream.kernels.attention_config` has the compile-time ones. A row is a query position of one query
head. A *head tile* is the ``PACK`` query heads of one K/V head that share a tile's rows.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Extents(NamedTuple):
    """The sequences, heads and window of a call."""

    #: starts, order: for packed queries the list of `tilestream.kernels.device.varlen`, int32 ``[sequences + 1]`` and
    #: ``[sequences]``; else None.
    starts: Any
    order: Any
    #: One more than the call's. The last has the rows of packed queries past the last sequence, which see no key.
    sequences: Any
    #: cu_seqlens_q, cu_seqlens_k: int32 ``[sequences]``: the first row of each packed sequence, and the end of the
    #: last; or None.
    cu_seqlens_q: Any
    cu_seqlens_k: Any
    seqlens_k: Any  # int32 ``[sequences - 1]``: keys of each sequence; or None
    #: tokens_q, tokens_k: rows of the packed tensors.
    tokens_q: Any
    tokens_k: Any
    #: seqlen_q, seqlen_k: query rows of a sequence that is not packed; the largest number of keys of a sequence.
    seqlen_q: Any
    seqlen_k: Any
    head_tiles: Any  # head tiles of a query block
    q_heads_per_kv: Any  # head tiles that share a K/V head
    shares: Any  # work items that a tile's keys are split into
    #: left, right: keys that a query sees before and behind its diagonal, where the configuration has such a side.
    left: Any
    right: Any
    #: batch_rows_k, batch_rows_v: rows of the tensor from one sequence to the next if copies count rows of the whole
    #: tensor; else 0.
    batch_rows_k: Any
    batch_rows_v: Any


class Tile(NamedTuple):
    """A tile of attention: consecutive query positions of a head tile, and the key blocks that they see."""

    #: pm, pn: its place in the grid of tiles.
    pm: Any
    pn: Any
    batch: Any  # sequence
    head: Any  # head tile; its first query head is ``head * PACK``
    share: Any  # the share of the tile's keys, if they are split
    first: Any  # first query position in the sequence
    #: queries, keys: rows of the sequence.
    queries: Any
    keys: Any
    #: origin_q, origin_k, origin_v: the sequence's first row in the tensor.
    origin_q: Any
    origin_k: Any
    origin_v: Any
    #: begin, plain_begin, plain_end, end: the three runs of key blocks of `tilestream.core.attention.key_blocks`.
    begin: Any
    plain_begin: Any
    plain_end: Any
    end: Any
    #: causal_offset_left, causal_offset_right: query position ``i`` sees keys ``[i + causal_offset_left, i +
    #: causal_offset_right)``. Either may be negative.
    causal_offset_left: Any
    causal_offset_right: Any


class Mask(NamedTuple):
    """Which of ``keys`` keys a tile's rows see."""

    position: Any  # query position of each row, ``[rows]``
    #: keys, causal_offset_left, causal_offset_right: as of `Tile`.
    keys: Any
    causal_offset_left: Any
    causal_offset_right: Any


class Softmax(NamedTuple):
    """Online softmax of a tile's rows."""

    row_max: Any  # subtracted from a row's scores before `scale` multiplies them, ``[rows]``
    row_sum: Any  # sum of a row's weights, ``[rows]``
    o: Any  # sum of weighted values, ``[rows, columns]``


class Scores(NamedTuple):
    """The factors of scores, for exponentials in base 2."""

    #: scale, softcap_scale: scores are multiplied by ``scale`` in the exponent. With a soft cap they first become
    #: ``tanh(softcap_scale * scores)``. ``scale`` is then ``softcap * log2 e``, and ``softcap_scale`` is the caller's
    #: scale over ``softcap``.
    scale: Any
    softcap_scale: Any
    sinks: Any  # ``[heads]`` of 16 or 32 bits, or None


class Rows(NamedTuple):
    """A tensor of sequences, rows and heads with contiguous columns: its pointer, or None, and strides."""

    at: Any
    batch: Any
    row: Any
    head: Any


class Scales(NamedTuple):
    """Scales of queries, keys and values, one a sequence and head: pointers or `Rows`, or None."""

    q: Any
    k: Any
    v: Any


class Keys(NamedTuple):
    """Keys and values of a tile's sequence and head, in global memory."""

    #: k, v: `Rows` from the sequence's first row on. For pages: from the first page on, with ``batch`` between pages.
    k: Any
    v: Any
    #: table, pages: int32: the sequence's page numbers, and the number of all pages.
    table: Any
    pages: Any
    #: low, high: the keys that some row of the tile sees. No others are read.
    low: Any
    high: Any


# The Hopper kernel ---------------------------------------------------------------------------------------------------


class Pages(NamedTuple):
    """Keys in pages."""

    #: table, stride: int32 ``[sequences, pages of a sequence]``, or None, and its stride between sequences.
    table: Any
    stride: Any


class Source(NamedTuple):
    """Queries, keys and values of the Hopper kernel, in global memory."""

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
    """Stages of queries, keys and values, and the barriers of the stages and of the consumers' turns."""

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
    """The item ring: slots and barriers; slots for a trace's places and for scales, or None; the trace's log."""

    slots: Any
    full: Any
    empty: Any
    places: Any
    scales: Any
    log: Any


class Output(NamedTuple):
    """A consumer's outputs: the output's tensor map and strips in shared memory, the log-sum-exp."""

    map: Any
    buffers: Any
    lse: Any


class Step(NamedTuple):
    """`Softmax`, and ``p``: the weights of the previous key block, from `pack_p`."""

    row_max: Any
    row_sum: Any
    o: Any
    p: Any


class RingPlace(NamedTuple):
    """A consumer's place in the ring of key blocks and in the order of turns."""

    stage: Any
    phase: Any
    turn: Any


class KeyLoads(NamedTuple):
    """Loads of keys, or of values: tensor map, stages in the shape of its boxes, barriers, rows of a page."""

    map: Any
    boxes: Any
    full: Any
    empty: Any
    page_rows: Any


class KeyRows(NamedTuple):
    """Rows of keys, or of values: their sequence, its first row in the tensor, its keys, the K/V head."""

    batch: Any
    origin: Any
    keys: Any
    head: Any


class LastValues(NamedTuple):
    """A tile's last block of values, which is loaded after the next tile is taken: a flag, its rows, its first key."""

    pending: Any
    rows: Any
    first: Any


class LoadPlace(NamedTuple):
    """The load loop's state: its `Place` in the rings of keys and of values, the prefetched ticket, its `Passed`."""

    k: Any
    v: Any
    asked: Any
    passed: Any


# The CDNA kernel -----------------------------------------------------------------------------------------------------


class KeyCopies(NamedTuple):
    """Copies of keys, or of values, to shared memory."""

    x: Any  # `Rows` of `Keys`
    #: i, columns, rest: the row that each lane copies, and its column in the part; the last part's column, if the copy
    #: goes through registers.
    i: Any
    columns: Any
    rest: Any
    stages: Any  # shared memory, one for each part


class Fetched(NamedTuple):
    """A key block in registers, its keys and values in parts; and the pages of the next block's rows."""

    k: Any
    v: Any
    k_page: Any
    v_page: Any
