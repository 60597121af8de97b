"""A hot subscription and one replay, in parts by key on real tasks, to a real receiver."""

from __future__ import annotations

import os
import signal
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from evermark.delivery.decide import key_parts
from evermark.delivery.decide.key_parts import joined
from evermark.delivery.model import Cursor, Fate, ParkedEvent, SourcePartition, SubscriptionSpec
from evermark.delivery.replay.plan import ReplayWork
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.delivery.run.post import Posting
from evermark.delivery.work import Assignment, DeliveryOptions, KeyPart, Span
from evermark.event import taken_batch
from evermark.log.write import BatchWriter
from evermark.secrets import KeyRef, SecretBox
from evermark.testing.listener import Failing, Listener

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from evermark.spark.deliver import SparkDeliverer

NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
ROWS, KEYS, PARTS = 600, 80, 3
MOVES = "public.users"  # a stream in which a record changes its key


class Filled:
    """Two batches, a file each: every key has some events, in the order of positions and times."""

    def __init__(self, folder: Path) -> None:
        self.ids = [f"e{n:05}" for n in range(ROWS)]
        self.paths = tuple(self._batch(folder, number, ROWS // 2) for number in (1, 2))

    def _batch(self, folder: Path, number: int, rows: int) -> str:
        numbers = range((number - 1) * rows, number * rows)
        columns: dict[str, object] = {
            "event_id": [self.ids[n] for n in numbers],
            "position": [f"{n:06}" for n in numbers],
            "stream": [MOVES if n % 8 == 0 else "public.orders" for n in numbers],
            "key": [None if n % 10 == 9 else str(n % KEYS) for n in numbers],
            "previous_key": ["8" if n == 200 else None for n in numbers],
            "op": ["update"] * rows,
            "event_time": [NOON + timedelta(milliseconds=n) for n in numbers],
            "payload": ["{}"] * rows,
        }
        file = BatchWriter(folder, "shop", 0, number).write_all([taken_batch(columns, rows)])
        assert file is not None
        return str(folder / file.path)

    def assignment(self, url: str) -> Assignment:
        return Assignment(Span(SourcePartition("shop", 0), Cursor(0), 2, self.paths, ROWS, exact=True), self.spec(url))

    def replay(self, url: str) -> ReplayWork:
        whole = TimeSlice(Mark(NOON), NOON + timedelta(hours=1), self.paths, ROWS)
        return ReplayWork("abcdefghijkl", whole, self.spec(url), (), None, {0: 2}, 10_000, 30.0, False, 100)

    def spec(self, url: str) -> SubscriptionSpec:
        return SubscriptionSpec("hot", url, concurrency=12, ordered=True, allow_networks=("127.0.0.0/8",))


@pytest.fixture
def filled(tmp_path: Path) -> Filled:
    return Filled(tmp_path)


Made = Callable[..., "SparkDeliverer"]


@pytest.fixture
def made(spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """A deliverer that has three slots, as on a cluster, though its tasks run here. Its first job uses all of them."""
    from evermark.spark import deliver, replay
    from evermark.spark.job import run_tasks
    from evermark.spark.parts import Slots

    monkeypatch.setattr(key_parts, "PART_ROWS_MIN", 100)
    monkeypatch.setattr(Slots, "tasks", lambda _: nullcontext(PARTS))
    key = tmp_path / "key"
    key.write_text("a key for tests, long enough")
    key.chmod(0o600)

    counts: list[int] = []

    def spied(context: object, count: int, *more: object) -> object:
        counts.append(count)
        assert counts[0] == PARTS
        return run_tasks(context, count, *more)  # type: ignore[arg-type]

    for module in (deliver, replay):
        monkeypatch.setattr(module, "run_tasks", spied)
    return lambda share_rates=nullcontext: deliver.SparkDeliverer(
        spark.sparkContext, SecretBox(KeyRef("file", str(key))), share_rates
    )


def in_order_by_key(listener: Listener) -> None:
    """First deliveries of a key came in the order of the log; also where a record went from one key to another."""
    seen: dict[tuple[str, str], list[str]] = defaultdict(list)
    for event in (record.event for record in listener.records if not record.duplicate):
        if event.key is not None:
            seen[event.stream, "8" if (event.stream, event.key) == (MOVES, "40") else event.key].append(event.position)
    assert len(seen[MOVES, "8"]) == 15
    assert all(positions == sorted(positions) for positions in seen.values())


def test_d1_a_hot_subscription_in_parts_gets_each_event_once_in_the_order_of_its_key(
    filled: Filled, made: Made
) -> None:
    """GIVEN three slots WHEN one subscription has many events THEN three tasks post them, each event once, by key."""
    with Listener() as listener:
        (found,) = made().deliver([filled.assignment(listener.url)], DeliveryOptions(budget_s=60, historical=True))
        assert (found.fate, found.reached, found.accepted) == (Fate.DONE, Cursor(2), ROWS)
        assert sorted(record.event.id for record in listener.records) == filled.ids
        in_order_by_key(listener)


def test_one_replay_in_parts_sends_each_event_once_in_the_order_of_its_key(filled: Filled, made: Made) -> None:
    """GIVEN three slots WHEN a slice is replayed THEN three tasks post it, and the mark is behind all of it; with
    fewer rows allowed, behind the last that was looked for.
    """
    with Listener() as listener:
        whole = made().replay(filled.replay(listener.url))
        assert (whole.outcome.fate, whole.outcome.accepted) == (Fate.DONE, ROWS)
        assert whole.mark == filled.replay(listener.url).slice.end
        assert sorted(record.event.id for record in listener.records) == filled.ids
        in_order_by_key(listener)
    with Listener() as listener:
        some = made().replay(replace(filled.replay(listener.url), rows_max=500))
        assert some.mark == Mark(NOON + timedelta(milliseconds=499), filled.ids[499])
        assert sorted(record.event.id for record in listener.records) == filled.ids[:500]


def test_d1_parts_of_a_turn_that_takes_fewer_events_all_end_at_the_same_place(filled: Filled) -> None:
    """GIVEN a turn of 450 events WHEN each part is posted THEN together these came, and the cursor is behind the last;
    also for a part that has none of them.
    """
    box = SecretBox(KeyRef("env", "NOT_NEEDED"))
    with Listener() as listener:
        whole = filled.assignment(listener.url)
        whole = replace(whole, spec=replace(whole.spec, streams=("public.orders",)))
        for rows in (450, 1):
            listener.records.clear()
            parts = [replace(whole, part=KeyPart(n, PARTS, rows)) for n in range(PARTS)]
            options = DeliveryOptions(budget_s=60, historical=True)
            told = [list(chain.from_iterable(Posting((one,), box, options).results())) for one in parts]
            found = joined(whole, told)
            wanted = [n for n in range(ROWS) if n % 8][:rows]
            assert sorted(record.event.id for record in listener.records) == [filled.ids[n] for n in wanted]
            at = Cursor((wanted[-1]) // (ROWS // 2), f"{wanted[-1]:06}")
            assert (found.fate, found.reached, found.accepted) == (Fate.UNFINISHED, at, rows)


def killed_once(folder: Path, at: int) -> Callable[[], AbstractContextManager[None]]:
    """For one task of all, and its first try alone: its process is killed when so many of its requests were taken."""
    mark = str(folder / "killed")

    @contextmanager
    def sharing() -> Iterator[None]:
        from evermark import failpoint

        try:
            os.close(os.open(mark, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            yield
            return
        taken = [0]

        def hit(_name: str) -> None:
            taken[0] += 1
            if taken[0] == at:
                os.kill(os.getpid(), signal.SIGKILL)

        failpoint.hit = hit
        yield

    return sharing


def test_d1_a_part_that_is_killed_halfway_is_posted_again_and_nothing_is_lost(
    filled: Filled, made: Made, tmp_path: Path
) -> None:
    """GIVEN three parts WHEN the task of one is killed THEN all events come, some of its part twice under one id."""
    for number, work in enumerate(("deliver", "replay")):
        folder = tmp_path / work
        folder.mkdir()
        with Listener() as listener:
            deliverer = made(killed_once(folder, 40))
            if number == 0:
                options = DeliveryOptions(budget_s=60, historical=True)
                (outcome,) = deliverer.deliver([filled.assignment(listener.url)], options)
                assert outcome.reached == Cursor(2)
            else:
                outcome = deliverer.replay(filled.replay(listener.url)).outcome
            assert (folder / "killed").exists()
            assert outcome.fate is Fate.DONE
            ids = [record.event.id for record in listener.records]
            assert set(ids) == set(filled.ids)
            assert 40 <= sum(record.duplicate for record in listener.records) < 100


def test_d1_what_parts_leave_comes_with_the_next_turns_and_refused_events_are_parked_once(
    filled: Filled, made: Made
) -> None:
    """GIVEN a receiver that refuses some events, and turns that end too early WHEN they go on from the cursor THEN each
    event was taken or is parked, once, and none of a key was taken behind a parked one.
    """
    with Listener(failing=Failing.parse("422:5"), slow_s=0.02) as listener:
        assignment, deliverer, turns = filled.assignment(listener.url), made(), 0
        parked: list[ParkedEvent] = []
        while assignment.span.begun < Cursor(2):
            turns += 1
            held = {"hot": Counter(key for one in parked for key in one.held_keys)}
            options = DeliveryOptions(budget_s=0.3, historical=True, held=held)
            (found,) = deliverer.deliver([assignment], options)
            parked += found.parked
            assert found.reached is not None and found.reached >= assignment.span.begun
            assignment = replace(assignment, span=replace(assignment.span, begun=found.reached))
        assert turns > 1 and len(parked) >= 5
        ids = [one.event_id for one in parked]
        taken = {record.event.id for record in listener.records}
        assert len(ids) == len(set(ids)) and taken.isdisjoint(ids)
        assert taken | set(ids) == set(filled.ids)
        first = {key: one.position for one in reversed(parked) for key in one.held_keys}
        for event in (record.event for record in listener.records):
            held_at = first.get((SourcePartition("shop", 0), event.stream, event.key or ""), "~")
            assert event.position < held_at
