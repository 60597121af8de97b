"""A tick in the making: decisions about streams become items, as long as there is room."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from evermark.errors import EvermarkError
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import BlockEvent, Cookie, Undecoded
from evermark.sources.blocks.decide.resume import ANEW, Case, Decision, Room, StreamState
from evermark.sources.blocks.decide.ticks import ITEMS_MAX, Carried, Item, Move, Pin, cut_evenly, placed
from evermark.sources.blocks.nodes.client import TRANSIENT, NodeClient
from evermark.sources.blocks.target import Pace

_ITEMS_OF_A_STREAM_MAX = 5
_AS_STORED = json.JSONEncoder(separators=(",", ":"))


class Unpinned(EvermarkError):
    """No node gives the blocks at which a range is to be cut; nothing was put into the draft."""


class Draft:
    def __init__(self, touched: int, limit: Limit, pace: Pace, client: NodeClient) -> None:
        self.touched = touched
        self.items: list[Item] = []
        self.moves: dict[str, Move] = {}
        self.room = Room(limit.rows_max, pace.blocks_max)
        self._pace, self._client = pace, client
        self._carried_left = min(pace.carried_bytes_max, limit.bytes_max)
        self._items_max = min(pace.streams_max * _ITEMS_OF_A_STREAM_MAX, ITEMS_MAX) - _ITEMS_OF_A_STREAM_MAX

    def is_full(self) -> bool:
        no_room = self.room.rows <= 0 or self.room.blocks <= 0 or self._carried_left <= 0
        return bool(self.items) and (no_room or len(self.items) > self._items_max)

    @contextmanager
    def held_back(self) -> Iterator[None]:
        """Meanwhile a quarter of the room is kept for what comes after."""
        rows, blocks, left, items = (
            whole // 4 for whole in (self.room.rows, self.room.blocks, self._carried_left, self._items_max)
        )
        self._give_back(-rows, -blocks, -left, -items)
        try:
            yield
        finally:
            self._give_back(rows, blocks, left, items)

    def share_of(self, streams: int) -> Room:
        return Room(self.room.rows // max(1, streams), self.room.blocks // max(1, streams))

    @contextmanager
    def at_most(self, share: Room) -> Iterator[None]:
        """Meanwhile there is no more room than this."""
        rows, blocks = max(0, self.room.rows - share.rows), max(0, self.room.blocks - share.blocks)
        self._give_back(-rows, -blocks)
        try:
            yield
        finally:
            self._give_back(rows, blocks)

    def _give_back(self, rows: int, blocks: int, left: int = 0, items: int = 0) -> None:
        self.room = Room(self.room.rows + rows, self.room.blocks + blocks)
        self._carried_left += left
        self._items_max += items

    def put_gone(self, stream: str, kind: str, move: Move) -> None:
        was = move.known.incarnation if move.known is not None else ""
        note: Carried = (0, 0, {"note": {"change": "deleted", "was": was}})
        self._put([Item(stream, carried=(note,))], Move(kind or move.kind, None), 1, 0, 0)

    def put_nothing(self, stream: str, kind: str) -> None:
        """The stream has no state and gets none: it need not be looked at any more."""
        self._put([Item(stream)], Move(kind, None), 0, 0, 0)

    def put(
        self,
        stream: str,
        kind: str,
        before: StreamState | None,
        part: Decision,
        *,
        more: bool,
        forgotten: bool = False,
        members: frozenset[str] | None = None,
    ) -> None:
        """`members`: of the stream where the part ends; given if the part ends taking the stream again."""
        opening = _opening(part)
        carried = _carried(part)
        size = _bytes_of(carried)
        if part.blocks and (size > self._carried_left or size > self._pace.carried_bytes_max // 4):
            # Blocks that are too large to be carried are fetched again by the tasks; the minipool is carried.
            part = replace(part, fetch_to=part.blocks[-1].cookie, blocks=())
            carried = _carried(part)
            size = _bytes_of(carried)
        try:
            part, pins = self._pinned(stream, part)
        except TRANSIENT as error:
            raise Unpinned(error.message, hint=error.hint) from error
        # The row with the first members may be in the log, and would be dropped there: another one holds from here on.
        first: Carried | None = (0, 0, {"standing": part.first.wire()}) if part.first is not None else None
        alone = [row for row in (_note(part, before), first, opening) if row is not None]
        items = [Item(stream, carried=(row,), repeats=part.repeats) for row in alone]
        if pins:
            items.append(Item(stream, pins, part.leave_out, repeats=part.repeats))
        if carried or not pins:
            items.append(Item(stream, carried=carried, repeats=part.repeats))
        if members is not None:
            # The members where taking it again ends, whatever joins and leaves were logged on the way.
            about = {"kind": kind, "members": sorted(members), "incarnation": part.known.incarnation}
            ended: Carried = (0, 0, {"standing": {"change": "taken again", **about}})
            items.append(Item(stream, carried=(ended,), repeats=part.repeats))
            alone.append(ended)
        move = Move(kind, None, forgotten=True) if forgotten else Move(kind, part.known, more)
        self._put(items, move, part.span + len(carried), part.span, size + _bytes_of(alone))

    def _put(self, items: list[Item], move: Move, rows: int, blocks: int, size: int) -> None:
        items[-1] = replace(items[-1], move=move)
        self.items += items
        self.moves[items[-1].stream] = move
        self.room = Room(self.room.rows - rows, self.room.blocks - blocks)
        self._carried_left -= size

    def _pinned(self, stream: str, part: Decision) -> tuple[Decision, tuple[Pin, ...]]:
        """The range to fetch, cut where tasks are to share it; each cut with the hash that must stand there."""
        if not part.span:
            return part, ()
        start, end = part.start.minipool_gen, part.fetch_to.minipool_gen
        if not part.fetch_to.prev_miniblock_hash:
            to = Cookie(end, self._client.block(stream, end - 1).hash)
            part = replace(part, fetch_to=to, known=replace(part.known, cookie=to))
        edges = {start: part.start.prev_miniblock_hash, end: part.fetch_to.prev_miniblock_hash}
        cost_s = self._client.fetch_s(part.span, part.span * part.events_each)
        tasks = max(1, min(self._pace.slices_max, int(cost_s / self._pace.slice_s)))
        numbers = cut_evenly(start, end, tasks, self._client.page_blocks)
        return part, tuple((at, edges.get(at) or self._client.block(stream, at - 1).hash) for at in numbers)


def _note(part: Decision, before: StreamState | None) -> Carried | None:
    """The row that says that the stream was recreated, or that its rewritten history was accepted."""
    if before is None or part.case not in {Case.RECREATED, Case.FORK_ACCEPTED}:
        return None
    if part.case is Case.RECREATED:
        note = {"change": "recreated", "incarnation": part.known.incarnation, "was": before.incarnation}
        return 0, 0, {"note": note}
    gen, last = before.cookie.minipool_gen, before.cookie.prev_miniblock_hash
    about = {"change": "fork accepted", "block": gen - 1, "was": last}
    # The members at the end of this history: the memberships of all others end here.
    return 0, 0, {"note": about | {"kind": part.kind, "members": list(part.members)}}


def _opening(part: Decision) -> Carried | None:
    """How the stream is where it is taken from its latest snapshot on; block 0 has its own snapshot."""
    first = part.blocks[0] if part.blocks else None
    begins = first is not None and first.number == part.start.minipool_gen > 0
    if first is None or first.snapshot is None or not begins or part.case not in {Case.FIRST, *ANEW}:
        return None
    return 0, 0, {"opening": first.snapshot.wire(), "block": first.number}


def _bytes_of(rows: Iterable[Carried]) -> int:
    """What State has to keep of rows that the plan carries: names, settings, tags and members count like payloads."""
    return sum(len(_AS_STORED.encode(row)) for row in rows)


def _carried(part: Decision) -> tuple[Carried, ...]:
    """Blocks and minipool as the plan carries them, without events that were taken before."""
    gen = part.known.cookie.minipool_gen
    blocks = [*((block.number, block.events) for block in part.blocks), (gen, part.pool)]
    rows: list[Carried] = []
    if part.blocks and part.blocks[0].number == 0 and part.blocks[0].snapshot is not None:
        rows.append((0, 0, {"opening": part.blocks[0].snapshot.wire()}))
    for number, events in blocks:
        for ordinal, event, told in placed(number, events, part.leave_out, part.repeats):
            rows.append((number, ordinal, {"told": _wire(event)} if told else _wire(event)))
    return tuple(rows)


def _wire(event: BlockEvent) -> dict[str, object]:
    if isinstance(event, Undecoded):
        return {"raw": event.raw.decode(), "hash": event.hash, "reason": event.reason}
    return event.wire()
