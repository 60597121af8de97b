"""Replicas on SQLite, over HTTP: a difference after a short and a long history, a bootstrap, and differing rows found.

`history`: 1 000 missing events fetched when there are 1 000 000 before them, against 10 000. `bootstrap`: an empty node
takes a table with all its rows by a snapshot; against `insert … select` from the one file into the other, which keeps
nothing but the rows. `divergence`: bodies moved in both directions to find ten rows that differ, against the bytes of
the table's rows as text.
"""

from __future__ import annotations

import shutil
import sqlite3
import time
from contextlib import closing
from pathlib import Path

from bench.report import Report, say
from evermark.replicas.auth import new_key
from evermark.replicas.client import HttpPeer
from evermark.replicas.diff import differences
from evermark.replicas.node import ReplicaNode, ReplicaService, now_ms
from evermark.replicas.replica import Replica
from evermark.replicas.settings import PeerSettings, ReplicaFolder, ReplicaSettings
from evermark.secrets import Secret

_HISTORY_SMALL, _HISTORY_LARGE = 10_000, 1_000_000
_MISSING = 1_000
_ROWS = 1_000_000
_DIFFERING = 10
_RUNS = 5
_SYNCS = 15  # of a tenth of a second each
_TABLE = "create table orders (id integer primary key, customer text, amount real, note text)"
_FILL = (
    "with recursive n(i) as (select {first} union all select i + 1 from n where i < {last}) insert into orders "
    "select i, 'customer ' || (i % 1000), i / 7.0, 'a note of about fifty characters, with its number ' || i from n"
)


class _Pair:
    """`a` serves, `b` asks."""

    def __init__(self, folder: Path, first_rows: int = 0, history: int = 0, *, copied: bool = False) -> None:
        folder.mkdir()
        self._folder, key = folder, new_key()
        self.files = {name: folder / f"{name}.db" for name in "ab"}
        with closing(sqlite3.connect(self.files["a"], isolation_level=None)) as a:
            a.execute(_TABLE)
            if first_rows:
                a.execute(_FILL.format(first=1, last=first_rows))
        self.folders = {}
        for name, other in (("a", "b"), ("b", "a")):
            self.folders[name] = ReplicaFolder(folder / name)
            store = Secret(str(self.files[name]))
            self.folders[name].save(ReplicaSettings("bench", name, store, peers={other: PeerSettings(key)}))
        self._install("a")
        self.write(1, history)
        if copied:
            self._install("a")  # a token is left with the history: the copy knows it as the other's
            with closing(sqlite3.connect(self.files["a"])) as a:
                a.execute("pragma wal_checkpoint(truncate)")
            shutil.copy(self.files["a"], self.files["b"])
        else:
            with closing(sqlite3.connect(self.files["b"])) as b:
                b.execute(_TABLE)
        self._install("b")
        self._service = ReplicaService(ReplicaNode(self.folders["a"]), "127.0.0.1", 0, 3600.0)
        self._service.start()
        self.folders["b"].add_peer("a", PeerSettings(key, f"http://127.0.0.1:{self._service.server.port}"))
        self._node = ReplicaNode(self.folders["b"])
        self.replica: Replica = self._node.claimed()
        self.peer: HttpPeer = self._node.peer("a", self.replica)

    def _install(self, name: str) -> None:
        replica = ReplicaNode(self.folders[name]).claimed()
        replica.store.install("orders", None, now_ms())
        if not replica.store.joined():
            replica.store.join({})
        replica.store.close()

    def write(self, first: int, last: int) -> None:
        if last >= first:
            with closing(sqlite3.connect(self.files["a"], isolation_level=None)) as a:
                a.execute(_FILL.format(first=first, last=last))

    def rows(self, name: str) -> int:
        with closing(sqlite3.connect(self.files[name])) as connection:
            return int(connection.execute("select count(*) from orders").fetchone()[0])

    def close(self) -> None:
        self._service.stop()
        self.replica.store.close()
        shutil.rmtree(self._folder)


def run(scale: float, folder: Path) -> Report:
    report = Report()
    _history(report, scale, folder)
    _bootstrap(report, scale, folder)
    _divergence(report, scale, folder)
    return report


def _history(report: Report, scale: float, folder: Path) -> None:
    sizes = {"s_small": max(1000, int(_HISTORY_SMALL * scale)), "s_large": max(10_000, int(_HISTORY_LARGE * scale))}
    pairs = {}
    for name, size in sizes.items():
        say(f"a history of {size} events")
        pairs[name] = _Pair(folder / name, history=size, copied=True)
        pairs[name].replica.meetings.sync(pairs[name].peer)
    taken: dict[str, list[float]] = {name: [] for name in sizes}
    for turn in range(_SYNCS):
        for name, pair in pairs.items():
            first = sizes[name] + turn * _MISSING + 1
            pair.write(first, first + _MISSING - 1)
            began = time.perf_counter()
            done = pair.replica.meetings.sync(pair.peer)
            taken[name].append(time.perf_counter() - began)
            report.lost += _MISSING - done.taken
    for name, pair in pairs.items():
        report.spread(name, taken[name])
        pair.close()
    report.ratios["history"] = report.figures["s_large"] / report.figures["s_small"]


def _bootstrap(report: Report, scale: float, folder: Path) -> None:
    rows = max(10_000, int(_ROWS * scale))
    say(f"bootstrap of {rows} rows")
    ours, theirs = [], []
    for turn in range(_RUNS):
        pair = _Pair(folder / f"bootstrap{turn}", first_rows=rows)
        began = time.perf_counter()
        pair.replica.meetings.sync(pair.peer)
        ours.append(rows / (time.perf_counter() - began))
        report.lost += rows - pair.rows("b")
        target = folder / "plain.db"
        with closing(sqlite3.connect(target, isolation_level=None)) as plain:
            plain.execute("pragma journal_mode = wal")
            plain.execute("pragma synchronous = full")
            plain.execute(_TABLE)
            plain.execute("attach ? as source", [str(pair.files["a"])])
            began = time.perf_counter()
            plain.execute("insert into orders select * from source.orders")
            theirs.append(rows / (time.perf_counter() - began))
        for path in folder.glob("plain.db*"):
            path.unlink()
        pair.close()
        if sum(rows / rate for rate in ours) > 60:
            break
    report.ratios["bootstrap"] = report.spread("bootstrap_rows_per_s", ours) / report.spread("copy_rows_per_s", theirs)


def _divergence(report: Report, scale: float, folder: Path) -> None:
    rows = max(10_000, int(_ROWS * scale))
    say(f"{_DIFFERING} differing rows of {rows}")
    pair = _Pair(folder / "divergence", first_rows=rows)
    pair.replica.meetings.sync(pair.peer)
    with closing(sqlite3.connect(pair.files["a"], isolation_level=None)) as a:
        a.execute("begin immediate")
        a.execute("update replication_meta set value = '1' where key = 'applying'")
        for at in range(_DIFFERING):
            a.execute("update orders set note = 'another' where id = ?", [1 + at * (rows // _DIFFERING)])
        a.execute("update replication_meta set value = '0' where key = 'applying'")
        a.execute("commit")
        size = a.execute("select sum(length(id) + length(customer) + length(amount) + length(note)) from orders")
        total = int(size.fetchone()[0])
    before, began = pair.peer.bytes_moved, time.perf_counter()
    found, whole = differences(pair.replica.node, pair.peer, "orders")
    report.figures["divergence_s"] = time.perf_counter() - began
    report.figures["divergence_bytes"] = pair.peer.bytes_moved - before
    report.ratios["divergence"] = report.figures["divergence_bytes"] / total
    report.lost += abs(_DIFFERING - len(found)) + (not whole)
    pair.close()
