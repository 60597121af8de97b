"""Receivers in a process of their own, of which some can be made ill: `python -m bench.sick_child FILE`.

It prints three ports: of those that stay well, of those that become slow (an answer takes five seconds), of those that
die (nobody listens). A line `ill` or `well` on stdin changes it. FILE gets a line for each request: time, path, key.
"""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Self, TextIO

_OK = b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n"
_HEAD = re.compile(rb"POST /(\d+) .*?content-length: (\d+)\r\n", re.DOTALL | re.IGNORECASE)
_KEY = re.compile(rb'"key":"(\d+)"')
_SLOW_S = 5.0


class _Ward:
    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._open: dict[bool, set[asyncio.StreamWriter]] = {True: set(), False: set()}
        self.ill = False

    def hang_up(self) -> None:
        """End the connections of those that die."""
        for writer in self._open[True]:
            writer.close()
        self._open[True].clear()

    async def serve(self, *, slow: bool = False, dying: bool = False, port: int = 0) -> asyncio.Server:
        async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            self._open[dying].add(writer)
            try:
                while True:
                    head = await reader.readuntil(b"\r\n\r\n")
                    found = _HEAD.search(head)
                    assert found is not None
                    body = await reader.readexactly(int(found[2]))
                    key = _KEY.search(body)
                    if slow and self.ill:
                        await asyncio.sleep(_SLOW_S)
                    self._out.write(f"{time.time()} {found[1].decode()} {key[1].decode() if key else ''}\n")
                    writer.write(_OK)
            except (asyncio.IncompleteReadError, ConnectionError):
                writer.close()

        return await asyncio.start_server(connected, "127.0.0.1", port)


async def _main(out: TextIO) -> None:
    ward = _Ward(out)
    well, slow, dying = await ward.serve(), await ward.serve(slow=True), await ward.serve(dying=True)
    ports = [server.sockets[0].getsockname()[1] for server in (well, slow, dying)]
    sys.stdout.write(f"{ports[0]} {ports[1]} {ports[2]}\n")
    sys.stdout.flush()
    while line := await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline):
        ward.ill = line.strip() == "ill"
        if ward.ill:
            dying.close()
            ward.hang_up()
        elif not dying.is_serving():
            dying = await ward.serve(dying=True, port=ports[2])
        out.flush()
        sys.stdout.write("done\n")
        sys.stdout.flush()


class SickReceivers:
    """The same, from outside. The file is whole once it has ended."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> Self:
        command = [sys.executable, "-m", "bench.sick_child", str(self.path)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.well, self.slow, self.dying = map(int, self._line().split())
        return self

    def make(self, how: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(f"{how}\n")
        self._process.stdin.flush()
        self._line()

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


if __name__ == "__main__":
    with open(sys.argv[1], "a", buffering=1024 * 1024) as spool:
        asyncio.run(_main(spool))
