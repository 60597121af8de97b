"""Time slices: every event of a window in exactly one slice, whatever the files look like."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.replay.timeslice import (
    Mark,
    TimeSlice,
    exceeds,
    micros,
    moment_at,
    next_slice,
    readable,
    rows_between,
)
from evermark.log.read import FileRange

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)


@dataclass(frozen=True)
class Event:
    time: datetime
    id: str

    def after(self, mark: Mark) -> bool:
        """As the filter of a slice has it."""
        if self.time != mark.time:
            return self.time > mark.time
        return mark.event_id is None or self.id > mark.event_id


def at(us: int) -> datetime:
    return NOON + timedelta(microseconds=us)


def file(name: str, events: list[Event], *, known: bool = True) -> FileRange:
    """Statistics as they are written: to the millisecond, rounded outwards."""
    low = moment_at(micros(min(e.time for e in events)) // 1000 * 1000)
    high = moment_at(-(-micros(max(e.time for e in events)) // 1000) * 1000)
    return FileRange(
        name, 0, 0, 1, 1, len(events), 1, event_time_max=high if known else None, event_time_min=low if known else None
    )


def read(piece: TimeSlice, files: dict[str, list[Event]], limit: int) -> list[Event]:
    """What a task does: only the slice's files, filtered, in order, at most `limit`."""
    found = [e for path in piece.paths for e in files[path] if e.after(piece.mark) and e.time <= piece.to]
    return sorted(found, key=lambda e: (e.time, e.id))[:limit]


def replay(files: dict[str, list[Event]], unknown: set[str], since: int, until: int, rows: int) -> list[Event]:
    ranges = [file(name, events, known=name not in unknown) for name, events in files.items()]
    mark, seen = Mark(at(since)), []
    for _ in range(10_000):
        piece = next_slice(mark, at(until), ranges, rows)
        if piece is None:
            return seen
        assert piece.mark == mark
        assert piece.to <= at(until)
        found = read(piece, files, rows)
        seen += found
        full = len(found) == rows
        mark = Mark(found[-1].time, found[-1].id) if full else piece.end
    raise AssertionError("the slices do not end")


# Few instants and many ties, so that slices end inside one; wide gaps, so that some hold nothing.
instants = st.one_of(st.integers(0, 5), st.integers(0, 20_000), st.sampled_from([7_000, 7_000_000]))


@given(
    st.lists(st.lists(instants, min_size=1, max_size=30), max_size=6),
    st.sets(st.integers(0, 5)),
    instants,
    instants,
    st.integers(1, 12),
)
def test_every_event_of_a_window_comes_once_and_in_order(
    layout: list[list[int]], unknown: set[int], since: int, until: int, rows: int
) -> None:
    """GIVEN any files WHEN a window is read slice by slice THEN each event in it is seen once, by (time, id)."""
    files = {str(n): [Event(at(us), f"{n}-{i:03}") for i, us in enumerate(times)] for n, times in enumerate(layout)}
    seen = replay(files, {str(n) for n in unknown}, since, until, rows)
    wanted = [e for events in files.values() for e in events if at(since) <= e.time <= at(until)]
    assert seen == sorted(wanted, key=lambda e: (e.time, e.id))


def test_slices_hold_about_as_many_rows_as_asked_for() -> None:
    """GIVEN a million evenly spread rows WHEN they are cut THEN slices are alike, follow each other, and add up."""
    files = [
        FileRange(str(n), 0, 0, 1, 1, 10_000, 1, event_time_min=at(n * 10**6), event_time_max=at((n + 1) * 10**6 - 1))
        for n in range(100)
    ]
    end = at(100 * 10**6)
    cut: list[TimeSlice] = []
    piece = next_slice(Mark(NOON), end, files, 30_000)
    while piece is not None:
        cut.append(piece)
        piece = next_slice(piece.end, end, files, 30_000)
    assert [c.rows for c in cut[:-1]] == [30_000] * (len(cut) - 1)
    assert sum(c.rows for c in cut) == rows_between(NOON, end, files) == 1_000_000
    assert all(one.end == other.mark for one, other in pairwise(cut))
    assert max(len(c.paths) for c in cut) <= 4


def test_files_beyond_the_heads_are_left_out() -> None:
    """GIVEN a replay that started at some heads WHEN the log has grown THEN the newer files are not its own."""
    old, new = FileRange("old", 0, 0, 1, 9, 1, 1), FileRange("new", 0, 0, 10, 12, 1, 1)
    other = FileRange("other", 1, 2, 3, 3, 1, 1)
    assert readable([old, new, other], {0: 9}) == [old]
    assert readable([old, new, other], {0: 10, 2: 3}) == [old, new, other]
    piece = TimeSlice(Mark(NOON), NOON, ("old",), 1)
    assert not exceeds(piece, [old, new], {0: 9})
    assert exceeds(piece, [old, new], {0: 8})


def test_how_much_of_a_slice_is_done_is_never_more_than_all() -> None:
    """GIVEN a slice WHEN marks before, in and after it are judged THEN shares are between none and all."""
    piece = TimeSlice(Mark(at(0)), at(999), (), 100)
    assert [piece.share_before(m) for m in (Mark(at(0), "x"), Mark(at(500)), piece.end, Mark(at(5_000)))] == [
        0.0,
        0.5,
        1.0,
        1.0,
    ]
