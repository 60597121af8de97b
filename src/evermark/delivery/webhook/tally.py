"""The account of one job: which rows were accepted or parked, and the result of each (partition, batch)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from evermark.delivery.model import Fate, Outcome, ParkedEvent, SourcePartition
from evermark.delivery.webhook.base import Prefix
from evermark.delivery.work import Result

_PENDING, _ACCEPTED, _PARKED = 0, 1, 2


class Tally:
    def __init__(self, events: pa.Table | pa.RecordBatch) -> None:
        self._events = events
        self._rows = bytearray(events.num_rows)
        self._marks = np.frombuffer(self._rows, np.uint8)  # the same, for many at once
        self.accepted = 0
        self.parked: dict[int, ParkedEvent] = {}

    @property
    def complete(self) -> bool:
        return self.accepted + len(self.parked) == len(self._rows)

    def accept(self, rows: Sequence[int] | npt.NDArray[np.int64]) -> None:
        if isinstance(rows, np.ndarray):
            self._marks[rows] = _ACCEPTED
        else:
            for row in rows:
                self._rows[row] = _ACCEPTED
        self.accepted += len(rows)

    def park(self, row: int, event: ParkedEvent) -> None:
        self._rows[row] = _PARKED
        self.parked[row] = event

    def through(self, otherwise: Outcome) -> Prefix:
        """How many rows, from the first on, are accepted or parked. `otherwise`: the outcome of the rows after them."""
        rows = np.arange(len(self._rows))
        finished = self._finished(rows)
        return Prefix(finished, self._outcome(rows, finished, otherwise))

    def results(self, otherwise: Outcome) -> list[Result]:
        """One result per (partition, batch), in that order. `otherwise`: the outcome of batches not complete."""
        if len(self._rows) == 1:
            return [self._only_result(otherwise)]
        spans = self._spans()
        results: list[Result] = []
        for (source, partition), batches in groupby(sorted(spans), key=lambda where: where[:2]):
            # Nothing after an incomplete batch counts, even if all of it was accepted: a cursor cannot jump.
            broken = False
            for where in batches:
                rows = np.concatenate([np.arange(start, end) for start, end in spans[where]])
                finished = 0 if broken else self._finished(rows)
                broken = finished < len(rows)
                outcome = self._outcome(rows, finished, otherwise)
                through = self._events.column("position")[rows[finished - 1]].as_py() if finished else None
                results.append(Result(SourcePartition(source, partition), where[2], outcome, through))
        return results

    def _only_result(self, otherwise: Outcome) -> Result:
        """The same for one row: of thousands of subscriptions each may want one event."""
        source, partition, batch = (self._events.column(n)[0].as_py() for n in ("source", "partition", "batch"))
        place, parked = SourcePartition(source, partition), tuple(self.parked.values())
        if not self.complete:
            return Result(place, batch, otherwise)
        through = self._events.column("position")[0].as_py()
        return Result(place, batch, Outcome(otherwise.subscription, Fate.DONE, self.accepted, parked), through)

    def _spans(self) -> dict[tuple[str, int, int], list[tuple[int, int]]]:
        """The runs of rows of each (source, partition, batch)."""
        size = self._events.num_rows
        if size == 0:
            return {}
        changed = np.zeros(size, bool)
        for name in ("source", "partition", "batch") if size > 1 else ():
            column = self._events.column(name)
            whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
            codes = whole.dictionary_encode().indices.to_numpy() if name == "source" else whole.to_numpy()
            changed[1:] |= codes[1:] != codes[:-1]
        starts = [0, *np.flatnonzero(changed).tolist()]
        spans: dict[tuple[str, int, int], list[tuple[int, int]]] = {}
        for start, end in zip(starts, [*starts[1:], size], strict=True):
            source, partition, batch = (self._events.column(n)[start].as_py() for n in ("source", "partition", "batch"))
            spans.setdefault((source, partition, batch), []).append((start, end))
        return spans

    def _finished(self, rows: np.ndarray) -> int:
        """How many of these rows, from the first on, are accepted or parked."""
        pending = self._marks[rows] == _PENDING
        return int(pending.argmax()) if pending.any() else len(rows)

    def _outcome(self, rows: np.ndarray, finished: int, otherwise: Outcome) -> Outcome:
        accepted = int((self._marks[rows] == _ACCEPTED).sum())
        done = rows[:finished].tolist() if self.parked else ()
        parked = tuple(self.parked[row] for row in done if row in self.parked)
        if finished == len(rows):
            return Outcome(otherwise.subscription, Fate.DONE, accepted, parked)
        return replace(otherwise, accepted=accepted, parked=parked)
