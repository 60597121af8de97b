"""Makes the plan: looks which streams have news, and writes down what the next batch holds before it is begun.

One node is asked for the listing and for the streams in it: a node that follows another one may not have yet what the
listing of the other promised, and the listing is not read twice. Only a stream that this node lies about is asked of
the others, and then stays marked to be looked at again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import structlog

from evermark.errors import (
    DeniedError,
    EvermarkError,
    FormatError,
    GapError,
    NotFoundError,
    UnreachableError,
)
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import StreamKind, UnreadableError
from evermark.sources.blocks.client import TRANSIENT, Beyond, Listed, Listing, Node, NodeClient
from evermark.sources.blocks.drafting import Draft, Unpinned
from evermark.sources.blocks.identity import NodeIdentity
from evermark.sources.blocks.membership import Members
from evermark.sources.blocks.plan import Move, Tick, partition_of, way_to
from evermark.sources.blocks.plans import Plans, PlanState, Stale, stale_reason
from evermark.sources.blocks.resume import (
    ANEW,
    UNTOLD,
    Case,
    Decision,
    Known,
    decide,
    fitted,
    taken_again,
    unclosed,
    witnessed,
)
from evermark.sources.blocks.target import BlocksTarget

log = structlog.get_logger(__name__)

_TRACKED_MAX = 10_000
_POLL_S = 0.2
_PROBED_MAX = 20
_STALE_POLL_S = 1.0
_JUST_NOW_US = 2**62  # it was forgotten by a tick that is not confirmed yet: after anything a node has
_LIES = (FormatError, GapError, DeniedError)
_WARNED = {
    Case.OLDER: "the node answers from an older snapshot than we know; nothing is taken twice",
    Case.REWOUND: "the node has less than was taken from it: was it restored? what it has is compared with the log",
    Case.RECREATED: "the stream was deleted and created again: it is taken anew",
    Case.FORK_ACCEPTED: "a person has accepted the node's history: the stream is taken anew",
}


@dataclass(frozen=True)
class _Remembered:
    """How far the listing was looked through at a boundary without finding anything."""

    after: int
    wanted: str
    touched: int


@dataclass
class _Round:
    """What one look at the nodes knows."""

    node: Node
    partition: int
    standing: PlanState
    draft: Draft
    moves: dict[str, Move]  # of ticks that are not confirmed
    passed_before: int  # streams with state and no change since need no look
    stale: Mapping[str, Stale]
    not_now: set[str]  # stale
    tried: set[str]  # stale, and worth a try
    anew: bool  # what was confirmed counts for nothing, but can be compared


class Planner:
    def __init__(
        self, place: BlocksTarget, plans: Plans, client: NodeClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._place, self._plans, self._client, self._clock = place, plans, client, clock
        self.kin = NodeIdentity(client.nodes, plans, place.partitions)
        self._members = Members(place, client)
        self._tracked: OrderedDict[str, float] = OrderedDict()
        self._remembered: dict[int, _Remembered] = {}
        self._any_stale = False

    @property
    def tracked(self) -> int:
        """Streams that are remembered because they were active of late; the others are asked from their snapshot."""
        return len(self._tracked)

    def next_tick(self, partition: int, after: int, limit: Limit) -> int | None:
        """Where the batch that begins at `after` ends; None when there is nothing to take."""
        standing = self._plans.standing(partition)
        ticks = self._plans.ticks(partition)
        try:
            way = way_to(ticks, standing.confirmed, after)
        except GapError as error:
            error.partition = partition  # the others may go on
            raise
        begun = [tick.ends for tick in ticks if tick.starts == after and not tick.void and not tick.root]
        if begun:
            return max(begun)
        self._tear_down()
        errors: list[EvermarkError] = []
        for node in self._client.in_order():
            try:
                found = self._round(node, partition, standing, way, after, limit)
            except (*TRANSIENT, FormatError, DeniedError) as error:
                errors.append(error)  # another one may be well
            else:
                self._client.answered(node)
                return found
        raise min(errors, key=lambda error: (not isinstance(error, TRANSIENT), isinstance(error, UnreachableError)))

    def wait(self, partitions: list[int], wait_s: float) -> None:
        """Until a stream changes, or for that long at the most."""
        touched = min(self._remembered[partition].touched for partition in partitions)
        whole_s = int(min(wait_s, _STALE_POLL_S) if self._any_stale else wait_s)
        for node in self._client.in_order():
            try:
                changed = bool(node.listing(touched, whole_s).rows)
            except (*TRANSIENT, FormatError, DeniedError):
                continue
            if not whole_s and not changed:
                time.sleep(min(wait_s, _POLL_S))
            return

    def _round(
        self, node: Node, partition: int, standing: PlanState, way: list[Tick], after: int, limit: Limit
    ) -> int | None:
        wanted = self._place.wanted.version()
        touched, passed = self._listed_to(partition, standing, way, after, wanted)
        stale = self._plans.stale(partition)
        self._any_stale = bool(stale)
        draft = Draft(touched, limit, self._place.pace, self._client)
        moves = self._plans.moves(partition, [tick.ends for tick in way])
        not_now = {stream for stream, gap in stale.items() if not gap.due}
        anew = bool(way) and way[0].root
        now = _Round(node, partition, standing, draft, moves, passed, stale, not_now, set(), anew)
        try:
            due = [stream for stream, gap in stale.items() if gap.due][:_PROBED_MAX]
            not_now |= {s for s in due if not self._probed(partition, s, stale[s])}
            now.tried = set(due) - not_now
            self._hear_acceptance(now, way)
            self._look_at_owed(now)
            self._look_through_listing(now)
        except TRANSIENT:
            if not draft.items:
                raise  # otherwise what was found is taken first
        if draft.items:
            return self._plans.add(partition, Tick(after, 0, draft.touched, wanted), draft.items)
        self._remembered[partition] = _Remembered(after, wanted, draft.touched)
        news = draft.touched > standing.touched or (draft.touched == standing.touched and wanted != standing.wanted)
        if not way and news:
            self._plans.looked(partition, standing.confirmed, draft.touched, wanted)
        return None

    def _listed_to(
        self, partition: int, standing: PlanState, way: list[Tick], after: int, wanted: str
    ) -> tuple[int, int]:
        """How far the listing was looked through, and up to where streams with state need no second look."""
        touched, by = (way[-1].touched, way[-1].wanted) if way else (standing.touched, standing.wanted)
        remembered = self._remembered.get(partition)
        if remembered is not None and remembered.after == after and remembered.touched >= touched:
            touched, by = remembered.touched, remembered.wanted
        return (touched, touched) if by == wanted else (0, touched)

    def _hear_acceptance(self, now: _Round, way: list[Tick]) -> None:
        """A person's word stands with what was confirmed, and is about what was planned before it, too."""
        for stream in now.tried:
            gap, move = now.stale[stream], now.moves.get(stream)
            if not gap.fork or move is None or move.known is None:
                continue
            confirmed = self._plans.known([stream]).get(stream)
            if confirmed is None or confirmed.known is None or not confirmed.known.fork_accepted:
                continue
            if stream not in self._plans.moves(now.partition, [tick.ends for tick in way if tick.ends > gap.tick]):
                now.moves[stream] = replace(move, known=replace(move.known, fork_accepted=True))

    def _look_at_owed(self, now: _Round) -> None:
        """Streams that had more than a batch was to hold, and those whose gap may be filled now."""
        owed = {stream for stream, move in now.moves.items() if move.more}
        if not now.anew:
            owed |= {stream for stream in self._plans.unfinished(now.partition) if stream not in now.moves}
        for stream in sorted((owed - now.not_now) | now.tried):
            if now.draft.is_full():
                return
            move = self._known(now, [stream]).get(stream)
            if not self._look(now, stream, move.kind if move is not None else "", move):
                return

    def _look_through_listing(self, now: _Round) -> None:
        draft = now.draft
        while not draft.is_full():
            listing = now.node.listing(draft.touched, 0)
            self.kin.require(listing.node)
            if not now.standing.last_tick and not now.standing.touched:
                self._begin(now, listing)
            mine = [row for row in listing.rows if partition_of(row.stream, self._place.partitions) == now.partition]
            known = self._known(now, [row.stream for row in mine])
            for row in mine:
                # A stream may be listed twice, and may have been looked at before the listing came.
                move = draft.moves.get(row.stream) or known.get(row.stream)
                move = move if move is not None and move.known is not None else None
                if not self._is_wanted(now, row, move):
                    continue
                if draft.is_full() or not self._look_at_listed(now, row, move):
                    # Streams that changed together share a number: it is passed when the last of them was looked at.
                    draft.touched = max(draft.touched, row.touched - 1)
                    return
            draft.touched = listing.touched
            if not listing.rows:
                return

    def _begin(self, now: _Round, listing: Listing) -> None:
        self._plans.begin(now.partition, listing.now_us if self._place.cold else 0)
        now.standing = self._plans.standing(now.partition)

    def _is_wanted(self, now: _Round, row: Listed, move: Move | None) -> bool:
        if row.stream in now.not_now:
            return False
        if row.deleted:
            return move is not None
        if move is not None:
            news = row.touched > now.passed_before
            return news and (self._place.wanted.by_members or self._wants(now, row.stream, row.kind))
        inbox = row.kind == StreamKind.INBOX or self._place.wanted.is_inbox(row.stream)
        active = inbox or row.touched > now.standing.cold_before
        return active and self._asked_whether_wanted(now, row)

    def _asked_whether_wanted(self, now: _Round, row: Listed) -> bool:
        """Whether somebody wants a stream of which nothing is known. A node that lies about who is in it makes it
        stale, as one that lies about its events does."""
        try:
            return self._wants(now, row.stream, row.kind)
        except NotFoundError:
            return False  # deleted meanwhile
        except _LIES as error:
            self._mark_stale(now, row.stream, 0, error)
            return False

    def _wants(self, now: _Round, stream: str, kind: str, since: int = 0) -> bool:
        return self._members.want(now.node, stream, kind, now.stale.get(stream), since)

    def _look_at_listed(self, now: _Round, row: Listed, move: Move | None) -> bool:
        if row.deleted and move is not None:
            now.draft.put_gone(row.stream, row.kind, move)
            return True
        return self._look(now, row.stream, row.kind, move)

    def _look(self, now: _Round, stream: str, kind: str, move: Move | None) -> bool:
        """Put what is new of one stream into the draft; False when there is no room for any of it.

        A stream that cannot be read is stale, and in nobody's way.
        """
        draft, before, by_members = now.draft, move.known if move is not None else None, self._place.wanted.by_members
        try:
            decision, elsewhere = self._decided(now, stream, before)
            kind = decision.kind or kind
            if move is None and by_members and stream in now.tried and not self._wants(now, stream, kind):
                draft.put_nothing(stream, kind)
                return True
            part = fitted(decision, draft.room, before, at_least_one=not draft.items)
            blocks = self._members.readable(stream, part.blocks, now.stale.get(stream), part.leave_out)
            part = replace(part, blocks=blocks)
            if ((move is not None and move.more) or stream in now.stale) and now.node.follows():
                elsewhere = True  # what was left over, or could not be had, then may not have come to this node yet
            if decision.case in _WARNED:
                said = _WARNED[decision.case]
                log.warning("blocks_case", source=self._place.source, stream=stream, case=str(decision.case), said=said)
            if decision.news and not part.news:
                return False
            finished = move is not None and move.more and not part.more and not elsewhere
            if part.news or finished:
                self._take(now, stream, kind, move, part, part.more or elsewhere)
            elif stream in now.tried and stream not in draft.moves and not elsewhere and not now.node.follows():
                self._plans.unmark_stale(stream, now.stale[stream])
        except NotFoundError as error:
            if now.node.follows():
                # It may be there at the node this one copies; what is gone there is listed as gone.
                self._mark_stale(now, stream, before.cookie.minipool_gen if before is not None else 0, error)
            elif move is not None:
                draft.put_gone(stream, kind, move)
            elif stream in now.tried:
                draft.put_nothing(stream, kind)
        except (*_LIES, Unpinned) as error:
            self._mark_stale(now, stream, before.cookie.minipool_gen if before is not None else 0, error)
        return True

    def _take(self, now: _Round, stream: str, kind: str, move: Move | None, part: Decision, more: bool) -> None:
        before = move.known if move is not None else None
        members = None
        if taken_again(part, went_on=move is not None and move.more):
            if not more:
                members = self._members.at(now.node, stream, part.known, now.stale.get(stream))
            if members is None:  # it is not done, or nobody can say: that it has changed meanwhile will be seen
                part, more = unclosed(part), True
                if not part.news:
                    return
        # The last that is taken of a stream nobody wants any more: what made it so is among it.
        # In blocks that were taken before, what cannot be read was waited for then.
        since = before.cookie.minipool_gen if before is not None and part.case not in ANEW else 0
        last = self._place.wanted.by_members and move is not None and not more
        forgotten = last and not self._wants(now, stream, kind, since)
        now.draft.put(stream, kind, before, part, more=more, forgotten=forgotten, members=members)

    def _mark_stale(self, now: _Round, stream: str, block: int, error: EvermarkError) -> None:
        log.warning("blocks_stale", source=self._place.source, stream=stream, error=str(error))
        block = error.block if isinstance(error, UnreadableError) else block
        self._plans.mark_stale(now.partition, stream, block, stale_reason(error))
        now.not_now.add(stream)

    def _decided(self, now: _Round, stream: str, known: Known | None) -> tuple[Decision, bool]:
        """The decision, and whether another node had to be asked than the one whose listing is read."""
        cookie = known.cookie if known is not None and stream in self._tracked else None
        last = now.draft.moves.get(stream) or now.moves.get(stream)
        forgot_us = _JUST_NOW_US if now.anew or (last is not None and last.forgotten) else now.standing.forgot_us
        before = self._plans.witness(stream) if known is None and forgot_us else None

        def ask(node: Node) -> Decision:
            answer = node.view(stream, cookie)
            if before is not None:
                ask_for = witnessed(before, answer, may_lack=node.follows())
                if ask_for is not None:
                    self._client.require_chain(node, stream, ask_for)
            untold = forgot_us > 0 if known is None else known.repeats_below == UNTOLD
            first = decide(
                known,
                answer,
                whole=self._place.whole,
                forgot_us=forgot_us,
                may_lack=untold and node.follows(),
            )
            if first.case in ANEW and node.follows():
                return decide(known, answer, follows=True)
            if first.case is Case.FORK_ACCEPTED:
                return replace(first, members=self._members.of(node, stream, now.stale.get(stream)))
            if first.case is Case.GAP:
                # A fork is found out here, and not by a task that would fail, and the whole batch with it.
                self._client.require_chain(node, stream, first.start)
            return first

        try:
            decision, elsewhere = ask(now.node), False
        except _LIES as error:
            if len(self._client.nodes) == 1:
                raise
            log.warning("blocks_node_lies", stream=stream, node=now.node.url, error=str(error))
            decision, elsewhere = self._client.anyone(ask), True
            if not decision.news:
                raise  # this one has something, or another chain: that nobody else has news is no reason to pass it
        self._tracked[stream] = self._clock()
        self._tracked.move_to_end(stream)
        if len(self._tracked) > _TRACKED_MAX:
            self._tracked.popitem(last=False)
        return decision, elsewhere

    def _probed(self, partition: int, stream: str, gap: Stale) -> bool:
        """Whether the block that could not be had, or not be read, can be now."""
        try:
            block = self._client.block(stream, gap.block)
            if gap.unreadable:
                self._members.readable(stream, [block], gap)
        except (NotFoundError, Beyond):
            return True  # deleted meanwhile, or there is no such block (yet): looking at it will tell
        except (*TRANSIENT, *_LIES) as error:
            # One that nobody can be asked for now is as unreadable as before.
            reason = gap.reason if gap.unreadable and isinstance(error, TRANSIENT) else stale_reason(error)
            self._plans.mark_stale(partition, stream, gap.block, reason)
            return False
        return True

    def _known(self, now: _Round, streams: list[str]) -> Mapping[str, Move]:
        asked = [stream for stream in streams if stream not in now.moves]
        found = self._plans.known(asked) if asked else {}
        if now.anew:  # but what a person said still holds
            found = {stream: move for stream, move in found.items() if move.known and move.known.fork_accepted}
        return found | {stream: now.moves[stream] for stream in streams if stream in now.moves}

    def _tear_down(self) -> None:
        """Streams that were idle for long are not remembered."""
        idle = self._clock() - self._place.idle_after_s
        while self._tracked and next(iter(self._tracked.values())) < idle:
            self._tracked.popitem(last=False)
