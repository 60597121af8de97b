"""Every call of the HTTP API, in one table: the server is built from it, and so is the OpenAPI document."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pydantic import BaseModel

from evermark.server.bots import BotAsked, BotChange, BotService, KeysAsked
from evermark.server.deliveries import DeliveriesAsked, DeliveryService
from evermark.server.messages import Asked, PageAsked
from evermark.server.replays import ReplayAsked, ReplaysAsked, ReplayService
from evermark.server.statuses import StatusService
from evermark.server.subscriptions import (
    PauseAsked,
    RotateAsked,
    SubscriptionAsked,
    SubscriptionChange,
    SubscriptionService,
)
from evermark.settings.problems import Problem, refused


@dataclass(frozen=True)
class Services:
    """A deployment, as the command line and the HTTP API see it: a service for each noun of the paths."""

    subscriptions: SubscriptionService
    deliveries: DeliveryService
    bots: BotService
    replays: ReplayService
    status: StatusService


@dataclass(frozen=True)
class Call:
    """A method of the service that the path names; its docstring and its annotation say what it does and answers."""

    method: str
    path: str
    do: Callable[..., BaseModel | None]
    query: type[Asked] = Asked
    body: type[BaseModel] | None = None
    body_optional: bool = False
    example: Mapping[str, Any] | None = None
    makes: bool = False  # something new, whose name stands in the body; answers 201
    guarded: bool = False  # tells what a token that may only read must not know
    slow: bool = False  # waits for a receiver, so it must not keep other calls waiting

    @property
    def summary(self) -> str:
        return " ".join((inspect.getdoc(self.do) or "").split("\n\n")[0].split()).rstrip(".")

    @cached_property
    def answer(self) -> type[BaseModel] | None:
        found = inspect.signature(self.do, eval_str=True).return_annotation
        return found if isinstance(found, type) else None

    @property
    def status(self) -> int:
        return 204 if self.answer is None else 201 if self.makes else 200

    @property
    def needs_all(self) -> bool:
        return self.writes or self.guarded

    @property
    def writes(self) -> bool:
        return self.method != "GET"

    def run(
        self, services: Services, path: Mapping[str, Any], query: Mapping[str, Any], body: Mapping[str, Any]
    ) -> BaseModel | None:
        service = getattr(services, self.path.split("/")[2])
        values = [] if self.body is None else _name_and_rest(body) if self.makes else [body]
        return self.do(service, *path.values(), *values, **query)


def _name_and_rest(body: Mapping[str, Any]) -> list[Any]:
    rest = dict(body)
    name = rest.pop("name", None)
    if not isinstance(name, str):
        raise refused("the body", [Problem(("name",), "is required" if name is None else "expected text")])
    return [name, rest]


_SUBSCRIPTION = "/v1/subscriptions/{name}"
_DELIVERY = "/v1/deliveries/{id}"
_BOT = "/v1/bots/{name}"
_REPLAY = "/v1/replays/{replay}"
_BILLING = {
    "name": "billing",
    "url": "https://billing.example/hooks",
    "streams": ["public.orders"],
    "where": "op = 'insert' and data.total > 100",
    "from": "beginning",
}
_CHANGES = {"url": "https://billing.example/v2", "where": None}
_WEATHER = {
    "name": "weather",
    "url": "https://weather.example/hooks",
    "source": "chat",
    "user": "weather-bot",
    "mode": "mentions_replies_reactions",
    "device": "weather-device-1",
}
_KEYS = {"keys": {"session-17": "the key, as its device wrote it"}}
_WINDOW = {"since": "2026-11-14T10:00:00Z", "until": "2026-11-14T12:00:00Z", "subscription": "billing", "rate": 50}
_PAUSE, _ROTATE = {"reason": "maintenance"}, {"overlap": "24h"}

CALLS = (
    Call("GET", "/v1/subscriptions", SubscriptionService.page, PageAsked),
    Call("POST", "/v1/subscriptions", SubscriptionService.add, body=SubscriptionAsked, example=_BILLING, makes=True),
    Call("GET", _SUBSCRIPTION, SubscriptionService.get),
    Call("PATCH", _SUBSCRIPTION, SubscriptionService.change, body=SubscriptionChange, example=_CHANGES),
    Call("DELETE", _SUBSCRIPTION, SubscriptionService.remove),
    Call(
        "POST", f"{_SUBSCRIPTION}/pause", SubscriptionService.pause, body=PauseAsked, body_optional=True, example=_PAUSE
    ),
    Call("POST", f"{_SUBSCRIPTION}/resume", SubscriptionService.resume),
    Call(
        "POST",
        f"{_SUBSCRIPTION}/rotate",
        SubscriptionService.rotate,
        body=RotateAsked,
        body_optional=True,
        example=_ROTATE,
    ),
    Call("POST", f"{_SUBSCRIPTION}/test", SubscriptionService.test, slow=True),
    Call("GET", "/v1/deliveries", DeliveryService.page, DeliveriesAsked),
    Call("GET", _DELIVERY, DeliveryService.get),
    Call("POST", f"{_DELIVERY}/retry", DeliveryService.retry),
    Call("DELETE", _DELIVERY, DeliveryService.drop),
    Call("GET", "/v1/replays", ReplayService.page, ReplaysAsked),
    Call("POST", "/v1/replays", ReplayService.ask, body=ReplayAsked, example=_WINDOW),
    Call("GET", _REPLAY, ReplayService.get),
    Call("POST", f"{_REPLAY}/cancel", ReplayService.cancel),
    Call("GET", "/v1/status", StatusService.page),
    Call("GET", "/v1/status/{name}", StatusService.get),
    Call("GET", "/v1/bots", BotService.page, PageAsked),
    Call("POST", "/v1/bots", BotService.add, body=BotAsked, example=_WEATHER, makes=True),
    Call("GET", _BOT, BotService.get),
    Call("PATCH", _BOT, BotService.change, body=BotChange, example={"mode": "all"}),
    Call("DELETE", _BOT, BotService.remove),
    Call("GET", f"{_BOT}/keys", BotService.keys, PageAsked),
    Call("PUT", f"{_BOT}/keys", BotService.publish, body=KeysAsked, example=_KEYS),
    Call("GET", f"{_BOT}/keys/{{session}}", BotService.key, guarded=True),
    Call("DELETE", f"{_BOT}/keys/{{session}}", BotService.withdraw),
)
