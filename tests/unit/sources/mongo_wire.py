"""A MongoDB server in a few lines, for what no real one does when asked: it speaks to the real driver over a socket,
and answers aggregates and getMores as a test says."""

from __future__ import annotations

import socket
import socketserver
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import bson
from bson import Timestamp

Answer = Callable[[dict[str, Any]], dict[str, Any] | None]  # None: the connection breaks

_HEADER = struct.Struct("<iiii")
_OP_REPLY, _OP_QUERY, _OP_MSG = 1, 2004, 2013
_ABOUT = {
    "ok": 1.0,
    "isWritablePrimary": True,
    "ismaster": True,
    "setName": "rs",
    "minWireVersion": 0,
    "maxWireVersion": 21,
    "maxBsonObjectSize": 16 << 20,
    "maxMessageSizeBytes": 48_000_000,
    "maxWriteBatchSize": 100_000,
    "logicalSessionTimeoutMinutes": 30,
    "operationTime": Timestamp(1_000_000, 1),
}


@contextmanager
def mongo_wire(answer: Answer) -> Iterator[str]:
    """The url of a server that answers so."""

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            while (message := _received(self.request)) is not None:
                number, operation, body = message
                is_query = operation == _OP_QUERY
                asked = bson.decode(body[body.index(b"\0", 4) + 9 :] if is_query else body[5:])
                said = _said(asked, answer)
                if said is None:
                    return
                document = bson.encode(said)
                told = struct.pack("<iqii", 8, 0, 0, 1) + document if is_query else b"\0\0\0\0\0" + document
                code = _OP_REPLY if is_query else _OP_MSG
                self.request.sendall(_HEADER.pack(16 + len(told), 0, number, code) + told)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True
        allow_reuse_address = True

    with Server(("127.0.0.1", 0), Connection) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        try:
            yield f"mongodb://127.0.0.1:{server.server_address[1]}/?directConnection=true"
        finally:
            server.shutdown()
            thread.join()


def _said(asked: dict[str, Any], answer: Answer) -> dict[str, Any] | None:
    if asked.keys() & {"hello", "ismaster", "isMaster"}:
        return _ABOUT
    if asked.keys() & {"aggregate", "getMore"}:
        return answer(asked)
    return {"ok": 1.0}


def batch(kind: str, events: list[dict[str, Any]], token: str) -> dict[str, Any]:
    """An answer of a change stream: `firstBatch` or `nextBatch`, and the token of how far the server has looked."""
    cursor = {"id": 7, "ns": "shop.$cmd.aggregate", kind: events, "postBatchResumeToken": {"_data": token}}
    return {"ok": 1.0, "cursor": cursor}


def _received(connection: socket.socket) -> tuple[int, int, bytes] | None:
    header = _exactly(connection, _HEADER.size)
    if header is None:
        return None
    size, number, _, operation = _HEADER.unpack(header)
    body = _exactly(connection, size - _HEADER.size)
    return None if body is None else (number, operation, body)


def _exactly(connection: socket.socket, size: int) -> bytes | None:
    found = b""
    while len(found) < size:
        some = connection.recv(size - len(found))
        if not some:
            return None
        found += some
    return found
