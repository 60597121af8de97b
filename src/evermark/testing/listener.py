"""A receiver on a port, in a thread of its own: what `evermark listen`, the tests and the benches listen with."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import random
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, Self

from aiohttp import web

from evermark.errors import BusyError, ConfigError, DeniedError, DiskFullError, EvermarkError, UnreachableError
from evermark_receiver import Event, Receiver, Response

BODY_BYTES_MAX = 16 * 1024 * 1024
RECORDS_MAX = 100_000
STOP_WAIT_S = 2.0


@dataclass(frozen=True)
class Record:
    """One event that came, handled or recognised as a duplicate."""

    event: Event
    duplicate: bool
    at: str

    def fields(self) -> dict[str, Any]:
        """What `--record` writes; the payload is not in it."""
        event = self.event
        return {
            "id": event.id,
            "delivery": event.delivery_id,
            "source": event.source,
            "stream": event.stream,
            "key": event.key,
            "previous_key": event.previous_key,
            "op": event.op,
            "position": event.position,
            "duplicate": self.duplicate,
            "historical": event.historical,
            "attempt": event.attempt,
            "at": self.at,
        }


@dataclass(frozen=True)
class Failing:
    """Answer `status` to the first `count` requests, or to each with probability `share`."""

    status: int
    count: int = 0
    share: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Failing:
        status_text, _, amount = text.partition(":")
        form = "expected STATUS:COUNT or STATUS:PERCENT%, for example 503:3 or 503:10%"
        try:
            status = int(status_text)
            share = float(amount[:-1]) / 100 if amount.endswith("%") else 0.0
            count = 0 if amount.endswith("%") else int(amount)
        except ValueError:
            raise ValueError(form) from None
        if not (300 <= status <= 599 and 0 <= share <= 1 and count >= 0):
            raise ValueError(f"{form}; the status is 300 to 599, a share at most 100%")
        return cls(status, count, share)

    def fails(self, request: int, rng: random.Random) -> bool:
        """Whether request number `request`, counted from 0, fails."""
        return request < self.count or (self.share > 0 and rng.random() < self.share)


class RecordFile:
    """JSON lines, each handed to the system in one write: a killed process tears at most the last line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file: BinaryIO = path.open("ab", buffering=0)
            self._torn = _is_torn(path)
        except OSError as error:
            raise ConfigError(
                f"cannot write records to {path}: {error.strerror}", hint="name a file in a folder that is writable"
            ) from error

    def append(self, record: Record) -> None:
        line = (b"\n" if self._torn else b"") + json.dumps(record.fields()).encode() + b"\n"
        written = self._file.write(line)
        self._torn = written != len(line)
        if self._torn:
            raise DiskFullError(f"could not write a whole record to {self._path}", hint="free some space")

    def close(self) -> None:
        self._file.close()


def _is_torn(path: Path) -> bool:
    with path.open("rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


class Listener:
    """A receiver on a port, in a thread of its own. Use as a context manager, or `start` and `stop`.

    `records` holds the last `records_max` events; `on_record` and `on_refusal` are called in the listener's thread,
    `on_record` before the event is answered. Without secrets nothing is verified.
    """

    def __init__(
        self,
        *,
        secrets: Sequence[str] = (),
        host: str = "127.0.0.1",
        port: int = 0,
        failing: Failing | None = None,
        slow_s: float = 0.0,
        record: Path | None = None,
        records_max: int = RECORDS_MAX,
        on_record: Callable[[Record], None] | None = None,
        on_refusal: Callable[[Response], None] | None = None,
        rng: random.Random | None = None,
    ) -> None:
        try:
            self.receiver = Receiver(tuple(secrets), unverified=not secrets, body_bytes_max=BODY_BYTES_MAX)
        except ValueError as error:
            raise ConfigError(f"listen: {error}", hint="copy the secret of the subscription, whsec_…") from error
        self.host = host
        self.port = port
        self.failing = failing
        self.slow_s = slow_s
        self.requests = 0
        self.failed_on_purpose = 0
        self.records: deque[Record] = deque(maxlen=records_max)
        self._record_path = record
        self._file: RecordFile | None = None
        self._on_record = on_record
        self._on_refusal = on_refusal
        self._rng = rng or random.Random()
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{host}:{self.port}/"

    def start(self) -> Self:
        """Listen. Afterwards `port` is the real one."""
        if self._record_path is not None:
            self._file = RecordFile(self._record_path)
        started: Future[int] = Future()
        self._thread = threading.Thread(target=self._run, args=(started,), name="evermark-listen", daemon=True)
        self._thread.start()
        try:
            self.port = started.result()
        except OSError as error:
            self._thread.join()  # its event loop is closed: `stop` must not find the thread alive and wake that loop
            self.stop()
            raise _cannot_listen(self.host, self.port, error) from error
        return self

    def stop(self) -> None:
        """Answer what is under way, for a short while, and let the port go. May be called twice."""
        if self._loop is not None and self._stopping is not None and self._thread is not None:
            if self._thread.is_alive():
                self._loop.call_soon_threadsafe(self._stopping.set)
            self._thread.join()
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_for(self, condition: Callable[[Listener], bool], timeout_s: float) -> bool:
        """Wait until `condition` holds, looked at after each request; False when it does not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self), timeout_s)

    def _run(self, started: Future[int]) -> None:
        try:
            asyncio.run(self._serve(started))
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)

    async def _serve(self, started: Future[int]) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        app = web.Application(client_max_size=BODY_BYTES_MAX + 1)
        app.router.add_get("/{path:.*}", self._counters)
        app.router.add_post("/{path:.*}", self._post)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=STOP_WAIT_S)
        await runner.setup()
        try:
            await web.TCPSite(runner, self.host, self.port).start()
            started.set_result(int(runner.addresses[0][1]))
            await self._stopping.wait()
        finally:
            await runner.cleanup()

    async def _counters(self, request: web.Request) -> web.Response:
        return web.json_response(self.counts())

    def counts(self) -> dict[str, int]:
        """Requests, and what became of the events in them; see `evermark_receiver.Counters`."""
        of_requests = {"requests": self.requests, "failed_on_purpose": self.failed_on_purpose}
        return {**of_requests, **asdict(self.receiver.counters)}

    async def _post(self, request: web.Request) -> web.Response:
        number = self.requests
        self.requests += 1
        try:
            if self.failing is not None and self.failing.fails(number, self._rng):
                self.failed_on_purpose += 1
                response = Response(self.failing.status, {}, b'{"reason": "failing on purpose"}')
            else:
                try:
                    body = await request.read()
                except web.HTTPRequestEntityTooLarge:
                    response = self.receiver.too_large()
                else:
                    response = await self.receiver.handle_async(request.headers.items(), body, self._handler())
            for event in response.duplicates:
                self._take(event, duplicate=True)
            if response.status != 200 and self._on_refusal is not None:
                self._on_refusal(response)
        finally:
            with self._changed:
                self._changed.notify_all()
        return web.Response(status=response.status, headers=dict(response.headers), body=response.body)

    def _handler(self) -> Callable[[Event], Awaitable[None]]:
        """The handler of one request: being slow is a property of the request, not of each event in a bundle."""
        wait_s = self.slow_s

        async def take(event: Event) -> None:
            nonlocal wait_s
            if wait_s:
                await asyncio.sleep(wait_s)
                wait_s = 0.0
            self._take(event, duplicate=False)

        return take

    def _take(self, event: Event, *, duplicate: bool) -> None:
        record = Record(event, duplicate, datetime.now(UTC).isoformat())
        if self._file is not None:
            self._file.append(record)
        self.records.append(record)
        if self._on_record is not None:
            self._on_record(record)


def _cannot_listen(host: str, port: int, error: OSError) -> EvermarkError:
    where = f"cannot listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return BusyError(f"{where}: the port is taken", hint="choose another with --port, or 0 for any free one")
    if error.errno == errno.EACCES:
        return DeniedError(f"{where}: not permitted", hint="choose a port above 1023 with --port")
    return UnreachableError(f"{where}: {error.strerror or error}", hint="choose an address of this machine with --host")
