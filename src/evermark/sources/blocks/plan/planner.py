"""Makes the plan: looks which streams have news, and writes down what the next batch holds before it is read.

The listing and the streams in it are asked of one node: a follower may not have yet what the listing of another node
promised, and the listing is not read twice. Only a stream that this node lies about is asked of the other nodes, and
then stays marked to be looked at again.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

import structlog

from evermark.errors import DeniedError, EvermarkError, FormatError, GapError, NotFoundError
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import StreamKind, UnreadableError
from evermark.sources.blocks.decide.resume import (
    ANEW,
    UNTOLD,
    Case,
    Decision,
    StreamState,
    decide,
    fitted,
    taken_again,
    unclosed,
    witnessed,
)
from evermark.sources.blocks.decide.ticks import Move, Tick, partition_of, way_to
from evermark.sources.blocks.nodes.client import (
    TRANSIENT,
    UNWELL,
    Listed,
    Node,
    NodeClient,
    NoSuchBlockError,
    RefusedError,
)
from evermark.sources.blocks.nodes.identity import NodeIdentity
from evermark.sources.blocks.nodes.members import StreamMembers, members_at, members_of
from evermark.sources.blocks.plan.draft import Draft, Unpinned
from evermark.sources.blocks.store.base import Plans, PlanState, Stale, stale_reason
from evermark.sources.blocks.target import BlocksTarget

_T = TypeVar("_T")
log = structlog.get_logger(__name__)

_TRACKED_MAX = 10_000
_POLL_S = 0.2
_PROBED_MAX = 20
_STALE_POLL_S = 1.0
_REFUSED_MAX = 20  # streams that a node may refuse in one look and still count as well
_SHARES_MAX = 8  # streams of which a batch holds a part each
_LOOK_S = 1.0  # for about this long a listing is read on that holds nothing to take
_CLOCKS_APART_US = 600_000_000  # by how much a node's clock may have been set since a stream was made, and go unnoticed
_JUST_NOW_US = 2**62  # of a state that a tick not yet confirmed removes: later than any time a node has
_LIES = (FormatError, GapError, DeniedError)
_WARNED = {
    Case.OLDER: "the node answers from an older snapshot than we know; nothing is taken twice",
    Case.REWOUND: "the node has less than was taken from it: was it restored? what it has is compared with the log",
    Case.RECREATED: "the stream was deleted and created again: it is taken anew",
    Case.FORK_ACCEPTED: "a person has accepted the node's history: the stream is taken anew",
}


@dataclass(frozen=True)
class _ListedTo:
    """How far the listing was read at a boundary without finding anything more to take."""

    after: int
    choice: str
    touched: int
    node: str  # whose own listing was read up to `read_to`: what it owes, another node may list before that
    read_to: int


@dataclass
class _Look:
    """One look at a node for one partition."""

    node: Node
    partition: int
    state: PlanState
    draft: Draft
    moves: dict[str, Move]  # of ticks that are not confirmed
    passed_before: int  # streams with state and no change since need no look
    stale: Mapping[str, Stale]
    not_now: set[str]  # stale streams that are not tried in this look
    tried: set[str]  # stale streams that are
    anew: bool  # confirmed states do not count, but can be compared
    owed: set[str] = field(default_factory=set)  # streams that had more than a batch could hold
    read_to: int = 0  # how far this node's listing was read
    owes: bool = False  # the node owes streams, and only what was read of another node's listing counts as read
    refused: int = 0  # streams that the node could not answer, though it is well otherwise

    def passed(self, touched: int) -> None:
        self.read_to = max(self.read_to, touched)
        if not self.owes:
            self.draft.touched = self.read_to


class Planner:
    def __init__(
        self, target: BlocksTarget, plans: Plans, client: NodeClient, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._target, self._plans, self._client, self._clock = target, plans, client, clock
        self.identity = NodeIdentity(client.nodes, plans, target.partitions)
        self._members = StreamMembers(target, client)
        self._tracked: OrderedDict[str, float] = OrderedDict()  # when each stream was last active
        self._listed: dict[int, _ListedTo] = {}
        self._any_stale = False
        self._begun: set[int] = set()

    @property
    def tracked(self) -> int:
        """How many streams are asked from their cookie, being active; all others are asked from their snapshot."""
        return len(self._tracked)

    def next_tick(self, partition: int, after: int, limit: Limit) -> int | None:
        """Where the batch that begins at `after` ends; None when there is nothing to take."""
        state = self._plans.state(partition)
        ticks = self._plans.ticks(partition) if state.has_ticks else []
        try:
            way = way_to(ticks, state.confirmed, after)
        except GapError as error:
            error.partition = partition  # the others may go on
            raise
        begun = [tick.ends for tick in ticks if tick.starts == after and not tick.void and not tick.root]
        if begun:
            return max(begun)
        self._forget_idle()
        return self._client.first_well(lambda node: self._plan(node, partition, state, way, after, limit))

    def wait(self, partitions: list[int], wait_s: float) -> None:
        """Until a stream changes, or for that long at the most."""
        listed = [self._listed[partition] for partition in partitions]
        whole_s = int(min(wait_s, _STALE_POLL_S) if self._any_stale else wait_s)

        def changes(node: Node) -> bool:
            read_to = min(it.read_to if it.node == node.url else it.touched for it in listed)
            return bool(node.listing(read_to, whole_s).rows)

        try:
            changed = self._client.first_well(changes)
        except UNWELL:
            return  # `next_tick` says so
        if not whole_s and not changed:
            time.sleep(min(wait_s, _POLL_S))

    def _plan(
        self, node: Node, partition: int, state: PlanState, way: list[Tick], after: int, limit: Limit
    ) -> int | None:
        choice = self._target.choice.version()
        touched, passed = self._listed_to(partition, state, way, after, choice)
        stale = self._plans.stale(partition) if state.has_stale else {}
        self._any_stale = bool(stale)
        draft = Draft(touched, limit, self._target.pace, self._client)
        moves = self._plans.moves(partition, [tick.ends for tick in way])
        not_now = {stream for stream, mark in stale.items() if not mark.due}
        anew = bool(way) and way[0].root
        look = _Look(node, partition, state, draft, moves, passed, stale, not_now, set(), anew)
        look.read_to = read_to = self._read_to(look, after, choice)
        try:
            due = [stream for stream, mark in stale.items() if mark.due][:_PROBED_MAX]
            not_now |= {stream for stream in due if not self._can_be_had(partition, stream, stale[stream])}
            look.tried = set(due) - not_now
            self._apply_accepted_forks(look, way)
            with draft.held_back():
                self._look_at_owed(look)
            self._look_through_listing(look)
        except TRANSIENT:
            if not draft.items:  # otherwise the draft is taken first
                if look.read_to > read_to:
                    self._note_listed(look, way, after, choice)
                raise
        if draft.items:
            ends = self._plans.add(partition, Tick(after, 0, draft.touched, choice), draft.items)
            self._listed[partition] = _ListedTo(ends, choice, draft.touched, node.url, look.read_to)
            return ends
        self._note_listed(look, way, after, choice)
        return None

    def _note_listed(self, look: _Look, way: list[Tick], after: int, choice: str) -> None:
        """Nothing is to be taken of what was looked through: it need not be looked through again."""
        touched, state = look.draft.touched, look.state
        self._listed[look.partition] = _ListedTo(after, choice, touched, look.node.url, look.read_to)
        news = touched > state.touched or (touched == state.touched and choice != state.choice)
        if not way and news:
            self._plans.note_listed(look.partition, state.confirmed, touched, choice)

    def _listed_to(self, partition: int, state: PlanState, way: list[Tick], after: int, choice: str) -> tuple[int, int]:
        """How far the listing was read, and up to where streams with state need no second look."""
        touched, by = (way[-1].touched, way[-1].choice) if way else (state.touched, state.choice)
        listed = self._listed.get(partition)
        if listed is not None and listed.after == after:
            if listed.touched >= touched:
                touched, by = listed.touched, listed.choice
            elif listed.choice == choice != by:
                return listed.touched, touched  # the look by another choice took longer than one look may
        return (touched, touched) if by == choice else (0, touched)

    def _read_to(self, look: _Look, after: int, choice: str) -> int:
        """How far this node's listing was read already; further than the listing as a whole if the node owed
        streams."""
        listed = self._listed.get(look.partition)
        if listed is None or (listed.after, listed.choice, listed.node) != (after, choice, look.node.url):
            return look.draft.touched
        return max(look.draft.touched, listed.read_to)

    def _apply_accepted_forks(self, look: _Look, way: list[Tick]) -> None:
        """A person's acceptance is kept with the confirmed state, and holds for ticks that were planned before it."""
        for stream in look.tried:
            mark, move = look.stale[stream], look.moves.get(stream)
            if not mark.fork or move is None or move.known is None:
                continue
            confirmed = self._plans.known([stream]).get(stream)
            if confirmed is None or confirmed.known is None or not confirmed.known.fork_accepted:
                continue
            if stream not in self._plans.moves(look.partition, [tick.ends for tick in way if tick.ends > mark.tick]):
                look.moves[stream] = replace(move, known=replace(move.known, fork_accepted=True))

    def _look_at_owed(self, look: _Look) -> None:
        """Streams that had more than a batch could hold, and stale streams whose blocks may be had now: each
        with a share, and not with all the room, or a long gap would keep what others say waiting until it is filled."""
        owed = {stream for stream, move in look.moves.items() if move.more}
        if look.state.has_unfinished and not look.anew:
            owed |= {stream for stream in self._plans.unfinished(look.partition) if stream not in look.moves}
        look.owed = owed
        streams = sorted((owed - look.not_now) | look.tried)
        share = look.draft.share_of(min(len(streams), _SHARES_MAX))
        for stream in streams:
            if look.draft.is_full():
                return
            move = self._known(look, [stream]).get(stream)
            with look.draft.at_most(share):
                if not self._look_at(look, stream, move.kind if move is not None else "", move):
                    return

    def _look_through_listing(self, look: _Look) -> None:
        """What changes while the listing is read waits for the next look, or on a busy node there would be no end."""
        draft, deadline, began_us = look.draft, self._clock() + _LOOK_S, 0
        while not draft.is_full():
            listing = look.node.listing(look.read_to, 0)
            look.owes = look.owes or listing.owed > 0
            self.identity.require(listing.node)
            began_us = began_us or listing.now_us
            if not look.state.last_tick and not look.state.touched and look.partition not in self._begun:
                self._plans.begin(look.partition, listing.now_us if self._target.cold else 0)
                self._begun.add(look.partition)  # on a node without streams it stays as it began
                look.state = self._plans.state(look.partition)
            mine = [row for row in listing.rows if partition_of(row.stream, self._target.partitions) == look.partition]
            known = self._known(look, [row.stream for row in mine])
            for row in mine:
                # Streams that changed together share a number: it is passed when the last of them was looked at.
                look.passed(row.touched - 1)
                # A stream may be listed twice, and may have been looked at before the listing came.
                move = draft.moves.get(row.stream) or known.get(row.stream)
                move = move if move is not None and move.known is not None else None
                left_over = row.stream in look.owed and move is not None and move.more and not row.deleted
                if left_over or not self._is_chosen(look, row, move):
                    continue  # what is left over of a stream has its share, whether the stream is listed or not
                if row.deleted and move is not None and not draft.is_full():
                    draft.put_gone(row.stream, row.kind, move)
                elif draft.is_full() or not self._look_at(look, row.stream, row.kind, move):
                    return
            look.passed(listing.touched)
            if not listing.rows or listing.touched > began_us or self._clock() > deadline:
                return

    def _is_chosen(self, look: _Look, row: Listed, move: Move | None) -> bool:
        if row.stream in look.not_now:
            return False
        if row.deleted:
            return move is not None
        if move is not None:
            news = row.touched > look.passed_before
            return news and (self._target.choice.by_members or self._choose(look, row.stream, row.kind))
        inbox = row.kind == StreamKind.INBOX or self._target.choice.is_inbox(row.stream)
        if not inbox and row.touched <= look.state.cold_before:
            return False
        try:
            return self._choose(look, row.stream, row.kind)
        except NotFoundError:
            return False  # deleted meanwhile
        except _LIES as error:  # about members: as serious as a lie about events
            self._mark_stale(look, row.stream, 0, error)
            return False

    def _choose(self, look: _Look, stream: str, kind: str, since: int = 0) -> bool:
        refused: EvermarkError | None = None

        def asked(ask: Callable[[Node], frozenset[str]]) -> frozenset[str]:
            nonlocal refused
            found, refused = self._asked(look, stream, ask)
            return found

        chosen = self._members.choose(look.node, asked, stream, kind, look.stale.get(stream), since)
        if not chosen and isinstance(refused, RefusedError):
            raise refused  # the node may have a join that the other one does not have yet
        return chosen

    def _look_at(self, look: _Look, stream: str, kind: str, move: Move | None) -> bool:
        """Put the news of one stream into the draft; False when there is no room for any of it.

        A stream that cannot be read is stale, and does not hold up the other streams.
        """
        draft, before = look.draft, move.known if move is not None else None
        gen = before.cookie.minipool_gen if before is not None else 0
        try:
            decision, elsewhere = self._decided(look, stream, before)
            kind = decision.kind or kind
            by_members = self._target.choice.by_members
            if move is None and by_members and stream in look.tried and not self._choose(look, stream, kind):
                draft.put_nothing(stream, kind)
                return True
            part = fitted(decision, draft.room, before, at_least_one=not draft.items)
            blocks = self._members.readable(stream, part.blocks, look.stale.get(stream), part.leave_out)
            part = replace(part, blocks=blocks)
            if ((move is not None and move.more) or stream in look.stale) and look.node.follows():
                elsewhere = True  # blocks that were left over, or could not be had, may not have come to this node yet
            if decision.case in _WARNED:
                said = {"case": str(decision.case), "said": _WARNED[decision.case]}
                log.warning("blocks_case", source=self._target.source, stream=stream, **said)
            if decision.news and not part.news:
                return False
            finished = move is not None and move.more and not part.more and not elsewhere
            if part.news or finished:
                self._take(look, stream, kind, move, part, part.more or elsewhere)
            elif stream in look.tried and stream not in draft.moves and not elsewhere and not look.node.follows():
                self._plans.unmark_stale(stream, look.stale[stream])
        except NotFoundError as error:
            if look.node.follows():
                # The node that this one copies may have the stream; if it is deleted there, the listing says so.
                self._mark_stale(look, stream, gen, error)
            elif move is not None:
                draft.put_gone(stream, kind, move)
            elif stream in look.tried:
                draft.put_nothing(stream, kind)
        except (*_LIES, Unpinned) as error:
            self._mark_stale(look, stream, gen, error)
        return True

    def _take(self, look: _Look, stream: str, kind: str, move: Move | None, part: Decision, more: bool) -> None:
        before = move.known if move is not None else None
        members = None
        if taken_again(part, went_on=move is not None and move.more):
            if not more:
                readable = self._members.reading(stream, look.stale.get(stream))
                try:
                    members = members_at(look.node, stream, part.known, readable)
                except TRANSIENT as error:
                    self._require_well(look, error)
            if members is None:  # not all is taken, or no node can say: a later look closes it
                part, more = unclosed(part), True
                if not part.news:
                    return
        # The last part of a stream that is not chosen any more holds the leave that made it so. In blocks that were
        # taken before, unreadable events were waited for then.
        since = before.cookie.minipool_gen if before is not None and part.case not in ANEW else 0
        last = self._target.choice.by_members and move is not None and not more
        forgotten = last and not self._choose(look, stream, kind, since)
        look.draft.put(stream, kind, before, part, more=more, forgotten=forgotten, members=members)

    def _mark_stale(self, look: _Look, stream: str, block: int, error: EvermarkError) -> None:
        log.warning("blocks_stale", source=self._target.source, stream=stream, error=str(error))
        block = error.block if isinstance(error, UnreadableError) else block
        self._plans.mark_stale(look.partition, stream, block, stale_reason(error))
        look.not_now.add(stream)

    def _require_well(self, look: _Look, error: EvermarkError) -> None:
        """Raise the error unless the node is well but for this stream, which then is at fault and holds up no other. A
        node that refuses many is not well."""
        look.refused += 1
        if look.refused > _REFUSED_MAX:
            raise error
        try:
            look.node.listing(look.read_to, 0)
        except UNWELL:
            raise error from None

    def _decided(self, look: _Look, stream: str, known: StreamState | None) -> tuple[Decision, bool]:
        """The decision, and whether a node other than the node whose listing is read had to be asked."""
        cookie = known.cookie if known is not None and stream in self._tracked else None
        last = look.draft.moves.get(stream) or look.moves.get(stream)
        forgot_us = _JUST_NOW_US if look.anew or (last is not None and last.forgotten) else look.state.forgot_us
        if forgot_us:  # by State's clock, and compared with a stream's beginning by the nodes'
            forgot_us += max(node.ahead_us for node in self._client.nodes) + _CLOCKS_APART_US
        witness = self._plans.witness(stream) if known is None and forgot_us else None
        untold = forgot_us > 0 if known is None else known.repeats_below == UNTOLD

        def ask(node: Node) -> Decision:
            answer = node.view(stream, cookie)
            unseen = witnessed(witness, answer, may_lack=node.follows()) if witness is not None else None
            if unseen is not None:
                self._client.require_chain(node, stream, unseen)
            whole, may_lack, now_us = self._target.whole, untold and node.follows(), time.time_ns() // 1000
            made = decide(known, answer, whole=whole, forgot_us=forgot_us, may_lack=may_lack, now_us=now_us)
            if made.case in ANEW and node.follows():
                return decide(known, answer, follows=True)
            if made.case is Case.FORK_ACCEPTED:
                members = members_of(node, stream, self._members.reading(stream, look.stale.get(stream)))
                first = self._client.block_of(node, stream, 0).snapshot
                return replace(made, members=tuple(sorted(members)), first=first)
            if made.case is Case.GAP:
                # A fork is found here, and not by a task, whose failure would hold up the whole batch.
                self._client.require_chain(node, stream, made.start)
            return made

        decision, refused = self._asked(look, stream, ask)
        if refused is not None and not decision.news:
            # The listed node has news, or another chain: that no other node has news is no reason to pass it.
            raise refused
        self._tracked[stream] = self._clock()
        self._tracked.move_to_end(stream)
        if len(self._tracked) > _TRACKED_MAX:
            self._tracked.popitem(last=False)
        return decision, refused is not None

    def _asked(self, look: _Look, stream: str, ask: Callable[[Node], _T]) -> tuple[_T, EvermarkError | None]:
        """What the node says about the stream; or what another one says, and why it was asked: the node lies about the
        stream, or cannot answer."""
        refused: EvermarkError
        try:
            return ask(look.node), None
        except TRANSIENT as error:
            self._require_well(look, error)
            refused = RefusedError(error.message, hint=error.hint)
        except _LIES as error:
            if len(self._client.nodes) == 1:
                raise
            refused = error
        event = "blocks_node_refuses" if isinstance(refused, RefusedError) else "blocks_node_lies"
        log.warning(event, stream=stream, node=look.node.url, error=str(refused))
        try:
            found, node = self._client.ask_any(lambda node: (ask(node), node))
        except TRANSIENT:
            raise refused from None
        return found, None if node is look.node else refused

    def _can_be_had(self, partition: int, stream: str, mark: Stale) -> bool:
        """Whether the block that was missing or unreadable is there and readable now."""
        try:
            block = self._client.block(stream, mark.block)
            if mark.unreadable:
                self._members.readable(stream, [block], mark)
        except (NotFoundError, NoSuchBlockError):
            return True  # deleted meanwhile, or there is no such block (yet): looking at the stream will tell
        except (*TRANSIENT, *_LIES) as error:
            # While no node can be asked, an unreadable event stays unreadable.
            reason = mark.reason if mark.unreadable and isinstance(error, TRANSIENT) else stale_reason(error)
            self._plans.mark_stale(partition, stream, mark.block, reason)
            return False
        return True

    def _known(self, look: _Look, streams: list[str]) -> Mapping[str, Move]:
        asked = [stream for stream in streams if stream not in look.moves]
        found = self._plans.known(asked) if asked else {}
        if look.anew:  # but a person's acceptance of a fork still holds
            found = {stream: move for stream, move in found.items() if move.known and move.known.fork_accepted}
        return found | {stream: look.moves[stream] for stream in streams if stream in look.moves}

    def _forget_idle(self) -> None:
        idle = self._clock() - self._target.idle_after_s
        while self._tracked and next(iter(self._tracked.values())) < idle:
            self._tracked.popitem(last=False)
