"""`evermark source install` in mode `tables`: a publication and a slot, and nothing else in the user's database.

The publication comes first: decoding looks it up as of each change. Both may be installed again: the publication is
altered to what the file says, in one transaction, and never dropped; a slot that is there stays.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, partial

from evermark.errors import BusyError, ConfigError, DeniedError, EvermarkError, SetupError
from evermark.observe.finding import Finding, ok, warning
from evermark.sources.kinds import Installation, Say
from evermark.sources.postgres.admin.checks import Obstacle, server_obstacles
from evermark.sources.postgres.admin.install import create_slot
from evermark.sources.postgres.admin.waiting import LOCK_TIMEOUT_S, Waiting
from evermark.sources.postgres.connect import SEARCH_PATH, Link, connect
from evermark.sources.postgres.failures import INSTALL_HINT, translated, where
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.names import TableNameError, table_name
from evermark.sources.postgres.outbox import script
from evermark.sources.postgres.settings import PostgresSettings
from evermark.sources.postgres.slots import drop_slot, slot_named, spare_name
from evermark.sources.postgres.tables.copyable import key_hint, look_for_copy
from evermark.sources.postgres.tables.publication import LISTS_VERSION_MIN, publication_sql, publish, refusal
from evermark.sources.postgres.target import PostgresTarget, TableChoice

_COLUMNS_MAX = 20
_TABLE = """
select c.relkind::text, c.relpersistence::text, c.relispartition, pg_has_role(c.relowner, 'USAGE'),
       pg_get_userbyid(c.relowner)::text,
       array(select a.attname::text from pg_attribute a where a.attrelid = c.oid and a.attnum > 0 and not a.attisdropped
             order by a.attnum)
from pg_class c where c.oid = to_regclass(%s)
"""


class TablesInstallation(Installation):
    keeps_events = False

    def __init__(self, settings: PostgresSettings) -> None:
        self._settings = settings

    @cached_property
    def _target(self) -> PostgresTarget:
        """Unsealed, for this process alone: printing SQL must not make a key first."""
        return self._settings.target()

    def table(self, text: str) -> str:
        try:
            name = table_name(text).sql
        except TableNameError as error:
            raise ValueError(f"{error}; {error.hint}" if error.hint else str(error)) from None
        raise ValueError(
            f"in mode: tables the file alone names them: write {name} under `tables`, or take it out there"
        )

    def script(self, tables: Sequence[str], role: str | None) -> str:
        parts = [
            "-- Run with psql, outside a transaction: the slot needs a transaction of its own.\n",
            "-- Whatever others have made in schema public, names are the server's own.",
            f"set search_path = {SEARCH_PATH};\n",
        ]
        parts += [publication_sql(self._target, self._target.tables), script("06_slot.sql", self._target)]
        if role is not None:
            parts.append(script("tables_role.sql", self._target, role=role))
        return "\n".join(parts)

    def registered(self) -> bool:
        with connect(self._target.dsn) as link:
            return slot_named(link, self._target.slot) is not None

    def install(self, tables: Sequence[str], *, wait_s: float, say: Say, goes_on: bool) -> list[str]:
        target = self._target
        with connect(target.dsn, lock_timeout=f"{LOCK_TIMEOUT_S:g}s") as link:
            for obstacle in _obstacles(link, target, copies=self._settings.start == "copy"):
                raise obstacle.error
            made = not _published(link, target)
            waiting = Waiting(target.dsn, link.connection.info.backend_pid, wait_s, say)
            try:
                waiting.for_lock("publish the tables", partial(publish, link, target))
                if slot_named(link, target.slot) is None:
                    waiting.for_transactions(f"make slot {target.slot}", partial(create_slot, link, target))
            except BaseException:
                if made:
                    _unpublish(target, say)
                raise
        names = ", ".join(table.name for table in target.tables)
        return [f"publication {target.publication} of {names}, slot {target.slot}"]

    def same_place(self, left_at: str, earliest: str) -> bool:
        left, now = Position.parse(left_at), Position.parse(earliest)
        return left.incarnation == now.incarnation and left.lsn <= now.lsn

    def release(self, tables: Sequence[str], *, wait_s: float, say: Say) -> list[str]:
        raise ConfigError("in mode: tables the file alone names the tables", hint="take it out there, then install")

    @property
    def reader(self) -> str:
        return f"slot {self._target.slot}"

    def left_behind(self, checkpoints: Mapping[int, str]) -> str:
        return "Changes that were not taken yet are in no event then."

    def uninstall(self, *, wait_s: float, say: Say) -> list[str]:
        target = self._target
        with connect(target.dsn, lock_timeout=f"{LOCK_TIMEOUT_S:g}s") as link:
            waiting = Waiting(target.dsn, link.connection.info.backend_pid, wait_s, say)
            drop_slot(link, spare_name(target.slot))
            drop_slot(link, target.slot)
            waiting.for_lock("remove the publication", partial(_drop, link, target))
        return [f"slot {target.slot} and publication {target.publication} are gone; the tables are as they were"]

    def maintain(self) -> tuple[int, int, int]:
        return 0, 0, 0

    def foreseen(self, found: Sequence[Finding]) -> list[Finding]:
        """Where nothing is installed yet, whether install will work instead of all that is missing."""
        target = self._target
        try:
            with connect(target.dsn, lock_timeout=f"{LOCK_TIMEOUT_S:g}s") as link:
                if slot_named(link, target.slot) is not None or _published(link, target):
                    return list(found)
                obstacles = list(_obstacles(link, target, copies=self._settings.start == "copy"))
                obstacles = obstacles or list(_refused(link, target))
        except EvermarkError:
            return list(found)  # `doctor` has said so
        judged = [each for each in found if each.mend != INSTALL_HINT]
        judged += [each.finding for each in obstacles if each.check]
        if not any(each.check == "tables" for each in obstacles):
            judged.append(ok("tables", f"{', '.join(table.name for table in target.tables)} can be published"))
        return [*judged, warning("publication", "nothing is installed in this database yet", "evermark source install")]


def _obstacles(link: Link, target: PostgresTarget, *, copies: bool) -> Iterator[Obstacle]:
    yield from server_obstacles(link, target, made=_published(link, target), what="a publication")
    for table in target.tables:
        error = _unpublishable(link, table)
        if error is not None:
            yield Obstacle("tables", error)
    if copies:
        for each in look_for_copy(link, target).tables:
            if not each.keyed:
                text = f"{each.table} has no key, and is to be copied: its rows cannot be told apart"
                yield Obstacle("tables", SetupError(text, hint=key_hint(each.table)))


def _refused(link: Link, target: PostgresTarget) -> Iterator[Obstacle]:
    """What only the server can judge: a `where`, and whether the table's own updates would go on."""
    for table in target.tables:
        error = refusal(link, target, table)
        if error is not None and not isinstance(error, BusyError):
            yield Obstacle("tables", error)


def _unpublishable(link: Link, table: TableChoice) -> EvermarkError | None:
    at = where(link.dsn)
    found = link.row(_TABLE, (table.name,), doing=f"looking at {table.name}")
    if found is None:
        return SetupError(
            f"table {table.name} does not exist at {at}",
            hint="create it first, or correct its name; written as SQL does: schema.table, with double quotes where"
            ' it has capitals: public."Orders"',
        )
    kind, persistence, partition, ours, owner, columns = found
    if kind not in ("r", "p") or persistence != "p":
        return SetupError(
            f"{table.name} is not a table that can be captured",
            hint="views, foreign, temporary and unlogged tables have no WAL",
        )
    if not ours:
        return DeniedError(
            f"our role at {at} does not own table {table.name}, which belongs to {owner}: it cannot publish it",
            hint=f"install as {owner}, or let a DBA run `evermark source install --print`",
        )
    if partition:
        return SetupError(
            f"{table.name} is a partition", hint="name the whole table: its partitions come with it, under its name"
        )
    if (table.columns or table.exclude or table.where) and link.connection.info.server_version < LISTS_VERSION_MIN:
        return SetupError(
            f"`columns`, `exclude` and `where` of {table.name} need Postgres 15 or newer at {at}",
            hint="leave them out; `hash` works with 14, too",
        )
    unknown = [name for name in (*table.columns, *table.exclude, *table.hash) if name not in columns]
    if unknown:
        there = ", ".join(columns[:_COLUMNS_MAX]) + (", …" if len(columns) > _COLUMNS_MAX else "")
        return SetupError(
            f'table {table.name} has no column "{unknown[0]}"',
            hint=f"its columns are {there}; write them as they are here, without quotes",
        )
    return None


def _published(link: Link, target: PostgresTarget) -> bool:
    query = "select 1 from pg_publication where pubname = %s"
    return link.row(query, (target.publication,), doing="looking for the publication") is not None


def _drop(link: Link, target: PostgresTarget) -> None:
    with translated(link.dsn, "removing the publication"):
        link.connection.execute(script("uninstall_publication.sql", target).encode())


def _unpublish(target: PostgresTarget, say: Say) -> None:
    """A publication that nobody reads does no good, and asks for replica identities."""
    try:
        with connect(target.dsn, lock_timeout=f"{LOCK_TIMEOUT_S:g}s") as other:
            _drop(other, target)
    except EvermarkError as error:
        say(f"the publication could not be taken away again ({error.message}): run `evermark source uninstall`")
