"""What Evermark needs from a place that makes events. No Spark in here, and no I/O.

The contract, which `evermark.testing.SourceContract` checks:

- **Position**: text whose plain string order is the order of events within one partition. Fixed width.
- **Range**: `[start, end)`. An event belongs to the range its own position falls in. An event at exactly `end`
  belongs to the *next* range. `latest` therefore returns a position that no event in front of it has.
- **Repeatable**: the same slice gives the same rows, in the same order, however often and wherever it is read,
  until `confirm` passes it. Spark retries tasks; a crash re-reads everything after the checkpoint.
- **Stateless**: `latest`, `read` and `confirm` run in three different processes. They share nothing but what was
  pickled with the source. Open connections lazily, drop them from the pickled state.
- **Identity**: `event_id` is the same at every reading of the same event.
- **Repeats**: a source that may give an event again at a later position says from where with `may_repeat_from`;
  ids logged from there on are excluded.
- **Concurrency**: one reader per partition. Slices of one partition may be read at the same time unless the source
  returns only one slice.
- **Errors**: raise from `evermark.errors`; the kind decides what happens. Never skip what cannot be read: return it
  as `op = poison` with the raw bytes and the reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import pyarrow as pa


@dataclass(frozen=True)
class Limit:
    """How much one batch may hold. A source may exceed it by one indivisible unit (a transaction)."""

    rows_max: int = 2_000_000
    bytes_max: int = 1024 * 1024 * 1024
    wait_s: float = 5.0  # `latest` may block this long when there is nothing new


@dataclass(frozen=True)
class Slice:
    """A piece of `[start, end)` that one task reads. Picklable, small."""

    partition: int
    start: str
    end: str
    detail: Mapping[str, str] = field(default_factory=dict)


class Source(ABC):
    """A place with a resumable history."""

    @abstractmethod
    def partitions(self) -> Sequence[int]:
        """The ordering domains. Stable across restarts."""

    @abstractmethod
    def earliest(self, partition: int) -> str:
        """Where a pipeline without a checkpoint begins."""

    @abstractmethod
    def latest(self, after: Mapping[int, str], limit: Limit) -> dict[int, str]:
        """For each partition in `after`, how far the next batch may go; equal to `after` when nothing is new.

        Never before `after`. Never beyond what is durable at the source. Blocks up to `limit.wait_s` while there
        is nothing to take in any partition, so that an idle source costs nothing.
        """

    @abstractmethod
    def slices(self, partition: int, start: str, end: str) -> Sequence[Slice]:
        """Cut `[start, end)` into pieces that may be read apart. Their ranges are disjoint and complete."""

    @abstractmethod
    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """The events of one slice in position order, as `evermark.event.TAKEN` batches of bounded size."""

    def may_repeat_from(self, position: str) -> str:
        """From where events may be given again to a reader that resumes at `position`.

        The default is for sources that never repeat: only what stands at `position` or after it.
        """
        return position

    def confirm(self, partition: int, end: str) -> None:  # noqa: B027 - confirming is optional
        """Everything before `end` is logged, durable and checkpointed: the source may forget it."""

    def check(self, resume: Mapping[int, str]) -> None:  # noqa: B027 - checking is optional
        """Raise if this is not the place we left, or cannot give what follows `resume`. Called at every start."""
