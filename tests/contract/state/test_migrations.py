"""State comes up to this program's version, once, and never from a version it does not know."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql
from psycopg.conninfo import make_conninfo

from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.stores import PostgresCheckpoints
from evermark.cluster.fence import DELIVER_LEASE
from evermark.cluster.postgres import PostgresLeases
from evermark.delivery.model import Cursor, GroupWork, Membership, Stay
from evermark.delivery.replay.postgres import PostgresReplays
from evermark.delivery.replay.timeslice import Mark
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.errors import BusyError, ConfigError, DeniedError, FormatError, SetupError, UnreachableError
from evermark.log.head import Head, PostgresHeads
from evermark.state.connection import State, schema_for
from evermark.state.migrate import Migration, migrate, migrations, pending, require_current
from evermark.testing.contracts.bot_scene import WISH
from evermark.testing.contracts.scene import P0, P1, T0, done, event
from evermark.testing.servers import PostgresServer
from evermark.testing.states import empty_state, owners

KNOWN = [m.number for m in migrations()]
VERSION_8 = Path(__file__).parent / "state_v8.json"
NEXT = Migration(len(KNOWN) + 1, "more", "create table more (n integer);\nalter table more add m integer;")


@pytest.fixture
def state(pg_server: PostgresServer) -> Iterator[State]:
    with empty_state(pg_server.socket_dsn()) as state:
        yield state


def _tables(state: State) -> set[str]:
    with state.connection() as conn:
        rows = conn.execute("select tablename from pg_tables where schemaname = %s", (state.schema,)).fetchall()
    return {row[0] for row in rows}


def test_from_empty_and_again(state: State) -> None:
    """The first run makes everything, the second changes nothing."""
    with pytest.raises(SetupError):
        require_current(state)
    assert migrate(state) == KNOWN
    assert {"leases", "checkpoints", "log_head", "subscriptions", "cursors", "enqueued_messages"} <= _tables(state)
    assert migrate(state) == []
    require_current(state)


def test_a_migration_that_is_new_is_applied_and_what_was_there_stays(state: State) -> None:
    """GIVEN this version's state WHEN a program knows one migration more THEN that one alone is applied."""
    migrate(state)
    with state.connection() as conn:
        conn.execute("insert into counters values ('expired', 'a', 3)")
    known = [*migrations(), NEXT]
    with pytest.raises(SetupError):
        require_current(state, known)
    assert migrate(state, known) == [NEXT.number]
    assert "more" in _tables(state)
    with state.connection() as conn:
        assert conn.execute("select value from counters").fetchone() == (3,)


def test_a_migration_may_take_longer_than_other_statements(state: State, pg_server: PostgresServer) -> None:
    """GIVEN one that works longer than statements may WHEN applied THEN it is; what comes after it has its bound."""
    migrate(state)
    hurried = State(pg_server.socket_dsn, state.schema, connections_max=1, statement_timeout_s=1.0)
    slow = replace(NEXT, text=f"select pg_sleep(1.2);\n{NEXT.text}")
    assert migrate(hurried, [*migrations(), slow]) == [NEXT.number]
    with pytest.raises(BusyError), hurried.connection() as conn:
        conn.execute("select pg_sleep(1.2)")
    hurried.close()


def _filled_by_version_8(state: State) -> None:
    """The rows that the program of version 8 (commit d9da238) wrote, in its tables: state_v8.json holds what its own
    stores made of a group with a live, a failing, a paused subscription and a bot, and of a replay under way."""
    migrate(state, migrations()[:8])
    rows: dict[str, list[dict[str, Any]]] = json.loads(VERSION_8.read_text())
    with state.transaction() as conn:
        conn.execute("delete from delivery_group")
        for table in sorted(rows, key=lambda table: (table != "subscriptions", table != "replays")):
            name = sql.Identifier(table)
            conn.execute(
                sql.SQL(
                    "insert into {} overriding system value select * from json_populate_recordset(null::{}, %s)"
                ).format(name, name),
                (json.dumps(rows[table]),),
            )
        for table, column in (("subscriptions", "generation"), ("enqueued_messages", "id"), ("replays", "nth")):
            conn.execute("select setval(pg_get_serial_sequence(%s, %s), 1000)", (table, column))


def test_what_version_8_wrote_is_read_by_the_stores_of_today(state: State) -> None:
    """GIVEN the state of version 8 in the middle of its work WHEN migrated THEN every cursor, parked delivery, key,
    membership, replay, head and checkpoint is what it was, and no cursor stands inside a batch."""
    _filled_by_version_8(state)
    assert migrate(state) == KNOWN[8:]
    store = PostgresDelivery(state, clock=lambda: T0)
    known = store.subscriptions()
    assert {name: str(found.state) for name, found in known.items()} == {
        "live": "live",
        "behind": "behind",
        "bot": "live",
        "paused": "suspended",
    }
    live = known["live"].spec
    assert (live.ordered, live.where, live.secrets) == (True, "data.n > 1", ("sealed",))
    assert (known["behind"].failures, known["behind"].spec.rate_per_s, known["bot"].spec.bot) == (1, 2.5, WISH)
    assert (store.group().members, store.group().cursors) == ({"live", "bot"}, {P0: Cursor(2), P1: Cursor(0)})
    assert store.cursors_outside() == {
        "behind": {P0: Cursor(0), P1: Cursor(0)},
        "paused": {P0: Cursor(0), P1: Cursor(0)},
    }
    assert store.counted("expired") == {"live": 1}
    parked = {row.event.event_id: row for row in store.parked.rows(limit=100)}
    assert set(parked) == {"e1", "e2", "e3", "e4", "e5"}
    assert (parked["e1"].next_attempt_at, parked["e1"].attempts) == (T0 + timedelta(hours=5), 7)
    assert store.parked.counts()["live"] == {"waiting": 2, "dead": 1}
    assert store.bots.learned("shop", "helper") == Membership({0: 2}, {"room": (Stay((1, "000001")),)})
    assert PostgresCheckpoints(state).load("shop", 0) == Checkpoint("000003", 3, 1)
    assert PostgresHeads(state).load("shop") == {0: Head(3, 1, "000003", 3)}
    (replay,) = PostgresReplays(state).open()
    (target,) = replay.targets
    assert (target.subscription, target.mark, target.parked) == ("live", Mark(T0 + timedelta(minutes=30), "e5"), 1)
    assert target.stuck_since is None


def test_what_version_8_left_undone_is_done_by_the_stores_of_today(state: State) -> None:
    """GIVEN the state of version 8, migrated WHEN the work goes on THEN cursors may stop inside a batch, keys release
    what waited, a person may ask for what is dead, nobody has asked for the rest, and keys hold their order."""
    _filled_by_version_8(state)
    migrate(state)
    store = PostgresDelivery(state, clock=lambda: T0)
    epoch = owners(PostgresLeases(state, is_gone=lambda holder: True))(DELIVER_LEASE)
    store.settle_subscription("behind", P0, Cursor(0), Cursor(0, "000005"), done("behind"), T0, epoch)
    assert store.cursors("behind") == {P0: Cursor(0, "000005"), P1: Cursor(0)}
    store.settle_subscription("behind", P0, Cursor(0, "000005"), Cursor(2), done("behind"), T0, epoch)
    assert store.join("behind", epoch)
    assert store.bots.keys_wanted(T0, 10, epoch) == [], "both keys were asked for a moment ago, by version 8"
    assert store.bots.publish("phone", {"s1": "sealed key"}, T0, epoch) == 1
    now = T0 + timedelta(seconds=1)
    assert [row.event.event_id for row in store.parked.claim(now, 10, 60.0, epoch)] == ["e3"]
    dead = next(row for row in store.parked.rows(limit=100) if row.event.event_id == "e2")
    store.parked.release([dead.id], now, epoch)
    (asked,) = store.parked.claim(now, 10, 60.0, epoch)
    store.parked.reschedule(asked, next_attempt_at=None, attempts=8, reason="no", status=None, epoch=epoch)
    assert next(row for row in store.parked.rows(limit=100) if row.event.event_id == "e2").attempts == 7
    due = {row.event.event_id: row for row in store.parked.claim(T0 + timedelta(hours=5), 10, 60.0, epoch)}
    store.parked.reschedule(due["e1"], next_attempt_at=None, attempts=8, reason="no", status=None, epoch=epoch)
    assert next(row for row in store.parked.rows(limit=100) if row.event.event_id == "e1").attempts == 8, (
        "nobody asked for it"
    )
    moved = replace(event(6, key="new"), previous_key="k")
    store.settle_group(GroupWork(P0, Cursor(2), Cursor(3), store.group().members), [done("live", moved)], T0, epoch)
    assert store.parked.held_keys(["live"], [P0]) == {"live": {(P0, "orders", "k"): 2, (P0, "orders", "new"): 1}}


def test_parked_rows_learn_their_stream_from_their_event(state: State) -> None:
    """GIVEN rows parked before streams were kept beside them WHEN migrated THEN each has the one its event says."""
    migrate(state, migrations()[:4])
    parked = {
        "plain": {"event_id": "plain", "stream": "public.orders", "payload": '{"stream": "no"}'},
        "odd": {"event_id": "odd", "stream": 'a "b" \\u0000 \x00\x00', "key": "\x00"},
        "none": {"event_id": "none"},
    }
    with state.connection() as conn:
        conn.execute("insert into subscriptions (name, made_by, spec, state) values ('a', 'api', '{}', 'live')")
        for event_id, event in parked.items():
            conn.execute(
                "insert into enqueued_messages (subscription, event_id, source, partition, batch, position, key, event,"
                " reason, created_at) values ('a', %s, 'shop', 0, 1, '1', 'k', %s, '', now())",
                (event_id, json.dumps(event, ensure_ascii=False, separators=(",", ":"))),
            )
    assert migrate(state) == KNOWN[4:]
    with state.connection() as conn:
        found = dict(conn.execute("select event_id, stream from enqueued_messages").fetchall())
    assert found == {"plain": "public.orders", "odd": 'a "b" \\u0000 \ufffd\ufffd', "none": ""}


def test_deliveries_parked_before_a_person_could_ask_go_on(state: State) -> None:
    """GIVEN a row parked by version 9, waiting for hours WHEN migrated THEN it has its time, and may be asked for."""
    migrate(state, migrations()[:9])
    with state.connection() as conn:
        conn.execute("insert into subscriptions (name, made_by, spec, state) values ('a', 'api', '{}', 'live')")
        conn.execute(
            "insert into enqueued_messages (subscription, event_id, replay_id, source, partition, batch, position,"
            " stream, event, reason, attempts, next_attempt_at, created_at)"
            " values ('a', 'e1', '', 'shop', 0, 1, '1', 's', '{}', 'no', 3, now() + '5 hours', now())"
        )
        conn.execute("insert into leases (name, instance, epoch, expires_at) values ('deliver', 'i', 1, now() + '1 h')")
    migrate(state)
    store = PostgresDelivery(state)
    (row,) = store.parked.rows()
    now = datetime.now(UTC)
    assert row.next_attempt_at is not None and row.next_attempt_at > now + timedelta(hours=4)
    assert store.parked.claim(now, 10, 60.0, 1) == []
    store.parked.release([row.id], now, 1)
    (claimed,) = store.parked.claim(now, 10, 60.0, 1)
    store.parked.reschedule(claimed, next_attempt_at=None, attempts=4, reason="no", status=None, epoch=1)
    assert store.parked.rows() == [row]


def test_a_newer_state_is_refused(state: State) -> None:
    """A program never works on a state it does not know, nor changes it."""
    migrate(state, [*migrations(), NEXT])
    for refuse in (migrate, require_current):
        with pytest.raises(FormatError, match="knows up to"):
            refuse(state)


def test_a_changed_migration_is_refused(state: State) -> None:
    """The same number with another text is another state."""
    migrate(state)
    first, *rest = migrations()
    changed = [replace(first, text=first.text + "-- changed"), *rest]
    for refuse in (migrate, require_current):
        with pytest.raises(FormatError, match="not the one"):
            refuse(state, changed)


def test_a_migration_left_out_is_refused() -> None:
    """Forward only: a gap in what was applied is damage."""
    one, two = Migration(1, "a", "a"), Migration(2, "b", "b")
    assert pending([one, two], [(1, one.checksum)]) == [two]
    with pytest.raises(FormatError):
        pending([one, two], [(2, two.checksum)])


def test_a_failing_migration_leaves_nothing_behind(state: State) -> None:
    """Each runs in a transaction of its own: the earlier ones stay, this one leaves no trace."""
    broken = replace(NEXT, text="create table more (n integer); select nothing from nowhere;")
    with pytest.raises(SetupError):
        migrate(state, [*migrations(), broken])
    assert "more" not in _tables(state)
    assert migrate(state, [*migrations(), NEXT]) == [NEXT.number]


def test_two_processes_at_once(state: State, pg_server: PostgresServer) -> None:
    """Three processes that start together do the work once, and all succeed."""
    program = (
        "import sys; from evermark.state.connection import State; from evermark.state.migrate import migrate; "
        "sys.stdin.readline(); print(migrate(State(lambda: sys.argv[1], sys.argv[2])))"
    )
    command = [sys.executable, "-c", program, pg_server.socket_dsn(), state.schema]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    said = []
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    for process in processes:
        said.append(process.communicate(timeout=60)[0].strip())
        assert process.returncode == 0
    assert sorted(said) == sorted(["[]", "[]", str(KNOWN)])


def test_two_deployments_never_share_a_schema() -> None:
    """Names that differ only in dash and underscore get different schemas; unusable ones are refused."""
    assert schema_for("shop-prod") == "evermark_shop_prod"
    assert schema_for("shop_prod") != schema_for("shop-prod")
    for bad in ("", "Shop", "a.b", "a b", "x" * 60, "-a", 'a";drop'):
        with pytest.raises(ConfigError):
            schema_for(bad)


def test_an_odd_schema_name_works(pg_server: PostgresServer) -> None:
    """The schema of a name with underscores is a real one."""
    with empty_state(pg_server.socket_dsn()) as state:
        odd = State(pg_server.socket_dsn, schema_for("a_b"))
        migrate(odd)
        assert "leases" in _tables(odd)
        with odd.connection() as conn:
            conn.execute('drop schema "evermark_a$b" cascade')
        odd.close()
        assert _tables(state) == set()


def test_a_cut_connection_is_replaced(state: State) -> None:
    """GIVEN connections the server cut WHEN they are used THEN at most one call fails, with a kind that is retried."""
    migrate(state)
    with state.connection() as held:
        with state.connection() as conn:
            conn.execute("select pg_terminate_backend(%s)", (held.info.backend_pid,))
        with pytest.raises(UnreachableError), state.connection() as conn:
            conn.execute("select pg_terminate_backend(pg_backend_pid())")
    assert migrate(state) == []


def test_a_connection_that_was_in_use_while_another_broke_is_not_used_again(state: State) -> None:
    """GIVEN two connections WHEN one breaks THEN the other may be about to: whoever has it goes on, nobody after."""
    with state.connection() as held:
        with pytest.raises(UnreachableError), state.connection() as conn:
            conn.execute("select pg_terminate_backend(pg_backend_pid())")
        before = held.info.backend_pid
        assert held.execute("select 1").fetchone() == (1,)
    assert held.closed
    with state.connection() as conn:
        after = conn.info.backend_pid
    assert after != before
    with state.connection() as conn:
        assert conn.info.backend_pid == after


def test_a_failed_transaction_leaves_the_connection_clean(state: State) -> None:
    """An error inside a transaction rolls it back, and the next user of the connection sees nothing of it."""
    migrate(state)

    def fail() -> None:
        with state.transaction() as conn:
            conn.execute("insert into counters values ('a', 'b', 1)")
            raise LookupError

    with pytest.raises(LookupError):
        fail()
    with state.connection() as conn:
        assert conn.execute("select count(*) from counters").fetchone() == (0,)


def test_errors_have_kinds_and_no_secrets(pg_server: PostgresServer) -> None:
    """Unreachable, denied, missing and malformed are told apart, and no text holds the password."""
    cases = [
        ("postgresql://u:hunter2@127.0.0.1:1/db", UnreachableError),
        (pg_server.socket_dsn("no_such_database"), SetupError),
        ("not a dsn hunter2", ConfigError),
    ]
    for dsn, kind in cases:
        with pytest.raises(kind) as caught:
            migrate(State(lambda dsn=dsn: dsn, "evermark_x", connect_timeout_s=2))  # type: ignore[misc]
        assert "hunter2" not in str(caught.value)


def test_waits_are_bounded(pg_server: PostgresServer) -> None:
    """A slow statement, a lock that is not given and a used-up pool end in `BusyError`."""
    state = State(pg_server.socket_dsn, "evermark_x", connections_max=1, statement_timeout_s=0.2, lock_timeout_s=0.1)
    with pytest.raises(BusyError), state.connection() as conn:
        conn.execute("select pg_sleep(5)")
    with state.connection(), pytest.raises(BusyError), state.connection():
        pass
    state.close()


def test_a_role_without_rights_is_denied(pg_server: PostgresServer) -> None:
    """What is lacking is a permission, and says so."""
    with pg_server.admin() as admin:
        admin.execute("create role nothing_allowed")
        dsn = make_conninfo(pg_server.socket_dsn(), options="-c role=nothing_allowed")
        state = State(lambda: dsn, "evermark_denied")
        try:
            with pytest.raises(DeniedError):
                migrate(state)
        finally:
            state.close()
            admin.execute("drop role nothing_allowed")
