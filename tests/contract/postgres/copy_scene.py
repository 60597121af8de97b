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
from psycopg import sql

from evermark.cluster.fence import source_lease
from evermark.cluster.postgres import PostgresLeases
from evermark.ingest.copying.postgres import StateCopies, copies_in_state
from evermark.secrets import Plain
from evermark.sources.copies import ChunkState, ChunkWork, Copy, CopyPlace
from evermark.sources.postgres.tables.copying import ChunkWriter, TablesCopying
from evermark.sources.postgres.tables.install import TablesInstallation
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
        copy = self.copies.ask(SOURCE, stream, condition)
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
