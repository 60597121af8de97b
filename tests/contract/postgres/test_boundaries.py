"""A transaction is taken whole, once, in the batch its commit record falls in: wherever the WAL is cut."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from contextlib import closing

import psycopg
import pytest

from evermark.embedded.binaries import Binaries
from evermark.secrets import Plain
from evermark.sources.base import Limit
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.read.outbox_capture import OutboxCapture
from evermark.sources.postgres.read.slot import SlotReader
from evermark.sources.postgres.read.source import PostgresOutbox
from evermark.sources.postgres.target import PostgresTarget
from evermark.testing.servers import PostgresServer, postgres_server, system_binaries
from tests.contract.postgres.outbox_scene import Row, Scene, emit, scene

SEEDS = (11, 23)
SESSIONS = 5
STEPS = 160


@pytest.fixture(scope="module", params=[None, *system_binaries()], ids=lambda b: f"pg{b.major}" if b else "bundled")
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """Each Postgres at hand: behaviour at boundaries is the server's, and differs by version."""
    binaries: Binaries | None = request.param
    settings = {"max_prepared_transactions": "10", "wal_writer_delay": "10ms"}
    with postgres_server(tmp_path_factory.mktemp("boundaries"), settings, binaries=binaries) as found:
        yield found


class Writers:
    """Transactions that overlap at random. `committed` is what must be read, in this order."""

    def __init__(self, at: Scene, seed: int) -> None:
        self.random = random.Random(seed)
        self.at = at
        self.committed: list[str] = []
        self.number = 0
        self.sessions = [at.connection() for _ in range(SESSIONS)]
        self.written: list[list[str]] = [[] for _ in range(SESSIONS)]
        self.prepared: dict[str, list[str]] = {}

    def run(self, steps: int) -> None:
        for _ in range(steps):
            self._step(self.random.randrange(SESSIONS))
        for session in range(SESSIONS):
            self._commit(session)
        for name in list(self.prepared):
            self._commit_prepared(name)
        for connection in self.sessions:
            connection.close()

    def _step(self, session: int) -> None:
        connection, keys = self.sessions[session], self.written[session]
        choice = self.random.random()
        if choice < 0.45:
            keys.append(self._emit(connection))
        elif choice < 0.60:
            self._savepoint(connection, keys)
        elif choice < 0.70:
            connection.execute("create table if not exists other (v text)")
            connection.execute("insert into other values (repeat('x', 500))")
            connection.commit()
            self.committed += keys
            keys.clear()
        elif choice < 0.76:
            connection.rollback()
            keys.clear()
        elif choice < 0.84 and keys:
            self._prepare(connection, keys)
        elif choice < 0.88 and self.prepared:
            self._commit_prepared(self.random.choice(list(self.prepared)))
        else:
            self._commit(session)

    def _emit(self, connection: psycopg.Connection[object]) -> str:
        self.number += 1
        if self.random.random() < 0.3:
            connection.execute("set local synchronous_commit = off")
        emit(connection, "s", str(self.number))
        return str(self.number)

    def _savepoint(self, connection: psycopg.Connection[object], keys: list[str]) -> None:
        connection.execute("savepoint a")
        inner = [self._emit(connection) for _ in range(self.random.randint(1, 3))]
        if self.random.random() < 0.5:
            connection.execute("rollback to savepoint a")
        else:
            connection.execute("release savepoint a")
            keys += inner

    def _prepare(self, connection: psycopg.Connection[object], keys: list[str]) -> None:
        name = f"prepared_{self.number}"
        connection.execute(f"prepare transaction '{name}'".encode())
        connection.rollback()
        self.prepared[name] = list(keys)
        keys.clear()

    def _commit_prepared(self, name: str) -> None:
        self.at.db.execute(f"commit prepared '{name}'".encode())
        self.committed += self.prepared.pop(name)

    def _commit(self, session: int) -> None:
        self.sessions[session].commit()
        self.committed += self.written[session]
        self.written[session].clear()


def keys(rows: list[Row]) -> list[str]:
    return [row["key"] for row in rows if row["stream"] == "s"]


def written(at: Scene, seed: int) -> tuple[list[str], list[Row], int, int]:
    """What was committed, how it reads in one go, and the range it lies in."""
    start = Position.parse(at.source.earliest(0)).lsn
    writers = Writers(at, seed)
    writers.run(STEPS)
    end = at.flush_lsn()
    whole = at.read(at.position(start), at.position(end))
    return writers.committed, whole, start, end


def cuts(whole: list[Row], start: int, end: int, seed: int) -> list[int]:
    """Every commit LSN, one before, one after, and random places in between."""
    chance = random.Random(seed)
    found = {start, end}
    for lsn in {Position.parse(row["position"]).lsn for row in whole}:
        found |= {lsn - 1, lsn, lsn + 1}
    found |= {chance.randint(start, end) for _ in range(40)}
    return sorted(lsn for lsn in found if start <= lsn <= end)


@pytest.mark.parametrize("seed", SEEDS)
def test_interleaved_transactions_are_read_whole_in_commit_order(server: PostgresServer, seed: int) -> None:
    """Subtransactions, prepared and asynchronous ones: what committed is read, once, in order of commit."""
    with scene(server) as at:
        # GIVEN transactions that overlap at random
        committed, whole, start, end = written(at, seed)
        # THEN one read gives exactly what committed, in commit order, at rising positions
        assert keys(whole) == committed, f"seed {seed}"
        where = [row["position"] for row in whole]
        assert where == sorted(set(where)), f"seed {seed}"
        assert len({row["event_id"] for row in whole}) == len(whole)
        # AND reading again gives the same
        assert at.read(at.position(start), at.position(end)) == whole


@pytest.mark.parametrize("seed", SEEDS)
def test_wal_cut_anywhere_loses_and_doubles_nothing(server: PostgresServer, seed: int) -> None:
    """Consecutive ranges, cut at each commit LSN, beside it and at random, join to exactly the whole."""
    with scene(server) as at:
        # GIVEN a stretch of WAL and many places to cut it
        _, whole, start, end = written(at, seed)
        places = cuts(whole, start, end, seed)
        # WHEN each range is read without moving the slot
        joined: list[Row] = []
        for begin, finish in itertools.pairwise(places):
            piece = at.read(at.position(begin), at.position(finish))
            assert all(begin <= Position.parse(row["position"]).lsn < finish for row in piece), f"seed {seed}"
            joined += piece
        # THEN nothing is missing, nothing twice
        assert joined == whole, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_slot_advanced_to_each_cut_loses_nothing_after_it(server: PostgresServer, seed: int) -> None:
    """The same ranges with the slot moved to each boundary as soon as it is passed."""
    with scene(server) as at, closing(SlotReader(OutboxCapture(at.target))) as reader:
        # GIVEN a stretch of WAL and many places to cut it
        _, whole, start, end = written(at, seed)
        places = [*cuts(whole, start, end, seed)]
        # WHEN the slot follows every range
        joined: list[Row] = []
        for begin, finish in itertools.pairwise(places):
            joined += at.read(at.position(begin), at.position(finish))
            reader.advance(Position.parse(at.position(finish)))
            confirmed = at.value(
                "select confirmed_flush_lsn - '0/0'::pg_lsn from pg_replication_slots where slot_name = %s",
                at.target.slot,
            )
            assert confirmed <= finish, f"seed {seed}: the slot went past what was confirmed"
        # THEN nothing is missing, nothing twice
        assert joined == whole, f"seed {seed}"


@pytest.mark.parametrize("seed", SEEDS)
def test_cut_inside_a_transaction_by_ordinal_splits_at_that_event(server: PostgresServer, seed: int) -> None:
    """A position names one event: a range that begins or ends at it is exact, though no batch is cut so."""
    with scene(server) as at:
        _, whole, start, end = written(at, seed)
        middle = len(whole) // 2
        # WHEN the range is cut at an event in the middle
        cut = whole[middle]["position"]
        # THEN that event is the first of the second range
        assert at.read(at.position(start), cut) == whole[:middle]
        assert at.read(cut, at.position(end)) == whole[middle:]


def test_asynchronous_commits_beyond_the_flush_position_are_not_offered(server: PostgresServer) -> None:
    """200 commits with synchronous_commit = off, read as they come: never beyond the flush position, none missed."""
    with scene(server) as at:
        # GIVEN a reader that follows closely
        position = at.source.earliest(0)
        found: list[str] = []
        with at.connection() as writer:
            writer.autocommit = True
            writer.execute("set synchronous_commit = off")
            for number in range(200):
                emit(writer, "s", str(number))
                # WHEN it takes what is offered right after each commit
                end = at.source.latest({0: position}, Limit(wait_s=0.0))[0]
                assert Position.parse(end).lsn <= at.value("select pg_current_wal_flush_lsn() - '0/0'::pg_lsn")
                found += keys(at.read(position, end))
                position = end
        # THEN all 200 are there
        at.flush_lsn()
        found += keys(at.drain(position))
        assert found == [str(number) for number in range(200)]


def test_long_transaction_open_across_many_batches_is_taken_when_it_commits(server: PostgresServer) -> None:
    """Its changes lie far back in the WAL; its commit decides."""
    with scene(server) as at, at.connection() as long:
        # GIVEN a transaction with events, left open while others are taken and confirmed
        emit(long, "s", "long-1")
        position = at.source.earliest(0)
        slot = SlotReader(OutboxCapture(at.target))
        for number in range(20):
            at.emit("s", str(number))
            end = at.source.latest({0: position}, Limit())[0]
            assert keys(at.read(position, end)) == [str(number)]
            slot.advance(Position.parse(end))
            position = end
        # WHEN it commits
        emit(long, "s", "long-2")
        long.commit()
        # THEN it is the next thing read, whole
        assert keys(at.drain(position)) == ["long-1", "long-2"]


def test_crash_of_the_server_gives_the_same_events_again(tmp_path_factory: pytest.TempPathFactory) -> None:
    """After a crash the slot may stand further back; the range read is the same."""
    with postgres_server(tmp_path_factory.mktemp("crash")) as server, scene(server) as at:
        # GIVEN events read and confirmed, and more after them
        at.emit("s", "before")
        start = at.source.earliest(0)
        middle = at.position(at.flush_lsn())
        SlotReader(OutboxCapture(at.target)).advance(Position.parse(middle))
        at.emit("s", "after")
        end = at.position(at.flush_lsn())
        first = at.read(middle, end)
        # WHEN the server crashes and comes back
        database = at.db.info.dbname
        server.kill()
        server.start()
        at.target = PostgresTarget(Plain(server.dsn(database)), at.target.slot, at.target.publication)
        at.source = PostgresOutbox(at.target)
        at.db = psycopg.connect(server.dsn(database), autocommit=True)
        # THEN the same place gives the same events
        at.source.check({0: middle})
        assert at.read(middle, end) == first
        assert start < middle
        at.source.close()
