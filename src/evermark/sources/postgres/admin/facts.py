"""What can be seen of an outbox and its server at one moment. Values only: `examine` fills them, `doctor` judges."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

from evermark.errors import EvermarkError
from evermark.sources.postgres.slots import Slot


@dataclass(frozen=True)
class ServerFacts:
    version: int
    wal_level: str
    standby: bool
    database: str
    role: str
    senders_max: int
    senders_used: int
    slots_max: int
    slots_used: int
    slot_wal_keep_bytes: int | None  # none: without a limit
    slot_idle_s: int  # after which the server throws an unused slot away; 0: never
    flush_lsn: int
    sees_others: bool  # may look at sessions of other roles
    may_log_snapshot: bool
    _: KW_ONLY
    where: str
    may_use_slots: bool
    clock_ahead_s: float  # of ours


@dataclass(frozen=True)
class SlotFacts:
    """One slot of the place, its publication, and the slot that exists only while a repair is under way."""

    partition: int
    name: str
    slot: Slot | None
    active_pid: int | None
    failover: bool | None  # none: the server has no such slots
    spare_name: str
    spare: bool
    publication: str
    published: bool
    registered: bool | None = None  # none: could not be looked at
    fingerprint_installed: str | None = None
    fingerprint_now: str | None = None


@dataclass(frozen=True)
class OpenTransaction:
    """One that has written, and holds every slot back. Never with its query: that may hold a secret."""

    age_s: float
    who: str
    end: str  # what ends it


@dataclass(frozen=True)
class CapturedFacts:
    """A captured table. States as in pg_trigger.tgenabled: A always, O not for replicated rows, D off; empty: none."""

    name: str
    quoted: str
    rows: str
    truncate: str
    stale: bool


@dataclass(frozen=True)
class PartitionFacts:
    ahead: int  # days after today that have one
    today: bool
    past: int  # older than the retention, and still there
    past_days: int  # by how much the oldest is older than that
    default_rows: int | None  # none: we may not look
    bytes: int


@dataclass(frozen=True)
class EventFacts:
    """Times as the server writes them: they may be infinite."""

    oldest: str | None
    newest: str | None
    count: int
    exact: bool


@dataclass(frozen=True)
class OutboxFacts:
    version: int | None
    missing_rights: tuple[str, ...]  # the statements that grant them
    captured: tuple[CapturedFacts, ...] | None
    partitions: PartitionFacts | None
    events: EventFacts | None
    unwatched: tuple[str, ...] = ()  # partitions of captured tables without a trigger for truncate


@dataclass(frozen=True)
class Facts:
    """`server` is none when it did not answer; `outbox` when its schema is not there."""

    unreachable: EvermarkError | None = None
    server: ServerFacts | None = None
    walsender: EvermarkError | None = None  # why there can be none
    slots: tuple[SlotFacts, ...] = ()
    transactions: tuple[OpenTransaction, ...] = ()
    outbox: OutboxFacts | None = None
    unseen: tuple[str, ...] = ()  # what could not be looked at, and why
