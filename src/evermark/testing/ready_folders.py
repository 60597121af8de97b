"""Data folders of Postgres that are copied instead of made: initdb is 0.6 s of processor, each time for the same files.

What is copied is told from its original: a reader knows a server by its system identifier, which stands in the control
file and in each file of the WAL. Made as the product makes it, once for each installation of Postgres in a process.
"""

from __future__ import annotations

import atexit
import os
import secrets
import shutil
import subprocess
import tempfile
import threading
from functools import cache
from pathlib import Path

from evermark.embedded.binaries import Binaries, find_binaries
from evermark.embedded.postgres import EmbeddedPostgres

_CONTROL = Path("global") / "pg_control"
_CONTROL_BYTES = 1024  # what a server reads of it at most
_IDENTIFIER = slice(0, 8)  # of the control file
_IDENTIFIER_IN_WAL = 24  # in the header of a file of the WAL
_POLYNOMIAL = 0x82F63B78  # of CRC-32C
_ONE_AT_A_TIME = threading.Lock()


def lay(folder: Path, binaries: Binaries | None = None) -> None:
    """Put a data folder, and the file with its password, where `EmbeddedPostgres(folder)` expects them."""
    target = EmbeddedPostgres(folder, binaries=binaries or find_binaries())
    with _ONE_AT_A_TIME:
        original = _original(target.binaries)
    folder.mkdir(parents=True, exist_ok=True, mode=0o711 if os.geteuid() == 0 else 0o700)  # as the product makes it
    subprocess.run(["cp", "-a", original.data, original.passfile, folder], check=True)
    _tell_apart(target.data)


@cache
def _original(binaries: Binaries) -> EmbeddedPostgres:
    folder = Path(tempfile.mkdtemp(prefix="evermark-original-"))
    atexit.register(_remove, folder, os.getpid())
    folder.chmod(0o711)
    made = EmbeddedPostgres(folder / "postgres", settings={"fsync": "off"}, binaries=binaries)
    with made:
        pass
    return made


def _remove(folder: Path, maker: int) -> None:
    if os.getpid() == maker:  # and not a fork of it
        shutil.rmtree(folder, ignore_errors=True)


def _tell_apart(data: Path) -> None:
    """Give the copy an identifier of its own."""
    control = bytearray((data / _CONTROL).read_bytes())
    end = _checked_up_to(control)
    before = bytes(control[_IDENTIFIER])
    identifier = secrets.token_bytes(len(before) - 1) + before[-1:]  # as large as any: it begins with the time
    control[_IDENTIFIER] = identifier
    control[end : end + 4] = _crc(control[:end])
    (data / _CONTROL).write_bytes(control)
    for file in (data / "pg_wal").iterdir():
        if file.is_file():
            with file.open("r+b") as wal:
                wal.seek(_IDENTIFIER_IN_WAL)
                if wal.read(len(before)) == before:
                    wal.seek(_IDENTIFIER_IN_WAL)
                    wal.write(identifier)


def _checked_up_to(control: bytearray) -> int:
    """Where the check sum stands, which is another place in each version: behind all that it is made of."""
    found = 0xFFFFFFFF
    for at in range(min(len(control), _CONTROL_BYTES) - 4):
        if at % 4 == 0 and at and control[at : at + 4] == (found ^ 0xFFFFFFFF).to_bytes(4, "little"):
            return at
        found = _step(found, control[at])
    raise ValueError("the control file of Postgres has no check sum that fits")


def _crc(body: bytearray) -> bytes:
    found = 0xFFFFFFFF
    for byte in body:
        found = _step(found, byte)
    return (found ^ 0xFFFFFFFF).to_bytes(4, "little")


def _step(found: int, byte: int) -> int:
    found ^= byte
    for _ in range(8):
        found = (found >> 1) ^ (_POLYNOMIAL if found & 1 else 0)
    return found
