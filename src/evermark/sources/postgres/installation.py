"""The outbox as something that `evermark source` installs, maintains and removes."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from evermark.observe.finding import Finding, warning
from evermark.sources.kinds import Installation, Say
from evermark.sources.postgres import install as steps
from evermark.sources.postgres.failures import INSTALL_HINT
from evermark.sources.postgres.installable import installable
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.names import TableNameError, table_name
from evermark.sources.postgres.place import PostgresPlace, TableChoice, open_partition
from evermark.sources.postgres.settings import PostgresSettings


class OutboxInstallation(Installation):
    not_installed = INSTALL_HINT

    def __init__(self, settings: PostgresSettings) -> None:
        self._settings = settings

    @cached_property
    def _place(self) -> PostgresPlace:
        """Unsealed, for this process alone: printing SQL must not make a key first."""
        return open_partition(self._settings)

    def table(self, text: str) -> str:
        try:
            return table_name(text).sql
        except TableNameError as error:
            raise ValueError(f"{error}; {error.hint}" if error.hint else str(error)) from None

    def script(self, tables: Sequence[str], role: str | None) -> str:
        return steps.install_sql(self._place, self._choices(tables), role=role)

    def registered(self) -> bool:
        return steps.registered(self._place)

    def install(self, tables: Sequence[str], *, wait_s: float, say: Say, goes_on: bool) -> list[str]:
        place, choices = self._place, self._choices(tables)
        done = steps.install(place, choices, wait_s=wait_s, say=say, goes_on=goes_on)
        said = [f"outbox in schema {place.schema}, publication {place.publication}, slot {place.slot}", *done]
        if not choices:
            said.append(f"no table is captured, only what is sent by {place.schema}.emit(); add tables with --table")
        return said

    def same_place(self, left_at: str, earliest: str) -> bool:
        left, now = Position.parse(left_at), Position.parse(earliest)
        return left.incarnation == now.incarnation and left.lsn <= now.lsn

    def release(self, tables: Sequence[str], *, wait_s: float, say: Say) -> list[str]:
        done = steps.unwatch(self._place, tables, wait_s=wait_s, say=say)
        in_file = sorted({each.name for each in self._settings.tables} & set(tables))
        again = "stands in the file: take it out, or the next `source install` captures it again"
        return [*done, *(f"{name} {again}" for name in in_file)]

    @property
    def reader(self) -> str:
        return f"slot {self._place.slot}"

    def uninstall(self, *, wait_s: float, say: Say) -> list[str]:
        steps.uninstall(self._place, wait_s=wait_s, say=say)
        return [f"slot {self._place.slot} and publication {self._place.publication} are gone"]

    def maintain(self) -> tuple[int, int, int]:
        return steps.maintain(self._place)

    def foreseen(self) -> list[Finding]:
        found = installable(self._place)
        if found:
            found.append(warning("outbox", "nothing is installed in this database yet", "evermark source install"))
        return found

    def _choices(self, more: Sequence[str]) -> list[TableChoice]:
        """The file's tables, with what it says about their columns, and those of the command line."""
        tables = {table.name: TableChoice(table.name, table.exclude, table.hash) for table in self._settings.tables}
        for name in more:
            tables.setdefault(name, TableChoice(name))
        return list(tables.values())
