"""What every store of replicated tables promises, shown by nodes that meet in one process."""

from __future__ import annotations

import json
import math
import random
import struct
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
import pytest

from evermark.errors import (
    BusyError,
    ConflictError,
    DeniedError,
    FormatError,
    NotFoundError,
    SetupError,
    UnreachableError,
)
from evermark.replicas import clock
from evermark.replicas.base import Cut
from evermark.replicas.columns import images_of, live_rows
from evermark.replicas.digests import Digest, RowDigest, Span
from evermark.replicas.event import Event, Image, Operation, Version
from evermark.replicas.exchange import PROTOCOL_BY_TIME, Hello, Manifest, Page
from evermark.replicas.paging import SnapshotRequired, Stretch
from evermark.replicas.ranges import Held, Ranges
from evermark.replicas.replica import Limits, Replica
from evermark.replicas.snapshots import Snapshots
from evermark.replicas.sql_store import SqlStore
from evermark.replicas.sqlite import SqliteStore
from evermark.replicas.values import VALUE_CHARS_MAX

FAR = Limits(page=50)
NO_RETENTION = Limits(retention_ms=0, safety_ms=-1, page=50)


class Direct:
    """A peer in this process: what is asked of it is what it answers."""

    def __init__(self, here: str, there: Replica) -> None:
        self.name, self._here, self._there = there.name, here, there

    def hello(self, hello: Hello) -> Hello:
        return Hello.from_json(self._there.answer_hello(self._here, Hello.from_json(hello.as_json())).as_json())

    def pull(self, table: str, origin: str, held: Held, limit: int) -> Page:
        return self._there.answer_pull(self._here, table, origin, held, limit)

    def pull_since(self, table: str, timestamp: int, event_id: str, limit: int) -> Sequence[Event]:
        return self._there.answer_pull_since(table, timestamp, event_id, limit)

    def push(self, table: str, origin: str, events: Sequence[Event]) -> Held:
        return self._there.answer_push(self._here, table, origin, events)

    def snapshot(self, table: str) -> Manifest:
        return self._there.answer_snapshot(table)

    def chunk(self, snapshot: str, number: int) -> bytes:
        return self._there.answer_chunk(snapshot, number)

    def digests(self, table: str, spans: Sequence[Span]) -> list[Digest]:
        return self._there.answer_digests(table, spans)

    def rows(self, table: str, spans: Sequence[Span]) -> list[list[RowDigest]]:
        return self._there.answer_rows(table, spans)

    def cuts(self, table: str, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        return self._there.answer_cuts(table, spans, pieces)


class ReplicaNode:
    """A node with tables of its own, and somebody who writes to them with plain SQL."""

    def __init__(self, name: str, store: SqlStore, execute: Callable[..., list[tuple[Any, ...]]]) -> None:
        self.name, self.store, self.sql = name, store, execute
        self._folder = tempfile.TemporaryDirectory()
        self.now_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self.limit(FAR)
        store.renew(self.replica.fresh_origin())

    def limit(self, limits: Limits, **named: Any) -> None:
        self.snapshots = Snapshots(Path(self._folder.name), chunk_rows=3)
        self.replica = Replica(self.name, self.store, self.snapshots, lambda: self.now_ms(), limits, **named)  # noqa: PLW0108 - tests set it

    def install(self, table: str = "orders", columns: Sequence[str] | None = None) -> None:
        self.store.install(table, columns, self.now_ms())

    def meet(self, other: ReplicaNode) -> Any:
        return self.replica.sync(Direct(self.name, other.replica))

    def rows(self, table: str = "orders") -> list[tuple[Any, ...]]:
        spec = self.store.tables()[table]
        found: dict[str, Image] = {}
        with self.store.snapshot(table, 1000) as (_, pieces):
            for piece in pieces:
                found |= images_of(spec, piece.filter(pc.invert(piece["is_deleted"])))
        return [tuple(found[record].values()) for record in sorted(found)]

    def events(self, table: str = "orders") -> list[Event]:
        origin = self.store.identity()[0]
        return self.store.read(table, [Stretch(origin, 1, 10**9)])

    def put(self, key: int, what: str | None) -> None:
        self.sql(
            "insert into orders (id, what) values (?, ?) on conflict (id) do update set what = excluded.what",
            key,
            what,
        )

    def close(self) -> None:
        self.store.close()
        self._folder.cleanup()


Make = Callable[[str], ReplicaNode]


def event_by(origin: str, seq: int, key: int, what: str | None, reading: int) -> Event:
    """An event of the table of these tests, as a peer would send it; without a text it is a delete."""
    image = {"id": str(key), "what": what, "amount": None, "ok": None, "raw": None}
    operation = Operation.DELETE if what is None else Operation.UPDATE
    name = f"{seq:08x}-0000-4000-8000-{int(origin[-8:], 16):012x}"
    return Event(name, "orders", operation, str(key), image if what else None, 1, Version(reading, origin, seq))


class ReplicaStoreContract:
    """`make` is a node with the empty table orders (id, what, amount, ok, raw), not replicated yet."""

    @pytest.fixture
    def make(self) -> Iterator[Make]:
        raise NotImplementedError("override this fixture")

    @pytest.fixture
    def node(self, make: Make) -> ReplicaNode:
        made = make("a")
        made.install()
        made.store.join({})
        return made

    def test_r1_every_change_is_an_event_in_its_transaction(self, node: ReplicaNode) -> None:
        """GIVEN plain SQL WHEN rows change THEN each change is an event with a dense number; a rollback leaves none."""
        node.put(1, "new")
        node.sql("update orders set what = 'changed', amount = 0.1, ok = true where id = 1")
        node.sql("begin", "insert into orders (id, what) values (2, 'never')", "rollback")
        node.sql("update orders set id = 5 where id = 1")
        node.sql("delete from orders where id = 5")
        found = node.events()
        told = [(str(event.operation), event.record_id) for event in found]
        assert [told[0], told[1], *sorted(told[2:4]), told[4]] == [
            ("create", "1"),
            ("update", "1"),
            ("delete", "1"),
            ("update", "5"),
            ("delete", "5"),
        ]
        assert [event.version.seq for event in found] == [1, 2, 3, 4, 5]
        assert found[1].image == {"id": "1", "what": "changed", "amount": "0.1", "ok": "true", "raw": None}
        assert sorted(found, key=lambda event: event.version) == found
        row = node.sql('select table_name, origin_node_id, processed from "orders_Events" where origin_seq = 1')[0]
        assert (row[0], row[1], bool(row[2])) == ("orders", node.store.identity()[0], True)

    def test_r2_numbers_go_on_after_a_restart_and_a_new_origin_begins_anew(self, node: ReplicaNode) -> None:
        """GIVEN numbers in replication_meta WHEN the node takes another origin THEN its events begin at 1 again."""
        node.put(1, "x")
        node.store.set_token("left here")
        old = node.store.identity()[0]
        key = node.sql("select value from replication_meta where key like 'origin_seq::%::orders'")
        assert [int(value) for (value,) in key] == [1]
        node.store.renew(node.replica.fresh_origin())
        node.put(2, "y")
        assert [event.version.seq for event in node.events()] == [1]
        assert node.store.said().held["orders"] == {
            old: Ranges.through(1),
            node.store.identity()[0]: Ranges.through(1),
        }

    @pytest.mark.parametrize("is_noted", [True, False])
    def test_r2_what_was_written_after_a_restore_is_told_anew(self, make: Make, is_noted: bool) -> None:
        """GIVEN a backup that is written to before the node starts, under numbers that a peer knows as other rows WHEN
        it goes on under a new origin THEN both have what was lost here, and what was written since."""
        a, b, backup = make("a"), make("b"), make("a")
        for node in (a, b):
            node.install()
        a.put(1, "kept")
        a.put(2, "older")
        a.meet(b)
        backup.store.renew(a.store.identity()[0])
        backup.install()
        backup.store.ingest("orders", b.store.read("orders", [Stretch(a.store.identity()[0], 1, 1)]), a.now_ms(), 1000)
        backup.sql("delete from replication_checkpoints")
        backup.store.join({})
        backup.sql("update replication_meta set value = '1' where key like 'origin_seq::%'")
        backup.store.set_token("of the backup")
        a.put(2, "lost here")
        a.meet(b)
        backup.put(3, "after the restore")
        backup.put(4, "and one more")
        assert backup.store.held("orders") == b.store.held("orders"), "nobody would ask for anything"
        if not is_noted:
            backup.store.set_token("and the node has started")
        backup.store.renew(backup.replica.fresh_origin(), is_noted=is_noted)
        backup.meet(b)
        assert [row[1] for row in backup.rows()] == ["kept", "lost here", "after the restore", "and one more"]
        assert backup.rows() == b.rows()
        assert backup.replica.diff(Direct("a", b.replica), "orders") == ([], True)

    def test_r3_events_keep_their_identity_when_they_are_passed_on(self, make: Make) -> None:
        """GIVEN A–B–C, where A and C never meet WHEN A writes THEN C has the event as A made it; so do rings."""
        a, b, c = (make(name) for name in "abc")
        for node in (a, b, c):
            node.install()
        a.put(1, "from a")
        c.put(2, "from c")
        for here, there in ((a, b), (b, c), (b, a), (c, a), (a, b)):
            here.meet(there)
        assert a.rows() == b.rows() == c.rows() and len(a.rows()) == 2
        origin = a.store.identity()[0]
        copies = [node.store.read("orders", [Stretch(origin, 1, 9)]) for node in (a, b, c)]
        assert copies[0] == copies[1] == copies[2] and len(copies[0]) == 1

    def test_r4_the_checkpoint_is_the_highest_number_without_a_gap(self, node: ReplicaNode) -> None:
        """GIVEN events 1, 2, 5 and 9 of an origin THEN the checkpoint is 2, and 3–4 and 6–8 are missing beside it."""
        origin = "z.000000000001aaaaaaaa"
        events = [event_by(origin, seq, seq, "x", seq) for seq in (5, 1, 9, 2)]
        node.store.ingest("orders", events, node.now_ms(), 1000)
        sql = "select origin_seq, missing from replication_checkpoints where table_name = 'orders'"
        assert [(int(seq), json.loads(missing)) for seq, missing in node.sql(sql)] == [(2, [[3, 4], [6, 8]])]
        node.store.ingest("orders", [event_by(origin, 3, 3, "x", 3)], node.now_ms(), 1000)
        assert [(int(seq), json.loads(missing)) for seq, missing in node.sql(sql)] == [(3, [[4, 4], [6, 8]])]

    def test_r5_only_what_is_missing_comes_in_pages_with_what_it_covers(self, make: Make) -> None:
        """GIVEN 120 events and pages of 50 WHEN a peer that has some asks THEN each comes once, by (origin, seq)."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        for key in range(20):
            a.put(key, "early")
        assert b.meet(a).taken == 20
        for key in range(100):
            a.put(key, "late")
        held = b.store.said().held["orders"]
        page = a.replica.answer_pull("b", "orders", b.store.identity()[0], held, 50)
        assert [event.version.seq for event in page.events] == list(range(21, 71)) and page.coverage.more
        assert page.coverage.covered == {a.store.identity()[0]: Ranges(((21, 70),))}
        found = b.meet(a)
        assert (found.taken, found.duplicates) == (100, 0)
        assert b.meet(a).taken == 0

    def test_r5_what_the_answerer_lacks_itself_is_said(self, node: ReplicaNode) -> None:
        """GIVEN a node that misses events WHEN asked THEN "I lack these" is told apart from "there are none"."""
        origin = "z.000000000001aaaaaaaa"
        events = [event_by(origin, seq, seq, "x", seq) for seq in (1, 4)]
        node.store.ingest("orders", events, node.now_ms(), 1000)
        page = node.replica.answer_pull("b", "orders", "b.000000000001bbbbbbbb", {}, 50)
        assert page.coverage.lacks == {origin: Ranges(((2, 3),))} and not page.coverage.more

    def test_r5_a_node_whose_own_head_is_behind_gets_its_own_events(self, make: Make) -> None:
        """GIVEN a peer that holds more of a node's events than it does itself WHEN they meet THEN it takes them back,
        and goes on under a new origin."""
        a, b, again = make("a"), make("b"), make("a")
        for node in (a, b):
            node.install()
        a.put(1, "one")
        a.meet(b)
        again.store.renew(a.store.identity()[0])
        again.install()
        assert again.meet(b).taken == 1
        assert again.rows() == b.rows() and again.store.identity()[0] != a.store.identity()[0]

    def test_r5_an_old_peer_is_asked_by_time(self, make: Make) -> None:
        """GIVEN a peer that knows no origins WHEN met again THEN all comes, nothing twice, no gap is passed."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        a.limit(FAR, protocol=PROTOCOL_BY_TIME)
        for key in range(130):
            a.put(key, "x")
        found = b.meet(a)
        assert found.by_time and found.taken == 130
        a.put(200, "y")
        assert b.meet(a).taken == 1
        assert b.store.said().held["orders"][a.store.identity()[0]] == Ranges.through(131)
        assert b.rows() == a.rows()

    def test_r6_an_event_is_applied_once_however_often_it_comes(self, node: ReplicaNode) -> None:
        """GIVEN events that were taken WHEN they come again THEN that is a success, and nothing is applied."""
        origin = "z.000000000001aaaaaaaa"
        events = [event_by(origin, 1, 1, "x", 5), event_by(origin, 2, 2, "y", 6)]
        now = node.now_ms()
        assert node.store.ingest("orders", events, now, 1000).applied == 2
        node.sql("delete from orders where id = 1")
        again = node.store.ingest("orders", [*events, *events], now, 1000)
        assert (again.taken, again.applied, again.duplicates) == (0, 0, 4)
        assert [row[0] for row in node.rows()] == ["2"]

    def test_r6_the_same_number_with_another_content_is_a_loud_error(self, node: ReplicaNode) -> None:
        """GIVEN an event WHEN another comes under its number THEN it is refused, alone or in one page."""
        origin, now = "z.000000000001aaaaaaaa", node.now_ms()
        one, other = event_by(origin, 1, 1, "x", 5), event_by(origin, 1, 1, "y", 5)
        with pytest.raises(ConflictError, match="another content"):
            node.store.ingest("orders", [one, other], now, 1000)
        node.store.ingest("orders", [one], now, 1000)
        with pytest.raises(ConflictError, match="another content"):
            node.store.ingest("orders", [event_by(origin, 2, 2, "z", 6), other], now, 1000)
        assert node.store.said().held["orders"] == {origin: Ranges.through(1)}

    def test_r6_a_row_that_cannot_be_written_rolls_all_back(self, node: ReplicaNode) -> None:
        """GIVEN a page with a row that breaks a rule of the table WHEN taken THEN nothing of it is, and it is said."""
        node.sql("create unique index only_one on orders (what)")
        origin = "z.000000000001aaaaaaaa"
        events = [event_by(origin, 1, 1, "same", 5), event_by(origin, 2, 2, "same", 6)]
        with pytest.raises(SetupError, match="refuses a row"):
            node.store.ingest("orders", events, node.now_ms(), 1000)
        assert node.rows() == [] and node.store.said().held["orders"] == {}
        assert node.store.read("orders", [Stretch(origin, 1, 9)]) == []

    @pytest.mark.parametrize("by", ["events", "snapshot"])
    def test_r6_what_only_one_row_may_have_passes_from_row_to_row(self, make: Make, by: str) -> None:
        """GIVEN a unique index besides the key, kept by one writer WHEN rows hand over and swap what it is about THEN a
        peer takes it, by events and by a snapshot."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.sql("create unique index only_one on orders (what)")
            node.install()
            node.limit(NO_RETENTION)
        for key, what in enumerate("vwxyz"):
            a.put(key, what)
        a.meet(b)
        a.sql("delete from orders where id = 0")
        a.put(10, "v")
        a.put(1, "moved on")
        a.put(11, "w")
        for key, what in ((2, "held"), (3, "x"), (2, "y")):
            a.put(key, what)
        if by == "snapshot":
            a.replica.evict(["b"])
            a.replica.collect()
        found = b.meet(a)
        assert found.snapshots == (1 if by == "snapshot" else 0)
        assert b.rows() == a.rows() and [row[1] for row in b.rows()] == ["moved on", "v", "w", "y", "x", "z"]

    def test_r6_a_row_is_not_replaced_where_more_than_it_would_go(self, make: Make) -> None:
        """GIVEN columns of the table that are not replicated WHEN rows swap what an index lets only one have THEN that
        is refused, and what the columns hold stays."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.sql("create unique index only_one on orders (what)")
            node.install(columns=["id", "what"])
        for key, what in enumerate("xy"):
            a.put(key, what)
        a.meet(b)
        b.sql("update orders set amount = 7.5")
        for key, what in ((0, "held"), (1, "x"), (0, "y")):
            a.put(key, what)
        with pytest.raises(SetupError, match="refuses a row"):
            b.meet(a)
        assert sorted(b.sql("select what, amount from orders")) == [("x", 7.5), ("y", 7.5)]

    def test_one_tables_trouble_is_not_anothers(self, make: Make) -> None:
        """GIVEN a row whose value no peer takes, in the first of two tables WHEN nodes meet THEN the other table is
        synced, the row is named, and the table goes on when the row is corrected or gone."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.sql("create table bad (id bigint primary key, what text)")
            for table in ("bad", "orders"):
                node.install(table)
        long = "x" * (VALUE_CHARS_MAX + 1)
        a.sql("insert into bad values (1, 'fine')")
        a.sql("insert into bad values (2, ?)", long)
        a.sql("insert into bad values (3, ?)", long)
        a.put(1, "goes on")
        for here, there in ((a, b), (b, a)):
            with pytest.raises(FormatError, match=r"bad.what of row '2': .* is too long") as refused:
                here.meet(there)
            assert "peer" not in refused.value.hint
            assert b.rows() == a.rows() and len(b.rows()) == 1
        a.sql("update bad set what = 'corrected' where id = 2")
        a.sql("delete from bad where id = 3")
        a.meet(b)
        assert b.rows("bad") == a.rows("bad") == [("1", "fine"), ("2", "corrected")]
        assert a.replica.diff(Direct("a", b.replica), "bad") == ([], True)
        a.sql("update bad set what = ? where id = 1", long)
        with pytest.raises(FormatError, match=r"bad.what of row '1'"):
            a.rows("bad")

    def test_rows_wait_for_the_rows_they_refer_to(self, make: Make) -> None:
        """GIVEN a table whose rows refer to those of one that comes after it by name WHEN nodes meet THEN both are
        synced at once."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.sql("create table items (id bigint primary key, of_order bigint references orders (id))")
            for table in ("items", "orders"):
                node.install(table)
        if isinstance(b.store, SqliteStore):
            b.sql("pragma foreign_keys = on")
        a.put(1, "first")
        a.sql("insert into items values (7, 1)")
        for here, there in ((a, b), (b, a)):
            here.meet(there)
        assert b.rows("items") == a.rows("items") == [("7", "1")]

    def test_r7_the_same_events_in_any_order_give_the_same_rows(self, make: Make) -> None:
        """GIVEN three changes of one row by three nodes WHEN they arrive in their six orders THEN one of them wins."""
        import itertools

        events = [
            event_by("x.000000000001aaaaaaaa", 1, 1, "first", 70),
            event_by("y.000000000001bbbbbbbb", 1, 1, None, 71),
            event_by("z.000000000001cccccccc", 1, 1, "tied", 71),
        ]
        made = make("a")
        made.install()
        seen = []
        for order in itertools.permutations(events):
            for event in order:
                made.store.ingest("orders", [event], made.now_ms(), 1000)
            seen.append(made.rows())
            for kind in ("Events", "Versions"):
                made.sql(f'delete from "orders_{kind}"')
            made.sql("delete from replication_checkpoints")
        assert seen == [[("1", "tied", None, None, None)]] * 6

    def test_r7_a_change_beats_the_version_it_was_made_on_though_the_clock_is_behind(self, node: ReplicaNode) -> None:
        """GIVEN a row from a node whose clock is ahead WHEN a user changes it here THEN the change is the newer one."""
        origin = "z.000000000001aaaaaaaa"
        ahead = clock.at_ms(node.now_ms() + 60_000)
        node.store.ingest("orders", [event_by(origin, 1, 1, "ahead", ahead)], node.now_ms(), 300_000)
        node.put(1, "mine")
        assert node.events()[-1].version > Version(ahead, origin, 1)

    def test_r7_an_event_from_the_far_future_is_quarantined_until_then(self, node: ReplicaNode) -> None:
        """GIVEN a clock an hour ahead WHEN its event comes THEN it is left out and named, and taken when it is time."""
        origin, now = "z.000000000001aaaaaaaa", node.now_ms()
        early = event_by(origin, 1, 1, "early", clock.at_ms(now + 3_600_000))
        found = node.store.ingest("orders", [early, event_by(origin, 2, 2, "fine", clock.at_ms(now))], now, 300_000)
        assert (found.taken, len(found.quarantined)) == (1, 1)
        assert [(each.origin, each.seq) for each in node.store.quarantined()] == [(origin, 1)]
        assert node.store.said().held["orders"][origin].missing == Ranges.of([1])
        assert node.store.ingest("orders", [early], now + 3_600_000, 300_000).taken == 1
        assert node.store.quarantined() == [] and len(node.rows()) == 2

    def test_r8_only_rows_of_replicated_tables_and_columns_are_taken(self, make: Make) -> None:
        """GIVEN events with other tables, other columns or SQL in them THEN each is refused, or kept as plain text."""
        node = make("a")
        node.install(columns=["id", "what"])
        node.sql("insert into orders (id, what, amount) values (1, 'seen', 7.5)")
        assert node.events()[0].image == {"id": "1", "what": "seen"}
        origin, now = "z.000000000001aaaaaaaa", node.now_ms()
        whole = event_by(origin, 1, 1, "x", 5)
        with pytest.raises(FormatError, match="other columns"):
            node.store.tables()["orders"].checked(dict(whole.image or {}), "1")
        with pytest.raises(NotFoundError, match="not replicated"):
            node.store.ingest("replication_meta", [whole], now, 1000)
        evil = "'); drop table orders; --"
        plain = Event(whole.id, "orders", Operation.UPDATE, "2", {"id": "2", "what": evil}, 1, Version(5, origin, 1))
        node.store.ingest("orders", [plain], now, 1000)
        assert sorted(node.sql("select id, what, amount from orders")) == [(1, "seen", 7.5), (2, evil, None)]

    def test_r9_nothing_is_collected_that_a_member_lacks_or_that_is_young(self, make: Make) -> None:
        """GIVEN members that lack events, or were never met WHEN collecting THEN only what all have, and old, goes."""
        a, b, c = (make(name) for name in "abc")
        for node in (a, b, c):
            node.install()
            node.limit(NO_RETENTION)
        a.replica.add_member("c")
        for key in range(10):
            a.put(key, "x")
        b.meet(a)
        assert a.replica.collect()["orders"].events == 0, "c was never met"
        assert a.replica.floors("orders").holding == ("c",)
        c.meet(a)
        for key in range(10, 15):
            a.put(key, "later")
        b.meet(a)
        a.limit(FAR)
        assert a.replica.collect()["orders"].events == 0, "young"
        a.limit(NO_RETENTION)
        assert a.replica.collect()["orders"].events == 10, "c lacks five"
        c.meet(a)
        assert a.replica.collect()["orders"].events == 5
        assert a.store.floors("orders") == {a.store.identity()[0]: 15}

    def test_r9_a_tombstone_stays_until_nothing_older_can_arrive(self, make: Make) -> None:
        """GIVEN a delete that a peer has, whose own older change is still under way WHEN collecting THEN the tombstone
        stays, and the late change does not bring the row back."""
        a, b, c = (make(name) for name in "abc")
        for node in (a, b, c):
            node.install()
            node.limit(NO_RETENTION)
        a.put(1, "x")
        for here, there in ((b, a), (c, b), (b, a), (c, b), (b, a)):
            here.meet(there)
        c.put(1, "late")  # only c has it
        a.store.raise_clocks({"orders": c.events()[-1].version.hlc})  # both may fall into one millisecond
        a.sql("delete from orders where id = 1")
        for here, there in ((b, a), (b, a)):
            here.meet(there)
        delete = a.events()[-1]
        c.store.ingest("orders", [delete], c.now_ms(), 1000)  # c has the delete, and tells only that
        b.replica.answer_hello("c", c.replica.hello())
        a.meet(b)
        assert a.replica.collect()["orders"].tombstones == 0
        for here, there in ((c, b), (b, a), (c, b), (b, a)):
            here.meet(there)
        assert a.rows() == b.rows() == c.rows() == []
        assert a.replica.collect()["orders"].tombstones == 1

    def test_r9_a_silent_member_is_evicted_and_comes_back_by_a_snapshot(self, make: Make) -> None:
        """GIVEN a member that was silent for longer than the limit, with a change nobody has WHEN the others evict it
        and collect THEN it comes back under a new origin, by a snapshot, and its change is everywhere."""
        a, b, c = (make(name) for name in "abc")
        quick = Limits(retention_ms=0, safety_ms=-1, dead_ms=60_000, page=50)
        for node in (a, b, c):
            node.install()
            node.limit(quick)
        a.put(1, "x")
        a.put(2, "stays")
        for here, there in ((b, a), (c, a), (b, a)):
            here.meet(there)
        c.put(3, "only c has it")
        a.sql("delete from orders where id = 1")
        later = a.now_ms() + 120_000
        a.now_ms = b.now_ms = c.now_ms = lambda: later
        b.meet(a)
        old = c.store.identity()[0]
        assert b.replica.evict() == {old} and a.replica.collect()["orders"].events == 0, "b has to know it"
        a.meet(b)
        b.meet(a)
        assert a.replica.collect()["orders"].events == 3
        found = c.meet(a)
        assert found.snapshots == 1 and c.store.identity()[0] != old
        for here, there in ((b, a), (c, b), (a, c)):
            here.meet(there)
        assert a.rows() == b.rows() == c.rows()
        assert [row[1] for row in a.rows()] == ["stays", "only c has it"]

    def test_r10_a_request_below_the_floor_needs_a_snapshot(self, make: Make) -> None:
        """GIVEN events that were collected WHEN asked for them THEN the answer is `snapshot required`, never a later
        start; a meeting takes the snapshot by itself."""
        a, b, late = (make(name) for name in ("a", "b", "late"))
        for node in (a, b, late):
            node.install()
            node.limit(NO_RETENTION)
        for key in range(8):
            a.put(key, "x")
        a.sql("delete from orders where id = 7")
        b.meet(a)
        assert a.replica.collect()["orders"].events == 9
        with pytest.raises(SnapshotRequired, match="snapshot required"):
            a.replica.answer_pull("late", "orders", late.store.identity()[0], {}, 50)
        assert late.meet(a).snapshots == 1
        assert late.rows() == a.rows() and len(late.rows()) == 7

    def test_r11_a_snapshot_and_the_events_after_it_are_the_full_history(self, make: Make) -> None:
        """GIVEN changes before and after a cut WHEN one node takes all events, another the snapshot and what followed
        THEN both have the same rows; a staged chunk is not asked for twice."""
        a, full, short = (make(name) for name in ("a", "whole", "short"))
        for node in (a, full, short):
            node.install()
        for key in range(10):
            a.put(key, "before")
        a.sql("delete from orders where id = 3")
        a.replica.answer_hello("short", short.replica.hello())
        manifest = a.replica.answer_snapshot("orders")
        a.put(1, "after")
        a.sql("delete from orders where id = 4")
        a.put(3, "again")
        spec, kept = short.store.tables()["orders"], short.snapshots
        assert kept.missing("a", manifest) == list(range(len(manifest.chunks)))
        for number in range(len(manifest.chunks)):
            kept.take("a", manifest, number, a.replica.answer_chunk(manifest.id, number))
            assert kept.missing("a", manifest) == list(range(number + 1, len(manifest.chunks)))
        assert short.rows() == [], "nothing is seen before all of it is there"
        cut = Cut(manifest.held, manifest.clock)
        short.store.merge("orders", cut, lambda: kept.taken("a", manifest, spec), short.now_ms())
        short.meet(a)
        full.meet(a)
        assert short.rows() == full.rows() == a.rows()

    def test_r11_a_bootstrap_that_was_interrupted_goes_on_with_what_is_missing(self, make: Make) -> None:
        """GIVEN a peer that goes away after two chunks WHEN they meet again THEN these two are not asked for again,
        nothing of the snapshot was seen before, and in the end all rows are there."""

        class Asked(Direct):
            chunks: list[int] = []  # noqa: RUF012 - of one test

            def chunk(self, snapshot: str, number: int) -> bytes:
                if self.chunks == [0, 1]:
                    self.chunks.append(-1)
                    raise UnreachableError("cut", hint="a test")
                self.chunks.append(number)
                return super().chunk(snapshot, number)

        a, b = make("a"), make("b")
        for key in range(10):
            a.put(key, f"row {key}")
        a.install()
        b.install()
        peer = Asked("b", a.replica)
        with pytest.raises(UnreachableError, match="cut"):
            b.replica.sync(peer)
        assert b.rows() == []
        assert b.replica.sync(peer).snapshots == 1
        assert b.rows() == a.rows() and len(b.rows()) == 10
        assert peer.chunks == [0, 1, -1, 2, 3]

    def test_r11_one_snapshot_of_a_table_is_made_at_a_time(self, node: ReplicaNode) -> None:
        """GIVEN a snapshot that is being made WHEN another is asked for THEN it has to wait; later it gets it."""
        node.put(1, "x")
        with node.snapshots._making("orders"), pytest.raises(BusyError, match="being made"):
            node.replica.answer_snapshot("orders")
        assert node.replica.answer_snapshot("orders").chunks

    def test_r11_a_damaged_chunk_is_refused(self, make: Make) -> None:
        """GIVEN a chunk with one byte changed WHEN decoded THEN it is refused."""
        from evermark.replicas.snapshots import decoded

        a = make("a")
        a.install()
        a.store.join({})
        a.put(1, "x")
        manifest = a.replica.answer_snapshot("orders")
        data = bytearray(a.replica.answer_chunk(manifest.id, 0))
        data[len(data) // 2] ^= 1
        with pytest.raises(FormatError, match="damaged"):
            decoded(a.store.tables()["orders"], manifest, 0, bytes(data))

    def test_r11_a_merge_keeps_what_the_snapshot_has_not_seen(self, node: ReplicaNode) -> None:
        """GIVEN a row of ours that the maker saw and has no more, and one it never saw THEN only the first goes."""
        node.put(1, "seen")
        node.put(2, "unseen")
        own = node.store.identity()[0]
        other = "z.000000000001aaaaaaaa"
        rows = live_rows(node.store.tables()["orders"], [(5, other, 1, 9, "new", None, None, None)], "a test")
        node.store.merge("orders", Cut({own: Ranges.of([1]), other: Ranges.of([1])}, 5), lambda: iter([rows]), 0)
        assert [each[0] for each in node.rows()] == ["2", "9"]

    def test_r12_a_peer_speaks_in_its_own_name_alone(self, make: Make) -> None:
        """GIVEN a peer that was let in by its key WHEN it says or asks something as another node THEN it is refused."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        b.meet(a)
        hello = b.replica.hello()
        with pytest.raises(DeniedError, match="another node's name"):
            a.replica.answer_hello("c", hello)
        with pytest.raises(DeniedError, match="another node's name"):
            a.replica.answer_hello("b", replace(hello, members={"c": hello.said}))
        with pytest.raises(DeniedError, match="asks as"):
            a.replica.answer_pull("b", "orders", "c.000000000001cccccccc", {}, 5)
        with pytest.raises(DeniedError, match="asks as"):
            a.replica.answer_push("b", "orders", "c.000000000001cccccccc", [])

    def test_r13_existing_rows_are_replicated_by_a_snapshot(self, make: Make) -> None:
        """GIVEN tables with rows on two nodes WHEN they begin to replicate THEN each gets the other's rows."""
        a, b = make("a"), make("b")
        for node, keys in ((a, range(7)), (b, range(5, 9))):
            for key in keys:
                node.put(key, node.name)
            node.install()
        a.meet(b)
        b.meet(a)
        a.meet(b)
        assert a.rows() == b.rows() and len(a.rows()) == 9

    def test_r13_a_peer_that_is_only_dialled_gets_later_changes_and_it_is_said_what_it_lacks(self, make: Make) -> None:
        """GIVEN rows from before on a node that dials one that never does WHEN they meet THEN later changes arrive, and
        the node says what is still lacking and what to do."""
        a, b = make("a"), make("b")
        for key in range(3):
            a.put(key, "before")
        for node in (a, b):
            node.install()
        a.put(1, "changed")
        a.put(7, "later")
        found = a.meet(b)
        assert [row[1] for row in b.rows()] == ["changed", "later"]
        assert "evermark replica sync a" in found.unsent["orders"]
        assert a.meet(b).unsent and b.meet(a).snapshots == 1 and not a.meet(b).unsent
        assert a.rows() == b.rows() and len(a.rows()) == 4

    def test_r13_an_older_events_table_gets_numbers_before_its_index(self, make: Make) -> None:
        """GIVEN events of an older program without numbers WHEN it is installed THEN they are numbered by time for each
        origin, nobody is sent them, and peers take a snapshot."""
        a, b = make("a"), make("b")
        a.sql(
            'create table "orders_Events" (id text primary key, table_name text not null, '
            "operation_type text not null, record_id text not null, data text, timestamp bigint not null, "
            "source_node_id text not null, processed boolean default false)"
        )
        for number, (at, source) in enumerate(((30, "p"), (10, "q"), (10, "p"), (20, "p"))):
            name = f"{number:08x}-0000-4000-8000-000000000000"
            a.sql(
                f'insert into "orders_Events" values '
                f"('{name}', 'orders', 'create', '1', 'SQL', {at}, '{source}', true)"
            )
        a.put(1, "kept")
        for node in (a, b):
            node.install()
        found = a.sql('select origin_node_id, origin_seq, timestamp from "orders_Events" order by 1, 2')
        assert found == [("p", 1, 10), ("p", 2, 20), ("p", 3, 30), ("q", 1, 10)]
        assert b.meet(a).snapshots == 1 and b.rows() == a.rows() and len(b.rows()) == 1

    def test_r14_digests_find_the_rows_that_differ_and_rows_without_capture(self, make: Make) -> None:
        """GIVEN a row changed behind the capture's back THEN digests name it; one that was put in is named as well."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        for key in range(300):
            a.put(key, f"row {key}")
        b.meet(a)
        assert a.replica.diff(Direct("a", b.replica), "orders") == ([], True)
        with b.store._writing():
            b.sql("update orders set what = 'other' where id = 77")
            b.sql("delete from orders where id = 123")
            b.sql("insert into orders (id, what) values (9999, 'smuggled')")
        found, whole = a.replica.diff(Direct("a", b.replica), "orders")
        assert whole and [(each.record_id, each.here, each.there) for each in found] == [
            ("123", True, False),
            ("77", True, True),
        ]
        assert b.store.uncaptured("orders", 10) == ["9999"]

    def test_values_of_every_kind_come_back_as_they_were(self, make: Make) -> None:
        """GIVEN values of every kind WHEN replicated THEN they are the same, down to the last digit."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        a.sql("insert into orders (id, what, amount, ok) values (1, 'ü''\"\\|\n', 0.1, true)")
        a.sql("insert into orders (id, what, amount, ok) values (-9223372036854775808, '', 1e300, false)")
        b.meet(a)
        assert b.rows() == a.rows()
        assert sorted(b.sql("select id, what, amount, ok from orders")) == sorted(
            a.sql("select id, what, amount, ok from orders")
        )

    @pytest.mark.parametrize("by", ["events", "snapshot"])
    def test_reals_are_the_same_to_the_last_bit(self, make: Make, by: str) -> None:
        """GIVEN reals of every size, and infinity WHEN they come by events or a snapshot THEN none has changed."""
        a, b = make("a"), make("b")
        chance = random.Random(5)
        values = [math.inf, -math.inf, 0.0, 5e-324, 1.7976931348623157e308]
        while len(values) < 400:
            made = struct.unpack("d", chance.randbytes(8))[0]
            values += [] if math.isnan(made) else [made, chance.random()]
        for node in (a, b):
            if by == "events":
                node.install()
        for key, value in enumerate(values):
            a.sql("insert into orders (id, amount) values (?, ?)", key, value)
        if by == "snapshot":
            for node in (a, b):
                node.install()
        assert b.meet(a).snapshots == (1 if by == "snapshot" else 0)
        assert [row[0] for row in b.sql("select amount from orders order by id")] == values
        assert a.replica.diff(Direct("a", b.replica), "orders") == ([], True)

    def test_a_column_is_added_on_both_sides(self, make: Make) -> None:
        """GIVEN events from before a column was replicated WHEN it is on both sides THEN a late peer takes a snapshot,
        another process that has the store open knows the column, and changes go on."""
        a, b, late = (make(name) for name in ("a", "b", "late"))
        for node in (a, b):
            node.install(columns=["id", "what"])
        a.put(1, "before")
        a.meet(b)
        a.put(2, "not sent yet")
        assert a.store.left_out("orders") == ["amount", "ok", "raw"]
        for node in (a, b, late):
            node.install(columns=["id", "what", "amount"])
        a.sql("update orders set amount = 2.5 where id = 1")
        assert b.meet(a).snapshots == 1 and late.meet(a).snapshots == 1
        assert a.rows() == b.rows() == late.rows() == [("1", "before", "2.5"), ("2", "not sent yet", None)]
        a.put(3, "after")
        assert b.meet(a).taken == 1

    def test_a_form_that_another_process_changed_is_seen(self, node: ReplicaNode) -> None:
        """GIVEN a node that has read its tables WHEN another process changes their forms THEN it knows at once."""
        assert "raw" in node.store.tables()["orders"].columns
        form = json.dumps({"columns": {"id": "integer", "what": "text"}, "key": ["id"]})
        node.sql("update replication_tables set form = ?", form)
        assert list(node.store.tables()["orders"].columns) == ["id", "what"]

    def test_tables_of_many_columns_are_replicated(self, make: Make) -> None:
        """GIVEN a table of 200 columns WHEN a row changes THEN the peer has all of them."""
        a, b = make("a"), make("b")
        columns = ", ".join(f"c{at} text" for at in range(199))
        for node in (a, b):
            node.sql(f"create table wide (id bigint primary key, {columns})")
            node.install("wide")
        a.sql("insert into wide (id, c0, c58, c59, c60, c198) values (1, '{', '}', '{}', '}{', ?)", '"}')
        b.meet(a)
        assert b.rows("wide") == a.rows("wide") and b.rows("wide")[0][59:62] == ("}", "{}", "}{")

    def test_a_key_that_is_equal_to_other_texts_is_refused(self, make: Make) -> None:
        """GIVEN a key whose equality is not that of its bytes WHEN it is to be replicated THEN that is refused."""
        node = make("a")
        kinds = ["", "text collate nocase"] if isinstance(node.store, SqliteStore) else ["char(10)"]
        for at, kind in enumerate(kinds):
            node.sql(f"create table odd{at} (id {kind} primary key, what text)")
            with pytest.raises(SetupError, match=f"odd{at}.id: keys that are equal"):
                node.install(f"odd{at}")

    def test_a_record_that_is_no_key_is_refused(self, node: ReplicaNode) -> None:
        """GIVEN a delete of a row that cannot be WHEN it comes from a peer THEN it is refused, whatever it says."""
        for record in ("abc", "007", "1|2", ""):
            with pytest.raises(FormatError, match="orders"):
                node.store.tables()["orders"].checked_record(record)
        assert node.store.tables()["orders"].checked_record("-7") == "-7"

    def test_keys_of_several_columns_are_replicated(self, make: Make) -> None:
        """GIVEN a key of two columns, with separators in them WHEN rows change THEN both nodes have the same."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.sql("create table parts (one text, two bigint, n bigint, primary key (one, two))")
            node.install("parts")
        for one in ("x|", "x", "\\|", ""):
            a.sql("insert into parts values (?, 1, 2)", one)
        a.sql("update parts set n = 3 where one = 'x|'")
        a.sql("delete from parts where one = 'x'")
        b.meet(a)
        assert sorted(b.sql("select * from parts")) == [("", 1, 2), ("\\|", 1, 2), ("x|", 1, 3)]
        assert a.replica.diff(Direct("a", b.replica), "parts") == ([], True)

    def test_what_was_made_before_a_node_joins_comes_after_what_is_there(self, make: Make) -> None:
        """GIVEN changes made over a day before a node joins WHEN it joins THEN they are newer than the others' clock,
        in their order, and not in the future."""
        node = make("a")
        node.install()
        day = 86_400_000
        for number, ago in enumerate((day, day // 2, 0), 1):
            node.put(number, "x")
            reading = clock.at_ms(node.now_ms() - ago)
            for kind in ("Events", "Versions"):
                node.sql(f'update "orders_{kind}" set hlc = ? where origin_seq = ?', reading, number)
        theirs = clock.at_ms(node.now_ms() - 1000)
        node.store.join({"orders": theirs})
        readings = [event.version.hlc for event in node.events()]
        assert theirs < readings[0] < readings[1] < readings[2] <= clock.at_ms(node.now_ms())
        with node.store.snapshot("orders", 10) as (_, lists):
            assert sorted(reading for rows in lists for reading in rows["hlc"].to_pylist()) == readings

    def test_a_node_that_has_met_nobody_gives_nothing(self, make: Make) -> None:
        """GIVEN a node that has not joined WHEN asked for events THEN it refuses: they may get other versions yet."""
        node = make("a")
        node.install()
        with pytest.raises(BusyError, match="hello"):
            node.replica.answer_pull("b", "orders", "b.000000000001bbbbbbbb", {}, 5)
