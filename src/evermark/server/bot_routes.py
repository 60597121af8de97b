"""The calls of the HTTP API about bots."""

from __future__ import annotations

from pydantic import BaseModel

from evermark.config.problems import Problem, refused
from evermark.errors import NotFoundError
from evermark.server.bot_desk import BotDesk
from evermark.server.bot_shapes import (
    BotAnswer,
    BotAsked,
    BotChange,
    BotMade,
    BotPage,
    KeyAnswer,
    KeyPage,
    KeysAsked,
    PublishedAnswer,
)
from evermark.server.desk import PAGE_MAX, Desk
from evermark.server.routing import Query, Request, Route, asked_of, whole

_NAME = "/v1/bots/{name}"
_LIMIT = Query("limit", "integer", f"How many at most: 1 to {PAGE_MAX}, 100 unless told.")
_SHOWN = {
    "name": "weather",
    "url": "https://weather.example/hooks",
    "source": "chat",
    "user": "weather-bot",
    "mode": "mentions_replies_reactions",
    "device": "weather-device-1",
}


def _bots(desk: Desk) -> BotDesk:
    if desk.bots is None:
        raise NotFoundError("there is no desk for bots here", hint="ask an instance that was started by `evermark up`")
    return desk.bots


def _add(desk: Desk, request: Request) -> BaseModel:
    values = dict(request.body)
    name = values.pop("name", None)
    if not isinstance(name, str):
        raise refused("the body", [Problem(("name",), "is required" if name is None else "expected text")])
    return _bots(desk).add(name, values)


def _list(desk: Desk, request: Request) -> BaseModel:
    return _bots(desk).page(request.query.get("after", ""), whole(request, "limit", 100, 1, PAGE_MAX))


def _removed(desk: Desk, request: Request) -> None:
    _bots(desk).remove(request.path["name"])


def _publish(desk: Desk, request: Request) -> BaseModel:
    given: KeysAsked = asked_of(KeysAsked, request.body)
    return _bots(desk).publish(request.path["name"], given.keys)


def _keys(desk: Desk, request: Request) -> BaseModel:
    limit = whole(request, "limit", 100, 1, PAGE_MAX)
    return _bots(desk).keys(request.path["name"], request.query.get("after", ""), limit)


def _withdrawn(desk: Desk, request: Request) -> None:
    _bots(desk).withdraw(request.path["name"], request.path["session"])


BOT_ROUTES = (
    Route(
        "GET",
        "/v1/bots",
        "All bots, those of the file too, by name",
        _list,
        BotPage,
        query=(Query("after", "string", "Only names after this one: the next page."), _LIMIT),
    ),
    Route(
        "POST",
        "/v1/bots",
        "Make a bot: a subscription that gets what concerns a user in the streams the user is a member of. "
        "What else holds for subscriptions is done under /v1/subscriptions",
        _add,
        BotMade,
        201,
        BotAsked,
        body_required=True,
        example=_SHOWN,
    ),
    Route("GET", _NAME, "One of them", lambda desk, r: _bots(desk).one(r.path["name"]), BotAnswer),
    Route(
        "PATCH",
        _NAME,
        "Change its mode, device or inbox; what else it is, is changed under /v1/subscriptions",
        lambda desk, r: _bots(desk).change(r.path["name"], r.body),
        BotAnswer,
        body=BotChange,
        body_required=True,
        example={"mode": "all"},
    ),
    Route("DELETE", _NAME, "Remove it, with what is parked for it; its device's keys stay", _removed, status=204),
    Route(
        "GET",
        f"{_NAME}/keys",
        "The sessions that its device has published keys for",
        _keys,
        KeyPage,
        query=(Query("after", "string", "Only sessions after this one: the next page."), _LIMIT),
    ),
    Route(
        "PUT",
        f"{_NAME}/keys",
        "Publish session keys of its device. Events that waited for them are sent, in order",
        _publish,
        PublishedAnswer,
        body=KeysAsked,
        body_required=True,
        example={"keys": {"session-17": "the key, as its device wrote it"}},
    ),
    Route(
        "GET",
        f"{_NAME}/keys/{{session}}",
        "One of its keys; needs a token that may do everything",
        lambda desk, r: _bots(desk).key(r.path["name"], r.path["session"]),
        KeyAnswer,
        guarded=True,
    ),
    Route(
        "DELETE",
        f"{_NAME}/keys/{{session}}",
        "Withdraw one of its keys: what was not tried yet waits for it again",
        _withdrawn,
        status=204,
    ),
)
