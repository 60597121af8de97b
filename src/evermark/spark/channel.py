"""The channel between the driver and its lanes: Spark brings rows of a task only when the task has ended.

A lane calls the driver (a job of Spark, what to run), reports to it (health, metrics, log lines), and is told to begin
and to stop. Both ends prove that they know a key which is made for each process of `evermark up` and reaches the tasks
through the environment of the JVM: it is in no plan, option or command line. To executors on other machines it goes
sealed (`cluster.py`).
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener, answer_challenge, deliver_challenge
from typing import Any

from evermark.errors import EngineError, EvermarkError, UnreachableError

_ADDRESS, _KEY = "EVERMARK_CHANNEL", "EVERMARK_CHANNEL_KEY"
_CALLS, _LANE = "calls", "lane"
_FLUSH_EVERY_S = 0.05
BEAT_EVERY_S = 1.0
_PROOF_S = 10.0
_FREE_MAX = 4  # connections that a lane keeps between calls
_SILENT_MAX_S = 20.0  # what was sent and not confirmed by the other machine in this time ends the connection
_GONE = (EOFError, OSError)

# (target, method, arguments)
LaneReport = tuple[str, str, tuple[Any, ...], dict[str, Any]]


class Channel:
    """The driver's end. Made before the JVM is started, whose environment tells tasks where it is; `serve` begins."""

    def __init__(self, address: str = "127.0.0.1", bind: str | None = None) -> None:
        """`address` is where lanes find it; `bind` the address of this machine behind that, where it is another."""
        os.environ[_KEY] = key = secrets.token_hex(32)
        self._key = key.encode()
        # A client that connects proves itself in a thread of its own: a client that says nothing holds no other up.
        self._listener = Listener((bind or address, 0), "AF_INET", backlog=64)
        os.environ[_ADDRESS] = f"{address}:{self._listener.address[1]}"
        self._serves: Mapping[str, Callable[..., Any]] = {}
        self._heard: Callable[[str, list[LaneReport]], None] = lambda _lane, _reports: None
        self._lock = threading.Lock()
        self._lanes: dict[str, tuple[Connection[Any, Any], threading.Lock]] = {}  # each with the lock to send under
        self._open: set[Connection[Any, Any]] = set()
        self._closed = False

    def serve(self, serves: Mapping[str, Callable[..., Any]], heard: Callable[[str, list[LaneReport]], None]) -> None:
        """`serves` is what lanes may call, by name. `heard` gets their reports, in order for each lane; an empty list,
        now and then, says that a lane lives.
        """
        self._serves, self._heard = serves, heard
        threading.Thread(target=self._accept, name="channel", daemon=True).start()

    def tell(self, lane: str, *order: Any) -> bool:
        """False if there is no such lane any more."""
        with self._lock:
            connection, sending = self._lanes.get(lane, (None, None))
        if connection is None or sending is None:
            return False
        with sending:  # of this lane alone: one that does not listen holds up no other
            try:
                _send(connection, order)
            except _GONE:
                return False
        return True

    def close(self) -> None:
        """Lanes that are still connected notice it, and end."""
        if self._closed:
            return
        self._closed = True
        with suppress(OSError), socket.socket() as wake:  # of the thread that accepts
            wake.connect(self._listener.address)
        with suppress(OSError):
            self._listener.close()
        with self._lock:
            for connection in self._open:
                _cut(connection)

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection = self._listener.accept()
            except _GONE:
                if not self._closed:
                    time.sleep(_FLUSH_EVERY_S)
                continue
            threading.Thread(target=self._serve, args=(connection,), name="channel call", daemon=True).start()

    def _serve(self, connection: Connection[Any, Any]) -> None:
        with self._lock:
            self._open.add(connection)
        late = threading.Timer(_PROOF_S, self._cut_if_open, (connection,))
        late.start()
        try:
            deliver_challenge(connection, self._key)
            answer_challenge(connection, self._key)
            late.cancel()
            kind, name = connection.recv()
            if kind == _CALLS:
                self._answer(connection)
            else:
                self._listen(connection, name)
        except (AuthenticationError, *_GONE):
            pass  # it is no lane of ours; or it ended
        finally:
            late.cancel()
            with self._lock:
                self._open.discard(connection)
            with suppress(OSError):
                connection.close()

    def _cut_if_open(self, connection: Connection[Any, Any]) -> None:
        with self._lock:
            if connection in self._open:
                _cut(connection)

    def _answer(self, connection: Connection[Any, Any]) -> None:
        while True:
            name, arguments = connection.recv()
            try:
                answer: tuple[bool, Any] = (True, self._serves[name](*arguments))
            except EvermarkError as error:
                answer = (False, error)
            except Exception as error:  # noqa: BLE001 - said at the other end
                answer = (False, EngineError(f"{name}: {type(error).__name__}: {error}"[:1000]))
            _send(connection, answer)

    def _listen(self, connection: Connection[Any, Any], lane: str) -> None:
        with self._lock:
            self._lanes[lane] = connection, threading.Lock()
        try:
            while True:
                self._heard(lane, connection.recv())
        finally:
            with self._lock:
                # A retry of the lane's task may have connected before the end of its first attempt was seen here.
                if lane in self._lanes and self._lanes[lane][0] is connection:
                    del self._lanes[lane]


class LaneEnd:
    """A lane's end. `on_order` is called with each order of the driver; with None when the driver is gone."""

    def __init__(self, lane: str, on_order: Callable[[tuple[Any, ...] | None], None]) -> None:
        self._on_order = on_order
        self._lock = threading.Lock()
        self._reports: queue.SimpleQueue[LaneReport | None] = queue.SimpleQueue()
        self._urgent = threading.Event()
        self._closed = False
        self._open: set[Connection[Any, Any]] = set()
        self._free: list[Connection[Any, Any]] = []  # open, and no call is on it
        self._lane = self._connected(_LANE, lane)
        self._sender = threading.Thread(target=self._send, name="channel reports", daemon=True)
        self._sender.start()
        self._receiver = threading.Thread(target=self._receive, name="channel orders", daemon=True)
        self._receiver.start()

    def call(self, name: str, *arguments: Any) -> Any:
        """The driver's answer; its errors are raised here. Calls at the same time have a connection each."""
        try:
            with self._lock:
                connection = self._free.pop() if self._free else None
            if connection is None:
                connection = self._connected(_CALLS, name)
            succeeded, answer = self._asked(connection, name, arguments)
        except _GONE as error:
            raise UnreachableError("the driver of this lane is gone", hint="the lane ends") from error
        if succeeded:
            return answer
        raise answer

    def _asked(self, connection: Connection[Any, Any], name: str, arguments: tuple[Any, ...]) -> tuple[bool, Any]:
        """The connection is free for another call afterwards, unless this one failed half way or enough are free: at
        the driver each has a thread, and a lane that was busy for a moment keeps none of those for its whole life.
        """
        is_whole = False
        try:
            _send(connection, (name, arguments))
            answer: tuple[bool, Any] = connection.recv()
            is_whole = True
        finally:
            with self._lock:
                if is_whole and len(self._free) < _FREE_MAX:
                    self._free.append(connection)
                else:
                    self._open.discard(connection)
                    with suppress(OSError):
                        connection.close()
        return answer

    def tell(self, target: str, method: str, *arguments: Any, **named: Any) -> None:
        """A report to the driver; does not wait."""
        self._reports.put((target, method, arguments, named))

    def tell_now(self, target: str, method: str, *arguments: Any) -> None:
        """The same, for what another lane waits for."""
        self.tell(target, method, *arguments)
        self._urgent.set()

    def close(self) -> None:
        """All reports have been sent when this returns, and no thread is left: Spark uses the process again."""
        self._reports.put(None)
        self._sender.join()
        self._closed = True
        _cut(self._lane)
        self._receiver.join()
        with self._lock:
            for connection in self._open:
                with suppress(OSError):
                    connection.close()

    def _connected(self, kind: str, name: str) -> Connection[Any, Any]:
        host, _, port = os.environ[_ADDRESS].rpartition(":")
        connection = Client((host, int(port)), "AF_INET", authkey=os.environ[_KEY].encode())
        _notice_silence(connection)
        connection.send((kind, name))
        with self._lock:
            self._open.add(connection)
        return connection

    def _send(self) -> None:
        """Reports of a moment go together: a batch that is taken and delivered makes a dozen."""
        ends = False
        while not ends:
            reports: list[LaneReport | None] = []
            with suppress(queue.Empty):
                reports.append(self._reports.get(timeout=BEAT_EVERY_S))
                if reports[0] is not None:
                    self._urgent.wait(_FLUSH_EVERY_S)
                self._urgent.clear()
                while True:
                    reports.append(self._reports.get_nowait())
            ends = None in reports
            with suppress(*_GONE):  # the driver is gone: noticed by the thread that receives
                _send(self._lane, [one for one in reports if one is not None])

    def _receive(self) -> None:
        while True:
            try:
                order = self._lane.recv()
            except _GONE:
                if not self._closed:
                    self._on_order(None)
                return
            self._on_order(order)


def _send(connection: Connection[Any, Any], said: Any) -> None:
    """Raises `OSError` when another thread has just closed the connection, whatever Python calls that."""
    try:
        connection.send(said)
    except TypeError as error:
        if connection.closed:
            raise OSError("the connection is closed") from error
        raise


def _notice_silence(connection: Connection[Any, Any]) -> None:
    """A driver whose machine is gone says nothing, and a lane that waits for it for ever keeps its leases."""
    with socket.socket(fileno=os.dup(connection.fileno())) as same:
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            same.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(_SILENT_MAX_S * 1000))


def _cut(connection: Connection[Any, Any]) -> None:
    """End a connection that another thread reads. To close it here would end nothing while that thread waits, and would
    free a number of a file that it goes on to read.
    """
    with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as same:
        same.shutdown(socket.SHUT_RDWR)
