"""What follows from the facts seen of an outbox and its server: what is well or not, and what to run about it. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

from evermark.errors import EvermarkError, FormatError
from evermark.observe.finding import Finding, ok, warning, wrong
from evermark.sources.kinds import SourceState
from evermark.sources.postgres.failures import INSTALL_HINT
from evermark.sources.postgres.lsn import Position, lsn_text
from evermark.sources.postgres.outbox import (
    SCHEMA_VERSION,
    SCHEMA_VERSION_READ,
    capture_trigger,
    unwatched_mend,
    unwatched_said,
)
from evermark.sources.postgres.slots import Slot
from evermark.sources.postgres.survey import SAFE_SHARE_MIN, UPGRADE_HINT, VERSION_MIN, WAL_LEVEL_HINT, outdated
from evermark.sources.postgres.target import PostgresTarget

CLOCK_S_MAX = 5.0
SPARE_SENDERS_MIN = 2  # one for the new slot of a repair, one for another program
SPARE_SLOTS_MIN = 1  # likewise
_RECOVER = "`evermark up` repairs it by itself; `evermark source recover` shows the choices and how it goes"
_PLAYBOOK = "docs/playbook.md"
_MAINTAIN = "`evermark up` sees to it every hour; or now: evermark source maintain"


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
    sync_standbys: str  # `synchronous_standby_names`
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
    """A transaction that has written, and holds every slot back. Never with its query: that may hold a secret."""

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
    trigger: str  # what the one for rows is called
    lends: str | None = None  # the role whose rights the owner of the table lacks, and its triggers have
    owner: str = ""


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
    lacks: tuple[str, ...] = ()  # of its tables and functions


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


def judged(facts: Facts, target: PostgresTarget, kept: SourceState | None) -> list[Finding]:
    """Every check, in the order of doubt. `kept` is none when the deployment has no state yet, or it cannot be read."""
    server = facts.server
    if facts.unreachable is not None or server is None:
        error = facts.unreachable
        return [wrong("reachable", error.message if error else "it does not answer", error.hint if error else "")]
    found = judged_server(facts, server)
    if facts.outbox is None:
        found.append(wrong("outbox", f"there is no schema {target.schema}", INSTALL_HINT))
    else:
        found += _outbox(facts.outbox, target, server)
    for slot in facts.slots:
        found += judged_publication(slot, facts.outbox is not None)
        found += judged_slot(slot, target, server, kept, installed=facts.outbox is not None)
    found += judged_rest(facts, server)
    if facts.outbox is not None:
        found += _tables(facts.outbox, target)
        found += _parts(facts.outbox, target)
        found += _days(facts.outbox, target)
        found += _events(facts.outbox)
    found += judged_clock(server)
    grants = f"the grants that `evermark source install --print` ends with, for schema {target.schema}"
    return found + [warning("unseen", text, grants) for text in facts.unseen]


def judged_server(facts: Facts, server: ServerFacts) -> list[Finding]:
    """Whether the server can be read at all."""
    said = f"{server.where}, database {server.database}, as {server.role}"
    return [ok("reachable", said), *_server(server), *_room(facts, server)]


def judged_slot(
    slot: SlotFacts, target: PostgresTarget, server: ServerFacts, kept: SourceState | None, *, installed: bool
) -> Iterator[Finding]:
    yield from _slot(slot, server, kept, installed=installed)
    yield from _spare(slot, kept)
    yield from _wal(slot, target, server)
    yield from _lag(slot, server, kept)


def judged_rest(facts: Facts, server: ServerFacts) -> list[Finding]:
    """What threatens every slot of the server."""
    return [*_limits(server), *_transactions(facts, server)]


def _server(server: ServerFacts) -> Iterator[Finding]:
    major = server.version // 10_000
    if server.version < VERSION_MIN:
        yield wrong("version", f"Postgres {major}", f"upgrade the server: {VERSION_MIN // 10_000} is the least")
    else:
        yield ok("version", f"Postgres {major}.{server.version % 10_000}")
    if server.standby:
        yield wrong(
            "primary", "this is a standby", "point the dsn at the primary, or name both with target_session_attrs"
        )
    if server.wal_level == "logical":
        yield ok("wal_level", "logical")
    else:
        yield wrong("wal_level", server.wal_level, WAL_LEVEL_HINT)
    if server.may_use_slots:
        yield ok("replication", f"role {server.role} may read replication slots")
    else:
        found = f"role {server.role} may not read replication slots"
        yield wrong("replication", found, f'as a superuser: alter role "{server.role}" replication;')
    if not server.may_log_snapshot:
        yield warning(
            "idle_wal",
            f"role {server.role} may not write a snapshot into the WAL: an idle slot lets go of old WAL later",
            f'as a superuser: grant execute on function pg_catalog.pg_log_standby_snapshot() to "{server.role}";',
        )


def _room(facts: Facts, server: ServerFacts) -> Iterator[Finding]:
    used = f"{server.senders_used} of {server.senders_max} in use"
    raise_senders = f"alter system set max_wal_senders = {server.senders_max + 10}; then restart the server"
    if facts.walsender is not None:
        hint = facts.walsender.hint if server.senders_used < server.senders_max else raise_senders
        yield wrong("wal_senders", f"no replication connection can be made: {facts.walsender.message}", hint)
    elif server.senders_max - server.senders_used < SPARE_SENDERS_MIN:
        yield warning("wal_senders", used, raise_senders)
    else:
        yield ok("wal_senders", used)
    if "*" in server.sync_standbys or "evermark" in server.sync_standbys:
        # Our connections are standbys to the server, and confirm once a second.
        yield warning(
            "synchronous_standbys",
            f"synchronous_standby_names is {server.sync_standbys!r}: commits may wait until Evermark has taken them",
            "name the standbys alone: alter system set synchronous_standby_names = '…'; select pg_reload_conf();",
        )
    used = f"{server.slots_used} of {server.slots_max} in use"
    missing = sum(slot.slot is None for slot in facts.slots)
    if server.slots_max - server.slots_used < missing + SPARE_SLOTS_MIN:
        mend = f"alter system set max_replication_slots = {server.slots_max + 10}; then restart the server"
        grade = wrong if server.slots_max - server.slots_used < missing else warning
        yield grade("replication_slots", f"{used}: a lost slot could not be replaced", mend)
    else:
        yield ok("replication_slots", used)


def _outbox(outbox: OutboxFacts, target: PostgresTarget, server: ServerFacts) -> Iterator[Finding]:
    if outbox.missing_rights:
        more = f" and {len(outbox.missing_rights) - 1} more" if len(outbox.missing_rights) > 1 else ""
        missing = f"role {server.role} lacks a right{more}"
        yield wrong("rights", missing, "as the owner of the outbox: " + " ".join(outbox.missing_rights))
    else:
        yield ok("rights", f"role {server.role} has the rights it needs in schema {target.schema}")
    if outbox.lacks:
        yield wrong("outbox", f"schema {target.schema} is there, and lacks {', '.join(outbox.lacks)}", INSTALL_HINT)
    elif outbox.version is None:
        yield wrong("outbox", f"schema {target.schema} is there, its version cannot be read", INSTALL_HINT)
    elif outbox.version < SCHEMA_VERSION_READ:
        yield wrong("outbox", f"version {outbox.version}, this program needs {SCHEMA_VERSION}", INSTALL_HINT)
    elif outbox.version < SCHEMA_VERSION:
        yield warning("outbox", outdated(outbox.version)["outbox_version"].said, UPGRADE_HINT)
    elif outbox.version > SCHEMA_VERSION:
        yield wrong("outbox", f"version {outbox.version} is newer than this program", "upgrade Evermark")
    else:
        yield ok("outbox", f"schema {target.schema}, version {outbox.version}")


def judged_publication(slot: SlotFacts, installed: bool) -> Iterator[Finding]:
    name = slot.publication
    if not slot.published:
        mend = f"{INSTALL_HINT}; what was written meanwhile: {_RECOVER}" if slot.slot is not None else INSTALL_HINT
        yield wrong("publication", f"there is no publication {name}", mend)
    elif not installed or slot.registered is None:
        return  # said elsewhere: nothing is installed, or we may not look
    elif not slot.registered:
        yield wrong("publication", f"slot {slot.name} is not registered as a reader", INSTALL_HINT)
    elif slot.fingerprint_now != slot.fingerprint_installed:
        yield wrong("publication", f"{name} was changed by somebody: events may be missing", _RECOVER)
    else:
        yield ok("publication", f"{name} is as it was installed")


def _slot(facts: SlotFacts, server: ServerFacts, kept: SourceState | None, *, installed: bool) -> Iterator[Finding]:
    slot, name = facts.slot, facts.name
    known = kept is not None and facts.partition in kept.checkpoints
    if slot is None:
        gone = f"slot {name} is gone" if known else f"there is no slot {name}"
        # Without an outbox nothing can be repaired; `source install` says how reading goes on where it was left.
        yield wrong("slot", gone, _RECOVER if known and installed else INSTALL_HINT)
        return
    if slot.database != server.database or slot.plugin != "pgoutput":
        found = f"slot {name} belongs to database {slot.database} and plugin {slot.plugin}"
        yield wrong("slot", found, "choose another `name` for this deployment: it names slot and publication")
        return
    if slot.wal_status == "lost" or slot.invalidation_reason or slot.confirmed_lsn is None:
        reason = slot.invalidation_reason or slot.wal_status or "it has no position"
        yield wrong("slot", f"slot {name} was lost ({reason})", _RECOVER)
        return
    if slot.active and facts.active_pid is not None and kept is not None and kept.owner is None:
        mend = f"select pg_terminate_backend({facts.active_pid}); it is no instance of this deployment"
        yield warning("slot", f"slot {name} is held by process {facts.active_pid} of another program", mend)
    elif slot.wal_status == "unreserved":
        yield warning("slot", f"slot {name} is about to be lost", f"{_PLAYBOOK}, `The disk fills with WAL`")
    else:
        confirmed = lsn_text(slot.confirmed_lsn)
        yield ok("slot", f"{name}, {slot.wal_status}, confirmed to {confirmed}{', active' if slot.active else ''}")
    if facts.failover is False:
        alter = f"""psql "$DSN replication=database" -c 'ALTER_REPLICATION_SLOT "{name}" (FAILOVER true)'"""
        yield warning("failover", f"slot {name} is not kept by standbys: a promotion loses it", alter)


def _spare(facts: SlotFacts, kept: SourceState | None) -> Iterator[Finding]:
    if not facts.spare:
        return
    if kept is not None and facts.partition in kept.recovering:
        yield ok("spare_slot", f"{facts.spare_name} is there while a recovery is under way")
        return
    doubt = "" if kept is not None else "if no recovery is under way: "
    drop = f"{doubt}select pg_drop_replication_slot('{facts.spare_name}');"
    yield warning("spare_slot", f"{facts.spare_name} is left over, and keeps WAL", drop)


def _wal(facts: SlotFacts, target: PostgresTarget, server: ServerFacts) -> Iterator[Finding]:
    if facts.slot is None or facts.slot.restart_lsn is None:
        return
    retained = max(0, server.flush_lsn - facts.slot.restart_lsn)
    said = f"{size(retained)} kept for slot {facts.name}"
    safe = facts.slot.safe_wal_bytes
    mend = f"{_PLAYBOOK}, `The disk fills with WAL`: is `evermark up` running, is a transaction open?"
    if safe is not None and safe < SAFE_SHARE_MIN * (safe + retained):
        yield warning("wal_retained", f"{said}, {size(max(0, safe))} more and it may be lost", mend)
    elif retained > target.wal_retained_warn_bytes:
        yield warning("wal_retained", f"{said}, more than `wal_retained_warn`", mend)
    else:
        yield ok("wal_retained", said)


def _lag(facts: SlotFacts, server: ServerFacts, kept: SourceState | None) -> Iterator[Finding]:
    text = kept.checkpoints.get(facts.partition) if kept is not None else None
    if text is None:
        return
    try:
        behind = server.flush_lsn - Position.parse(text).lsn
    except FormatError as error:
        yield wrong("checkpoint", error.message, error.hint)
        return
    if behind >= 0:  # if not, this is another server, and that is said where it is judged
        yield ok("checkpoint", f"partition {facts.partition} is {size(behind)} of WAL behind the server")


def _limits(server: ServerFacts) -> Iterator[Finding]:
    if server.slot_wal_keep_bytes is None:
        yield warning(
            "wal_limit",
            "max_slot_wal_keep_size is -1: a slot that nobody reads fills the disk",
            "alter system set max_slot_wal_keep_size = '50GB'; select pg_reload_conf(); -- what the disk can spare",
        )
    else:
        yield ok("wal_limit", f"max_slot_wal_keep_size is {size(server.slot_wal_keep_bytes)}")
    if 0 < server.slot_idle_s < 86_400:
        yield warning(
            "idle_limit",
            f"idle_replication_slot_timeout throws a slot away that was not read for {server.slot_idle_s} s",
            "alter system set idle_replication_slot_timeout = '7d'; select pg_reload_conf();",
        )


def _transactions(facts: Facts, server: ServerFacts) -> Iterator[Finding]:
    for each in facts.transactions:
        found = f"open for {each.age_s / 60:.0f} min, holds every slot back: {each.who}"
        yield warning("transactions", found, f"end it where it was begun, or: {each.end}")
    if not server.sees_others:
        grant = f'as a superuser: grant pg_read_all_stats to "{server.role}";'
        yield warning("transactions", "transactions of other roles cannot be seen", grant)
    elif not facts.transactions:
        yield ok("transactions", "none that writes is open for long")


def _tables(outbox: OutboxFacts, target: PostgresTarget) -> Iterator[Finding]:
    captured = outbox.captured
    if captured is None:
        return
    ill = False
    known = {table.name: table for table in captured}
    for name in sorted(table.name for table in target.tables if table.stream not in known):
        ill = True
        yield wrong("tables", f"{name} stands in the file and is not captured", INSTALL_HINT)
    for table in captured:
        for trigger, state in ((f'"{table.trigger}"', table.rows), (f"{target.schema}_truncate", table.truncate)):
            if state == "A":
                continue
            ill = True
            enable = f"alter table {table.quoted} enable always trigger {trigger};"
            if state == "O":
                found = f"{table.name}: what replication writes is not captured (trigger {trigger})"
                yield warning("triggers", found, enable)
            elif state:
                yield wrong("triggers", f"{table.name}: trigger {trigger} is switched off", enable)
            else:
                yield wrong("triggers", f"{table.name}: trigger {trigger} is missing", INSTALL_HINT)
        if table.trigger != capture_trigger(target) and (outbox.version or 0) >= SCHEMA_VERSION:
            ill = True
            yield warning("triggers", f"{table.name}: its triggers are of an earlier version", f"{INSTALL_HINT} again")
        if table.lends is not None:
            yield warning(
                "capture_rights",
                f"{table.name}: its owner {table.owner} can run code as {table.lends}, who installed the outbox: a cast"
                " of the owner's own type to json runs in its triggers",
                "if the owner is not to have such rights: install as the tables' owner (docs/limits.md)",
            )
        if table.stale:
            ill = True
            yield warning("tables", f"{table.name}: its columns changed since install", f"{INSTALL_HINT} again")
    if not ill:
        yield ok("tables", f"{len(captured)} captured" + (f": {', '.join(sorted(known)[:10])}" if known else ""))


def _parts(outbox: OutboxFacts, target: PostgresTarget) -> Iterator[Finding]:
    if outbox.unwatched:
        mend = unwatched_mend(target) if (outbox.version or 0) >= SCHEMA_VERSION else UPGRADE_HINT
        yield warning("partitioned_tables", unwatched_said(outbox.unwatched), mend)


def _days(outbox: OutboxFacts, target: PostgresTarget) -> Iterator[Finding]:
    days = outbox.partitions
    if days is None:
        yield wrong("partitions", f"{target.schema}.events has none", INSTALL_HINT)
        return
    if not days.today or not days.ahead:
        missing = "tomorrow" if days.today else "today"
        yield warning("partitions", f"there is none for {missing}: events go to the default one", _MAINTAIN)
    else:
        yield ok("partitions", f"{days.ahead} days ahead, {size(days.bytes)} in all")
    if days.default_rows:
        more = "more than " if days.default_rows > 1000 else ""
        yield warning(
            "default_partition",
            f"{more}{min(days.default_rows, 1000)} rows have no partition of their own: retention leaves them alone",
            f"once they are past the retention: delete from only {target.schema}.events_default where created_at <"
            f" now() - interval '{target.events_retention_s / 86_400:g} days';",
        )
    if days.past and days.past_days > 1:
        found = f"{days.past} partitions are past the retention, the oldest by {days.past_days} days"
        yield warning("retention", f"{found}: they wait for a reader to confirm them", _MAINTAIN)


def _events(outbox: OutboxFacts) -> Iterator[Finding]:
    events = outbox.events
    if events is not None and events.oldest is None:
        yield ok("events", "none yet")
    elif events is not None:
        about = "" if events.exact else "about "
        yield ok("events", f"{about}{events.count}, the oldest {events.oldest}, the newest {events.newest}")


def judged_clock(server: ServerFacts) -> Iterator[Finding]:
    ahead = server.clock_ahead_s
    if abs(ahead) > CLOCK_S_MAX:
        way = "ahead of" if ahead > 0 else "behind"
        yield warning(
            "clock", f"the server's clock is {abs(ahead):.1f} s {way} ours", "synchronise both clocks (NTP, chrony)"
        )
    else:
        yield ok("clock", f"{ahead:+.3f} s against ours")


def size(count: float) -> str:
    """Bytes as people say them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(count) < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
