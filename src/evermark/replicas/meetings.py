"""Meetings with a peer that this node dials."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from evermark.errors import BusyError, DeniedError, EvermarkError, FormatError, UnreachableError
from evermark.replicas.base import Ingested
from evermark.replicas.bootstrap import Bootstrap
from evermark.replicas.exchange import PROTOCOL, Evicted, Hello, Peer
from evermark.replicas.greetings import Greetings
from evermark.replicas.local_node import LocalNode
from evermark.replicas.paging import SnapshotRequired, coverage, wanted
from evermark.replicas.ranges import Held, Ranges, lacking, union
from evermark.replicas.stored_events import StoredEvents
from evermark.replicas.values import Table

_SNAPSHOTS_MAX = 2  # of a table in one meeting: the first may have become too old while it was taken
_NO_ID = "00000000-0000-0000-0000-000000000000"  # before every id


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


class Meetings:
    """What two peers do with each other is symmetric but for who dials: hello, then events in both directions, then
    hello again, which acknowledges them. An error ends a meeting and loses nothing: the next begins with what is held.
    """

    def __init__(self, node: LocalNode, greetings: Greetings, events: StoredEvents, bootstrap: Bootstrap) -> None:
        self._node, self._store = node, node.store
        self._greetings, self._events, self._bootstrap = greetings, events, bootstrap
        self._since: dict[tuple[str, str], tuple[int, str]] = {}
        self._pushed: dict[tuple[str, str], Held] = {}  # what a peer holds of a table since it last said so
        # By peer, the tables that it had as we did at the last meeting.
        self._alike: dict[str, Mapping[str, Table]] = {}
        self._bootstrapped: Counter[str] = Counter()  # by table, in this meeting

    def sync(self, peer: Peer) -> Synced:
        """Meet a peer: afterwards both hold what either of them held."""
        self._pushed.clear()  # what peers said then is newer
        self._bootstrapped.clear()
        theirs = self._greet(peer)
        done = Synced(peer.name)
        alike = self._common(theirs, done)
        self._alike[peer.name] = alike
        failed = self._each(list(alike), lambda table: self._exchange(peer, table, done, theirs.protocol))
        self._greet(peer)
        _raise(failed)
        return done

    def push(self, peer: Peer) -> Synced:
        """Give a peer what it has not got, by what it said last: for changes that were just made. Before the first
        meeting, which shows the tables that are alike, it is a meeting."""
        done = Synced(peer.name)
        member, alike = self._store.members().get(peer.name), self._alike.get(peer.name)
        if alike is None or member is None or member.said is None or member.said.origin in self._store.evicted():
            return self.sync(peer)
        tables = [name for name, table in self._store.tables().items() if alike.get(name) == table]
        _raise(self._each(tables, lambda table: self._push(peer, table, done)))
        return done

    def _greet(self, peer: Peer) -> Hello:
        theirs = peer.hello(self._greetings.hello())
        self._greetings.learn(peer.name, theirs)
        return theirs

    def _common(self, theirs: Hello, done: Synced) -> Mapping[str, Table]:
        found: dict[str, Table] = {}
        for name, mine in self._store.tables().items():
            other = theirs.tables.get(name)
            if other is None:
                done.skipped[name] = f"{theirs.node} does not replicate it"
            elif (other.columns, other.key) != (mine.columns, mine.key):
                done.skipped[name] = _unlike(mine, other)
            else:
                found[name] = mine
        return found

    def _each(self, tables: Sequence[str], work: Callable[[str], None]) -> dict[str, EvermarkError]:
        """One table's trouble is not another's. Tables that failed are tried once more when the others are done: their
        rows may refer to rows of the others."""
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
                except Exception as error:  # noqa: BLE001 - nobody foresaw it, and it is this table's all the same
                    failed[table] = EvermarkError(
                        f"{table}: {type(error).__name__} {error}", hint="what the peer sent may be damaged"
                    )
                    failed[table].__cause__ = error
        return failed

    def _exchange(self, peer: Peer, table: str, done: Synced, protocol: int) -> None:
        if protocol < PROTOCOL:
            self._pull_since(peer, table, done)
            return
        self._pull(peer, table, done)
        self._push(peer, table, done)

    def _pull(self, peer: Peer, table: str, done: Synced) -> None:
        if table in self._store.given_up():
            self._take_snapshot(peer, table, done)
        held = self._store.held(table)
        while True:
            try:
                page = peer.pull(table, self._node.origin(), held, self._node.limits.page)
            except SnapshotRequired:
                self._take_snapshot(peer, table, done)
                held = self._store.held(table)
                continue
            if page.coverage.more and not (page.events and lacking(held, page.coverage.covered)):
                raise _endless(peer, table)
            done.add(self._events.ingest(table, page.events))
            held = union(held, page.coverage.covered)
            if not page.coverage.more:
                return

    def _take_snapshot(self, peer: Peer, table: str, done: Synced) -> None:
        if self._bootstrapped[table] == _SNAPSHOTS_MAX:
            raise BusyError(
                f"{table}: {peer.name} wants a snapshot to be taken for the {_SNAPSHOTS_MAX + 1}. time in one meeting",
                hint="it collects events faster than its snapshot is taken: a longer retention helps",
            )
        self._bootstrap.take(peer, table)
        self._bootstrapped[table] += 1
        done.snapshots += 1

    def _pull_since(self, peer: Peer, table: str, done: Synced) -> None:
        """Best effort with a peer that knows no origins: by time, with an overlap for clocks that differ. Checkpoints
        move only over what really came, so that nothing is passed over."""
        done.by_time = True
        last = self._since.get((peer.name, table), (0, ""))
        at, event_id = max(0, last[0] - self._node.limits.skew_ms), _NO_ID
        while True:
            events = peer.pull_since(table, at, event_id, self._node.limits.page)
            if not events:
                return
            if (events[-1].timestamp, events[-1].id) <= (at, event_id):
                raise _endless(peer, table)
            done.add(self._events.ingest(table, events))
            at, event_id = events[-1].timestamp, events[-1].id
            self._since[peer.name, table] = (at, event_id)

    def _push(self, peer: Peer, table: str, done: Synced) -> None:
        if table in self._store.given_up():
            return
        member = self._store.members()[peer.name]
        theirs: Held = {} if member.said is None else member.said.held.get(table, {})
        theirs = union(theirs, self._pushed.get((peer.name, table), {}))
        while True:
            mine, floors = self._store.held(table), self._store.floors(table)
            try:
                found = wanted(table, mine, floors, theirs)
            except SnapshotRequired as error:
                done.unsent[table] = (
                    f"{error.message}; {peer.name} takes a snapshot when it dials us: run there `evermark replica add "
                    f"{self._node.name} --url URL`, then `evermark replica sync {self._node.name}`"
                )
                known = {origin: Ranges.through(floor) for origin, floor in floors.items()}
                found = wanted(table, mine, floors, union(theirs, known))
            page, events = self._events.page(table, found, self._node.limits.page)
            if not page:
                self._pushed[peer.name, table] = theirs
                return
            sent = coverage(found, page, {}).covered
            self._events.note_told(table, sent)
            after = peer.push(table, self._node.origin(), events)
            done.pushed += len(events)
            theirs = union(union(theirs, after), sent)


def _endless(peer: Peer, table: str) -> FormatError:
    return FormatError(f"{table}: {peer.name} says that there is more, and gives nothing new", hint="it is damaged")


def _raise(failed: Mapping[str, EvermarkError]) -> None:
    for table, error in failed.items():
        others = "".join(f"; and {name}: {each.message}" for name, each in failed.items() if name != table)
        if others:
            raise type(error)(error.message + others, hint=error.hint) from error
        raise error


def _unlike(mine: Table, other: Table) -> str:
    names = sorted({*mine.columns, *other.columns})
    unlike = [name for name in names if mine.columns.get(name) != other.columns.get(name)]
    if unlike:
        here, there = mine.columns.get(unlike[0]), other.columns.get(unlike[0])
        return f"its columns differ: {unlike[0]} is {here or 'missing'} here and {there or 'missing'} there"
    return f"its keys differ: {', '.join(mine.key)} here and {', '.join(other.key)} there"
