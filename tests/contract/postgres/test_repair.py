"""A lost slot, repaired (P6, P12): the gap is what the new slot does not give, and every step may be repeated."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest

from evermark.errors import BusyError, GapError, IdentityError, SetupError
from evermark.event import Seen
from evermark.sources.base import Limit, Slice
from evermark.sources.postgres.admin.install import install, uninstall
from evermark.sources.postgres.connect import connect
from evermark.sources.postgres.lsn import Position, lsn_text
from evermark.sources.postgres.read import xmin_floor
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.repair.gap import OutboxGap
from evermark.sources.postgres.repair.server import repair_of
from evermark.sources.postgres.repair.steps import OutboxRepair
from evermark.sources.postgres.slots import drop_slot, slot_named, spare_name, walsender
from evermark.testing.lost_slot import lose
from evermark.testing.servers import PostgresServer, postgres_server, system_binaries
from evermark.testing.until import until
from tests.contract.postgres.outbox_scene import Scene, emit, scene

KEPT = {"max_wal_size": "64MB", "wal_keep_size": "0"}


@pytest.fixture(scope="module", params=[None, *system_binaries()], ids=lambda b: f"pg{b.major}" if b else "bundled")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """Each Postgres at hand."""
    with postgres_server(tmp_path_factory.mktemp("mending"), KEPT, binaries=request.param) as found:
        yield found


@pytest.fixture
def at(server: PostgresServer) -> Iterator[Scene]:
    with scene(server) as found:
        yield found


def never() -> bool:
    return False


def in_gap(gap: OutboxGap) -> list[str]:
    return sorted(key for piece in gap.pieces for batch in gap.read(piece) for key in batch["key"].to_pylist())


def begun(repair: OutboxRepair, left_at: str | None = None) -> OutboxGap:
    gap = repair.begin(never, left_at)
    assert isinstance(gap, OutboxGap)
    return gap


def test_p6_gap_and_new_slot_share_the_events_and_no_event_is_in_both(server: PostgresServer, at: Scene) -> None:
    """GIVEN a lost slot and an open transaction WHEN a new slot is made THEN each event is in one of the two."""
    at.emit("s", "before")
    with at.connection() as long:
        emit(long, "s", "long")
        lose(server, at.target.slot)
        repair = repair_of(at.target)
        found: list[OutboxGap] = []
        making = threading.Thread(target=lambda: found.append(begun(repair)))
        making.start()
        # The new slot waits for the open transaction, and what is committed meanwhile is before its beginning.
        waits = "select 1 from pg_replication_slots where slot_name = %s and confirmed_flush_lsn is null"
        until(lambda: at.value(waits, spare_name(at.target.slot)), "the new slot waits")
        at.emit("s", "meanwhile")
        long.commit()
        making.join(30)
    gap = found[0]
    at.emit("s", "after")
    assert in_gap(gap) == ["before", "long", "meanwhile"]
    repair.finish(gap.position)
    at.source = PostgresOutbox(at.target)
    at.source.check({0: gap.position})
    assert [row["key"] for row in at.drain(gap.position)] == ["after"]


def test_p6_found_events_are_as_the_slot_would_have_given_them(server: PostgresServer, at: Scene) -> None:
    """GIVEN an event read from the slot WHEN it is found in a gap THEN all but place and flag is the same."""
    at.emit("billing", "invoice-7", '{"paid": true, "sum": 12345678901234567890.5, "who": "Zoë"}')
    at.db.execute("insert into pgstream.events (stream, op, key) values ('s', 'delete', null)")
    at.db.execute(
        "insert into pgstream.events (stream, op, key, created_at) values ('s', 'message', 'ever', 'infinity')"
    )
    streamed = at.drain()
    repair = repair_of(at.target)
    gap = begun(repair)
    rows = [row for piece in gap.pieces for batch in gap.read(piece) for row in batch.to_pylist()]
    by_id = {row["event_id"]: row for row in rows}
    assert by_id.keys() == {row["event_id"] for row in streamed}
    for row in streamed:
        same = {name: value for name, value in row.items() if name not in ("position", "flags")}
        assert {name: by_id[row["event_id"]][name] for name in same} == same
        assert by_id[row["event_id"]]["flags"] == ["recovered"]
    places = gap.positions(0, 3).to_pylist()
    assert places == sorted(places) and max(row["position"] for row in streamed) < places[0] < gap.position
    repair.close()


def test_p6_only_what_may_be_missing_is_looked_at(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN events that were confirmed WHEN a gap is opened THEN it begins after them, long transactions included."""
    monkeypatch.setattr(xmin_floor, "NOTE_EVERY_S", 0.0)
    monkeypatch.setattr("evermark.sources.postgres.read.pace.CONFIRM_EVERY_S", 0.0)
    monkeypatch.setattr("evermark.sources.postgres.read.pace.CONFIRM_BYTES", 0)
    position = at.source.earliest(0)
    with at.connection() as long:
        emit(long, "s", "long")
        for number in range(4):
            at.emit("s", f"confirmed {number}")
            position = at.source.latest({0: position}, Limit())[0]
            at.source.confirm(0, position)
        long.commit()
    at.emit("s", "young")
    repair = repair_of(at.target)
    # The long transaction holds the floor where it began: whatever began after it is looked at again, and dropped.
    assert set(in_gap(begun(repair, position))) >= {"long", "young"}

    def passed() -> bool:
        nonlocal position
        at.emit("s", "late")
        position = at.source.latest({0: position}, Limit())[0]
        at.source.confirm(0, position)
        return not {"long", "confirmed 0", "young"} & set(in_gap(begun(repair, position)))

    until(passed, "the floor has passed what was confirmed")
    at.emit("s", "youngest")
    assert "youngest" in in_gap(begun(repair, position))
    repair.close()


def test_a_log_that_lost_what_it_had_is_compared_with_all_events(at: Scene) -> None:
    """GIVEN a floor that has passed events WHEN the log ends before them, as a backup does, or a person has the source
    compared, since the log was lost, THEN all events are looked at; WHEN only the slot was lost THEN those since."""
    old, position = at.position(at.flush_lsn()), at.source.earliest(0)
    for key in ("first", "second"):
        at.emit("s", key)
        position = at.source.latest({0: position}, Limit())[0]
    at.db.execute("select pgstream.note_floor(slot, pg_snapshot_xmin(pg_current_snapshot())) from pgstream.readers")
    at.emit("s", "third")
    advance = "select pg_replication_slot_advance(%s, %s::pg_lsn)"
    at.db.execute(advance, (at.target.slot, lsn_text(Position.parse(position).lsn)))
    repair = repair_of(at.target)
    assert in_gap(begun(repair, position)) == ["third"]
    for left_at in (old, None):
        assert {"first", "second", "third"} <= set(in_gap(begun(repair, left_at)))
    repair.close()


def test_p6_each_step_may_be_done_again(server: PostgresServer, at: Scene) -> None:
    """GIVEN a crash after any step WHEN the step is done again THEN it ends where it would have ended."""
    at.emit("s", "before")
    first = repair_of(at.target)
    begun(first)
    first.close()  # as a crash does: the snapshot is gone, the spare slot stays
    repair = repair_of(at.target)
    gap = begun(repair)
    assert in_gap(gap) == ["before"]
    link = connect(at.target.dsn)
    drop_slot(link, at.target.slot)  # died between dropping the old slot and giving its name to the new one
    repair_of(at.target).finish(gap.position)
    repair_of(at.target).finish(gap.position)
    assert slot_named(link, spare_name(at.target.slot)) is None
    own = slot_named(link, at.target.slot)
    link.close()
    repair.close()
    assert own is not None and own.confirmed_lsn == Position.parse(gap.position).lsn
    PostgresOutbox(at.target).check({0: gap.position})
    if server.binaries.major >= 17:
        assert at.value("select failover from pg_replication_slots where slot_name = %s", at.target.slot) is True


def test_p6_a_new_slot_that_is_lost_too_is_said(server: PostgresServer, at: Scene) -> None:
    """GIVEN a closed gap WHEN its slot was lost meanwhile THEN finishing is refused, and nothing is dropped."""
    repair = repair_of(at.target)
    gap = begun(repair)
    repair.close()
    lose(server, spare_name(at.target.slot))
    with pytest.raises(GapError, match="lost too"):
        repair_of(at.target).finish(gap.position)


def test_p6_waiting_for_a_slot_ends_when_told_to_stop(at: Scene) -> None:
    """GIVEN an open transaction WHEN the pipeline stops THEN making a slot does not hold it up, and leaves none."""
    with at.connection() as long:
        emit(long, "s", "long")
        with pytest.raises(BusyError, match="told to stop"):
            repair_of(at.target).begin(lambda: True)
    link = connect(at.target.dsn)
    assert slot_named(link, spare_name(at.target.slot)) is None
    link.close()


@pytest.mark.parametrize("harm", ["drop publication {}", "alter publication {} set (publish = 'delete')"])
def test_p12_a_publication_changed_by_others_is_repaired_with_what_it_left_out(at: Scene, harm: str) -> None:
    """GIVEN a publication that others changed WHEN it is repaired THEN events written meanwhile are found."""
    position = at.source.earliest(0)
    at.db.execute(harm.format(at.target.publication).encode())
    at.emit("s", "unpublished")
    with pytest.raises(GapError):
        PostgresOutbox(at.target).check({0: position})
    repair = repair_of(at.target)
    gap = begun(repair)
    assert in_gap(gap) == ["unpublished"]
    repair.finish(gap.position)
    at.emit("s", "published")
    at.source = PostgresOutbox(at.target)
    at.source.check({0: gap.position})
    assert [row["key"] for row in at.drain(gap.position)] == ["published"]


def test_p11_a_copy_that_lacks_what_we_took_is_refused(at: Scene) -> None:
    """GIVEN the right identity and enough WAL WHEN the last event we took is not there THEN it is not our place."""
    at.emit("s", "one")
    (row,) = at.drain()
    end = at.position(at.flush_lsn())
    seen = Seen(row["event_id"], row["event_time"], row["event_time"])
    at.source.check({0: end}, {0: seen})
    with pytest.raises(IdentityError, match="does not have the last event"):
        at.source.check({0: end}, {0: replace(seen, event_id="00000000-0000-7000-8000-000000000000")})


def test_several_slots_share_the_events_by_key_and_each_is_repaired_alone(server: PostgresServer, at: Scene) -> None:
    """GIVEN three slots WHEN events are read THEN each is in one partition, a key always in the same."""
    target = replace(at.target, slot="shared", publication="shared", slots=3)
    if server.binaries.major < 15:
        with pytest.raises(SetupError, match="15"):
            install(target)
        return
    install(target)
    source = PostgresOutbox(target)
    assert list(source.partitions()) == [0, 1, 2]
    starts = {p: source.earliest(p) for p in source.partitions()}
    for number in range(60):
        at.emit("s", str(number % 20))
    at.db.execute("insert into pgstream.events (stream, op) values ('s', 'truncate')")
    end = at.position(at.flush_lsn())
    shares = {
        p: [row["key"] for batch in source.read(Slice(p, start, end)) for row in batch.to_pylist()]
        for p, start in starts.items()
    }
    together = sorted(str(key) for keys in shares.values() for key in keys)
    assert together == sorted([str(n % 20) for n in range(60)] + ["None", "marker"])
    assert not set(shares[0]) & set(shares[1]) and not set(shares[1]) & set(shares[2])
    repair = source.repair(1)
    gap = repair.begin(never)
    found = [key for piece in gap.pieces for batch in gap.read(piece) for key in batch["key"].to_pylist()]
    assert sorted(map(str, found)) == sorted(map(str, shares[1]))
    repair.close()
    with pytest.raises(SetupError, match="other slots"):
        install(replace(target, slots=2))
    source.close()
    uninstall(target)
    assert at.value("select count(*) from pg_replication_slots where slot_name like 'shared%%'") == 0
    assert at.value("select count(*) from pgstream.readers") == 1


def test_uninstall_takes_a_lost_slot_and_what_repairing_left(server: PostgresServer, at: Scene) -> None:
    """GIVEN a lost slot and a spare one WHEN the outbox is removed THEN nothing of ours is left, and no WAL is held."""
    repair = repair_of(at.target)
    begun(repair)
    repair.close()
    lose(server, at.target.slot)
    uninstall(at.target)
    assert at.value("select count(*) from pg_replication_slots where slot_name like %s", f"{at.target.slot}%") == 0
    assert at.value("select to_regnamespace('pgstream') is null") is True


def test_another_number_of_slots_is_no_loss_and_makes_nothing(server: PostgresServer, at: Scene) -> None:
    """GIVEN one slot WHEN the file says three THEN reading is refused as not set up, and repairing touches nothing."""
    changed = replace(at.target, slots=3)
    position = at.source.earliest(0)
    with pytest.raises(SetupError, match="not registered"):
        PostgresOutbox(changed).check({0: position})
    with pytest.raises(SetupError, match="not registered"):
        begun(repair_of(changed.parts()[0]))
    assert at.value("select count(*) from pg_publication") == 1
    assert at.value("select count(*) from pg_replication_slots where database = current_database()") == 1


def test_a_floor_of_another_server_hides_nothing(at: Scene) -> None:
    """GIVEN a floor that a dump brought along WHEN a gap is opened THEN it is not believed, and is replaced."""
    at.db.execute("update pgstream.readers set floor = '999999999', floor_system = 1")
    at.emit("s", "here")
    repair = repair_of(at.target)
    assert in_gap(begun(repair, at.source.earliest(0))) == ["here"]
    repair.close()
    at.db.execute("select pgstream.note_floor(slot, '3') from pgstream.readers")
    assert at.value("select floor::text from pgstream.readers") == "3"
    at.db.execute("select pgstream.note_floor(slot, '2') from pgstream.readers")
    assert at.value("select floor::text from pgstream.readers") == "3"


def test_a_reader_does_not_look_for_what_was_there_before_it(at: Scene) -> None:
    """GIVEN events from before a second reader was installed WHEN it loses its slot at once THEN they are not its."""
    at.emit("s", "before")
    second = replace(at.target, slot="second", publication="second")
    install(second)
    at.emit("s", "after")
    repair = repair_of(second)
    assert in_gap(begun(repair, PostgresOutbox(second).earliest(0))) == ["after"]
    repair.close()
    uninstall(second)


def test_p12_a_publication_changed_while_repairing_is_a_gap_again(at: Scene) -> None:
    """GIVEN a gap being closed WHEN the publication is changed meanwhile THEN that is seen, not taken as right."""
    repair = repair_of(at.target)
    gap = begun(repair)
    at.db.execute(f"alter publication {at.target.publication} set (publish = 'delete')".encode())
    repair.finish(gap.position)
    with pytest.raises(GapError, match="changed by somebody"):
        PostgresOutbox(at.target).check({0: gap.position})


def test_p11_nobodys_word_repairs_no_other_server(at: Scene) -> None:
    """GIVEN a checkpoint of another history WHEN nobody chose THEN no slot is made; at a person's word one is."""
    ahead = at.position(at.flush_lsn() + 2**40)
    repair = repair_of(at.target)
    with pytest.raises(IdentityError, match="behind our checkpoint"):
        repair.begin(never, ahead)
    link = connect(at.target.dsn)
    assert slot_named(link, repair.spare) is None
    begun(repair)
    assert slot_named(link, repair.spare) is not None
    # WHEN it is given up THEN nothing keeps WAL
    repair.abandon()
    assert slot_named(link, repair.spare) is None
    link.close()


def test_the_keeper_of_a_snapshot_is_not_ended_for_being_idle(at: Scene) -> None:
    """GIVEN a database that ends idle transactions WHEN a snapshot is kept THEN its connection is spared."""
    database = at.db.info.dbname
    at.db.execute(f'alter database "{database}" set idle_in_transaction_session_timeout = 1000'.encode())
    keeper = walsender(at.target)
    assert keeper.execute("show idle_in_transaction_session_timeout").fetchone() == ("0",)
    keeper.close()


def test_p6_a_slot_whose_maker_died_while_it_waited_is_replaced(at: Scene) -> None:
    """GIVEN a slot whose maker died while making it WHEN it is repaired again THEN that takes no second try."""
    spare = spare_name(at.target.slot)
    with at.connection() as long:
        emit(long, "s", "long")
        dead = walsender(at.target)
        dead.pgconn.send_query(f'CREATE_REPLICATION_SLOT "{spare}" LOGICAL pgoutput'.encode())
        waits = "select 1 from pg_replication_slots where slot_name = %s and confirmed_flush_lsn is null"
        until(lambda: at.value(waits, spare), "the new slot waits")
        link = connect(at.target.dsn)
        drop_slot(link, spare)
        assert slot_named(link, spare) is None
        link.close()
        dead.close()
        long.commit()
    repair = repair_of(at.target)
    assert in_gap(begun(repair)) == ["long"]
    repair.close()
