"""A slot of tables that was lost, or whose publication was changed: a person may go on from a new slot, and accept the
gap. Nothing of the gap is taken: that needs the tables compared with what the log implies of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from evermark.errors import SetupError
from evermark.sources.base import Gap, Slice
from evermark.sources.postgres.failures import translated
from evermark.sources.postgres.lsn import Incarnation
from evermark.sources.postgres.outbox import filled
from evermark.sources.postgres.repair.server import PostgresRepairServer
from evermark.sources.postgres.repair.steps import NewSlot, OutboxRepair
from evermark.sources.postgres.survey import Survey
from evermark.sources.postgres.tables.publication import look, publication_sql
from evermark.sources.postgres.target import PostgresTarget

WAIT_S = 3600.0


def repair_of(target: PostgresTarget, on_finished: Callable[[], None]) -> TablesRepair:
    return TablesRepair(target, TablesRepairServer(target, WAIT_S), on_finished)


def _refused() -> SetupError:
    return SetupError(
        "what changed while the slot of tables was lost cannot be found in this version",
        hint="to go on from now, and accept the gap: `evermark source recover --choice skip`",
    )


class TablesRepair(OutboxRepair):
    """The steps of an outbox's repair, at a person's word alone."""

    def begin(self, stopped: Callable[[], bool], left_at: str | None = None) -> Gap:
        if left_at is not None:
            raise _refused()
        return super().begin(stopped, left_at)


@dataclass(frozen=True)
class TablesGap(Gap):
    """Reading goes on where the new slot begins."""

    incarnation: Incarnation
    lsn: int
    since = None

    @property
    def pieces(self) -> Sequence[Slice]:  # type: ignore[override]
        raise _refused()

    @property
    def position(self) -> str:
        return self.incarnation.at(self.lsn)

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        raise _refused()

    def positions(self, first: int, count: int) -> pa.Array:
        raise _refused()


class TablesRepairServer(PostgresRepairServer):
    def look(self) -> Survey:
        return look(self._link, self._target)

    def repair_publication(self) -> None:
        """As the file has it. Without the comment of the changed one, which install respects."""
        link = self._link
        with translated(link.dsn, "repairing the publication"), link.connection.transaction():
            if self.look().fingerprint_now is not None:
                link.connection.execute(filled("comment on publication @publication@ is null", self._target).encode())
            link.connection.execute(publication_sql(self._target, self._target.tables).encode())

    def floor(self) -> str | None:
        return None

    def gap(self, new: NewSlot, incarnation: Incarnation, floor: str | None) -> Gap:
        return TablesGap(incarnation, new.lsn)
