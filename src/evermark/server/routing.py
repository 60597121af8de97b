"""What a call of the HTTP API is: where it is found, what it takes, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from evermark.config.problems import from_validation, nearest, refused
from evermark.errors import ConfigError
from evermark.server.desk import Desk


@dataclass(frozen=True)
class Query:
    """One parameter of a query string."""

    name: str
    type: str  # in the words of JSON Schema: string, integer, boolean
    text: str


@dataclass(frozen=True)
class Request:
    path: Mapping[str, str]
    query: Mapping[str, str]
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    method: str
    path: str
    text: str
    call: Callable[[Desk, Request], BaseModel | None]
    answer: type[BaseModel] | None = None
    status: int = 200
    body: type[BaseModel] | None = None
    body_required: bool = False
    query: tuple[Query, ...] = ()
    example: Mapping[str, Any] | None = None
    guarded: bool = False  # tells what a token that may only read must not know
    slow: bool = False  # waits for somebody else's server, so it must not keep the others waiting

    @property
    def needs_all(self) -> bool:
        return self.writes or self.guarded

    @property
    def writes(self) -> bool:
        return self.method != "GET"


def asked_of(model: type[Any], body: Mapping[str, Any], what: str = "the body") -> Any:
    try:
        return model.model_validate(dict(body))
    except ValidationError as error:
        told = error.errors(include_url=False, include_input=False)
        raise refused(what, from_validation(told, lambda _: list(model.model_fields), ())) from None


def whole(request: Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise ConfigError(f"{name}: expected a whole number between {least} and {most}")
    return int(text)


def check_query(route: Route, query: Mapping[str, str]) -> None:
    """A parameter that is misspelt would otherwise list something else than what was asked for."""
    known = [one.name for one in route.query]
    for name in query:
        if name not in known:
            near = nearest(name, known)
            raise ConfigError(
                f"{name[:80]}: unknown parameter" + (f"; did you mean {near}?" if near else ""),
                hint=f"known here: {', '.join(known)}" if known else "this call takes none",
            )
