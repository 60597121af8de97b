"""A follower: copies every stream of another node, and verifies each block before it keeps it.

It asks which streams changed since it last asked, then each of them for the blocks after its own copy. Streams are
written in the order in which they changed, so that the follower's own listing is never ahead of its copy. While the
other node is away the copy is served. A stream that cannot be copied (a fork, a forged block, one that the node cannot
read) is owed: logged, remembered, tried again beside the rounds, and it does not hold up the other streams.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from evermark.blocknode.ledger import UNLISTED, Ledger
from evermark.blocknode.reader import Reader
from evermark.blocknode.refusal import Code
from evermark.blocknode.settings import MIB, NodeSettings
from evermark.blocknode.writer import Writer
from evermark.error_policy import Action, action_for, backoff_s
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
from evermark.observe.logging import get_logger
from evermark.sources.blocks.chain import (
    START,
    Block,
    BlockEvent,
    Cookie,
    block_from,
    cookie_from,
    event_from,
    verify_chain,
    verify_event,
)

_ANSWER_BYTES_MAX = 64 * MIB
_LISTED_AT_ONCE = 256
_FETCHED_AT_ONCE = 16
_OWED_EVERY_S = 5.0
_OWED_FOR_S = 5.0  # then the other streams have their turn
_OWED_SHARE = 0.2  # of the time, where owed streams are slow to answer
_POLL_S = 10
_TOUCHED_MAX = 2**63 - 1024  # what the file holds, and some left for numbers of our own
_CONNECT_S, _READ_S = 5.0, 30.0
_BACKOFF_S_MAX = 5.0


@dataclass(frozen=True)
class Copy:
    """The blocks and the minipool to be written of one stream. `gone`: the stream was deleted."""

    stream: str
    touched: int
    blocks: Sequence[Block] = ()
    pool: Sequence[BlockEvent] = ()
    gone: bool = False
    error: EvermarkError | None = None


class Follower:
    def __init__(self, settings: NodeSettings, writer: Writer, reader: Reader) -> None:
        self._url = (settings.follow or "").rstrip("/")
        self._headers = {"Authorization": f"Bearer {settings.follow_token}"} if settings.follow_token else {}
        self._writer, self._reader = writer, reader
        self._log = get_logger(part="blocknode-follower")
        self._session: aiohttp.ClientSession  # while it runs
        self._node = ""
        self._touched = 0
        self._level = False
        self._reachable = False
        self._owed_at = 0.0  # when owed streams are tried again
        self._tried = ""  # the last of them that was tried, by name; empty: all were
        self._owed = 0

    def progress(self) -> dict[str, Any]:
        """`level`: the copy had everything when the follower last asked."""
        state = {"level": self._level, "reachable": self._reachable, "owed": self._owed}
        return {"node": self._node, "touched": self._touched, **state}

    async def run(self) -> None:
        noted = await self._reader.run(lambda db: self._reader.noted(db, "followed"))
        if noted is not None:
            self._node, _, touched = noted.partition(" ")
            self._touched = int(touched)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S, sock_read=_READ_S)
        attempt = 0
        async with aiohttp.ClientSession(headers=self._headers, timeout=timeout) as self._session:
            while True:
                try:
                    await self._round()
                    attempt = 0
                except Exception as error:  # noqa: BLE001 - the copy is served all the same, and following goes on
                    if self._reachable or attempt == 0:
                        self._log.warning("cannot follow just now; what was copied is served", error=error)
                    self._reachable = self._level = False
                    await asyncio.sleep(backoff_s(attempt, base_s=0.1, max_s=_BACKOFF_S_MAX))
                    attempt += 1

    async def _round(self) -> None:
        asked = {"touched_after": self._touched, "limit": _LISTED_AT_ONCE, "wait_s": _POLL_S if self._level else 0}
        node, rows, touched = _listing(await self._ask("/v1/streams", asked))
        if node != self._node:
            if self._node:
                self._log.warning("another node answers there: everything is compared anew", was=self._node, now=node)
            self._node, self._touched = node, 0
            await self._writer.run(lambda ledger: ledger.note("followed", f"{node} 0"))
            return
        _check_order(self._touched, rows, touched)
        self._reachable = True
        names = [stream for stream, _, _ in rows]
        owed = await self._reader.run(lambda db: self._reader.owed_of(db, names))
        for at in range(0, len(rows), _FETCHED_AT_ONCE):
            some = rows[at : at + _FETCHED_AT_ONCE]
            copies = await self._all_fetched([row for row in some if row[2] or row[0] not in owed])
            # Streams that changed together share a number; it is passed when the last of them is here.
            last = at + _FETCHED_AT_ONCE >= len(rows)
            await self._keep(copies, touched if last else some[-1][1] - 1)
        self._level = not rows
        if time.monotonic() >= self._owed_at:
            await self._pay()

    async def _pay(self) -> None:
        """Try owed streams again: by name, after the last that was tried, as many as there is time for.

        Readers of the listing were told of later changes before: what is copied now comes after them.
        """
        begun = time.monotonic()
        while True:
            names = await self._reader.run(lambda db: self._reader.owed(db, self._tried, _FETCHED_AT_ONCE))
            if names:
                copies = await self._all_fetched([(stream, self._touched + 1, False) for stream in names])
                await self._keep(copies, self._touched)
            self._tried = names[-1] if len(names) == _FETCHED_AT_ONCE else ""
            took_s = time.monotonic() - begun
            if not self._tried or took_s >= _OWED_FOR_S:
                break
        self._owed_at = time.monotonic() + max(_OWED_EVERY_S, took_s / _OWED_SHARE)
        self._owed = await self._reader.run(self._reader.owes)

    async def _all_fetched(self, rows: Sequence[tuple[str, int, bool]]) -> list[Copy]:
        done = await asyncio.gather(*(self._fetched(*row) for row in rows), return_exceptions=True)
        for one in done:  # after every call has ended: their writes must not meet those of the next try
            if isinstance(one, BaseException):
                raise one
        return [copy for copy in done if isinstance(copy, Copy)]

    async def _keep(self, copies: Sequence[Copy], touched: int) -> None:
        def write(ledger: Ledger) -> None:
            for copy in copies:
                if copy.gone and ledger.cookie(copy.stream) is not None:
                    ledger.delete(copy.stream, copy.touched)
                elif not copy.gone and copy.error is None:
                    ledger.copy(copy.stream, copy.blocks, copy.pool, copy.touched)
                ledger.owe(copy.stream, None if copy.error is None else copy.error.message)
            ledger.note("followed", f"{self._node} {touched}")

        await self._writer.run(write)
        self._touched = touched

    async def _fetched(self, stream: str, touched: int, deleted: bool) -> Copy:
        if deleted:
            return Copy(stream, touched, gone=True)
        try:
            return await self._fetch(stream, touched)
        except NotFoundError:
            return Copy(stream, touched, gone=True)
        except EvermarkError as error:
            if action_for(error) is Action.RETRY:  # a node that answers nothing else either is away, and this is raised
                await self._ask("/v1/streams", {"touched_after": self._touched, "limit": 1})
            self._log.error("a stream cannot be copied", stream=stream, error=error)
            return Copy(stream, touched, error=error)

    async def _fetch(self, stream: str, touched: int) -> Copy:
        """The blocks after our copy, verified to follow it. All but the last part are written on the way.

        An answer that says there is more, and brings nothing, would be asked for again for ever.
        """
        mine = await self._writer.run(lambda ledger: ledger.cookie(stream))
        while True:
            asked: dict[str, Any] = {} if mine is None else mine.wire()
            answer = await self._ask(f"/v1/streams/{stream}", asked)
            blocks, pool, reset, more = _parsed(answer, stream)
            if reset and mine is not None and await self._recreated(stream):
                self._log.warning("the stream was recreated: copied anew", stream=stream)
                await self._writer.run(lambda ledger: ledger.delete(stream, UNLISTED))
                mine = None
            begun = at = mine or START
            if reset:
                at = await self._close_gap(stream, at, blocks[0].number)
                blocks = _after(blocks, at, stream)
            mine = verify_chain(blocks, at)
            for event in pool:
                verify_event(stream, event)
            if not more:
                return Copy(stream, touched, blocks, pool)
            if mine is None or mine.minipool_gen <= begun.minipool_gen:
                said = f"stream {stream}: there is more after block {begun.minipool_gen}, and nothing of it came"
                raise FormatError(said, hint="look at the node that is followed")
            await self._part(stream, blocks)

    async def _close_gap(self, stream: str, at: Cookie, end: int) -> Cookie:
        while at.minipool_gen < end:
            page = await self._page(stream, at.minipool_gen, end)
            at = verify_chain(page, at) or at
            await self._part(stream, page)
        return at

    async def _part(self, stream: str, blocks: Sequence[Block]) -> None:
        await self._writer.run(lambda ledger: ledger.copy(stream, blocks, (), None))

    async def _recreated(self, stream: str) -> bool:
        theirs = await self._page(stream, 0, 1)
        ours = await self._reader.run(lambda db: self._reader.page(db, stream, 0, 1))
        return block_from(json.loads(ours.blocks[0]), stream).hash != theirs[0].hash

    async def _page(self, stream: str, start: int, end: int) -> list[Block]:
        answer = await self._ask(f"/v1/streams/{stream}/miniblocks", {"from": start, "to": end})
        blocks = [block_from(block, stream) for block in _list(answer, "blocks")]
        if not blocks:
            said = f"stream {stream}: no block of [{start}, {end}) came"
            raise GapError(said, hint="look at the node that is followed")
        return blocks

    async def _ask(self, path: str, query: Mapping[str, Any]) -> Any:
        try:
            async with self._session.get(self._url + path, params=dict(query), allow_redirects=False) as response:
                body = bytearray()
                async for piece in response.content.iter_chunked(MIB):
                    body += piece
                    if len(body) > _ANSWER_BYTES_MAX:
                        raise FormatError(f"the answer to {path} is too large", hint="is it a node that is followed?")
                status = response.status
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            said = f"the node at {self._url} does not answer: {type(error).__name__}"
            raise UnreachableError(said, hint="start it, or correct --follow") from error
        return answer_of(self._url + path, status, body)


def answer_of(url: str, status: int, body: bytes | bytearray) -> Any:
    """What the node said. Whatever cannot be read counts as no answer: a proxy may have said it."""
    try:
        answer = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise UnreachableError(f"{url} answered {status}, no JSON", hint="is it a node?") from error
    if status != 200:
        raise _error_of(status, answer, url)
    return answer


def _error_of(status: int, answer: Any, url: str) -> EvermarkError:
    code = answer.get("code") if isinstance(answer, dict) else None
    said = f"{url} was answered with {status} {code or 'without a code'}"
    if code == Code.STREAM_NOT_FOUND:
        return NotFoundError(said)
    if code == Code.UNAUTHORIZED:
        return DeniedError(said, hint="give the token of that node with --follow-token")
    if code in {Code.RANGE_IMPOSSIBLE, Code.RANGE_EMPTY}:
        return GapError(said, hint="the node has less than was copied from it: was it restored from a backup?")
    return BusyError(said, hint="it is tried again")


def _listing(answer: Any) -> tuple[str, list[tuple[str, int, bool]], int]:
    """The node; the streams that changed, each with its number and whether it is deleted; how far the listing goes."""
    try:
        rows = [(str(row["stream"]), int(row["touched"]), bool(row["deleted"])) for row in answer["streams"]]
        return str(answer["node"]), rows, int(answer["touched"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        said = "the listing of the node is not in the format"
        raise FormatError(said, hint="follow a node of this kind") from error


def _check_order(asked: int, rows: Sequence[tuple[str, int, bool]], touched: int) -> None:
    """A number that goes back, or does not go on, would have the same streams copied for ever, or others never."""
    numbers = [number for _, number, _ in rows]
    in_order = numbers == sorted(numbers) and (not numbers or asked < numbers[0])
    if not in_order or not max([asked, *numbers]) <= touched <= _TOUCHED_MAX:
        said = f"the listing of the node after {asked} is not in the order of its changes"
        raise FormatError(said, hint="look at the node that is followed")


def _parsed(answer: Any, stream: str) -> tuple[list[Block], list[BlockEvent], bool, bool]:
    blocks = [block_from(block, stream) for block in _list(answer, "blocks")]
    pool = [event_from(event) for event in _list(answer, "minipool")]
    cookie_from(answer.get("cookie"))
    reset = bool(answer.get("reset"))
    if reset and not blocks:
        raise FormatError(f"stream {stream}: a reset without blocks", hint="look at the node that is followed")
    return blocks, pool, reset, bool(answer.get("more"))


def _list(answer: Any, name: str) -> list[Any]:
    found = answer.get(name) if isinstance(answer, dict) else None
    if not isinstance(found, list):
        raise FormatError(f"the answer holds no list of {name}", hint="follow a node of this kind")
    return found


def _after(blocks: Sequence[Block], at: Cookie, stream: str) -> list[Block]:
    """The blocks of a reset that follow `at`; the block before `at` has to be the one that was copied."""
    if at == START:
        return list(blocks)
    for block in blocks:
        if block.number == at.minipool_gen - 1 and block.hash != at.prev_miniblock_hash:
            hint = "its history was rewritten: keep both folders, and find out which is right"
            raise IdentityError(f"stream {stream}: block {block.number} is not the block that was copied", hint=hint)
    if blocks[-1].number + 1 < at.minipool_gen:
        hint = "was it restored from a backup? keep this folder: it has the blocks that the other node lost"
        raise GapError(f"stream {stream}: the followed node has less than was copied from it", hint=hint)
    return [block for block in blocks if block.number >= at.minipool_gen]
