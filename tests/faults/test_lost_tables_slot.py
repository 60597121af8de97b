"""The replication slot of tables thrown away under the running process (P7), killed at steps of the repair."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from typing import Any

import psycopg
import pyarrow.parquet as pq

from evermark import failpoint
from evermark.log.read import LogReader
from evermark.testing.lost_slot import SLOT, slot_is_dropped
from evermark.testing.pipeline import Stage, died_by_itself, some_of
from evermark.testing.until import until

KILLS_A_RUN = 2
_COLUMNS = ["batch", "position", "stream", "key", "previous_key", "op", "payload", "flags"]


class TablesScene(Stage):
    """A shop whose orders are read without a trigger."""

    source = "shop"

    def __init__(self, folder: Path, dsn: str) -> None:
        super().__init__(folder, {"one": None}, one="bundle: 50")
        self.dsn = dsn
        self.env["SHOP_DSN"] = dsn

    def settings(self) -> str:
        return '{type: postgres, mode: tables, dsn: "${SHOP_DSN}", tables: [public.orders]}'

    def prepare(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute("create table public.orders (id int primary key, n int)")
        self.run("source", "install")

    def committed(self) -> list[str]:
        raise NotImplementedError("no outbox tells them")

    def events(self) -> list[dict[str, Any]]:
        """Of the orders, in the order of the log."""
        files = LogReader(self.folder / "data" / "log" / self.source).files_if_any()
        rows = [row for file in files for row in pq.read_table(file.path, columns=_COLUMNS).to_pylist()]
        return sorted(rows, key=lambda row: (row["batch"], row["position"]))

    def implied(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for row in self.events():
            for key in (row["previous_key"], row["key"]):
                found.pop(key, None)
            if row["op"] in {"insert", "update"}:
                found[row["key"]] = json.loads(row["payload"])
        return found

    def orders(self) -> dict[str, Any]:
        with psycopg.connect(self.dsn) as conn:
            return {str(number): {"id": number, "n": n} for number, n in conn.execute("select id, n from orders")}


class Trade(threading.Thread):
    """Orders come, go, change and get other numbers, until told to stop."""

    def __init__(self, dsn: str, seed: int) -> None:
        super().__init__(name="trade", daemon=True)
        self._dsn, self._rng, self._done = dsn, random.Random(seed), threading.Event()

    def run(self) -> None:
        with psycopg.connect(self._dsn, autocommit=True) as conn:
            while not self._done.wait(0.02):
                self.change(conn)

    def change(self, conn: psycopg.Connection[Any]) -> None:
        rng = self._rng
        key, other, kind = rng.randint(1, 200), rng.randint(201, 400), rng.random()
        if kind < 0.45:
            conn.execute("insert into orders values (%s, 0) on conflict (id) do update set n = orders.n + 1", (key,))
        elif kind < 0.65:
            conn.execute("update orders set n = n + 1 where id between %s and %s", (key, key + 20))
        elif kind < 0.85:
            conn.execute("delete from orders where id = %s", (key,))
        else:
            free = "update orders set id = %s where id = %s and not exists (select from orders where id = %s)"
            conn.execute(free, (other, key, other))

    def finish(self) -> None:
        self._done.set()
        self.join()


def test_p7_a_lost_slot_of_tables_is_repaired_by_itself_with_deaths_on_the_way(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN orders that come, go and change their keys WHEN the slot is dropped and the process dies at steps of the
    repair THEN the log implies the very orders there are, no event is in it twice, and reading goes on."""
    seed = random.randrange(10**9)
    print(f"seed {seed}")
    with TablesScene(tmp_path, pg_dsn) as scene, psycopg.connect(pg_dsn, autocommit=True) as admin:
        trade = Trade(pg_dsn, seed)
        trade.start()
        first, *others = some_of(failpoint.MEND, KILLS_A_RUN, seed)
        running = scene.up(f"{first}@1")
        scene.wait_delivered(20)
        until(lambda: slot_is_dropped(admin, SLOT), "the slot is dropped")
        for name in (*others, None):
            died_by_itself(running)
            running = scene.up(f"{name}@1" if name else None)
        trade.finish()
        until(lambda: scene.implied() == scene.orders(), "the log implies the orders there are", timeout_s=300)
        repaired = [row for row in scene.events() if "repaired" in (row["flags"] or [])]
        assert repaired and {row["op"] for row in repaired} >= {"delete"}, f"seed {seed}"
        logged = scene.logged()
        assert len(logged) == len(set(logged)), "the log holds an event twice"
        trade.change(admin)
        admin.execute("insert into orders values (1000, 1)")
        until(lambda: scene.implied() == scene.orders(), "it goes on")
        until(lambda: set(scene.handled["one"]) == set(scene.logged()), "all of it is delivered")
        found = json.loads(scene.run("source", "recover", "--json").stdout)
        assert [(each["choice"], each["step"], each["asked_by"]) for each in found["past"]] == [
            ("repair", "done", "itself")
        ]
        assert running.terminate() == 0


class WithDropped(TablesScene):
    """Beside the orders a table that is dropped."""

    def settings(self) -> str:
        return super().settings().replace("[public.orders]", "[public.orders, public.more]")

    def prepare(self) -> None:
        with psycopg.connect(self.dsn, autocommit=True) as conn:
            conn.execute("create table public.more (id int primary key)")
        super().prepare()


def test_p7_a_dropped_table_is_mended_by_the_file_and_a_restart_alone(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN a running instance WHEN a table of its file is dropped THEN it says which, and how that is mended; WHEN the
    file is without it and the instance starts again THEN what was written meanwhile is taken, without another word."""
    with WithDropped(tmp_path, pg_dsn) as scene, psycopg.connect(pg_dsn, autocommit=True) as admin:
        running = scene.up()
        admin.execute("insert into orders select n, 0 from generate_series(1, 20) n")
        scene.wait_delivered(19)
        admin.execute("drop table more")
        admin.execute("insert into orders values (100, 1)")
        until(lambda: running.health("shop/0").get("status") == "failed", "it stops", timeout_s=60)
        told = str(running.health("shop/0"))
        assert "public.more" in told and "take it out of the file, and start `evermark up` again" in told
        recover = scene.run("source", "recover", "--json", check=False)
        assert json.loads(recover.stdout)["past"] == [], "it spends no try"
        doctor = scene.run("doctor", "--json", check=False).stdout
        assert "start `evermark up` again" in doctor and "repairs it by itself" not in doctor
        assert running.terminate() == 0
        scene.config.write_text(scene.config.read_text().replace(", public.more]", "]"))
        running = scene.up()
        until(lambda: scene.implied() == scene.orders(), "the log implies the orders there are", timeout_s=120)
        admin.execute("insert into orders values (1000, 1)")
        until(lambda: scene.implied() == scene.orders(), "it goes on")
        assert running.terminate() == 0
