"""What Evermark needs from a place that makes events. No Spark in here, and no I/O.

The contract, which `evermark.testing.SourceContract` checks:

- **Position**: text whose plain string order is the order of events within one partition. Fixed width.
- **Range**: `[start, end)`. An event belongs to the range its own position falls in. An event at exactly `end`
  belongs to the *next* range. `latest` returns a position greater than that of every event it offers.
- **Repeatable**: the same slice gives the same rows, in the same order, however often and wherever it is read,
  until `confirm` passes it. Spark retries tasks; a crash re-reads everything after the checkpoint.
- **Stateless**: `latest`, `read` and `confirm` run in three different processes. They share nothing but what was
  pickled with the source. Open connections lazily, drop them from the pickled state.
- **Looking is not owning**: `check`, `condition`, `untaken` and `partitions` may be called by anybody at any time, and
  change nothing. `owned`, `begin`, `confirm`, `repair` and `upkeep` are the owner's.
- **Identity**: `event_id` is the same at every reading of the same event.
- **Repeats**: a source that may give an event again at a later position says from where with `may_repeat_from`;
  ids logged from there on are excluded.
- **Concurrency**: one reader per partition. Slices of one partition may be read at the same time unless the source
  returns only one slice.
- **Errors**: raise from `evermark.errors`; the kind decides what happens. Never skip unreadable data: return it
  as `op = poison` with the raw bytes and the reason.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Protocol

import pyarrow as pa

from evermark.event import Seen
from evermark.event_file import Rows
from evermark.sources.copies import Copying


@dataclass(frozen=True)
class Limit:
    """How much one batch may hold. A source may exceed it by one indivisible unit (a transaction)."""

    rows_max: int = 2_000_000
    bytes_max: int = 1024 * 1024 * 1024
    wait_s: float = 5.0  # `latest` may block this long when there is nothing new


@dataclass(frozen=True)
class Warned:
    """A condition that becomes an error unless a person acts."""

    said: str
    hint: str


@dataclass(frozen=True)
class StaleStream:
    """A part of a partition that cannot be read on just now, while the rest of it can."""

    stream: str
    reason: str


@dataclass(frozen=True)
class StaleStreams:
    count: int
    first: Sequence[StaleStream]


@dataclass(frozen=True)
class Condition:
    """How a source is. The source alone defines the names and limits."""

    gauges: Mapping[str, float] = field(default_factory=dict)  # for a metric, by name
    warnings: Mapping[str, Warned] = field(default_factory=dict)  # by the gauge that says so; absent: all is well
    stale: Mapping[int, StaleStreams] = field(default_factory=dict)  # by partition; absent: none is
    upkeep_due: bool = False  # `upkeep` should run before its hour
    # By stream, how often it was tried and why it fails: copies that `copying` does not make.
    failing_copies: Mapping[str, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class Untaken:
    """Events of a partition that the log does not have."""

    upto: str  # the partition's events go on at least to this position
    oldest_s: float | None = None  # for how long the oldest of them has been there; None: the source cannot say


@dataclass(frozen=True)
class Slice:
    """A piece of `[start, end)` that one task reads. Picklable, small."""

    partition: int
    start: str
    end: str
    detail: Mapping[str, str] = field(default_factory=dict)


class Gap(Protocol):
    """The events between the log and the position where reading can go on. Picklable: tasks read it by pieces.

    Every event that the log may lack is in a piece; most events in the pieces are logged already, and are dropped.
    A place that has only its records, and not their events, gives all records of the partition instead (`is_state`).
    """

    pieces: Sequence[Slice]
    since: datetime | None = None  # no event in a piece has an earlier event_time
    # Pieces hold records as they are now, as `op = read`: they are compared with the records that the log implies, and
    # each difference becomes an insert, update or delete, flagged `repaired`.
    is_state: bool = False
    # Of such a gap: truncates that happened in it and could be read all the same, as `evermark.event.TAKEN`, in their
    # order. They are logged where they stand, in front of the differences.
    truncates: pa.Table | None = None
    # Of such a gap: streams whose records are told though they are as the log implies them, since another partition is
    # yet to tell a truncate from before these records, which would end what was told of them earlier.
    told_anew: Sequence[str] = ()

    @property
    def position(self) -> str:
        """Where reading goes on once the gap is closed; no event at or after it is in a piece."""

    def covers(self, stream: str) -> bool:
        """Whether the pieces would have the stream's records if there were any. Of a stream that is not read any more
        they have none, which says nothing about its records."""
        return True

    def read(self, piece: Slice) -> Iterator[pa.RecordBatch]:
        """Events as `evermark.event.TAKEN`; their positions say only in which order they happened."""

    def positions(self, first: int, count: int) -> pa.Array:
        """Positions in the log for events number `first` and following: after all it holds, before `position`."""


@dataclass(frozen=True)
class Whereabouts:
    """Where the partitions of a source stand while one of them is repaired. What concerns records of all partitions,
    and stands in one of them, is told by that one alone."""

    at: Mapping[int, str]  # the log has all that is before these positions; a partition that never began is left out
    repaired: Sequence[str] = ()  # where others went on that were repaired since the gap of this partition began


class Repair(Protocol):
    """One try at closing a gap in one partition. Every step may be repeated after a crash, from the first one on."""

    def begin(
        self,
        stopped: Callable[[], bool],
        left_at: str | None = None,
        whereabouts: Callable[[], Whereabouts] | None = None,
    ) -> Gap:
        """Make sure that nothing more is lost from here on, then return the gap to look through.

        Leftovers of earlier tries are replaced. `stopped` is asked now and then while this has to wait. With
        `left_at` no person has confirmed this place: raises `IdentityError` if it is not the place we left.
        `whereabouts` asks State; None: there are no other partitions to be thought of.
        """

    def finish(self, position: str) -> None:
        """The gap is closed and checkpointed: let reading go on at `position`. Raises `GapError` if it cannot."""

    def abandon(self) -> None:
        """The repair is given up: what it made is removed."""

    def close(self) -> None:
        """Release the resources of `begin`; the pieces cannot be read any more."""


class Fed(Protocol):
    """Events that a source has sent."""

    def batches(self) -> Iterator[Rows]:
        """As `Source.read` gives them; may wait for more of a transaction that has not been sent whole."""

    def end(self) -> str:
        """Where they end; to be asked when all batches have been read."""


class Feed(Protocol):
    """A partition's events as the source sends them, without being asked. Used by one thread."""

    def next(self) -> Fed | None:
        """Events to take next; None while there are none. Never waits for the first of them. All batches of what this
        returned are read before it is called again. Raises when the source sends no more: then it is asked, as ever.
        """

    def confirm(self, end: str) -> None:
        """As `Source.confirm`, which is not called while this is open."""

    def close(self) -> None: ...


class Forks(Protocol):
    """Streams whose history the place may rewrite: such a stream is stale until a person accepts what is there now."""

    def stale_reason(self, stream: str) -> str:
        """Why the stream cannot be read on. Raises where nothing is wrong with it, or a person cannot help."""

    def accept_fork(self, stream: str) -> None:
        """Accept the stream as the place has it now: it is taken anew, from its first event on."""


class Source(ABC):
    """A place with a resumable history."""

    @abstractmethod
    def partitions(self) -> Sequence[int]:
        """The ordering domains. Stable across restarts."""

    @abstractmethod
    def earliest(self, partition: int) -> str:
        """Where a partition begins that was never begun: at the oldest event there is to take. What it says is kept: it
        may say something later at another time, and its owner does not ask again.
        """

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
    def read(self, piece: Slice) -> Iterator[Rows]:
        """The events of one slice in position order, as `evermark.event.TAKEN` batches of bounded size; or, where they
        stand in a file that is one of the log but for a few blanks, as that (`evermark.event_file.as_batches`)."""

    def divisible(self) -> bool:
        """Whether several instances may read this source at once, each some of its partitions: whatever is called for a
        partition leaves the others alone. Never changes. What is called for no partition, as `upkeep`, is called where
        the first one is read.
        """
        return False

    def may_repeat_from(self, partition: int, position: str) -> str:
        """From where events may be given again to a reader of `partition` that resumes at `position`.

        The default is for sources that never repeat: only what stands at `position` or after it.
        """
        return position

    def follow(self, partition: int, position: str, wake: Callable[[], None]) -> Feed | None:
        """Have the events of a partition sent from `position` on; `wake` is called, by any thread, when there may be
        something to take. None where a source can only be asked. While a feed is open `latest`, `read` and `confirm`
        are not called for its partition.
        """
        return None

    def confirm(self, partition: int, end: str) -> None:  # noqa: B027 - confirming is optional
        """Everything before `end` is logged, durable and checkpointed: the source may forget it."""

    def owned(self, epoch: int) -> None:  # noqa: B027 - not every source writes something down
        """Called by a new owner, before anything else: epochs grow from owner to owner. A source that keeps its plans
        refuses with `StaleError` what an owner of an earlier epoch, who does not know of it yet, would change."""

    def begin(self, partition: int, position: str) -> None:  # noqa: B027 - not every source has something to take up
        """Reading goes on at `position`: all before it is logged, and nothing at or after it is.

        Called by the owner, after `check` and before `latest` is asked, at every start. What was offered from there on
        and not taken will not be taken any more: a source that plans may plan anew. It may be called again.
        """

    def check(self, resume: Mapping[int, str], newest: Mapping[int, Seen] | None = None) -> None:  # noqa: B027
        """Raise if this is not the place we left, or cannot give events from `resume` on. Called at every start, when
        a feed broke or the times of events jump (`require_whole`), and by people who only look: it changes nothing.

        `newest` is the last event the log holds of a partition: a copy of the place that has diverged since
        may differ only in lacking this event.
        """

    def require_whole(self, partition: int, start: str, end: str, newest: Mapping[int, Seen]) -> None:
        """`[start, end)` was read, and the times of its events jump. Raise as `check` does if something may be missing
        there; it is called before the batch is taken."""
        self.check({partition: start}, newest)

    def replayed(self, stream: str, since: str, until: str | None) -> None:  # noqa: B027 - not every source is asked
        """The replay that a control event of this stream asked for is over: the source need not show it any more.

        `since` and `until` are as the event wrote them. Called again until it returns; a newer request stays.
        """

    def repair(self, partition: int) -> Repair | None:
        """How a `GapError` of this partition can be repaired; None when only a person can."""
        return None

    def copying(self) -> Copying | None:
        """How the rows that its streams had before are copied beside them; None where that cannot be done. Asked for
        once by each owner, before reading begins."""
        return None

    def forks(self) -> Forks | None:
        """How a person accepts a rewritten history of a stream; None when no stream of this source can have one."""
        return None

    def condition(self) -> Condition:
        """The source's condition; asked every few seconds by its owner."""
        return Condition()

    def untaken(self, after: Mapping[int, str]) -> Mapping[int, Untaken]:
        """The partitions that have events at their position or after it; all others are left out.

        `after` is where the log ends. Asked every few seconds, and for every `/health`, by every instance, while the
        owner reads in other processes: it must be cheap, and answer or raise within seconds. The default asks `latest`;
        override it where that is expensive or writes something down.
        """
        ends = self.latest(after, Limit(wait_s=0.0)) if after else {}
        return {partition: Untaken(end) for partition, end in ends.items() if end != after[partition]}

    def upkeep(self) -> None:  # noqa: B027 - not every place has something to be kept tidy
        """Housekeeping at the place: called at every start and once an hour, whether events come or not; and within a
        minute when `condition` asks for it."""
