"""Bugs of resuming block streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from evermark.errors import EvermarkError
from evermark.sources.blocks import source
from evermark.sources.blocks.chain import Block, BlockEvent, Cookie
from evermark.sources.blocks.decide import resume, ticks
from evermark.sources.blocks.decide.resume import Answer, Case, Decision, StreamState
from evermark.sources.blocks.decide.ticks import Item, Part
from evermark.sources.blocks.nodes import client, members
from evermark.sources.blocks.nodes.client import NodeClient
from evermark.sources.blocks.plan import draft, planner
from evermark.sources.blocks.read import slices
from evermark.sources.blocks.read.rows import Rows
from evermark.sources.blocks.read.slices import SliceReader
from evermark.sources.blocks.source import BlockStreams
from evermark.sources.blocks.store.base import Stale
from evermark.sources.blocks.target import Pace
from simulator.blocks.plans import MemoryPlans
from simulator.mutants.mutant import Mutant

_decide = resume.decide
_onward = resume._onward
_rewound = resume._rewound
_fetched = SliceReader._fetched


def _skips_one_more(case: Case, known: StreamState, answer: Answer, blocks: tuple[Block, ...]) -> Decision:
    return _onward(case, known, answer, tuple(b for b in blocks if not b.number <= known.cookie.minipool_gen))


def _equal_is_a_gap(known: StreamState, answer: Answer, follows: bool) -> Decision:
    gen, first, end = known.cookie.minipool_gen, answer.snapshot, answer.cookie.minipool_gen
    if end < gen:
        return resume._nothing(Case.BEHIND, known) if follows else _rewound(known, answer)
    if gen <= first:
        return replace(_onward(Case.SAME, known, answer, answer.blocks), fetch_to=known.cookie)
    return _resumed(known, answer, follows)


_resumed = resume._resumed


def _first_reset_only(known: StreamState | None, answer: Answer, **more: Any) -> Decision:
    """Looked at once per stream and incarnation of the node's answer; later resets are taken as they come."""
    found = _decide(known, answer, **more)
    if found.case is Case.GAP and known is not None and known.snapshot > 0:
        return replace(found, fetch_to=found.start)
    return found


def _passes_what_failed(
    self: SliceReader, partition: int, tick: int, item: Item, part: Part, rows: Rows
) -> Iterator[None]:
    try:
        yield from _fetched(self, partition, tick, item, part, rows)
    except EvermarkError:
        return


def _tail_only(case: Case, known: StreamState, answer: Answer, blocks: tuple[Block, ...]) -> Decision:
    """Only what came from the minipool with the last answer is left out."""
    found = _onward(case, known, answer, blocks)
    return replace(found, known=replace(found.known, pool=frozenset(event.hash for event in found.pool)))


def _unverified(blocks: Sequence[Block], after: Cookie | None) -> Cookie | None:
    return blocks[-1].cookie if blocks else after


def _begins_without_confirming(self: BlockStreams, partition: int, position: str) -> None:
    self.planner.identity.learn()


def _adopts_at_once(self: MemoryPlans, partition: int, tick: int, now_us: int) -> None:
    """As if nobody could have gone on: a boundary behind what was confirmed is taken for the newest."""
    self.partitions[partition] = replace(self.state(partition), confirmed=0)
    _adopt(self, partition, tick, now_us)


_adopt = MemoryPlans.adopt


def _never_repeats(self: BlockStreams, partition: int, position: str) -> str:
    return position


def _asks_nobody(client: NodeClient, stream: str, blocks: Sequence[Block], *_: object) -> tuple[Block, ...]:
    return tuple(blocks)


def _waits_for_nobody(stale: Stale | None, pace: Pace) -> bool:
    return True


def _tells_nothing(
    block: int, events: Iterable[BlockEvent], leave_out: frozenset[str], repeats: bool
) -> Iterator[tuple[int, BlockEvent, bool]]:
    return _placed(block, events, leave_out, False)


_placed = ticks.placed


def _counts_all(self: planner._Look, touched: int) -> None:
    self.draft.touched = self.read_to = max(self.read_to, touched)


MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "skips-one-more",
        "`<=` for `<`: the block at the generation is skipped, too",
        ((resume, "_onward", _skips_one_more),),
    ),
    Mutant(
        "equal-is-not-looked-at",
        "`<=` for `<`: where the answer begins exactly at the generation, what stands before it is not compared",
        ((resume, "_resumed", _equal_is_a_gap),),
        seeds_max=200,
    ),
    Mutant(
        "first-reset-only",
        "a gap is looked for at the first reset only",
        ((planner, "decide", _first_reset_only),),
    ),
    Mutant(
        "failed-fetch-passed",
        "blocks that could not be fetched are passed",
        ((SliceReader, "_fetched", _passes_what_failed),),
    ),
    Mutant(
        "tail-only-dedup",
        "of what was taken from the minipool only the last is left out of its block",
        ((resume, "_onward", _tail_only),),
    ),
    Mutant(
        "chain-not-verified",
        "blocks are taken as they come",
        ((client, "verify_chain", _unverified), (resume, "verify_chain", _unverified)),
    ),
    Mutant(
        "begun-without-looking",
        "a new owner goes on with plans of the former one, and confirms nothing",
        ((source.BlockStreams, "begin", _begins_without_confirming),),
        seeds_max=200,
    ),
    Mutant(
        "late-owner-begins-anew",
        "an owner that begins behind its successor throws away what is known",
        ((MemoryPlans, "adopt", _adopts_at_once),),
        seeds_max=200,
    ),
    Mutant(
        "never-compared",
        "what may be in the log already is not compared with it",
        ((source.BlockStreams, "may_repeat_from", _never_repeats),),
        seeds_max=200,
    ),
    Mutant(
        "poison-unasked",
        "what one node sends unreadable is poison, without asking another one",
        ((members, "read_by_any", _asks_nobody), (slices, "read_by_any", _asks_nobody)),
    ),
    Mutant(
        "poison-at-once",
        "what one node sends unreadable is poison, though another one could not be asked",
        ((members, "waited_enough", _waits_for_nobody), (slices, "waited_enough", _waits_for_nobody)),
    ),
    Mutant(
        "joins-not-told",
        "of a stream that is taken again only those joins and leaves are told that the log has lost",
        ((draft, "placed", _tells_nothing), (slices, "placed", _tells_nothing)),
        seeds_max=200,
    ),
    Mutant(
        "debt-passed",
        "a follower's listing counts as read though the follower owes streams",
        ((planner._Look, "passed", _counts_all),),
    ),
)
