"""Events that the server sends: the same as those it is asked for, confirmed late, and given up at any doubt."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any, Self, cast

import pytest

from evermark.errors import EvermarkError, GapError
from evermark.sources.base import Feed
from evermark.sources.postgres.lsn import Position, lsn_of
from evermark.sources.postgres.read import feed as feed_module
from evermark.sources.postgres.read.feed import SlotFeed
from evermark.testing.servers import PostgresServer
from evermark.testing.until import until
from tests.contract.postgres.outbox_scene import Row, Scene, emit, scene


@pytest.fixture
def at(pg_server: PostgresServer) -> Iterator[Scene]:
    with scene(pg_server) as found:
        yield found


class Followed:
    """The feed of a scene's slot, and all that it has sent."""

    def __init__(self, at: Scene, start: str | None = None) -> None:
        self.start = start or at.source.earliest(0)
        self.news = threading.Event()
        self.feed: Feed = at.source.follow(0, self.start, self.news.set)
        self.rows: list[Row] = []
        self.ends: list[str] = []

    def take(self) -> bool:
        """One batch, if there is one."""
        fed = self.feed.next()
        if fed is None:
            return False
        self.rows += [row for batch in fed.batches() for row in batch.to_pylist()]
        self.ends.append(fed.end())
        return True

    def take_until(self, count: int) -> None:
        until(lambda: self.take() and len(self.rows) >= count, f"{count} rows are sent", timeout_s=30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.feed.close()


def confirmed_lsn(at: Scene) -> int:
    text = at.db.execute(
        "select confirmed_flush_lsn::text from pg_replication_slots where slot_name = %s", (at.target.slot,)
    ).fetchone()
    assert text is not None
    return lsn_of(text[0])


def sender(at: Scene) -> Any:
    """The server's process that sends."""
    return at.value("select active_pid from pg_replication_slots where slot_name = %s", at.target.slot)


def test_what_is_sent_is_what_is_read_by_asking(at: Scene) -> None:
    """Ids, positions and contents: over rolled back savepoints, empty and large transactions, and several in flight."""
    start = at.source.earliest(0)
    with at.connection() as one, at.connection() as other:
        for n in range(3):
            emit(one, "s", f"one-{n}", '{"text": "grüß dich 🙂"}')
            emit(other, "s", f"other-{n}")
        one.execute("savepoint here")
        emit(one, "s", "undone")
        one.execute("rollback to savepoint here")
        emit(one, "s", "after the savepoint")
        other.commit()
        one.commit()
        other.execute("create table empty_one (id int)")
        other.commit()
        other.execute("select pgstream.emit('s', 'many-' || n, '{}') from generate_series(1, 3000) n")
        other.commit()
    with Followed(at, start) as sent:
        sent.take_until(3 + 3 + 1 + 3000)
    end = sent.ends[-1]
    assert sent.rows == at.read(start, end)
    assert "undone" not in {row["key"] for row in sent.rows}
    # A batch may end at each of these ends: what was sent up to there is what is read up to there.
    for one_end in sent.ends:
        assert at.read(start, one_end) == [row for row in sent.rows if row["position"] < one_end]


def test_a_commit_is_there_without_being_asked_for(at: Scene) -> None:
    """GIVEN a feed WHEN something commits THEN its thread says so, far sooner than any question would be asked."""
    with Followed(at) as sent:
        sent.news.clear()
        at.emit("s", "1")
        assert sent.news.wait(5)
        sent.take_until(1)
        assert [row["key"] for row in sent.rows] == ["1"]


def test_a_transaction_larger_than_the_buffer_is_sent_in_pieces(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """In bounded memory, its rows as they come, and its end with its commit."""
    monkeypatch.setattr(feed_module, "BUFFER_BYTES", 64 * 1024)
    monkeypatch.setattr(feed_module, "PIECE_BYTES", 32 * 1024)
    with Followed(at) as sent:
        at.db.execute("select pgstream.emit('s', 'k' || n, jsonb_build_object('x', repeat('y', 500))) "
                      "from generate_series(1, 2000) n")  # fmt: skip
        until(sent.news.is_set, "something is sent")
        deadline = time.monotonic() + 30
        sizes: list[int] = []
        while not sizes:  # WAL from before it may be passed first
            assert time.monotonic() < deadline
            if (fed := sent.feed.next()) is not None:
                for batch in fed.batches():
                    sizes.append(batch.num_rows)
                    sent.rows += batch.to_pylist()
                end = fed.end()
        assert len(sizes) > 5 and sum(sizes) == 2000
    assert sent.rows == at.read(sent.start, end)


def test_a_slow_taker_keeps_its_connection(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a full buffer in the middle of a transaction WHEN nobody takes for longer than the server waits THEN the
    server hears of us all the same, and goes on.
    """
    monkeypatch.setattr(feed_module, "BUFFER_BYTES", 8 * 1024)
    monkeypatch.setattr(feed_module, "PIECE_BYTES", 4 * 1024)
    monkeypatch.setattr(feed_module, "STATUS_EVERY_S", 0.2)
    at.db.execute("alter system set wal_sender_timeout = '1s'")
    at.db.execute("select pg_reload_conf()")
    try:
        with Followed(at) as sent:
            at.db.execute("select pgstream.emit('s', 'k' || n, jsonb_build_object('x', repeat('y', 500))) "
                          "from generate_series(1, 3000) n")  # fmt: skip
            assert sent.news.wait(5)
            age = "select extract(epoch from clock_timestamp() - backend_start) from pg_stat_activity where pid = %s"
            pid = sender(at)
            until(lambda: float(at.value(age, pid) or 0) > 4.0, "four times as long as the server waits has passed")
            assert sender(at) == pid
            sent.take_until(3000)
            assert len(sent.ends) == 1
    finally:
        at.db.execute("alter system reset wal_sender_timeout")
        at.db.execute("select pg_reload_conf()")


def test_only_what_is_checkpointed_is_confirmed(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN events that were taken WHEN they are confirmed THEN the slot moves there, and never before."""
    monkeypatch.setattr(feed_module, "CONFIRM_EVERY_S", 0.0)
    monkeypatch.setattr(feed_module, "STATUS_EVERY_S", 0.1)
    with Followed(at) as sent:
        before = confirmed_lsn(at)
        at.emit("s", "1")
        sent.take_until(1)
        first = sent.ends[-1]
        at.emit("s", "2")
        sent.take_until(2)
        now = at.value("select clock_timestamp()")
        later = "select reply_time > %s from pg_stat_replication where pid = %s"
        until(lambda: at.value(later, now, sender(at)), "a status came after that")
        assert confirmed_lsn(at) == before
        sent.feed.confirm(first)
        until(lambda: confirmed_lsn(at) == Position.parse(first).lsn, "the slot is where we confirmed")
    assert [row["key"] for row in at.read(first, sent.ends[-1])] == ["2"]


def test_wal_of_others_is_passed_now_and_then(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN WAL that holds nothing of ours WHEN a while has passed THEN there is an end without rows."""
    monkeypatch.setattr(feed_module, "IDLE_EVERY_S", 0.3)
    with Followed(at) as sent:
        at.db.execute("create table others (id int)")
        at.db.execute("insert into others select generate_series(1, 10000)")
        until(sent.take, "an end is offered", timeout_s=20)
        assert sent.rows == [] and sent.ends[-1] > sent.start


def test_a_new_feed_passes_wal_of_others_at_once(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN feeds that are shorter than the time between two passes, as in a short lane WHEN WAL of others comes THEN
    the loop is woken, and passes it: else the slot would keep it for ever."""
    monkeypatch.setattr(feed_module, "IDLE_EVERY_S", 3600.0)
    with Followed(at) as sent:
        at.emit("s", "1")
        sent.take_until(1)
    with Followed(at, sent.ends[-1]) as sent:
        until(lambda: not sent.take(), "what came before is taken")
        sent.news.clear()
        at.db.execute("create table others (id int)")
        at.db.execute("insert into others select generate_series(1, 10000)")
        assert sent.news.wait(60)
        until(sent.take, "an end is offered")
        assert sent.rows == [] and sent.ends[-1] > sent.start


def test_a_publication_that_was_changed_is_noticed_before_anything_is_confirmed(
    at: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a publication changed by somebody WHEN the next batch is confirmed THEN it is a gap, and the slot stays."""
    monkeypatch.setattr(feed_module, "CONFIRM_EVERY_S", 0.0)
    with Followed(at) as sent:
        at.emit("s", "1")
        sent.take_until(1)
        before = confirmed_lsn(at)
        at.db.execute(f"alter publication {at.target.publication} set (publish = 'delete')".encode())
        with pytest.raises(GapError, match="changed by somebody"):
            sent.feed.confirm(sent.ends[-1])
        assert confirmed_lsn(at) == before


def test_a_slot_that_was_moved_past_us_is_a_gap(at: Scene) -> None:
    """The server would start at the slot's own position, and say nothing."""
    start = at.source.earliest(0)
    at.emit("s", "1")
    at.db.execute("select pg_replication_slot_advance(%s, pg_current_wal_lsn())", (at.target.slot,))
    with pytest.raises(GapError, match="moved past us"):
        at.source.follow(0, start, lambda: None)


def test_the_reader_before_us_is_ended(at: Scene) -> None:
    """GIVEN a reader that still has the slot WHEN its successor comes THEN the old one is ended, the new one reads."""
    with Followed(at) as old, Followed(at, old.start) as new:
        at.emit("s", "1")
        new.take_until(1)
        with pytest.raises(EvermarkError):
            until(lambda: old.take() and False, "the old one is ended", timeout_s=10)


def test_a_cut_connection_raises_when_all_that_came_before_is_taken(at: Scene) -> None:
    """GIVEN a transaction received WHEN the server ends the connection THEN it can be taken, and then it is said."""
    with Followed(at) as sent:
        at.emit("s", "1")
        feed = cast(SlotFeed, sent.feed)
        until(lambda: feed._whole, "the transaction is received: idle news may come before it", timeout_s=30)
        sent.news.clear()
        at.db.execute("select pg_terminate_backend(%s)", (sender(at),))
        assert sent.news.wait(5)
        sent.take_until(1)
        with pytest.raises(EvermarkError):
            sent.feed.next()
    assert at.drain(sent.start)[0]["key"] == "1"
