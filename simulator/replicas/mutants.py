"""Bugs of replicas."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from evermark.replicas import members, sql_store
from evermark.replicas.base import ReplicaStore
from evermark.replicas.event import Event
from evermark.replicas.exchange import Peer
from evermark.replicas.identity import Tokens
from evermark.replicas.meetings import Meetings, Synced
from evermark.replicas.members import Floors, Member
from evermark.replicas.ranges import NOTHING, Held, Ranges
from evermark.replicas.sql_store import SqlStore
from evermark.replicas.stored_events import StoredEvents
from evermark.replicas.values import Table
from simulator.mutants.mutant import Mutant

_take = SqlStore._take
_floors = members.floors
_merge_rows = SqlStore._merge_rows


def _maximum(self: SqlStore, table: str, held: Held, events: Sequence[Event]) -> None:
    _take(self, table, held, events)
    origins = {event.version.origin for event in events}
    self._save_held(table, {o: Ranges.through(self.held(table).get(o, NOTHING).highest) for o in origins})


def _by_time(self: Meetings, peer: Peer, table: str, done: Synced) -> None:
    at, event_id = self._since.get((peer.name, table), (0, ""))
    while events := peer.pull_since(table, at, event_id, self._node.limits.page):
        done.add(self._events.ingest(table, events))
        at, event_id = events[-1].timestamp, events[-1].id
        self._since[peer.name, table] = (at, event_id)


def _gives_nothing(self: Meetings, peer: Peer, table: str, done: Synced) -> None: ...


def _numbered_before_the_commit(connection: sqlite3.Connection, is_kept: bool) -> None:
    connection.execute("commit" if is_kept else "rollback")
    if not is_kept:
        connection.execute(
            "update replication_meta set value = cast(value as integer) + 1 where key like 'origin_seq::%'"
        )


def _as_it_comes(new: object, current: object) -> bool:
    return True


def _own_floor(
    table: str,
    me: str,
    mine: Held,
    my_clock: int,
    every: Iterable[Member],
    evicted: frozenset[str],
    lost: Held | None = None,
) -> Floors:
    clock = _floors(table, me, mine, my_clock, every, evicted, lost).clock
    return Floors({origin: ranges.contiguous for origin, ranges in mine.items()}, clock)


def _every_tombstone(self: SqlStore, table: str, clock: int, batch: int) -> int:
    with self._writing():
        return self._run(f'delete from "{table}_Versions" where is_deleted')


def _same_origin(
    store: ReplicaStore,
    kept: Tokens,
    keep: Callable[[Tokens], None],
    fresh_origin: Callable[[str], str],
    *,
    anew: bool = False,
) -> bool:
    if not store.identity()[0]:
        store.renew(fresh_origin(""))
    return False


def _replaced(self: SqlStore, spec: Table, rows: Callable[[], Iterator[pa.Table]]) -> int:
    self._run(f'delete from "{spec.name}" where true')
    self._run(f'delete from "{spec.name}_Versions" where true')
    return _merge_rows(self, spec, rows)


def _whatever_is_wanted(
    table: str, me: str, origin: str, wanted: Ranges, mine: Held, every: Iterable[Member], evicted: frozenset[str]
) -> Ranges:
    return wanted - mine.get(origin, NOTHING)


def _told_unnoted(self: StoredEvents, table: str, told: Held) -> None: ...


MUTANTS: tuple[Mutant, ...] = (
    Mutant("highest-number", "the checkpoint is the highest number seen", ((SqlStore, "_take", _maximum),)),
    Mutant(
        "paged-by-time",
        "events are asked for by the time they were made",
        ((Meetings, "_pull", _by_time), (Meetings, "_push", _gives_nothing)),
    ),
    Mutant(
        "numbered-before-the-commit",
        "a transaction that is rolled back has used up a number",
        (("simulator.replicas.run", "end_transaction", _numbered_before_the_commit),),
    ),
    Mutant("last-to-arrive", "a row takes whatever came last", ((sql_store, "beats", _as_it_comes),)),
    Mutant(
        "own-floor",
        "events are collected that a member lacks",
        ((members, "floors", _own_floor),),
        seeds_max=20,
    ),
    Mutant(
        "tombstones-at-once",
        "a tombstone is collected while older events may arrive",
        ((SqlStore, "_collect_tombstones", _every_tombstone),),
    ),
    Mutant(
        "same-origin",
        "a restored node goes on under the origin it had",
        (("simulator.replicas.node", "claim", _same_origin),),
    ),
    Mutant(
        "told-before-noted",
        "others hear of an event before a token was left with it",
        ((StoredEvents, "note_told", _told_unnoted), (SqlStore, "is_noted", lambda self: True)),
    ),
    Mutant(
        "given-up-too-soon",
        "numbers are given up that a member still has",
        ((members, "may_give_up", _whatever_is_wanted),),
    ),
    Mutant(
        "snapshot-replaces",
        "a snapshot takes the place of rows that its maker has not seen",
        ((SqlStore, "_merge_rows", _replaced),),
    ),
)
