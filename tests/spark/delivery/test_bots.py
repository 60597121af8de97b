"""Bots from the log to their receivers: members only, their modes, and nothing before its session key."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.bots.views import BotViews, streams_in, telling
from evermark.delivery.model import (
    BotMode,
    BotSpec,
    Cursor,
    Fate,
    GroupWork,
    MadeBy,
    Outcome,
    SourcePartition,
    SubscriptionSpec,
)
from evermark.delivery.replay.plan import ReplayWork
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.delivery.run import post as posting
from evermark.delivery.run.follower import Follower
from evermark.delivery.run.key_requests import KeyAsker
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.run.parked_retries import ParkedQueue
from evermark.delivery.store.memory import MemoryDelivery
from evermark.delivery.webhook.signing import new_secret
from evermark.delivery.webhook.sink import WebhookSink
from evermark.delivery.work import Assignment, DeliveryOptions, Span, fold
from evermark.event import taken_batch
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.read import FileRange, LogReader
from evermark.log.write import BatchWriter
from evermark.secrets import KeyRef, SecretBox
from evermark.spark import parts
from evermark.spark.replay import SparkReplays
from evermark.testing.at_once import AtOnce
from evermark.testing.listener import Listener
from evermark.testing.states import owners

SECRET = new_secret()
PLACE = SourcePartition("chat", 0)
NOON = datetime(2026, 11, 15, 12, tzinfo=UTC)
Said = tuple[str, dict[str, Any]]  # a stream and a payload


def said(text: str, creator: str = "alice", **tags: Any) -> dict[str, Any]:
    return {"kind": "message", "creator": creator, "tags": tags, "payload": {"text": text}}


def join(user: str = "bot", kind: str = "join") -> dict[str, Any]:
    return {"kind": kind, "creator": "alice", "member": user}


class TaskDeliverer:
    """The task of a delivery job, without the job around it."""

    def __init__(self, box: SecretBox) -> None:
        self._box = box

    def deliver(self, assignments: list[Assignment], options: DeliveryOptions) -> list[Outcome]:
        mine = tuple(assignment for assignment in assignments if assignment.bot is None or assignment.bot.streams)
        post = parts.PostHere(posting.Posting(mine, self._box, options))
        rows = list(post(0)) if mine else []
        return fold(assignments, parts.results_of(assignments, rows))


class Chat:
    """A log, a store, and everything that delivers, over a real receiver."""

    def __init__(self, folder: Path, box: SecretBox, receiver: Listener) -> None:
        self.folder, self.box, self.receiver = folder / "chat", box, receiver
        leases = MemoryLeases(is_gone=lambda holder: True)
        self.epoch = owners(leases)(DELIVER_LEASE)
        self.now = NOON
        self.store = MemoryDelivery(leases, jitter=lambda: 0.0, clock=lambda: self.now)
        self.store.open_partition(PLACE, 0, self.epoch)
        self.reader, self.log = LogReader(self.folder), DeltaLog(self.folder)
        self.batch = 0
        self.bot_views = BotViews(self.store.bots, self.files, self.epoch)
        deliverer: Any = TaskDeliverer(box)
        self.live = LiveGroup(self.store, deliverer, self.epoch, lambda: self.now, bot_views=self.bot_views)
        self.follower = Follower(
            self.store, self, self.live, deliverer, self.epoch, lambda: self.now, bot_views=self.bot_views
        )
        self.sink = WebhookSink()
        log: Any = None
        runtime = AtOnce(lambda: self.now)
        self.queue = ParkedQueue(self.store, self.sink, box.open, self.epoch, runtime, log)

    def spec(self, name: str = "helper", **bot: Any) -> SubscriptionSpec:
        wish = BotSpec(**{"source": "chat", "user": "bot", **bot})
        secrets = (self.box.seal(SECRET),)
        return SubscriptionSpec(name, self.receiver.url, secrets, allow_networks=("127.0.0.0/8",), bot=wish)

    def files(self, _source: str) -> list[FileRange]:
        return self.reader.files_if_any()

    def heads(self) -> dict[SourcePartition, tuple[int, datetime]]:
        return {PLACE: (self.batch, NOON - timedelta(hours=1))}

    def take(self, *events: Said) -> Span:
        """One more batch in the log."""
        self.batch += 1
        columns: dict[str, object] = {
            "event_id": [f"{self.batch}-{n}" for n in range(len(events))],
            "position": [f"{self.batch:04}{n:04}" for n in range(len(events))],
            "stream": [stream for stream, _ in events],
            "key": [stream for stream, _ in events],
            "op": ["message"] * len(events),
            "event_time": [NOON + timedelta(seconds=self.batch, milliseconds=n) for n in range(len(events))],
            "payload": [json.dumps(payload) for _, payload in events],
        }
        file = BatchWriter(self.folder, "chat", 0, self.batch).write_all([taken_batch(columns, len(events))])
        assert file is not None
        self.log.commit(Append(0, self.batch, 1, "", "", (file,)))
        return Span(PLACE, Cursor(self.batch - 1), self.batch, (str(self.folder / file.path),), len(events), exact=True)

    def handled(self) -> list[Any]:
        """Texts of what came, in order; the kind of what has none."""
        events = [record.event for record in self.receiver.records if not record.duplicate]
        return [e.data["payload"]["text"] if "payload" in e.data else e.data.get("kind") for e in events]


@pytest.fixture
def receiver() -> Iterator[Listener]:
    with Listener(secrets=[SECRET]) as listener:
        yield listener


@pytest.fixture
def chat(tmp_path: Path, receiver: Listener) -> Chat:
    key = tmp_path / "key"
    key.write_text("a key for this test only")
    return Chat(tmp_path, SecretBox(KeyRef("file", str(key))), receiver)


def test_d3_d11_a_bot_gets_what_concerns_it_from_its_join_on(chat: Chat) -> None:
    """GIVEN a bot in the live group WHEN it joins within a batch THEN it gets what comes after, and not its own."""
    chat.store.register([chat.spec()], MadeBy.FILE, {}, chat.epoch)
    early = chat.take(("room", said("before")), ("room", join("carol")))
    joined = chat.take(
        ("room", said("just before")),
        ("room", join()),
        ("room", said("first")),
        ("elsewhere", said("not a member")),
        ("room", said("mine", creator="bot")),
        ("room", said("forecast", command={"app": "other", "name": "x"})),
    )
    left = chat.take(("room", said("second")), ("room", join(kind="leave")), ("room", said("after")))
    assert all(chat.live.hand_over(span) for span in (early, joined, left))
    assert chat.handled() == ["join", "first", "second", "leave"]
    assert chat.store.group().members == {"helper"}


def test_d3_a_bot_registered_late_learns_from_the_log(chat: Chat) -> None:
    """GIVEN joins long ago WHEN a bot is registered THEN it catches up with what it was a member of."""
    chat.take(("room", join()), ("room", said("one", mentions=["bot"])), ("room", said("two")))
    chat.take(("room", said("three", reply={"event": "x", "user": "bot"})), ("den", said("four", mentions=["bot"])))
    spec = chat.spec(mode=BotMode.MENTIONS_REPLIES_REACTIONS)
    chat.store.settle_group(GroupWork(PLACE, Cursor(0), Cursor(2), frozenset()), [], NOON, chat.epoch)
    chat.store.register([spec], MadeBy.FILE, {"helper": {PLACE: Cursor(0)}}, chat.epoch)
    chat.follower.catch_up(*chat.follower.due())
    assert chat.handled() == ["join", "one", "three"]


def test_d3_what_needs_a_key_waits_for_it_and_comes_in_order(chat: Chat) -> None:
    """GIVEN encrypted messages WHEN the key comes late THEN plain ones go at once, those of the session after it, in
    order, and newer ones never overtake them."""
    chat.store.register([chat.spec(device="phone")], MadeBy.FILE, {}, chat.epoch)
    secret = {"session": "s1"}
    chat.live.hand_over(chat.take(("room", join()), ("room", said("e1", **secret)), ("room", said("plain"))))
    chat.live.hand_over(chat.take(("room", said("e2", **secret)), ("den", join()), ("den", said("den"))))
    assert chat.handled() == ["join", "plain", "join", "den"]
    assert chat.queue.run() == 0
    chat.store.bots.publish("phone", {"s1": "sealed"}, chat.now, chat.epoch)
    chat.live.hand_over(chat.take(("room", said("e3", **secret))))
    assert chat.handled()[4:] == []
    assert chat.queue.run() == 3
    chat.live.hand_over(chat.take(("room", said("e4", **secret))))
    assert chat.handled()[4:] == ["e1", "e2", "e3", "e4"]
    assert chat.store.parked.rows() == []


def test_d3_a_missing_key_is_asked_for_by_a_signed_webhook(chat: Chat) -> None:
    """GIVEN an event that waits WHEN asked THEN the bot is told device, session, stream and since; once in 5 s."""
    chat.store.register([chat.spec(device="phone")], MadeBy.FILE, {}, chat.epoch)
    chat.live.hand_over(chat.take(("room", join()), ("room", said("e1", session="s1"))))
    asker = KeyAsker(chat.store.bots, chat.store.subscriptions, chat.sink, chat.box.open, chat.epoch, lambda: chat.now)
    asker.timer = lambda: 0.0  # or it rests after a look that took long here
    assert (asker.run(), asker.run()) == (1, 0)
    asked = chat.receiver.records[-1].event
    assert asked.type == "evermark.session_key.wanted"
    assert asked.data == {"device": "phone", "session": "s1", "stream": "room", "since": "2026-11-15T12:00:00.000000Z"}
    chat.now += timedelta(seconds=5)
    assert asker.run() == 1
    assert len({record.event.id for record in list(chat.receiver.records)[-2:]}) == 2


def test_a_replay_gives_a_bot_what_it_was_a_member_of(spark: SparkSession, chat: Chat) -> None:
    """GIVEN a past with comings and goings WHEN replayed in small steps, by Spark or the task THEN it passes over
    what the bot does not get, and the bot gets the same as it would have then."""
    span = chat.take(
        ("den", said("not mine")),
        ("room", said("before")),
        ("room", join()),
        ("room", said("in")),
        ("den", said("nor this")),
        ("room", join(kind="leave")),
        ("room", said("after")),
    )
    spec = chat.spec()
    view = chat.bot_views.view_of_all(spec, {PLACE: 1})
    until = NOON + timedelta(hours=1)
    for where in (None, "op = 'message'"):
        chat.receiver.records.clear()
        mark, steps, replays = Mark(NOON), 0, SparkReplays(spark.sparkContext, chat.box)
        while mark != TimeSlice(mark, until, span.paths, 7).end:
            steps += 1
            piece = TimeSlice(mark, until, span.paths, 7)
            work = ReplayWork(f"r{where}", piece, spec, (), where, None, 2, 10.0, False, 100, bot=view)
            done = replays.replay(work)
            assert done.outcome.fate is Fate.DONE and done.mark != mark
            mark = done.mark
        assert steps <= 5
        assert chat.handled() == ["join", "in", "leave"]


def test_what_tells_of_membership_is_found_however_it_is_written(chat: Chat) -> None:
    """GIVEN payloads with and without spaces, and a message about joining THEN joins and leaves are found."""
    columns: dict[str, object] = {
        "event_id": list("abcd"),
        "position": list("abcd"),
        "stream": ["room"] * 4,
        "op": ["message", "message", "message", "truncate"],
        "payload": ['{"kind":"join","member":"bot"}', '{ "kind" : "leave" }', '{"kind":"message"}', None],
    }
    file = BatchWriter(chat.folder, "chat", 0, 1).write_all([taken_batch(columns, 4)])
    assert file is not None
    path = str(chat.folder / file.path)
    assert [row["position"] for row in telling([path], 0, 0, 1)] == ["a", "b", "d"]
    assert telling([path], 0, 1, 2) == telling([path], 1, 0, 1) == []
    assert streams_in([path]) == {"room"}
