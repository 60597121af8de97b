"""Reads a slice of the plan: the events that the plan carries, and the blocks to be fetched between pins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import structlog

from evermark.errors import EvermarkError, FormatError, GapError, NotFoundError, UnreachableError
from evermark.sources.base import Slice
from evermark.sources.blocks.chain import BlockEvent, EventKind, Undecoded, UnreadableError, event_from
from evermark.sources.blocks.decide.ticks import Item, Part, Position, parts, placed
from evermark.sources.blocks.nodes.client import NodeClient
from evermark.sources.blocks.nodes.unreadable import read_by_any, waited_enough
from evermark.sources.blocks.read.rows import Rows
from evermark.sources.blocks.store.base import Plans, stale_reason

log = structlog.get_logger(__name__)


class SliceReader:
    def __init__(self, source: str, plans: Plans, client: NodeClient) -> None:
        self._source, self._plans, self._client = source, plans, client
        self._poison: dict[str, tuple[int, Undecoded]] = {}  # by stream: how many, and the first

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        try:
            ends, first, last = (int(piece.detail[name]) for name in ("tick", "from", "to"))
            tasks = int(piece.detail.get("tasks", 1))
        except (KeyError, ValueError):
            raise FormatError("this is no slice of a block source", hint="slices come from `slices`") from None
        items = self._plans.items(piece.partition, ends)
        all_parts = parts(items)
        if last > len(all_parts):
            raise GapError(
                f"the plan of tick {ends} is gone: reading has begun anew elsewhere",
                hint="another instance has taken over: start again from the checkpoint",
            )
        rows = Rows()
        with self._client.one_of(tasks):
            for part in all_parts[first:last]:
                item = items[part.item]
                if item.pins:
                    added = self._fetched(piece.partition, ends - 1, item, part, rows)
                else:
                    added = self._carried(ends - 1, item, part, rows)
                for _ in added:
                    if rows.full:
                        yield rows.taken()
        if rows:
            yield rows.taken()
        for stream, (count, event) in self._poison.items():
            said = {"source": self._source, "stream": stream, "first": event.hash, "reason": event.reason}
            log.error("blocks_poison", events=count, said="no node gives them in a form that can be read", **said)

    def _carried(self, tick: int, item: Item, part: Part, rows: Rows) -> Iterator[None]:
        """Adds the rows that the plan carries; yields after each."""
        for block, ordinal, wire in item.carried:
            position = str(Position(tick, part.item, block, ordinal))
            if "opening" in wire:
                rows.add_opening(item.stream, wire["opening"], position, int(wire.get("block", 0)))
            elif "note" in wire:
                rows.add_note(item.stream, wire["note"], position)
            elif "standing" in wire:
                rows.add_membership(item.stream, wire["standing"], position)
            elif "told" in wire:
                rows.add_join_or_leave(item.stream, event_from(wire["told"]), position)
            else:
                self._add(item.stream, _event(wire), position, rows)
            yield

    def _fetched(self, partition: int, tick: int, item: Item, part: Part, rows: Rows) -> Iterator[None]:
        """Adds the events of the blocks between two pins; yields after each."""
        at = part.first[0]

        states: list[EvermarkError] = []  # what State itself answered: no stream is at fault then

        def waited() -> bool:
            try:
                mark = self._plans.stale(partition).get(item.stream)
            except EvermarkError as error:
                states.append(error)
                raise
            return waited_enough(mark, self._client.pace)

        try:
            for page in self._client.between(item.stream, part.first, part.last):
                for block in read_by_any(self._client, item.stream, page, waited, item.leave_out):
                    if block.number == 0 and block.snapshot is not None:
                        rows.add_opening(item.stream, block.snapshot.wire(), str(Position(tick, part.item)))
                    for ordinal, event, told in placed(block.number, block.events, item.leave_out, item.repeats):
                        position = str(Position(tick, part.item, block.number, ordinal))
                        if told:
                            rows.add_join_or_leave(item.stream, event, position)
                        else:
                            self._add(item.stream, event, position, rows)
                        yield
                at = page[-1].number + 1
        except NotFoundError:
            # Blocks of a deleted stream cannot be fetched any more: a row in the log names them.
            note = {"change": "lost", "from": at, "to": part.last[0]}
            log.warning("blocks_lost", source=self._source, stream=item.stream, **note)
            rows.add_note(item.stream, note, str(Position(tick, part.item, at)))
        except EvermarkError as error:
            if error in states:
                raise
            at = error.block if isinstance(error, UnreadableError) else at
            self._plans.mark_stale(partition, item.stream, at, stale_reason(error))
            raise UnreachableError(
                f"stream {item.stream}: blocks [{at}, {part.last[0]}) cannot be had now: {error.message}",
                hint="the stream is stale until one of the nodes has them; the other streams go on",
            ) from error

    def _add(self, stream: str, event: BlockEvent, position: str, rows: Rows) -> None:
        if isinstance(event, Undecoded):
            count, first = self._poison.get(stream, (0, event))
            self._poison[stream] = (count + 1, first)
        rows.add(stream, event, position)


def _event(wire: dict[str, Any]) -> BlockEvent:
    if "raw" in wire:
        raw = str(wire["raw"]).encode()
        return Undecoded(str(wire["hash"]), EventKind.MESSAGE, "", 0, "", raw=raw, reason=str(wire["reason"]))
    return event_from(wire)
