"""`evermark source install`: the outbox in the user's database.

Order matters and is fixed: tables and functions, publication, reader, slot, triggers. Each step may be run again;
nothing is ever dropped and made again, because a publication or slot made twice has lost what came in between. What
can be known beforehand is looked at before the first step (preflight.py), and an install that fails takes away what it
made itself: a slot that nobody reads fills the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import resources

from psycopg import sql

from evermark.errors import EvermarkError
from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.failures import translated
from evermark.sources.postgres.place import PostgresPlace, TableChoice
from evermark.sources.postgres.preflight import require_installable, schema_there
from evermark.sources.postgres.slots import drop_slot, spare_name
from evermark.sources.postgres.waiting import LOCK_TIMEOUT_S, Say, Waiting

SCHEMA_VERSION = 3
SCHEMA_VERSION_READ = 2  # the oldest installed version that is read on as it is, with a warning
WAIT_S = 600.0
_UPGRADES = ("upgrade_3.sql",)
_TABLES = ("01_schema.sql", *_UPGRADES, "02_functions.sql", "03_watch.sql")
# What an event is made of. The rest of its row is for us, in the database.
_PUBLISHED = (
    *("id", "created_at", "stream_id", "stream", "op", "key", "payload", "before", "schema_version", "previous_key"),
)
_PER_SLOT = ("04_publication.sql", "05_reader.sql", "06_slot.sql", "07_registered.sql")
_LOCK_TIMEOUT = f"{LOCK_TIMEOUT_S:g}s"


@dataclass(frozen=True)
class CapturedTable:
    """A table with our trigger on it. `stale`: its columns changed since; run install again."""

    name: str
    stream_id: int
    schema_version: int
    stale: bool


def install_sql(place: PostgresPlace, tables: Sequence[TableChoice] = (), *, role: str | None = "evermark") -> str:
    """The whole of it for a DBA to read and run with psql, with the rights of a least-privilege role, if any."""
    parts = ["-- Run with psql, outside a transaction: the slot needs a transaction of its own.\n"]
    parts += [_script(name, place) for name in _TABLES]
    for part in place.parts():
        parts += [_script(name, part) for name in _PER_SLOT]
    parts.append("-- Triggers, last: from here on changes are captured.\n")
    parts += [_watch(table, place).as_string() + ";\n" for table in tables]
    if role is not None:
        parts.append(_script("role.sql", place, role=role))
    return "\n".join(parts)


@dataclass
class Made:
    """What an install has made that was not there before it."""

    schema: bool = False
    publications: list[PostgresPlace] = field(default_factory=list)
    readers: list[PostgresPlace] = field(default_factory=list)
    slots: list[PostgresPlace] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)


def install(
    place: PostgresPlace,
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
    link = connect(place.dsn, lock_timeout=_LOCK_TIMEOUT)
    made = Made()
    try:
        require_installable(link, place, tables, SCHEMA_VERSION)
        made.schema = not schema_there(link, place)
        waiting = Waiting(place.dsn, link.connection.info.backend_pid, wait_s, say)
        waiting.for_lock("install the outbox", partial(_install_schema, link, place))
        for part in place.parts():
            _install_reader(link, part, made, waiting, goes_on=goes_on)
        return [_capture(link, table, place, made, waiting) for table in tables]
    except BaseException:
        _undo(place, made, say)
        raise
    finally:
        link.close()


def _install_schema(link: Link, place: PostgresPlace) -> None:
    with translated(link.dsn, "installing the outbox"), link.connection.transaction():
        for name in _TABLES:
            link.connection.execute(_script(name, place).encode())


def _install_reader(link: Link, part: PostgresPlace, made: Made, waiting: Waiting, *, goes_on: bool) -> None:
    published = link.row("select 1 from pg_publication where pubname = %s", (part.publication,), doing="looking")
    if published is None:
        made.publications.append(part)
    create_publication(link, part)
    query = _filled("select 1 from @schema@.readers where slot = %s", part)
    if link.row(query, (part.slot,), doing="looking for the reader") is None:
        made.readers.append(part)
    _register(link, part, "05_reader.sql")
    if goes_on and part in made.readers:
        forget = _filled("update @schema@.readers set floor = null where slot = %s returning 1", part)
        link.row(forget, (part.slot,), doing="registering the reader")
    there = "select 1 from pg_replication_slots where slot_name = %s"
    if link.row(there, (part.slot,), doing="looking for the slot") is None:
        waiting.for_transactions(f"make slot {part.slot}", partial(_create_slot, link, part))
        made.slots.append(part)
    waiting.for_lock("register the reader", partial(_register, link, part, "07_registered.sql"))


def _undo(place: PostgresPlace, made: Made, say: Say) -> None:
    """Take away what an install made that did not come to its end; what was there before stays."""
    if not (made.slots or made.readers or made.publications or made.tables or made.schema):
        return
    try:
        link = connect(place.dsn, lock_timeout=_LOCK_TIMEOUT)
        try:
            for part in made.slots:
                drop_slot(link, part.slot)
            with translated(link.dsn, "taking away what was made"):
                for part in made.publications:
                    link.connection.execute(_script("uninstall_publication.sql", part).encode())
                if not schema_there(link, place):
                    return
                for table in made.tables:
                    _unwatch(link, table, place)
                for part in made.readers:
                    link.connection.execute(_script("uninstall_reader.sql", part).encode())
                if made.schema:
                    _remove_schema(link, place)
        finally:
            link.close()
    except EvermarkError as error:
        say(f"not all that was made could be taken away again ({error.message}): run `evermark source uninstall`")


def uninstall(place: PostgresPlace, *, wait_s: float = WAIT_S, say: Say = lambda line: None) -> None:
    """Remove our slot and publication; and, when no other reader is left, triggers, tables and schema."""
    link = connect(place.dsn, lock_timeout=_LOCK_TIMEOUT)
    try:
        waiting = Waiting(place.dsn, link.connection.info.backend_pid, wait_s, say)
        for part in place.parts():
            drop_slot(link, spare_name(part.slot))
            drop_slot(link, part.slot)
        waiting.for_lock("remove the outbox", partial(_remove, link, place))
    finally:
        link.close()


def _remove(link: Link, place: PostgresPlace) -> None:
    with translated(link.dsn, "uninstalling the outbox"):
        for part in place.parts():
            link.connection.execute(_script("uninstall_publication.sql", part).encode())
        if not schema_there(link, place):
            return
        with link.connection.transaction():
            for part in place.parts():
                link.connection.execute(_script("uninstall_reader.sql", part).encode())
            _remove_schema(link, place)


def _remove_schema(link: Link, place: PostgresPlace) -> None:
    """Only when nobody reads it any more."""
    others = link.connection.execute(_filled("select count(*) from @schema@.readers", place).encode()).fetchone()
    if others == (0,):
        link.connection.execute(_script("uninstall_schema.sql", place).encode())


def unwatch(
    place: PostgresPlace, tables: Sequence[str], *, wait_s: float = WAIT_S, say: Say = lambda line: None
) -> list[str]:
    """Stop capturing these tables; what they wrote stays, and is read. Says what was done to each."""
    link = connect(place.dsn, lock_timeout=_LOCK_TIMEOUT)
    try:
        waiting = Waiting(place.dsn, link.connection.info.backend_pid, wait_s, say)
        return [waiting.for_lock(f"release {table}", partial(_release, link, table, place)) for table in tables]
    finally:
        link.close()


def registered(place: PostgresPlace) -> bool:
    """Whether all readers of this place are installed."""
    link = connect(place.dsn)
    try:
        there = link.row("select to_regclass(%s)", (f"{place.schema}.readers",), doing="looking for readers")
        if there == (None,):
            return False
        slots = [part.slot for part in place.parts()]
        query = _filled("select count(*) from @schema@.readers where slot = any(%s)", place)
        return link.one(query, (slots,), doing="looking for readers") == (len(slots),)
    finally:
        link.close()


def maintain(place: PostgresPlace) -> tuple[int, int, int]:
    """Partitions made for the days ahead, dropped for days past retention, and those that have to wait."""
    query = _filled("select * from @schema@.maintain(make_interval(secs => %s))", place)
    link = connect(place.dsn)
    try:
        created, dropped, waiting = link.one(query, (place.events_retention_s,), doing="maintaining partitions")
    finally:
        link.close()
    return created, dropped, waiting


def list_tables(place: PostgresPlace) -> list[CapturedTable]:
    """The tables captured now."""
    query = """
        select s.name, s.id, s.schema_version, s.columns is distinct from (
            select jsonb_agg(jsonb_build_array(a.attname, format_type(a.atttypid, a.atttypmod)) order by a.attnum)
            from pg_attribute a where a.attrelid = t.tgrelid and a.attnum > 0 and not a.attisdropped)
        from pg_trigger t join pg_class c on c.oid = t.tgrelid join pg_namespace n on n.oid = c.relnamespace
        join @schema@.streams s on s.name = n.nspname || '.' || c.relname
        where t.tgname = '@schema_name@_capture' and t.tgparentid = 0 and t.tgenabled <> 'D' order by 1"""
    link = connect(place.dsn)
    try:
        return [CapturedTable(*found) for found in link.rows(_filled(query, place), doing="listing captured tables")]
    finally:
        link.close()


def create_publication(link: Link, place: PostgresPlace, *, again: bool = False) -> None:
    """Made if there is none. `again`: what others made of it is undone; only a new slot may read it then."""
    with translated(link.dsn, "creating the publication"):
        link.connection.execute(_script("04_publication.sql", place).encode())
        if again:
            link.connection.execute(_script("publication_again.sql", place).encode())


def _register(link: Link, place: PostgresPlace, script: str) -> None:
    with translated(link.dsn, "registering the reader"):
        link.connection.execute(_script(script, place).encode())


def _create_slot(link: Link, place: PostgresPlace, timeout_ms: int) -> None:
    """The slot waits for transactions that are open, in nobody's way: a lock's short patience is not for it."""
    with translated(link.dsn, f"making slot {place.slot}"), link.connection.transaction():
        link.connection.execute("set local lock_timeout = 0")
        link.connection.execute(sql.SQL("set local statement_timeout = {}").format(timeout_ms))
        link.connection.execute(_script("06_slot.sql", place).encode())


def _capture(link: Link, table: TableChoice, place: PostgresPlace, made: Made, waiting: Waiting) -> str:
    captured = _captured(link, table.name, place)

    def watch() -> str:
        with translated(link.dsn, f"capturing {table.name}"):
            found = link.connection.execute(_watch(table, place)).fetchone()
            return str(found[0]) if found else ""

    said = waiting.for_lock(f"put triggers on {table.name}", watch)
    if not captured:
        made.tables.append(table.name)
    return said


def _captured(link: Link, table: str, place: PostgresPlace) -> bool:
    return link.row(
        "select exists (select from pg_trigger where tgrelid = to_regclass(%s) and tgname = %s)",
        (table, f"{place.schema}_capture"),
        doing=f"looking at {table}",
    ) == (True,)


def _release(link: Link, table: str, place: PostgresPlace) -> str:
    if not _captured(link, table, place):
        return f"{table} was not captured"
    _unwatch(link, table, place)
    return f"{table} is not captured any more"


def _unwatch(link: Link, table: str, place: PostgresPlace) -> None:
    link.row(_filled("select @schema@.unwatch(%s::text::regclass)", place), (table,), doing=f"releasing {table}")


def _watch(table: TableChoice, place: PostgresPlace) -> sql.Composed:
    return sql.SQL("select {}.watch({}::regclass, {}::text[], {}::text[])").format(
        sql.Identifier(place.schema),
        sql.Literal(table.name),
        sql.Literal(list(table.exclude)),
        sql.Literal(list(table.hash)),
    )


def _script(name: str, place: PostgresPlace, *, role: str = "evermark") -> str:
    text = resources.files("evermark.sources.postgres.sql").joinpath(name).read_text(encoding="utf-8")
    return _filled(text, place, role=role)


def _filled(text: str, place: PostgresPlace, *, role: str = "evermark") -> str:
    # Names were checked by PostgresPlace: letters, digits and underscores only.
    quoted_role = '"' + role.replace('"', '""') + '"'
    for token, value in (
        ("@schema@", f'"{place.schema}"'),
        ("@schema_name@", place.schema),
        ("@publication@", f'"{place.publication}"'),
        ("@publication_literal@", f"'{place.publication}'"),
        ("@slot_literal@", f"'{place.slot}'"),
        ("@version@", str(SCHEMA_VERSION)),
        ("@published@", ", ".join(f"'{name}'" for name in _PUBLISHED)),
        ("@role@", quoted_role),
        ("@row_filter_text@", place.row_filter.replace("'", "''")),
    ):
        text = text.replace(token, value)
    return text
