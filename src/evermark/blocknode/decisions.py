"""The decisions of a node: when to seal, when to snapshot, whether a cookie can be continued. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from evermark.blocknode.settings import NodeSettings
from evermark.sources.blocks.chain import Cookie


@dataclass(frozen=True, slots=True)
class Pool:
    """A minipool, in numbers. `since_us` is when its first event came; events come in order."""

    count: int = 0
    bytes: int = 0
    since_us: int = 0


def seal_in_us(pool: Pool, now_us: int, settings: NodeSettings) -> int | None:
    """In how long this minipool is to be sealed; None if it is empty: only block 0 has no events.

    Never longer than `seal_after_s`, also when the clock was set back since the first event came.
    """
    if pool.count == 0:
        return None
    if pool.count >= settings.seal_events or pool.bytes >= settings.seal_bytes:
        return 0
    after_us = int(settings.seal_after_s * 1e6)
    return min(after_us, max(0, pool.since_us + after_us - now_us))


def snapshot_due(number: int, snapshot_number: int, bytes_since: int, settings: NodeSettings) -> bool:
    """Whether block `number` carries a snapshot, given the last one's block and the bytes of blocks since then."""
    return number - snapshot_number >= settings.snapshot_every or bytes_since >= settings.snapshot_bytes


class Answer(StrEnum):
    CONTINUE = "continue"
    RESET = "reset"


def continuation(cookie: Cookie | None, next_number: int, hash_before: str | None, blocks_max: int) -> Answer:
    """Whether a client with this cookie is sent the blocks after it, or everything since the latest snapshot.

    `hash_before` is the hash of our block before the cookie's generation, None when we have no such block. A generation
    equal to `next_number` is level with us: only the minipool follows.
    """
    if cookie is None or hash_before is None or hash_before != cookie.prev_miniblock_hash:
        return Answer.RESET
    if not 0 < cookie.minipool_gen <= next_number or next_number - cookie.minipool_gen > blocks_max:
        return Answer.RESET
    return Answer.CONTINUE


class Range(StrEnum):
    GOOD = "good"
    EMPTY = "empty"
    IMPOSSIBLE = "impossible"  # names blocks that were never made
    BEHIND = "behind"  # names blocks that a follower does not have (yet): it cannot know whether they were made


def judge_range(start: int, end: int, next_number: int, *, follows: bool) -> Range:
    """Whether [start, end) can be answered from the blocks below `next_number`. A follower answers what it has."""
    if start < 0 or start >= end:
        return Range.EMPTY
    if follows:
        return Range.BEHIND if start >= next_number else Range.GOOD
    return Range.IMPOSSIBLE if end > next_number else Range.GOOD


def next_touched(last: int, now_us: int) -> int:
    """The number of a change: greater than the last, also when the clock goes back."""
    return max(last + 1, now_us)
