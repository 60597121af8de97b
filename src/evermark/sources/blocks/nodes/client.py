"""Asks block nodes, over HTTP. Several nodes may serve the same streams: a request that one node cannot answer, or
answers falsely, goes to the next. No answer is trusted: pages are verified to lie between hashes that the caller knows.
"""

from __future__ import annotations

import http.client
import io
import json
import random
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any, TypeVar
from urllib.parse import quote, urlencode, urlsplit

from evermark.error_policy import backoff_s
from evermark.errors import (
    BusyError,
    DeniedError,
    EvermarkError,
    FormatError,
    GapError,
    IdentityError,
    NotFoundError,
    UnreachableError,
)
from evermark.secrets import Hidden
from evermark.sources.blocks.chain import (
    Block,
    BlockEvent,
    Cookie,
    StreamKind,
    Undecoded,
    block_from,
    event_hash,
    verify_block,
    verify_chain,
)
from evermark.sources.blocks.decide.resume import Answer, answer_from, fork
from evermark.sources.blocks.decide.ticks import Pin
from evermark.sources.blocks.target import Pace

_T = TypeVar("_T")
_ANSWER_BYTES_MAX = 64 * 1024 * 1024
_CHUNK_BYTES = 1024 * 1024
_LISTED_MAX = 1000
_STREAM_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@-]{0,127}", re.ASCII)
_PREFER_FIRST_AFTER_S = 30.0
_EVENT_S = 50e-6  # to verify and decode an event
_FOLLOWS_FOR_S = 10.0
TRANSIENT = (UnreachableError, BusyError)
UNWELL = (*TRANSIENT, FormatError, DeniedError)  # what is wrong is wrong with the node: another one may be well


class NoSuchBlockError(GapError):
    """The node never made so many blocks of the stream."""


class RefusedError(GapError):
    """A node cannot answer about one stream, though it is well otherwise."""


@dataclass(frozen=True, slots=True)
class Listed:
    """A stream that changed."""

    stream: str
    kind: str
    touched: int
    deleted: bool


@dataclass(frozen=True, slots=True)
class Listing:
    node: str
    rows: tuple[Listed, ...]
    touched: int
    now_us: int  # by the node's clock, to the second
    owed: int = 0  # streams that the node could not copy: it lists them when it can, whatever was listed meanwhile


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node's id, and the id of the node that it copies."""

    node: str
    leader: str | None

    @property
    def names(self) -> set[str]:
        return {self.node} if self.leader is None else {self.node, self.leader}


class Node:
    """One block node. Not safe for several threads."""

    page_blocks = 100  # blocks in one answer, until the node says how many it gives
    answer_s = 0.0  # how long the last answer took to come
    ahead_us = 0  # how far its clock was ahead of ours at the last answer; 0 if it was not

    def __init__(self, url: str, token: Hidden | None, pace: Pace) -> None:
        self.url = url.rstrip("/")
        self._token, self._pace = token, pace
        self._connection: http.client.HTTPConnection | None = None
        self._headers: dict[str, str] = {}
        self._follows: tuple[float, bool] | None = None
        self._deadline = 0.0  # of the answer that is under way

    def about(self) -> NodeInfo:
        about = self.get("/v1/node")
        followed = about.get("followed") if about.get("follows") else None
        leader = followed.get("node") if isinstance(followed, dict) else followed
        if not isinstance(about.get("node"), str) or not (leader is None or isinstance(leader, str)):
            raise FormatError(f"{self.url} does not say which node it is", hint="is it a block node?")
        settings = about.get("settings")
        page_blocks = settings.get("page_blocks") if isinstance(settings, dict) else None
        if isinstance(page_blocks, int) and page_blocks > 0:
            self.page_blocks = page_blocks
        return NodeInfo(about["node"], leader)

    def follows(self) -> bool:
        """Whether it copies another node, and may therefore be behind."""
        if self._follows is None or time.monotonic() - self._follows[0] > _FOLLOWS_FOR_S:
            self._follows = (time.monotonic(), self.about().leader is not None)
        return self._follows[1]

    def listing(self, touched_after: int, wait_s: float) -> Listing:
        """Streams that changed since; waits up to `wait_s` for a change."""
        asked = {"touched_after": touched_after, "limit": _LISTED_MAX, "wait_s": int(wait_s)}
        answer, now_us = self._ask("/v1/streams", asked, wait_s)
        try:
            rows = tuple(
                Listed(str(row["stream"]), _kind(row["kind"]), _number(row["touched"]), row["deleted"] is True)
                for row in answer["streams"]
            )
            touched, owed = _number(answer["touched"]), _number(answer.get("owed", 0))
            listing = Listing(str(answer["node"]), rows, touched, now_us, owed)
            # Each row leads on, and none comes after a later one: a reader goes on from where it was in a listing.
            numbers = [touched_after, *(row.touched for row in rows), listing.touched]
            in_place = bool(rows) and numbers[0] == numbers[1]
            if in_place or numbers != sorted(numbers) or not all(_STREAM_ID.fullmatch(row.stream) for row in rows):
                raise ValueError("a name or a number cannot be")
        except (KeyError, TypeError, ValueError) as error:
            raise FormatError(f"the listing of {self.url} is not in the format", hint="is it a block node?") from error
        return listing

    def view(self, stream: str, cookie: Cookie | None) -> Answer:
        """The blocks and the minipool after the cookie, or since the latest snapshot; verified in themselves."""
        asked = cookie.wire() if cookie is not None else {}
        return answer_from(self.get(f"/v1/streams/{quote(stream)}", asked), stream, cookie)

    def page(self, stream: str, start: int, end: int) -> list[Block]:
        """The first blocks of [start, end), as many as the node gives at once; not verified."""
        answer = self.get(f"/v1/streams/{quote(stream)}/miniblocks", {"from": start, "to": end})
        found = answer.get("blocks")
        blocks = [block_from(block, stream, raw=True) for block in found] if isinstance(found, list) else []
        if not blocks:
            raise GapError(f"stream {stream}: no block of [{start}, {end}) came", hint="ask another node")
        return blocks

    def get(self, path: str, query: Mapping[str, Any] | None = None) -> dict[str, Any]:
        return self._ask(path, query or {}, 0.0)[0]

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _ask(self, path: str, query: Mapping[str, Any], wait_s: float) -> tuple[dict[str, Any], int]:
        target = f"{urlsplit(self.url).path}{path}" + (f"?{urlencode(query)}" if query else "")
        # A connection that was kept may have been closed by the node meanwhile: a new one tells.
        for last in (True,) if self._connection is None else (False, True):
            try:
                status, body, date = self._exchange(target, wait_s)
                break
            except (OSError, http.client.HTTPException) as error:
                self.close()
                if last or not isinstance(error, (ConnectionError, http.client.BadStatusLine)):
                    said = f"the block node at {self.url} does not answer: {type(error).__name__}"
                    hint = "start it, or name more nodes in the source's `nodes`"
                    raise UnreachableError(said, hint=hint) from error
        now_us = _us_of(date)
        self.ahead_us = max(0, now_us - time.time_ns() // 1000)
        return self._read(path, status, body), now_us

    def _exchange(self, target: str, wait_s: float) -> tuple[int, bytes, str | None]:
        parts = urlsplit(self.url)
        if self._connection is None or self._connection.sock is None:  # none: the last answer ended its connection
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self._connection = kind(parts.hostname or "", parts.port, timeout=self._pace.connect_s)
            self._connection.response_class = _answer_by(lambda: self._deadline)
            self._connection.connect()
            self._headers = {"Authorization": f"Bearer {self._token.open()}"} if self._token is not None else {}
        connection = self._connection
        asked_at = time.monotonic()
        patience_s = self._pace.read_s + wait_s
        connection.sock.settimeout(patience_s)
        self._deadline = asked_at + patience_s
        connection.request("GET", target, headers=self._headers)
        response = connection.getresponse()
        if not wait_s:
            self.answer_s = time.monotonic() - asked_at
        body = bytearray()
        while piece := response.read1(_CHUNK_BYTES):
            body += piece
            if len(body) > _ANSWER_BYTES_MAX:
                self.close()
                raise FormatError(f"an answer of {self.url} is too large", hint="is it a block node?")
        if response.length:
            raise ConnectionError("the answer ended before its end")
        response.close()  # by pieces it does not see its own end, and the connection could not be used again
        return response.status, bytes(body), response.headers.get("Date")

    def _read(self, path: str, status: int, body: bytes) -> dict[str, Any]:
        try:
            answer = json.loads(body)
        except (ValueError, RecursionError) as error:
            said = f"{self.url} answered {status}, without JSON"
            raise UnreachableError(said, hint="is it a block node, or a proxy in front of one?") from error
        if not isinstance(answer, dict):
            raise FormatError(f"{self.url}{path} answered no JSON object", hint="is it a block node?")
        if status != 200:
            code = str(answer.get("code") or "without a code")[:40]
            raise _refusal(f"{self.url}{path} answered {status} {code}", answer.get("code"))
        return answer


class NodeClient:
    """All nodes of a source. Not safe for several threads."""

    def __init__(self, nodes: Sequence[Node], pace: Pace) -> None:
        self.nodes = tuple(nodes)
        self.pace = pace
        self._preferred = 0
        self._preferred_at = 0.0
        self._tasks = 1
        self._next_at = 0.0
        self._away: dict[Node, tuple[float, UnreachableError]] = {}

    @property
    def page_blocks(self) -> int:
        return self.nodes[self._preferred].page_blocks

    def fetch_s(self, blocks: int, events: int) -> float:
        """About how long one task takes for so many blocks: waiting for pages, and decoding events."""
        return -(-blocks // self.page_blocks) * self.nodes[self._preferred].answer_s + events * _EVENT_S

    @contextmanager
    def one_of(self, tasks: int) -> Iterator[None]:
        """Ask at the rate of one of so many tasks: together they keep to `requests_per_s`."""
        self._tasks = tasks
        try:
            yield
        finally:
            self._tasks = 1

    def in_order(self) -> Iterator[Node]:
        """The node that answered last comes first; after a while the first of the settings is tried again."""
        if time.monotonic() - self._preferred_at > _PREFER_FIRST_AFTER_S:
            self._preferred = 0
        first = self._preferred
        yield from self.nodes[first:]
        yield from self.nodes[:first]

    def _asked(
        self, call: Callable[[Node], _T], passed: tuple[type[EvermarkError], ...], errors: list[EvermarkError]
    ) -> Iterator[_T]:
        """The results of the nodes in order; errors that are `passed` are kept, and the next node is asked."""
        for node in self.in_order():
            try:
                found = call(node)
            except passed as error:
                errors.append(error)
            else:
                at = self.nodes.index(node)
                if at != self._preferred:
                    self._preferred, self._preferred_at = at, time.monotonic()
                yield found

    def first_well(self, call: Callable[[Node], _T]) -> _T:
        """The result of the first node that is well; each is asked once. For calls about the node as a whole."""
        errors: list[EvermarkError] = []
        for found in self._asked(call, UNWELL, errors):
            return found
        raise min(errors, key=lambda error: (not isinstance(error, TRANSIENT), isinstance(error, UnreachableError)))

    def ask_any(self, call: Callable[[Node], _T], *, patience_s: float = 0.0) -> _T:
        """The first good answer about a stream; all nodes are asked again, with pauses, for up to `patience_s`.

        If no node has a good answer, the first node's error is raised; `NotFoundError` only if all say so.
        """
        deadline = time.monotonic() + patience_s
        attempt = 0
        while True:
            errors: list[EvermarkError] = []
            for found in self._asked(call, (*UNWELL, GapError, NotFoundError), errors):
                return found
            if not any(isinstance(error, TRANSIENT) for error in errors):
                raise min(errors, key=lambda error: isinstance(error, NotFoundError))
            pause_s = backoff_s(attempt, base_s=0.2, max_s=2.0) * random.uniform(0.8, 1.2)
            if time.monotonic() + pause_s > deadline:
                # A stream that some nodes do not have may be at the nodes that cannot be asked.
                raise min(errors, key=lambda error: (isinstance(error, NotFoundError), isinstance(error, TRANSIENT)))
            attempt += 1
            time.sleep(pause_s)

    def between(self, stream: str, first: Pin, last: Pin) -> Iterator[list[Block]]:
        """The blocks between two pins, page by page; each follows the one before it, and the last leads to `last`."""
        at = Cookie(*first)
        ours: set[Node] = set()
        while at.minipool_gen < last[0]:
            page = self.ask_any(partial(self._verified, stream, at, last, ours), patience_s=self.pace.patience_s)
            yield page
            at = page[-1].cookie

    def block(self, stream: str, number: int) -> Block:
        """One block, verified in itself. Each node is asked once: the planner has no time to wait."""
        return self.ask_any(lambda node: self.block_of(node, stream, number))

    def block_of(self, node: Node, stream: str, number: int) -> Block:
        """One block as this node gives it, verified in itself."""
        self._throttle()
        page = node.page(stream, number, number + 1)
        if len(page) != 1 or page[0].number != number:
            raise GapError(f"stream {stream}: another block came than {number}", hint="ask another node")
        verify_block(page[0], None)
        return page[0]

    def events(self, node: Node, stream: str, numbers: Sequence[int]) -> Iterator[BlockEvent]:
        """The events of blocks with these ascending numbers as one node gives them: events that match their hash, and
        unreadable ones. A node that did not answer is not waited for again stream by stream (`away_s`)."""
        away = self._away.get(node)
        if away is not None and time.monotonic() - away[0] < self.pace.away_s:
            raise UnreachableError(away[1].message, hint=away[1].hint)
        at = 0
        for number in numbers:
            if number < at:
                continue  # the block came with the page before
            self._throttle()
            try:
                page = node.page(stream, number, numbers[-1] + 1)
            except UnreachableError as error:
                self._away[node] = (time.monotonic(), error)
                raise
            for block in page:
                yield from (e for e in block.events if isinstance(e, Undecoded) or event_hash(stream, e) == e.hash)
            at = page[-1].number + 1

    def require_chain(self, node: Node, stream: str, at: Cookie) -> None:
        """Raise unless the node has the block that the cookie names."""
        block = self.block_of(node, stream, at.minipool_gen - 1)
        if block.hash != at.prev_miniblock_hash:
            raise fork(stream, block.number)

    def _verified(self, stream: str, at: Cookie, last: Pin, ours: set[Node], node: Node) -> list[Block]:
        """A page of this node. Of several nodes one may have another history, in which each page is sound by itself:
        its first page that does not reach to the last pin is taken only if it has the block there (`ours`)."""
        self._throttle()
        page = node.page(stream, at.minipool_gen, last[0])
        end = verify_chain(page, at)
        if end is not None and end.minipool_gen < last[0] and len(self.nodes) > 1 and node not in ours:
            self.require_chain(node, stream, Cookie(*last))
            ours.add(node)
        if end is not None and (end.minipool_gen > last[0] or (end.minipool_gen == last[0] and end != Cookie(*last))):
            raise IdentityError(
                f"stream {stream}: the blocks up to {last[0]} do not lead to the expected hash: this is another chain",
                hint="the node's history was rewritten: compare it with another node's",
            )
        return page

    def _throttle(self) -> None:
        now = time.monotonic()
        if self._next_at > now:
            time.sleep(self._next_at - now)
        self._next_at = max(now, self._next_at) + self._tasks / self.pace.requests_per_s

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class _Until(io.RawIOBase):
    """What a socket receives, up to a moment: each read waits for what is left of the time, and no longer."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self._sock, self._deadline = sock, deadline
        self._received = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int | None:
        left_s = self._deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the answer does not end")
        self._sock.settimeout(left_s)
        return self._received.readinto(buffer)

    def close(self) -> None:
        self._received.close()
        super().close()


def _answer_by(deadline: Callable[[], float]) -> type[http.client.HTTPResponse]:
    """Answers whose status line, headers and sizes of chunks have to be here in time, as their bodies have: a node may
    drip in none of them for ever."""

    class Answered(http.client.HTTPResponse):
        def __init__(self, sock: socket.socket, *args: Any, **more: Any) -> None:
            super().__init__(sock, *args, **more)
            self.fp.close()
            self.fp = io.BufferedReader(_Until(sock, deadline()))

    return Answered


def _refusal(said: str, code: object) -> EvermarkError:
    if code == "stream_not_found":
        return NotFoundError(said, hint="the stream was deleted")
    if code == "unauthorized":
        return DeniedError(said, hint="give the node's token as the source's `token`")
    if code == "range_impossible":
        return NoSuchBlockError(said, hint="the stream was recreated, or the node was restored from a backup")
    if code == "range_empty":
        return GapError(said, hint="the stream was recreated, or the node was restored from a backup")
    if code in {"bad_request", "not_found", "too_large"}:
        return FormatError(said, hint="the node and this program are of different versions")
    return BusyError(said, hint="it is tried again, and another node is asked")


def _kind(value: object) -> str:
    """None if there is no such kind: the stream itself will tell, and is stale then without any other."""
    return str(value) if value in tuple(StreamKind) else ""


def _number(value: object) -> int:
    """State keeps numbers of 63 bits."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise ValueError("no number of a listing")
    return value


def _us_of(date: str | None) -> int:
    try:
        return int(parsedate_to_datetime(date or "").timestamp()) * 1_000_000
    except (ValueError, OverflowError):
        return time.time_ns() // 1000
