"""Where a Postgres source is, and what it is called there."""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace

from evermark.errors import ConfigError
from evermark.secrets import Hidden
from evermark.sources.postgres.names import TableNameError, table_name

_NAME = re.compile(r"[a-z_][a-z0-9_]*", re.ASCII)
SLOTS_MAX = 16
NAME_MAX = 63
EVENTS_RETENTION_S = 7 * 86_400.0
WAL_RETAINED_WARN_BYTES = 4 * 1024**3


@dataclass(frozen=True)
class TableChoice:
    """A table to capture; `exclude` columns never leave it, `hash` columns leave as their SHA-256. In mode `tables`
    `columns`, if any, are the only ones to leave it, and `where` is the SQL condition on rows that do.

    `name` is as SQL writes it (`public."Orders"`), `stream` as its events have it (`public.Orders`).
    """

    name: str
    exclude: tuple[str, ...] = ()
    hash: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    where: str = ""

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "name", table_name(self.name).sql)
        except TableNameError as error:
            raise ConfigError(f"table {self.name[:150]!r}: {error}", hint=error.hint) from None

    @property
    def stream(self) -> str:
        return table_name(self.name).stream


@dataclass(frozen=True)
class PostgresTarget:
    """Everything a Postgres source needs to know. Picklable as far as its `dsn` is."""

    dsn: Hidden
    slot: str
    publication: str
    schema: str = "pgstream"
    tables: tuple[TableChoice, ...] = ()
    events_retention_s: float = EVENTS_RETENTION_S
    slots: int = 1  # how many slots share the events, by key
    share: int | None = None  # which of them this target is; none: all of them
    wal_retained_warn_bytes: int = WAL_RETAINED_WARN_BYTES

    def __post_init__(self) -> None:
        # Triggers are called after the schema, with a suffix: its name must leave room for it.
        names = (("schema", self.schema, 48), ("slot", self.slot, 63), ("publication", self.publication, 63))
        for what, name, longest in names:
            if not _NAME.fullmatch(name) or len(name) > longest:
                raise ConfigError(
                    f"{what} name {name[:80]!r} cannot be used in Postgres",
                    hint=f"use lower-case letters, digits and underscores, at most {longest}, no digit first",
                )

    def parts(self) -> list[PostgresTarget]:
        """One target for each slot: a partition of the source."""
        if self.slots == 1 or self.share is not None:
            return [self]
        return [
            replace(self, slot=suffixed(self.slot, f"_p{n}"), publication=suffixed(self.publication, f"_p{n}"), share=n)
            for n in range(self.slots)
        ]

    def share_sql(self, key: str = "key") -> str:
        """The condition, as SQL, by which an event is this slot's: all of one key are in one share, and stay in order.

        The same in a publication and in a query: the slots' shares must be those of the rows looked through after a
        loss.
        """
        if self.share is None:
            return "true"
        n = self.slots
        return f"mod(mod(hashtextextended(coalesce({key}, ''), 0), {n}) + {n}, {n}) = {self.share}"

    @property
    def row_filter(self) -> str:
        """The publication's clause for it; none where the slot has all events."""
        return "" if self.share is None else f"where ({self.share_sql()})"


def suffixed(name: str, suffix: str) -> str:
    """Two names that are too long and differ only at their ends stay two."""
    if len(name) + len(suffix) <= NAME_MAX:
        return name + suffix
    digest = hashlib.sha256(name.encode()).hexdigest()[:8]
    return f"{name[: NAME_MAX - 9 - len(suffix)]}_{digest}{suffix}"
