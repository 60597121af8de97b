"""What to take of a stream, given its state and a node's answer. Pure.

The cases: A, the answer begins at the snapshot we know; B, it begins behind our generation, and the blocks between have
to be fetched; C, the node has less than was taken. They are told apart at *every* answer that begins at a snapshot, not
only at the first after a start.

The traps: a generation that equals the answer's first block is no gap, and an empty range is an error at the node. An
event taken from the minipool comes again inside its block, in any later batch, not only in the next one. An event that
a restored node has lost may be sent to it again at any time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from evermark.errors import FormatError, GapError, IdentityError
from evermark.sources.blocks.chain import (
    START,
    Block,
    BlockEvent,
    Cookie,
    Snapshot,
    StreamKind,
    Undecoded,
    block_from,
    cookie_from,
    event_or_raw,
    verify_chain,
    verify_event,
)

BLOCKS_MAX = 10**12  # a position has twelve digits for a block's number
_POOL_MAX = 100_000  # events; what cannot be read of them costs time
UNTOLD = 2**62  # how far the stream was once taken is unknown: no node was asked that has all of it


@dataclass(frozen=True, slots=True)
class StreamState:
    """How far a stream was taken: all blocks before the cookie, and the events `pool` of the minipool after it."""

    snapshot: int
    cookie: Cookie
    incarnation: str
    pool: frozenset[str] = frozenset()
    repeats_below: int = 0  # in blocks below this one, events that were taken may come again
    fork_accepted: bool = False  # a person said that another chain is the right one
    restored_us: int = 0  # when the node's history was last replaced: it may have lost events that the log has


@dataclass(frozen=True, slots=True)
class Answer:
    """A node's answer to `get stream`, verified in itself."""

    stream: str
    kind: str
    reset: bool
    blocks: tuple[Block, ...]
    pool: tuple[BlockEvent, ...]
    cookie: Cookie
    more: bool

    @property
    def snapshot(self) -> int:
        """The number of the first block, which carries the snapshot that the answer begins with."""
        return self.blocks[0].number


class Case(StrEnum):
    CONTINUES = "continues"  # the node took our cookie
    FIRST = "first"  # nothing was taken of it yet
    SAME = "same"  # A
    GAP = "gap"  # B
    OLDER = "older"  # C, though the node has all that was taken: the answer only began at an older snapshot
    REWOUND = "rewound"  # C: the node has less than was taken; it was restored from a backup
    BEHIND = "behind"  # a follower that has less than was taken: it will have it
    RECREATED = "recreated"
    FORK_ACCEPTED = "fork accepted"  # like recreated, though with the same incarnation


ANEW = frozenset({Case.RECREATED, Case.REWOUND, Case.FORK_ACCEPTED})


@dataclass(frozen=True, slots=True)
class Decision:
    """Take the blocks [start, fetch_to), which have to be fetched, then `blocks`, then `pool`, without the events
    `leave_out`, which were taken from the minipool before. `known` is the stream's state after that."""

    case: Case
    start: Cookie
    fetch_to: Cookie
    blocks: tuple[Block, ...]
    pool: tuple[BlockEvent, ...]
    leave_out: frozenset[str]
    known: StreamState
    repeats: bool = False
    more: bool = False
    kind: str = ""  # of the stream, as the node says
    events_each: int = 1  # in a block, by the blocks that came: a guess for those that have to be fetched
    members: tuple[str, ...] = ()  # of the stream at the end of the node's history, if a fork was accepted
    first: Snapshot | None = None  # of block 0 of that history

    @property
    def span(self) -> int:
        """How many blocks have to be fetched."""
        return self.fetch_to.minipool_gen - self.start.minipool_gen

    @property
    def news(self) -> bool:
        return bool(self.span or self.blocks or self.pool) or self.case in ANEW


def answer_from(wire: Any, stream: str, asked: Cookie | None) -> Answer:
    """The answer as it came over the wire, verified as far as possible without the stream's state."""
    if not isinstance(wire, dict) or not all(isinstance(wire.get(name), list) for name in ("blocks", "minipool")):
        raise FormatError(f"stream {stream}: this is not an answer to `get stream`", hint="is it a block node?")
    if len(wire["minipool"]) > _POOL_MAX:
        said = f"stream {stream}: {len(wire['minipool'])} events are in its minipool"
        raise FormatError(said, hint="a node that seals no blocks is not supported")
    blocks = tuple(block_from(block, stream, raw=True) for block in wire["blocks"])
    # Unreadable events of the minipool wait for their block, which vouches for their hashes: an event taken by its
    # claimed hash alone would be left out when it comes as itself.
    pool = tuple(e for e in map(event_or_raw, wire["minipool"]) if not isinstance(e, Undecoded))
    kind = wire.get("kind", "")
    if kind not in ("", *StreamKind):
        said = f"stream {stream}: its kind is none that there is"
        raise FormatError(said, hint="the node may be newer than this program: update it")
    reset, cookie = wire.get("reset") is not False, cookie_from(wire.get("cookie"))
    if reset and (not blocks or blocks[0].snapshot is None):
        said = f"stream {stream}: the answer does not begin with a snapshot"
        raise FormatError(said, hint="ask another node: this one is damaged")
    if not reset and asked is None:
        said = f"stream {stream}: the node continues from a cookie that was not sent"
        raise FormatError(said, hint="ask another node")
    if wire.get("more") and not blocks:
        said = f"stream {stream}: the node says that it has more, and gives no block"
        raise FormatError(said, hint="ask another node: a reader would ask this one for ever")
    end = verify_chain(blocks, None if reset else asked)
    if cookie.minipool_gen >= BLOCKS_MAX:
        said = f"stream {stream}: block {cookie.minipool_gen} has no position: its number is too large"
        raise FormatError(said, hint="a node that makes such blocks is not supported")
    if (end or asked) != cookie:
        said = f"stream {stream}: the answer's cookie is not that of its last block"
        raise FormatError(said, hint="ask another node")
    for event in pool:
        verify_event(stream, event)
    return Answer(stream, str(kind), reset, blocks, pool, cookie, bool(wire.get("more")))


def decide(
    known: StreamState | None,
    answer: Answer,
    *,
    follows: bool = False,
    whole: bool = True,
    forgot_us: int = 0,
    may_lack: bool = False,
    now_us: int = 0,
) -> Decision:
    """What to take. `follows`: the node copies another one and may be behind it. `whole`: a stream without state is
    taken from its first block on, otherwise from its latest snapshot. `forgot_us`: streams older than this may have
    been taken once, though their state is gone. `may_lack`: the node may have less of the stream than was taken.

    Raises `IdentityError` if the stream has another block before our generation: a fork is never passed, unless a
    person has accepted it.
    """
    made = _decided(known, answer, follows, whole, forgot_us)
    if made.case in ANEW:
        made = replace(made, known=replace(made.known, restored_us=now_us))
    if made.known.repeats_below == UNTOLD and not may_lack and not answer.more:
        made = replace(made, known=replace(made.known, repeats_below=answer.cookie.minipool_gen + 1))
    events = sum(len(block.events) for block in answer.blocks)
    return replace(made, kind=answer.kind, events_each=max(1, events // max(1, len(answer.blocks))))


def _decided(known: StreamState | None, answer: Answer, follows: bool, whole: bool, forgot_us: int) -> Decision:
    if known is None:
        return _first(answer, whole, forgot_us)
    if not answer.reset:
        return _onward(Case.CONTINUES, replace(known, fork_accepted=False), answer, answer.blocks)
    snapshot = answer.blocks[0].snapshot
    if snapshot is not None and snapshot.incarnation != known.incarnation:
        return _nothing(Case.BEHIND, known) if follows else _anew(Case.RECREATED, known, answer, whole)
    if known.fork_accepted:
        return _nothing(Case.BEHIND, known) if follows else _anew(Case.FORK_ACCEPTED, known, answer, whole=True)
    return _resumed(known, answer, follows)


def _resumed(known: StreamState, answer: Answer, follows: bool) -> Decision:
    gen, first, end = known.cookie.minipool_gen, answer.snapshot, answer.cookie.minipool_gen
    if end < gen:
        return _nothing(Case.BEHIND, known) if follows else _rewound(known, answer)
    if gen < first:
        to = Cookie(first, answer.blocks[0].previous)
        made = _onward(Case.GAP, known, answer, answer.blocks)
        return replace(made, fetch_to=to, repeats=made.repeats or known.restored_us > 0)
    _require_same_chain(known, answer)
    case = Case.OLDER if first < known.snapshot else Case.SAME
    return _onward(case, known, answer, tuple(block for block in answer.blocks if block.number >= gen))


def _require_same_chain(known: StreamState, answer: Answer) -> None:
    last = known.cookie.minipool_gen - 1
    mine = [block for block in answer.blocks if block.number == last]
    found = mine[0].hash if mine else answer.blocks[0].previous
    if found != known.cookie.prev_miniblock_hash:
        raise fork(answer.stream, last)


def witnessed(before: StreamState, answer: Answer, *, may_lack: bool) -> Cookie | None:
    """Compare the answer of a stream that is taken anew with the stream's former state. Returns the cookie whose block
    the node must be asked for besides, if the answer does not show it. `may_lack`: the node copies another one, and has
    to have everything that was taken.
    """
    gen, snapshot = before.cookie.minipool_gen, answer.blocks[0].snapshot
    if snapshot is None or snapshot.incarnation != before.incarnation or gen == 0:
        return None
    if answer.cookie.minipool_gen < gen:
        if may_lack:
            raise GapError(
                f"stream {answer.stream}: the node has not yet the {gen} blocks that were taken of it once",
                hint="it is taken when a node answers that has them",
            )
        return None  # the node was restored: its events are compared with the log
    if gen < answer.snapshot:
        return before.cookie
    _require_same_chain(before, answer)
    return None


def fork(stream: str, block: int) -> IdentityError:
    return IdentityError(
        f"stream {stream}: block {block} is not the block that was taken: this is a fork",
        hint="the node's history was rewritten: compare it with another node's, and keep both",
    )


def _first(answer: Answer, whole: bool, forgot_us: int) -> Decision:
    first = answer.blocks[0]
    here = Cookie(first.number, first.previous)
    start = START if whole else here
    snapshot = first.snapshot
    if snapshot is None:
        raise FormatError(f"stream {answer.stream}: it does not begin with a snapshot", hint="ask another node")
    repeats = forgot_us > 0 and (first.number > 0 or first.at_us <= forgot_us)
    latest, below = _snapshot(answer.snapshot, answer.blocks), UNTOLD if repeats else 0
    known = StreamState(latest, answer.cookie, snapshot.incarnation, _hashes(answer.pool), below)
    taken = (answer.blocks, answer.pool, frozenset[str]())
    return Decision(Case.FIRST, start, here, *taken, known, repeats=repeats, more=answer.more)


def _anew(case: Case, known: StreamState, answer: Answer, whole: bool) -> Decision:
    """As if the stream had no state, and compared with the log for as long as the log may have its events."""
    again = replace(_first(answer, whole, 0), case=case, repeats=True)
    ends = answer.cookie.minipool_gen if case is Case.FORK_ACCEPTED else 0
    below = max(known.cookie.minipool_gen + 1, known.repeats_below, ends + 1)
    return replace(again, known=replace(again.known, repeats_below=below))


def taken_again(part: Decision, *, went_on: bool) -> bool:
    """Whether the part belongs to taking a stream again, which ends with a row of its members. `went_on`: the part
    before it left something over."""
    return part.repeats and (part.case in {Case.FIRST, *ANEW} or went_on)


def unclosed(part: Decision) -> Decision:
    """The same part, if it is not the end of taking the stream again, however long the stream has grown meanwhile."""
    below = max(part.known.repeats_below, part.known.cookie.minipool_gen + 1)
    return replace(part, known=replace(part.known, repeats_below=below))


def _onward(case: Case, known: StreamState, answer: Answer, blocks: tuple[Block, ...]) -> Decision:
    """From our generation to the end of the answer."""
    pool = _hashes(answer.pool)
    if answer.more:
        pool = known.pool
    elif answer.cookie.minipool_gen == known.cookie.minipool_gen:
        pool |= known.pool
    then = replace(known, snapshot=_snapshot(known.snapshot, answer.blocks), cookie=answer.cookie, pool=pool)
    fresh = tuple(event for event in answer.pool if event.hash not in known.pool)
    sealed = (event for block in blocks for event in block.events)
    sent_again = any(event.at_us <= known.restored_us for event in (*sealed, *fresh)) if known.restored_us else False
    repeats = sent_again or known.repeats_below > known.cookie.minipool_gen
    here = known.cookie
    return Decision(case, here, here, blocks, fresh, known.pool, then, repeats=repeats, more=answer.more)


def _rewound(known: StreamState, answer: Answer) -> Decision:
    """The whole stream is taken once more, and events that the log holds are dropped by id: how much of the node's
    history was taken is not known, and blocks made since the restore may lie before its latest snapshot."""
    return replace(_anew(Case.REWOUND, known, answer, whole=True), leave_out=known.pool)


def _nothing(case: Case, known: StreamState) -> Decision:
    return Decision(case, known.cookie, known.cookie, (), (), known.pool, known)


def _snapshot(known: int, blocks: Iterable[Block]) -> int:
    return max([block.number for block in blocks if block.snapshot is not None], default=known)


def _hashes(events: Iterable[BlockEvent]) -> frozenset[str]:
    return frozenset(event.hash for event in events)


@dataclass(frozen=True, slots=True)
class Room:
    """How much more a batch may hold."""

    rows: int
    blocks: int


def fitted(decision: Decision, room: Room, old: StreamState | None, *, at_least_one: bool) -> Decision:
    """As much of the decision as there is room for: whole blocks, in order. A block's events are not counted before it
    is fetched; they are guessed from the blocks that came. `at_least_one`: nothing else is in the batch yet.

    The hash of a cut range's last block is not known here: `fetch_to` and `known` then have an empty one.
    """
    least = 1 if at_least_one else 0
    each = decision.events_each
    blocks_max = max(least, min(room.blocks, room.rows // each))
    before = 0 if old is None or decision.case in ANEW else old.snapshot
    if decision.span > blocks_max:
        to = Cookie(decision.start.minipool_gen + blocks_max, "")
        return _part(replace(decision, fetch_to=to, blocks=()), to, before)
    rows = room.rows - decision.span * each
    least = 0 if decision.span else least
    taken = _counted(decision.blocks, rows, blocks_max - decision.span, least)
    if taken < len(decision.blocks):
        blocks = decision.blocks[:taken]
        to = blocks[-1].cookie if blocks else decision.fetch_to
        return _part(replace(decision, blocks=blocks), to, _snapshot(before, blocks))
    rows -= sum(len(block.events) for block in decision.blocks)
    least = least if not decision.blocks else 0
    if len(decision.pool) > max(rows, least):
        pool = decision.pool[: max(rows, least)]
        left = _hashes(decision.pool[len(pool) :])
        return replace(decision, pool=pool, known=replace(decision.known, pool=decision.known.pool - left), more=True)
    return decision


def _part(decision: Decision, to: Cookie, snapshot: int) -> Decision:
    """Until a stream is taken to its end, events taken from its minipool may be in any of the blocks that follow."""
    then = replace(decision.known, cookie=to, snapshot=snapshot, pool=decision.leave_out)
    return replace(decision, pool=(), known=then, more=True)


def _counted(blocks: tuple[Block, ...], rows: int, blocks_max: int, least: int) -> int:
    taken = 0
    for block in blocks:
        rows -= len(block.events)
        if (rows < 0 or taken >= blocks_max) and taken >= least:
            break
        taken += 1
    return taken
