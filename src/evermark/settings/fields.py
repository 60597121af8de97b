"""What the models of settings are made of: a strict base and the kinds of value people write."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainSerializer,
    PlainValidator,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from evermark import durations
from evermark.secrets import Sealed, Secret

NAME = r"^[a-z][a-z0-9_]{0,40}$"


def refusal(
    text: str, *, hint: str = "", hint_showing_value: str = "", at: Sequence[str | int] = ()
) -> PydanticCustomError:
    """The error a validator raises. `text` and `hint` must not repeat the value: it may be a secret."""
    context = {"text": text, "hint": hint, "hint_showing_value": hint_showing_value, "at": tuple(at)}
    return PydanticCustomError("evermark", "{text}", context)


class KeyNotes:
    """Which keys each mapping of a file may have. Filled during validation, asked when an error is told."""

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[dict[str, Any], list[str]]] = {}  # keeps the mapping, so that its id stays its own

    def note(self, mapping: dict[str, Any], keys: list[str]) -> None:
        self._by_id[id(mapping)] = (mapping, keys)

    def known(self, mapping: Any) -> list[str]:
        return self._by_id.get(id(mapping), ({}, []))[1]


class Model(BaseModel):
    """Frozen, closed, and shown without values: any of them may come from a variable that holds a secret."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", hide_input_in_errors=True, validate_default=False, populate_by_name=False
    )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(sorted(self.model_fields_set))})"

    __str__ = __repr__

    @classmethod
    def keys(cls) -> list[str]:
        return [field.alias or name for name, field in cls.model_fields.items()]

    @model_validator(mode="before")
    @classmethod
    def _note_keys(cls, data: Any, info: ValidationInfo) -> Any:
        """An empty key (`log:`) means the same as none. Tells the loader which keys are known for this mapping."""
        if not isinstance(data, dict):
            return data
        if isinstance(info.context, KeyNotes):
            info.context.note(data, cls.keys())
        return {key: value for key, value in data.items() if value is not None}


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise refusal("expected a number")
    return value


def _duration(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    if isinstance(value, str):
        try:
            return durations.parse(value)
        except ValueError as error:
            raise refusal(str(error)) from None
    unit = isinstance(value, (int, float)) and not isinstance(value, bool)
    raise refusal(f"expected {durations.FORM}", hint="add the unit" if unit else "")


_SIZE = re.compile(r"(\d{1,15})\s*(B|KiB|MiB|GiB|kB|MB|GB)?", re.ASCII)
_SIZE_UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "kB": 10**3, "MB": 10**6, "GB": 10**9}


def _size(value: Any) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise refusal("expected a number of bytes, for example 65536 or 1MiB")
    return int(match[1]) * _SIZE_UNITS[match[2] or ""]


_RATE = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)\s*/\s*(s|m|h)", re.ASCII)
_RATE_SECONDS = {"s": 1, "m": 60, "h": 3600}


def _rate(value: Any) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        rate = value  # a whole number may be larger than any float
    else:
        text = value.strip() if isinstance(value, str) else ""
        match = _RATE.fullmatch(text if "/" in text else f"{text}/s")
        if match is None:
            raise refusal("expected a number of requests per second, for example 50, 50/s or 600/m")
        rate = float(match[1]) / _RATE_SECONDS[match[2]]
    if not 0 <= rate <= 1_000_000:
        raise refusal("expected a rate between 0 (no limit) and 1000000 per second")
    return float(rate)


Whole = Annotated[int, BeforeValidator(_no_bool)]
Duration = Annotated[
    timedelta,
    PlainValidator(_duration),
    PlainSerializer(durations.show, when_used="json"),
    WithJsonSchema({"type": "string", "description": durations.FORM}),
]
Size = Annotated[
    int, PlainValidator(_size), WithJsonSchema({"type": ["integer", "string"], "description": "bytes, or 1MiB"})
]
Rate = Annotated[
    float,
    PlainValidator(_rate),
    WithJsonSchema({"type": ["number", "string"], "description": "a second, or 600/m; 0: no limit"}),
]


def between(least: timedelta, most: timedelta) -> BeforeValidator:
    """Bounds of a duration, told in the form durations are written in."""

    def check(value: Any) -> timedelta:
        span = _duration(value)
        if not least <= span <= most:
            raise refusal(f"must be between {durations.show(least)} and {durations.show(most)}")
        return span

    return BeforeValidator(check)


def secret_of(value: Any) -> Secret | Sealed:
    """A secret of the file; sealed ones come from settings that were sealed before."""
    if not isinstance(value, (str, Secret, Sealed)):
        raise refusal("expected text")
    return Secret(value) if isinstance(value, str) else value


# As libpq reads it: the user and the password end at the first `@`, if no `/` comes before it.
_AUTHORITY = re.compile(r"postgres(?:ql)?://(?:[^@/]*@)?(?P<hosts>[^/?]*)(?P<database>[^?]*)")
ESCAPE_HINT = "in a user or password write @ as %40, / as %2F and % as %25"


def postgres_dsn(secret: Secret) -> Secret:
    text = secret.reveal()
    if not (text.startswith(("postgresql://", "postgres://")) or re.match(r"\s*\w+\s*=", text)):
        raise refusal("expected a Postgres address, for example postgresql://user:password@host:5432/database")
    if len(text) > 4096 or "\0" in text:
        raise refusal("expected a Postgres address of at most 4096 characters")
    if is_cut_wrongly(text):
        raise refusal("this Postgres address names no host or port that can be one", hint=ESCAPE_HINT)
    return secret


def is_cut_wrongly(url: str) -> bool:
    """Whether a Postgres URL has an `@` or a `/` in its user or password as they are: then the driver takes a part of
    the password for the host, the port or the database, and names it in its errors."""
    found = _AUTHORITY.match(url)
    if found is None:
        return False
    hosts = found["hosts"].split(",")
    ports = [host.rpartition("]")[2].partition(":")[2] for host in hosts]
    return "@" in found["hosts"] + found["database"] or not all(port.isdigit() for port in ports if port)
