"""The live tail of a deployment: its log, the heads and gaps that State knows, and Spark where a predicate needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from evermark.app.build import Deployment
from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.delivery.tail.place import Trouble
from evermark.delivery.tail.wish import BySpark
from evermark.errors import UnreachableError
from evermark.ingest.repair.postgres import Recoveries
from evermark.log.head import PostgresHeads
from evermark.log.pieces import LogPiece, PieceReader
from evermark.log.read import LogReader
from evermark.server.tail import TailOf
from evermark.state.connection import State

_TROUBLES_EVERY_S = 1.0


class DeploymentTail:
    """A `TailLog`. Batches that any instance has taken are in it: State says how far each partition may be read."""

    def __init__(self, deployment: Deployment, state: State, clock: Callable[[], float] = time.monotonic) -> None:
        self._deployment = deployment
        self._heads = PostgresHeads(state)
        self._recoveries = Recoveries(state)
        self._clock = clock
        self._troubles: tuple[float, Mapping[SourcePartition, Trouble]] = (float("-inf"), {})
        self._readers = cache(lambda source: LogReader(deployment.log_folder(source)))
        self._pieces = cache(lambda source: PieceReader(self._readers(source)))
        self._taken: Mapping[SourcePartition, int] = {}  # the last batches that State knew when it was asked last

    def heads(self) -> Mapping[SourcePartition, int]:
        found = {SourcePartition(*place): head.batch for place, head in self._heads.load_all().items()}
        self._taken = {place: batch for place, batch in found.items() if batch}
        return self._taken

    def troubles(self, *, afresh: bool = False) -> Mapping[SourcePartition, Trouble]:
        at, found = self._troubles
        if afresh or self._clock() - at >= _TROUBLES_EVERY_S:
            found = {SourcePartition(*place): Trouble(*told) for place, told in self._recoveries.to_tell().items()}
            self._troubles = self._clock(), found
        return found

    def first_batch(self, place: SourcePartition) -> int | None:
        with _disk_is_said(place):
            first = self._pieces(place.source).first_batch(place.partition)
            if first is None:
                self._require_whole(place, self._taken.get(place, 0))
            return first

    def piece(self, place: SourcePartition, after: Cursor, to: int, rows_max: int, bytes_max: int) -> LogPiece:
        with _disk_is_said(place):
            reader = self._pieces(place.source)
            piece = reader.next(place.partition, after.batch, after.through, to, rows_max, bytes_max)
            self._require_whole(place, piece.batch)
            return piece

    def _require_whole(self, place: SourcePartition, batch: int) -> None:
        self._readers(place.source).require_whole(place.partition, batch, f"{place.source}/{place.partition}")

    def batch_at(self, place: SourcePartition, since: str) -> int:
        return self._deployment.batch_at(place, since)


@contextmanager
def _disk_is_said(place: SourcePartition) -> Iterator[None]:
    """What a disk refuses (a bad sector, the rights of a file) is the trouble of one partition, and not of all."""
    try:
        yield
    except OSError as error:
        raise UnreachableError(
            f"partition {place.partition} of the log of {place.source} cannot be read: {error}",
            hint="see to the disk, and to the rights of its files: it is tried until it can be read",
        ) from error


def tail_of(deployment: Deployment, state: State, by_spark: BySpark) -> TailOf:
    store = PostgresDelivery(state)
    log = DeploymentTail(deployment, state)
    return TailOf(log, frozenset(deployment.sources), lambda name: store.subscription(name).spec, by_spark)
