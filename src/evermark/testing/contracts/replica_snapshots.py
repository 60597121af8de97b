"""What every store of replicated tables promises of collection, snapshots, other programs' tables, and digests."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from evermark.errors import (
    BusyError,
    DeniedError,
    EvermarkError,
    FormatError,
    SetupError,
    UnreachableError,
)
from evermark.replicas import clock
from evermark.replicas.base import Cut
from evermark.replicas.columns import live_rows
from evermark.replicas.diff import differences
from evermark.replicas.event import Event
from evermark.replicas.exchange import PROTOCOL_BY_TIME, Evicted, Hello, Manifest, Page
from evermark.replicas.local_node import Limits
from evermark.replicas.paging import Coverage, SnapshotRequired
from evermark.replicas.ranges import Held, Ranges
from evermark.testing.contracts.replica_scene import (
    FAR,
    NO_RETENTION,
    Direct,
    Make,
    ReplicaContract,
    ReplicaNode,
    event_by,
)


class ReplicaSnapshotsContract(ReplicaContract):
    def test_r9_nothing_is_collected_that_a_member_lacks_or_that_is_young(self, make: Make) -> None:
        """GIVEN members that lack events, or were never met WHEN collecting THEN only what all have, and old, goes."""
        a, b, c = (make(name) for name in "abc")
        for node in (a, b, c):
            node.install()
            node.limit(NO_RETENTION)
        a.replica.upkeep.add_member("c")
        for key in range(10):
            a.put(key, "x")
        b.meet(a)
        assert a.replica.upkeep.collect()["orders"].events == 0, "c was never met"
        assert a.replica.upkeep.floors("orders").holding == ("c",)
        c.meet(a)
        for key in range(10, 15):
            a.put(key, "later")
        b.meet(a)
        a.limit(FAR)
        assert a.replica.upkeep.collect()["orders"].events == 0, "young"
        a.limit(NO_RETENTION)
        assert a.replica.upkeep.collect()["orders"].events == 10, "c lacks five"
        c.meet(a)
        assert a.replica.upkeep.collect()["orders"].events == 5
        assert a.store.floors("orders") == {a.store.identity()[0]: 15}

    def test_r9_events_stay_for_the_retention_of_their_table_and_the_safety_window(self, make: Make) -> None:
        """GIVEN an event that nobody lacks WHEN it is as old as the retention, the table's own if it has one, and the
        safety window THEN it stays, and a millisecond later it goes."""
        node = make("a")
        node.install()
        node.put(1, "x")
        made_ms = node.events()[0].timestamp

        def collected(limits: Limits, age_ms: int) -> int:
            node.limit(limits)
            node.now_ms = lambda: made_ms + age_ms
            return node.replica.upkeep.collect()["orders"].events

        limits = Limits(retention_ms=10_000, safety_ms=5_000)
        of_the_table = replace(limits, retention_by_table_ms={"orders": 20_000})
        assert collected(limits, 15_000) == 0
        assert collected(of_the_table, 25_000) == 0
        assert collected(of_the_table, 25_001) == 1
        node.put(2, "y")
        made_ms = node.events()[-1].timestamp
        assert collected(limits, 15_001) == 1

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
        b.replica.answers.hello("c", c.replica.greetings.hello())
        a.meet(b)
        assert a.replica.upkeep.collect()["orders"].tombstones == 0
        for here, there in ((c, b), (b, a), (c, b), (b, a)):
            here.meet(there)
        assert a.rows() == b.rows() == c.rows() == []
        assert a.replica.upkeep.collect()["orders"].tombstones == 1

    def test_r9_a_tombstone_stays_as_long_as_the_event_of_the_delete(self, node: ReplicaNode) -> None:
        """GIVEN a delete below which nothing can arrive any more, whose event a member lacks WHEN collecting THEN the
        tombstone stays until the event goes."""
        node.put(1, "x")
        node.sql("delete from orders where id = 1")
        own, reading = node.store.identity()[0], node.store.clocks()["orders"]
        for floor, expected in ((1, (1, 0)), (2, (1, 1))):
            done = node.store.collect("orders", {own: floor}, reading, node.now_ms() + 1000, 10)
            assert (done.events, done.tombstones) == expected

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
        assert b.replica.upkeep.evict() == {old} and a.replica.upkeep.collect()["orders"].events == 0, (
            "b has to know it"
        )
        a.meet(b)
        b.meet(a)
        assert a.replica.upkeep.collect()["orders"].events == 3
        found = c.meet(a)
        assert found.snapshots == 1 and c.store.identity()[0] != old
        for here, there in ((b, a), (c, b), (a, c)):
            here.meet(there)
        assert a.rows() == b.rows() == c.rows()
        assert [row[1] for row in a.rows()] == ["stays", "only c has it"]

    def test_r9_who_hears_half_of_all_or_less_evicts_nobody(self, make: Make) -> None:
        """GIVEN a cluster of four of which two were silent for too long WHEN a node that hears one other looks THEN it
        gives up nobody: it may be itself that is cut off. When it hears two, it gives up the third."""
        a, *others = (make(name) for name in "abcd")
        for node in (a, *others):
            node.install()
        a.limit(Limits(dead_ms=60_000))
        later = a.now_ms() + 120_000
        for node in others:
            node.meet(a)
        a.now_ms = lambda: later
        b, c, d = others
        b.meet(a)
        assert a.replica.upkeep.evict() == frozenset()
        c.meet(a)
        assert a.replica.upkeep.evict() == {d.store.identity()[0]}

    def test_r9_a_node_that_was_evicted_is_given_nothing_and_nothing_is_taken_from_it(self, make: Make) -> None:
        """GIVEN a node that another has evicted WHEN it asks for events or pushes some under its old origin, without a
        hello THEN it is told so: what the others hold of it is final."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        b.meet(a)
        b.put(1, "late")
        a.replica.upkeep.evict(["b"])
        origin = b.store.identity()[0]
        for ask in (
            lambda: a.replica.answers.pull("b", "orders", origin, {}, 10),
            lambda: a.replica.answers.push("b", "orders", origin, b.events()),
        ):
            with pytest.raises(Evicted):
                ask()
        assert a.rows() == []

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
        assert a.replica.upkeep.collect()["orders"].events == 9
        with pytest.raises(SnapshotRequired, match="snapshot required"):
            a.replica.answers.pull("late", "orders", late.store.identity()[0], {}, 50)
        assert late.meet(a).snapshots == 1
        assert late.rows() == a.rows() and len(late.rows()) == 7

    def test_r10_events_that_were_deleted_by_hand_count_as_collected_when_somebody_says_so(self, make: Make) -> None:
        """GIVEN events of a node's own and of another origin that somebody deleted, a delete among them WHEN a peer
        asks for them THEN the error names the command; after it who lacks them takes a snapshot, who has them does
        not, and what is not lost still comes as events."""
        a, b, c = (make(name) for name in "abc")
        for node in (a, b, c):
            node.install()
        own, other = (node.store.identity()[0] for node in (a, b))
        for key in range(4):
            a.put(key, "x")
            b.put(100 + key, "y")
        b.meet(a)
        c.meet(a)
        for key in range(4, 8):
            a.put(key, "later")
            b.put(100 + key, "later")
        a.sql("delete from orders where id = 1")
        b.meet(a)
        a.put(1000, "last")
        assert not a.replica.upkeep.count_as_collected("orders").floors, "nothing is lost"
        for origin, seqs in ((own, (6, 9)), (other, (8,))):
            for seq in seqs:
                a.sql('delete from "orders_Events" where origin_node_id = ? and origin_seq = ?', origin, seq)
        with pytest.raises(FormatError, match="lacks events") as refused:
            c.meet(a)
        assert "evermark replica gc --as-collected orders" in refused.value.hint
        assert a.replica.upkeep.count_as_collected("orders").floors == {own: 9, other: 8}
        assert a.store.floors("orders") == {own: 9, other: 8}
        assert a.sql('select origin_seq from "orders_Events"') == [(10,)]
        assert b.meet(a).snapshots == 0, "it lacks the last alone"
        assert c.meet(a).snapshots == 1
        assert a.rows() == b.rows() == c.rows()
        assert {row[0] for row in c.rows()} == {*"0234567", *map(str, range(100, 108)), "1000"}
        a.put(1001, "after")
        assert (c.meet(a).snapshots, c.rows()) == (0, a.rows())

    def test_r11_a_snapshot_and_the_events_after_it_are_the_full_history(self, make: Make) -> None:
        """GIVEN changes before and after a cut WHEN one node takes all events, another the snapshot and what followed
        THEN both have the same rows; a staged chunk is not asked for twice."""
        a, full, short = (make(name) for name in ("a", "whole", "short"))
        for node in (a, full, short):
            node.install()
        for key in range(10):
            a.put(key, "before")
        a.sql("delete from orders where id = 3")
        a.replica.answers.hello("short", short.replica.greetings.hello())
        manifest = a.replica.answers.snapshot("orders")
        a.put(1, "after")
        a.sql("delete from orders where id = 4")
        a.put(3, "again")
        spec, kept = short.store.tables()["orders"], short.snapshots
        assert kept.missing("a", manifest) == list(range(len(manifest.chunks)))
        for number in range(len(manifest.chunks)):
            kept.take("a", manifest, number, a.replica.answers.chunk(manifest.id, number))
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
            b.replica.meetings.sync(peer)
        assert b.rows() == []
        assert b.replica.meetings.sync(peer).snapshots == 1
        assert b.rows() == a.rows() and len(b.rows()) == 10
        assert peer.chunks[:3] == [0, 1, -1]
        assert peer.chunks[3:] == list(range(2, 2 + len(peer.chunks[3:]))), "each once, and the first two no more"

    def test_r11_one_snapshot_of_a_table_is_made_at_a_time(self, node: ReplicaNode) -> None:
        """GIVEN a snapshot that is being made WHEN another is asked for THEN it has to wait; later it gets it."""
        node.put(1, "x")
        with node.snapshots._making("orders"), pytest.raises(BusyError, match="being made"):
            node.replica.answers.snapshot("orders")
        assert node.replica.answers.snapshot("orders").chunks

    def test_r11_a_snapshot_that_another_version_left_is_made_anew(self, node: ReplicaNode) -> None:
        """GIVEN a snapshot of another format in the folder WHEN one is asked for THEN it is made, and the other is
        gone."""
        node.put(1, "x")
        old = node.replica.answers.snapshot("orders")
        (manifest,) = node.snapshots.folder.glob("*/manifest.json")
        manifest.write_text(json.dumps(old.as_json() | {"format": 1}))
        assert node.snapshots.list() == []
        new = node.replica.answers.snapshot("orders")
        assert new.id != old.id and node.snapshots.list() == [new] and not manifest.exists()

    def test_r11_a_snapshot_stays_usable_after_numbers_were_given_up(self, node: ReplicaNode) -> None:
        """GIVEN numbers that were given up and collected WHEN a snapshot is asked for twice THEN it is made once."""
        node.put(1, "x")
        other = "b.000000000001bbbbbbbb"
        reading = node.store.said().clocks["orders"]
        made = [event_by(other, seq, seq, "y", reading + seq) for seq in (1, 2, 5)]
        node.store.ingest("orders", made, node.now_ms(), 60_000)
        assert node.replica.upkeep.give_up("orders", other, Ranges.through(10)) == Ranges(((3, 4),))
        node.store.collect("orders", {other: 5}, 0, node.now_ms() + 60_000, 100)
        first = node.replica.answers.snapshot("orders")
        assert node.store.floors("orders")[other] == 5
        assert node.replica.answers.snapshot("orders") == first

    def test_r11_a_chunk_that_is_damaged_after_it_was_taken_is_taken_again(self, make: Make) -> None:
        """GIVEN a chunk that was set aside, and damaged on the disk WHEN the nodes meet THEN it is taken again, and all
        rows are there."""
        a, b = make("a"), make("b")
        for key in range(10):
            a.put(key, f"row {key}")
        a.install()
        b.install()
        a.replica.answers.hello("b", b.replica.greetings.hello())
        manifest = a.replica.answers.snapshot("orders")
        b.snapshots.missing("a", manifest)
        b.snapshots.take("a", manifest, 1, a.replica.answers.chunk(manifest.id, 1))
        (taken,) = b.snapshots.folder.glob(".taken.*/*.parquet")
        taken.write_bytes(taken.read_bytes()[:-1] + b"?")
        assert b.meet(a).snapshots == 1
        assert b.rows() == a.rows() and len(b.rows()) == 10

    def test_r11_a_damaged_chunk_is_refused(self, make: Make) -> None:
        """GIVEN a chunk with one byte changed WHEN decoded THEN it is refused."""
        from evermark.replicas.snapshots import decoded

        a = make("a")
        a.install()
        a.store.join({})
        a.put(1, "x")
        manifest = a.replica.answers.snapshot("orders")
        data = bytearray(a.replica.answers.chunk(manifest.id, 0))
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

    def test_r7_a_snapshot_from_the_future_is_refused_until_its_time_has_come(self, make: Make) -> None:
        """GIVEN a peer whose versions were made when its clock was a year ahead WHEN a node would take its snapshot
        THEN it takes nothing of it and says whose it is, and its own clock stays right; a year later it takes it."""
        a, b = make("a"), make("b")
        year_ms, right = 365 * 86_400_000, a.now_ms
        a.put(1, "of the future")
        a.now_ms = lambda: right() + year_ms
        a.install()
        a.now_ms = right
        b.install()
        before = b.store.clocks()
        with pytest.raises(SetupError, match="the clock of a's snapshot is 31"):
            b.meet(a)
        assert b.rows() == [] and b.store.clocks() == before
        b.now_ms = lambda: right() + year_ms
        assert b.meet(a).snapshots == 1 and len(b.rows()) == 1

    @pytest.mark.parametrize("others", [False, True], ids=["an empty table", "a table with another row"])
    def test_r7_a_row_that_is_newer_than_its_snapshot_is_refused(self, node: ReplicaNode, others: bool) -> None:
        """GIVEN a snapshot with a row beyond its own clock THEN nothing of it is taken; at its clock it is."""
        other = "z.000000000001aaaaaaaa"
        if others:
            node.put(9, "ours")
        before = node.rows(), node.store.clocks(), node.store.held("orders")
        found = live_rows(node.store.tables()["orders"], [(7, other, 1, 1, "theirs", None, None, None)], "a test")
        with pytest.raises(FormatError, match="newer than its clock"):
            node.store.merge("orders", Cut({other: Ranges.of([1])}, 6), lambda: iter([found]), 0)
        assert (node.rows(), node.store.clocks(), node.store.held("orders")) == before
        node.store.merge("orders", Cut({other: Ranges.of([1])}, 7), lambda: iter([found]), 0)
        assert "1" in [row[0] for row in node.rows()]

    def test_r7_what_came_by_a_snapshot_after_all_is_no_longer_named_as_left_out(self, node: ReplicaNode) -> None:
        """GIVEN events that were left out because of their clocks WHEN a snapshot has some of them THEN the others
        alone are named."""
        other, ahead = "z.000000000001aaaaaaaa", clock.at_ms(node.now_ms() + 600_000)
        made = [event_by(other, seq, seq, "x", ahead + seq) for seq in (1, 2, 3)]
        assert len(node.store.ingest("orders", made, node.now_ms(), 60_000).quarantined) == 3
        rows = [(ahead + seq, other, seq, seq, "x", None, None, None) for seq in (1, 2)]
        found = live_rows(node.store.tables()["orders"], rows, "a test")
        node.store.merge("orders", Cut({other: Ranges.through(2)}, ahead + 3), lambda: iter([found]), node.now_ms())
        assert [each.seq for each in node.store.quarantined()] == [3]

    @pytest.mark.parametrize("others", [False, True], ids=["an empty table", "a table with another row"])
    def test_r11_a_merge_brings_back_no_row_whose_tombstone_is_collected(self, node: ReplicaNode, others: bool) -> None:
        """GIVEN a row that was deleted, and of which nothing is left WHEN a snapshot from before the delete is merged
        THEN the row stays away, and rows that were never here come; a newer version of the deleted one comes, too."""
        other, later = "z.000000000001aaaaaaaa", clock.at_ms(2)
        made = [event_by(other, 1, 1, "x", 5), event_by(other, 2, 1, None, 6)]
        node.store.ingest("orders", made, node.now_ms(), 60_000)
        if others:
            node.put(9, "ours")
        done = node.store.collect("orders", {other: 2}, later, node.now_ms() + 60_000, 100)
        assert (done.events, done.tombstones) == (2, 1)
        spec = node.store.tables()["orders"]

        def merge(known: int, *rows: tuple[int, int, int]) -> None:
            found = [(reading, other, seq, key, "theirs", None, None, None) for reading, seq, key in rows]
            piece = live_rows(spec, found, "a test")
            node.store.merge("orders", Cut({other: Ranges.of([1, 3, known])}, 9), lambda: iter([piece]), node.now_ms())

        merge(3, (5, 1, 1), (7, 3, 2))
        expected = ["2", "9"] if others else ["2"]
        assert [each[0] for each in node.rows()] == expected
        merge(4, (8, 4, 1), (7, 3, 2))
        assert [each[0] for each in node.rows()] == ["1", *expected]

    def test_r9_what_was_deleted_under_an_origin_that_was_given_up_is_as_others_have_it(
        self, node: ReplicaNode
    ) -> None:
        """GIVEN a row that was deleted, and of which nothing is left, under an origin that others gave up before they
        knew of the delete WHEN a snapshot of theirs is merged THEN the row is there again: theirs is final."""
        node.put(1, "x")
        node.sql("delete from orders where id = 1")
        old = node.store.identity()[0]
        node.store.collect("orders", {old: 2}, node.store.clocks()["orders"], node.now_ms() + 60_000, 100)
        node.store.evict_self(node.replica.node.fresh_origin(old))
        row = live_rows(node.store.tables()["orders"], [(5, old, 1, 1, "theirs", None, None, None)], "a test")
        node.store.merge("orders", Cut({old: Ranges.of([1])}, 9), lambda: iter([row]), node.now_ms())
        assert [each[0] for each in node.rows()] == ["1"]

    def test_r11_what_is_known_after_a_merge_is_what_its_maker_knew(self, node: ReplicaNode) -> None:
        """GIVEN a snapshot whose maker's clock was ahead WHEN it was merged THEN a change made here is newer than its
        rows, and who asks for the events that it stands for is told to take a snapshot, too."""
        other, reading = "z.000000000001aaaaaaaa", clock.at_ms(node.now_ms() + 240_000)
        found = live_rows(node.store.tables()["orders"], [(reading, other, 3, 1, "there", None, None, None)], "a test")
        node.store.merge("orders", Cut({other: Ranges.through(3)}, reading + 7), lambda: iter([found]), node.now_ms())
        node.put(1, "here")
        assert node.events()[0].version.hlc > reading + 7
        assert node.store.floors("orders") == {other: 3}
        with pytest.raises(SnapshotRequired):
            node.replica.answers.pull("b", "orders", "b.000000000001aaaaaaaa", {}, 10)

    def test_r11_a_snapshot_is_given_again_while_it_has_what_is_needed(self, node: ReplicaNode) -> None:
        """GIVEN a young snapshot WHEN it is asked for THEN it is given again, but not to who wants later events in it,
        and not when events after it were collected: who takes it would need another at once."""
        node.limit(NO_RETENTION)
        node.put(1, "x")
        own, ask = node.store.identity()[0], node.replica.answers.snapshot
        first = ask("orders")
        node.put(2, "y")
        assert ask("orders").id == first.id
        assert ask("orders", {own: Ranges.through(1)}).id == first.id
        second = ask("orders", {own: Ranges.through(2)})
        assert second.id != first.id and second.held == {own: Ranges.through(2)}
        node.put(3, "z")
        assert node.store.collect("orders", {own: 3}, 0, node.now_ms() + 1000, 10).events == 3
        third = ask("orders")
        assert third.id != second.id and third.held == {own: Ranges.through(3)}

    def test_r11_a_snapshot_that_took_long_to_make_is_given_to_who_asks_again(
        self, node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """GIVEN a snapshot that took longer to make than an asker waits WHEN it is asked for again, however late THEN
        it is given; once more as long as it is young, by the time when it was finished; and then another is made."""
        node.put(1, "x")
        ask, right, passed_ms = node.replica.answers.snapshot, node.now_ms, [0]
        node.now_ms = lambda: right() + passed_ms[0]
        make = node.snapshots.make

        def slow(*asked: Any) -> Manifest:
            made = make(*asked)
            passed_ms[0] += 3_600_000
            return made

        monkeypatch.setattr(node.snapshots, "make", slow)
        first = ask("orders")
        passed_ms[0] += 300_000
        assert ask("orders").id == first.id
        passed_ms[0] += 400_000
        second = ask("orders")
        assert second.id != first.id
        passed_ms[0] += 30 * 86_400_000
        assert ask("orders").id == second.id, "nobody has heard of it"
        assert ask("orders").id != second.id, "somebody has"

    @pytest.mark.parametrize(
        ("origin", "seq", "is_taken"),
        [
            ("m.000000000001bbbbbbbb", 1, True),
            ("m.000000000001aaaaaaaa", 6, True),
            ("m.000000000001aaaaaaaa", 4, False),
            ("l.000000000001aaaaaaaa", 9, False),
        ],
        ids=["a later origin", "a later number", "an earlier number", "an earlier origin"],
    )
    def test_r7_a_merge_decides_between_equal_clocks_as_events_do(
        self, node: ReplicaNode, origin: str, seq: int, is_taken: bool
    ) -> None:
        """GIVEN a row with number 5 of an origin, and a snapshot with the row under the same reading of the clock THEN
        origin and number decide which of the two stays."""
        node.store.ingest("orders", [event_by("m.000000000001aaaaaaaa", 5, 1, "here", 70)], node.now_ms(), 1000)
        found = live_rows(node.store.tables()["orders"], [(70, origin, seq, 1, "there", None, None, None)], "a test")
        node.store.merge("orders", Cut({origin: Ranges.of([seq])}, 70), lambda: iter([found]), 0)
        assert [each[1] for each in node.rows()] == ["there" if is_taken else "here"]

    def test_r12_a_peer_speaks_in_its_own_name_alone(self, make: Make) -> None:
        """GIVEN a peer that was let in by its key WHEN it says or asks something as another node THEN it is refused."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        b.meet(a)
        hello = b.replica.greetings.hello()
        with pytest.raises(DeniedError, match="another node's name"):
            a.replica.answers.hello("c", hello)
        with pytest.raises(DeniedError, match="another node's name"):
            a.replica.answers.hello("b", replace(hello, members={"c": hello.said}))
        with pytest.raises(DeniedError, match="asks as"):
            a.replica.answers.pull("b", "orders", "c.000000000001cccccccc", {}, 5)
        with pytest.raises(DeniedError, match="asks as"):
            a.replica.answers.push("b", "orders", "c.000000000001cccccccc", [])

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

    def test_r8_a_table_that_is_not_alike_is_not_pushed_either(self, make: Make) -> None:
        """GIVEN a table whose column is a number with the peer, and a text here WHEN changes are pushed, before a
        meeting or after one THEN only those of the other table go there; one whose columns change here waits."""
        a, b = make("a"), make("b")
        for node, kind in ((a, "text"), (b, "numeric")):
            node.sql(f"create table prices (id bigint primary key, price {kind})")
            node.install("prices")
            node.install()
        a.put(1, "x")
        a.sql("insert into prices values (1, '007.50')")
        peer = Direct("a", b.replica)
        first = a.replica.meetings.push(peer)
        assert (first.pushed, list(first.skipped)) == (1, ["prices"])
        a.sql("insert into prices values (2, '1e3')")
        a.put(2, "y")
        assert a.replica.meetings.push(peer).pushed == 1
        assert b.rows("prices") == [] and len(b.rows()) == 2
        a.install("orders", ["id", "what"])
        a.put(3, "z")
        assert a.replica.meetings.push(peer).pushed == 0

    @pytest.mark.parametrize("way", ["nothing", "the same", "the same by time", "a snapshot"])
    def test_r8_a_peer_that_never_ends_ends_the_meeting(self, make: Make, way: str) -> None:
        """GIVEN a peer that says that there is more and gives nothing new, by number or by time, or that has a snapshot
        taken again and again THEN the meeting ends with an error, after two snapshots at most."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        b.put(1, "x")
        asked = []

        class Endless(Direct):
            def hello(self, hello: Hello) -> Hello:
                found = super().hello(hello)
                return replace(found, protocol=PROTOCOL_BY_TIME) if way == "the same by time" else found

            def pull(self, table: str, origin: str, held: Held, limit: int) -> Page:
                asked.append("events")
                assert len(asked) < 20
                if way == "a snapshot":
                    raise SnapshotRequired("again", hint="a test")
                page = super().pull(table, origin, {}, limit)
                return (
                    Page([], Coverage({}, {}, True))
                    if way == "nothing"
                    else replace(page, coverage=replace(page.coverage, more=True))
                )

            def pull_since(self, table: str, timestamp: int, event_id: str, limit: int) -> Sequence[Event]:
                asked.append("events")
                assert len(asked) < 20
                return super().pull_since(table, 0, "00000000-0000-0000-0000-000000000000", limit)

            def snapshot(self, table: str, native: str | None = None) -> Manifest:
                asked.append("snapshot")
                return super().snapshot(table, native)

        expected = BusyError if way == "a snapshot" else FormatError
        with pytest.raises(expected, match="in one meeting" if way == "a snapshot" else "nothing new"):
            a.replica.meetings.sync(Endless("a", b.replica))
        assert asked.count("snapshot") == (2 if way == "a snapshot" else 0)

    def test_what_nobody_foresaw_of_one_table_keeps_no_other_from_being_met(self, make: Make) -> None:
        """GIVEN a peer whose answer about one table ends in an error that nobody foresaw WHEN meeting THEN the other
        table is exchanged all the same, and the error names the first, and what it was."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.sql("create table zoo (id bigint primary key)")
            for table in ("orders", "zoo"):
                node.install(table)
        b.put(1, "x")
        b.sql("insert into zoo values (1)")

        class Odd(Direct):
            def pull(self, table: str, origin: str, held: Held, limit: int) -> Page:
                if table == "orders":
                    raise IndexError("unforeseen")
                return super().pull(table, origin, held, limit)

        with pytest.raises(EvermarkError, match="orders: IndexError unforeseen"):
            a.replica.meetings.sync(Odd("a", b.replica))
        assert a.rows("zoo") == [("1",)] and a.rows() == []

    def test_r14_digests_find_the_rows_that_differ_and_rows_without_capture(self, make: Make) -> None:
        """GIVEN a row changed behind the capture's back THEN digests name it; one that was put in is named as well."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        for key in range(300):
            a.put(key, f"row {key}")
        b.meet(a)
        assert differences(a.replica.node, Direct("a", b.replica), "orders") == ([], True)
        with b.store._writing():
            b.sql("update orders set what = 'other' where id = 77")
            b.sql("delete from orders where id = 123")
            b.sql("insert into orders (id, what) values (9999, 'smuggled')")
        found, whole = differences(a.replica.node, Direct("a", b.replica), "orders")
        assert whole and [(each.record_id, each.here, each.there) for each in found] == [
            ("123", True, False),
            ("77", True, True),
        ]
        assert b.store.uncaptured("orders", 10) == ["9999"]
