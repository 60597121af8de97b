"""`make chaos ARGS="--replicas 100000"`: three real nodes in a ring, killed and cut off while all write.

Two are on SQLite, one on Postgres; each has a writer that knows nothing of replicas. Rows that one node writes are
counted, and must be everywhere at the end; rows that all of them write must be the same everywhere.
"""

from __future__ import annotations

import random
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg

from evermark.replicas.auth import new_key
from evermark.replicas.node import ReplicaNode, now_ms
from evermark.replicas.settings import PeerSettings, ReplicaFolder, ReplicaSettings
from evermark.secrets import Secret
from evermark.testing.pipeline import Ledger
from evermark.testing.servers import free_port
from evermark.testing.tcp_proxy import TcpProxy
from evermark.testing.until import until

RING = ("a", "b", "c")
_PATIENCE_S = 900.0
_SHARED_KEYS = 20
_TABLE = "create table notes (id text primary key, by_node text, n bigint)"
_UPSERT = (
    "insert into notes values ({0}, {0}, {0}) on conflict (id) do update set by_node = excluded.by_node, n = excluded.n"
)


class LiveNode:
    """A node's process, its database, and its writer."""

    def __init__(self, name: str, folder: Path, store: str, port: int) -> None:
        self.name, self.folder, self._store, self._port = name, ReplicaFolder(folder / name), store, port
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def connect(self) -> Callable[[str, list[Any]], list[tuple[Any, ...]]]:
        """Run a statement and commit it, as a program would that knows nothing of replicas."""
        if "dbname=" not in self._store and "://" not in self._store:
            lite = sqlite3.connect(self._store, timeout=60, isolation_level=None, check_same_thread=False)
            return lambda sql, values: lite.execute(sql.replace("{0}", "?"), values).fetchall()
        pg = psycopg.connect(self._store, autocommit=True)

        def run(sql: str, values: list[Any]) -> list[tuple[Any, ...]]:
            cursor = pg.execute(sql.replace("{0}", "%s"), values)
            return cursor.fetchall() if cursor.description else []

        return run

    def rows(self) -> list[tuple[Any, ...]]:
        return sorted(self.connect()("select id, by_node, n from notes", []))

    def start(self) -> None:
        listen = f"127.0.0.1:{self._port}"
        command = [sys.executable, "-m", "evermark.cli.main", "replica", "serve"]
        with self._log.open("ab") as out:
            words = ["--data", str(self.folder.path), "--listen", listen, "--every", "1s"]
            self._process = subprocess.Popen([*command, *words], stdout=out, stderr=out)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> int:
        assert self._process is not None
        self._process.terminate()
        return self._process.wait(60)


def _made(folder: Path, dsn: str, stack: ExitStack) -> tuple[dict[str, LiveNode], list[TcpProxy]]:
    """Three nodes that do not run yet, each of which dials the next through a wire."""
    ports = {name: free_port() for name in RING}
    nodes, wires = {}, []
    key = {frozenset(pair): new_key() for pair in (("a", "b"), ("b", "c"), ("c", "a"))}
    for at, name in enumerate(RING):
        following, before = RING[(at + 1) % 3], RING[at - 1]
        wire = stack.enter_context(TcpProxy("127.0.0.1", ports[following]))
        wires.append(wire)
        store = dsn if name == "c" else str(folder / f"{name}.db")
        node = nodes[name] = LiveNode(name, folder, store, ports[name])
        if name != "c":
            Path(store).touch()
        node.connect()(_TABLE, [])
        next_peer = PeerSettings(key[frozenset((name, following))], f"http://127.0.0.1:{wire.port}")
        peers = {following: next_peer, before: replace(next_peer, key=key[frozenset((name, before))], url=None)}
        node.folder.save(ReplicaSettings("chaos", name, Secret(store), peers=peers))
        replica = ReplicaNode(node.folder).claimed()
        replica.store.install("notes", None, now_ms())
        replica.store.close()
        stack.callback(node.kill)
    return nodes, wires


def replicas_killed(folder: Path, dsn: str, writes: int, faults: int, seed: int = 1) -> Ledger:
    """What was counted, when the three nodes were equal at last."""
    rng = random.Random(seed)
    with ExitStack() as stack:
        nodes, wires = _made(folder, dsn, stack)
        written: dict[str, int] = dict.fromkeys(RING, 0)
        errors: list[BaseException] = []

        def write(node: LiveNode) -> None:
            run, chance = node.connect(), random.Random(f"{seed}{node.name}")
            try:
                for number in range(writes):
                    shared = number % 5 == 4
                    record = f"shared-{chance.randrange(_SHARED_KEYS)}" if shared else f"{node.name}-{number}"
                    run(_UPSERT, [record, node.name, number])
                    written[node.name] += 1
            except BaseException as error:  # noqa: BLE001 - told by the thread that waits
                errors.append(error)

        for node in nodes.values():
            node.start()
        writers = [threading.Thread(target=write, args=(node,), daemon=True) for node in nodes.values()]
        for writer in writers:
            writer.start()
        for fault in range(faults):
            share = (fault + 1) * writes // (faults + 1)
            until(lambda share=share: errors or min(written.values()) >= share, "writes", timeout_s=_PATIENCE_S)  # type: ignore[misc]
            wire, node = rng.choice(wires), rng.choice(list(nodes.values()))
            wire.cut()
            node.kill()
            node.start()
            rng.choice(wires).restore()
        for writer in writers:
            writer.join()
        assert not errors, errors
        for wire in wires:
            wire.restore()
        until(lambda: _are_equal(nodes), "the three nodes are equal", timeout_s=_PATIENCE_S)
        rows = {record for record, _, _ in nodes["a"].rows()}
        wanted = {f"{name}-{number}" for name in RING for number in range(writes) if number % 5 != 4}
        for node in nodes.values():
            assert node.stop() == 0, node.name
        lost = len(wanted - rows)
        return Ledger(sum(written.values()), len(rows), len(rows) * len(RING), 0, lost)


def _are_equal(nodes: dict[str, LiveNode]) -> bool:
    first, *others = (node.rows() for node in nodes.values())
    return all(other == first for other in others)
