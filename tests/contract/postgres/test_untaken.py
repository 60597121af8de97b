"""Which events of an outbox wait to be taken, on a real server: never none while some do, never some while none do."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest

from evermark.errors import IdentityError, SetupError, UnreachableError
from evermark.secrets import Plain
from evermark.sources.base import Limit
from evermark.sources.postgres.admin.install import install
from evermark.sources.postgres.lsn import Incarnation, Position, lsn_text
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.read.untaken import NEWEST_MAX, STANDS_STILL_S, OutboxLook
from evermark.sources.postgres.target import PostgresTarget
from evermark.testing.servers import PostgresServer, fresh_database
from evermark.testing.until import until
from tests.contract.postgres.outbox_scene import Scene, emit, scene


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def outbox(pg_server: PostgresServer) -> Iterator[Scene]:
    with scene(pg_server) as made:
        yield made


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def look(outbox: Scene, clock: Clock) -> Iterator[OutboxLook]:
    made = OutboxLook(outbox.target, clock)
    yield made
    made.close()


def taken(outbox: Scene) -> str:
    """All there is, taken and confirmed; where the log ends."""
    at = outbox.source.earliest(0)
    while (end := outbox.source.latest({0: at}, Limit(wait_s=0.3))[0]) != at:
        outbox.read(at, end)
        outbox.source.confirm(0, end)
        at = end
    return at


def passed(outbox: Scene) -> str:
    """Where the log ends once WAL without an event was passed, too: readers do that a little later."""
    return outbox.position(int(outbox.value("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn")))


def waiting_s(look: OutboxLook, after: str) -> float | None:
    found = look.untaken(after)
    return None if found is None else found.oldest_s


def test_events_wait_from_their_commit_until_they_are_taken(outbox: Scene, look: OutboxLook, clock: Clock) -> None:
    """GIVEN an idle outbox WHEN an event is committed, and taken THEN nothing waits, it waits, and nothing waits."""
    end = taken(outbox)
    assert waiting_s(look, end) is None
    outbox.emit("shop", "a")
    clock.now += 1.0
    found = look.untaken(end)
    assert found is not None and found.upto > end
    assert found.oldest_s is not None and 0 <= found.oldest_s <= 1.0
    assert waiting_s(look, taken(outbox)) is None


def test_old_events_that_were_taken_do_not_wait(outbox: Scene, look: OutboxLook) -> None:
    """GIVEN events that had waited for an hour WHEN they are taken THEN the idle database has no lag."""
    outbox.db.execute(
        "insert into pgstream.events (stream, created_at) select 'shop', now() - interval '1 hour'"
        " from generate_series(1, 10)"
    )
    before = waiting_s(look, outbox.source.earliest(0))
    assert before is not None and 3600 <= before < 3700
    assert waiting_s(look, taken(outbox)) is None


def test_an_event_that_is_not_committed_does_not_wait(outbox: Scene, look: OutboxLook, clock: Clock) -> None:
    """GIVEN an open transaction with an event WHEN it commits after an hour THEN it waits from then on, not before."""
    with outbox.connection() as writer:
        writer.execute("insert into pgstream.events (stream, created_at) values ('shop', now() - interval '1 hour')")
        outbox.db.execute("create table other as select 1")  # a commit of others flushes the WAL
        end = passed(outbox)
        assert waiting_s(look, end) is None
        writer.execute("insert into pgstream.events (stream, created_at) values ('shop', now() - interval '1 hour')")
        clock.now += 2.0
    found = waiting_s(look, end)
    assert found == 2.0, "nothing of it was there when the WAL was last looked at"


def test_events_inserted_before_the_logs_end_and_committed_after_it_are_found_when_nobody_reads(
    outbox: Scene, look: OutboxLook, clock: Clock
) -> None:
    """GIVEN an event inserted before, and committed after, what was taken WHEN nobody takes it THEN it is seen."""
    with outbox.connection() as writer:
        emit(writer, "shop", "late")
        outbox.emit("shop", "marker")
        end = taken(outbox)
        position = Position.parse(end)
    assert (
        outbox.value("select count(*) from pgstream.events where key = 'late' and lsn < %s", lsn_text(position.lsn))
        == 1
    )
    assert waiting_s(look, end) is None, "a reader would pass it in a moment"
    clock.now += STANDS_STILL_S + 1
    assert waiting_s(look, end) == STANDS_STILL_S + 1
    assert [row["key"] for row in outbox.drain(end)] == ["late"]


def test_wal_of_others_is_no_lag_while_it_is_passed(outbox: Scene, look: OutboxLook, clock: Clock) -> None:
    """GIVEN WAL without an event of ours WHEN readers pass it now and then THEN nothing is ever said to wait."""
    taken(outbox)
    for n in range(5):
        end = passed(outbox)
        assert waiting_s(look, end) is None
        outbox.db.execute(f"create table other_{n} as select 1".encode())
        assert waiting_s(look, end) is None
        clock.now += STANDS_STILL_S - 1
        assert waiting_s(look, end) is None


def test_the_oldest_of_many_is_found(outbox: Scene, look: OutboxLook) -> None:
    """GIVEN more waiting events than are looked at one by one WHEN asked THEN the oldest one's age is said."""
    insert = (
        "insert into pgstream.events (stream, created_at) select 'shop', now() - make_interval(mins => n)"
        " from generate_series(%s, %s, -1) n"
    )
    outbox.db.execute(insert, (3 * NEWEST_MAX, 2 * NEWEST_MAX + 1))
    end = taken(outbox)
    outbox.db.execute(insert, (2 * NEWEST_MAX, 1))
    found = waiting_s(look, end)
    assert found == pytest.approx(2 * NEWEST_MAX * 60, abs=62)
    everything = waiting_s(look, outbox.source.earliest(0))
    assert everything is not None and everything >= 2 * NEWEST_MAX * 60 - 62


def test_a_look_reads_no_whole_table(outbox: Scene, look: OutboxLook) -> None:
    """GIVEN many events that were taken and many that wait WHEN it is looked at THEN few are read, by an index."""
    insert = "insert into pgstream.events (stream, created_at) select 'shop', now() - make_interval(secs => n)"
    insert += " from generate_series(%s, %s, -1) n"
    outbox.db.execute(insert, (20 * NEWEST_MAX, 10 * NEWEST_MAX + 1))
    end = passed(outbox)
    outbox.db.execute(insert, (10 * NEWEST_MAX, 1))
    reading = "select coalesce(sum(idx_tup_read), 0), coalesce(sum(seq_tup_read), 0) from pg_stat_user_indexes"
    reading += " join pg_stat_user_tables using (relid) where pg_stat_user_tables.relname like 'events%'"

    def read() -> tuple[int, int]:
        outbox.db.execute("select pg_stat_clear_snapshot()")
        index, whole = outbox.db.execute(reading).fetchone() or (0, 0)
        return int(index), int(whole)

    before = read()
    assert waiting_s(look, end) == pytest.approx(10 * NEWEST_MAX, abs=60)
    look.close()  # its numbers are told when it ends
    until(lambda: read()[0] > before[0], "the server has counted")
    after_all = read()
    assert after_all[1] == before[1], "no table was read from its beginning"
    assert after_all[0] - before[0] < 3 * NEWEST_MAX


def test_times_that_are_none_hide_nothing(outbox: Scene, look: OutboxLook, clock: Clock) -> None:
    """GIVEN events at infinity WHEN another waits, and when they do THEN each is seen."""
    outbox.db.execute(
        "insert into pgstream.events (stream, created_at) select 'shop', 'infinity' from generate_series(1, 3)"
    )
    end = taken(outbox)
    assert waiting_s(look, end) is None
    outbox.emit("shop", "a")
    assert waiting_s(look, end) is not None
    end = taken(outbox)
    assert waiting_s(look, end) is None
    outbox.db.execute("insert into pgstream.events (stream, created_at) values ('shop', 'infinity')")
    look.untaken(end)
    clock.now += STANDS_STILL_S + 1
    assert waiting_s(look, end) == STANDS_STILL_S + 1


def test_looking_takes_nothing_from_whoever_reads(outbox: Scene, look: OutboxLook) -> None:
    """GIVEN a reader in the middle of a batch WHEN it is looked at THEN the slot stays the reader's, where it was."""
    end = taken(outbox)
    outbox.emit("shop", "a")
    before = outbox.db.execute("select slot_name, confirmed_flush_lsn::text from pg_replication_slots").fetchall()
    upto = outbox.source.latest({0: end}, Limit(wait_s=1.0))[0]
    reading = outbox.source.read(outbox.source.slices(0, end, upto)[0])
    first = next(reading)
    assert waiting_s(look, end) is not None
    assert first.num_rows + sum(batch.num_rows for batch in reading) == 1
    after = outbox.db.execute("select slot_name, confirmed_flush_lsn::text from pg_replication_slots").fetchall()
    assert after == before


def test_each_partition_has_its_own_events(pg_server: PostgresServer) -> None:
    """GIVEN two slots that share the events by key WHEN events of one key wait THEN only its partition is behind."""
    with fresh_database(pg_server) as dsn, psycopg.connect(dsn, autocommit=True) as db:
        target = PostgresTarget(Plain(dsn), "shared", "shared", slots=2)
        install(target, ())
        source = PostgresOutbox(target)
        try:
            after = {p: source.earliest(p) for p in source.partitions()}
            emit(db, "shop", "one key")
            ends = source.latest(after, Limit(wait_s=2.0))
            pieces = [piece for p in after for piece in source.slices(p, after[p], ends[p])]
            holds = {piece.partition for piece in pieces if any(batch.num_rows for batch in source.read(piece))}
            assert len(holds) == 1
            assert set(source.untaken(after)) == holds
        finally:
            source.close()


def test_a_server_that_cannot_be_asked_says_why(outbox: Scene, pg_server: PostgresServer) -> None:
    """GIVEN no server, no database, another history WHEN asked THEN the error names it and its kind."""
    end = taken(outbox)
    away = psycopg.conninfo.make_conninfo(outbox.dsn, port=1)
    nowhere = psycopg.conninfo.make_conninfo(outbox.dsn, dbname="not_there")
    for dsn, kind in ((away, UnreachableError), (nowhere, SetupError)):
        with pytest.raises(kind):
            OutboxLook(PostgresTarget(Plain(dsn), outbox.target.slot, outbox.target.publication)).untaken(end)
    other = Incarnation(7, 1).at(Position.parse(end).lsn)
    with pytest.raises(IdentityError) as error:
        outbox.source.untaken({0: other})
    assert error.value.partition == 0


def test_a_connection_that_was_cut_is_made_anew(outbox: Scene, look: OutboxLook) -> None:
    """GIVEN a look with an open connection WHEN somebody ends that THEN it asks on a new one: the server is well."""
    end = taken(outbox)
    assert waiting_s(look, end) is None
    outbox.db.execute(
        "select pg_terminate_backend(pid, 5000) from pg_stat_activity"
        " where datname = current_database() and pid <> pg_backend_pid()"
    )
    outbox.emit("shop", "a")
    assert waiting_s(look, end) is not None


def test_no_statement_of_ours_is_compiled_whatever_the_server_is_set_to(outbox: Scene, look: OutboxLook) -> None:
    """GIVEN a server that compiles expensive statements WHEN a look begins THEN it is switched off for our session."""
    outbox.db.execute(f"alter database {psycopg.conninfo.conninfo_to_dict(outbox.dsn)['dbname']} set jit = on")
    look.untaken(taken(outbox))
    assert look._link is not None
    assert look._link.one("show jit", doing="asking") == ("off",)
