"""Where a Postgres source is, and what it is called there."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from evermark.errors import ConfigError
from evermark.secrets import Sealed

if TYPE_CHECKING:
    from evermark.sources.postgres.settings import PostgresSettings

_NAME = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)
TABLES_MAX = 10_000


class Dsn(Protocol):
    """A connection string that shows itself only when opened: `evermark.secrets.Sealed`, or `PlainDsn`."""

    def open(self) -> str: ...


@dataclass(frozen=True)
class PlainDsn:
    """A connection string without a secret in it, or a test's."""

    text: str = field(repr=False)

    def open(self) -> str:
        return self.text


@dataclass(frozen=True)
class TableChoice:
    """A table to capture; `exclude` columns never leave it, `hash` columns leave as their SHA-256."""

    name: str
    exclude: tuple[str, ...] = ()
    hash: tuple[str, ...] = ()


@dataclass(frozen=True)
class PostgresPlace:
    """Everything a Postgres source needs to know. Picklable as far as its `dsn` is."""

    dsn: Dsn
    slot: str
    publication: str
    schema: str = "pgstream"
    tables: tuple[TableChoice, ...] = ()

    def __post_init__(self) -> None:
        # Triggers are called after the schema, with a suffix: its name must leave room for it.
        for what, name, longest in (
            ("schema", self.schema, 48),
            ("slot", self.slot, 63),
            ("publication", self.publication, 63),
        ):
            if not _NAME.fullmatch(name) or len(name) > longest:
                raise ConfigError(
                    f"{what} name {name[:80]!r} cannot be used in Postgres",
                    hint=f"use lower-case letters, digits and underscores, at most {longest}, no digit first",
                )
        if len(self.tables) > TABLES_MAX:
            raise ConfigError(f"{len(self.tables)} tables to capture; at most {TABLES_MAX} are possible")


def place_of(settings: PostgresSettings) -> PostgresPlace:
    """The place that named and sealed settings describe."""
    if not isinstance(settings.dsn, Sealed) or settings.slot is None or settings.publication is None:
        raise ConfigError("the settings of a Postgres source are not complete", hint="seal and name them first")
    tables = tuple(TableChoice(t.name, t.exclude, t.hash) for t in settings.tables)
    return PostgresPlace(settings.dsn, settings.slot, settings.publication, settings.schema_name, tables)
