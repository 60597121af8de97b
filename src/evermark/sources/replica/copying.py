"""Rows that a peer has when its table is read first: chunks of a snapshot, planned and read as events are.

The order of a replica's events is ours (plan.py), so a copy needs no mark at the peer and no file of our own: the peer
makes a snapshot of one moment, its rows are planned behind all that this moment knew and was planned, and later events
behind them. The peer keeps a snapshot until two newer ones were made. If it goes before all of it was read, the rest is
planned anew from another: rows have the same ids there, and rows that the log has are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa
import pyarrow.compute as pc

from evermark.errors import BusyError, FormatError, NotFoundError
from evermark.replicas.client import HttpPeer
from evermark.replicas.exchange import Manifest
from evermark.replicas.ranges import Held
from evermark.replicas.snapshots import decoded_chunk, verified
from evermark.replicas.values import Table
from evermark.sources.replica.plan import ChunkOf, Part, Plan
from evermark.sources.replica.rows import copied_batch

_BATCH_ROWS = 5000


def held_by_both(one: Held, other: Held) -> Held:
    """What the log has and the peer, too: after a restore it may lack some, and cannot put that into a snapshot."""
    return {origin: ranges & other[origin] for origin, ranges in one.items() if origin in other}


def snapshot_for(peer: HttpPeer, table: Table, plan: Plan | None, held: Held) -> Manifest:
    """A snapshot in which all is that was planned. The peer may take minutes to make it, or has one that is young: not
    that again of which chunks could not be read, unless nothing has changed since."""
    known = {} if plan is None else plan.known(table.name)
    is_another = plan is not None and table.name in plan.copies
    return verified(peer.snapshot(table.name, covering=held if is_another else held_by_both(known, held)), table)


def rows_of(peer: HttpPeer, table: Table, part: Part, chunk: ChunkOf) -> Iterator[pa.RecordBatch]:
    try:
        live = _live(peer, table, chunk)
    except (NotFoundError, FormatError) as error:
        raise BusyError(
            f"{peer.name} has chunk {chunk.number} of the snapshot {chunk.snapshot} no more: {error.message}",
            hint="the rows that are left are planned anew, of another snapshot, at the next start",
        ) from error
    for first in range(part.first, min(part.last + 1, live.num_rows), _BATCH_ROWS):
        some = live.slice(first, min(_BATCH_ROWS, part.last + 1 - first))
        yield copied_batch(table, some, part.origin, part.at + first - part.first, chunk.made_ms)


def lost_snapshots(peer: HttpPeer, tables: Mapping[str, Table], parts: Iterable[Part]) -> set[str]:
    """The snapshots with a chunk that cannot be read: it is gone, spoilt, or of other columns than its table."""
    lost: set[str] = set()
    for part in parts:
        if part.chunk is not None and part.chunk.snapshot not in lost:
            try:
                _live(peer, tables[part.table], part.chunk)
            except (NotFoundError, FormatError):
                lost.add(part.chunk.snapshot)
    return lost


def _live(peer: HttpPeer, table: Table, chunk: ChunkOf) -> pa.Table:
    data = peer.chunk(chunk.snapshot, chunk.number)
    rows = decoded_chunk(table, chunk.snapshot, chunk.number, chunk.wanted, data)
    return rows.filter(pc.invert(rows["is_deleted"]))
