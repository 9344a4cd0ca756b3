"""Publishing on a GPU: a matmul that signals the chunks of its output, and the launches there that read them.

A reader must not take the SMs that the matmul still needs (invariant 10). So the matmul is issued first, and

- *tilestream's own words*: a reader's stream waits for the first chunk's signal. The matmul has begun then, and its
  schedule is dynamic, so one worker suffices to complete it. This wait needs no bound (invariant 5): the launch that
  writes the word has been issued and waits for nothing, and the words only grow. If several launches make the output,
  the reader's stream waits for the end of the last launch;
- *a caller's own words*: others may write them, and a stream that waits for a word that is cleared early would wait
  forever. So a reader's stream waits for the matmul's end. Each publication zeroes the words first, after all earlier
  uses and before all later ones, so that no reader takes a previous publication's signal for one of its own;
- *under capture*: the reader follows the matmul's end, and each replay zeroes the words first.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from tilestream.arrival.device_words import DeviceWords, Last
from tilestream.arrival.lanes import Lane, event_on
from tilestream.runtime.driver import capture_id, stream_wait


class PublishWords(NamedTuple):
    """The arguments of a launch that signals the chunks of its output."""

    #: signals, counts: ``int32[chunks]`` each.
    signals: torch.Tensor
    counts: torch.Tensor
    epoch: int  # the value of a signal


class _Published(NamedTuple):
    """The facts for readers of a matmul that signals the chunks of an epoch."""

    #: epoch, stream, end: its epoch and stream, and the event after its last launch.
    epoch: int
    stream: int
    end: torch.cuda.Event
    #: The address of the signal that shows that it has begun, and the least value of that signal; None if readers must
    #: wait for its end.
    first: tuple[int, int] | None = None
    graph: int = 0  # its capture; 0 for none


class Publishing(DeviceWords):
    """The part of `tilestream.arrival.device.DeviceSignals` for a matmul that signals, and for its readers."""

    #: Counts of the eager launches; made on first use.
    _counts: torch.Tensor | None = None
    #: The last matmul that was issued eagerly, and the last that was captured.
    _published: _Published | None = None
    _in_graph: _Published | None = None
    #: The stream of a matmul that is being issued.
    _underway: torch.cuda.Stream | None = None

    def __init__(
        self, count: int, device: torch.device, words: torch.Tensor | None = None, lane: Lane | None = None
    ) -> None:
        super().__init__(count, device, words, lane)
        self._captures: set[int] = set()  # the captures of launches that wait

    def publish(self) -> PublishWords:
        """The arguments of a launch on the current stream that signals this epoch; call `published` once it is issued.

        The launch follows those that wait for earlier epochs, since it may overwrite the rows that they read. A
        caller's own words may be published again without `advance`.

        Raises
        ------
        ValueError
            If a chunk of this epoch is already signalled; under capture: if the graph already publishes the chunks; or
            if a `tilestream.Stream` signals them.
        RuntimeError
            If a launch already waits for this epoch, because it may hold the SMs that the matmul needs; or if another
            thread is issuing a matmul that signals these chunks.
        """
        with self._bell:
            stream = torch.cuda.current_stream(self._device)
            self._settle(stream)
            self._check_unpublished(())
            if torch.cuda.is_current_stream_capturing():
                return self._publish_in_graph(capture_id(stream.cuda_stream))
            if self._underway is not None:
                raise RuntimeError(
                    "publish: another thread is issuing a matmul that signals these chunks; call one after the other, "
                    "with arrival.advance() between"
                )
            if self._theirs is None:
                self._check_unpublished([chunk for chunk, epoch in enumerate(self._issued) if epoch >= self.epoch])
            if self._users and not self._known():
                again = "" if self._theirs is None else (
                    "; where others have signalled what it reads, call arrival.advance() before this"
                )  # fmt: skip
                raise RuntimeError(
                    f"publish: a launch that waits for epoch {self.epoch} was issued before the matmul that signals "
                    f"it, and may hold the SMs that this one needs; issue them in the other order{again}"
                )
            if self._counts is None:
                with torch.inference_mode(False):
                    self._counts = torch.zeros(self.count, dtype=torch.int32, device=self._device)
            self._counts.record_stream(stream)
            if self._theirs is None:
                self._come_behind_all(stream)
            else:
                self._retire()
                self._wipe()
            self._underway = stream
            return self.eager_publication

    @property
    def eager_publication(self) -> PublishWords:
        """The arguments of an eager launch that signals the present epoch."""
        assert self._counts is not None
        if self._theirs is not None:
            return PublishWords(self._theirs, self._counts, 1)
        return PublishWords(self._eager, self._counts, self.epoch)

    def _known(self) -> bool:
        """Whether the matmul of this epoch was issued. If so, readers of a caller's own words follow it."""
        return self._published is not None and self._published.epoch == self.epoch

    def _publish_in_graph(self, graph: int) -> PublishWords:
        if self._in_graph is not None and self._in_graph.graph == graph:
            raise ValueError(
                "publish: a matmul of this graph signals these chunks already; give the second one an Arrival of its "
                "own"
            )
        if graph in self._captures:
            raise RuntimeError(
                "publish: a launch of this graph that waits for these chunks was captured before the matmul that "
                "signals them, and may hold the SMs that this one needs; capture them in the other order"
            )
        # Each captured launch has its own counts: a replay may run in parallel to an eager launch.
        counts = torch.zeros(self.count, dtype=torch.int32, device=self._device)
        self._keep(counts, self._store, self._flags)
        self._wipe()
        return PublishWords(self._flags, counts, 1)

    @property
    def by_matmul(self) -> bool:
        """Whether an eager matmul signals; its output may be in its stream's memory."""
        return self._published is not None

    def published(self, first: int | None) -> None:
        """Note that the launch, or the last of several, was issued, with nothing after it on this stream.

        Parameters
        ----------
        first
            The first chunk of a single launch with a dynamic schedule; None for other launches.
        """
        with self._bell:
            stream = torch.cuda.current_stream(self._device)
            found = _Published(self.epoch, stream.cuda_stream, event_on(stream))
            if torch.cuda.is_current_stream_capturing():
                self._in_graph = found._replace(graph=capture_id(stream.cuda_stream))
                return
            self._underway = None
            if self._theirs is None:
                self._signalled_by_launch(stream, found.end, self.epoch)
                if first is not None:
                    found = found._replace(first=(self._eager.data_ptr() + 4 * first, self.epoch))
            self._published = found

    def stopped(self) -> None:
        """Note that the issuing call has failed. Launches that it did issue still write a caller's own words."""
        stream, self._underway = self._underway, None
        if stream is not None and self._theirs is not None:
            self._published = _Published(self.epoch, stream.cuda_stream, event_on(stream))

    def _signal_ends(self, stream: torch.cuda.Stream) -> frozenset[Last]:
        """See `DeviceWords`; includes the matmul's end."""
        ends, found = super()._signal_ends(stream), self._published
        return ends if found is None else ends | {Last(found.stream, found.end)}

    def _come_behind_matmul(self, stream: torch.cuda.Stream) -> None:
        """Order ``stream``, before a launch that reads a published output, after the matmul's beginning or end.

        Raises
        ------
        RuntimeError
            If another thread is issuing the matmul.
        """
        if torch.cuda.is_current_stream_capturing():
            found = self._in_graph
            if found is None or found.graph != capture_id(stream.cuda_stream):
                return  # the matmul is not of this graph
        else:
            with self._bell:
                if self._underway is not None:
                    raise RuntimeError(
                        "arrival: another thread is issuing the matmul that signals these chunks, and this launch "
                        "might take the SMs that it needs; read when that call has returned"
                    )
                self._users[stream.cuda_stream] = stream
                found = self._published if self._known() else None
        if found is None or found.stream == stream.cuda_stream:
            return
        if found.first is None:
            stream.wait_event(found.end)
        else:
            stream_wait(stream.cuda_stream, *found.first)
