"""The live tail of a deployment: its log, the heads and gaps that State knows, and Spark where a predicate needs it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import cache

from evermark.app.build import Deployment
from evermark.delivery.base import Cursor, SourcePartition
from evermark.delivery.store.postgres import PostgresDelivery
from evermark.delivery.tail.place import Trouble
from evermark.delivery.tail.wish import BySpark
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
        self._pieces = cache(lambda source: PieceReader(LogReader(deployment.log_folder(source))))

    def heads(self) -> Mapping[SourcePartition, int]:
        found = {SourcePartition(*place): head.batch for place, head in self._heads.load_all().items()}
        return {place: batch for place, batch in found.items() if batch}

    def troubles(self, *, afresh: bool = False) -> Mapping[SourcePartition, Trouble]:
        at, found = self._troubles
        if afresh or self._clock() - at >= _TROUBLES_EVERY_S:
            found = {SourcePartition(*place): Trouble(*told) for place, told in self._recoveries.to_tell().items()}
            self._troubles = self._clock(), found
        return found

    def first_batch(self, place: SourcePartition) -> int | None:
        return self._pieces(place.source).first_batch(place.partition)

    def piece(self, place: SourcePartition, after: Cursor, to: int, rows_max: int, bytes_max: int) -> LogPiece:
        reader = self._pieces(place.source)
        return reader.next(place.partition, after.batch, after.through, to, rows_max, bytes_max)

    def batch_at(self, place: SourcePartition, since: str) -> int:
        return self._deployment.batch_at(place, since)


def tail_of(deployment: Deployment, state: State, by_spark: BySpark) -> TailOf:
    store = PostgresDelivery(state)
    log = DeploymentTail(deployment, state)
    return TailOf(log, frozenset(deployment.sources), lambda name: store.subscription(name).spec, by_spark)
