"""Every call of the HTTP API, in one table: the server is built from it, and so is the OpenAPI document."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from evermark.config.problems import Problem, refused
from evermark.errors import ConfigError
from evermark.server.bot_routes import BOT_ROUTES
from evermark.server.desk import PAGE_MAX, Desk
from evermark.server.routing import Query, Request, Route, asked_of, whole
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
    asked: RotateAsked = asked_of(RotateAsked, values, what)
    if asked.end:
        if len(values) > 1:
            raise refused(what, [Problem(("end",), "stands alone: it ends the overlap of the last rotation")])
        return desk.end_overlap(name)
    return desk.rotate(name, None if asked.secret is None else asked.secret.reveal(), asked.overlap)


def pause_subscription(desk: Desk, request: Request) -> BaseModel:
    return desk.pause(request.path["name"], asked_of(PauseAsked, request.body).reason)


def list_subscriptions(desk: Desk, request: Request) -> BaseModel:
    return desk.page(request.query.get("after", ""), whole(request, "limit", 100, 1, PAGE_MAX))


def list_deliveries(desk: Desk, request: Request) -> BaseModel:
    return desk.deliveries(
        request.query.get("subscription"),
        dead=_truth(request, "dead"),
        after=whole(request, "after", 0, 0, _ID_MAX - 1),
        limit=whole(request, "limit", 100, 1, PAGE_MAX),
    )


def _truth(request: Request, name: str) -> bool | None:
    text = request.query.get(name)
    if text is not None and text not in ("true", "false"):
        raise ConfigError(f"{name}: expected true or false")
    return None if text is None else text == "true"


def _ident(request: Request) -> int:
    return int(request.path["id"])


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
        "Deliver to it again now, from where it was left: after a pause, a 410, or while it waits after failures",
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
        "POST",
        f"{_ID}/retry",
        "Try it again now, even if dead; spends none of its attempts",
        lambda desk, r: desk.retry(_ident(r)),
        DeliveryAnswer,
    ),
    Route("DELETE", _ID, "Give it up: never delivered, and counted as dropped", _dropped, status=204),
    *BOT_ROUTES,
)
