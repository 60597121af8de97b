"""A tick in the making: decisions about streams become items, as long as there is room."""

from __future__ import annotations

from dataclasses import replace

from evermark.errors import EvermarkError
from evermark.sources.base import Limit
from evermark.sources.blocks.chain import BlockEvent, Cookie, Undecoded
from evermark.sources.blocks.client import TRANSIENT, NodeClient
from evermark.sources.blocks.plan import SLICE_WEIGHT, Carried, Item, Move, Pin, pin_numbers, placed
from evermark.sources.blocks.position import ITEMS_MAX
from evermark.sources.blocks.resume import ANEW, Case, Decision, Known, Room
from evermark.sources.blocks.target import Pace

_ITEMS_OF_A_STREAM_MAX = 5
_EVENT_BYTES = 300  # of an event besides its payload, about


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

    def put_gone(self, stream: str, kind: str, move: Move) -> None:
        was = move.known.incarnation if move.known is not None else ""
        note: Carried = (0, 0, {"note": {"change": "deleted", "was": was}})
        self._put([Item(stream, carried=(note,))], Move(kind or move.kind, None), 1, 0, 0)

    def put_nothing(self, stream: str, kind: str) -> None:
        """Nothing is known of the stream, nor to be known: it need not be looked at any more."""
        self._put([Item(stream)], Move(kind, None), 0, 0, 0)

    def put(
        self,
        stream: str,
        kind: str,
        before: Known | None,
        part: Decision,
        *,
        more: bool,
        forgotten: bool = False,
        members: frozenset[str] | None = None,
    ) -> None:
        """`members`: who is in the stream where the part ends; given where it was taken again up to there."""
        opening = _opening(part)
        carried, size = _carried(part)
        if part.blocks and (size > self._carried_left or size > self._pace.carried_bytes_max // 4):
            # Blocks that are too large to be carried are fetched again by the tasks; the minipool comes along.
            part = replace(part, fetch_to=part.blocks[-1].cookie, blocks=())
            carried, size = _carried(part)
        try:
            part, pins = self._pinned(stream, part)
        except TRANSIENT as error:
            raise Unpinned(error.message, hint=error.hint) from error
        items = []
        if part.case in {Case.RECREATED, Case.FORK_ACCEPTED} and before is not None:
            note: dict[str, object] = {"change": "recreated", "incarnation": part.known.incarnation}
            note["was"] = before.incarnation
            if part.case is Case.FORK_ACCEPTED:
                gen, last = before.cookie.minipool_gen, before.cookie.prev_miniblock_hash
                note = {"change": "fork accepted", "block": gen - 1, "was": last}
                # Who is in the stream at the end of this history: it ends the stays of all others, and begins none.
                note |= {"kind": part.kind, "members": list(part.members)}
            items.append(Item(stream, carried=((0, 0, {"note": note}),), repeats=part.repeats))
        if opening is not None:
            items.append(Item(stream, carried=(opening,), repeats=part.repeats))
        if pins:
            items.append(Item(stream, pins, part.leave_out, repeats=part.repeats))
        if carried or not pins:
            items.append(Item(stream, carried=carried, repeats=part.repeats))
        if members is not None:
            items.append(Item(stream, carried=(_standing(kind, part.known, members),), repeats=part.repeats))
        move = Move(kind, None, forgotten=True) if forgotten else Move(kind, part.known, more)
        self._put(items, move, part.span + len(carried), part.span, size)

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
        spacing = max(SLICE_WEIGHT, -(-part.span // self._pace.slices_max))
        numbers = pin_numbers(start, end, spacing)
        return part, tuple((at, edges.get(at) or self._client.block(stream, at - 1).hash) for at in numbers)


def _opening(part: Decision) -> Carried | None:
    """How a stream is where it is taken from its latest snapshot on; a first block tells by itself."""
    first = part.blocks[0] if part.blocks else None
    begins = first is not None and first.number == part.start.minipool_gen > 0
    if first is None or first.snapshot is None or not begins or part.case not in {Case.FIRST, *ANEW}:
        return None
    return 0, 0, {"opening": first.snapshot.wire(), "block": first.number}


def _standing(kind: str, known: Known, members: frozenset[str]) -> Carried:
    """How a stream is where it was taken again up to: whatever was logged on the way, this is what came of it."""
    about = {"change": "taken again", "kind": kind, "members": sorted(members), "incarnation": known.incarnation}
    return 0, 0, {"standing": about}


def _carried(part: Decision) -> tuple[tuple[Carried, ...], int]:
    """Blocks and minipool as they go along with the plan, without what was taken before; and how large that is."""
    gen = part.known.cookie.minipool_gen
    blocks = [*((block.number, block.events) for block in part.blocks), (gen, part.pool)]
    kept = [
        (number, nth, event, told)
        for number, events in blocks
        for nth, event, told in placed(number, events, part.leave_out, part.repeats)
    ]
    size = sum(_EVENT_BYTES + len(_raw(event)) + len(event.payload) for _, _, event, _ in kept)
    opening: list[Carried] = [
        (0, 0, {"opening": block.snapshot.wire()})
        for block in part.blocks
        if block.number == 0 and block.snapshot is not None
    ]
    events: list[Carried] = [
        (number, nth, {"told": _wire(event)} if told else _wire(event)) for number, nth, event, told in kept
    ]
    return (*opening, *events), size


def _wire(event: BlockEvent) -> dict[str, object]:
    if isinstance(event, Undecoded):
        return {"raw": event.raw.decode(), "hash": event.hash, "reason": event.reason}
    return event.wire()


def _raw(event: BlockEvent) -> bytes:
    return event.raw if isinstance(event, Undecoded) else b""
