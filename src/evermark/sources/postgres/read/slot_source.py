"""A Postgres source: one partition for each replication slot it is read from (see slot.py)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from evermark.errors import EvermarkError
from evermark.event import Seen
from evermark.event_file import Rows
from evermark.sources.base import Feed, Limit, Slice, Source
from evermark.sources.postgres.connect import close_idle
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.read.slot import SlotReader
from evermark.sources.postgres.survey import Survey


class SlotSource(Source):
    """What the modes of a Postgres source share. A subclass says what its slots carry."""

    def __init__(self, slots: Sequence[SlotReader]) -> None:
        self._slots = list(slots)

    def partitions(self) -> Sequence[int]:
        return list(range(len(self._slots)))

    def earliest(self, partition: int) -> str:
        with blamed_on(partition):
            return self._slots[partition].earliest()

    def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:
        for partition, slot in enumerate(self._slots):
            if not resume or partition in resume:
                with blamed_on(partition):
                    slot.check(resume.get(partition), (newest or {}).get(partition))

    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        """Blocks while no partition has anything new; one that is not asked for is not looked at."""
        deadline = time.monotonic() + limit.wait_s
        starts = {partition: Position.parse(text) for partition, text in after.items()}
        for partition, start in starts.items():
            with blamed_on(partition):
                self._slots[partition].require_unchanged(start)
        while True:
            ends = dict(after)
            for partition, start in starts.items():
                with blamed_on(partition):
                    ends[partition] = self._slots[partition].offer(start, limit) or after[partition]
            remaining = deadline - time.monotonic()
            if ends != after or remaining <= 0:
                return ends
            time.sleep(min([remaining, *(self._slots[partition].pause_s() for partition in starts)]))

    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        return [Slice(partition, start, end)] if start < end else []

    def read(self, piece: Slice) -> Iterator[Rows]:
        return self._slots[piece.partition].read(piece)

    def follow(self, partition: int, position: str, wake: Callable[[], None]) -> Feed:
        with blamed_on(partition):
            return self._slots[partition].follow(position, wake)

    def confirm(self, partition: int, end: str) -> None:
        self._slots[partition].confirm(end)

    def close(self) -> None:
        """Confirm what was held back, and let go of all connections."""
        for slot in self._slots:
            try:
                slot.close()
            except EvermarkError as error:
                # The next start reads a little again, and drops what the log holds.
                import structlog  # here: four processes that only plan load this module at every start

                structlog.get_logger(__name__).warning("postgres_last_confirm_failed", error=str(error))
        close_idle()


def wal_gauges(surveys: Sequence[Survey], warn_bytes: int) -> dict[str, float]:
    """How much WAL the server keeps for these slots."""
    found = [(survey.flush_lsn, survey.slot) for survey in surveys if survey.slot is not None]
    safe = [slot.safe_wal_bytes for _, slot in found if slot.safe_wal_bytes is not None]
    return {
        "wal_retained_bytes": max((flush - (slot.restart_lsn or flush) for flush, slot in found), default=0),
        "unconfirmed_bytes": max((flush - (slot.confirmed_lsn or flush) for flush, slot in found), default=0),
        "wal_retained_limit_bytes": warn_bytes,
        **({"wal_safe_bytes": min(safe)} if safe else {}),
    }


@contextmanager
def blamed_on(partition: int) -> Iterator[None]:
    """One slot's trouble is not the others'."""
    try:
        yield
    except EvermarkError as error:
        error.partition = partition
        raise
