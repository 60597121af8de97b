"""What to take of a stream, from how far it was taken and what a node answered. Pure.

The words of the cases: A, the answer begins at the snapshot we know; B, it begins behind where we stand, and the blocks
between have to be fetched; C, the node has less than we took. They are told apart at *every* answer that begins at a
snapshot, not only at the first after a start.

The traps: a generation that equals the answer's first block is no gap, and an empty range is an error at the node. An
event of the minipool that was taken comes again inside its block, in any later batch, not only in the next one.
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
    Undecoded,
    block_from,
    cookie_from,
    event_or_raw,
    verify_chain,
    verify_event,
)

UNTOLD = 2**62  # how far a stream was once taken is not known yet: nobody was asked who has all of it


@dataclass(frozen=True, slots=True)
class Known:
    """How far a stream was taken: all blocks before the cookie, and `pool` of the minipool behind it."""

    snapshot: int
    cookie: Cookie
    incarnation: str
    pool: frozenset[str] = frozenset()
    repeats_below: int = 0  # in blocks below this one, events that were taken may come again
    fork_accepted: bool = False  # a person said that another chain is the right one


@dataclass(frozen=True, slots=True)
class Answer:
    """What a node answered to `get stream`, verified in itself."""

    stream: str
    kind: str
    reset: bool
    blocks: tuple[Block, ...]
    pool: tuple[BlockEvent, ...]
    cookie: Cookie
    more: bool

    @property
    def snapshot(self) -> int:
        """The position of the snapshot it begins with: the number of its first block."""
        return self.blocks[0].number


class Case(StrEnum):
    CONTINUES = "continues"  # the node took our cookie
    FIRST = "first"  # nothing was taken of it yet
    SAME = "same"  # A
    GAP = "gap"  # B
    OLDER = "older"  # C, though it has all we took: it only began at an older snapshot
    REWOUND = "rewound"  # C: it has less than we took; it was restored from a backup
    BEHIND = "behind"  # a follower that has less than we took: it will have it
    RECREATED = "recreated"
    FORK_ACCEPTED = "fork accepted"  # like recreated, though it is the same stream


ANEW = frozenset({Case.RECREATED, Case.REWOUND, Case.FORK_ACCEPTED})


@dataclass(frozen=True, slots=True)
class Decision:
    """Take the blocks [start, fetch_to), which have to be fetched, then `blocks`, then `pool`; leave out what was taken
    from the minipool before. `known` is where the stream stands then."""

    case: Case
    start: Cookie
    fetch_to: Cookie
    blocks: tuple[Block, ...]
    pool: tuple[BlockEvent, ...]
    leave_out: frozenset[str]
    known: Known
    repeats: bool = False
    more: bool = False
    kind: str = ""  # of the stream, as the node says
    members: tuple[str, ...] = ()  # of a fork that was accepted: who is in the stream at the end of the node's history

    @property
    def span(self) -> int:
        """How many blocks have to be fetched."""
        return self.fetch_to.minipool_gen - self.start.minipool_gen

    @property
    def news(self) -> bool:
        return bool(self.span or self.blocks or self.pool) or self.case in ANEW


def answer_from(wire: Any, stream: str, asked: Cookie | None) -> Answer:
    """What came over the wire, verified as far as it goes without knowing what was taken."""
    if (
        not isinstance(wire, dict)
        or not isinstance(wire.get("blocks"), list)
        or not isinstance(wire.get("minipool"), list)
    ):
        raise FormatError(f"stream {stream}: this is no answer to get stream", hint="is it a block node?")
    blocks = tuple(block_from(block, stream, raw=True) for block in wire["blocks"])
    # What cannot be read waits for its block, which vouches for its hash: nobody does so for what is in a minipool, and
    # one that was taken by its hash alone would be left out when it comes as itself.
    pool = tuple(e for e in map(event_or_raw, wire["minipool"]) if not isinstance(e, Undecoded))
    reset = wire.get("reset") is not False
    answer = Answer(
        stream, str(wire.get("kind", "")), reset, blocks, pool, cookie_from(wire.get("cookie")), bool(wire.get("more"))
    )
    if reset and (not blocks or blocks[0].snapshot is None):
        raise FormatError(
            f"stream {stream}: the answer does not begin with a snapshot", hint="ask another node: this one is damaged"
        )
    if not reset and asked is None:
        raise FormatError(f"stream {stream}: the node continues what nobody began", hint="ask another node")
    end = verify_chain(blocks, None if reset else asked)
    if (end or asked) != answer.cookie:
        raise FormatError(
            f"stream {stream}: the answer's cookie is not that of its last block", hint="ask another node"
        )
    for event in pool:
        verify_event(stream, event)
    return answer


def decide(
    known: Known | None,
    answer: Answer,
    *,
    follows: bool = False,
    whole: bool = True,
    forgot_us: int = 0,
    may_lack: bool = False,
) -> Decision:
    """What to take. `follows`: the node copies another one and may be behind it. `whole`: a stream that is new to us is
    taken from its first block on, otherwise from its latest snapshot. `forgot_us`: streams older than this may have
    been taken once, though nothing is known of it any more. `may_lack`: the node may have less of it than was taken.

    Raises `IdentityError` when the same stream has another block where ours stands: a fork is never passed, unless a
    person has accepted it.
    """
    made = _decided(known, answer, follows, whole, forgot_us)
    if made.known.repeats_below == UNTOLD and not may_lack and not answer.more:
        made = replace(made, known=replace(made.known, repeats_below=answer.cookie.minipool_gen + 1))
    return replace(made, kind=answer.kind)


def _decided(known: Known | None, answer: Answer, follows: bool, whole: bool, forgot_us: int) -> Decision:
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


def _resumed(known: Known, answer: Answer, follows: bool) -> Decision:
    gen, first, end = known.cookie.minipool_gen, answer.snapshot, answer.cookie.minipool_gen
    if end < gen:
        return _nothing(Case.BEHIND, known) if follows else _rewound(known, answer)
    if gen < first:
        to = Cookie(first, answer.blocks[0].previous)
        return replace(_onward(Case.GAP, known, answer, answer.blocks), fetch_to=to)
    _require_same_chain(known, answer)
    case = Case.OLDER if first < known.snapshot else Case.SAME
    return _onward(case, known, answer, tuple(block for block in answer.blocks if block.number >= gen))


def _require_same_chain(known: Known, answer: Answer) -> None:
    last = known.cookie.minipool_gen - 1
    mine = [block for block in answer.blocks if block.number == last]
    found = mine[0].hash if mine else answer.blocks[0].previous
    if found != known.cookie.prev_miniblock_hash:
        raise fork(answer.stream, last)


def witnessed(before: Known, answer: Answer, *, may_lack: bool) -> Cookie | None:
    """Compare a stream that is taken anew with how far it was once taken, as far as the answer shows that; what the
    node must be asked for besides, if anything. `may_lack`: it copies another one, and must have all that was taken.
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
        return None  # it was restored: what it has is compared with the log
    if gen < answer.snapshot:
        return before.cookie
    _require_same_chain(before, answer)
    return None


def fork(stream: str, block: int) -> IdentityError:
    return IdentityError(
        f"stream {stream}: block {block} is another one than was taken: this is a fork",
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
    below = UNTOLD if repeats else 0
    known = Known(
        _snapshot(first.number, answer.blocks), answer.cookie, snapshot.incarnation, _hashes(answer.pool), below
    )
    return Decision(
        Case.FIRST, start, here, answer.blocks, answer.pool, frozenset(), known, repeats=repeats, more=answer.more
    )


def _anew(case: Case, known: Known, answer: Answer, whole: bool) -> Decision:
    """As if nothing were known, and compared with the log for as long as something of it may be there."""
    again = replace(_first(answer, whole, 0), case=case, repeats=True)
    ends = answer.cookie.minipool_gen if case is Case.FORK_ACCEPTED else 0
    below = max(known.cookie.minipool_gen + 1, known.repeats_below, ends + 1)
    return replace(again, known=replace(again.known, repeats_below=below))


def taken_again(part: Decision, *, went_on: bool) -> bool:
    """Whether the part belongs to taking a stream again, which ends with saying who is in it. `went_on`: something was
    left over before it."""
    return part.repeats and (part.case in {Case.FIRST, *ANEW} or went_on)


def unclosed(part: Decision) -> Decision:
    """The same, if taking the stream again does not end with it, however long the stream has grown meanwhile."""
    below = max(part.known.repeats_below, part.known.cookie.minipool_gen + 1)
    return replace(part, known=replace(part.known, repeats_below=below))


def _onward(case: Case, known: Known, answer: Answer, blocks: tuple[Block, ...]) -> Decision:
    """From where we stand to where the answer ends."""
    pool = _hashes(answer.pool)
    if answer.more:
        pool = known.pool
    elif answer.cookie.minipool_gen == known.cookie.minipool_gen:
        pool |= known.pool
    then = replace(known, snapshot=_snapshot(known.snapshot, answer.blocks), cookie=answer.cookie, pool=pool)
    fresh = tuple(event for event in answer.pool if event.hash not in known.pool)
    repeats = known.repeats_below > known.cookie.minipool_gen
    return Decision(
        case, known.cookie, known.cookie, blocks, fresh, known.pool, then, repeats=repeats, more=answer.more
    )


def _rewound(known: Known, answer: Answer) -> Decision:
    """All of the stream is taken once more, and what the log holds of it is dropped there, by id: how far the node's
    history is ours is not known, and what it made since then may lie before its latest snapshot."""
    here = Cookie(answer.snapshot, answer.blocks[0].previous)
    below = max(known.cookie.minipool_gen + 1, known.repeats_below)
    then = Known(
        _snapshot(answer.snapshot, answer.blocks), answer.cookie, known.incarnation, _hashes(answer.pool), below
    )
    return Decision(Case.REWOUND, START, here, answer.blocks, answer.pool, known.pool, then, repeats=True)


def _nothing(case: Case, known: Known) -> Decision:
    return Decision(case, known.cookie, known.cookie, (), (), known.pool, known)


def _snapshot(known: int, blocks: Iterable[Block]) -> int:
    return max([block.number for block in blocks if block.snapshot is not None], default=known)


def _hashes(events: Iterable[BlockEvent]) -> frozenset[str]:
    return frozenset(event.hash for event in events)


@dataclass(frozen=True, slots=True)
class Room:
    """How much of a batch is left."""

    rows: int
    blocks: int


def fitted(decision: Decision, room: Room, old: Known | None, *, at_least_one: bool) -> Decision:
    """As much of the decision as there is room for: whole blocks, in order. A block's events are not counted before it
    is fetched; they are guessed from those that came. `at_least_one`: nothing else is in the batch yet.

    The hash of a cut range's last block is not known here: `fetch_to` and `known` then have an empty one.
    """
    least = 1 if at_least_one else 0
    each = max(1, sum(len(block.events) for block in decision.blocks) // max(1, len(decision.blocks)))
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
    """While a stream is not taken to its end, what came from its minipool may be in any of the blocks that follow."""
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
