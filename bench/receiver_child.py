"""A receiver in a process of its own that does next to nothing: keeps what comes in a file, answers 200.

`python -m bench.receiver_child FILE [SECONDS]` prints its port; it answers after so many seconds.
It parses no JSON and checks no signature, so that whoever posts is what is measured; what came is read from the file
afterwards.
"""

from __future__ import annotations

import asyncio
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, Self

_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_LENGTH = b"content-length: "


class _Connection(asyncio.Protocol):
    def __init__(self, out: BinaryIO, late_s: float) -> None:
        self._out = out
        self._late_s = late_s
        self._parts: list[bytes] = []
        self._size = 0
        self._wanted = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 * 1024 * 1024)

    def data_received(self, data: bytes) -> None:
        self._parts.append(data)
        self._size += len(data)
        while self._size >= (self._wanted or 1):
            whole = b"".join(self._parts)
            head = whole.find(b"\r\n\r\n")
            if head < 0:
                return
            at = whole.lower().find(_LENGTH, 0, head) if b"Content" in whole[:head] else whole.find(_LENGTH, 0, head)
            length = int(whole[at + len(_LENGTH) : whole.index(b"\r", at)])
            self._wanted = head + 4 + length
            if self._size < self._wanted:
                self._parts = [whole]
                return
            self._out.write(whole[head + 4 : self._wanted] + b"\n")
            if self._late_s:
                asyncio.get_running_loop().call_later(self._late_s, self._transport.write, _OK)
            else:
                self._transport.write(_OK)
            rest = whole[self._wanted :]
            self._parts, self._size, self._wanted = ([rest] if rest else []), len(rest), 0
            if not rest:
                return


async def _serve(out: BinaryIO, late_s: float) -> None:
    server = await asyncio.get_running_loop().create_server(lambda: _Connection(out, late_s), "127.0.0.1", 0)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


class ReceiverProcess:
    """The receiver, from outside. Its file is whole once it has ended."""

    def __init__(self, path: Path, late_s: float = 0.0) -> None:
        self.path = path
        self._late_s = late_s

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "bench.receiver_child", str(self.path), str(self._late_s)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"


if __name__ == "__main__":
    with open(sys.argv[1], "ab", buffering=1024 * 1024) as spool:
        asyncio.run(_serve(spool, float((sys.argv[2:] or ["0"])[0])))
