"""Thousands of clients of the live tail in a process of their own: `python -m bench.tail_child PORT TOKEN FILE`.

Orders come by line on stdin: `follow N PATH` connects clients that read what they can; `slow N PATH` clients that read
a little each second; `flush` writes what arrived to the file; `hurry N` has N of the slow ones read on as fast as they
can; `drop` hangs up on the other slow ones. Each order is answered by a line on stdout. The file has a record for each
event that a client got: the number of the client, the id of the order, the time.
"""

from __future__ import annotations

import re
import selectors
import socket
import struct
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RECORD = struct.Struct("<iqd")
_KEY = re.compile(rb'\n?data: .*?"evermark":.*?"key":"(\d+)"')
_SLOW_BYTES = 8 * 1024
_SLOW_EVERY_S = 1.0
_SLOW_BUFFER_BYTES = 64 * 1024


@dataclass(eq=False)
class Client:
    number: int
    connection: socket.socket
    left: bytes = b""
    slow: bool = False


class Clients:
    def __init__(self, port: int, token: str, path: Path) -> None:
        self._port, self._token = port, token
        self._selector = selectors.DefaultSelector()
        self._all: list[Client] = []
        self._records: list[bytes] = []
        self._file = path.open("ab")
        self._slow_at = 0.0

    def run(self) -> None:
        orders = sys.stdin.buffer
        self._selector.register(orders, selectors.EVENT_READ)
        while True:
            for key, _ in self._selector.select(0.2):
                if key.data is None:
                    order = orders.readline().decode().split()
                    if not order:
                        return
                    getattr(self, f"_{order[0]}")(*order[1:])
                    print("done", flush=True)
                else:
                    self._read(key.data, 1 << 18)
            if time.time() >= self._slow_at:
                self._slow_at = time.time() + _SLOW_EVERY_S
                for client in self._all:
                    if client.slow:
                        with suppress(BlockingIOError):
                            self._read(client, _SLOW_BYTES)

    def _follow(self, count: str, path: str) -> None:
        for _ in range(int(count)):
            self._selector.register((client := self._connected(path)).connection, selectors.EVENT_READ, client)

    def _slow(self, count: str, path: str) -> None:
        for _ in range(int(count)):
            self._connected(path, _SLOW_BUFFER_BYTES).slow = True

    def _hurry(self, count: str) -> None:
        for client in [one for one in self._all if one.slow][: int(count)]:
            client.slow = False
            self._selector.register(client.connection, selectors.EVENT_READ, client)

    def _drop(self) -> None:
        for client in [one for one in self._all if one.slow]:
            client.connection.close()
            self._all.remove(client)

    def _flush(self) -> None:
        self._file.write(b"".join(self._records))
        self._file.flush()
        self._records.clear()

    def _connected(self, path: str, buffer_bytes: int = 0) -> Client:
        connection = socket.socket()
        if buffer_bytes:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        connection.settimeout(60)
        connection.connect(("127.0.0.1", self._port))
        # HTTP/1.0: the answer is what comes, without chunks.
        connection.sendall(f"GET {path} HTTP/1.0\r\nAuthorization: Bearer {self._token}\r\n\r\n".encode())
        client = Client(len(self._all), connection)
        head = b""
        while b"\nid: " not in head:  # the client knows where it stands
            head += (got := connection.recv(65536))
            if not got or b" 200 " not in head[:20]:
                raise RuntimeError(head.decode(errors="replace")[:500])
        client.left = head.partition(b"\r\n\r\n")[2]
        connection.setblocking(False)
        self._all.append(client)
        return client

    def _read(self, client: Client, size: int) -> None:
        got = client.connection.recv(size)
        if not got:
            raise RuntimeError(f"the server hung up on client {client.number}")
        whole, _, client.left = (client.left + got).rpartition(b"\n\n")
        now = time.time()
        self._records += [RECORD.pack(client.number, int(key), now) for key in _KEY.findall(whole)]


if __name__ == "__main__":
    Clients(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])).run()
