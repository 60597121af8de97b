"""A shop whose table was full before the deployment that copies it came; it is written to all the while."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq

from evermark.log.read import LogReader
from evermark.testing.pipeline import Stage

_COLUMNS = ["event_id", "batch", "position", "stream", "key", "previous_key", "op", "payload", "flags"]
_MOVE = b"update items set id = %(other)s where id = %(one)s and not exists (select from items where id = %(other)s)"
_CHANGES = (
    b"insert into items values (%(other)s, 1, 'new') on conflict do nothing",
    b"update items set n = n + 1 where id between %(one)s and %(one)s + 20",
    b"delete from items where id = %(one)s",
    _MOVE,
)


class CopiedShop(Stage):
    """Tables of a Postgres database, without an outbox."""

    source = "shop"

    def __init__(self, folder: Path, dsn: str, rows: int, tables: str = "[public.items]") -> None:
        super().__init__(folder, {})
        self.dsn, self._rows, self._tables = dsn, rows, tables
        self.env["SHOP_DSN"] = dsn

    def settings(self) -> str:
        return f'{{type: postgres, dsn: "${{SHOP_DSN}}", mode: tables, start: copy, tables: {self._tables}}}'

    def prepare(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute("create table public.items (id int primary key, n int, v text)")
            conn.execute(
                "insert into public.items select n, 0, 'from before ' || n from generate_series(1, %s) n", (self._rows,)
            )
            conn.execute("create table public.later (id int primary key, v text)")
            conn.execute("insert into public.later select n, 'l' from generate_series(1, 1000) n")
        self.run("source", "install")

    def committed(self) -> list[str]:
        return []

    def rows(self, table: str) -> dict[str, Any]:
        with psycopg.connect(self.dsn) as conn:
            return dict(conn.execute(f"select id::text, to_jsonb(t) from {table} t".encode()).fetchall())

    def events(self) -> list[dict[str, Any]]:
        files = LogReader(self.folder / "data" / "log" / self.source).files_if_any()
        rows = [row for file in files for row in pq.read_table(file.path, columns=_COLUMNS).to_pylist()]
        return sorted(rows, key=lambda row: (row["batch"], row["position"]))

    def has_copied(self) -> bool:
        files = LogReader(self.folder / "data" / "log" / self.source).files_if_any()
        return any("read" in pq.read_table(file.path, columns=["op"])["op"].unique().to_pylist() for file in files)

    def implied(self, table: str) -> dict[str, Any]:
        """The table as the log has it: its events, one after the other."""
        found: dict[str, Any] = {}
        for row in self.events():
            if row["stream"] == f"public.{table}" and row["op"] in {"insert", "update", "delete", "read"}:
                found.pop(row["previous_key"] or row["key"], None)
                if row["op"] != "delete":
                    found[row["key"]] = json.loads(row["payload"])
        return found

    def files(self) -> list[str]:
        """Of chunks, that are there just now."""
        folder = self.folder / "data" / "log" / "_copies" / self.source
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


class ItemWriter(threading.Thread):
    """Changes items at random: new ones, other values, other keys, none."""

    def __init__(self, dsn: str, rows: int, seed: int, pause_s: float = 0.02) -> None:
        super().__init__(name="items", daemon=True)
        self._dsn, self._rows, self._rng, self._pause_s = dsn, rows, random.Random(seed), pause_s
        self._done = threading.Event()

    def run(self) -> None:
        rng = self._rng
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            while not self._done.wait(self._pause_s):
                one, other = rng.randint(1, self._rows), rng.randint(1, 2 * self._rows)
                conn.execute(rng.choice(_CHANGES), {"one": one, "other": other})

    def finish(self) -> None:
        self._done.set()
        self.join()
