"""Every call of the HTTP API, in one table: the server is built from it, and so is the OpenAPI document."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ValidationError

from evermark.config.problems import Problem, from_validation, nearest, refused
from evermark.errors import ConfigError
from evermark.server.desk import PAGE_MAX, Desk
from evermark.server.shapes import (
    DeliveryAnswer,
    DeliveryPage,
    DeliveryWhole,
    FiredAnswer,
    PauseAsked,
    RotateAsked,
    SubscriptionAnswer,
    SubscriptionAsked,
    SubscriptionChange,
    SubscriptionMade,
    SubscriptionPage,
)

_ID_MAX = 2**63 - 1


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
    slow: bool = False  # waits for somebody else's server, so it must not keep the others waiting

    @property
    def writes(self) -> bool:
        return self.method != "GET"


def add_subscription(desk: Desk, request: Request) -> BaseModel:
    values = dict(request.body)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise refused("the body", [Problem(("name",), "is required" if name is None else "expected text")])
    return desk.add(name, values)


def rotate_secret(desk: Desk, request: Request) -> BaseModel:
    return rotate(desk, request.path["name"], request.body)


def rotate(desk: Desk, name: str, values: Mapping[str, Any], what: str = "the body") -> SubscriptionMade:
    """Rotate as these values ask for; `what` is where they stand."""
    asked: RotateAsked = _asked(RotateAsked, values, what)
    if asked.end:
        if len(values) > 1:
            raise refused(what, [Problem(("end",), "stands alone: it ends the overlap of the last rotation")])
        return desk.end_overlap(name)
    return desk.rotate(name, None if asked.secret is None else asked.secret.reveal(), asked.overlap)


def pause_subscription(desk: Desk, request: Request) -> BaseModel:
    return desk.pause(request.path["name"], _asked(PauseAsked, request.body).reason)


def list_subscriptions(desk: Desk, request: Request) -> BaseModel:
    return desk.page(request.query.get("after", ""), _whole(request, "limit", 100, 1, PAGE_MAX))


def list_deliveries(desk: Desk, request: Request) -> BaseModel:
    return desk.deliveries(
        request.query.get("subscription"),
        dead=_truth(request, "dead"),
        after=_whole(request, "after", 0, 0, _ID_MAX - 1),
        limit=_whole(request, "limit", 100, 1, PAGE_MAX),
    )


def _asked(model: type[Any], body: Mapping[str, Any], what: str = "the body") -> Any:
    try:
        return model.model_validate(dict(body))
    except ValidationError as error:
        told = error.errors(include_url=False, include_input=False)
        raise refused(what, from_validation(told, lambda _: list(model.model_fields), ())) from None


def _whole(request: Request, name: str, default: int, least: int, most: int) -> int:
    text = request.query.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 19 and least <= int(text) <= most):
        raise ConfigError(f"{name}: expected a whole number between {least} and {most}")
    return int(text)


def _truth(request: Request, name: str) -> bool | None:
    text = request.query.get(name)
    if text is not None and text not in ("true", "false"):
        raise ConfigError(f"{name}: expected true or false")
    return None if text is None else text == "true"


def _ident(request: Request) -> int:
    return int(request.path["id"])


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


def _retried(desk: Desk, request: Request) -> BaseModel:
    return desk.retry(_ident(request))


def _dropped(desk: Desk, request: Request) -> None:
    desk.drop(_ident(request))


def _removed(desk: Desk, request: Request) -> None:
    desk.remove(request.path["name"])


_NAME = "/v1/subscriptions/{name}"
_ID = "/v1/deliveries/{id}"
_LIMIT = Query("limit", "integer", f"How many at most: 1 to {PAGE_MAX}, 100 unless told.")
_SHOWN = {
    "name": "billing",
    "url": "https://billing.example/hooks",
    "streams": ["public.orders"],
    "where": "op = 'insert' and data.total > 100",
    "from": "beginning",
}

ROUTES = (
    Route(
        "GET",
        "/v1/subscriptions",
        "All subscriptions, those of the file too, by name",
        list_subscriptions,
        SubscriptionPage,
        query=(Query("after", "string", "Only names after this one: the next page."), _LIMIT),
    ),
    Route(
        "POST",
        "/v1/subscriptions",
        "Make a subscription. From now on it gets every event that is committed after the answer",
        add_subscription,
        SubscriptionMade,
        201,
        SubscriptionAsked,
        body_required=True,
        example=_SHOWN,
    ),
    Route("GET", _NAME, "One of them", lambda desk, r: desk.one(r.path["name"]), SubscriptionAnswer),
    Route(
        "PATCH",
        _NAME,
        "Change what is given, and nothing else; it stays where it is in the log",
        lambda desk, r: desk.change(r.path["name"], r.body),
        SubscriptionAnswer,
        body=SubscriptionChange,
        body_required=True,
        example={"url": "https://billing.example/v2", "where": None},
    ),
    Route("DELETE", _NAME, "Remove it, with what is parked for it", _removed, status=204),
    Route(
        "POST",
        f"{_NAME}/pause",
        "Deliver nothing to it until it is resumed; its events stay in the log",
        pause_subscription,
        SubscriptionAnswer,
        body=PauseAsked,
        example={"reason": "maintenance"},
    ),
    Route(
        "POST",
        f"{_NAME}/resume",
        "Deliver to it again, from where it was left: after a pause, or after its receiver said that it is gone",
        lambda desk, r: desk.resume(r.path["name"]),
        SubscriptionAnswer,
    ),
    Route(
        "POST",
        f"{_NAME}/rotate",
        "Sign with a new secret, and with the former ones too while the overlap lasts",
        rotate_secret,
        SubscriptionMade,
        body=RotateAsked,
        example={"overlap": "24h"},
    ),
    Route(
        "POST",
        f"{_NAME}/test",
        "Send it one signed event of type evermark.test, and say what came back; changes nothing",
        lambda desk, r: desk.test(r.path["name"]),
        FiredAnswer,
        slow=True,
    ),
    Route(
        "GET",
        "/v1/deliveries",
        "Parked deliveries by id: waiting for a retry, or dead",
        list_deliveries,
        DeliveryPage,
        query=(
            Query("subscription", "string", "Only of this subscription."),
            Query("dead", "boolean", "Only the dead ones, or only those that wait."),
            Query("after", "integer", "Only ids above this one: the next page."),
            _LIMIT,
        ),
    ),
    Route("GET", _ID, "One of them, with its event", lambda desk, r: desk.delivery(_ident(r)), DeliveryWhole),
    Route(
        "POST", f"{_ID}/retry", "Try it again now, even if dead", lambda desk, r: desk.retry(_ident(r)), DeliveryAnswer
    ),
    Route("DELETE", _ID, "Give it up: never delivered, and counted as dropped", _dropped, status=204),
)
