"""The demo's third act: three peers that each take writes, one of them away for a while, another set back to a backup.

Two are SQLite files and one is a Postgres database. At the end every row that anybody wrote must be everywhere, and the
digests of the three tables, each computed by its own node, must be one.
"""

from __future__ import annotations

import socket
import sqlite3
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import psycopg

from evermark.app.demo_chat import EVERMARK
from evermark.errors import EvermarkError
from evermark.replicas.auth import new_key
from evermark.replicas.digests import Digest
from evermark.replicas.node import ReplicaNode, now_ms
from evermark.replicas.settings import PeerSettings, ReplicaFolder, ReplicaSettings, is_dsn
from evermark.secrets import Secret

_NORTH, _SOUTH, _HARBOUR = "north", "south", "harbour"
_WRITES = 300
_WAIT_S = 120.0
_LOOK_EVERY_S = 0.3
_TABLE = "create table stock (id text primary key, by_node text, amount bigint)"
_INSERT = "insert into stock values ({mark}, {mark}, {mark})"


class _Peer:
    def __init__(self, name: str, folder: Path, store: str, port: int, env: Mapping[str, str]) -> None:
        self.name, self.folder, self._store, self.port = name, ReplicaFolder(folder / name), store, port
        self._env, self._log = dict(env), folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._file = None if is_dsn(store) else Path(store)
        self._run(_TABLE, [])

    def _run(self, sql: str, rows: list[tuple[str, str, int]]) -> None:
        """As a program does that knows nothing of replicas."""
        if self._file is not None:
            with closing(sqlite3.connect(self._file, timeout=60)) as lite, lite:
                lite.executemany(sql.format(mark="?"), rows) if rows else lite.execute(sql)
            return
        with psycopg.connect(self._store) as pg, pg.cursor() as cursor:
            cursor.executemany(sql.format(mark="%s"), rows) if rows else cursor.execute(sql.encode())

    def join(self, cluster: str, peers: Mapping[str, PeerSettings]) -> None:
        self.folder.save(ReplicaSettings(cluster, self.name, Secret(self._store), peers=dict(peers)))
        replica = ReplicaNode(self.folder).claimed()
        replica.store.install("stock", None, now_ms())
        replica.store.close()

    def write(self, first: int, count: int) -> set[str]:
        rows = [(f"{self.name}-{number}", self.name, number) for number in range(first, first + count)]
        self._run(_INSERT, rows)
        return {row[0] for row in rows}

    def start(self) -> None:
        words = ["--data", str(self.folder.path), "--listen", f"127.0.0.1:{self.port}", "--every", "1s"]
        with self._log.open("ab") as out:
            command = [*EVERMARK, "replica", "serve", *words]
            self._process = subprocess.Popen(command, env=self._env, stdout=out, stderr=out)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def seen(self) -> tuple[str, Digest, set[str]]:
        """The origin it writes under, the digest of its table, and the rows that are in it."""
        replica = ReplicaNode(self.folder).open()
        try:
            rows = {record for each in replica.answers.rows("stock", [(None, None)]) for record, _ in each}
            return replica.store.identity()[0], replica.answers.digests("stock", [(None, None)])[0], rows
        finally:
            replica.store.close()


def play(folder: Path, dsn: str, env: Mapping[str, str], say: Callable[[str], None]) -> int:
    """How many rows that were written are missing somewhere in the end; digests that differ are an error."""
    folder.mkdir(parents=True)
    with ExitStack() as stack:
        stores = {_NORTH: str(folder / "north.db"), _SOUTH: str(folder / "south.db"), _HARBOUR: dsn}
        peers = {name: _Peer(name, folder, store, _free_port(), env) for name, store in stores.items()}
        keys = {frozenset(pair): new_key() for pair in ((_NORTH, _SOUTH), (_SOUTH, _HARBOUR))}
        for name, peer in peers.items():  # a chain: north and harbour never meet
            others = [next(iter(pair - {name})) for pair in keys if name in pair]
            urls = {other: f"http://127.0.0.1:{peers[other].port}" for other in others}
            peer.join("demo", {o: PeerSettings(keys[frozenset((name, o))], url) for o, url in urls.items()})
            stack.callback(peer.kill)
        north, south, harbour = peers.values()
        for peer in peers.values():
            peer.start()
        say("third act: two SQLite files and a Postgres table are peers in a chain, and each is written to")
        written = {record for peer in peers.values() for record in peer.write(0, _WRITES)}
        _wait_until_equal(peers, written, say)

        before = south.seen()[0]
        file = folder / "south.db"
        backup = _backed_up(file)
        harbour.kill()
        say("harbour goes offline; a backup of south is made; north and south go on")
        written |= north.write(_WRITES, _WRITES) | south.write(_WRITES, _WRITES) | harbour.write(_WRITES, _WRITES)
        _wait_until_equal({_NORTH: north, _SOUTH: south}, written - {f"{_HARBOUR}-{n}" for n in _since()}, say)
        south.kill()
        for path in folder.glob(f"{file.name}-*"):
            path.unlink()
        backup.rename(file)
        south.start()
        harbour.start()
        say("south is set back to its backup, under the feet of the others; harbour comes back")
        written |= south.write(2 * _WRITES, _WRITES)
        missing = _wait_until_equal(peers, written, say)
        after = south.seen()[0]
        if after == before:
            raise EvermarkError("the restored peer went on under its old origin", hint=f"see {folder}")
        say(f"south writes as {after} now, no more as {before}")
        return missing


def _since() -> range:
    return range(_WRITES, 2 * _WRITES)


def _wait_until_equal(peers: Mapping[str, _Peer], written: set[str], say: Callable[[str], None]) -> int:
    """Until each has all that was written and the same digest, or for so long; how many rows are missing then."""
    deadline = time.monotonic() + _WAIT_S
    while True:
        found = {name: peer.seen() for name, peer in peers.items()}
        missing = sum(len(written - rows) for _, _, rows in found.values())
        digests = {digest for _, digest, _ in found.values()}
        if (not missing and len(digests) == 1) or time.monotonic() > deadline:
            break
        time.sleep(_LOOK_EVERY_S)
    for name, (_, digest, rows) in found.items():
        say(f"  {name}: {len(rows)} rows, digest {digest.value.hex()}")
    if not missing and len(digests) > 1:
        raise EvermarkError("peers have the same keys, and rows that differ", hint="evermark replica diff names them")
    return missing


def _backed_up(file: Path) -> Path:
    path = file.with_suffix(".backup")
    with closing(sqlite3.connect(file)) as source, closing(sqlite3.connect(path)) as target:
        source.backup(target)
    return path


def _free_port() -> int:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        return int(taken.getsockname()[1])
