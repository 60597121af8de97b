"""A subscription's wishes as they stand in State: one JSON object. Pure."""

from __future__ import annotations

import json
from dataclasses import asdict, fields
from typing import Any

from evermark.delivery.base import MadeBy, SubscriptionSpec
from evermark.delivery.bots.base import BotMode, BotSpec
from evermark.delivery.store.postgres_parked import storable
from evermark.errors import FormatError

_SPEC_FIELDS = {field.name for field in fields(SubscriptionSpec)}
_BOT_FIELDS = {field.name for field in fields(BotSpec)}


def spec_to_json(spec: SubscriptionSpec) -> str:
    given = asdict(spec)
    if spec.bot is None:
        del given["bot"]
    return storable(json.dumps(given, ensure_ascii=False))


def spec_from_json(text: str) -> SubscriptionSpec:
    given: dict[str, Any] = json.loads(text)
    bot: dict[str, Any] = given.pop("bot", None) or {}
    unknown = sorted((given.keys() - _SPEC_FIELDS) | (bot.keys() - _BOT_FIELDS))
    if unknown:
        raise FormatError(
            f"subscription {given.get('name')!r} has settings this program does not know: {', '.join(unknown)}",
            hint="a newer Evermark wrote it: upgrade this installation",
        )
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    wish = BotSpec(**{**bot, "mode": BotMode(bot["mode"])}) if bot else None
    return SubscriptionSpec(**{**given, **lists, "made_by": MadeBy(given["made_by"]), "bot": wish})
