"""Reading a source, batch after batch: how far the next one goes, its pieces read and written, and the batch taken.

One piece is read where the loop stands. Several are read side by side, by tasks (`WritePieces`): reports of their files
come back, and only this loop commits them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from evermark.errors import EvermarkError, GapError
from evermark.ingest.gather import WHOLE_SOURCE, gather
from evermark.ingest.pieces import Piece, ReadFrom, error_fields, pieces_of, written
from evermark.ingest.take import Taken, Taker, take_each
from evermark.sources.base import Limit

# A source may let `latest` block this long: a loop that is told to end hears it after that time.
WAIT_S_MAX = 1.0

# A batch of this many rows, or more, is followed by one that tasks read; one of fewer than the other, by one read here.
_BESIDE_ROWS = 20_000
_HERE_ROWS = 2_000

WritePieces = Callable[[ReadFrom, Sequence[Piece]], list[dict[str, Any]]]


@dataclass(frozen=True)
class ReadPlan:
    """From where each partition is read on, the last batch that the log has of it, and up to where the log may hold
    events that are read again.
    """

    starts: Mapping[int, str]
    batches: Mapping[int, int]
    repeats_to: Mapping[int, str | None]


def reads_beside(pieces: int, rows_before: int | None, beside_before: bool) -> bool:
    """Whether the pieces of a batch are read side by side, by tasks. A job of Spark costs more than a few thousand rows
    do here, and how much there is to read is not known before it is read: so it is judged by the batch before.
    """
    if pieces < 2:
        return False
    return rows_before is None or rows_before >= (_HERE_ROWS if beside_before else _BESIDE_ROWS)


def written_here(of: ReadFrom, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    return [written(piece, of) for piece in pieces]


@dataclass
class SourceReading:
    """`run` returns when `is_over` says so, or something failed: the failures by partition."""

    of: ReadFrom
    limit: Limit
    write_beside: WritePieces = written_here
    _rows_before: int | None = None
    _beside: bool = False

    def run(
        self, plan: ReadPlan, taker: Taker, on_taken: Callable[[Taken], None], is_over: Callable[[], bool]
    ) -> Mapping[int, EvermarkError]:
        at, batches = dict(plan.starts), dict(plan.batches)
        limit = replace(self.limit, wait_s=min(self.limit.wait_s, WAIT_S_MAX))
        while not is_over():
            try:
                ends = self._ends(at, limit)
            except EvermarkError as error:
                return {WHOLE_SOURCE if error.partition is None else error.partition: error}
            if ends == at:
                continue
            rows = self._rows(plan, at, ends, batches)
            if is_over():  # what was written is left behind, and read again by the next owner
                return {}
            gathered = gather(rows, taker.epoch)
            failed = {**gathered.failed, **take_each(taker, gathered.taken, on_taken)}
            if failed:
                return failed
            self._rows_before = sum(taken.append.rows for taken in gathered.taken)
            for taken in gathered.taken:
                at[taken.partition] = taken.end
                batches[taken.partition] += bool(taken.append.files)
        return {}

    def _ends(self, at: Mapping[int, str], limit: Limit) -> dict[int, str]:
        try:
            found = self.of.source.latest(at, limit)
        except EvermarkError:
            raise
        except Exception as error:
            raise EvermarkError(error_fields(error)["message"]) from error
        for partition, start in at.items():
            if found.get(partition, start) < start:
                raise GapError(
                    f"source {self.of.name} went back in partition {partition}:"
                    f" {found[partition]} comes before {start}",
                    hint="the source is not the one we left; see `evermark source recover`",
                )
        return {partition: found.get(partition, start) for partition, start in at.items()}

    def _rows(
        self, plan: ReadPlan, at: Mapping[int, str], ends: Mapping[int, str], batches: Mapping[int, int]
    ) -> list[dict[str, Any]]:
        pieces: list[Piece] = []
        rows: list[dict[str, Any]] = []
        for partition, end in sorted(ends.items()):
            if end == at[partition]:
                continue
            batch, repeats_to = batches[partition] + 1, plan.repeats_to.get(partition)
            try:
                mine = pieces_of(self.of.source, partition, at[partition], end, batch, repeats_to)
            except Exception as error:  # noqa: BLE001 - one partition's failure is not the others'
                rows.append({"partition": partition, "error": error_fields(error)})
                continue
            pieces += mine
            if not mine:  # nothing to read there: reading goes on behind it
                at_end = {"partition": partition, "batch": batch, "start": at[partition], "end": end}
                rows.append({**at_end, "file": None})
        self._beside = reads_beside(len(pieces), self._rows_before, self._beside)
        write = self.write_beside if self._beside else written_here
        return [*rows, *write(self.of, pieces)]
