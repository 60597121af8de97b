"""Events of the store: given to peers page by page, and taken from peers."""

from __future__ import annotations

from collections.abc import Sequence

from evermark.errors import BusyError, ConflictError, FormatError
from evermark.replicas.base import Ingested
from evermark.replicas.event import Event, image_text
from evermark.replicas.local_node import LocalNode
from evermark.replicas.paging import Stretch, stretches
from evermark.replicas.ranges import NOTHING, Held

_PAGE_CHARS = 16 * 1024 * 1024
_READ_EVENTS = 100


class StoredEvents:
    def __init__(self, node: LocalNode) -> None:
        self._node, self._store = node, node.store

    def page(self, table: str, found: Held, limit: int) -> tuple[list[Stretch], list[Event]]:
        """The next page of what was found: bounded in events, and in bytes but for its first event."""
        page: list[Stretch] = []
        events: list[Event] = []
        size = 0
        for stretch in stretches(found, min(limit, self._node.limits.page)):
            for start in range(stretch.start, stretch.end + 1, _READ_EVENTS):
                end = min(stretch.end, start + _READ_EVENTS - 1)
                some = self._read(table, Stretch(stretch.origin, start, end))
                if len(some) != end - start + 1:
                    raise FormatError(
                        f"{table}_Events lacks events that its checkpoints name",
                        hint="rows of it were deleted by hand: run where the table is "
                        f"`evermark replica gc --as-collected {table}`",
                    )
                for event in some:
                    size += len(image_text(event.image) or "") + 200
                    if events and size > _PAGE_CHARS:
                        return page, events
                    events.append(event)
                    page.append(Stretch(stretch.origin, event.version.seq, event.version.seq))
        return page, events

    def _read(self, table: str, stretch: Stretch) -> list[Event]:
        try:
            return self._store.read(table, [stretch])
        except FormatError:
            self._store.mend(table, stretch)
            return self._store.read(table, [stretch])

    def note_told(self, table: str, told: Held) -> None:
        """Before others hear of a number of this node's own, a token is left with it. So a backup from before has an
        older token than the folder, however soon it is put back, and goes on under another origin."""
        own = self._node.origin()
        highest = told.get(own, NOTHING).highest
        if highest > self._store.noted(table):
            self._node.note()
            if self._node.origin() != own or highest > self._store.noted(table):
                raise BusyError(f"{self._node.name} goes on under another origin", hint="meet it again")

    def ingest(self, table: str, events: Sequence[Event]) -> Ingested:
        own = self._node.origin()
        mine = self._store.held(table).get(own, NOTHING)
        for event in events:
            if event.version.origin == own and event.version.seq not in mine:
                raise ConflictError(
                    f"{table}: event {event.version.seq} of this node's own origin {own} comes from a peer",
                    hint="this node was restored from a backup: sync it, and it goes on under a new origin",
                )
        now, skew_ms = self._node.now_ms, self._node.limits.skew_ms
        return self._node.patiently(lambda: self._store.ingest(table, events, now(), skew_ms))
