"""Answers as they come over the wire from nodes that are slow, cut off, or kept waiting."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import pytest

from evermark.errors import FormatError, UnreachableError
from evermark.sources.blocks.nodes.client import Node
from evermark.sources.blocks.target import Pace

DRIPS = 400
GOOD = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n" + b'{"n": 1}'


class Server:
    """Answers each request on each connection as `answer` does; it ends a connection by returning False."""

    def __init__(self, answer: Callable[[socket.socket], bool]) -> None:
        self._answer = answer
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self.connections = 0
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            self.connections += 1
            with connection:
                try:
                    while connection.recv(65536) and self._answer(connection):
                        pass
                except OSError:
                    pass  # the client has gone


@contextmanager
def serving(answer: Callable[[socket.socket], bool], read_s: float = 20.0) -> Iterator[tuple[Server, Node]]:
    server = Server(answer)
    server._thread.start()
    node = Node(server.url, None, Pace(connect_s=20.0, read_s=read_s))
    try:
        yield server, node
    finally:
        node.close()
        server._listening.shutdown(socket.SHUT_RDWR)
        server._listening.close()
        server._thread.join(10)


def test_an_answer_that_drips_does_not_hold_the_reader() -> None:
    """GIVEN a node that sends a byte now and then WHEN its time is over THEN it is left, with most of it unsent."""
    sent: list[int] = []
    gone = threading.Event()

    def drip(connection: socket.socket) -> bool:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n{}" % (DRIPS + 2))
        for at in range(DRIPS):
            if gone.wait(0.02):
                return False
            connection.sendall(b" ")
            sent.append(at)
        return True

    with serving(drip, read_s=0.2) as (_, node):
        with pytest.raises(UnreachableError, match="TimeoutError"):
            node.get("/v1/node")
        gone.set()
    assert len(sent) < DRIPS


@pytest.mark.parametrize(
    ("begins", "drips"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\nX: ", b"a"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"0"),
    ],
    ids=["continue", "header", "size of a chunk"],
)
def test_what_stands_before_a_body_has_to_come_in_time_too(begins: bytes, drips: bytes) -> None:
    """GIVEN a node that drips in the head of its answer or the size of a chunk WHEN its time is over THEN it is left,
    with most of it unsent."""
    sent: list[int] = []
    gone = threading.Event()

    def drip(connection: socket.socket) -> bool:
        connection.sendall(begins)
        for at in range(DRIPS):
            if gone.wait(0.02):
                return False
            connection.sendall(drips)
            sent.append(at)
        return False

    with serving(drip, read_s=0.2) as (_, node):
        with pytest.raises(UnreachableError, match="TimeoutError"):
            node.get("/v1/node")
        gone.set()
    assert len(sent) < DRIPS


@pytest.mark.parametrize("reused", [False, True])
def test_an_answer_that_is_cut_off_is_none(reused: bool) -> None:
    """GIVEN a body that ends early, and happens to be JSON THEN it is not taken for the answer."""
    answers = [GOOD] if reused else []

    def cut(connection: socket.socket) -> bool:
        if answers:
            connection.sendall(answers.pop())
            return True
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\n" + b'{"n": 1}')
        return False

    with serving(cut) as (_, node):
        if reused:
            assert node.get("/v1/node") == {"n": 1}
        with pytest.raises(UnreachableError):
            node.get("/v1/node")


def test_a_connection_is_used_again() -> None:
    """GIVEN answers that were read to their end THEN the next request goes over the same connection."""

    def good(connection: socket.socket) -> bool:
        connection.sendall(GOOD)
        return True

    with serving(good) as (server, node):
        assert [node.get("/v1/node") for _ in range(3)] == [{"n": 1}] * 3
        assert server.connections == 1


def test_an_answer_that_ends_its_connection_is_followed_by_another_connection() -> None:
    """GIVEN a node, or a proxy in front of one, that closes after each answer and says so THEN it is asked again."""

    def close(connection: socket.socket) -> bool:
        connection.sendall(GOOD.replace(b"\r\n", b"\r\nConnection: close\r\n", 1))
        return False

    with serving(close) as (server, node):
        assert [node.get("/v1/node") for _ in range(3)] == [{"n": 1}] * 3
        assert server.connections == 3


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/node", b'{"node": "n", "follows": "http://other", "followed": []}'),
        ("/v1/node", b'{"node": "n", "follows": "http://other", "followed": {"node": 5}}'),
        ("/v1/streams", b'{"node": "n", "streams": [], "touched": Infinity}'),
        ("/v1/streams", b'{"node": "n", "streams": [], "touched": NaN}'),
        ("/v1/streams", b'{"node": "n", "streams": [], "touched": 9223372036854775808}'),
        ("/v1/streams", b'{"node": "n", "streams": [5], "touched": 1}'),
        ("/v1/streams", b'{"node": "n", "streams": 5, "touched": 1}'),
    ],
    ids=lambda value: None if isinstance(value, str) else value[13:].decode(),
)
def test_what_a_node_says_of_itself_in_no_format_is_one_kind_of_error(path: str, body: bytes) -> None:
    """GIVEN JSON with other types and numbers than there can be THEN it is a `FormatError`, so that another node is
    asked."""

    def answer(connection: socket.socket) -> bool:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
        return True

    with serving(answer) as (_, node):
        ask: Callable[[], object] = node.about if path == "/v1/node" else partial(node.listing, 0, 0.0)
        with pytest.raises(FormatError):
            ask()
