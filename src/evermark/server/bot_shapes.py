"""What the HTTP API takes and answers about bots, as models."""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pydantic import Field

from evermark.config.bots import BotConfig, Named
from evermark.delivery.base import KEYS_AT_ONCE_MAX, BotMode
from evermark.delivery.status import Account
from evermark.server.shapes import Answer, Asked, SubscriptionAnswer


class BotAnswer(SubscriptionAnswer):
    """A bot: a subscription, and whom it speaks for."""

    source: str
    user: str
    mode: BotMode
    device: str | None
    inbox: str | None

    @classmethod
    def of(cls, account: Account) -> dict[str, Any]:
        wish = account.subscription.spec.bot
        about = {} if wish is None else {"source": wish.source, "user": wish.user, "mode": wish.mode}
        rest = {} if wish is None else {"device": wish.device or None, "inbox": wish.inbox or None}
        return {**super().of(account), **about, **rest}


class BotMade(BotAnswer):
    """A bot that was just made. `secret` only when it was made here: it is told this once."""

    secret: str | None = None


class BotPage(Answer):
    """By name. `after` asks for the next page, and is null on the last."""

    bots: list[BotAnswer]
    after: str | None


class BotAsked(BotConfig):
    """The keys of `bots:` in evermark.yaml, and a name. Without a secret one is made."""

    name: str


class BotChange(Asked):
    """What is to be changed: only the keys that are given. Null means the default."""

    mode: BotMode | None = None
    device: Named | None = None
    inbox: Named | None = None


class KeysAsked(Asked):
    """Session keys by session."""

    keys: dict[str, str] = Field(min_length=1, max_length=KEYS_AT_ONCE_MAX)


class PublishedAnswer(Answer):
    """How many keys were kept, and how many events that waited for them are sent now."""

    published: int
    released: int


class KeyAnswer(Answer):
    """A session with a key; the key itself only where one is asked for."""

    session: str
    published_at: datetime
    key: str | None = None


class KeyPage(Answer):
    """By session. `after` asks for the next page, and is null on the last."""

    keys: list[KeyAnswer]
    after: str | None
