"""The body of a delivery, version 1: one event, or a bundle `{"events": [...]}`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, NoReturn

VERSION = 1


class BodyError(ValueError):
    """The body is not one this kit understands."""


@dataclass(frozen=True)
class Event:
    """One event as your handler gets it.

    `id` is the event's identity and the same in every delivery; `delivery_id` tells a replay of it from the first
    delivery. `historical` marks what was caught up or replayed. `previous_key` is there when the change gave the record
    another key: under that one it is no longer to be found. `raw` is the whole JSON object.
    """

    id: str
    delivery_id: str
    source: str
    stream: str
    key: str | None
    op: str
    type: str
    timestamp: str | None
    data: Any
    before: Any = None
    tx: str | None = None
    schema: int | None = None
    position: str = ""
    historical: bool = False
    flags: tuple[str, ...] = ()
    attempt: int = 1
    previous_key: str | None = None
    raw: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True)
class Delivery:
    events: tuple[Event, ...]
    bundle: bool


def parse(body: bytes, webhook_id: str | None) -> Delivery:
    """The events of a body, in order.

    An event may come in a bundle and again alone, and has to be the same delivery both times. A bundle's
    `webhook-id` stands for the whole bundle, and a single one's may be rewritten to fit a header: so the body says
    which delivery it is, `evermark.delivery` or else the event's id. Only a replay without the former is told by its
    `webhook-id`, `<event id>.<replay id>`.
    """
    try:
        decoded = _decoded(body)
    except (ValueError, RecursionError):
        raise BodyError("the body is not JSON") from None
    if not isinstance(decoded, dict):
        raise BodyError("the body is not a JSON object")
    if "events" not in decoded or "evermark" in decoded:
        return Delivery((_event(decoded, webhook_id),), bundle=False)
    items = decoded["events"]
    if not isinstance(items, list) or not items:
        raise BodyError("`events` is not a list of events")
    return Delivery(tuple(_event(item, None) for item in items), bundle=True)


def _decoded(body: bytes) -> Any:
    try:
        return json.loads(body, parse_constant=_refuse_constant)
    except json.JSONDecodeError:
        raise
    except ValueError:  # a number too long for `int`: looked for only now, as to look at each costs time
        return json.loads(body, parse_int=_whole, parse_constant=_refuse_constant)


def _whole(digits: str) -> int | Decimal:
    """Python makes no int of more than 4300 digits; JSON of a database may have one."""
    try:
        return int(digits)
    except ValueError:
        return Decimal(digits)


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _event(item: object, webhook_id: str | None) -> Event:
    about = item.get("evermark") if isinstance(item, dict) else None
    if not isinstance(item, dict) or not isinstance(about, dict):
        raise BodyError("an event has no `evermark` object; other body formats can only be verified")
    if about.get("v") != VERSION:
        raise BodyError(f"`evermark.v` is not {VERSION}; a newer sender may need a newer evermark-receiver")
    event_id = _text(about, "id")
    flags = about.get("flags")
    attempt = about.get("attempt")
    return Event(
        id=event_id,
        delivery_id=_delivery_id(event_id, about.get("delivery"), webhook_id),
        source=_text(about, "source"),
        stream=_text(about, "stream"),
        key=_optional_text(about, "key"),
        op=_text(about, "op"),
        type=_optional_text(item, "type") or "",
        timestamp=_optional_text(item, "timestamp"),
        data=item.get("data"),
        before=about.get("before"),
        tx=_optional_text(about, "tx"),
        schema=about["schema"] if isinstance(about.get("schema"), int) else None,
        position=_optional_text(about, "position") or "",
        historical=about.get("historical") is True,
        flags=tuple(str(flag) for flag in flags) if isinstance(flags, list) else (),
        attempt=attempt if isinstance(attempt, int) else 1,
        previous_key=_optional_text(about, "previous_key"),
        raw=item,
    )


def _delivery_id(event_id: str, own: object, webhook_id: str | None) -> str:
    if isinstance(own, str) and own:
        return own
    if webhook_id is not None and webhook_id.startswith(f"{event_id}."):
        return webhook_id
    return event_id


def _text(values: Mapping[str, Any], name: str) -> str:
    value = values.get(name)
    if not isinstance(value, str) or not value:
        raise BodyError(f"`evermark.{name}` is missing or not text")
    return value


def _optional_text(values: Mapping[str, Any], name: str) -> str | None:
    value = values.get(name)
    if value is not None and not isinstance(value, str):
        raise BodyError(f"`{name}` is not text")
    return value
