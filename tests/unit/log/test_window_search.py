"""Where the events of a stretch of time are: found without Spark, compared with what a loop finds."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from hypothesis import given
from hypothesis import strategies as st

from evermark.event import EVENT
from evermark.log.row_reader import code_of
from evermark.log.window_search import Stretch, find, find_with_keys, in_order

ROWS = st.lists(st.tuples(st.integers(0, 3), st.text("ab", max_size=2)), max_size=6, unique=True)


@given(ROWS, st.booleans())
def test_rows_are_in_order_exactly_when_sorting_them_changes_nothing(rows: list[tuple[int, str]], done: bool) -> None:
    """GIVEN rows with ties in the first column WHEN asked whether they are in order THEN the second one decides."""
    rows = sorted(rows) if done else rows
    one = pa.chunked_array([[time for time, _ in rows]], pa.int64())
    other = pa.chunked_array([[name for _, name in rows]], pa.string())
    assert in_order(one, other) == (rows == sorted(rows))


def _ident(number: int) -> str:
    return f"e{number * 37 % 101:03}"  # in no order, and each another one


_OPS = ("insert", "update", "control")
_STREAMS = ("public.orders", "public.users")
_BEGIN = datetime(2026, 11, 15, tzinfo=UTC)
_BEGIN_US = int(_BEGIN.timestamp() * 1_000_000)
_EVENT = st.tuples(
    st.sampled_from([None, *range(9)]),
    st.sampled_from(_OPS),
    st.sampled_from(_STREAMS),
    st.integers(1, 4),
)
_STRETCHES = st.builds(
    Stretch,
    st.integers(0, 3).map(lambda us: _BEGIN_US + us),
    st.sampled_from([None, *map(_ident, range(8))]),
    st.integers(3, 40).map(lambda us: _BEGIN_US + us),
    st.sampled_from([frozenset({"insert", "update"}), frozenset({"update"})]),
    st.sampled_from([None, frozenset({"public.users"})]),
    st.sampled_from([None, {0: 3, 1: 9}]),
)


def _written(path: Path, first: int, events: list[tuple[int | None, str, str, int]]) -> str:
    rows: list[dict[str, Any]] = [
        {
            "event_id": _ident(first + n),
            "source": "shop",
            "partition": 0,
            "position": f"{first + n:09}",
            "batch": batch,
            "stream": stream,
            "op": op,
            "event_time": None if time is None else _BEGIN + timedelta(microseconds=time),
            "ingested_at": _BEGIN,
        }
        for n, (time, op, stream, batch) in enumerate(events)
    ]
    pq.write_table(pa.Table.from_pylist(rows, EVENT), path, row_group_size=4)
    return str(path)


def _by_hand(files: list[list[tuple[int | None, str, str, int]]], stretch: Stretch) -> list[tuple[int, int]]:
    found, number = [], 0
    for file, events in enumerate(files):
        for row, (us, op, stream, batch) in enumerate(events):
            ident, number = _ident(number), number + 1
            if us is None or not stretch.after_us <= (time := _BEGIN_US + us) <= stretch.to_us:
                continue
            if stretch.after_id is not None and time == stretch.after_us and ident <= stretch.after_id:
                continue
            known = stretch.heads is None or batch <= stretch.heads.get(0, 0)
            if op in stretch.ops and known and (stretch.streams is None or stream in stretch.streams):
                found.append((time, ident, file, row))
    return [(file, row) for _, _, file, row in sorted(found)]


@given(
    st.lists(st.lists(_EVENT, min_size=4, max_size=12), min_size=1, max_size=3),
    _STRETCHES,
    st.booleans(),
    st.one_of(st.none(), st.integers(0, 5)),
)
def test_exactly_the_events_of_a_stretch_are_found_by_time_and_id(
    files: list[list[tuple[int | None, str, str, int]]], stretch: Stretch, rising: bool, rows_max: int | None
) -> None:
    """GIVEN files in and out of order, with ties and without times WHEN a stretch is looked for THEN it is exact."""
    if rising:  # as most logs are: no two events have the same time, and ids need not be looked at
        number = iter(range(1_000))
        files = [[(next(number), *rest) for _, *rest in events] for events in files]
    with tempfile.TemporaryDirectory() as folder:
        firsts = [sum(map(len, files[:n])) for n in range(len(files))]
        paths = [_written(Path(folder) / f"{n}.parquet", first, files[n]) for n, first in enumerate(firsts)]
        codes, numbers = find(paths, stretch, rows_max)
        keyed = find_with_keys(paths, stretch, 1_000 if rows_max is None else rows_max)
    assert [keyed[name].to_pylist() for name in ("code", "number")] == [codes.tolist(), numbers.tolist()]
    names = [code_of(path) for path in paths]
    found = [(names.index(code), row) for code, row in zip(codes.tolist(), numbers.tolist(), strict=True)]
    assert found == _by_hand(files, stretch)[:rows_max]
