"""Tables on a real server that are copied beside their slot: what a source's owner and its tasks do, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

from evermark.cluster.fence import source_lease
from evermark.cluster.postgres import PostgresLeases
from evermark.ingest.copying.postgres import StateCopies, copies_in_state
from evermark.secrets import Plain
from evermark.sources.copies import Bounds, ChunkState, ChunkWork, Copy, CopyPlace, Mark
from evermark.sources.postgres.tables.copying import ChunkWriter, TablesCopying
from evermark.sources.postgres.tables.install import TablesInstallation
from evermark.sources.postgres.tables.snapshot import Snapshot
from evermark.sources.postgres.tables.source import PostgresTables, versions_in_state
from evermark.testing.servers import PostgresServer, fresh_database
from evermark.testing.states import fresh_state, owners
from tests.contract.postgres.tables_scene import SOURCE, Row, Scene, tables_settings


@dataclass
class CopyScene(Scene):
    copies: StateCopies
    copying: TablesCopying
    epoch: int

    def ask(self, stream: str, condition: str = "") -> list[ChunkWork]:
        """A copy that is planned, and its chunks."""
        copy = self.copies.request(SOURCE, stream, condition)
        self.copies.plan(copy.id, self.copying.plan(stream), self.epoch)
        return self.works(copy)

    def works(self, copy: Copy) -> list[ChunkWork]:
        found = self.copies.chunks(copy.id, [ChunkState.OPEN, ChunkState.WRITING])
        return [ChunkWork(copy.id, chunk.number, copy.stream, chunk.bounds, copy.condition) for chunk in found]

    def write(self, works: Sequence[ChunkWork]) -> int:
        """How many are ready then."""
        for _ in self.copying.write(works, self.epoch, 60.0):
            pass
        found = [self.copies.chunk(work.copy, work.number) for work in works]
        return sum(chunk is not None and chunk.state is ChunkState.READY for chunk in found)

    @contextmanager
    def writer(self, *streams: str) -> Iterator[ChunkWriter]:
        target = self.settings.target()
        versions = self.source._open()
        with ChunkWriter(target, self.copies, versions, self.copying._place, self.epoch) as writer:
            writer.begin(set(streams))
            yield writer
        versions.close()

    def rows(self, table: str) -> dict[str, Any]:
        """The table itself, by its key column `id`."""
        query = sql.SQL("select id::text, to_jsonb(t) from {} t").format(sql.Identifier(table))
        return dict(self.db.execute(query).fetchall())


def implied(events: Sequence[Row], stream: str) -> dict[str, Any]:
    """The table that the events imply; a large value that was not sent stays as it was."""
    rows: dict[str, Any] = {}
    for event in events:
        if event["stream"] != stream or event["op"] in ("schema", "message"):
            continue
        if event["op"] == "truncate":
            rows.clear()
            continue
        left = rows.pop(event["previous_key"] or event["key"], None)
        if event["op"] != "delete":
            payload = json.loads(event["payload"])
            unknown = [flag.removeprefix("unknown:") for flag in event["flags"] or () if flag.startswith("unknown:")]
            rows[event["key"]] = {**payload, **{name: (left or {}).get(name, "?") for name in unknown}}
    return rows


@dataclass(frozen=True)
class ReadPart:
    """A part of a stream, and the snapshot that its rows were read in."""

    stream: str
    bounds: Bounds
    snapshot: Snapshot

    def holds(self, key: str) -> bool:
        after, upto = (int(bound[0]) if bound is not None else None for bound in self.bounds)
        return (after is None or int(key) > after) and (upto is None or int(key) <= upto)


@contextmanager
def parts_read() -> Iterator[list[ReadPart]]:
    """The parts that are read meanwhile, whichever writer reads them."""
    found: list[ReadPart] = []
    scan = ChunkWriter._scan

    def noted(writer: ChunkWriter, work: ChunkWork, mark: Mark, draft: Path) -> tuple[Snapshot, int]:
        snapshot, rows = scan(writer, work, mark, draft)
        found.append(ReadPart(work.stream, work.bounds, snapshot))
        return snapshot, rows

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChunkWriter, "_scan", noted)
        yield found


def moved_unread(events: Sequence[Row], stream: str, column: str, parts: Sequence[ReadPart]) -> set[str]:
    """The keys of rows that lack a large value in this column because their key moved from a part that was not read yet
    into one that was (docs/limits.md): in no snapshot a row was where that part was read, and no event tells the value.
    """
    mine = [part for part in parts if part.stream == stream]
    return {key for key, path in _untold(events, stream, column).items() if not any(_saw(part, path) for part in mine)}


# Where a row has been: its first key, and then each event that moved it.
_Path = tuple[str, tuple[Row, ...]]


def _untold(events: Sequence[Row], stream: str, column: str) -> dict[str, _Path]:
    """By the keys of now: rows from before the stream, changed in it, of which no event has the column."""
    told: set[str] = set()
    emptied = False  # all rows have come in the stream since
    untold: dict[str, _Path] = {}
    for event in events:
        if event["stream"] != stream or event["op"] in ("schema", "message"):
            continue
        if event["op"] == "truncate":
            told.clear()
            untold.clear()
            emptied = True
            continue
        key, former = event["key"], event["previous_key"] or event["key"]
        first, moves = untold.pop(former, (former, ()))
        comes_whole = emptied or event["op"] != "update" or f"unknown:{column}" not in (event["flags"] or ())
        has_it = comes_whole or former in told
        told.discard(former)
        if event["op"] == "delete":
            continue
        if has_it:
            told.add(key)
        else:
            untold[key] = (first, moves if key == former else (*moves, event))
    return untold


def _saw(part: ReadPart, path: _Path) -> bool:
    """Whether the row stood in the part when that was read."""
    first, moves = path
    shown = [first, *(move["key"] for move in moves if part.snapshot.shows(int(move["tx"])))]
    return part.holds(shown[-1])


@contextmanager
def copy_scene(server: PostgresServer, folder: Path, *tables: Any, create: str) -> Iterator[CopyScene]:
    with (
        fresh_database(server) as dsn,
        psycopg.connect(dsn, autocommit=True) as db,
        fresh_state(dsn) as state,
    ):
        db.execute(create.encode())
        settings = tables_settings(dsn, *tables)
        TablesInstallation(settings).install([], wait_s=10.0, say=lambda line: None, goes_on=False)
        place = CopyPlace(
            partial(copies_in_state, Plain(dsn), state.schema), folder, SOURCE, all_wanted=True, chunk_rows_max=20_000
        )
        versions = partial(versions_in_state, Plain(dsn), state.schema, SOURCE)
        source = PostgresTables(settings.target(), versions, place)
        epoch = owners(PostgresLeases(state, is_gone=lambda holder: True))(source_lease(SOURCE))
        copying = TablesCopying(settings.target(), place, versions)
        try:
            yield CopyScene(dsn, settings, db, source, StateCopies(state), copying, epoch)
        finally:
            source.close()
