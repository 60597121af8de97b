"""From a request to an answer: verify, parse, drop duplicates, call the handler once per new event.

| answer | when | what the sender does |
|---|---|---|
| 200 | every event was handled, now or before | goes on |
| 409 + Retry-After | another request is handling one of the events | asks again |
| 500 | the handler raised | retries; what was handled is remembered, so it is skipped then |
| 503 + Retry-After | the handler raised `Busy` | retries later |
| 503 + Retry-After | what was handled cannot be looked up or written down | retries later |
| 422, `webhook-delivery: park` | the handler raised `Park` | parks the event (a bundle: splits it first) |
| 410, `webhook-delivery: disable` | the handler raised `Disable` | disables the subscription |
| 400, 401, 413 | body, signature or size is wrong | by its own rules |

A bundle is handled in order and stops at the first event that cannot be taken.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import logging
import math
import threading
import time
from collections.abc import Awaitable, Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

from evermark_receiver.dedup import Claim, Dedup, DedupCache, DedupError, State
from evermark_receiver.event import BodyError, Delivery, Event, parse
from evermark_receiver.signature import (
    TOLERANCE_S,
    Headers,
    Secrets,
    VerificationError,
    keys_of,
    verify_with_keys,
    webhook_headers,
)

BODY_BYTES_MAX = 4 * 1024 * 1024
RETRY_AFTER_S = 5.0

_LENGTH_DIGITS_MAX = 18

_log = logging.getLogger("evermark_receiver")

Handler = Callable[[Event], object]
AsyncHandler = Callable[[Event], Awaitable[object]]
_T = TypeVar("_T")
AnyHandler = TypeVar("AnyHandler", bound=Callable[[Event], object])


def is_longer(length: str | bytes, bytes_max: int) -> bool:
    """Whether a Content-Length, which is digits, says more. Python reads no number of thousands of digits."""
    return len(length) > _LENGTH_DIGITS_MAX or int(length) > bytes_max


class Refusal(Exception):
    """What a handler raises to choose the answer. The text is sent to the sender: no secrets in it."""

    status = 500
    directive = ""


class Park(Refusal):
    """This event can never be taken: set it aside, and go on with the others."""

    status = 422
    directive = "park"


class Disable(Refusal):
    """Send nothing any more."""

    status = 410
    directive = "disable"


class Busy(Refusal):
    """Not now; the same event later."""

    status = 503

    def __init__(self, reason: str = "busy", *, retry_after_s: float = RETRY_AFTER_S) -> None:
        super().__init__(reason)
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Response:
    """What to answer, and which events came to what."""

    status: int
    headers: Mapping[str, str]
    body: bytes
    handled: tuple[Event, ...] = field(default=(), repr=False)
    duplicates: tuple[Event, ...] = field(default=(), repr=False)


@dataclass(frozen=True)
class Counters:
    """Since the start. Of the events looked at, received is the sum of the five that follow it."""

    received: int = 0
    handled: int = 0
    duplicates: int = 0
    in_progress: int = 0  # answered 409
    failed: int = 0  # the handler raised
    unavailable: int = 0  # could not be looked up: answered 503, not handled
    unremembered: int = 0  # among the handled: could not be written down, so answered 503
    rejected: int = 0  # requests refused before any event was looked at


_Steps = Generator[Event, "BaseException | None", Response]


class Receiver:
    """Takes deliveries. Safe to call from several threads; keep one for the life of the process."""

    def __init__(
        self,
        secrets: Secrets,
        *,
        handler: Handler | None = None,
        dedup: Dedup | None = None,
        tolerance_s: float = TOLERANCE_S,
        body_bytes_max: int = BODY_BYTES_MAX,
        retry_after_s: float = RETRY_AFTER_S,
        unverified: bool = False,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`unverified=True` takes anything from anybody: for a look at what is sent, never for real work."""
        self._keys = () if unverified else keys_of(secrets)
        self._handler = handler
        self._dedup: Dedup = DedupCache() if dedup is None else dedup
        self._tolerance_s = tolerance_s
        self._retry_after_s = retry_after_s
        self._clock = clock
        self._counters = Counters()
        self._lock = threading.Lock()
        self.body_bytes_max = body_bytes_max

    def on_event(self, handler: AnyHandler) -> AnyHandler:
        """Decorator: this is the handler."""
        self._handler = handler
        return handler

    @property
    def counters(self) -> Counters:
        return self._counters

    @property
    def is_async(self) -> bool:
        """Whether the handler is a coroutine function, for which `handle_async` is needed."""
        return _is_async(self._handler)

    def handle(self, headers: Headers, body: bytes, handler: Handler | None = None) -> Response:
        """Take one request. `handler` stands in for the receiver's own."""
        chosen = self._chosen(handler)
        steps = self._steps(headers, body)
        try:
            step = _next(steps, None)
            while isinstance(step, Event):
                step = _next(steps, _outcome_of(chosen, step))
            return step
        finally:
            steps.close()  # a handler cut short (interrupt, cancellation) gives its claim back now

    async def handle_async(self, headers: Headers, body: bytes, handler: AsyncHandler | None = None) -> Response:
        """The same for a handler that is a coroutine function.

        A `DedupCache` is asked in the loop. Any other store may have to wait, and is asked in a thread.
        """
        chosen = self._chosen(handler)
        steps = self._steps(headers, body)
        run = _at_once if isinstance(self._dedup, DedupCache) else _in_thread
        try:
            step = await run(partial(_next, steps, None))
            while isinstance(step, Event):
                outcome = await _awaited_outcome_of(chosen, step)
                step = await run(partial(_next, steps, outcome))
        except asyncio.CancelledError:
            await run(steps.close)
            raise
        finally:
            steps.close()
        return step

    def too_large(self) -> Response:
        """The answer to a body that was not even read to its end."""
        self._count(rejected=1)
        return _answer(413, f"the body is larger than {self.body_bytes_max} bytes")

    def _chosen(self, handler: Handler | None) -> Handler:
        chosen = self._handler if handler is None else handler
        if chosen is None:
            # Answering 200 here would tell the sender that somebody took the event.
            raise RuntimeError("this Receiver has no handler: pass handler=, or decorate one with on_event")
        return chosen

    def _steps(self, headers: Headers, body: bytes) -> _Steps:
        """The whole protocol without knowing how a handler is called: yields an event, is sent its outcome."""
        opened = self._open(headers, body)
        if isinstance(opened, Response):
            return opened
        handled: list[Event] = []
        duplicates: list[Event] = []

        def answer(response: Response) -> Response:
            return replace(response, handled=tuple(handled), duplicates=tuple(duplicates))

        for event in opened.events:
            try:
                claim = self._dedup.claim((event.source, event.stream), event.delivery_id)
            except Exception as error:  # noqa: BLE001 - whatever a store raises, the event is not handled
                self._count(received=1, unavailable=1)
                _log_dedup_error("cannot look up event %r of %r, which was not handled", event, error)
                return answer(self._unavailable())
            if claim.state is State.DONE:
                self._count(received=1, duplicates=1)
                duplicates.append(event)
                continue
            if claim.state is State.IN_PROGRESS:
                self._count(received=1, in_progress=1)
                return answer(_answer(409, "this event is being handled", retry_after_s=self._retry_after_s))
            failure: BaseException | None = GeneratorExit()
            try:
                failure = yield event
            finally:
                if failure is not None:
                    self._count(received=1, failed=1)
                    self._release(claim, event)
            if failure is not None:
                return answer(_refused(failure, event, alone=len(opened.events) == 1))
            handled.append(event)
            self._count(received=1, handled=1)
            try:
                self._dedup.done(claim)
            except Exception as error:  # noqa: BLE001 - as above, only that its handler ran
                self._count(unremembered=1)
                _log_dedup_error("cannot remember event %r of %r, which was handled", event, error)
                return answer(self._unavailable())
        return answer(_answer(200, "taken", handled=len(handled), duplicates=len(duplicates)))

    def _release(self, claim: Claim, event: Event) -> None:
        try:
            self._dedup.release(claim)
        except Exception as error:  # noqa: BLE001 - the claim ends by itself later; the handler's failure is the answer
            _log_dedup_error("cannot release event %r of %r, whose handler failed", event, error)

    def _unavailable(self) -> Response:
        return _answer(503, "what was handled cannot be looked up now", retry_after_s=self._retry_after_s)

    def _open(self, headers: Headers, body: bytes) -> Delivery | Response:
        if not isinstance(body, (bytes, bytearray, memoryview)):
            raise TypeError("the body has to be the bytes as they were received")
        if len(body) > self.body_bytes_max:
            return self.too_large()
        try:
            signed = webhook_headers(headers)
            if self._keys:
                verify_with_keys(signed, body, self._keys, self._tolerance_s, self._clock())
            return parse(bytes(body), signed.get("webhook-id"))
        except VerificationError as error:
            status, reason = 401, str(error)
        except BodyError as error:
            status, reason = 400, str(error)
        self._count(rejected=1)
        return _answer(status, reason)

    def _count(self, **more: int) -> None:
        with self._lock:
            now = self._counters
            self._counters = replace(now, **{name: getattr(now, name) + n for name, n in more.items()})


def _next(steps: _Steps, outcome: BaseException | None) -> Event | Response:
    """The next event for the handler, or the answer."""
    try:
        return steps.send(outcome)
    except StopIteration as stop:
        response: Response = stop.value
        return response


async def _at_once(call: Callable[[], _T]) -> _T:
    return call()


async def _in_thread(call: Callable[[], _T]) -> _T:
    """A cancellation waits until the call has ended: what it took has to be given back, and only once it has it."""
    running = asyncio.get_running_loop().run_in_executor(None, contextvars.copy_context().run, call)
    try:
        return await asyncio.shield(running)
    except asyncio.CancelledError:
        while not running.done():
            with suppress(asyncio.CancelledError):
                await asyncio.wait([running])
        raise


def _log_dedup_error(what: str, event: Event, error: Exception) -> None:
    told = isinstance(error, DedupError)  # it says what to do; of anything else the traceback is needed
    _log.error(f"{what}: %s", event.id, event.stream, error, exc_info=None if told else error)


def _outcome_of(handler: Handler, event: Event) -> Exception | None:
    """Call a handler; an error is a value from here on."""
    try:
        result = handler(event)
    except Exception as error:  # noqa: BLE001 - whatever it is, the answer is 500 and the error is logged there
        return error
    if not inspect.isawaitable(result):
        return None
    if inspect.iscoroutine(result):
        result.close()
    # Nobody would await it: the event would be lost behind a 200.
    return TypeError("the handler is asynchronous: use handle_async, ASGIReceiver or EvermarkMiddleware")


async def _awaited_outcome_of(handler: Handler, event: Event) -> Exception | None:
    try:
        result = handler(event)
        if inspect.isawaitable(result):
            await result
    except Exception as error:  # noqa: BLE001 - as above
        return error
    return None


def _is_async(handler: Handler | None) -> bool:
    return inspect.iscoroutinefunction(handler) or inspect.iscoroutinefunction(type(handler).__call__)


def _refused(failure: BaseException, event: Event, *, alone: bool) -> Response:
    if not isinstance(failure, Refusal):
        _log.error("the handler failed on event %r of %r", event.id, event.stream, exc_info=failure)
        return _answer(500, "the handler failed")
    reason = str(failure) or type(failure).__name__.lower()
    # "park" on a bundle would set its other events aside too; without it the sender splits the bundle first.
    directive = failure.directive if alone or not isinstance(failure, Park) else ""
    return _answer(
        failure.status,
        reason,
        retry_after_s=failure.retry_after_s if isinstance(failure, Busy) else None,
        directive=directive,
    )


def _answer(
    status: int, reason: str, *, retry_after_s: float | None = None, directive: str = "", **counts: int
) -> Response:
    headers = {"content-type": "application/json"}
    if retry_after_s is not None:
        headers["retry-after"] = str(max(1, math.ceil(retry_after_s)))
    if directive:
        headers["webhook-delivery"] = directive
    return Response(status, headers, json.dumps({"status": status, "reason": reason, **counts}).encode())
