"""Bundles made ahead: the same as those made while sending, once for all who want the same, and not kept for ever."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.model import SubscriptionSpec
from evermark.delivery.webhook import bundles as bundling
from evermark.delivery.webhook import ordering
from evermark.delivery.webhook.base import Job
from evermark.delivery.webhook.body import Rendering, Style, bundle_id, delivery_ids, render
from evermark.delivery.webhook.bundles import Bundle, BundleReader, Bundles, _all_differ, prepared
from evermark.delivery.webhook.ordering import key_numbers, keys_of
from evermark.event import taken_batch


def rows(count: int) -> pa.RecordBatch:
    now = datetime(2026, 11, 15, tzinfo=UTC)
    columns: dict[str, object] = {
        "event_id": [f"e{n}" for n in range(count)],
        "position": [f"{n:06}" for n in range(count)],
        "stream": ["s"] * count,
        "op": ["insert"] * count,
        "key": [str(n % 7) for n in range(count)],
        "event_time": [now] * count,
        "payload": [f'{{"n": {n}}}' for n in range(count)],
    }
    batch = taken_batch(columns, count)
    more = {"source": ["shop"] * count, "partition": [0] * count, "batch": [1] * count}
    return pa.RecordBatch.from_pydict({**{name: batch.column(name) for name in batch.schema.names}, **more})


def job(events: pa.RecordBatch, name: str, **settings: object) -> Job:
    return Job(SubscriptionSpec(name, "http://a.example", **{"bundle": 10, **settings}), events)  # type: ignore[arg-type]


def taken(reader: BundleReader | None) -> list[tuple[str, bytes]]:
    assert reader is not None
    bundles: list[Bundle] = []
    while reader.more:
        bundles += reader.next()
    return [(bundle.ident, b"".join(bundle.body)) for bundle in bundles]


def test_bundles_made_ahead_are_those_made_while_sending() -> None:
    """GIVEN jobs with the same rows WHEN prepared THEN each takes what it would have made alone, in that order."""
    events = rows(9_000)
    jobs = prepared([job(events, "a"), job(events, "b"), job(events, "c", bundle=3), job(events, "d", body="raw")])
    for one in jobs:
        assert taken(one.bundles) == taken(Bundles(one, Style(one.spec.body)).reader())


@pytest.mark.parametrize("replay_id", [None, "r1"])
@pytest.mark.parametrize("keys", ["few", "one each"])
def test_a_bundle_is_known_by_its_events_however_it_was_made(replay_id: str | None, keys: str) -> None:
    """GIVEN some rows of a batch WHEN bundles are made of them THEN their ids are those of the bundles sent again."""
    events = rows(400).slice(37, 300)
    if keys == "one each":  # then rows are taken as they lie
        events = events.set_column(events.schema.get_field_index("key"), "key", events.column("event_id"))
    one = replace(job(events, "a", concurrency=3), replay_id=replay_id)
    reader = Bundles(one, Style.STANDARD).reader()
    bundles = [bundle for _ in iter(lambda: reader.more, False) for bundle in reader.next()]
    ids = events.column("event_id").to_pylist()
    assert sum(len(bundle.rows) for bundle in bundles) == len(ids)
    assert [bundle.ident for bundle in bundles] == [
        bundle_id([ids[row] for row in bundle.rows], replay_id) for bundle in bundles
    ]


def test_who_wants_the_same_shares_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN jobs of which two want the same WHEN prepared THEN three kinds of bundles are made, not four."""
    made: list[str] = []

    def counted(one: Job, style: Style) -> bundling.Bundles:
        made.append(one.spec.name)
        return Bundles(one, style)

    monkeypatch.setattr(bundling, "Bundles", counted)
    events, others = rows(100), rows(100)
    jobs = [
        job(events, "a"),
        job(events, "b"),
        job(events, "c", bundle=3),
        job(others, "d"),
        job(events, "e", bundle=1),
    ]
    found = prepared(jobs)
    assert made == ["a", "c", "d"]
    assert [one.bundles is not None for one in found] == [True, True, True, True, False]


def test_what_everybody_has_taken_is_let_go() -> None:
    """GIVEN two that share WHEN both have taken a piece THEN it is held no longer; WHEN one is slow THEN it waits."""
    events = rows(9_000)
    bundles = Bundles(job(events, "a"), Style.STANDARD)
    one, other = bundles.reader(), bundles.reader()
    pieces = 0
    while one.more:
        one.next()
        pieces += 1
    assert len(bundles._made) == pieces > 1
    while other.more:
        other.next()
    assert not bundles._made


def test_large_rows_are_not_all_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN more rows than may be held twice WHEN prepared THEN the rest is made while it is sent."""
    some, more = rows(100), rows(100)
    monkeypatch.setattr(bundling, "PIECE_BYTES_MAX", int(1.5 * some.nbytes))
    first, second = prepared([job(some, "a"), job(more, "b")])
    assert first.bundles is not None and second.bundles is None


def test_a_bundle_comes_apart_into_its_events() -> None:
    """GIVEN bundles of a replay, and texts of odd sizes WHEN taken apart THEN each event is as it is alone."""
    events = rows(300)
    payloads = events.column("payload").to_pylist()
    payloads[41] = "é" * 50
    events = events.set_column(events.schema.get_field_index("payload"), "payload", pa.array(payloads, pa.string()))
    reader = Bundles(replace(job(events, "a"), replay_id="r1"), Style.STANDARD).reader()
    apart: dict[int, tuple[str, bytes]] = {}
    while reader.more:
        for bundle in reader.next():
            apart |= {row: (ident, body) for row, ident, body in bundle.parcels()}
    how = Rendering(Style.STANDARD, replay_id="r1")
    idents = delivery_ids(events.column("event_id").to_pylist(), "r1")
    assert [apart[n] for n in range(300)] == list(zip(idents, render(events, how), strict=True))


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.sampled_from("xyz"), st.sampled_from([None, "1", "2"])), max_size=40)
)
def test_numbers_tell_keys_apart(names: list[tuple[str, str, str | None]]) -> None:
    """GIVEN rows of some sources, streams and keys THEN two have one number iff they have one key of one stream."""
    columns = {
        name: pa.array([one[n] for one in names], pa.string()) for n, name in enumerate(("source", "stream", "key"))
    }
    numbers = key_numbers(pa.table(columns)).tolist()
    for n, one in enumerate(names):
        for m, other in enumerate(names):
            assert (numbers[n] == numbers[m]) == (n == m or (one == other and one[2] is not None))


@given(st.lists(st.integers(-50, 10**9) | st.integers(0, 30), max_size=30))
def test_whether_all_keys_differ(keys: list[int]) -> None:
    """GIVEN keys, near each other or far apart THEN they all differ iff no two are the same."""
    assert _all_differ(np.array(keys, np.int64)) == (len(set(keys)) == len(keys))


_MOVES = st.lists(
    st.tuples(st.sampled_from("xy"), st.sampled_from([None, *"12345"]), st.sampled_from([None, *"12345"]))
)


@given(_MOVES)
def test_keys_between_which_a_record_moved_share_a_line(moves: list[tuple[str, str | None, str | None]]) -> None:
    """GIVEN rows of which some changed a key THEN two are in one line iff a chain of common keys joins them."""
    columns = {name: [one[n] for one in moves] for n, name in enumerate(("stream", "key", "previous_key"))}
    table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
    table = table.append_column("source", pa.array(["shop"] * len(moves), pa.string()).dictionary_encode())
    keys = keys_of(table)
    of = [{(stream, key) for key in both if key is not None} for stream, *both in moves]
    joined = [set(mine) for mine in of]
    for _ in moves:
        joined = [set().union(mine, *(other for other in joined if other & mine)) for mine in joined]
    for n in range(len(moves)):
        for m in range(len(moves)):
            assert (keys.lines[n] == keys.lines[m]) == (n == m or bool(joined[n] & joined[m]))
            held = set(keys.held_by(n)) & set(keys.held_by(m))
            assert bool(held) == (n == m or bool(of[n] & of[m]))


_ROWS = st.lists(
    st.tuples(
        st.sampled_from("ab"),
        st.sampled_from("xy"),
        st.sampled_from([None, *"123"]),
        st.sampled_from(["insert"] * 4 + ["truncate"]),
    ),
    max_size=8,
)


@given(_ROWS)
def test_few_rows_have_the_lines_that_many_have(given_rows: list[tuple[str, str, str | None, str]]) -> None:
    """GIVEN a few rows, truncates among them, THEN looked at one by one they are held and ordered as by columns."""
    columns = {name: [row[n] for row in given_rows] for n, name in enumerate(("source", "stream", "key", "op"))}
    table = pa.table({name: pa.array(values, pa.string()) for name, values in columns.items()})
    few, many = ordering._of_few(table), ordering._by_column(table)
    for one, other in ((few.of, many.of), (few.lines, many.lines)):
        same = [[a == b for b in numbers.tolist()] for numbers in (one, other) for a in numbers.tolist()]
        assert same[: len(given_rows)] == same[len(given_rows) :]
