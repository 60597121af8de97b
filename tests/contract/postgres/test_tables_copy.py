"""Rows from before the stream, copied beside it: exactly, in any order of commits, the same at each reading (X6)."""

from __future__ import annotations

import json
import os
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from evermark.errors import DeniedError, SetupError
from evermark.event import TAKEN
from evermark.ingest.pieces import Piece, ReadFrom
from evermark.secrets import Plain
from evermark.sources.base import Limit, Slice
from evermark.sources.copies import ChunkState, CopyPlace
from evermark.sources.postgres.connect import _SESSION, connect
from evermark.sources.postgres.settings import PostgresSettings
from evermark.sources.postgres.tables.chunk_file import FileMarks
from evermark.sources.postgres.tables.copyable import judged_copies, look_for_copy
from evermark.sources.postgres.tables.scan import TableScan
from evermark.sources.postgres.tables.source import PostgresTables
from evermark.testing.servers import PostgresServer, postgres_server
from evermark.testing.until import until
from tests.contract.postgres.copy_scene import copy_scene, implied, moved_unread, parts_read
from tests.contract.postgres.tables_scene import SOURCE, Row

CREATE = "create table t (id int primary key, v text, n int)"


def test_rows_from_before_come_at_their_mark(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN rows from before install WHEN they are copied THEN they come as `read`, peeked as sent, each id once."""
    create = f"{CREATE}; insert into t select n, 'v' || n, n from generate_series(1, 50000) n"
    with copy_scene(server, tmp_path / "copies", "public.t", create=create) as at:
        works = at.ask("public.t")
        assert len(works) == 3
        assert at.write(works) == 3
        at.run("insert into t values (0, 'new', 0)")
        rows = at.all()
        reads = [row for row in rows if row["op"] == "read"]
        assert [row["op"] for row in rows if row["op"] != "read"] == ["schema", "insert"]
        assert len({row["event_id"] for row in reads}) == 50000
        assert rows == sorted(rows, key=lambda row: row["position"])
        assert len({row["position"] for row in rows}) == len(rows)
        assert {row["schema_version"] for row in rows} == {1}
        assert all(row["event_time"] is not None for row in reads)
        found = implied(rows, "public.t")
        assert found == at.rows("t")
        # AND as the server sends them, and in pieces
        sent, _ = at.sent(at.source.earliest(0), len(rows))
        assert sent == rows
        middle = reads[20_500]["position"]
        first, last = rows[0]["position"], rows[-1]["position"]
        assert at.read(at.source.earliest(0), middle) + at.read(middle, last) == rows[:-1], (first, last)
        assert json.loads(reads[0]["payload"])["v"].startswith("v")


def test_rows_that_were_copied_are_logged_as_they_were_written(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN chunks that are ready, one of them beside changes, WHEN their batch is written THEN the log has the events
    that are read row by row, each chunk in a file of its own."""
    create = f"{CREATE}; insert into t select n, 'v' || n, n from generate_series(1, 50000) n"
    with copy_scene(server, tmp_path / "copies", "public.t", create=create) as at:
        works = at.ask("public.t")
        with at.writer("public.t") as writer:
            change = "update t set n = 0 where id <= 3"
            writer._catch_up = _before(writer._catch_up, lambda: at.run(change))  # type: ignore[method-assign]
            assert writer.write(works[0])
        assert at.write(works[1:]) == 2
        at.run("insert into t values (0, 'new', 0)")
        start = at.source.earliest(0)
        end = at.source.latest({0: start}, Limit(wait_s=5.0))[0]
        log = tmp_path / "log"
        log.mkdir()
        piece = Piece(Slice(0, start, end), 7, start, end, None)
        said = ReadFrom(SOURCE, at.source, str(log)).written(piece)
        files = {file["path"]: pq.read_table(log / file["path"]) for file in said["files"]}
        assert sorted(len(table) for table in files.values()) == [5, 10_000, 19_997, 20_000]
        logged = pa.concat_tables(files.values()).sort_by("position")
        assert logged.select(TAKEN.names).to_pylist() == at.read(start, end)
        for file in said["files"]:
            table = files[file["path"]]
            told = (file["rows"], *file["stats"]["position"][:2])
            assert told == (len(table), *pc.min_max(table["position"]).as_py().values())
        assert logged["batch"].unique().to_pylist() == [7] and logged["source"].unique().to_pylist() == [SOURCE]


def test_a_row_that_changes_between_snapshot_and_mark_is_told_by_its_change(
    server: PostgresServer, tmp_path: Path
) -> None:
    """GIVEN changes of all kinds between a chunk's snapshot and its mark WHEN it is ready THEN no read is older."""
    big = "repeat(md5(random()::text), 500)"
    create = f"""create table t (id int primary key, v text, n int); alter table t alter v set storage external;
        insert into t select n, {big}, 0 from generate_series(1, 8) n"""
    with copy_scene(server, tmp_path / "copies", "public.t", create=create) as at:
        (work,) = at.ask("public.t")

        def meanwhile() -> None:
            at.run(
                "update t set n = 1 where id = 1",  # its large value is not sent again
                f"update t set v = {big}, n = 1 where id = 2",
                "update t set n = 2 where id = 2",  # not sent again, but told before
                "delete from t where id = 3",
                "update t set id = 40 where id = 4",  # nor here, under another key
                "update t set n = 4 where id = 40",
                "insert into t values (9, 'new', 1)",
                "update t set n = 5 where id = 5",
                "update t set n = 6 where id = 5",
                "delete from t where id = 6",
                "insert into t values (6, 'again', 6)",
                "update t set n = 7 where id = 6",
            )

        with at.writer("public.t") as writer:
            writer._catch_up = _before(writer._catch_up, meanwhile)  # type: ignore[method-assign]
            assert writer.write(work)
        rows = at.all()
        assert implied(rows, "public.t") == at.rows("t")
        reads = {row["key"]: json.loads(row["payload"]) for row in rows if row["op"] == "read"}
        assert set(reads) == {"1", "5", "7", "8", "40"}
        assert (reads["1"]["n"], reads["5"]["n"], reads["7"]["n"]) == (1, 6, 0)
        assert reads["1"] == at.rows("t")["1"]


def test_tables_named_by_keywords_are_copied(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN a schema and a table whose names are reserved words WHEN the table is copied THEN its rows come."""
    create = """create schema "user"; create table "user"."order" (id int primary key);
        insert into "user"."order" values (1)"""
    with copy_scene(server, tmp_path / "copies", "user.order", create=create) as at:
        assert at.write(at.ask("user.order")) == 1
        assert [(row["stream"], row["key"]) for row in at.all() if row["op"] == "read"] == [("user.order", "1")]


def test_a_chunk_whose_rows_all_change_meanwhile_is_ready(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN a chunk of one row WHEN that is changed between its snapshot and its mark THEN the chunk is ready, without
    a row, and the table is told by the change."""
    create = f"{CREATE}; insert into t values (1, 'old', 0)"
    with copy_scene(server, tmp_path / "copies", "public.t", create=create) as at:
        (work,) = at.ask("public.t")
        with at.writer("public.t") as writer:
            writer._catch_up = _before(writer._catch_up, lambda: at.run("update t set v = 'new'"))  # type: ignore[method-assign]
            assert writer.write(work)
        rows = at.all()
        assert [row["op"] for row in rows if row["op"] != "schema"] == ["update"]
        assert implied(rows, "public.t") == at.rows("t")


def test_a_commit_that_becomes_visible_late(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN transactions open at the snapshot WHEN one commits before the mark, one later THEN nothing is lost."""
    create = f"{CREATE}; insert into t select n, 'old', 0 from generate_series(1, 4) n"
    with copy_scene(server, tmp_path / "copies", "public.t", create=create) as at:
        (work,) = at.ask("public.t")
        with at.connection() as one, at.connection() as two:
            with at.writer("public.t") as writer:
                one.execute("update t set v = 'one' where id = 1")
                two.execute("update t set v = 'two' where id = 2")
                writer._catch_up = _before(writer._catch_up, one.commit)  # type: ignore[method-assign]
                assert writer.write(work)
            two.commit()
        rows = at.all()
        assert implied(rows, "public.t") == at.rows("t")
        assert {row["key"] for row in rows if row["op"] == "read"} == {"2", "3", "4"}


def test_changes_stay_known_until_every_snapshot_shows_them(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN a change that the slot told with a chunk WHEN another chunk is written THEN it was still known."""
    create = f"{CREATE}; insert into t select n, 'old', 0 from generate_series(1, 30000) n"
    with copy_scene(server, tmp_path / "copies", "public.t", create=create) as at:
        first, second = at.ask("public.t")
        with at.writer("public.t") as writer:
            # Read with the first chunk; the snapshot of the second is made to look as one that came before it.
            writer._catch_up = _before(writer._catch_up, lambda: at.run("update t set v = 'x' where id = 30000"))  # type: ignore[method-assign]
            assert writer.write(first)
            shown = [row for batch in writer._seen for row in batch.to_pylist()]
            assert [row["key"] for row in shown] == ["30000"]
            assert writer.write(second)
            assert writer._seen == []  # shown by now
        assert implied(at.all(), "public.t") == at.rows("t")


def test_a_writer_waits_for_transactions_from_before_its_slot(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN a transaction that is open while a task begins WHEN it ends THEN the task goes on, and has its change."""
    create = f"{CREATE}; insert into t select n, 'old', 0 from generate_series(1, 4) n"
    with copy_scene(server, tmp_path / "copies", "public.t", create=create) as at:
        (work,) = at.ask("public.t")
        with at.connection() as other:
            other.execute("update t set v = 'late' where id = 3")
            done: list[int] = []
            thread = threading.Thread(target=lambda: done.append(at.write([work])))
            thread.start()
            thread.join(1.0)
            assert not done
            other.commit()
            thread.join(30.0)
            assert done == [1]
        assert implied(at.all(), "public.t") == at.rows("t")


def test_a_mark_of_an_attempt_that_was_given_up_is_void_for_ever(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN a task that died behind its mark WHEN the stream is read THEN nothing stands there, nor later; all is told
    by the next attempt."""
    create = f"{CREATE}; insert into t select n, 'old', 0 from generate_series(1, 4) n"
    with copy_scene(server, tmp_path / "copies", "public.t", create=create) as at:
        (work,) = at.ask("public.t")
        marks = FileMarks(at.copies, at.copying.folder, wait_s=0.2)
        at.source._marks_of_copies = lambda: marks  # type: ignore[method-assign]
        at.source._capture._marks = at.source._marks_of_copies
        with at.writer("public.t") as writer:
            late = writer._copies.ready
            seen: list[list[Row]] = []

            def read_first(*given: Any) -> bool:
                seen.append(at.all())
                return late(*given)

            writer._copies = Mock(wraps=at.copies, ready=read_first)
            assert not writer.write(work)
        assert seen == [[]] and at.all() == []
        assert at.write([work]) == 1
        rows = at.all()
        assert implied(rows, "public.t") == at.rows("t")
        assert len(list(at.copying.folder.iterdir())) == 1


def test_columns_rows_and_hashes_of_a_copy(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN excluded and hashed columns, a row filter and a condition WHEN copied THEN no file has what is hidden."""
    table = {"name": "public.t", "exclude": ["secret"], "hash": ["mail"], "where": "id > 2"}
    create = """create table t (id int primary key, secret text, mail text);
        insert into t select n, 'hidden', 'm' || n from generate_series(1, 9) n"""
    with copy_scene(server, tmp_path / "copies", table, create=create) as at:
        at.write(at.ask("public.t", "id % 2 = 0"))
        reads = [row for row in at.all() if row["op"] == "read"]
        assert [row["key"] for row in reads] == ["4", "6", "8"]
        assert all(set(json.loads(row["payload"])) == {"id", "mail"} for row in reads)
        (file,) = at.copying.folder.iterdir()
        plain = str(pq.read_table(file).to_pylist())
        assert "hidden" not in plain and "'m4'" not in plain and "sha256:" in plain


def test_a_column_that_is_to_be_hashed_since_is_shown_by_no_row_that_was_copied(
    server: PostgresServer, tmp_path: Path
) -> None:
    """GIVEN rows that wait to be taken WHEN the file wants a column of theirs hashed THEN none is taken as it is."""
    with copy_scene(server, tmp_path, "public.t", create="create table t (id int primary key, mail text)") as at:
        at.run("insert into t values (1, 'a@b.c')")
        assert at.write(at.ask("public.t")) == 1
        names = {"slot": at.settings.slot, "publication": at.settings.publication}
        wanted = {"dsn": at.dsn, "mode": "tables", "tables": [{"name": "public.t", "hash": ["mail"]}], **names}
        target = PostgresSettings.model_validate(wanted).target()
        other = PostgresTables(target, at.source._open, CopyPlace(lambda: at.copies, tmp_path))
        start = at.source.earliest(0)
        end = at.source.latest({0: start}, Limit(wait_s=5.0))[0]
        with pytest.raises(SetupError, match="show the column mail"):
            list(other.read(Slice(0, start, end)))


def test_a_table_whose_key_is_hashed_is_not_copied(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN a key that is to be hidden WHEN a copy is planned THEN it is refused: its bounds would be kept."""
    table = {"name": "public.t", "hash": ["id"]}
    with (
        copy_scene(server, tmp_path, table, create="create table t (id text primary key)") as at,
        pytest.raises(SetupError, match="its key has the column id, which is hashed"),
    ):
        at.ask("public.t")


def test_chunks_of_a_table_that_was_never_analyzed_are_bounded(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN rows with large values, and a server that has not counted them, WHEN cut THEN a chunk has few of them."""
    create = "create table t (id int primary key, body text) with (autovacuum_enabled = false)"
    with copy_scene(server, tmp_path, "public.t", create=create) as at:
        at.run("alter table t alter column body set storage external")
        at.run("insert into t select n, repeat('x', 100000) from generate_series(1, 600) n")
        assert len(at.ask("public.t")) >= 2


def test_messages_that_look_like_marks_stop_nobody(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN messages under our prefix, which anybody may send, WHEN read THEN nothing stands there."""
    with copy_scene(server, tmp_path, "public.t", create="create table t (id int primary key)") as at:
        at.run(
            "select pg_logical_emit_message(true, 'evermark', 'copy/0123456789abcdef/' || repeat('9', 5000) || '/1')",
            "select pg_logical_emit_message(true, 'evermark', 'copy/'::bytea || '\\x00'::bytea || '/1/1'::bytea)",
            "select pg_logical_emit_message(true, 'evermark', 'copy/0123456789abcdef/1/1')",
            "insert into t values (1)",
        )
        assert [(row["op"], row["key"]) for row in at.changes()] == [("insert", "1")]


def test_only_a_row_that_no_part_holds_when_it_is_read_lacks_a_large_value(
    server: PostgresServer, tmp_path: Path
) -> None:
    """GIVEN rows whose keys move between parts while these are copied WHEN all is read THEN those lack their large
    value that left their part before it was read and came into one that had been, and nobody else does."""
    create = """create table t (id int primary key, v text, n int); alter table t alter v set storage external;
        insert into t select n, repeat('x', 3000), 0 from generate_series(1, 10) n"""
    with (
        copy_scene(server, tmp_path / "copies", "public.t", create=create) as at,
        parts_read() as parts,
        at.writer("public.t") as writer,
    ):
        copy = at.copies.request(SOURCE, "public.t", "")
        at.copies.plan(copy.id, [(None, ("8",)), (("8",), None)], at.epoch)
        low, high = at.works(copy)
        catch_up = writer._catch_up

        def meanwhile(*moves: tuple[int, int]) -> None:
            at.run(*(f"update t set id = {to}, n = {to} where id = {key}" for key, to in moves))

        # Between the snapshot of a part and its mark, before which the change stands.
        writer._catch_up = _before(catch_up, lambda: meanwhile((1, 11), (9, 19), (10, 18)))  # type: ignore[method-assign]
        assert writer.write(high)
        meanwhile((2, 12), (3, 13), (4, 14), (14, 4), (5, 15), (15, 25))
        at.run("update t set v = 'told' where id = 13")
        writer._catch_up = _before(catch_up, lambda: meanwhile((6, 16), (4, 24)))  # type: ignore[method-assign]
        assert writer.write(low)
        meanwhile((7, 17), (25, 5))
        rows = at.all()
        lacking = moved_unread(rows, "public.t", "v", parts)
        assert lacking == {"11", "12", "5"}
        told, real = implied(rows, "public.t"), at.rows("t")
        assert {key for key, row in told.items() if row["v"] == "?"} == lacking
        assert told | {key: told[key] | {"v": real[key]["v"]} for key in lacking} == real


def test_beside_a_random_workload(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN writers that insert, update, delete, change keys and truncate WHEN tables are copied by several tasks, some
    of them twice THEN the events imply exactly the tables, at every reading, and no id is there twice; a large value is
    lacking only within the limit that is stated."""
    seed = random.randrange(10**9)
    create = """create table t (id int primary key, v text, n int); alter table t alter v set storage external;
        create table p (id int primary key, v text, n int) partition by hash (id);
        create table p0 partition of p for values with (modulus 2, remainder 0);
        create table p1 partition of p for values with (modulus 2, remainder 1);
        insert into t select n, repeat('x', 3000 * (n % 2)), 0 from generate_series(1, 3000) n;
        insert into p select n, 'p', 0 from generate_series(1, 2000) n"""
    with copy_scene(server, tmp_path / "copies", "public.t", "public.p", create=create) as at:
        over = threading.Event()

        def work_on(number: int) -> None:
            rng = random.Random(seed + number)
            with psycopg.connect(at.dsn) as db:
                while not over.is_set():
                    try:
                        for _ in range(rng.randint(1, 5)):
                            db.execute(_statement(rng).encode())
                        if rng.random() < 0.1:
                            over.wait(0.02)
                        db.rollback() if rng.random() < 0.1 else db.commit()
                    except psycopg.Error:
                        db.rollback()

        writers = [threading.Thread(target=work_on, args=(number,)) for number in range(4)]
        for thread in writers:
            thread.start()
        try:
            works = []
            for _ in range(2):
                for stream in ("public.t", "public.p"):
                    copy = at.copies.request(SOURCE, stream, "")
                    every = [(None, ("400",)), (("400",), ("900",)), (("900",), ("1700",)), (("1700",), None)]
                    at.copies.plan(copy.id, every, at.epoch)
                    works += at.works(copy)
                    at.copies.trouble(copy.id, "other", at.epoch, failed=True)  # so that the next one is another
            random.Random(seed).shuffle(works)
            with parts_read() as parts, ThreadPoolExecutor(3) as pool:
                counts = list(pool.map(at.write, [works[n::3] for n in range(3)]))
            assert sum(counts) == len(works), seed
        finally:
            over.set()
            for thread in writers:
                thread.join()
        rows = at.all()
        assert len({row["event_id"] for row in rows}) == len(rows), seed
        assert [row["position"] for row in rows] == sorted({row["position"] for row in rows}), seed
        assert sum(row["op"] == "read" for row in rows) > 100, seed
        for table in ("t", "p"):
            told, real = implied(rows, f"public.{table}"), at.rows(table)
            # One limit is stated, in docs/limits.md; no other row may lack its value.
            for key in moved_unread(rows, f"public.{table}", "v", parts):
                assert told[key].pop("v") == "?" and real[key].pop("v") is not None, (seed, table, key)
            assert told == real, (seed, table)
        sent, _ = at.sent(at.source.earliest(0), len(rows))
        assert sent == rows, seed


def _statement(rng: random.Random) -> str:
    table, key = rng.choice("tp"), rng.randint(1, 3200)
    skips = "on conflict do nothing"
    if rng.random() < 0.0004:  # in about half of all runs: no row that only a copy tells is left then
        return f"truncate {table}"
    return rng.choice([
        f"insert into {table} values ({key}, 'i{rng.random()}', {key}) on conflict (id) do nothing",
        f"insert into {table} select n, repeat('y', 2500), 1 from generate_series({key}, {key + 9}) n {skips}",
        f"update {table} set n = n + 1 where id between {key} and {key + 5}",
        f"update {table} set v = repeat('{rng.choice('abc')}', {rng.choice([5, 2600])}) where id = {key}",
        f"delete from {table} where id = {key}",
        f"update {table} set id = {rng.randint(1, 3200)} where id = {key}",
    ])  # fmt: skip


def _before(call: Callable[[], None], action: Callable[[], object]) -> Callable[[], None]:
    """The first time it is called, something happens in front of it."""
    actions = [action]

    def run() -> None:
        if actions:
            actions.pop()()
        call()

    return run


@pytest.mark.parametrize("partitioned", [False, True])
def test_a_large_table_is_cut_by_a_sample(
    server: PostgresServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, partitioned: bool
) -> None:
    """GIVEN a table of many pages, with a key of two columns WHEN it is cut THEN by a sample of them, about evenly; and
    every row is in one chunk, whatever the sample was."""
    body = "(place text, k0 bigint, v text, primary key (place, k0))"
    create = f"create table t {body} with (fillfactor = 10)"
    if partitioned:
        create = f"create table t {body} partition by hash (place)" + "".join(
            f"; create table t{n} partition of t for values with (modulus 2, remainder {n}) with (fillfactor = 10)"
            for n in range(2)
        )
    create += "; insert into t select (n % 3)::text, n, repeat('v', 60) from generate_series(1, 50000) n; analyze t"
    with copy_scene(server, tmp_path / "copies", "public.t", create=create) as at:
        monkeypatch.setattr(TableScan, "bounds", Mock(side_effect=AssertionError("it was walked")))
        works = at.ask("public.t")
        assert 2 <= len(works) <= 5
        assert at.write(works) == len(works)
        reads = [row for row in at.all() if row["op"] == "read"]
        assert len(reads) == 50_000 and len({row["key"] for row in reads}) == 50_000
        sizes = [chunk.rows for chunk in at.copies.chunks(works[0].copy, list(ChunkState))]
        assert max(sizes) < 45_000


def test_a_role_with_the_least_rights_copies(server: PostgresServer, tmp_path: Path) -> None:
    """GIVEN a role that may replicate WHEN it copies THEN it needs `select`, says so, and with it all comes."""
    create = f"{CREATE}; insert into t select n, 'old', 0 from generate_series(1, 4) n"
    role = f"copies_{random.randrange(10**9)}"
    with copy_scene(server, tmp_path / "copies", "public.t", create=create) as at:
        at.run(f"create role {role} login replication password 'x'")
        try:
            other = psycopg.conninfo.make_conninfo(at.dsn, user=role, password="x")
            low = replace(at.settings.target(), dsn=Plain(other))
            at.copying._target = low
            with pytest.raises(DeniedError, match="permission denied") as refused:
                at.ask("public.t")
            assert refused.value.hint.startswith(f"grant select on public.t to {role};")
            with connect(low.dsn) as link:
                (found,) = judged_copies(look_for_copy(link, low), wanted=True)
            assert found.mend == f"grant select on public.t to {role};"
            at.run(f"grant select on t to {role}")
            assert at.write(at.ask("public.t")) == 1
            with connect(low.dsn) as link:
                (found,) = judged_copies(look_for_copy(link, low), wanted=True)
            assert found.mend == "" and "can be copied" in found.found
        finally:
            at.run(f"drop owned by {role}", f"drop role {role}")
        assert implied(at.all(), "public.t") == at.rows("t")


def test_a_commit_that_every_slot_tells_and_no_snapshot_shows(
    tmp_path: Path, server: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a commit that waits for a standby, so that it is in the WAL and nobody sees it WHEN chunks are written, the
    second of which has its row THEN the stream's word counts, though the slot told it with the first."""
    if "bundled" not in os.environ.get("PYTEST_CURRENT_TEST", ""):
        pytest.skip("one server of its own is enough")
    monkeypatch.setitem(_SESSION, "synchronous_commit", "local")
    settings = {"synchronous_standby_names": "nobody", "synchronous_commit": "local", "wal_level": "logical"}
    create = f"{CREATE}; insert into t select n, 'old', 0 from generate_series(1, 30000) n"
    with (
        postgres_server(tmp_path / "waiting", settings) as other,
        copy_scene(other, tmp_path / "copies", "public.t", create=create) as at,
        psycopg.connect(at.dsn, autocommit=True) as late,
        at.writer("public.t") as writer,
    ):
        first, second = at.ask("public.t")
        late.execute("set synchronous_commit = on")
        update = threading.Thread(target=late.execute, args=("update t set v = 'late' where id = 25000",))
        update.start()
        waits = "select count(*) from pg_stat_activity where wait_event = 'SyncRep'"
        until(lambda: at.db.execute(waits).fetchone() == (1,), "the commit waits")
        assert at.rows("t")["25000"]["v"] == "old"
        assert writer.write(first) and writer.write(second)
        at.run("select pg_cancel_backend(pid) from pg_stat_activity where wait_event = 'SyncRep'")
        update.join()
        rows = at.all()
        assert at.rows("t")["25000"]["v"] == "late"
        assert implied(rows, "public.t") == at.rows("t")
