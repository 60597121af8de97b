"""One look at the server, and what follows from it. Looking is one query; judging is pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import datetime

from evermark.errors import DeniedError, EvermarkError, FormatError, GapError, IdentityError, SetupError
from evermark.sources.base import Warned
from evermark.sources.postgres.connect import Link
from evermark.sources.postgres.failures import GRANT_HINT, INSTALL_HINT, RECOVER_HINT, where
from evermark.sources.postgres.lsn import Incarnation, Position, lsn_text
from evermark.sources.postgres.outbox import SCHEMA_VERSION, SCHEMA_VERSION_READ, filled, lacking, schema_there
from evermark.sources.postgres.slots import SLOT_COLUMNS, Slot
from evermark.sources.postgres.target import PostgresTarget

VERSION_MIN = 140000
WAL_LEVEL_HINT = "alter system set wal_level = 'logical'; then restart the server"
SAFE_SHARE_MIN = 0.2  # of the WAL that the server may keep for a slot
_GIB = 1024**3
_WAL_HINT = "docs/playbook.md, `The disk fills with WAL`; see `evermark doctor`"
UPGRADE_HINT = "run `evermark source install` again: it upgrades in place, while everything runs"
_NAMED_MAX = 3
DROPPED_HINT = (
    "take it out of the file, and start `evermark up` again with that file: it makes the publication anew by itself,"
    " and compares the other tables with the log"
)
_IDENTITY_HINT = (
    "if it was restored or promoted on purpose choose with `evermark source recover`: repair from its tables,"
    " or go on from now and accept the gap; if not, point the dsn at the server this checkpoint came from"
)


@dataclass(frozen=True)
class Survey:
    """What the server is like at one moment. `slot` is none when there is no such slot."""

    version: int
    wal_level: str
    standby: bool
    flush_lsn: int
    database: str
    fingerprint_installed: str | None
    fingerprint_now: str | None
    schema_version: int | None
    role: str
    _: KW_ONLY
    where: str
    slot: Slot | None
    incarnation: Incarnation
    may_use_slots: bool = True
    outbox: bool = True  # whether it is read for an outbox; if not, for tables
    missing: tuple[str, ...] = ()  # tables of the file that do not exist


_QUERY = f"""
select (select system_identifier from pg_control_system()),
       case when pg_is_in_recovery() then null else pg_walfile_name(pg_current_wal_lsn()) end,
       (select rolsuper or rolreplication from pg_roles where rolname = current_user),
       current_setting('server_version_num')::int, current_setting('wal_level'), pg_is_in_recovery(),
       case when pg_is_in_recovery() then 0 else (pg_current_wal_flush_lsn() - '0/0'::pg_lsn)::bigint end,
       current_database()::text, r.fingerprint, @schema@.publication_fingerprint(@publication_literal@::name),
       (select version from @schema@.meta), current_user::text,
       {SLOT_COLUMNS}
from (select) one
left join pg_replication_slots s on s.slot_name = @slot_literal@
left join @schema@.readers r on r.slot = @slot_literal@
"""


def look(link: Link, target: PostgresTarget) -> Survey:
    """Needs no right beyond the grants of `evermark source install --print`."""
    try:
        found = link.one(filled(_QUERY, target), doing="looking at the slot")
    except SetupError as error:
        raise not_logical(link) or _not_installed(link, target) or error from error
    system_id, walfile, replicates, *server = found[:12]
    slot = Slot(*found[12:]) if found[12] is not None else None
    # The timeline of the WAL file being written; the control file's would lag behind a promotion.
    incarnation = Incarnation(system_id & 0xFFFFFFFFFFFFFFFF, int(walfile[:8], 16) if walfile else 0)
    may_use_slots = replicates or link.may_use_slots()
    return Survey(*server, where=where(link.dsn), slot=slot, incarnation=incarnation, may_use_slots=may_use_slots)


def trouble(survey: Survey, target: PostgresTarget, resume: Position | None) -> EvermarkError | None:
    """Why reading cannot begin at `resume` (or at all, without one); nothing when it can. The order is that of doubt:
    a server that cannot serve, a server that is not ours, a slot that cannot give what follows."""
    return (
        unfit(survey)
        or (stranger(survey, resume) if resume is not None else None)
        or unregistered(survey, target)
        or dropped(survey)
        or _slot_trouble(survey, target, resume)
        or _publication_trouble(survey, target, resume)
    )


def require_sound(survey: Survey, target: PostgresTarget, resume: Position | None) -> None:
    """Raise if reading cannot begin at `resume`."""
    found = trouble(survey, target, resume)
    if found is not None:
        raise found


def unfit(survey: Survey) -> EvermarkError | None:
    """Why nothing can be read at this server."""
    if survey.version < VERSION_MIN:
        return SetupError(f"Postgres at {survey.where} is version {survey.version // 10000}", hint="14 is the least")
    if survey.standby:
        return SetupError(
            f"Postgres at {survey.where} is a standby",
            hint="point the dsn at the primary (target_session_attrs=read-write with several hosts)",
        )
    if survey.wal_level != "logical":
        return SetupError(f"wal_level at {survey.where} is {survey.wal_level!r}", hint=WAL_LEVEL_HINT)
    if not survey.may_use_slots:
        return DeniedError(f"role {survey.role} at {survey.where} may not read replication slots", hint=GRANT_HINT)
    return _outbox_trouble(survey) if survey.outbox else None


def _outbox_trouble(survey: Survey) -> EvermarkError | None:
    if survey.schema_version is None:
        return SetupError(f"the outbox at {survey.where} is not installed", hint=INSTALL_HINT)
    if survey.schema_version < SCHEMA_VERSION_READ:
        return SetupError(f"the outbox at {survey.where} is of an older version", hint=f"{INSTALL_HINT} again")
    if survey.schema_version > SCHEMA_VERSION:
        return FormatError(f"the outbox at {survey.where} is newer than this program", hint="upgrade Evermark")
    return None


def not_logical(link: Link) -> SetupError | None:
    (level,) = link.one("select current_setting('wal_level')", doing="reading wal_level")
    if level == "logical":
        return None
    return SetupError(f"wal_level at {where(link.dsn)} is {level!r}", hint=WAL_LEVEL_HINT)


def _not_installed(link: Link, target: PostgresTarget) -> SetupError | None:
    """Instead of the first name that the server did not find."""
    if not schema_there(link, target):
        said = f"the outbox at {where(link.dsn)} is not installed: there is no schema {target.schema}"
        return SetupError(said, hint=INSTALL_HINT)
    lacks = lacking(link, target)
    if not lacks:
        return None
    return SetupError(f"the outbox at {where(link.dsn)} lacks {', '.join(lacks)}", hint=INSTALL_HINT)


def outdated(version: int) -> dict[str, Warned]:
    """An outbox of an earlier version is read on as it is; what the newer one captures better waits for a person."""
    if version >= SCHEMA_VERSION:
        return {}
    said = f"the outbox is of version {version}, this program's is {SCHEMA_VERSION}: it is read, without what is new"
    return {"outbox_version": Warned(said, UPGRADE_HINT)}


def wal_warnings(gauges: Mapping[str, float]) -> dict[str, Warned]:
    """What is to be warned of, by the gauge that says so."""
    found: dict[str, str] = {}
    retained, limit = gauges.get("wal_retained_bytes"), gauges.get("wal_retained_limit_bytes")
    if retained is not None and limit is not None and retained > limit:
        found["wal_retained_bytes"] = (
            f"the server keeps {retained / _GIB:.1f} GiB of WAL for us, more than the {limit / _GIB:.1f} GiB of"
            " `wal_retained_warn`"
        )
    safe = gauges.get("wal_safe_bytes")
    if safe is not None and safe < SAFE_SHARE_MIN * (allowed := safe + (retained or 0.0)):
        found["wal_safe_bytes"] = (
            f"{max(0.0, safe) / _GIB:.2f} GiB of WAL more, and the server may throw our slot away"
            f" (max_slot_wal_keep_size allows {allowed / _GIB:.2f} GiB)"
        )
    return {name: Warned(said, _WAL_HINT) for name, said in found.items()}


def stranger(survey: Survey, resume: Position) -> EvermarkError | None:
    """Why this is not the server `resume` belongs to."""
    if survey.incarnation != resume.incarnation:
        return IdentityError(
            f"Postgres at {survey.where} is not the one we left: its history is {survey.incarnation},"
            f" the checkpoint's is {resume.incarnation}",
            hint=_IDENTITY_HINT,
        )
    if survey.flush_lsn < resume.lsn:
        return IdentityError(
            f"Postgres at {survey.where} is behind our checkpoint: it is at {lsn_text(survey.flush_lsn)},"
            f" we were at {lsn_text(resume.lsn)}",
            hint=_IDENTITY_HINT,
        )
    return None


def forgotten(target: str, event_id: str, installed_at: datetime | None) -> IdentityError:
    """`installed_at`: when the outbox was made, if that was after the event."""
    if installed_at is not None:
        return IdentityError(
            f"the outbox at {target} was installed anew at {installed_at:%Y-%m-%d %H:%M:%S}, after the last event we"
            f" took ({event_id}): what changed while there was none is in no event",
            hint="if that was on purpose: `evermark source recover --choice repair` goes on with what it holds;"
            " if not, point the dsn at the server this checkpoint came from",
        )
    return IdentityError(
        f"Postgres at {target} does not have the last event we took ({event_id}), though it keeps that day's events:"
        " it is a copy that has gone its own way, or events were deleted by hand",
        hint=_IDENTITY_HINT,
    )


def unregistered(survey: Survey, target: PostgresTarget) -> EvermarkError | None:
    """A slot that install never made here is not one we lost: another number of `slots`, or another name."""
    if survey.fingerprint_installed is None and not survey.outbox:
        made = f"publication {target.publication} at {survey.where}"
        if survey.fingerprint_now is None:
            return SetupError(f"there is no {made}", hint=INSTALL_HINT)
        return SetupError(f"{made} was not made by `evermark source install`", hint=INSTALL_HINT)
    if survey.fingerprint_installed is None:
        return SetupError(f"slot {target.slot} at {survey.where} is not registered as a reader", hint=INSTALL_HINT)
    return None


def dropped(survey: Survey) -> EvermarkError | None:
    """A table that is gone took itself out of the publication. No repair makes that as the file has it: this is no gap
    until the file is without the table. One that was renamed, or is still to be made, leaves the publication alone.
    """
    if not survey.missing or survey.fingerprint_now == survey.fingerprint_installed:
        return None
    return SetupError(
        f"the file names {', '.join(survey.missing[:_NAMED_MAX])}, which at {survey.where} does not exist any more, and"
        " was taken out of the publication",
        hint=DROPPED_HINT,
    )


def _slot_trouble(survey: Survey, target: PostgresTarget, resume: Position | None) -> EvermarkError | None:
    slot = survey.slot
    if slot is None:
        if resume is None:
            return SetupError(f"there is no slot {target.slot} at {survey.where}", hint=INSTALL_HINT)
        return GapError(f"slot {target.slot} at {survey.where} is gone", hint=RECOVER_HINT)
    if slot.database != survey.database or slot.plugin != "pgoutput":
        return SetupError(
            f"slot {target.slot} at {survey.where} belongs to database {slot.database} and plugin {slot.plugin}",
            hint="choose another `name` for this deployment: it names slot and publication",
        )
    if slot.wal_status == "lost" or slot.invalidation_reason or slot.confirmed_lsn is None:
        reason = slot.invalidation_reason or slot.wal_status or "it has no position"
        return GapError(f"slot {target.slot} at {survey.where} was invalidated ({reason})", hint=RECOVER_HINT)
    if resume is not None and slot.confirmed_lsn > resume.lsn:
        return GapError(
            f"slot {target.slot} at {survey.where} was moved past us: it is at {lsn_text(slot.confirmed_lsn)},"
            f" we need what follows {lsn_text(resume.lsn)}",
            hint=RECOVER_HINT,
        )
    return None


def _publication_trouble(survey: Survey, target: PostgresTarget, resume: Position | None) -> EvermarkError | None:
    kind: type[EvermarkError] = SetupError if resume is None else GapError
    hint = INSTALL_HINT if resume is None else RECOVER_HINT
    if survey.fingerprint_now is None:
        return kind(f"publication {target.publication} at {survey.where} is gone", hint=hint)
    if survey.fingerprint_now != survey.fingerprint_installed:
        return GapError(
            f"publication {target.publication} at {survey.where} was changed by somebody: rows may be missing",
            hint=RECOVER_HINT,
        )
    return None
