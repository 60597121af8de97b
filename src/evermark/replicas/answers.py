"""What a node answers when a peer asks."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from evermark.errors import BusyError, DeniedError
from evermark.replicas.diff import StoredRows
from evermark.replicas.digests import Digest, RowDigest, Span
from evermark.replicas.event import Event, member_of
from evermark.replicas.exchange import Evicted, Hello, Manifest, Page, Standing
from evermark.replicas.greetings import Greetings
from evermark.replicas.local_node import LocalNode
from evermark.replicas.native import NotNative
from evermark.replicas.paging import coverage, wanted
from evermark.replicas.ranges import NOTHING, Held, Ranges, lacking, union
from evermark.replicas.snapshots import Snapshots
from evermark.replicas.stored_events import StoredEvents

_ASKER_WAITS_MS = 600_000  # less than an asker waits (`HttpPeer`)


class Answers:
    """`peer` is the asker, as its key says; the `origin` it asks under must be its own."""

    def __init__(self, node: LocalNode, greetings: Greetings, events: StoredEvents, snapshots: Snapshots) -> None:
        self._node, self._store = node, node.store
        self._greetings, self._events, self._snapshots = greetings, events, snapshots

    def hello(self, peer: str, theirs: Hello) -> Hello:
        self._greetings.learn(peer, theirs)
        return self._greetings.hello()

    def standing(self) -> Standing:
        return self._greetings.standing()

    def pull(self, peer: str, table: str, origin: str, held: Held, limit: int, only: Held | None = None) -> Page:
        """`only`: nothing but these is asked for, whatever else the asker has not got."""
        self._check_asker(peer, table, origin)
        mine = self._store.held(table)
        asked = mine if only is None else {each: mine[each] & only.get(each, NOTHING) for each in mine}
        found = wanted(table, asked, self._store.floors(table), held)
        page, events = self._events.page(table, found, limit)
        self._events.note_told(table, coverage(found, page, {}).covered)
        return Page(events, coverage(found, page, mine))

    def pull_since(self, table: str, timestamp: int, event_id: str, limit: int) -> Sequence[Event]:
        self._check_open(table)
        events = self._store.read_since(table, timestamp, event_id, min(limit, self._node.limits.page))
        own = self._node.origin()
        self._events.note_told(table, {own: Ranges.of(e.version.seq for e in events if e.version.origin == own)})
        return events

    def push(self, peer: str, table: str, origin: str, events: Sequence[Event]) -> Held:
        self._check_asker(peer, table, origin)
        self._events.ingest(table, events)
        return self._store.held(table)

    def snapshot(self, table: str, covering: Held | None = None, native: str | None = None) -> Manifest:
        """`covering`: one that is older than these events will not do. `native`: as files, if that is our form."""
        self._check_open(table)
        if native is not None and native == self._store.native_form(table):
            with suppress(NotNative):
                return self._snapshot(table, covering or {}, is_native=True)
        return self._snapshot(table, covering or {}, is_native=False)

    def _snapshot(self, table: str, covering: Held, *, is_native: bool) -> Manifest:
        kept, began_ms = self._snapshots, self._node.now_ms()
        found = kept.newest(table, is_native=is_native)
        if found is None or not self._is_usable(table, found, covering, began_ms):
            make = kept.make_native if is_native else kept.make
            found = make(self._store, table, began_ms)
            ended_ms = self._node.now_ms()
            kept.note_finished(found, ended_ms)
            is_heard = ended_ms - began_ms < _ASKER_WAITS_MS
        else:
            is_heard = True
        self._events.note_told(table, found.held)
        if is_heard and not kept.is_offered(found):
            kept.note_offered(found)
        return found

    def _is_usable(self, table: str, newest: Manifest, covering: Held, now_ms: int) -> bool:
        """One that took long to make was made for an asker that is gone, and asks again: however old it is then, a new
        one would take as long, and have nobody to wait for it either."""
        is_young = now_ms - self._snapshots.finished_ms(newest) < self._node.limits.snapshot_age_ms
        if not is_young and self._snapshots.is_offered(newest):
            return False
        held, floors = union(newest.held, self._store.lost(table)), self._store.floors(table)
        is_whole = all(held.get(o, NOTHING).contiguous >= floor for o, floor in floors.items())
        return is_whole and not lacking(newest.held, covering) and newest.form == self._store.tables()[table].as_json()

    def chunk(self, snapshot: str, number: int) -> bytes:
        return self._snapshots.chunk(snapshot, number)

    def digests(self, table: str, spans: Sequence[Span]) -> list[Digest]:
        return StoredRows(self._store, table).digests(spans)

    def rows(self, table: str, spans: Sequence[Span]) -> list[list[RowDigest]]:
        return StoredRows(self._store, table).rows(spans)

    def cuts(self, table: str, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        return StoredRows(self._store, table).cuts(spans, pieces)

    def _check_open(self, table: str) -> None:
        if table in self._store.given_up():
            raise BusyError(f"{self._node.name} is bootstrapping {table}", hint="ask another peer, or later")
        if not self._store.joined():
            raise BusyError(f"{self._node.name} has not met {table}'s other nodes yet", hint="say hello first")

    def _check_asker(self, peer: str, table: str, origin: str) -> None:
        self._check_open(table)
        if member_of(origin) != peer:
            raise DeniedError(f"{peer} asks as {origin[:80]!r}", hint="a key belongs to one node alone")
        if origin in self._store.evicted():
            raise Evicted(
                f"{origin} was silent for too long and is evicted", hint="it comes back by a snapshot, by itself"
            )
