"""The one writer of a node: who shares a transaction, and what they are told when it fails."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from evermark.blocknode import writer as writer_module
from evermark.blocknode.bodies import CreateAsked, EventAsked, event_of
from evermark.blocknode.database import Database
from evermark.blocknode.ledger import Clocks, Ledger
from evermark.blocknode.refusal import Code, Refused
from evermark.blocknode.settings import NodeSettings
from evermark.blocknode.writer import Writer
from evermark.errors import DiskFullError

SETTINGS = NodeSettings(Path("nowhere"), seal_events=10)


def asked(kind: str = "channel") -> CreateAsked:
    return CreateAsked.model_validate({"kind": kind, "creator": "a"})


def event(stream: str, nonce: int, payload: str = "") -> Any:
    fields = {"kind": "message", "creator": "a", "at_us": 1, "nonce": f"n{nonce}", "payload": payload}
    return event_of(stream, EventAsked.model_validate(fields), 100_000)


class Full(sqlite3.Connection):
    """A database on a full disk: its log, grown before, has room for commits, and they cannot be brought over."""

    def execute(self, sql: str, *args: Any) -> sqlite3.Cursor:
        if "wal_checkpoint" in sql:
            raise full()
        return super().execute(sql, *args)


class FullFromTheStart(Full):
    def executescript(self, _: str) -> sqlite3.Cursor:
        raise full()


def full() -> sqlite3.OperationalError:
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


def with_writer(
    scene: Callable[[Writer, sqlite3.Connection], Awaitable[None]],
    factory: type[sqlite3.Connection] = sqlite3.Connection,
    path: Path | str = ":memory:",
) -> tuple[list[str], list[BaseException]]:
    """Run a scene with a writer over a new database; which streams changed, and what broke the writer."""
    changed: list[str] = []
    broken: list[BaseException] = []

    async def run() -> None:
        db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, factory=factory)
        db.executescript(files("evermark.blocknode").joinpath("schema.sql").read_text())
        writer = Writer(db, Ledger(db, SETTINGS, Clocks()), changed=changed.extend, broken=broken.append)
        await scene(writer, db)
        await writer.close()
        db.close()

    asyncio.run(run())
    return changed, broken


def count(db: sqlite3.Connection, table: str) -> int:
    return int(db.execute(f"select count(*) from {table}").fetchone()[0])


def test_many_writes_share_one_transaction_and_each_is_answered_after_it() -> None:
    """GIVEN a writer busy with one transaction WHEN many writes come THEN the next transaction takes them together."""

    async def scene(writer: Writer, db: sqlite3.Connection) -> None:
        await writer.run(lambda ledger: ledger.create("s", asked(), "i"))
        before = writer.counts.commits
        calls = [writer.run(lambda ledger, it=number: ledger.add("s", [event("s", it)])) for number in range(200)]  # type: ignore[misc]
        await asyncio.gather(*calls)
        assert writer.counts.writes == 201
        assert writer.counts.commits - before < 20
        assert count(db, "seen") == 200

    changed, broken = with_writer(scene)
    assert set(changed) == {"s"}
    assert not broken


def test_a_refused_write_leaves_nothing_and_its_neighbours_unharmed() -> None:
    """GIVEN good and refused writes in one transaction WHEN it commits THEN only the good ones are in it."""

    async def scene(writer: Writer, db: sqlite3.Connection) -> None:
        answers = await asyncio.gather(
            writer.run(lambda ledger: ledger.create("s", asked(), "i")),
            writer.run(lambda ledger: ledger.add("nowhere", [event("nowhere", 1)])),
            writer.run(lambda ledger: ledger.add("s", [event("s", 1)])),
            return_exceptions=True,
        )
        assert isinstance(answers[1], Refused)
        assert answers[1].code is Code.STREAM_NOT_FOUND
        assert (count(db, "streams"), count(db, "pool")) == (1, 1)

    with_writer(scene)


def test_a_full_disk_is_said_loses_nothing_and_ends_by_itself() -> None:
    """GIVEN no space WHEN events are added THEN they are refused, nothing of them stays; with space it goes on."""

    async def scene(writer: Writer, db: sqlite3.Connection) -> None:
        await writer.run(lambda ledger: ledger.create("s", asked(), "i"))
        kept = 0
        await asyncio.to_thread(
            db.execute, f"pragma max_page_count = {db.execute('pragma page_count').fetchone()[0] + 20}"
        )
        code = None
        while code is None and kept < 1000:
            try:
                await writer.run(lambda ledger, it=kept: ledger.add("s", [event("s", it, "x" * 1000)]))  # type: ignore[misc]
                kept += 1
            except Refused as refusal:
                code = refusal.code
        assert code is Code.DISK_FULL
        assert 0 < kept == count(db, "seen")
        assert writer.full
        await asyncio.to_thread(db.execute, "pragma max_page_count = 100000")
        added = await writer.run(lambda ledger: ledger.add("s", [event("s", kept, "x" * 1000)]))
        assert not added[0].duplicate
        assert not writer.full

    _, broken = with_writer(scene)
    assert not broken


def test_a_log_that_a_full_disk_keeps_from_being_trimmed_is_trimmed_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a full disk and a log with room WHEN the log is to be trimmed THEN the writer goes on without."""
    monkeypatch.setattr(writer_module, "_TRIM_EVERY", 1)

    async def scene(writer: Writer, db: sqlite3.Connection) -> None:
        await writer.run(lambda ledger: ledger.create("s", asked(), "i"))
        await writer.run(lambda ledger: ledger.add("s", [event("s", 1)]))
        assert count(db, "seen") == 1

    _, broken = with_writer(scene, Full)
    assert not broken


def of_class(factory: type[sqlite3.Connection]) -> Callable[[Database, int], sqlite3.Connection]:
    return lambda database, _: sqlite3.connect(database.path, isolation_level=None, factory=factory)


def test_a_node_starts_on_a_full_disk_or_says_that_it_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a full disk WHEN a node starts THEN it serves what it has; a new folder says to free space, and no more."""
    kept = Database(tmp_path / "kept")
    kept.open()[0].close()
    kept.close()
    monkeypatch.setattr(Database, "_connect", of_class(Full))
    connection, cut = Database(tmp_path / "kept").open()
    assert (count(connection, "meta"), cut) == (1, 0)
    connection.close()
    monkeypatch.setattr(Database, "_connect", of_class(FullFromTheStart))
    with pytest.raises(DiskFullError) as caught:
        Database(tmp_path / "new").open()
    assert "free some space" in caught.value.hint
    assert "restore" not in caught.value.hint


def test_a_write_that_fails_midway_is_undone_with_its_transaction() -> None:
    """GIVEN a write that raises after it wrote WHEN it fails THEN nothing of it is kept, and the writer goes on."""

    def half_done(ledger: Ledger) -> None:
        ledger.create("half", asked(), "i")
        raise RuntimeError("a mistake")

    async def scene(writer: Writer, db: sqlite3.Connection) -> None:
        with pytest.raises(Refused) as caught:
            await writer.run(half_done)
        assert caught.value.code is Code.FAILED
        assert count(db, "streams") == 0
        made, _ = await writer.run(lambda ledger: ledger.create("half", asked(), "i"))
        assert made

    changed, broken = with_writer(scene)
    assert changed == ["half"]
    assert not broken


def test_a_file_that_another_program_holds_is_waited_for(tmp_path: Path) -> None:
    """GIVEN another program that holds the file WHEN events are added THEN they are refused, until it lets go."""
    path = tmp_path / "held.db"

    async def scene(writer: Writer, db: sqlite3.Connection) -> None:
        await asyncio.to_thread(db.execute, "pragma busy_timeout = 10")
        await writer.run(lambda ledger: ledger.create("s", asked(), "i"))
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("begin immediate")
        with pytest.raises(Refused) as caught:
            await writer.run(lambda ledger: ledger.add("s", [event("s", 1)]))
        assert caught.value.code is Code.BUSY
        other.execute("rollback")
        other.close()
        added = await writer.run(lambda ledger: ledger.add("s", [event("s", 1)]))
        assert not added[0].duplicate
        assert count(db, "seen") == 1

    changed, broken = with_writer(scene, path=path)
    assert changed == ["s", "s"]
    assert not broken


def test_a_failed_disk_ends_the_writer_loudly() -> None:
    """GIVEN an error of the disk that is not fullness WHEN it is met THEN nothing is written any more, and said."""

    def unreadable(ledger: Ledger) -> None:
        ledger._db.execute("select * from a_table_that_is_gone")

    async def scene(writer: Writer, db: sqlite3.Connection) -> None:
        with pytest.raises(Refused):
            await writer.run(unreadable)
        writer._thread.join(5)
        with pytest.raises(Refused) as caught:
            await writer.run(lambda ledger: ledger.create("s", asked(), "i"))
        assert caught.value.code is Code.STOPPING

    _, broken = with_writer(scene)
    assert [type(error) for error in broken] == [sqlite3.OperationalError]
