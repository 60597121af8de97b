"""What every `Source` promises. See `evermark.sources.base` for why.

class TestTickets(SourceContract):
    source = Tickets()

The source must hold events before the suite begins, at least two in one of its partitions, and nobody else may confirm
it meanwhile. Where a fresh one is wanted for each test, set `self.source` in a fixture with `autouse=True`.
"""

from __future__ import annotations

import pickle
import time
from itertools import pairwise
from typing import Any

import pyarrow as pa

from evermark.event import TAKEN
from evermark.event_file import as_batches
from evermark.sources.base import Limit, Slice, Source

_WAIT_S = 0.2
# A source may rest after an expensive look, and offers nothing meanwhile; but what it has, it offers in the end.
_REST_S_MAX = 60.0
_ALL = Limit(wait_s=_WAIT_S)
_LITTLE = Limit(rows_max=4, wait_s=_WAIT_S)
_AT_ONCE = Limit(wait_s=0.0)
_BATCHES_MAX = 10_000
_WAIT_GRACE_S = 5.0

Row = dict[str, Any]


class SourceContract:
    source: Source

    def test_partitions_are_stable(self) -> None:
        """The same ordering domains at every asking, also in another process."""
        first = list(self.source.partitions())
        assert first, "a source has at least one partition"
        assert len(set(first)) == len(first), f"partitions {first} name one twice"
        assert all(p >= 0 for p in first), f"partitions {first} must be numbers from 0 on"
        assert list(self.source.partitions()) == first
        assert list(_elsewhere(self.source).partitions()) == first

    def test_positions_are_text_of_one_width(self) -> None:
        """Plain string order is the order only while all positions of a partition have the same width."""
        for partition, ends in self._batches(_LITTLE).items():
            positions = [*ends, *(row["position"] for row in self._rows(partition, ends[0], ends[-1]))]
            assert all(isinstance(position, str) for position in positions)
            widths = {len(position) for position in positions}
            assert len(widths) == 1, f"positions of partition {partition} have widths {sorted(widths)}"

    def test_latest_goes_forward_and_answers_only_what_was_asked(self) -> None:
        """Never before `after`, never for a partition that was not asked for, and within its time."""
        assert dict(self.source.latest({}, _LITTLE)) == {}, "nothing asked, nothing answered"
        for partition, ends in self._batches(_LITTLE).items():
            assert ends == sorted(ends), f"latest went back in partition {partition}: {ends}"
            began = time.monotonic()
            answer = self.source.latest({partition: ends[-1]}, _LITTLE)
            assert time.monotonic() - began < _LITTLE.wait_s + _WAIT_GRACE_S, "latest waited longer than `wait_s`"
            assert set(answer) <= {partition}, f"latest answered for {sorted(answer)}, asked for {partition}"
            assert answer.get(partition, ends[-1]) >= ends[-1], f"latest went back in partition {partition}"

    def test_slices_cover_their_range_exactly(self) -> None:
        """Disjoint and complete: each begins where the one before it ended. An empty range has nothing to read."""
        for partition, start, end in self._whole():
            pieces = sorted(self.source.slices(partition, start, end), key=lambda piece: piece.start)
            assert pieces, f"[{start}, {end}) of partition {partition} has no slice"
            assert {piece.partition for piece in pieces} == {partition}
            cuts = [(piece.start, piece.end) for piece in pieces]
            assert cuts[0][0] == start and cuts[-1][1] == end, f"slices {cuts} do not cover [{start}, {end})"
            assert all(a[1] == b[0] for a, b in pairwise(cuts)), f"slices {cuts} overlap or leave gaps"
            assert pickle.loads(pickle.dumps(pieces)) == pieces, "a slice must survive pickling"
            for piece in self.source.slices(partition, end, end):
                assert not self._read(piece).num_rows, f"the empty range at {end} gave events"

    def test_reading_a_slice_again_gives_the_same(self) -> None:
        """However often and wherever: tasks are retried, and a crash reads everything after the checkpoint again."""
        for partition, start, end in self._whole():
            for piece in self.source.slices(partition, start, end):
                first = self._read(piece)
                assert first.equals(self._read(piece)), f"{piece} read twice gave different events"
                elsewhere = pa.Table.from_batches(as_batches(_elsewhere(self.source).read(piece)), TAKEN)
                assert first.equals(elsewhere), f"{piece} read in another process gave different events"

    def test_batches_have_the_columns_of_an_event(self) -> None:
        """What is read is `evermark.event.TAKEN`, and the columns that must not be null are not."""
        for partition, start, end in self._whole():
            for piece in self.source.slices(partition, start, end):
                for batch in as_batches(self.source.read(piece)):
                    assert batch.schema == TAKEN, f"columns {batch.schema.names}; make batches with taken_batch"
                    empty = [f.name for f in TAKEN if not f.nullable and batch.column(f.name).null_count]
                    assert not empty, f"columns {empty} hold nulls"

    def test_events_stand_in_their_slice_in_order(self) -> None:
        """Positions increase, from `start` on; an event at exactly `end` belongs to the next range."""
        for partition, start, end in self._whole():
            for piece in self.source.slices(partition, start, end):
                positions = self._read(piece)["position"].to_pylist()
                assert all(a < b for a, b in pairwise(positions)), f"{piece}: not increasing"
                outside = [p for p in positions if not piece.start <= p < piece.end]
                assert not outside, f"{piece} gave {outside[:3]}, which do not lie in it"

    def test_however_a_range_is_cut_it_holds_the_same_events(self) -> None:
        """Nothing is lost or doubled at the ends of batches, and an event keeps its id."""
        for partition, ends in self._batches(_LITTLE).items():
            whole = self._rows(partition, ends[0], ends[-1])
            ids = [row["event_id"] for row in whole]
            assert len(set(ids)) == len(ids), f"partition {partition} gave an event_id twice"
            parts: list[Row] = []
            for start, end in pairwise(ends):
                parts += self._rows(partition, start, end)
            assert parts == whole, f"partition {partition} cut at {ends[:10]} gave other events than whole"

    def test_repeats_begin_no_later_than_where_reading_begins(self) -> None:
        """What may come again stands at or before the position that reading goes on from."""
        for partition, ends in self._batches(_LITTLE).items():
            later = [end for end in ends if self.source.may_repeat_from(partition, end) > end]
            assert not later, "repeats begin after their reader"

    def test_a_source_that_is_where_we_left_it_is_accepted(self) -> None:
        """`check` has nothing to say at a first start, nor at one that goes on from the beginning."""
        self.source.check({})
        self.source.check({p: self.source.earliest(p) for p in self.source.partitions()})

    def test_beginning_anew_gives_the_same_events_and_loses_none(self) -> None:
        """A start at the beginning or in the middle, twice, also in another process: what follows is still to come."""
        for partition, ends in self._batches(_LITTLE).items():
            again = self._begun(partition, ends[0], ends[-1])
            self._begun(partition, again[min(1, len(again) - 1)], again[-1])

    def test_what_was_not_taken_is_seen_to_wait_and_nothing_else(self) -> None:
        """Asked where the log ends: at the beginning something waits, at the end nothing; looking takes nothing."""
        assert dict(self.source.untaken({})) == {}, "nothing asked, nothing answered"
        for partition, ends in self._batches(_LITTLE).items():
            waits = {p: self.source.untaken({partition: p}) for p in (ends[0], ends[-1])}
            assert dict(waits[ends[-1]]) == {}, f"partition {partition} was taken whole, and yet something waits"
            before = self._rows(partition, ends[0], ends[-1])
            if not before:
                continue
            found = waits[ends[0]].get(partition)
            assert found is not None, f"partition {partition} has events, and none is said to wait"
            assert found.upto > ends[0], f"partition {partition}: what waits does not go beyond where the log ends"
            assert found.oldest_s is None or found.oldest_s >= 0
            again = self._ends(partition, ends[0], _LITTLE)
            ids = [row["event_id"] for row in self._rows(partition, ends[0], again[-1])]
            assert ids == [row["event_id"] for row in before], "looking changed what there is to take"

    def _begun(self, partition: int, start: str, end: str) -> list[str]:
        """Begin at `start`, and require what was between it and `end`; the ends of the batches that follow now."""
        expected = [row["event_id"] for row in self._rows(partition, start, end)]
        for source in (self.source, self.source, _elsewhere(self.source)):
            source.begin(partition, start)
        ends = self._ends(partition, start, _LITTLE)
        found = [row["event_id"] for row in self._rows(partition, start, ends[-1])]
        assert found == expected, f"partition {partition} begun at {start} gave other events than before"
        return ends

    def test_confirming_may_be_repeated_and_hides_nothing_that_follows(self) -> None:
        """Late, twice, or with an older position: what comes after the confirmed end is still there, as it was."""
        for partition, ends in self._batches(_LITTLE).items():
            start, middle, end = ends[0], ends[min(1, len(ends) - 1)], ends[-1]
            after = self._rows(partition, middle, end)
            for position in (middle, middle, start, middle):
                self.source.confirm(partition, position)
            _elsewhere(self.source).confirm(partition, middle)
            assert self._rows(partition, middle, end) == after
            assert self.source.earliest(partition) <= middle, "confirming passed what was confirmed"

    def _batches(self, limit: Limit) -> dict[int, list[str]]:
        """Per partition its beginning and the ends of the batches that follow, up to where nothing is new."""
        found: dict[int, list[str]] = {}
        for partition in self.source.partitions():
            found[partition] = self._ends(partition, self.source.earliest(partition), limit)
        rows = {partition: len(self._rows(partition, ends[0], ends[-1])) for partition, ends in found.items()}
        assert max(rows.values(), default=0) > 1, f"put at least two events into a partition first; there are {rows}"
        return found

    def _ends(self, partition: int, start: str, limit: Limit) -> list[str]:
        ends = [start]
        for _ in range(_BATCHES_MAX):
            end = self._next(partition, ends[-1], limit)
            if end == ends[-1]:
                return ends
            ends.append(end)
        raise AssertionError(f"partition {partition} has no end after {_BATCHES_MAX} batches")

    def _next(self, partition: int, after: str, limit: Limit) -> str:
        """Where the next batch ends; `after` when there is none."""
        give_up_at = time.monotonic() + _REST_S_MAX
        while True:
            end = self.source.latest({partition: after}, limit).get(partition, after)
            if end != after:
                return end
            # Another process has not looked yet, so it has nothing to rest from: what it offers is there.
            if _elsewhere(self.source).latest({partition: after}, _AT_ONCE).get(partition, after) == after:
                return after
            assert time.monotonic() < give_up_at, (
                f"partition {partition} offers nothing after {after}, though in another process it does"
            )

    def _whole(self) -> list[tuple[int, str, str]]:
        """(partition, start, end) of all there is."""
        return [(p, ends[0], ends[-1]) for p, ends in self._batches(_ALL).items() if ends[0] != ends[-1]]

    def _rows(self, partition: int, start: str, end: str) -> list[Row]:
        pieces = self.source.slices(partition, start, end) if start != end else []
        return [row for piece in sorted(pieces, key=lambda p: p.start) for row in self._read(piece).to_pylist()]

    def _read(self, piece: Slice) -> pa.Table:
        return pa.Table.from_batches(as_batches(self.source.read(piece)), TAKEN)


def _elsewhere(source: Source) -> Source:
    """The source as another process has it."""
    copy = pickle.loads(pickle.dumps(source))
    assert isinstance(copy, Source), "pickling made something else of the source"
    return copy
