"""The first event that each failing subscription has not got, found in the log and kept in State: `stream_status`."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from evermark.app.build import Stores
from evermark.cluster.fence import DELIVER_LEASE
from evermark.delivery.model import BEGINNING, Cursor, CursorVector, SourcePartition, Subscription, SubscriptionState
from evermark.delivery.store.stream_status import Failover, PostgresStatus
from evermark.delivery.tail.wish import Wish, Wishes
from evermark.log.pieces import PieceReader
from evermark.log.read import LogReader

_AT_ONCE_MAX = 50
_SCANNED_ROWS_MAX = 5_000
_ROWS, _BYTES = 500, 1024 * 1024


def is_failing(subscription: Subscription) -> bool:
    return subscription.failures > 0 or subscription.state is SubscriptionState.DISABLED


class Failovers:
    """Of the owner of delivery. Looks at a failing subscription again only when its cursor has moved."""

    def __init__(self, stores: Stores, reader: Callable[[str], LogReader]) -> None:
        self._stores = stores
        self._status = PostgresStatus(stores.state)
        self._reader = reader
        self._looked: dict[tuple[str, int], CursorVector] = {}
        self._pieces: dict[str, PieceReader] = {}  # by source, for one look: its files are opened once for all

    def look(self, heads: Mapping[SourcePartition, int]) -> None:
        store, known = self._stores.delivery, self._status.failovers()
        failing = {name: one for name, one in store.subscriptions().items() if is_failing(one)}
        ended = known.keys() - failing.keys()
        self._looked = {at: seen for at, seen in self._looked.items() if at[0] in failing}
        cursors = store.cursors_outside() if failing else {}
        noted: list[Failover] = []
        looked: dict[tuple[str, int], CursorVector] = {}
        self._pieces.clear()
        for name, one in failing.items():
            at = (name, one.generation)
            if name not in cursors or self._looked.get(at) == cursors[name]:
                continue
            if len(looked) == _AT_ONCE_MAX:
                break  # the others at the next look
            if (found := self._first(one, cursors[name], heads)) is not None:
                noted.append(found)
            looked[at] = cursors[name]
        if noted or ended:
            if (epoch := self._epoch()) is None:
                return  # another instance delivers now, or nobody knows: nothing was noted, so it is looked for again
            self._status.save(noted, ended, epoch)
        self._looked |= looked

    def _epoch(self) -> int | None:
        """Ours, if delivery is."""
        row = self._stores.leases.rows().get(DELIVER_LEASE)
        return row.epoch if row is not None and row.holder == self._stores.holder else None

    def _first(
        self, subscription: Subscription, cursors: CursorVector, heads: Mapping[SourcePartition, int]
    ) -> Failover | None:
        """Of several partitions, the event that was taken first."""
        found = []
        for place, head in heads.items():
            row = self._first_in(place, cursors.get(place, BEGINNING), head, subscription)
            if row is not None:
                found.append((row[0], Failover(subscription.name, subscription.generation, place, row[1], row[2])))
        return min(found, key=lambda one: str(one[0]))[1] if found else None

    def _pieces_of(self, source: str) -> PieceReader:
        if source not in self._pieces:
            self._pieces[source] = PieceReader(self._reader(source))
        return self._pieces[source]

    def _first_in(
        self, place: SourcePartition, cursor: Cursor, head: int, subscription: Subscription
    ) -> tuple[object, int, str] | None:
        """Where the search would take long, or only Spark can say, the first event that may be meant."""
        spec = subscription.spec
        wish = Wish(spec.streams, spec.ops, spec.where)
        wishes = Wishes([] if spec.bot is not None else [wish])
        reader, scanned, first = self._pieces_of(place.source), 0, None
        while cursor.batch < head and scanned < _SCANNED_ROWS_MAX:
            piece = reader.next(place.partition, cursor.batch, cursor.through, head, _ROWS, _BYTES)
            rows = piece.rows
            if rows.num_rows:
                found = wishes.matched(rows).rows.get(wish)
                at = 0 if found is None else int(found[0]) if len(found) else None
                told = [rows.column(name) for name in ("ingested_at", "batch", "event_id")]
                first = first or tuple(column[0].as_py() for column in told)
                if at is not None:
                    taken_at, batch, event_id = (column[at].as_py() for column in told)
                    return taken_at, batch, event_id
            scanned += rows.num_rows
            cursor = Cursor(piece.batch, piece.through)
        return first if scanned >= _SCANNED_ROWS_MAX else None
