"""An outbox and its server, looked at from all sides. Nothing is changed, and nothing but the dsn is needed: what our
role may not see is said to be unseen."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from typing import Any, TypeVar

from evermark.errors import EvermarkError, SetupError, UnreachableError
from evermark.sources.kinds import Retained
from evermark.sources.postgres.admin.doctor import (
    CapturedFacts,
    EventFacts,
    Facts,
    OpenTransaction,
    OutboxFacts,
    PartitionFacts,
    ServerFacts,
    SlotFacts,
)
from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.failures import where
from evermark.sources.postgres.lsn import Position, lsn_text
from evermark.sources.postgres.outbox import UNWATCHED, filled, installed_version, lacking, schema_there
from evermark.sources.postgres.slots import slot_named, spare_name, walsender
from evermark.sources.postgres.target import PostgresTarget

T = TypeVar("T")

COUNT_BYTES_MAX = 64 * 1024 * 1024  # up to here rows are counted, beyond it estimated
COUNT_ROWS_MAX = 1_000_000
DEFAULT_ROWS_MAX = 1000
TRANSACTION_AGE_S = 600
_LISTED_MAX = 5
_STATEMENT_TIMEOUT = "30s"

# In the order of the fields of `ServerFacts`; then two columns from which the rest of them follow.
_SERVER = """
select current_setting('server_version_num')::int, current_setting('wal_level'), pg_is_in_recovery(),
       current_database()::text, current_user::text,
       current_setting('max_wal_senders')::int, (select count(*) from pg_stat_replication)::int,
       current_setting('max_replication_slots')::int, (select count(*) from pg_replication_slots)::int,
       (select nullif(setting::bigint, -1) * 1024 * 1024 from pg_settings where name = 'max_slot_wal_keep_size'),
       coalesce((select setting::bigint * case unit when 'min' then 60 else 1 end
                 from pg_settings where name = 'idle_replication_slot_timeout'), 0),
       coalesce((case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_flush_lsn() end
                 - '0/0'::pg_lsn)::bigint, 0),
       pg_has_role('pg_read_all_stats', 'USAGE'),
       coalesce((select has_function_privilege(p.oid, 'EXECUTE') from pg_proc p
                 where p.proname = 'pg_log_standby_snapshot' limit 1), true),
       current_setting('synchronous_standby_names'),
       (select rolsuper or rolreplication from pg_roles where rolname = current_user), clock_timestamp()
"""
_SLOT = """
select s.active_pid, (to_jsonb(s) ->> 'failover')::boolean, exists (select from pg_publication where pubname = %s),
       exists (select from pg_replication_slots where slot_name = %s)
from (select) one left join pg_replication_slots s on s.slot_name = %s
"""
_READER = """
select r.slot is not null, r.fingerprint,
       case when r.slot is not null then @schema@.publication_fingerprint(@publication_literal@::name) end
from (select) one left join @schema@.readers r on r.slot = @slot_literal@
"""
# Transactions with an id: only they hold a slot back.
_TRANSACTIONS = """
select extract(epoch from clock_timestamp() - xact_start)::float8,
       format('process %%s of role %%s%%s, %%s, its last statement %%s s ago', pid, usename,
              ' in ' || datname, coalesce(state, '?'),
              extract(epoch from clock_timestamp() - query_start)::bigint),
       format('select pg_terminate_backend(%%s);', pid)
from pg_stat_activity
where backend_xid is not null and pid <> pg_backend_pid() and xact_start < clock_timestamp() - make_interval(secs => %s)
union all
select extract(epoch from clock_timestamp() - prepared)::float8,
       format('prepared transaction %%L of role %%s in %%s', gid, owner, database),
       format('commit prepared %%L; or: rollback prepared %%L; in database %%s', gid, gid, database)
from pg_prepared_xacts where prepared < clock_timestamp() - make_interval(secs => %s)
order by 1 desc limit %s
"""
_RIGHTS = """
with schema as (select oid, nspname from pg_namespace where nspname = %s)
select x.statement from (
    select 1 as place, format('grant usage on schema %%I to %%I;', nspname, current_user) as statement,
           has_schema_privilege(oid, 'USAGE') as granted from schema
    union all
    select 2, format('grant select on all tables in schema %%I to %%I; alter default privileges in schema %%I'
                     ' grant select on tables to %%I;', nspname, current_user, nspname, current_user),
           bool_and(has_table_privilege(c.oid, 'SELECT'))
    from schema join pg_class c on c.relnamespace = schema.oid where c.relkind in ('r', 'p') group by nspname
    union all
    select 3, format('grant update (replay_from_ts, replay_to_ts) on %%I.streams to %%I;', nspname, current_user),
           has_column_privilege(c.oid, 'replay_from_ts', 'UPDATE')
           and has_column_privilege(c.oid, 'replay_to_ts', 'UPDATE')
    from schema join pg_class c on c.relnamespace = schema.oid where c.relname = 'streams'
    union all
    select 4, format('grant execute on function %%s to %%I;', p.oid::regprocedure, current_user),
           has_function_privilege(p.oid, 'EXECUTE')
    from schema join pg_proc p on p.pronamespace = schema.oid
    where p.proname in ('publication_fingerprint', 'maintain', 'note_floor', 'note_mended')
) x where not x.granted order by x.place, x.statement
"""
_CAPTURED = """
select n.nspname || '.' || c.relname, format('%%I.%%I', n.nspname, c.relname),
       coalesce(max(t.tgenabled::text) filter (where t.tgname in (@captures@)), ''),
       coalesce(max(t.tgenabled::text) filter (where t.tgname = '@schema_name@_truncate'), ''),
       s.columns is distinct from (
           select jsonb_agg(jsonb_build_array(a.attname, format_type(a.atttypid, a.atttypmod)) order by a.attnum)
           from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped),
       coalesce(max(t.tgname::text) filter (where t.tgname in (@captures@)), '@capture@'),
       max(o.rolname::text) filter (where t.tgname in (@captures@) and not pg_has_role(c.relowner, o.oid, 'MEMBER')),
       pg_get_userbyid(c.relowner)::text
from pg_trigger t join pg_proc f on f.oid = t.tgfoid join pg_roles o on o.oid = f.proowner
join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace
left join @schema@.streams s on s.name = n.nspname || '.' || c.relname
where t.tgname in (@captures@, '@schema_name@_truncate') and t.tgparentid = 0
group by c.oid, n.nspname, c.relname, c.relowner, s.columns order by 1
"""
_PARTITIONS = """
select c.relname::text, coalesce(pg_relation_size(c.oid), 0), greatest(c.reltuples, 0)::bigint,
       (clock_timestamp() at time zone 'UTC')::date
from pg_inherits i join pg_class c on c.oid = i.inhrelid
join pg_class e on e.oid = i.inhparent join pg_namespace n on n.oid = e.relnamespace
where n.nspname = %s and e.relname = 'events' order by 1
"""


def examine(target: PostgresTarget) -> Facts:
    """Everything that can be seen."""
    try:
        link = connect(target.dsn, statement_timeout=_STATEMENT_TIMEOUT)
    except EvermarkError as error:
        return Facts(unreachable=error)
    with link:
        try:
            return _Look(link, target).facts()
        except UnreachableError as error:
            return Facts(unreachable=error)


def examine_server(link: Link, target: PostgresTarget) -> Facts:
    """What is there besides an outbox: the server, the slot, and transactions that hold it back."""
    return _Look(link, target).server_facts()


def retained(target: PostgresTarget, log_newest: datetime | None) -> Retained:
    """The events that the outbox still has, and how many of them are younger than the newest event in the log."""
    with connect(target.dsn, statement_timeout=_STATEMENT_TIMEOUT) as link:
        look = _Look(link, target)
        events = look.events(look.partition_rows())
        younger = None
        if log_newest is not None:
            # Events of transactions that were open then are older, and not counted: hence "about".
            younger = look.bounded("events", COUNT_ROWS_MAX, "where created_at > %s", log_newest)
        counted = younger is None or younger <= COUNT_ROWS_MAX
        return Retained(events.oldest, events.newest, events.count, events.exact, log_newest, younger, counted)


def untaken_rows(target: PostgresTarget, checkpoints: Mapping[int, str]) -> int:
    """How many events were certainly not taken by a deployment with these checkpoints; counted up to a bound.

    An event that was inserted before a checkpoint, by a transaction that ended after it, cannot be told apart from an
    event that was taken.
    """
    with connect(target.dsn, statement_timeout=_STATEMENT_TIMEOUT) as link:
        found = 0
        for partition, part in enumerate(target.parts()):
            text = checkpoints.get(partition)
            since = lsn_text(Position.parse(text).lsn if text is not None else 0)
            where = f"where {part.share_sql()} and lsn >= %s::pg_lsn"
            found += _Look(link, part).bounded("events", COUNT_ROWS_MAX, where, since)
        return found


class _Look:
    def __init__(self, link: Link, target: PostgresTarget) -> None:
        self._link = link
        self._target = target
        self._unseen: list[str] = []

    def facts(self) -> Facts:
        there = schema_there(self._link, self._target)
        found = self.server_facts(installed=there)
        outbox = self._outbox() if there else None
        return replace(found, outbox=outbox, unseen=tuple(self._unseen))

    def server_facts(self, *, installed: bool = False) -> Facts:
        server = self._server()
        sender = None
        try:
            walsender(self._target).close()
        except EvermarkError as error:
            sender = error
        slots = tuple(self._slot(n, part, installed) for n, part in enumerate(self._target.parts()))
        ages = (TRANSACTION_AGE_S, TRANSACTION_AGE_S, _LISTED_MAX)
        open_ = self._link.rows(_TRANSACTIONS, ages, doing="looking for open transactions")
        return Facts(
            server=server,
            walsender=sender,
            slots=slots,
            transactions=tuple(OpenTransaction(*row) for row in open_),
        )

    def _seen(self, what: str, look: Callable[[], T]) -> T | None:
        """What our role may not look at is noted; that the server went away is not an answer. What is not there at all
        is said once (`OutboxFacts.lacks`).
        """
        try:
            return look()
        except UnreachableError:
            raise
        except SetupError:
            return None
        except EvermarkError as error:
            self._unseen.append(f"{what}: {error.message}")
            return None

    def _server(self) -> ServerFacts:
        before = datetime.now(UTC)
        *found, replicates, now = self._link.one(_SERVER, doing="looking at the server")
        ahead_s = (now - (before + (datetime.now(UTC) - before) / 2)).total_seconds()
        may_use_slots = replicates or self._link.may_use_slots()
        return ServerFacts(*found, where=where(self._link.dsn), may_use_slots=may_use_slots, clock_ahead_s=ahead_s)

    def _slot(self, partition: int, part: PostgresTarget, installed: bool) -> SlotFacts:
        spare = spare_name(part.slot)
        args = (part.publication, spare, part.slot)
        pid, failover, published, spare_there = self._link.one(_SLOT, args, doing="looking at the slot")
        registered: tuple[Any, ...] | None = None
        if installed:
            query = filled(_READER, part)
            registered = self._seen(
                f"reader {part.slot}", lambda: self._link.one(query, doing="looking for the reader")
            )
        return SlotFacts(
            partition, part.slot, slot_named(self._link, part.slot), pid, failover, spare, spare_there,
            part.publication, published, *(registered or ()),
        )  # fmt: skip

    def _outbox(self) -> OutboxFacts:
        rights = self._link.rows(_RIGHTS, (self._target.schema,), doing="looking at our rights")
        version = self._seen("version of the outbox", lambda: installed_version(self._link, self._target))
        rows = self.partition_rows()
        captured = self._seen("captured tables", self._captured)
        events = self._seen("events", lambda: self.events(rows)) if rows else None
        partitions = self._partitions(rows) if rows else None
        (unwatched,) = self._link.one(filled(UNWATCHED, self._target), doing="looking at partitions of captured tables")
        missing_rights, lacks = tuple(row[0] for row in rights), lacking(self._link, self._target)
        return OutboxFacts(version, missing_rights, captured, partitions, events, tuple(unwatched), lacks)

    def _captured(self) -> tuple[CapturedFacts, ...]:
        rows = self._link.rows(filled(_CAPTURED, self._target), doing="looking at captured tables")
        return tuple(CapturedFacts(*row) for row in rows)

    def partition_rows(self) -> list[tuple[str, int, int, date]]:
        rows: list[Any] = self._link.rows(_PARTITIONS, (self._target.schema,), doing="listing partitions")
        return rows

    def _partitions(self, rows: list[tuple[str, int, int, date]]) -> PartitionFacts:
        today = rows[0][3]
        days = {_day(name) for name, *_ in rows} - {None}
        least = today - timedelta(seconds=self._target.events_retention_s)
        past = [day for day in days if day is not None and day + timedelta(days=1) <= least]
        ahead = 0
        while today + timedelta(days=ahead + 1) in days:
            ahead += 1
        rest = self._seen("rows without a partition", lambda: self.bounded("events_default", DEFAULT_ROWS_MAX))
        return PartitionFacts(
            ahead=ahead,
            today=today in days,
            past=len(past),
            past_days=max(((least - day).days - 1 for day in past), default=0),
            default_rows=rest,
            bytes=sum(row[1] for row in rows),
        )

    def bounded(self, table: str, most: int, where: str = "", *args: object) -> int:
        """How many rows, counted up to one more than `most`."""
        query = filled(f"select count(*) from (select from @schema@.{table} {where} limit %s) few", self._target)
        return int(self._link.one(query, (*args, most + 1), doing=f"counting rows of {table}")[0])

    def events(self, rows: list[tuple[str, int, int, date]]) -> EventFacts:
        """The oldest and the newest come from an index; many rows are not counted."""
        bounds = filled("select min(created_at)::text, max(created_at)::text from @schema@.events", self._target)
        oldest, newest = self._link.one(bounds, doing="looking at events")
        if sum(row[1] for row in rows) > COUNT_BYTES_MAX:
            return EventFacts(oldest, newest, sum(row[2] for row in rows), exact=False)
        query = filled("select count(*) from @schema@.events", self._target)
        (count,) = self._link.one(query, doing="counting events")
        return EventFacts(oldest, newest, count, exact=True)


def _day(partition: str) -> date | None:
    try:
        return datetime.strptime(partition, "events_p%Y%m%d").replace(tzinfo=UTC).date()
    except ValueError:
        return None
