"""What every store of replicated tables promises, shown by nodes that meet in one process."""

from __future__ import annotations

import json
import uuid
from collections.abc import Sequence
from dataclasses import replace

import pytest

from evermark.errors import (
    BusyError,
    ConflictError,
    FormatError,
    NotFoundError,
    SetupError,
)
from evermark.replicas import clock, stored_events
from evermark.replicas.diff import differences
from evermark.replicas.event import Event, Operation, Version
from evermark.replicas.exchange import PROTOCOL_BY_TIME
from evermark.replicas.local_node import DAY_MS
from evermark.replicas.members import Said
from evermark.replicas.paging import Stretch
from evermark.replicas.ranges import Held, Ranges, union
from evermark.replicas.sqlite import SqliteStore
from evermark.replicas.values import VALUE_CHARS_MAX
from evermark.testing.contracts.replica_scene import (
    FAR,
    NO_RETENTION,
    Direct,
    Make,
    ReplicaNode,
    event_by,
)
from evermark.testing.contracts.replica_snapshots import ReplicaSnapshotsContract
from evermark.testing.contracts.replica_values import ReplicaValuesContract


class ReplicaStoreContract(ReplicaSnapshotsContract, ReplicaValuesContract):
    """All of it; beside what it inherits, of changes and meetings."""

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

    def test_r1_an_origin_has_each_number_once(self, node: ReplicaNode) -> None:
        """GIVEN two events of an origin WHEN somebody gives both one number THEN the database refuses it."""
        node.put(1, "x")
        node.put(2, "y")
        with pytest.raises(Exception, match=r"(?i)unique"):
            node.sql('update "orders_Events" set origin_seq = 1 where origin_seq = 2')
        assert [event.version.seq for event in node.events()] == [1, 2]

    def test_ids_are_in_the_order_of_time(self, node: ReplicaNode) -> None:
        """GIVEN a change THEN its event's id begins with when it was: in a long history it stands beside the last."""
        node.put(1, "new")
        (event,) = node.events()
        found = uuid.UUID(event.id)
        assert found.version == 7 and found.int >> 80 == event.timestamp

    def test_r2_numbers_go_on_after_a_restart_and_a_new_origin_begins_anew(self, node: ReplicaNode) -> None:
        """GIVEN numbers in replication_meta WHEN the node takes another origin THEN its events begin at 1 again."""
        node.put(1, "x")
        node.store.set_token("left here")
        old = node.store.identity()[0]
        key = node.sql("select value from replication_meta where key like 'origin_seq::%::orders'")
        assert [int(value) for (value,) in key] == [1]
        node.store.renew(node.replica.node.fresh_origin())
        node.put(2, "y")
        assert [event.version.seq for event in node.events()] == [1]
        assert node.store.said().held["orders"] == {
            old: Ranges.through(1),
            node.store.identity()[0]: Ranges.through(1),
        }

    def test_r2_a_hello_says_nothing_that_is_not_noted(
        self, node: ReplicaNode, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """GIVEN a user who writes just before a hello is put together THEN a token was left with all that it says."""
        node.replica.greetings.hello()
        said = node.store.said

        def late() -> Said:
            node.put(1, "just now")
            return said()

        monkeypatch.setattr(node.store, "said", late)
        held = node.replica.greetings.hello().said.held["orders"][node.store.identity()[0]]
        assert node.store.noted("orders") >= held.highest > 0

    @pytest.mark.parametrize("way", ["pull", "pull_since", "snapshot", "push"])
    def test_r2_a_token_is_left_before_a_number_is_told(self, make: Make, way: str) -> None:
        """GIVEN a change that was made after the last hello WHEN a peer hears of it in any way THEN its number was
        noted with a token before."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        b.meet(a)
        a.meet(b)
        a.put(1, "x")
        assert a.store.noted("orders") == 0
        asked = ("b", "orders", b.store.identity()[0])
        noted = []

        class Told(Direct):
            def push(self, table: str, origin: str, events: Sequence[Event]) -> Held:
                noted.append(a.store.noted("orders"))
                return super().push(table, origin, events)

        match way:
            case "pull":
                a.replica.answers.pull(*asked, {}, 10)
            case "pull_since":
                a.replica.answers.pull_since("orders", 0, "00000000-0000-0000-0000-000000000000", 10)
            case "snapshot":
                a.replica.answers.snapshot("orders")
            case "push":
                assert a.replica.meetings.push(Told("a", b.replica)).pushed == 1
        assert (noted or [a.store.noted("orders")]) == [1]

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
        backup.store.renew(backup.replica.node.fresh_origin(), is_noted=is_noted)
        backup.meet(b)
        assert [row[1] for row in backup.rows()] == ["kept", "lost here", "after the restore", "and one more"]
        assert backup.rows() == b.rows()
        assert differences(backup.replica.node, Direct("a", b.replica), "orders") == ([], True)

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
        page = a.replica.answers.pull("b", "orders", b.store.identity()[0], held, 50)
        assert [event.version.seq for event in page.events] == list(range(21, 71)) and page.coverage.more
        assert page.coverage.covered == {a.store.identity()[0]: Ranges(((21, 70),))}
        much = a.replica.answers.pull("b", "orders", b.store.identity()[0], held, 10_000)
        assert len(much.events) == 50, "the answerer has a limit of its own"
        found = b.meet(a)
        assert (found.taken, found.duplicates) == (100, 0)
        assert b.meet(a).taken == 0

    def test_r5_a_page_has_so_many_bytes_at_most_or_one_event(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """GIVEN rows of 400 bytes, one that is longer than a page may be, and pages of 2 000 bytes THEN a page has
        three of the former, or the long one alone, says what it covers, and all rows come."""
        monkeypatch.setattr(stored_events, "_PAGE_CHARS", 2000)
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        b.meet(a)
        for key in range(8):
            a.put(key, "x" * (5000 if key == 3 else 400))
        asked = ("b", "orders", b.store.identity()[0])
        sizes, held = [], b.store.held("orders")
        while (page := a.replica.answers.pull(*asked, held, 50)).events:
            sizes.append(len(page.events))
            held = union(held, page.coverage.covered)
        assert sizes == [3, 1, 3, 1]
        assert b.meet(a).taken == 8 and b.rows() == a.rows()

    def test_r5_what_the_answerer_lacks_itself_is_said(self, node: ReplicaNode) -> None:
        """GIVEN a node that misses events WHEN asked THEN "I lack these" is told apart from "there are none"."""
        origin = "z.000000000001aaaaaaaa"
        events = [event_by(origin, seq, seq, "x", seq) for seq in (1, 4)]
        node.store.ingest("orders", events, node.now_ms(), 1000)
        page = node.replica.answers.pull("b", "orders", "b.000000000001bbbbbbbb", {}, 50)
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
            a.replica.upkeep.evict(["b"])
            a.replica.upkeep.collect()
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
        assert differences(a.replica.node, Direct("a", b.replica), "bad") == ([], True)
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

    def test_r7_a_hello_moves_the_clock_that_is_behind(self, make: Make) -> None:
        """GIVEN a peer that was met before and whose clock is minutes ahead WHEN it says hello THEN what is written
        here later is newer than all that it had then."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        b.meet(a)
        reading = clock.at_ms(b.now_ms() + 240_000)
        b.store.raise_clocks({"orders": reading})
        a.replica.answers.hello("b", b.replica.greetings.hello())
        a.put(1, "x")
        assert a.events()[0].version.hlc > reading

    def test_r2_a_number_of_ours_that_we_never_gave_is_not_taken_from_a_peer(self, node: ReplicaNode) -> None:
        """GIVEN an event under this node's own origin that it has not made WHEN a peer pushes it THEN it is refused:
        this database was restored, and must go on under another origin first."""
        own = node.store.identity()[0]
        with pytest.raises(ConflictError, match="own origin"):
            node.replica.answers.push("b", "orders", "b.000000000001aaaaaaaa", [event_by(own, 1, 1, "x", 70)])
        assert node.rows() == []

    def test_r2_a_younger_node_of_the_same_name_is_noticed(self, make: Make) -> None:
        """GIVEN a peer that has heard of a node with our name that was born after us WHEN it says hello THEN that is an
        error: one of the two is a copy."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        hello = b.replica.greetings.hello()
        copy = Said("a.ffffffffffff00000000", 1, {}, {})
        with pytest.raises(ConflictError, match="calls itself a"):
            a.replica.answers.hello("b", replace(hello, members={"a": copy}))

    @pytest.mark.parametrize("is_first", [True, False], ids=["at the first meeting", "later"])
    def test_r7_a_hello_with_a_clock_in_the_far_future_moves_no_clock(self, make: Make, is_first: bool) -> None:
        """GIVEN a peer whose clock is days ahead WHEN it says hello THEN ours stays: what is written here later would
        be quarantined everywhere."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        if not is_first:
            b.meet(a)
        b.store.raise_clocks({"orders": clock.at_ms(b.now_ms() + 2 * DAY_MS)})
        a.replica.answers.hello("b", b.replica.greetings.hello())
        a.put(1, "x")
        assert not clock.is_ahead(a.events()[0].version.hlc, a.now_ms(), FAR.skew_ms)

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
            node.replica.answers.pull("b", "orders", "b.000000000001bbbbbbbb", {}, 5)
