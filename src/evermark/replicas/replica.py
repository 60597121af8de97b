"""A node: it answers its peers, and meets them."""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from evermark.errors import (
    BusyError,
    ConflictError,
    DeniedError,
    EvermarkError,
    FormatError,
    NotFoundError,
    SetupError,
    UnreachableError,
)
from evermark.replicas import clock
from evermark.replicas import members as membership
from evermark.replicas.base import Collected, Cut, Ingested, ReplicaStore
from evermark.replicas.digests import Difference, Digest, RowDigest, Span, differing, digest_of
from evermark.replicas.event import Event, born_ms, image_text, member_of, new_origin
from evermark.replicas.exchange import PAGE_EVENTS, PROTOCOL, Evicted, Hello, Manifest, Page, Peer, Standing
from evermark.replicas.members import Floors, Member, Said
from evermark.replicas.native import NotNative
from evermark.replicas.paging import SnapshotRequired, Stretch, coverage, stretches, wanted
from evermark.replicas.ranges import NOTHING, Held, Ranges, lacking, union
from evermark.replicas.snapshots import Snapshots, verified
from evermark.replicas.values import Table

_T = TypeVar("_T")

DAY_MS = 86_400_000
_LEAF_SPANS_ROWS_MAX = 100_000
_PAGE_CHARS = 16 * 1024 * 1024
_READ_EVENTS = 100
_BUSY_TRIES = 6
_NO_ID = "00000000-0000-0000-0000-000000000000"  # before every id


@dataclass(frozen=True)
class Limits:
    skew_ms: int = 5 * 60_000  # an event from further in the future is quarantined
    retention_ms: int = 7 * DAY_MS
    safety_ms: int = 3_600_000
    dead_ms: int = 30 * DAY_MS  # a member that was silent for so long is evicted
    snapshot_age_ms: int = 600_000  # one that is younger serves the next peer, too
    collect_batch: int = 10_000
    page: int = PAGE_EVENTS
    retention_by_table_ms: Mapping[str, int] = field(default_factory=dict)


@dataclass
class Synced:
    """What one meeting did."""

    peer: str
    taken: int = 0
    applied: int = 0
    duplicates: int = 0
    pushed: int = 0
    quarantined: int = 0
    snapshots: int = 0
    by_time: bool = False
    skipped: dict[str, str] = field(default_factory=dict)  # table: why it was not synced
    unsent: dict[str, str] = field(default_factory=dict)  # table: why the peer still lacks some of it

    def add(self, found: Ingested) -> None:
        self.taken += found.taken
        self.applied += found.applied
        self.duplicates += found.duplicates
        self.quarantined += len(found.quarantined)


class Replica:
    """One node on one store. Not thread-safe: each thread has a `Replica` on a store of its own.

    What two peers do with each other is symmetric but for who dials: hello, then events in both directions, then hello
    again, which acknowledges them. An error ends a meeting and loses nothing: the next begins with what is held.
    """

    def __init__(
        self,
        name: str,
        store: ReplicaStore,
        snapshots: Snapshots,
        now_ms: Callable[[], int],
        limits: Limits | None = None,
        protocol: int = PROTOCOL,
        chance: Callable[[], str] = lambda: secrets.token_hex(4),
        renewed: Callable[[str], None] = lambda origin: None,
        sleep: Callable[[float], None] = time.sleep,
        note: Callable[[Replica], None] | None = None,
    ) -> None:
        """`renewed` is told of an origin before the node goes on under it. `note` leaves a new token."""
        self.name, self.store, self.limits = name, store, limits or Limits()
        self._snapshots, self._now_ms, self._protocol = snapshots, now_ms, protocol
        self._chance, self._renewed = chance, renewed
        self._sleep, self._note = sleep, note or _left
        self._since: dict[tuple[str, str], tuple[int, str]] = {}
        self._pushed: dict[tuple[str, str], Held] = {}  # what a peer holds of a table since it last said so

    def fresh_origin(self, last: str = "") -> str:
        """One that is born after the `last`."""
        return new_origin(self.name, max(self._now_ms(), born_ms(last) + 1), self._chance())

    def _next_origin(self) -> str:
        origin = self.fresh_origin(self.store.identity()[0])
        self._renewed(origin)
        return origin

    # Answers.

    def hello(self) -> Hello:
        said = self.store.said()
        if not self.store.is_noted():
            # Others collect what this node says it holds: a backup that holds less must be found out. So what is said
            # is read first: users write meanwhile.
            self._patiently(lambda: self._note(self))
            if self.store.identity()[0] != said.origin:
                return self.hello()  # it was a backup, and goes on as another
        known = {name: each.said for name, each in self.store.members().items() if each.said is not None}
        return Hello(self.name, self._protocol, self._now_ms(), self.store.tables(), said, known)

    def answer_hello(self, peer: str, theirs: Hello) -> Hello:
        _check_names(peer, theirs)
        self._met(theirs)
        return self.hello()

    def standing(self) -> Standing:
        """What this node has; unlike a hello it changes nothing, here or with the asker."""
        store = self.store
        tables = store.tables()
        held, clocks = {name: store.held(name) for name in tables}, store.clocks()
        said = Said(store.identity()[0], 0, held, clocks, store.evicted())
        hello = Hello(self.name, self._protocol, self._now_ms(), tables, said, {})
        return Standing(hello, {name: store.floors(name) for name in tables})

    def answer_pull(self, peer: str, table: str, origin: str, held: Held, limit: int, only: Held | None = None) -> Page:
        """`only`: nothing but these is asked for, whatever else the asker has not got."""
        self._check_asker(peer, table, origin)
        mine = self.store.held(table)
        asked = mine if only is None else {each: mine[each] & only.get(each, NOTHING) for each in mine}
        found = wanted(table, asked, self.store.floors(table), held)
        page, events = self._page(table, found, limit)
        self._note_told(table, coverage(found, page, {}).covered)
        return Page(events, coverage(found, page, mine))

    def answer_pull_since(self, table: str, timestamp: int, event_id: str, limit: int) -> Sequence[Event]:
        self._check_open(table)
        events = self.store.read_since(table, timestamp, event_id, min(limit, self.limits.page))
        own = self.store.identity()[0]
        self._note_told(table, {own: Ranges.of(e.version.seq for e in events if e.version.origin == own)})
        return events

    def answer_push(self, peer: str, table: str, origin: str, events: Sequence[Event]) -> Held:
        self._check_asker(peer, table, origin)
        self._ingest(table, events)
        return self.store.held(table)

    def answer_snapshot(self, table: str, covering: Held | None = None, native: str | None = None) -> Manifest:
        """`covering`: one that is older than these events will not do. `native`: as files, if that is our form."""
        self._check_open(table)
        if native is not None and native == self.store.native_form(table):
            with suppress(NotNative):
                return self._snapshot(table, covering or {}, is_native=True)
        return self._snapshot(table, covering or {}, is_native=False)

    def _snapshot(self, table: str, covering: Held, *, is_native: bool) -> Manifest:
        newest = self._snapshots.newest(table, is_native=is_native)
        if newest is not None and self._now_ms() - newest.made_ms < self.limits.snapshot_age_ms:
            held, floors = union(newest.held, self.store.lost(table)), self.store.floors(table)
            is_usable = all(held.get(o, NOTHING).contiguous >= floor for o, floor in floors.items())
            is_usable = is_usable and not lacking(newest.held, covering)
            if is_usable and newest.form == self.store.tables()[table].as_json():
                return newest
        make = self._snapshots.make_native if is_native else self._snapshots.make
        made = make(self.store, table, self._now_ms())
        self._note_told(table, made.held)
        return made

    def answer_chunk(self, snapshot: str, number: int) -> bytes:
        return self._snapshots.chunk(snapshot, number)

    def answer_digests(self, table: str, spans: Sequence[Span]) -> list[Digest]:
        return [digest_of(rows) for rows in self.store.row_digests(table, spans)]

    def answer_rows(self, table: str, spans: Sequence[Span]) -> list[list[RowDigest]]:
        found: list[list[RowDigest]] = []
        total = 0
        for rows in self.store.row_digests(table, spans):
            found.append(list(_at_most(rows, _LEAF_SPANS_ROWS_MAX - total)))
            total += len(found[-1])
        return found

    def answer_cuts(self, table: str, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        return [self.store.cuts(table, span, pieces) for span in spans]

    def table(self, name: str) -> Table:
        found = self.store.tables().get(name)
        if found is None:
            raise NotFoundError(f"{name[:60]!r} is not replicated here", hint="evermark replica init --table NAME")
        return found

    def _page(self, table: str, found: Held, limit: int) -> tuple[list[Stretch], list[Event]]:
        """The next page of what was found: bounded in events, and in bytes but for its first event."""
        page: list[Stretch] = []
        events: list[Event] = []
        size = 0
        for stretch in stretches(found, min(limit, self.limits.page)):
            for start in range(stretch.start, stretch.end + 1, _READ_EVENTS):
                end = min(stretch.end, start + _READ_EVENTS - 1)
                some = self._read(table, Stretch(stretch.origin, start, end))
                if len(some) != end - start + 1:
                    raise FormatError(
                        f"{table}_Events lacks events that its checkpoints name",
                        hint="rows were deleted by hand: see docs/replicas.md",
                    )
                for event in some:
                    size += len(image_text(event.image) or "") + 200
                    if events and size > _PAGE_CHARS:
                        return page, events
                    events.append(event)
                    page.append(Stretch(stretch.origin, event.version.seq, event.version.seq))
        return page, events

    def _note_told(self, table: str, told: Held) -> None:
        """Before others hear of a number of this node's own, a token is left with it. So a backup from before has an
        older token than the folder, however soon it is put back, and goes on under another origin."""
        own = self.store.identity()[0]
        highest = told.get(own, NOTHING).highest
        if highest > self.store.noted(table):
            self._patiently(lambda: self._note(self))
            if self.store.identity()[0] != own or highest > self.store.noted(table):
                raise BusyError(f"{self.name} goes on under another origin", hint="meet it again")

    def _read(self, table: str, stretch: Stretch) -> list[Event]:
        try:
            return self.store.read(table, [stretch])
        except FormatError:
            self.store.mend(table, stretch)
            return self.store.read(table, [stretch])

    def _check_open(self, table: str) -> None:
        if table in self.store.given_up():
            raise BusyError(f"{self.name} is bootstrapping {table}", hint="ask another peer, or later")
        if not self.store.joined():
            raise BusyError(f"{self.name} has not met {table}'s other nodes yet", hint="say hello first")

    def _check_asker(self, peer: str, table: str, origin: str) -> None:
        self._check_open(table)
        if member_of(origin) != peer:
            raise DeniedError(f"{peer} asks as {origin[:80]!r}", hint="a key belongs to one node alone")
        if origin in self.store.evicted():
            raise Evicted(
                f"{origin} was silent for too long and is evicted", hint="it comes back by a snapshot, by itself"
            )

    # Meetings.

    def sync(self, peer: Peer) -> Synced:
        """Meet a peer: afterwards both hold what either of them held."""
        self._pushed.clear()  # what peers said then is newer
        theirs = peer.hello(self.hello())
        _check_names(peer.name, theirs)
        self._met(theirs)
        done = Synced(peer.name)
        failed = self._each(
            self._common(theirs, done), lambda table: self._exchange(peer, table, done, theirs.protocol)
        )
        last = peer.hello(self.hello())
        _check_names(peer.name, last)
        self._met(last)
        _raise(failed)
        return done

    def _exchange(self, peer: Peer, table: str, done: Synced, protocol: int) -> None:
        if protocol < PROTOCOL:
            self._pull_since(peer, table, done)
            return
        self._pull(peer, table, done)
        self._push(peer, table, done)

    def _each(self, tables: Sequence[str], work: Callable[[str], None]) -> dict[str, EvermarkError]:
        """One table's trouble is not another's. Those that failed are tried once more when the others are done: their
        rows may refer to rows of these."""
        failed: dict[str, EvermarkError] = {}
        for some in (tables, failed):
            for table in list(some):
                try:
                    work(table)
                    failed.pop(table, None)
                except (UnreachableError, DeniedError, Evicted):
                    raise
                except EvermarkError as error:
                    failed[table] = error
        return failed

    def push(self, peer: Peer) -> Synced:
        """Give a peer what it has not got, by what it said last: for changes that were just made."""
        done = Synced(peer.name)
        member = self.store.members().get(peer.name)
        if member is None or member.said is None or member.said.origin in self.store.evicted():
            return self.sync(peer)
        tables = [table for table in self.store.tables() if table in member.said.held]
        _raise(self._each(tables, lambda table: self._push(peer, table, done)))
        return done

    def _common(self, theirs: Hello, done: Synced) -> list[str]:
        found = []
        for name, mine in self.store.tables().items():
            other = theirs.tables.get(name)
            if other is None:
                done.skipped[name] = f"{theirs.node} does not replicate it"
            elif (other.columns, other.key) != (mine.columns, mine.key):
                done.skipped[name] = _unlike(mine, other)
            else:
                found.append(name)
        return found

    def _met(self, theirs: Hello) -> None:
        """Learn from a hello: who is there, what each holds, who is evicted."""
        now = self._now_ms()
        readings = {
            table: reading
            for table, reading in theirs.said.clocks.items()
            if not clock.is_ahead(reading, now, self.limits.skew_ms)
        }
        if self.store.joined():
            self.store.raise_clocks(readings)
        else:
            self.store.join(readings)
        own = self.store.identity()[0]
        if own in theirs.said.evicted:
            if theirs.said.origin in self.store.evicted():
                raise SetupError(
                    f"{self.name} and {theirs.node} have evicted each other",
                    hint="keep one of them; remove the folder of the other, and `evermark replica init` it again",
                )
            self.store.evict_self(self._next_origin())
        self._check_own_head(theirs)
        own = self.store.identity()[0]
        mine = {table: self.store.held(table) for table in self.store.tables()}
        known = self.store.members()
        for name, said in {**theirs.members, theirs.node: theirs.said}.items():
            if name == self.name:
                self._check_namesake(said, own)
                continue
            known[name] = membership.heard(known.get(name, Member(name)), said, now)
        known = {name: membership.settled(member, mine) for name, member in known.items()}
        self.store.save_members(known, theirs.said.evicted | self.store.evicted())

    def _check_namesake(self, said: Said, own: str) -> None:
        if born_ms(said.origin) > born_ms(own):
            raise ConflictError(
                f"another node calls itself {self.name}: {said.origin}, and this one is {own}",
                hint="this is a copy of it: give it a name and a key of its own, or stop it",
            )

    def _check_own_head(self, theirs: Hello) -> None:
        """A peer that holds more of this node's events than it made: it was restored. It goes on as another origin, and
        takes what it had made as it takes any other's."""
        own = self.store.identity()[0]
        for table in self.store.tables():
            made = self.store.held(table).get(own, NOTHING)
            if not made.covers(theirs.said.held.get(table, {}).get(own, NOTHING)):
                self.store.renew(self._next_origin(), is_noted=False)
                return

    def _pull(self, peer: Peer, table: str, done: Synced) -> None:
        if table in self.store.given_up():
            self._bootstrap(peer, table, done)
        held = self.store.held(table)
        while True:
            origin = self.store.identity()[0]
            try:
                page = peer.pull(table, origin, held, self.limits.page)
            except SnapshotRequired:
                self._bootstrap(peer, table, done)
                held = self.store.held(table)
                continue
            done.add(self._ingest(table, page.events))
            held = union(held, page.coverage.covered)
            if not page.coverage.more:
                return

    def _pull_since(self, peer: Peer, table: str, done: Synced) -> None:
        """Best effort with a peer that knows no origins: by time, with an overlap for clocks that differ. Checkpoints
        move only over what really came, so that nothing is passed over."""
        done.by_time = True
        last = self._since.get((peer.name, table), (0, ""))
        at, event_id = max(0, last[0] - self.limits.skew_ms), _NO_ID
        while True:
            events = peer.pull_since(table, at, event_id, self.limits.page)
            if not events:
                return
            done.add(self._ingest(table, events))
            at, event_id = events[-1].timestamp, events[-1].id
            self._since[peer.name, table] = (at, event_id)

    def _push(self, peer: Peer, table: str, done: Synced) -> None:
        if table in self.store.given_up():
            return
        member = self.store.members()[peer.name]
        theirs: Held = {} if member.said is None else member.said.held.get(table, {})
        theirs = union(theirs, self._pushed.get((peer.name, table), {}))
        while True:
            mine, floors = self.store.held(table), self.store.floors(table)
            try:
                found = wanted(table, mine, floors, theirs)
            except SnapshotRequired as error:
                done.unsent[table] = (
                    f"{error.message}; {peer.name} takes a snapshot when it dials us: run there `evermark replica add "
                    f"{self.name} --url URL`, then `evermark replica sync {self.name}`"
                )
                known = {origin: Ranges.through(floor) for origin, floor in floors.items()}
                found = wanted(table, mine, floors, union(theirs, known))
            page, events = self._page(table, found, self.limits.page)
            if not page:
                self._pushed[peer.name, table] = theirs
                return
            sent = coverage(found, page, {}).covered
            self._note_told(table, sent)
            after = peer.push(table, self.store.identity()[0], events)
            done.pushed += len(events)
            theirs = union(union(theirs, after), sent)

    def _ingest(self, table: str, events: Sequence[Event]) -> Ingested:
        own = self.store.identity()[0]
        mine = self.store.held(table).get(own, NOTHING)
        for event in events:
            if event.version.origin == own and event.version.seq not in mine:
                raise ConflictError(
                    f"{table}: event {event.version.seq} of this node's own origin {own} comes from a peer",
                    hint="this node was restored from a backup: sync it, and it goes on under a new origin",
                )
        return self._patiently(lambda: self.store.ingest(table, events, self._now_ms(), self.limits.skew_ms))

    def _patiently(self, write: Callable[[], _T]) -> _T:
        """Users' transactions go first: what is in their way gives way, and is tried again."""
        for attempt in range(_BUSY_TRIES):
            try:
                return write()
            except BusyError:
                if attempt == _BUSY_TRIES - 1:
                    raise
                self._sleep(0.02 * 2**attempt)
        raise AssertionError("unreachable")

    def _bootstrap(self, peer: Peer, table: str, done: Synced) -> None:
        """Take a snapshot of a peer, chunk by chunk, then merge it at once. Chunks of an earlier try are kept."""
        native = self.store.native_form(table) if self.store.is_empty(table) else None
        try:
            self._take_snapshot(peer, table, native)
        except NotNative:
            self._take_snapshot(peer, table, None)
        done.snapshots += 1

    def _take_snapshot(self, peer: Peer, table: str, native: str | None) -> None:
        spec = self.store.tables()[table]
        manifest, kept = verified(peer.snapshot(table, native), spec), self._snapshots
        self._take_chunks(peer, manifest, kept.missing(peer.name, manifest))
        cut = Cut(manifest.held, manifest.clock)

        def merge() -> int:
            if manifest.files:
                files = kept.taken_files(peer.name, manifest)
                return self.store.take_dump(table, cut, files, self._now_ms())
            return self.store.merge(table, cut, lambda: kept.taken(peer.name, manifest, spec), self._now_ms())

        self._patiently(merge)
        kept.done_with(peer.name, manifest)

    def _take_chunks(self, peer: Peer, manifest: Manifest, missing: Sequence[int]) -> None:
        """The next one is on its way while one is checked and written."""
        with ThreadPoolExecutor(1) as threads:
            coming = [threads.submit(peer.chunk, manifest.id, number) for number in missing[:1]]
            for number, following in itertools.zip_longest(missing, missing[1:]):
                data = coming.pop().result()
                if following is not None:
                    coming.append(threads.submit(peer.chunk, manifest.id, following))
                self._snapshots.take(peer.name, manifest, number, data)

    # Upkeep.

    def add_member(self, name: str) -> None:
        known = self.store.members()
        known.setdefault(name, Member(name))
        self.store.save_members(known, self.store.evicted())

    def remove_member(self, name: str) -> bool:
        """Give up a peer; whether it was ever met. One that was is evicted, and others must know it."""
        member = self.store.members().get(name)
        if member is not None and member.said is not None:
            self.evict([name])
            return True
        self.store.forget_member(name)
        return False

    def evict(self, names: Iterable[str] = ()) -> frozenset[str]:
        """Give up members that were silent for too long, as long as more than half of all are heard; and those named
        by a person. The origins that were given up."""
        known, now = self.store.members(), self._now_ms()
        quiet = membership.silent(known.values(), now, self.limits.dead_ms)
        if 2 * (len(known) + 1 - len(quiet)) <= len(known) + 1:
            quiet = frozenset()
        for name in names:
            said = known[name].said if name in known else None
            if said is None:
                raise NotFoundError(f"{name} was never met", hint="take it out with `evermark replica remove`")
            quiet |= {said.origin}
        new = quiet - self.store.evicted()
        self.store.save_members(known, self.store.evicted() | new)
        return new

    def give_up(self, table: str, origin: str, numbers: Ranges) -> Ranges:
        """Wait no more for numbers that nobody holds, as after a restore; what was given up. `ConflictError` where a
        member may still have them."""
        self.table(table)
        own, members = self.store.identity()[0], self.store.members().values()
        mine, evicted = self.store.held(table), self.store.evicted()
        found = membership.may_give_up(table, own, origin, numbers, mine, members, evicted)
        self.store.give_up(table, origin, found)
        return found

    def floors(self, table: str) -> Floors:
        said = self.store.said()
        known = self.store.members()
        known = {name: membership.settled(member, said.held) for name, member in known.items()}
        return membership.floors(
            table,
            self.name,
            said.held[table],
            said.clocks[table],
            known.values(),
            self.store.evicted(),
            self.store.lost(table),
        )

    def collect(self) -> dict[str, Collected]:
        """Delete what every member has, and what is old enough."""
        self.evict()
        found = {}
        for table in self.store.tables():
            limits = self.limits
            keep_ms = limits.retention_by_table_ms.get(table, limits.retention_ms) + limits.safety_ms
            floors = self.floors(table)
            found[table] = self.store.collect(
                table, floors.by_origin, floors.clock, self._now_ms() - keep_ms, limits.collect_batch
            )
        return found

    def diff(self, peer: Peer, table: str, limit: int = 1000) -> tuple[list[Difference], bool]:
        self.table(table)
        return differing(_Here(self, table), _There(peer, table), limit)


def _left(replica: Replica) -> None:
    """For a node without a folder: its numbers are noted with the token that it has."""
    replica.store.set_token(replica.store.identity()[1])
    replica.store.token_kept()


def _raise(failed: Mapping[str, EvermarkError]) -> None:
    for table, error in failed.items():
        others = "".join(f"; and {name}: {each.message}" for name, each in failed.items() if name != table)
        if others:
            raise type(error)(error.message + others, hint=error.hint) from error
        raise error


def _check_names(peer: str, theirs: Hello) -> None:
    """What a node says of itself, and passes on of others, is under their own names."""
    every = {**theirs.members, theirs.node: theirs.said}
    if theirs.node != peer or any(member_of(said.origin) != name for name, said in every.items()):
        raise DeniedError(
            f"{peer} speaks in another node's name: {theirs.node[:60]!r}", hint="a key belongs to one node alone"
        )


@dataclass(frozen=True)
class _Here:
    replica: Replica
    table: str

    def digests(self, spans: Sequence[Span]) -> list[Digest]:
        return self.replica.answer_digests(self.table, spans)

    def rows(self, spans: Sequence[Span]) -> list[list[RowDigest]]:
        return self.replica.answer_rows(self.table, spans)

    def cuts(self, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        return self.replica.answer_cuts(self.table, spans, pieces)


@dataclass(frozen=True)
class _There:
    peer: Peer
    table: str

    def digests(self, spans: Sequence[Span]) -> list[Digest]:
        return self.peer.digests(self.table, spans)

    def rows(self, spans: Sequence[Span]) -> list[list[RowDigest]]:
        return self.peer.rows(self.table, spans)

    def cuts(self, spans: Sequence[Span], pieces: int) -> list[list[str]]:
        return self.peer.cuts(self.table, spans, pieces)


def _at_most(rows: Iterable[RowDigest], limit: int) -> Iterable[RowDigest]:
    for at, row in enumerate(rows):
        if at >= limit:
            raise EvermarkError("too many rows are asked for at once", hint="ask for smaller ranges")
        yield row


def _unlike(mine: Table, other: Table) -> str:
    names = sorted({*mine.columns, *other.columns})
    unlike = [name for name in names if mine.columns.get(name) != other.columns.get(name)]
    if unlike:
        here, there = mine.columns.get(unlike[0]), other.columns.get(unlike[0])
        return f"its columns differ: {unlike[0]} is {here or 'missing'} here and {there or 'missing'} there"
    return f"its keys differ: {', '.join(mine.key)} here and {', '.join(other.key)} there"
