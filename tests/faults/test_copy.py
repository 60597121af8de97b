"""Rows from before the stream are copied by a process that is killed on the way, again and again (X6)."""

from __future__ import annotations

import json
import random
from pathlib import Path

import psycopg

from evermark import failpoint
from evermark.testing.commands import REAL
from evermark.testing.copied_shop import CopiedShop, ItemWriter
from evermark.testing.lost_slot import SLOT, slot_is_dropped
from evermark.testing.pipeline import PATIENCE_S, died_by_itself, some_of
from evermark.testing.servers import PostgresServer, fresh_database
from evermark.testing.until import until

ROWS = 80_000  # of three chunks
KILLS_A_RUN = 2


def test_x6_a_copy_that_is_killed_on_the_way_goes_on_and_is_exact(tmp_path: Path, pg_server: PostgresServer) -> None:
    """GIVEN a full table that is written to WHEN the process dies at steps of copying it THEN it goes on without
    starting over, the log implies exactly the table, and no event is there twice; WHEN a table is added to the file
    THEN just that one is copied, and a backfill copies what a person asks for."""
    seed = random.randrange(10**9)
    with fresh_database(pg_server) as dsn, CopiedShop(tmp_path, dsn, ROWS) as shop:
        writer = ItemWriter(dsn, ROWS, seed)
        writer.start()
        try:
            for point in some_of(failpoint.COPY, KILLS_A_RUN, seed):
                died_by_itself(shop.up(point))
            running = shop.up()
            until(lambda: _are_copied(shop, 1), "the copy is done", timeout_s=PATIENCE_S)
        finally:
            writer.finish()
        _requires_exact(shop, "items", seed)
        reads = [row for row in shop.events() if row["op"] == "read"]
        assert len(reads) > ROWS * 0.9, seed
        assert shop.files() == []
        assert running.terminate() == 0

        shop.config.write_text(shop.config.read_text().replace("[public.items]", "[public.items, public.later]"))
        shop.run("source", "install")
        shop.run("source", "backfill", "shop", "--table", "public.items", "--where", "id % 1000 = 7")
        running = shop.up(commands=REAL)
        until(lambda: running.text().count("a copy is done") == 2, "both copies are done", timeout_s=PATIENCE_S)
        _requires_exact(shop, "later", seed)
        _requires_exact(shop, "items", seed)
        again = [row for row in shop.events() if row["op"] == "read"][len(reads) :]
        wanted = {key for key in shop.rows("items") if int(key) % 1000 == 7}
        assert {row["key"] for row in again if row["stream"] == "public.items"} == wanted
        assert sum(row["stream"] == "public.later" for row in again) == 1000
        copies = json.loads(shop.run("status", "--json").stdout)["copies"]
        assert [(copy["state"], copy["chunks_left"]) for copy in copies] == [("done", 0)] * 3
        assert running.terminate() == 0


def test_a_slot_that_is_lost_during_a_copy_loses_no_row(tmp_path: Path, pg_server: PostgresServer) -> None:
    """GIVEN a full table that is written to and copied WHEN the slot is dropped, once while chunks are ready and nobody
    reads them, once under the running process THEN the gap is closed, the copy ends, and the log implies the table."""
    seed = random.randrange(10**9)
    with (
        fresh_database(pg_server) as dsn,
        CopiedShop(tmp_path, dsn, ROWS) as shop,
        psycopg.connect(dsn, autocommit=True) as admin,
    ):
        writer = ItemWriter(dsn, ROWS, seed)
        writer.start()
        try:
            died_by_itself(shop.up("copy.ready"))
            until(lambda: slot_is_dropped(admin, SLOT), "the slot is dropped")
            running = shop.up()
            until(lambda: running.said("the gap is closed"), "the first gap is closed", timeout_s=PATIENCE_S)
            until(shop.has_copied, "rows are copied", timeout_s=PATIENCE_S)
            running.forget()
            until(lambda: slot_is_dropped(admin, SLOT), "the slot is dropped again")
            until(lambda: running.said("the gap is closed"), "the second gap is closed", timeout_s=PATIENCE_S)
            until(lambda: shop.said("a copy is done"), "the copy is done", timeout_s=PATIENCE_S)
        finally:
            writer.finish()
        _requires_exact(shop, "items", seed)
        assert any("repaired" in (row["flags"] or ()) for row in shop.events()), seed
        until(lambda: shop.files() == [], "no chunk is left over", timeout_s=PATIENCE_S)
        assert running.terminate() == 0


def _requires_exact(shop: CopiedShop, table: str, seed: int) -> None:
    wanted = shop.rows(table)
    until(lambda: shop.implied(table) == wanted, f"the log implies {table} (seed {seed})", timeout_s=60)
    ids = [row["event_id"] for row in shop.events()]
    assert len(set(ids)) == len(ids), seed


def _are_copied(shop: CopiedShop, copies: int) -> bool:
    """Asked of State: a process that is killed right after the last chunk was done does not come to say it."""
    if shop.files():
        return False  # chunks that nobody has read yet
    found = json.loads(shop.run("status", "--json").stdout)["copies"]
    return [copy["state"] for copy in found] == ["done"] * copies
