"""The outbox as a source: what it offers, what it refuses, and what it costs."""

from __future__ import annotations

import pickle
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

import psycopg
import pytest

from evermark.errors import BusyError, DeniedError, GapError, IdentityError, SetupError, UnreachableError
from evermark.secrets import Plain
from evermark.sources.base import Limit, Slice
from evermark.sources.postgres.admin.install import install
from evermark.sources.postgres.connect import connect
from evermark.sources.postgres.lsn import Incarnation, Position
from evermark.sources.postgres.read import pace
from evermark.sources.postgres.read import slot as slot_module
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.slots import walsender
from evermark.sources.postgres.target import PostgresTarget
from evermark.testing.copies import copied, promote, started
from evermark.testing.servers import PostgresServer, fresh_database, postgres_server
from evermark.testing.until import until
from tests.contract.postgres.outbox_scene import Scene, scene

NO_WAIT = Limit(wait_s=0.0)
COLUMNS = "(id, created_at, stream_id, stream, op, key, payload, before, schema_version)"  # of a publication


@pytest.fixture
def at(server: PostgresServer) -> Iterator[Scene]:
    with scene(server) as found:
        yield found


def keys(at: Scene, start: str, end: str) -> list[str]:
    return [row["key"] for row in at.read(start, end)]


@contextmanager
def slot_in_use(server: PostgresServer, at: Scene) -> Iterator[subprocess.Popen[bytes]]:
    """Somebody else reads from the slot, as a killed worker's query would for a while."""
    command = [
        str(server.binaries.tool("pg_recvlogical")),
        "-d",
        at.dsn,
        "--slot",
        at.target.slot,
        "--start",
        "-f",
        "-",
    ]
    options = ["-o", "proto_version=1", "-o", f"publication_names={at.target.publication}", "-n"]
    with subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as reader:
        active = "select active from pg_replication_slots where slot_name = %s"
        until(lambda: at.value(active, at.target.slot), "the slot is in use")
        try:
            yield reader
        finally:
            reader.kill()


def test_pickled_source_reads_the_same(at: Scene) -> None:
    """Offers, reads and confirms happen in three processes; connections do not travel."""
    start = at.source.earliest(0)
    at.emit("s", "1", '{"text": "grüß dich 🙂"}')
    end = at.source.latest({0: start}, Limit())[0]
    rows = at.read(start, end)
    copy: PostgresOutbox = pickle.loads(pickle.dumps(at.source))
    [piece] = copy.slices(0, start, end)
    assert [row for batch in copy.read(pickle.loads(pickle.dumps(piece))) for row in batch.to_pylist()] == rows
    assert rows[0]["payload"] == '{"text": "grüß dich 🙂"}'
    assert copy.slices(0, end, end) == []
    copy.close()


def test_idle_source_waits_and_offers_nothing(at: Scene) -> None:
    """WAL that is not ours makes no batch of nothing."""
    after = at.source.earliest(0)
    at.db.execute("create table other (v int)")
    at.db.execute("insert into other select generate_series(1, 1000)")
    began = time.monotonic()
    assert at.source.latest({0: after}, Limit(wait_s=0.4)) == {0: after}
    assert 0.35 < time.monotonic() - began < 5


def test_commit_ends_the_wait_at_once(at: Scene) -> None:
    """The offer comes with the commit, not with the timeout."""
    after = at.source.earliest(0)
    timer = threading.Timer(0.3, at.emit, ("s", "1"))
    timer.start()
    began = time.monotonic()
    end = at.source.latest({0: after}, Limit(wait_s=30))[0]
    assert time.monotonic() - began < 10
    assert keys(at, after, end) == ["1"]
    timer.join()


def test_foreign_wal_is_offered_after_a_while_so_the_slot_moves(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle outbox in a busy database: an empty batch now and then, checkpointed and confirmed like any other."""
    monkeypatch.setattr(pace, "IDLE_OFFER_S", 0.2)
    after = at.source.earliest(0)
    at.db.execute("create table other (v int)")
    # WHEN nothing of ours happens for that while
    end = at.source.latest({0: after}, Limit(wait_s=20))[0]
    # THEN the WAL is offered though it holds nothing, and the slot follows
    assert end > after
    assert keys(at, after, end) == []
    at.source.confirm(0, end)
    assert at.source.earliest(0) == end


def test_limits_bound_the_range_offered(at: Scene) -> None:
    """By bytes of WAL, and by rows as far as their least size in WAL tells."""
    after = at.source.earliest(0)
    at.db.execute("insert into pgstream.events (stream, key) select 's', n::text from generate_series(1, 5000) n")
    lsn = Position.parse(after).lsn
    for limit in (Limit(bytes_max=10_000, wait_s=0), Limit(rows_max=40, wait_s=0)):
        end = at.source.latest({0: after}, limit)[0]
        assert lsn < Position.parse(end).lsn <= lsn + 10_240
    assert len(at.drain(after, Limit(bytes_max=500_000, wait_s=0.3))) == 5000


def test_large_rows_among_small_ones_keep_their_order(server: PostgresServer) -> None:
    """Big messages travel apart from the small ones of their bucket, and come back between them."""
    with scene(server, big_bytes=300) as at:
        start = at.source.earliest(0)
        at.db.execute(
            """insert into pgstream.events (stream, key, payload)
               select 's', n::text, jsonb_build_object('t', repeat('x', case when n % 7 in (1, 2) then 400 else 1 end))
               from generate_series(1, 5000) n"""
        )
        end = at.position(at.flush_lsn())
        assert keys(at, start, end)[:5000] == [str(n) for n in range(1, 5001)]


def test_what_a_database_has_set_for_all_stops_no_reader(server: PostgresServer) -> None:
    """GIVEN a database that is read-only by default, ends long transactions, and sorts where others hash WHEN events
    are read and something is noted there THEN it is as anywhere else."""
    with scene(server) as at:
        big = "repeat(md5(random()::text), 1000)"
        at.db.execute(f"select pgstream.emit('s', n::text, case when n % 37 = 0 then to_jsonb({big}) else '1' end)"
                      " from generate_series(1, 3000) n".encode())  # fmt: skip
        start, end = at.source.earliest(0), at.position(at.flush_lsn())
        database = at.db.info.dbname
        for setting in ("default_transaction_read_only = on", "enable_hashagg = off"):
            at.db.execute(f"alter database {database} set {setting}".encode())
        timeout = at.db.info.server_version >= 170000
        if timeout:
            at.db.execute(f"alter database {database} set transaction_timeout = '1h'".encode())
        at.source.close()
        assert [int(key) for key in keys(at, start, end)[:3000]] == list(range(1, 3001))
        at.source.replayed("s", "2024-01-01", None)
        with connect(at.target.dsn) as link, closing(walsender(at.target)) as keeper:
            for one in (link.connection, keeper) if timeout else ():
                assert one.execute("show transaction_timeout").fetchone() == ("0",)


def test_row_of_20_mb_is_read(at: Scene) -> None:
    """It is one event like any other."""
    start = at.source.earliest(0)
    at.db.execute(
        """insert into pgstream.events (stream, key, payload)
           values ('s', 'a', '{}'), ('s', 'b', jsonb_build_object('t', repeat('xy', 10000000))), ('s', 'c', '{}')"""
    )
    rows = at.read(start, at.position(at.flush_lsn()))[:3]
    assert [(row["key"], len(row["payload"])) for row in rows] == [("a", 2), ("b", 20_000_009), ("c", 2)]


def test_large_transaction_comes_in_bounded_batches(at: Scene) -> None:
    """One transaction of 120 000 events: no batch larger than a chunk."""
    start = at.source.earliest(0)
    at.db.execute("insert into pgstream.events (stream, key) select 's', n::text from generate_series(1, 120000) n")
    sizes = [len(batch) for batch in at.source.read(Slice(0, start, at.position(at.flush_lsn())))]
    assert sum(sizes) == 120_001
    assert max(sizes) <= 33_000


def test_event_of_an_unknown_stream_is_poison_not_lost(at: Scene) -> None:
    """A direct insert with a number that names nothing."""
    at.db.execute("insert into pgstream.events (stream_id, key) values (424242, 'x')")
    at.emit("s", "1")
    number = at.value("select id from pgstream.streams where name = 's'")
    at.db.execute("insert into pgstream.events (stream_id, key) values (%s, '2')", (number,))
    assert [(row["op"], row["stream"]) for row in at.drain()] == [
        ("poison", "pgstream.events"),
        ("message", "s"),
        ("message", "s"),
    ]


def test_schema_change_of_the_outbox_in_mid_stream_is_followed(at: Scene) -> None:
    """A column more, a column moved: rows of both shapes are read."""
    at.emit("s", "1")
    at.db.execute("alter table pgstream.events add column note text default 'x'")
    at.emit("s", "2")
    at.db.execute("alter table pgstream.events drop column note")
    at.emit("s", "3")
    assert [row["key"] for row in at.drain()] == ["1", "2", "3"]


def test_confirm_is_paced_and_never_passes_what_was_asked(at: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """Advancing costs a reading of the WAL: small steps wait, the last one is made on closing."""
    monkeypatch.setattr(pace, "CONFIRM_EVERY_S", 3600.0)
    start = at.source.earliest(0)
    at.emit("s", "1")
    first = at.source.latest({0: start}, Limit())[0]
    at.source.confirm(0, first)
    assert at.source.earliest(0) == first
    at.emit("s", "2")
    second = at.source.latest({0: first}, Limit())[0]
    at.source.confirm(0, second)
    assert at.source.earliest(0) == first, "so small a step so soon is held back"
    at.source.confirm(0, first)  # going back is no move
    at.source.close()
    assert at.source.earliest(0) == second


def test_read_waits_for_a_slot_in_use_and_then_gives_up_as_busy(
    at: Scene, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed worker's query may hold the slot for a moment; a foreign reader for ever."""
    start = at.source.earliest(0)
    at.emit("s", "1")
    end = at.position(at.flush_lsn())
    # WHEN the other reader goes away in time
    with slot_in_use(server, at) as reader:
        timer = threading.Timer(0.3, reader.kill)
        timer.start()
        # THEN the read succeeds
        assert keys(at, start, end)[0] == "1"
        timer.join()
    # WHEN it does not THEN it is an error of its own kind, and confirming is no error at all
    with slot_in_use(server, at):
        monkeypatch.setattr(slot_module, "BUSY_WAIT_S", 0.2)
        with pytest.raises(BusyError):
            at.read(start, end)
        at.source.confirm(0, end)


def test_read_left_half_way_frees_the_slot(at: Scene) -> None:
    """A cancelled task must not keep its successor out, nor hand over a connection in mid-COPY."""
    start = at.source.earliest(0)
    at.db.execute("insert into pgstream.events (stream, key) select 's', n::text from generate_series(1, 90000) n")
    end = at.position(at.flush_lsn())
    batches = at.source.read(Slice(0, start, end))
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    assert len(at.read(start, end)) == 90_001


@pytest.mark.parametrize("change", ["system", "timeline"])
def test_server_that_is_not_the_one_we_left_is_refused(at: Scene, change: str) -> None:
    """Restored, cloned or promoted: stop and name the choices, before anything is read."""
    here = Position.parse(at.source.earliest(0))
    was = here.incarnation
    other = Incarnation(was.system_id + 1, was.timeline) if change == "system" else Incarnation(was.system_id, 9)
    for step in (
        lambda: at.source.check({0: other.at(here.lsn)}),
        lambda: at.source.latest({0: other.at(here.lsn)}, NO_WAIT),
        lambda: at.source.confirm(0, other.at(here.lsn)),
    ):
        with pytest.raises(IdentityError) as refused:
            step()
        assert "evermark source recover" in refused.value.hint


def test_p11_a_promoted_copy_is_refused(tmp_path: Path) -> None:
    """GIVEN a copy of our server WHEN it was promoted and takes its place THEN it is on another timeline, and that is
    said before anything is read."""
    with postgres_server(tmp_path / "original") as original, scene(original) as at:
        at.emit("s", "1")
        left_at, database = at.position(at.flush_lsn()), at.db.info.dbname
        (copy,) = copied(original, tmp_path / "copy")
        promote(copy)
        with started(copy) as server:
            promoted = PostgresOutbox(replace(at.target, dsn=Plain(server.dsn(database))))
            with pytest.raises(IdentityError, match="is not the one we left"):
                promoted.check({0: left_at})
            promoted.close()


def test_server_behind_our_checkpoint_is_refused(at: Scene) -> None:
    """A restored backup: same identity, less history."""
    ahead = at.incarnation.at(Position.parse(at.source.earliest(0)).lsn + 2**40)
    with pytest.raises(IdentityError, match="behind our checkpoint"):
        at.source.check({0: ahead})
    with pytest.raises(IdentityError, match="behind our checkpoint"):
        at.source.latest({0: ahead}, NO_WAIT)


def test_slot_moved_by_somebody_else_is_a_gap(at: Scene) -> None:
    """Found at the start, and by a read that would otherwise silently give less."""
    start = at.source.earliest(0)
    at.emit("s", "1")
    end = at.position(at.flush_lsn())
    at.db.execute("select pg_replication_slot_advance(%s, pg_current_wal_flush_lsn())", (at.target.slot,))
    with pytest.raises(GapError, match="moved past us"):
        at.source.check({0: start})
    with pytest.raises(GapError, match="moved past us"):
        at.read(start, end)


def test_missing_slot_is_a_gap_with_a_checkpoint_and_a_setup_without(at: Scene) -> None:
    """Nothing was lost when nothing was ever read."""
    start = at.source.earliest(0)
    at.db.execute("select pg_drop_replication_slot(%s)", (at.target.slot,))
    for step in (lambda: at.source.check({0: start}), lambda: at.read(start, at.position(at.flush_lsn()))):
        with pytest.raises(GapError, match="is gone"):
            step()
    with pytest.raises(SetupError) as refused:
        at.source.check({})
    assert "evermark source install" in refused.value.hint


@pytest.mark.parametrize(
    "change",
    [
        (
            "drop publication {pub}; create publication {pub} for table pgstream.events {columns} "
            "with (publish = 'insert', publish_via_partition_root = true)"
        ),
        (
            "alter publication {pub} drop table pgstream.events;"
            " alter publication {pub} add table pgstream.events {columns}"
        ),
        "alter publication {pub} set (publish = 'update')",
        "drop publication {pub}",
    ],
)
def test_publication_changed_by_somebody_is_a_gap(at: Scene, change: str) -> None:
    """Even made again exactly as it was: rows written in between are gone, and the server says little or nothing."""
    start = at.source.earliest(0)
    at.emit("s", "1")
    at.db.execute(change.format(pub=at.target.publication, columns=COLUMNS).encode())
    at.emit("s", "2")
    end = at.position(at.value("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn"))
    for step in (
        lambda: at.source.check({0: start}),
        lambda: at.read(start, end),
        lambda: at.source.latest({0: start}, NO_WAIT),
    ):
        with pytest.raises(GapError):
            step()


def test_warning_while_decoding_is_an_error(at: Scene, server: PostgresServer) -> None:
    """GIVEN a publication that was not there when an event was written, and stands now as it was installed WHEN decoded
    THEN the slice fails: from version 18 on the server only warns, and goes on without the event."""
    start = at.source.earliest(0)
    at.db.execute(f"drop publication {at.target.publication}".encode())
    at.emit("s", "1")
    options = "publish = 'insert', publish_via_partition_root = true"
    made = f"create publication {at.target.publication} for table pgstream.events {COLUMNS} with ({options})"
    at.db.execute(made.encode())
    at.db.execute(
        "update pgstream.readers set fingerprint = pgstream.publication_fingerprint(%s) where slot = %s",
        (at.target.publication, at.target.slot),
    )
    end = at.position(at.flush_lsn())
    at.source.check({0: start})  # nothing else tells that anything is wrong
    warns = server.binaries.major >= 18
    told = "the server warned: skipped loading publication" if warns else "does not exist"
    with pytest.raises(GapError if warns else SetupError, match=told):
        at.read(start, end)


def test_invalidated_slot_is_a_gap(tmp_path_factory: pytest.TempPathFactory) -> None:
    """WAL beyond max_slot_wal_keep_size is thrown away, and the slot with it: no event is needed to find out."""
    settings = {"max_slot_wal_keep_size": "1MB", "max_wal_size": "64MB", "min_wal_size": "32MB"}
    with postgres_server(tmp_path_factory.mktemp("lost"), settings) as server, scene(server) as at:
        start = at.source.earliest(0)
        at.emit("s", "1")
        end = at.position(at.flush_lsn())

        def lost() -> bool:
            at.db.execute("create table if not exists filler (v text)")
            at.db.execute("insert into filler select repeat('x', 1000) from generate_series(1, 20000)")
            at.db.execute("select pg_switch_wal()")
            at.db.execute("checkpoint")
            status = at.value("select wal_status from pg_replication_slots where slot_name = %s", at.target.slot)
            return bool(status == "lost")

        until(lost, "the slot is invalidated")
        for step in (lambda: at.source.check({0: start}), lambda: at.read(start, end)):
            with pytest.raises(GapError, match="invalidated") as refused:
                step()
            assert "evermark source recover" in refused.value.hint
        # AND a reader that has all there is, and waits for the next event, is told as well: by `latest`
        at.source.close()
        level = at.position(at.value("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn"))
        with pytest.raises(GapError, match="invalidated"):
            at.source.latest({0: level}, NO_WAIT)


def test_server_restarted_under_us_is_unreachable_then_back(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A broken connection is made again; the error in between is one that is retried."""
    with postgres_server(tmp_path_factory.mktemp("restart")) as server, scene(server) as at:
        start = at.source.earliest(0)
        at.emit("s", "1")
        server.stop()
        with pytest.raises(UnreachableError):
            at.source.latest({0: start}, NO_WAIT)
        server.start()
        source = PostgresOutbox(
            PostgresTarget(Plain(server.dsn(at.db.info.dbname)), at.target.slot, at.target.publication)
        )
        end = source.latest({0: start}, Limit())[0]
        assert [key for batch in source.read(Slice(0, start, end)) for key in batch["key"].to_pylist()] == ["1"]
        source.close()


def test_unreachable_server_is_named_without_the_password() -> None:
    """Host and port, and nothing secret in message, hint or repr."""
    target = PostgresTarget(Plain("postgresql://u:hunter2@127.0.0.1:1/db"), "s", "p")
    with pytest.raises(UnreachableError) as refused:
        PostgresOutbox(target).check({})
    text = f"{refused.value} {refused.value!r} {target!r}"
    assert "127.0.0.1:1/db" in text
    assert "hunter2" not in text


def test_role_without_rights_is_denied_with_what_to_grant(at: Scene, server: PostgresServer) -> None:
    """Not a gap: nothing is lost, somebody has to grant something."""
    at.db.execute("create role nobody_much login password 'x'")
    info = psycopg.conninfo.make_conninfo(at.dsn, user="nobody_much", password="x", passfile="")
    poor = PostgresOutbox(PostgresTarget(Plain(info), at.target.slot, at.target.publication))
    with pytest.raises(DeniedError) as refused:
        poor.check({})
    assert "evermark source install --print" in refused.value.hint
    poor.close()
    at.db.execute("drop role nobody_much")


def test_nothing_installed_says_install(server: PostgresServer) -> None:
    """The first thing a new user sees."""
    with fresh_database(server) as dsn:
        source = PostgresOutbox(PostgresTarget(Plain(dsn), "s", "p"))
        with pytest.raises(SetupError) as refused:
            source.earliest(0)
        assert "evermark source install" in refused.value.hint
        source.close()


def test_database_of_another_encoding_is_read(server: PostgresServer) -> None:
    """Logical decoding sends the database's own encoding."""
    with server.admin() as admin:
        admin.execute("create database latin encoding 'LATIN1' template template0 lc_collate 'C' lc_ctype 'C'")
    try:
        dsn = server.dsn("latin")
        target = PostgresTarget(Plain(dsn), "latin_slot", "latin_pub")
        install(target)
        with psycopg.connect(dsn, autocommit=True, client_encoding="utf-8") as db:
            at = Scene(dsn, target, db, PostgresOutbox(target))
            at.emit("café", "ä", '{"é": 1}')
            [row] = at.drain()
            assert (row["stream"], row["key"], row["payload"]) == ("café", "ä", '{"é": 1}')
            at.source.close()
            db.execute("select pg_drop_replication_slot('latin_slot')")
    finally:
        with server.admin() as admin:
            admin.execute("drop database latin with (force)")


def test_the_condition_tells_how_much_wal_the_slot_holds(at: Scene) -> None:
    """GIVEN an event that was not confirmed THEN the gauges show the WAL kept for it."""
    at.emit("s", "1")
    at.flush_lsn()
    gauges = at.source.condition().gauges
    assert gauges["wal_retained_bytes"] >= gauges["unconfirmed_bytes"] > 0
