"""What all bodies of the HTTP API have in common. The models of a noun stand beside its service."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from evermark.errors import EvermarkError, Kind
from evermark.observe.logging import without_secrets
from evermark.settings.problems import KeyPath, Problem, from_validation, refused

PAGE_MAX = 1000


class Answer(BaseModel):
    model_config = ConfigDict(frozen=True)


class Asked(BaseModel):
    """A body or a query string. As it stands it takes no key at all."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)


Limit = Annotated[int, Field(ge=1, le=PAGE_MAX, description=f"How many at most: 1 to {PAGE_MAX}, 100 unless told.")]


class PageAsked(Asked):
    """A page of a list that is sorted by a text."""

    after: Annotated[str, Field(description="Only what comes after this text, an answer's `after`: the next page.")] = (
        ""
    )
    limit: Limit = 100


class ErrorTold(Answer):
    kind: Kind
    message: str
    hint: str


class ErrorAnswer(Answer):
    error: ErrorTold

    @classmethod
    def of(cls, error: EvermarkError) -> ErrorAnswer:
        told = ErrorTold(kind=error.kind, message=without_secrets(error.message), hint=without_secrets(error.hint))
        return cls(error=told)


M = TypeVar("M", bound=Asked)


def read_as(model: type[M], values: Mapping[str, Any], where: str = "the body") -> M:
    """These values as a model. Raises `ConfigError` that names each wrong key or value; `where` is where they stand."""
    given = dict(values)
    try:
        read = model.model_validate(given)
    except ValidationError as error:
        raise refused(
            where,
            from_validation(error, given, lambda _: [each.alias or name for name, each in model.model_fields.items()]),
        ) from None
    if paths := list(_with_nul(given)):
        raise refused(where, [Problem(path, "holds the character NUL", "remove it") for path in paths])
    return read


def _with_nul(given: Mapping[str, Any]) -> Iterator[KeyPath]:
    """Texts that State cannot be asked for, nor keep. Mappings hold secrets, which are sealed and may be any text."""
    for name, value in given.items():
        if isinstance(value, str) and "\0" in value:
            yield (name,)
        elif isinstance(value, (list, tuple)):
            yield from ((name, at) for at, each in enumerate(value) if isinstance(each, str) and "\0" in each)
