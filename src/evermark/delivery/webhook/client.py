"""The HTTP side of webhooks: one event loop thread per process, connections by the networks they may dial, one POST.

Everything is made when first used and belongs to the process that made it: after a fork the child starts with none.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import errno
import importlib.metadata
import os
import re
import socket
import ssl
import threading
from base64 import b64encode
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from time import time
from typing import Any, TypeVar

from yarl import URL

from evermark.delivery.decide.answers import ACCEPTED_STATUSES, Verdict, classify
from evermark.delivery.decide.pace import WAIT_S_MAX, Stretch, requests_in_stretch, takes_ahead
from evermark.delivery.decide.retry import retry_after_s
from evermark.delivery.model import MadeBy, SubscriptionSpec
from evermark.delivery.webhook.base import Answer, OpenSecret, Rates
from evermark.delivery.webhook.body import Style, content_type
from evermark.delivery.webhook.guard import AddressRefusedError, Guard
from evermark.delivery.webhook.http1 import NoConnectionError, NotHttpError, Pool, Reply
from evermark.delivery.webhook.said import Confided
from evermark.delivery.webhook.signing import Body, Signer
from evermark.errors import ConfigError, EvermarkError
from evermark.priority import lower_priority

T = TypeVar("T")

HEADERS_MAX = 32
TIMEOUT_S_MAX = 300.0
# Name look-ups run in threads and may hang for seconds each; a hanging look-up must not hold up the others.
_LOOKUP_THREADS = 64
_ASK_AGAIN_S = 1.0  # for a turn, of a rate that gives none soon
_OURS = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS})
_RESERVED = frozenset({"host", "content-length", "content-type", "transfer-encoding", "connection", "user-agent"})
try:
    _USER_AGENT = f"evermark/{importlib.metadata.version('evermark')}"
except importlib.metadata.PackageNotFoundError:
    _USER_AGENT = "evermark"
_HEADER_NAME = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}")


class HttpLoop:
    """An event loop in a thread of its own, with its connections; `low_priority`: others get the processor first."""

    def __init__(self, *, low_priority: bool = False) -> None:
        self._low_priority = low_priority
        self.pid = os.getpid()
        self.loop = asyncio.new_event_loop()
        self.loop.set_default_executor(ThreadPoolExecutor(_LOOKUP_THREADS, thread_name_prefix="evermark-lookup"))
        self._pools: dict[tuple[frozenset[str], bool], Pool] = {}
        self._tls: ssl.SSLContext | None = None
        # The stretch in which each subscription, or replay for one, may send: its rate holds across calls.
        self._stretches: dict[tuple[str, str | None], Stretch] = {}
        self._ahead: dict[tuple[str, str | None], asyncio.Task[Stretch | None]] = {}  # being taken before it is needed
        self._taking: dict[tuple[str, str | None], asyncio.Lock] = {}
        self._thread = threading.Thread(target=self._run, name="evermark-http", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        if self._low_priority:
            lower_priority()
        asyncio.set_event_loop(self.loop)
        self.loop.run_forever()

    def begin(self, works: Sequence[Coroutine[Any, Any, None]]) -> Callable[[Iterable[int]], None]:
        """Begin all of them with one wake of the loop; the answer cancels some of them, by number."""
        tasks: list[asyncio.Task[None]] = []

        def start() -> None:
            tasks.extend(self.loop.create_task(work) for work in works)

        def cancel(numbers: Iterable[int]) -> None:
            some = list(numbers)
            with contextlib.suppress(RuntimeError):  # the loop is closed, and they are over
                self.loop.call_soon_threadsafe(lambda: [tasks[n].cancel() for n in some])

        self.loop.call_soon_threadsafe(start)
        return cancel

    def submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self.loop)

    def pool(self, allow_networks: tuple[str, ...], secure: bool) -> Pool:
        """The connections that are guarded for exactly these networks. Call it in the loop."""
        key = (frozenset(allow_networks), secure)
        pool = self._pools.get(key)
        if pool is None:
            if secure and self._tls is None:
                self._tls = ssl.create_default_context()
            guard = Guard(sorted(key[0]), opened_only=not secure)
            pool = self._pools[key] = Pool(guard.socket, self._tls if secure else None)
        return pool

    async def turn(self, who: tuple[str, str | None], rate_per_s: float, deadline: float) -> bool:
        """Wait until this subscription, or replay for it, may send; False when that is not before the deadline.

        First deliveries and retries share it, in all processes that were told of the deployment's rates (`use_rates`);
        others keep the rate by themselves.
        """
        taking = self._taking.setdefault(who, asyncio.Lock())
        try:
            async with asyncio.timeout_at(deadline):
                await taking.acquire()
        except TimeoutError:
            return False
        try:
            turn = await self._next_turn(who, rate_per_s, deadline)
            if turn is None:
                return False
            # Others wait behind: if each took a moment of its own beforehand, the first that is given none before the
            # deadline would end the job, and all their moments would be lost.
            await asyncio.sleep(turn - self.loop.time())
            return True
        finally:
            taking.release()

    async def _next_turn(self, who: tuple[str, str | None], rate_per_s: float, deadline: float) -> float | None:
        stretch = self._stretches.get(who)
        while True:
            now = self.loop.time()
            if now >= deadline:
                return None
            if stretch is not None and stretch.rate_per_s == rate_per_s:
                if stretch.begins_at >= deadline:
                    return None  # it is kept: there may be more to send by then
                if (turn := stretch.next_at(now)) is not None:
                    if stretch.is_used_up and takes_ahead(rate_per_s) and turn + 1 / rate_per_s < deadline:
                        self._take_ahead(who, rate_per_s, stretch, deadline - now)
                    return turn if turn < deadline else None
            if (ahead := self._ahead.get(who)) is not None:
                taken = await self._taken_ahead(who, ahead)
            else:
                taken = await self._taken(who, rate_per_s, stretch, min(deadline - now, WAIT_S_MAX))
            if taken is not None:
                stretch = self._stretches[who] = taken
            elif deadline - now > WAIT_S_MAX:
                await asyncio.sleep(_ASK_AGAIN_S)
            else:
                return None

    def _take_ahead(self, who: tuple[str, str | None], rate_per_s: float, last: Stretch, wait_s: float) -> None:
        """Ask for the next stretch while the last request of this one is under way: on a busy machine the answer would
        come after moments of it have passed, and they would be lost, again with every stretch.
        """
        if who not in self._ahead:
            taking = self._taken(who, rate_per_s, last, min(wait_s, WAIT_S_MAX))
            self._ahead[who] = self.loop.create_task(taking)

    async def _taken_ahead(self, who: tuple[str, str | None], ahead: asyncio.Task[Stretch | None]) -> Stretch | None:
        """A failure is told once. A waiter that gives up leaves what comes to the next."""
        try:
            return await asyncio.shield(ahead)
        finally:
            if ahead.done():
                del self._ahead[who]

    async def _taken(
        self, who: tuple[str, str | None], rate_per_s: float, last: Stretch | None, wait_s: float
    ) -> Stretch | None:
        """The next stretch; None when it begins in more than `wait_s`, and is left to others."""
        requests, rates = requests_in_stretch(rate_per_s), _PROCESS.rates
        # What was taken at another rate may be long.
        last = last if last is not None and last.rate_per_s == rate_per_s else None
        after = 0.0 if last is None else last.begins_at + last.requests / last.rate_per_s
        if rates is not None:
            name, replay_id = who[0], who[1] or ""
            try:
                span_s = requests / rate_per_s
                begins_s = await self.loop.run_in_executor(None, rates.take, name, replay_id, span_s, wait_s)
                if begins_s is None:
                    return None
                return Stretch(max(after, self.loop.time() + begins_s), requests, rate_per_s)
            except EvermarkError:
                pass  # State does not answer: what is sent meanwhile keeps the rate in this process
        return Stretch(max(after, self.loop.time()), requests, rate_per_s)

    def close(self) -> None:
        if self.pid != os.getpid() or self.loop.is_closed():
            return
        self.submit(self._end()).result(timeout=10)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join(timeout=10)
        if not self._thread.is_alive():
            self.loop.close()

    async def _end(self) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        # Transports close in the next turn of the loop.
        await asyncio.sleep(0)


class _Process:
    """The loops of this process, made when first needed."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        # A fork does not copy the thread, nor any thread that may have held the lock.
        self.lock = threading.Lock()
        self.loops: dict[bool, HttpLoop] = {}
        self.rates: Rates | None = None


_PROCESS = _Process()
os.register_at_fork(after_in_child=_PROCESS.forget)


def http_loop(*, low_priority: bool = False) -> HttpLoop:
    """This process's loop: one for each priority."""
    with _PROCESS.lock:
        if low_priority not in _PROCESS.loops:
            _PROCESS.loops[low_priority] = HttpLoop(low_priority=low_priority)
        return _PROCESS.loops[low_priority]


def use_rates(made: Callable[[], Rates]) -> None:
    """From now on this process shares the rates of subscriptions with others; the first word counts."""
    with _PROCESS.lock:
        if _PROCESS.rates is None:
            _PROCESS.rates = made()


def rest_rates() -> None:
    """Nothing is sent here for now."""
    with _PROCESS.lock:
        rates = _PROCESS.rates
    if rates is not None:
        rates.rest()


def close_http_loops() -> None:
    with _PROCESS.lock:
        closing, _PROCESS.loops = _PROCESS.loops, {}
        _PROCESS.rates = None
    for loop in closing.values():
        loop.close()


_ACCEPTED = {status: Answer(Verdict.ACCEPTED, status) for status in ACCEPTED_STATUSES}


class Endpoint:
    """Posts the bodies of one subscription. Raises `ConfigError` when made from settings that cannot be used."""

    def __init__(self, spec: SubscriptionSpec, open_secret: OpenSecret) -> None:
        url = _url_of(spec)
        self._host, self._port = url.raw_host or "", url.port or 443
        self._secure = url.scheme == "https"
        self._signer = Signer([open_secret(sealed) for sealed in spec.secrets])
        if spec.body not in set(Style):
            raise ConfigError(f"body {spec.body!r} is not known", hint=f"use one of {', '.join(Style)}")
        self.style = Style(spec.body)
        headers = {name: open_secret(value) for name, value in spec.headers.items()}
        self._head = _head_of(url, spec.name, headers, content_type(self.style, bundled=spec.bundle > 1))
        self._confided = Confided(url, headers.values())
        # Only the operator's file may open networks, even if the row in State names some.
        self._allow = spec.allow_networks if spec.made_by is MadeBy.FILE else ()
        Guard(self._allow)
        self.timeout_s = min(max(0.05, spec.timeout_s), TIMEOUT_S_MAX)

    @property
    def host(self) -> tuple[str, int]:
        return self._host, self._port

    async def post(self, http: HttpLoop, webhook_id: str, body: Body) -> Answer:
        """Send once; once more on a new connection if a kept connection had ended, as they do."""
        request = self._request(webhook_id, body)
        pool = http.pool(self._allow, self._secure)
        try:
            wire = pool.kept(self._host, self._port)
            if wire is not None:
                try:
                    return self._answer_of(await wire.post(request, self.timeout_s))
                except ConnectionError:
                    pass
            begun = http.loop.time()
            wire = await pool.dial(self._host, self._port, self.timeout_s)
            left = max(0.05, begun + self.timeout_s - http.loop.time())
            return self._answer_of(await wire.post(request, left))
        except Exception as problem:  # noqa: BLE001 - every way a request can fail has a verdict
            return self._answer_for(problem)

    def _request(self, webhook_id: str, body: Body) -> bytes:
        signed = self._signer.headers(webhook_id, int(time()), body)
        lines = "".join([f"{name}: {value}\r\n" for name, value in signed.items()])
        if isinstance(body, bytes):
            return b"%b%bcontent-length: %d\r\n\r\n%b" % (self._head, lines.encode(), len(body), body)
        head = b"%b%bcontent-length: %d\r\n\r\n" % (self._head, lines.encode(), sum(map(len, body)))
        return b"".join((head, *body))

    def _answer_of(self, reply: Reply) -> Answer:
        status = reply.status
        if accepted := _ACCEPTED.get(status):
            return accepted
        text = "".join(c if c.isprintable() else " " for c in reply.said.decode(errors="replace")).strip()
        said = self._confided.hidden_in(text, is_cut=reply.is_cut)
        wait = retry_after_s(reply.headers.get("retry-after"), datetime.now(UTC))
        return Answer(classify(status, reply.headers), status, f"HTTP {status}" + (f": {said}" if said else ""), wait)

    def _answer_for(self, problem: Exception) -> Answer:
        """The answer that a failed request amounts to: whatever it was, the event is not to blame."""
        cause = problem.__cause__ if isinstance(problem, NoConnectionError) else problem
        ours = isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _OURS)
        return Answer(Verdict.ENDPOINT, None, self._why(problem, cause), ours=ours)

    def _why(self, problem: Exception, cause: BaseException | None) -> str:
        match cause:
            case AddressRefusedError():
                return str(cause)
            case TimeoutError():
                return f"no answer within {self.timeout_s:g} s"
            case socket.gaierror():
                return f"the name {self._host} cannot be resolved: {cause.strerror or cause}"
            case ssl.SSLCertVerificationError():
                return f"the certificate of {self._host} is not trusted: {cause.verify_message}"
            case ssl.SSLError():
                return f"no TLS with {self._host}:{self._port}: {cause.reason}"
            case UnicodeError():
                return "the url's host cannot be used"
            case OSError() if isinstance(problem, NoConnectionError):
                why = os.strerror(cause.errno) if cause.errno else str(cause)
                return f"no connection to {self._host}:{self._port}: {why}"
            case OSError():
                return "the connection ended before the answer"
            case NotHttpError():
                return "the answer is not HTTP"
        return f"the request failed: {type(cause).__name__}"


_MADE_MAX = 20_000
_made: dict[str, tuple[SubscriptionSpec, OpenSecret, Endpoint]] = {}


def endpoint_of(spec: SubscriptionSpec, open_secret: OpenSecret) -> Endpoint:
    """As `Endpoint`, kept while the spec stays the same: to open its secrets takes as long as a request."""
    found = _made.get(spec.name)
    if found is None or found[0] is not spec or found[1] != open_secret:
        if len(_made) >= _MADE_MAX:
            _made.clear()
        found = _made[spec.name] = (spec, open_secret, Endpoint(spec, open_secret))
    return found[2]


def _url_of(spec: SubscriptionSpec) -> URL:
    try:
        url = URL(spec.url)
        usable = url.scheme in ("http", "https") and bool(url.host)
    except (ValueError, TypeError):
        usable = False
    if not usable:
        # The url is not repeated: its path or query may be a secret.
        raise ConfigError(f"the url of subscription {spec.name!r} cannot be used", hint="write https://host/path")
    return url


def _head_of(url: URL, subscription: str, own: Mapping[str, str], body_type: str) -> bytes:
    """The request up to the headers that differ by request."""
    who = f"subscription {subscription!r}"
    if len(own) > HEADERS_MAX:
        raise ConfigError(f"{who} sets {len(own)} headers", hint=f"at most {HEADERS_MAX}")
    for name, value in own.items():
        if name.lower() in _RESERVED or name.lower().startswith("webhook-"):
            raise ConfigError(f"{who} sets the header {name}", hint="that one is set by Evermark")
        if not (_HEADER_NAME.fullmatch(name) and value.isascii() and value.isprintable()):
            raise ConfigError(f"a header of {who} has odd characters", hint="use printable ASCII")
    headers = {"host": url.host_port_subcomponent or "", "user-agent": _USER_AGENT, "content-type": body_type, **own}
    if url.user is not None and "authorization" not in {name.lower() for name in own}:
        headers["authorization"] = "Basic " + b64encode(f"{url.user}:{url.password or ''}".encode()).decode()
    lines = [f"POST {url.raw_path_qs or '/'} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items()), ""]
    return "\r\n".join(lines).encode()
