"""Tables of a Postgres database as a source: every change of them, without a trigger."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from evermark.errors import BusyError, UnreachableError
from evermark.secrets import Hidden
from evermark.sources.base import Condition, Repair, Untaken, Warned
from evermark.sources.copies import Copying, CopyPlace, CopyStore
from evermark.sources.marks import Marks
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.read.pace import IDLE_OFFER_S, PROBE_BYTES_MAX
from evermark.sources.postgres.read.slot import SlotReader
from evermark.sources.postgres.read.slot_source import SlotSource, blamed_on, wal_gauges
from evermark.sources.postgres.survey import stranger, unfit, wal_warnings
from evermark.sources.postgres.tables.capture import TablesCapture
from evermark.sources.postgres.tables.chunk_file import FileMarks
from evermark.sources.postgres.tables.copying import TablesCopying
from evermark.sources.postgres.tables.publication import keyless, unusable
from evermark.sources.postgres.tables.repair import repair_of
from evermark.sources.postgres.tables.rows import CopyMarks
from evermark.sources.postgres.tables.versions import StateVersions, TableVersions
from evermark.sources.postgres.target import PostgresTarget
from evermark.state.connection import State

# A reader passes WAL that holds nothing of ours after IDLE_OFFER_S, and needs a moment to do it.
STANDS_STILL_S = 2 * IDLE_OFFER_S
_NAMED_MAX = 3
_LOOK_TIMEOUT = "2s"


def versions_in_state(dsn: Hidden, schema: str, source: str) -> TableVersions:
    return StateVersions(State(dsn.open, schema, connections_max=2), source)


class PostgresTables(SlotSource):
    """Picklable: its target travels, connections do not. `versions` opens what is remembered of the tables, `copies`
    what is kept of copies; without it none can be made."""

    def __init__(
        self, target: PostgresTarget, versions: Callable[[], TableVersions], copies: CopyPlace | None = None
    ) -> None:
        self._target, self._open, self._copies = target, versions, copies
        self._opened: TableVersions | None = None
        self._opened_copies: CopyStore | None = None
        self._opening = threading.Lock()
        self._capture = TablesCapture(target, lambda: self._versions, self._marks_of_copies)
        super().__init__([SlotReader(self._capture)])
        # Has a connection of its own, and never keeps the slot from its reader for long.
        self._look = SlotReader(self._capture, session={"statement_timeout": _LOOK_TIMEOUT})
        self._marks = Marks()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self._target, self._open, self._copies)

    @property
    def _versions(self) -> TableVersions:
        with self._opening:
            if self._opened is None:
                self._opened = self._open()
            return self._opened

    def _marks_of_copies(self) -> CopyMarks | None:
        if self._copies is None:
            return None
        with self._opening:
            if self._opened_copies is None:
                self._opened_copies = self._copies.open()
            return FileMarks(self._opened_copies, self._copies.folder)

    def copying(self) -> Copying | None:
        return TablesCopying(self._target, self._copies, self._open) if self._copies is not None else None

    def condition(self) -> Condition:
        gauges = wal_gauges([self._slots[0].look()], self._target.wal_retained_warn_bytes)
        warnings = dict(wal_warnings(gauges))
        bad = unusable(self._slots[0].run_query, self._target)
        gauges["unusable_tables"] = len(bad)
        if bad:
            said = "; ".join(f"{each.table} {each.trouble}" for each in bad[:_NAMED_MAX])
            warnings["unusable_tables"] = Warned(said, bad[0].mend)
        nameless = keyless(self._slots[0].run_query, self._target)
        gauges["keyless_tables"] = len(nameless)
        if nameless:
            said = "; ".join(f"{each.table} {each.trouble}" for each in nameless[:_NAMED_MAX])
            warnings["keyless_tables"] = Warned(said, nameless[0].mend)
        return Condition(gauges, warnings)

    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        """What waits is known by peeking, if nobody reads the slot just now; else WAL that no reader has passed for
        longer than a reader takes counts as waiting."""
        return {partition: found for partition, text in after.items() if (found := self._waiting(partition, text))}

    def _waiting(self, partition: int, text: str) -> Untaken | None:
        position = Position.parse(text)
        with blamed_on(partition):
            survey = self._look.look()
            trouble = unfit(survey) or stranger(survey, position)
            if trouble is not None:
                raise trouble
            now, upto = time.monotonic(), survey.incarnation.at(survey.flush_lsn)
            self._marks.note(upto, now)
            ahead = survey.flush_lsn - position.lsn
            if ahead <= 0:
                return None
            behind_s = self._marks.behind_s(text, now)
            idle = survey.slot is not None and not survey.slot.active
            if behind_s > STANDS_STILL_S or (idle and ahead <= PROBE_BYTES_MAX and self._holds(position)):
                return Untaken(upto, behind_s)
        return None

    def _holds(self, position: Position) -> bool:
        try:
            return self._look.holds_changes(position)
        except (BusyError, UnreachableError):
            # A reader has come meanwhile, which ends the connection that holds the slot; or the look took too long.
            # The next look tells of a server that is gone.
            return False

    def repair(self, partition: int) -> Repair:
        return repair_of(self._target, lambda: self._versions, self._renew)

    def _renew(self) -> None:
        """What was known of the old slot's WAL says nothing of the new one's."""
        old = self._slots[0]
        self._slots[0] = SlotReader(self._capture)
        old.forget()

    def close(self) -> None:
        self._look.forget()
        super().close()
        with self._opening:
            if self._opened is not None:
                self._opened.close()
                self._opened = None
            if self._opened_copies is not None:
                self._opened_copies.close()
                self._opened_copies = None
