"""Faults as values: whose turn it is, and what they do to an answer. And what a cut-off tail is."""

from __future__ import annotations

import asyncio
import json

import pytest

from evermark.blocknode.bodies import text_of
from evermark.blocknode.database import cut_tail
from evermark.blocknode.faults import Fault, Faults, Lie, Mistake, Op
from evermark.blocknode.reader import Page
from evermark.blocknode.refusal import Code, Refused
from evermark.errors import ConfigError, FormatError, GapError, IdentityError
from evermark.sources.blocks.chain import (
    START,
    EventKind,
    Snapshot,
    StreamKind,
    block_from,
    make_block,
    make_event,
    verify_chain,
)


def page() -> Page:
    first = make_block("s", START, 0, [], Snapshot(StreamKind.CHANNEL, "a", "i", (), {}))
    event = make_event("s", EventKind.MESSAGE, "a", at_us=1, nonce="n", payload="x")
    second = make_block("s", first.cookie, 0, [event], None)
    third = make_block("s", second.cookie, 0, [], None)
    return Page("s", [text_of(block.wire()) for block in (first, second, third)], 0, 3)


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (Fault(Mistake.LIE, Op.MINIBLOCKS, number=1, lie=Lie.HASH), FormatError),
        (Fault(Mistake.LIE, Op.MINIBLOCKS, number=1, lie=Lie.EVENT), FormatError),
        (Fault(Mistake.LIE, Op.MINIBLOCKS, number=1, lie=Lie.PREVIOUS), IdentityError),
        (Fault(Mistake.SKIP, Op.MINIBLOCKS, number=1), GapError),
        (Fault(Mistake.SKIP, Op.STREAM, number=1), None),
    ],
    ids=lambda value: f"{value.fault}-{value.lie}" if isinstance(value, Fault) else "",
)
def test_each_lie_is_found_by_the_error_that_fits(fault: Fault, error: type[Exception] | None) -> None:
    """GIVEN a lie about one block WHEN its page is verified THEN it is a forgery, a fork or a gap, as told."""
    answer = page()
    Faults([fault]).spoil(Op.MINIBLOCKS, answer)
    blocks = [block_from(json.loads(body), "s") for body in answer.blocks]
    if error is None:
        assert verify_chain(blocks, START) is not None
        return
    with pytest.raises(error) as caught:
        verify_chain(blocks, START)
    assert caught.type is error


def test_a_fault_waits_for_its_turn_and_ends() -> None:
    """GIVEN a fault after two requests, for three WHEN six come THEN those in the middle have it; other ops never."""
    faults = Faults.parse('[{"fault": "refuse", "op": "add", "after": 2, "times": 3}]')

    async def refused(op: Op) -> bool:
        try:
            await faults.before(op)
        except Refused as refusal:
            return refusal.code is Code.BUSY
        return False

    assert [asyncio.run(refused(Op.ADD)) for _ in range(6)] == [False, False, True, True, True, False]
    assert not asyncio.run(refused(Op.SYNC))


def test_late_answers_are_late() -> None:
    """GIVEN a fault that waits WHEN its request comes THEN it takes that long."""

    async def took_s() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        await Faults([Fault(Mistake.LATE, Op.STREAM, seconds=0.05)]).before(Op.STREAM)
        return loop.time() - start

    assert asyncio.run(took_s()) >= 0.05


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[{"fault": "explode", "op": "add"}]', '[{"fault": "late"}]', '[{"x": 1}]']
)
def test_faults_that_are_none_are_refused(text: str) -> None:
    """GIVEN a text that names no faults WHEN it is read THEN the error says what they look like."""
    with pytest.raises(ConfigError, match="no faults"):
        Faults.parse(text)


SALT, OLD = b"new-salt", b"old-salt"


def wal(*frames: tuple[bytes, int]) -> bytes:
    """A log's skeleton: frame headers with their salt, and how much of each page there is."""
    head = b"\0" * 16 + SALT + b"\0" * 8
    return head + b"".join(b"\0" * 8 + salt + b"\0" * 8 + size.to_bytes(4, "big") for salt, size in frames)


@pytest.mark.parametrize(
    ("log", "frames", "cut"),
    [
        (b"", 0, 0),
        (wal(), 0, 0),
        (wal((SALT, 8192), (SALT, 8192)), 2, 0),
        (wal((SALT, 8192), (SALT, 8192)), 1, 8192 + 24),
        (wal((SALT, 8192), (SALT, 100)), 1, 100 + 24),
        (wal((SALT, 8192), (OLD, 8192), (OLD, 8192)), 1, 0),
        (wal((SALT, 8192), (SALT, 8192), (OLD, 8192)), 1, 8192 + 24),
    ],
)
def test_the_tail_is_what_follows_the_last_commit_of_this_generation(log: bytes, frames: int, cut: int) -> None:
    """GIVEN a log as a crash left it WHEN SQLite took up its commits THEN the rest is counted, old leftovers not."""
    assert cut_tail(log, frames) == cut
