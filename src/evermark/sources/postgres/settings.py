"""The settings of a Postgres source."""

from __future__ import annotations

import hashlib
import re
from datetime import timedelta
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, PlainValidator, model_validator

from evermark.errors import ConfigError
from evermark.secrets import HIDDEN, Plain, Sealed, Secret, SecretBox
from evermark.settings.fields import Duration, Model, Size, between, postgres_dsn, refusal, secret_of
from evermark.sources.postgres.names import TableNameError, table_name
from evermark.sources.postgres.target import (
    EVENTS_RETENTION_S,
    SLOTS_MAX,
    WAL_RETAINED_WARN_BYTES,
    PostgresTarget,
    TableChoice,
)
from evermark.sources.settings import SourceConfig

_NAME_MAX = 63  # what Postgres keeps of an identifier
_WHERE_MAX = 10_000
_WAL_SEGMENT_BYTES = 16 * 1024 * 1024


def derived_name(deployment: str, source: str) -> str:
    """The name of slot and publication: `evermark_<deployment>_<source>`.

    Two deployments must never share a slot: it would hand each event to only one of them. Where the plain form could
    be read in two ways (shop + eu_x, shop-eu + x) or is too long, a hash of both names is added.
    """
    plain = f"evermark_{deployment.replace('-', '_')}_{source}"
    if re.fullmatch(r"[a-z0-9]+", deployment) and len(plain) <= _NAME_MAX:
        return plain
    digest = hashlib.sha256(f"{deployment}/{source}".encode()).hexdigest()[:8]
    return f"{plain[: _NAME_MAX - 9]}_{digest}"


def _table_name(text: str) -> str:
    try:
        return table_name(text).sql
    except TableNameError as error:
        raise refusal(str(error), hint_showing_value=error.hint) from None


def _table(value: Any) -> Any:
    return {"name": value} if isinstance(value, str) else value


def _dsn(value: Any) -> Secret | Sealed:
    secret = secret_of(value)
    return secret if isinstance(secret, Sealed) else postgres_dsn(secret)


def _wal_warn(size: int) -> int:
    if not _WAL_SEGMENT_BYTES <= size <= 2**60:
        raise refusal("must be between 16MiB, one segment of WAL, and 2^60 bytes")
    return size


_Column = Annotated[str, Field(min_length=1, max_length=_NAME_MAX)]
_Identifier = Annotated[str, Field(pattern=r"^[a-z_][a-z0-9_]{0,62}$")]
_Retention = Annotated[Duration, between(timedelta(days=1), timedelta(days=3660))]


class TableSettings(Model):
    """One captured table: its name as SQL writes it, columns left out, and columns of which only a hash leaves the
    database. In mode `tables` also the only columns to take, and a condition on rows. Columns are written plainly, as
    the catalog has them: without quotes of SQL, capitals as they are."""

    name: Annotated[str, Field(min_length=1, max_length=260), AfterValidator(_table_name)]
    exclude: Annotated[tuple[_Column, ...], Field(max_length=1600)] = ()
    hash: Annotated[tuple[_Column, ...], Field(max_length=1600)] = ()
    columns: Annotated[tuple[_Column, ...], Field(max_length=1600)] = ()
    where: Annotated[str, Field(max_length=_WHERE_MAX)] = ""

    @model_validator(mode="after")
    def _one_fate_a_column(self) -> Self:
        if set(self.exclude) & set(self.hash):
            raise refusal("a column cannot be both excluded and hashed", hint="name it once", at=("hash",))
        if self.columns and self.exclude:
            raise refusal("either the columns to take are named, or those to leave out", at=("exclude",))
        if self.columns and not set(self.hash) <= set(self.columns):
            raise refusal("a column to hash is not among the columns to take", hint="add it there", at=("hash",))
        return self

    def choice(self) -> TableChoice:
        return TableChoice(self.name, self.exclude, self.hash, self.columns, self.where)


class PostgresSettings(SourceConfig):
    type: Literal["postgres"] = "postgres"
    dsn: Annotated[Secret | Sealed, PlainValidator(_dsn), PlainSerializer(lambda _: HIDDEN)]
    mode: Literal["outbox", "tables"] = "outbox"
    start: Literal["now", "copy"] = "now"
    tables: Annotated[tuple[Annotated[TableSettings, BeforeValidator(_table)], ...], Field(max_length=10_000)] = ()
    schema_name: Annotated[_Identifier, Field(alias="schema")] = "pgstream"
    slot: _Identifier | None = None
    publication: _Identifier | None = None
    slots: Annotated[int, Field(ge=1, le=SLOTS_MAX)] = 1
    events_retention: _Retention = timedelta(seconds=EVENTS_RETENTION_S)
    wal_retained_warn: Annotated[Size, AfterValidator(_wal_warn)] = WAL_RETAINED_WARN_BYTES

    @model_validator(mode="after")
    def _each_table_once(self) -> Self:
        seen: set[str] = set()
        for index, table in enumerate(self.tables):
            if table.name in seen:
                raise refusal("this table stands here twice", hint="keep one of them", at=("tables", index))
            seen.add(table.name)
        return self

    @model_validator(mode="after")
    def _keys_of_the_mode(self) -> Self:
        if self.mode == "outbox":
            if self.start == "copy":
                raise refusal(
                    "copy is for mode: tables: an outbox has no rows from before", hint="use now", at=("start",)
                )
            for index, table in enumerate(self.tables):
                for key in ("columns", "where"):
                    if getattr(table, key):
                        raise refusal("is for mode: tables", hint="take it out", at=("tables", index, key))
            return self
        if not self.tables:
            raise refusal("mode: tables needs tables", hint="name them: tables: [public.orders]", at=("tables",))
        self._each_stream_once()
        for key in ("schema_name", "events_retention", "slots"):
            if key in self.model_fields_set:
                name = "schema" if key == "schema_name" else key
                raise refusal("is for mode: outbox", hint="take it out", at=(name,))
        return self

    def _each_stream_once(self) -> None:
        """Of an outbox the database sees to it. Their records would have equal keys, and be taken for the same."""
        seen: set[str] = set()
        for index, table in enumerate(self.tables):
            stream = table.choice().stream
            if stream in seen:
                said = "its stream would be that of a table before it: a stream's name has no quotes"
                raise refusal(said, hint="rename one of the two in the database, or leave it out", at=("tables", index))
            seen.add(stream)

    def named(self, deployment: str, source: str) -> Self:
        name = derived_name(deployment, source)
        return self.model_copy(update={"slot": self.slot or name, "publication": self.publication or name})

    def sealed(self, box: SecretBox) -> Self:
        if isinstance(self.dsn, Sealed):
            return self
        return self.model_copy(update={"dsn": Sealed.seal(self.dsn.reveal(), box)})

    def target(self) -> PostgresTarget:
        """Where these settings lead, once they are `named`. Unsealed, it stays in this process."""
        if self.slot is None or self.publication is None:
            raise ConfigError("the settings of a Postgres source are not complete", hint="name them first")
        return PostgresTarget(
            self.dsn if isinstance(self.dsn, Sealed) else Plain(self.dsn.reveal()),
            self.slot,
            self.publication,
            self.schema_name,
            tuple(table.choice() for table in self.tables),
            events_retention_s=self.events_retention.total_seconds(),
            slots=self.slots,
            wal_retained_warn_bytes=self.wal_retained_warn,
        )

    def streams_named(self) -> frozenset[str]:
        return frozenset(table.name.replace('"', "") for table in self.tables)

    def listed(self) -> dict[str, Any]:
        told = {key: getattr(self, key) for key in ("mode", "start", "slot", "publication")}
        return {**told, "tables": [table.name for table in self.tables]}
