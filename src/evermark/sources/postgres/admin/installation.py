"""The outbox as something that `evermark source` installs, maintains and removes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from evermark.errors import EvermarkError
from evermark.observe.finding import Finding
from evermark.sources.kinds import Installation, Say
from evermark.sources.postgres.admin import install as steps
from evermark.sources.postgres.admin.checks import foreseen
from evermark.sources.postgres.admin.examine import COUNT_ROWS_MAX, untaken_rows
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.names import TableNameError, table_name
from evermark.sources.postgres.outbox import maintain
from evermark.sources.postgres.settings import PostgresSettings
from evermark.sources.postgres.target import PostgresTarget, TableChoice


class OutboxInstallation(Installation):
    keeps_events = True

    def __init__(self, settings: PostgresSettings) -> None:
        self._settings = settings

    @cached_property
    def _target(self) -> PostgresTarget:
        """Unsealed, for this process alone: printing SQL must not make a key first."""
        return self._settings.target()

    def table(self, text: str) -> str:
        try:
            return table_name(text).sql
        except TableNameError as error:
            raise ValueError(f"{error}; {error.hint}" if error.hint else str(error)) from None

    def script(self, tables: Sequence[str], role: str | None) -> str:
        return steps.install_sql(self._target, self._choices(tables), role=role)

    def registered(self) -> bool:
        return steps.registered(self._target)

    def install(self, tables: Sequence[str], *, wait_s: float, say: Say, goes_on: bool) -> list[str]:
        target, choices = self._target, self._choices(tables)
        done = steps.install(target, choices, wait_s=wait_s, say=say, goes_on=goes_on)
        said = [f"outbox in schema {target.schema}, publication {target.publication}, slot {target.slot}", *done]
        if not choices:
            said.append(f"no table is captured, only what is sent by {target.schema}.emit(); add tables with --table")
        return said

    def same_place(self, left_at: str, earliest: str) -> bool:
        left, now = Position.parse(left_at), Position.parse(earliest)
        return left.incarnation == now.incarnation and left.lsn <= now.lsn

    def release(self, tables: Sequence[str], *, wait_s: float, say: Say) -> list[str]:
        done = steps.unwatch(self._target, tables, wait_s=wait_s, say=say)
        in_file = sorted({each.name for each in self._settings.tables} & set(tables))
        again = "stands in the file: take it out, or the next `source install` captures it again"
        return [*done, *(f"{name} {again}" for name in in_file)]

    @property
    def reader(self) -> str:
        return f"slot {self._target.slot}"

    def left_behind(self, checkpoints: Mapping[int, str]) -> str:
        fate = "are dropped with the outbox, or wait where another deployment keeps it"
        try:
            count = untaken_rows(self._target, checkpoints)
        except EvermarkError:  # nothing is installed, or the count takes too long
            return f"Events that were not taken yet {fate}."
        if not count:
            return "No event is known that was not taken."
        number = f"More than {COUNT_ROWS_MAX}" if count > COUNT_ROWS_MAX else f"At least {count}"
        return f"{number} events were not taken yet: they {fate}."

    def uninstall(self, *, wait_s: float, say: Say) -> list[str]:
        steps.uninstall(self._target, wait_s=wait_s, say=say)
        return [f"slot {self._target.slot} and publication {self._target.publication} are gone"]

    def maintain(self) -> tuple[int, int, int]:
        return maintain(self._target)

    def foreseen(self, found: Sequence[Finding]) -> list[Finding]:
        return foreseen(self._target, found)

    def _choices(self, more: Sequence[str]) -> list[TableChoice]:
        """The file's tables, with what it says about their columns, and those of the command line."""
        tables = {table.name: table.choice() for table in self._settings.tables}
        for name in more:
            tables.setdefault(name, TableChoice(name))
        return list(tables.values())
