"""`evermark source install`: the outbox in the user's database.

Order matters and is fixed: tables and functions, publication, reader, slot, triggers. Each step may be run again;
nothing is ever dropped and made again, because a publication or slot made twice has lost what came in between. What
can be known beforehand is looked at before the first step (checks.py), and an install that fails takes away what it
made itself: a slot that nobody reads fills the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from psycopg import sql

from evermark.errors import EvermarkError
from evermark.sources.postgres.admin.checks import require_installable
from evermark.sources.postgres.admin.waiting import LOCK_TIMEOUT_S, Say, Waiting
from evermark.sources.postgres.connect import SEARCH_PATH, Link, connect
from evermark.sources.postgres.failures import translated
from evermark.sources.postgres.outbox import create_publication, filled, schema_there, script
from evermark.sources.postgres.slots import drop_slot, slot_named, spare_name
from evermark.sources.postgres.target import PostgresTarget, TableChoice

WAIT_S = 600.0
_UPGRADES = ("upgrade_3.sql",)
_TABLES = ("01_schema.sql", *_UPGRADES, "02_functions.sql", "03_watch.sql")
_PER_SLOT = ("04_publication.sql", "05_reader.sql", "06_slot.sql", "07_registered.sql")
_RENEWED = """-- Other tables that an earlier version captured.
select @schema@.renew(tgrelid) from pg_catalog.pg_trigger where tgname = '@schema_name@_capture' and tgparentid = 0;
"""
_OLDER = """
select format('%%I.%%I', n.nspname, c.relname) from pg_trigger t
join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace
where t.tgname = '@schema_name@_capture' and t.tgparentid = 0 order by 1
"""
_LENT = """
select distinct pg_get_userbyid(c.relowner)::text, pg_get_userbyid(f.proowner)::text
from pg_trigger t join pg_class c on c.oid = t.tgrelid join pg_proc f on f.oid = t.tgfoid
where t.tgname in (@captures@) and t.tgparentid = 0 and not pg_has_role(c.relowner, f.proowner, 'MEMBER') order by 1, 2
"""
_LOCK_TIMEOUT = f"{LOCK_TIMEOUT_S:g}s"


def install_sql(target: PostgresTarget, tables: Sequence[TableChoice] = (), *, role: str | None = "evermark") -> str:
    """The whole of it for a DBA to read and run with psql, with the rights of a least-privilege role, if any."""
    parts = ["-- Run with psql, outside a transaction: the slot needs a transaction of its own.\n"]
    parts.append(f"set search_path = {SEARCH_PATH};  -- nobody's functions in other schemas are called by mistake\n")
    parts += [script(name, target) for name in _TABLES]
    for part in target.parts():
        parts += [script(name, part) for name in _PER_SLOT]
    parts.append("-- Triggers, last: from here on changes are captured.\n")
    parts += [_watch(table, target).as_string() + ";\n" for table in tables]
    parts.append(filled(_RENEWED, target))
    if role is not None:
        parts.append(script("role.sql", target, role=role))
    return "\n".join(parts)


@dataclass
class Made:
    """What an install has made that was not there before it."""

    schema: bool = False
    publications: list[PostgresTarget] = field(default_factory=list)
    readers: list[PostgresTarget] = field(default_factory=list)
    slots: list[PostgresTarget] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)


def install(
    target: PostgresTarget,
    tables: Sequence[TableChoice] = (),
    *,
    wait_s: float = WAIT_S,
    say: Say = lambda line: None,
    goes_on: bool = False,
) -> list[str]:
    """Install or bring up to date; says what was done to each table. All or nothing, of what was not there before.

    `wait_s` is how long other people's transactions are waited for, in all; `say` hears whose they are. `goes_on`: this
    deployment has taken events here before, so that a reader made anew has to look through all of them.
    """
    made = Made()
    with connect(target.dsn, lock_timeout=_LOCK_TIMEOUT) as link:
        try:
            require_installable(link, target, tables)
            made.schema = not schema_there(link, target)
            waiting = Waiting(target.dsn, link.connection.info.backend_pid, wait_s, say)
            waiting.for_lock("install the outbox", partial(_install_schema, link, target))
            for part in target.parts():
                _install_reader(link, part, made, waiting, goes_on=goes_on)
            done = [_capture(link, table, target, made, waiting) for table in tables]
            _renew_others(link, target, waiting, say)
            _say_who_lends(link, target, say)
        except BaseException:
            _undo(target, made, say)
            raise
    return done


def _install_schema(link: Link, target: PostgresTarget) -> None:
    with translated(link.dsn, "installing the outbox"), link.connection.transaction():
        for name in _TABLES:
            link.connection.execute(script(name, target).encode())


def _install_reader(link: Link, part: PostgresTarget, made: Made, waiting: Waiting, *, goes_on: bool) -> None:
    published = link.row("select 1 from pg_publication where pubname = %s", (part.publication,), doing="looking")
    if published is None:
        made.publications.append(part)
    create_publication(link, part)
    query = filled("select 1 from @schema@.readers where slot = %s", part)
    if link.row(query, (part.slot,), doing="looking for the reader") is None:
        made.readers.append(part)
    _register(link, part, "05_reader.sql")
    if goes_on and part in made.readers:
        forget = filled("update @schema@.readers set floor = null where slot = %s returning 1", part)
        link.row(forget, (part.slot,), doing="registering the reader")
    if slot_named(link, part.slot) is None:
        waiting.for_transactions(f"make slot {part.slot}", partial(create_slot, link, part))
        made.slots.append(part)
    waiting.for_lock("register the reader", partial(_register, link, part, "07_registered.sql"))


def _undo(target: PostgresTarget, made: Made, say: Say) -> None:
    """Take away what an install made that did not come to its end; what was there before stays."""
    if made == Made():
        return
    try:
        with connect(target.dsn, lock_timeout=_LOCK_TIMEOUT) as link:
            for part in made.slots:
                drop_slot(link, part.slot)
            with translated(link.dsn, "taking away what was made"):
                for part in made.publications:
                    link.connection.execute(script("uninstall_publication.sql", part).encode())
                if not schema_there(link, target):
                    return
                for table in made.tables:
                    _unwatch(link, table, target)
                for part in made.readers:
                    link.connection.execute(script("uninstall_reader.sql", part).encode())
                if made.schema:
                    _remove_schema(link, target)
    except EvermarkError as error:
        say(f"not all that was made could be taken away again ({error.message}): run `evermark source uninstall`")


def uninstall(target: PostgresTarget, *, wait_s: float = WAIT_S, say: Say = lambda line: None) -> None:
    """Remove our slot and publication; and, when no other reader is left, triggers, tables and schema."""
    with connect(target.dsn, lock_timeout=_LOCK_TIMEOUT) as link:
        waiting = Waiting(target.dsn, link.connection.info.backend_pid, wait_s, say)
        for part in target.parts():
            drop_slot(link, spare_name(part.slot))
            drop_slot(link, part.slot)
        waiting.for_lock("remove the outbox", partial(_remove, link, target))


def _remove(link: Link, target: PostgresTarget) -> None:
    with translated(link.dsn, "uninstalling the outbox"):
        for part in target.parts():
            link.connection.execute(script("uninstall_publication.sql", part).encode())
        if not schema_there(link, target):
            return
        with link.connection.transaction():
            for part in target.parts():
                link.connection.execute(script("uninstall_reader.sql", part).encode())
            _remove_schema(link, target)


def _remove_schema(link: Link, target: PostgresTarget) -> None:
    """Only when it has no reader any more."""
    others = link.connection.execute(filled("select count(*) from @schema@.readers", target).encode()).fetchone()
    if others == (0,):
        link.connection.execute(script("uninstall_schema.sql", target).encode())


def unwatch(
    target: PostgresTarget, tables: Sequence[str], *, wait_s: float = WAIT_S, say: Say = lambda line: None
) -> list[str]:
    """Stop capturing these tables; what they wrote stays, and is read. Says what was done to each."""
    with connect(target.dsn, lock_timeout=_LOCK_TIMEOUT) as link:
        waiting = Waiting(target.dsn, link.connection.info.backend_pid, wait_s, say)
        return [waiting.for_lock(f"release {table}", partial(_release, link, table, target)) for table in tables]


def registered(target: PostgresTarget) -> bool:
    """Whether all readers of this place are installed."""
    with connect(target.dsn) as link:
        there = link.row("select to_regclass(%s)", (f"{target.schema}.readers",), doing="looking for readers")
        if there == (None,):
            return False
        slots = [part.slot for part in target.parts()]
        query = filled("select count(*) from @schema@.readers where slot = any(%s)", target)
        return link.one(query, (slots,), doing="looking for readers") == (len(slots),)


def _register(link: Link, target: PostgresTarget, name: str) -> None:
    with translated(link.dsn, "registering the reader"):
        link.connection.execute(script(name, target).encode())


def create_slot(link: Link, target: PostgresTarget, timeout_ms: int) -> None:
    """Making the slot waits for open transactions and blocks no session: the short timeout of locks is not for it."""
    with translated(link.dsn, f"making slot {target.slot}"), link.connection.transaction():
        link.connection.execute("set local lock_timeout = 0")
        link.connection.execute(sql.SQL("set local statement_timeout = {}").format(timeout_ms))
        link.connection.execute(script("06_slot.sql", target).encode())


def _capture(link: Link, table: TableChoice, target: PostgresTarget, made: Made, waiting: Waiting) -> str:
    captured = _captured(link, table.name, target)

    def watch() -> str:
        with translated(link.dsn, f"capturing {table.name}"):
            found = link.connection.execute(_watch(table, target)).fetchone()
            return str(found[0]) if found else ""

    said = waiting.for_lock(f"put triggers on {table.name}", watch)
    if not captured:
        made.tables.append(table.name)
    return said if table.name == table.stream else f"{table.name}: stream {said}"


def _renew_others(link: Link, target: PostgresTarget, waiting: Waiting, say: Say) -> None:
    """Tables captured by a trigger of an earlier version, and not in the file. They stay captured either way."""
    for (table,) in link.rows(filled(_OLDER, target), doing="looking for triggers of an earlier version"):
        query = filled("select @schema@.renew(%s::text::regclass)", target)
        try:
            waiting.for_lock(f"renew the triggers of {table}", partial(link.row, query, (table,), doing="renewing"))
        except EvermarkError as error:
            say(f"the triggers of {table} stay as an earlier version made them: {error.message}")


def _say_who_lends(link: Link, target: PostgresTarget, say: Say) -> None:
    for owner, lender in link.rows(filled(_LENT, target), doing="looking whose tables are captured"):
        say(
            f"{owner}, who owns captured tables, can run code as {lender}, who installed the outbox: a cast of the"
            " owner's own type to json runs in its triggers. If that is not wanted, install as the tables' owner"
        )


def _captured(link: Link, table: str, target: PostgresTarget) -> bool:
    query = filled("select 1 from pg_trigger where tgrelid = to_regclass(%s) and tgname in (@captures@)", target)
    return link.row(query, (table,), doing=f"looking at {table}") is not None


def _release(link: Link, table: str, target: PostgresTarget) -> str:
    if not _captured(link, table, target):
        return f"{table} was not captured"
    _unwatch(link, table, target)
    return f"{table} is not captured any more"


def _unwatch(link: Link, table: str, target: PostgresTarget) -> None:
    link.row(filled("select @schema@.unwatch(%s::text::regclass)", target), (table,), doing=f"releasing {table}")


def _watch(table: TableChoice, target: PostgresTarget) -> sql.Composed:
    values = map(sql.Literal, (table.name, list(table.exclude), list(table.hash)))
    query = "select {}.watch({}::regclass, {}::text[], {}::text[])"
    return sql.SQL(query).format(sql.Identifier(target.schema), *values)
