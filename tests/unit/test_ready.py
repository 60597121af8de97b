"""Bundles made ahead: the same as those made while sending, once for all who want the same, and not kept for ever."""

from __future__ import annotations

from datetime import UTC, datetime

import pyarrow as pa
import pytest

from evermark.delivery.base import SubscriptionSpec
from evermark.delivery.body import Style
from evermark.delivery.sinks import ready
from evermark.delivery.sinks.base import Job
from evermark.delivery.sinks.packs import Pack, Packer
from evermark.delivery.sinks.ready import packs_of, prepared
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


def taken(packer: Packer | None) -> list[tuple[str, bytes]]:
    assert packer is not None
    packs: list[Pack] = []
    while packer.more:
        packs += packer.pack()
    return [(pack.ident, b"".join(pack.body)) for pack in packs]


def test_bundles_made_ahead_are_those_made_while_sending() -> None:
    """GIVEN jobs with the same rows WHEN prepared THEN each takes what it would have made alone, in that order."""
    events = rows(9_000)
    jobs = prepared([job(events, "a"), job(events, "b"), job(events, "c", bundle=3), job(events, "d", body="raw")])
    for one in jobs:
        assert taken(one.packer) == taken(packs_of(one, Style(one.spec.body)).taker())


def test_who_wants_the_same_shares_and_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN jobs of which two want the same WHEN prepared THEN three kinds of bundles are made, not four."""
    made: list[str] = []

    def counted(one: Job, style: Style) -> ready.Packs:
        made.append(one.spec.name)
        return packs_of(one, style)

    monkeypatch.setattr(ready, "packs_of", counted)
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
    assert [one.packer is not None for one in found] == [True, True, True, True, False]


def test_what_everybody_has_taken_is_let_go() -> None:
    """GIVEN two that share WHEN both have taken a piece THEN it is held no longer; WHEN one is slow THEN it waits."""
    events = rows(9_000)
    packs = packs_of(job(events, "a"), Style.STANDARD)
    one, other = packs.taker(), packs.taker()
    pieces = 0
    while one.more:
        one.pack()
        pieces += 1
    assert len(packs._made) == pieces > 1
    while other.more:
        other.pack()
    assert not packs._made


def test_large_rows_are_not_all_made_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN more rows than may be held twice WHEN prepared THEN the rest is made while it is sent."""
    some, more = rows(100), rows(100)
    monkeypatch.setattr(ready, "PIECE_BYTES_MAX", int(1.5 * some.nbytes))
    first, second = prepared([job(some, "a"), job(more, "b")])
    assert first.packer is not None and second.packer is None
