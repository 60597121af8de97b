"""The port of the databases that hold replicated tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import pyarrow as pa

from evermark.replicas.digests import RowDigest, Span
from evermark.replicas.event import Event
from evermark.replicas.members import Member, Said
from evermark.replicas.paging import Stretch
from evermark.replicas.ranges import Held, Ranges
from evermark.replicas.values import Table


@dataclass(frozen=True)
class Quarantined:
    table: str
    origin: str
    seq: int
    reason: str


@dataclass(frozen=True)
class Ingested:
    """What became of a page: `taken` are new here, of which `applied` changed a row; `duplicates` were held before."""

    taken: int = 0
    applied: int = 0
    duplicates: int = 0
    quarantined: tuple[Quarantined, ...] = ()

    def __add__(self, other: Ingested) -> Ingested:
        return Ingested(
            self.taken + other.taken,
            self.applied + other.applied,
            self.duplicates + other.duplicates,
            self.quarantined + other.quarantined,
        )


@dataclass(frozen=True)
class Cut:
    """One moment of a table: what its rows are made of."""

    held: Held
    clock: int


@dataclass(frozen=True)
class Collected:
    events: int = 0
    tombstones: int = 0
    floors: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Counts:
    rows: int
    events: int
    tombstones: int


class ReplicaStore(Protocol):
    """A database with replicated tables, and what is known of their events. Not thread-safe: a thread has its own.

    Capture is the database's own work: triggers write an event in the transaction of the change, by any program. The
    numbers of this node's events are dense per table, and visible in their order: an event is never seen before one
    with a lower number. Every method is one transaction, whole or not at all, and durable when it returns.
    """

    def tables(self) -> Mapping[str, Table]:
        """The replicated tables by name."""
        ...

    def install(self, table: str, columns: Sequence[str] | None, now_ms: int) -> Table:
        """Begin to replicate a table that exists: rows that are there get versions of this node's, and events that an
        older program left get numbers. Doing it again changes nothing, but for columns that were given."""
        ...

    def renew_capture(self, table: str) -> bool:
        """Make the triggers of a table anew, and indexes that it lacks, if another version of this program made them;
        returns whether it did. When it fails the old triggers go on capturing."""
        ...

    def left_out(self, table: str) -> list[str]:
        """Columns of a replicated table that are not."""
        ...

    def identity(self) -> tuple[str, str]:
        """This node's origin, and the token that was left at the last start."""
        ...

    def set_token(self, token: str) -> None:
        """Leave a token, and note the last number of each table with it."""
        ...

    def token_kept(self) -> None:
        """The node's folder knows the token that was left, and no other."""
        ...

    def is_noted(self) -> bool:
        """Whether nothing was captured or taken since the token was left that the folder knows."""
        ...

    def noted(self, table: str) -> int:
        """The last number that was noted with the present token; 0 before the token is kept."""
        ...

    def renew(self, origin: str, *, is_noted: bool = True) -> None:
        """Go on under another origin, in a database that was restored. Events of the former origin stay, and are
        another node's from now on, up to the number that was noted with the last token. Events after that number may
        have been made since, under numbers that others know with another content: they become the new origin's.
        Not `is_noted`: the note may be of after the restore, so all that was not collected becomes the new origin's."""
        ...

    def evict_self(self, origin: str) -> None:
        """Go on under another origin because others have given this one up: what they have not seen of it becomes new
        events when the next snapshot of its table is merged."""
        ...

    def given_up(self) -> frozenset[str]:
        """Tables of which a snapshot must be merged before anybody is given anything of them (`evict_self`)."""
        ...

    def said(self) -> Said:
        """What this node says of itself, all of one moment; each time with a higher tick."""
        ...

    def held(self, table: str) -> dict[str, Ranges]:
        """The events of the table that this node holds, by origin; collected events count as held."""
        ...

    def head(self) -> int:
        """A number that grows with every event this node captures or takes. It is asked often, and is cheap."""
        ...

    def clocks(self) -> dict[str, int]:
        """The highest reading that was given or taken, by table."""
        ...

    def floors(self, table: str) -> dict[str, int]:
        """Up to where events were collected, by origin."""
        ...

    def joined(self) -> bool: ...

    def join(self, clocks: Mapping[str, int]) -> None:
        """Meet others for the first time: what was captured before gets versions above `clocks`."""
        ...

    def raise_clocks(self, clocks: Mapping[str, int]) -> None:
        """Changes that are captured from now on get readings above these."""
        ...

    def read(self, table: str, stretches: Sequence[Stretch]) -> list[Event]:
        """The events of these stretches, in order. An event that is not there is left out."""
        ...

    def mend(self, table: str, stretch: Stretch) -> None:
        """Events of this node's own whose image no peer would take, because a value does not fit its column's kind, and
        whose row has a newer version: nobody can have them, so they get the image that the row has now."""
        ...

    def read_since(self, table: str, timestamp: int, event_id: str, limit: int) -> list[Event]:
        """Events after (timestamp, id), in that order: for peers that know nothing of origins."""
        ...

    def ingest(self, table: str, events: Sequence[Event], now_ms: int, skew_ms: int) -> Ingested:
        """Take the events of peers that are not held yet, whole or not at all. What is held is skipped; another
        content under a number that is held is a `ConflictError`. What comes from too far in the future is left out,
        and noted as quarantined. `BusyError`: users' transactions were in the way; they are never made to fail.
        """
        ...

    def quarantined(self) -> list[Quarantined]: ...

    def members(self) -> dict[str, Member]: ...

    def save_members(self, members: Mapping[str, Member], evicted: frozenset[str]) -> None: ...

    def forget_member(self, name: str) -> None: ...

    def evicted(self) -> frozenset[str]: ...

    def lost(self, table: str) -> Held:
        """Numbers that were given up, because nobody holds them."""
        ...

    def give_up(self, table: str, origin: str, numbers: Ranges) -> None: ...

    def collect(self, table: str, floors: Mapping[str, int], clock: int, before_ms: int, batch: int) -> Collected:
        """Delete events up to the floors, the oldest first, that are older than `before_ms`; and tombstones of deleted
        events, up to the clock. In batches, each a transaction of its own."""
        ...

    def count_as_collected(self, table: str) -> Collected:
        """Events that are held but not there, because somebody deleted them by hand, count as collected from now on,
        and so do all before them: a member that lacks one of them takes a snapshot."""
        ...

    def counts(self, table: str) -> Counts: ...

    def snapshot(self, table: str, rows_max: int) -> AbstractContextManager[tuple[Cut, Iterator[pa.Table]]]:
        """All rows and tombstones as of one moment (`columns`), in pieces of at most `rows_max`, in no order."""
        ...

    def merge(self, table: str, cut: Cut, rows: Callable[[], Iterator[pa.Table]], now_ms: int) -> int:
        """Take a peer's snapshot in one transaction; how many rows changed. Its rows may be asked for more than once.

        A row takes the snapshot's version when that beats its own. A row that the snapshot has not got, and whose
        version its maker had seen, was deleted there; and one whose version we had seen, and of which we have nothing
        any more, was deleted here. All else stays; but versions of an origin that was given up (`evict_self`), and that
        the snapshot's maker has not seen, become new events of the present one.
        """
        ...

    def is_empty(self, table: str) -> bool:
        """Whether it has no rows, and never had any of which something is known; nor is any event held."""
        ...

    def native_form(self, table: str) -> str | None:
        """What another node's table must have been made like for `dump` and `take_dump` (`native`); None: these cannot
        be used."""
        ...

    def dump(
        self, table: str, folder: Path, made: Callable[[Path], None] = lambda _: None
    ) -> tuple[Cut, Sequence[Path]]:
        """All rows and versions of one moment as files in the folder. `NotNative`. `made` is told of each as soon as it
        is there, from threads that work side by side."""
        ...

    def take_dump(self, table: str, cut: Cut, files: Sequence[Path], now_ms: int) -> int:
        """As `merge`, into a table that is empty. `NotNative` if it is not, or the files are not what they should be;
        then nothing has changed."""
        ...

    def row_digests(self, table: str, spans: Sequence[Span]) -> Iterator[Iterator[RowDigest]]:
        """The rows of each span by record id, with the digests of what the table really holds."""
        ...

    def cuts(self, table: str, span: Span, pieces: int) -> list[str]: ...

    def uncaptured(self, table: str, limit: int) -> list[str]:
        """Rows that have no version, or the other way round: somebody switched the capture off."""
        ...

    def close(self) -> None: ...
