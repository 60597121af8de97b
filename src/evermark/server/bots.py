"""Bots as the command line and the HTTP API show, make and change them, and the session keys of their devices."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, Self

from pydantic import Field

from evermark import failpoint
from evermark.config.bots import BotConfig, Named
from evermark.config.subscription_requests import asked
from evermark.delivery.decide.registration import unknown_bot
from evermark.delivery.limits import KEY_CHARS_MAX, KEYS_AT_ONCE_MAX
from evermark.delivery.model import BotMode, BotSpec, SubscriptionSpec
from evermark.delivery.ports import BotStore
from evermark.delivery.status import Account
from evermark.server.messages import PAGE_MAX, Answer, Asked, read_as
from evermark.server.subscriptions import SubscriptionAnswer, SubscriptionService
from evermark.settings.problems import Problem, refused


class BotAnswer(SubscriptionAnswer):
    """A bot: a subscription, and the user it acts for."""

    source: str
    user: str
    mode: BotMode
    device: str | None
    inbox: str | None

    @classmethod
    def of(cls, account: Account, **more: Any) -> Self:
        bot = account.subscription.spec.bot
        if bot is None:
            raise unknown_bot(account.subscription.name)
        return super().of(account, **vars(bot) | {"device": bot.device or None, "inbox": bot.inbox or None} | more)


class BotMade(BotAnswer):
    """A bot that was just made. `secret` only when it was made here: it is told this once. `warnings` names streams
    that were given and that nothing is known of.
    """

    warnings: list[str] = Field(default_factory=list)
    secret: str | None = None


class BotPage(Answer):
    """By name. `after` asks for the next page, and is null on the last."""

    bots: list[BotAnswer]
    after: str | None


class BotAsked(BotConfig):
    """The keys of `bots:` in evermark.yaml, and a name. Without a secret, the server makes one."""

    name: str


class BotChange(Asked):
    """The keys to change; a key that is left out stays as it is. Null means the default."""

    mode: BotMode | None = None
    device: Named | None = None
    inbox: Named | None = None


class KeysAsked(Asked):
    """Session keys by session."""

    keys: Annotated[
        dict[str, Annotated[str, Field(min_length=1, max_length=KEY_CHARS_MAX)]],
        Field(min_length=1, max_length=KEYS_AT_ONCE_MAX),
    ]


class PublishedAnswer(Answer):
    """How many keys were kept, and how many events that waited for them are sent now."""

    published: int
    released: int


class KeyAnswer(Answer):
    """A session that has a key. The key itself is in the answer only when this session is asked for by name."""

    session: str
    published_at: datetime
    key: str | None = None


class KeyPage(Answer):
    """By session. `after` asks for the next page, and is null on the last."""

    keys: list[KeyAnswer]
    after: str | None


@dataclass(frozen=True)
class BotService:
    """A bot is a subscription: what holds for every subscription is done by `SubscriptionService`."""

    subscriptions: SubscriptionService
    store: BotStore
    sources: Collection[str]

    def page(self, after: str = "", limit: int = PAGE_MAX) -> BotPage:
        """All bots by name, including the bots of the file."""
        found, more = self.subscriptions.accounts(after, limit, bots=True)
        return BotPage(bots=[BotAnswer.of(each) for each in found], after=more)

    def get(self, name: str) -> BotAnswer:
        """A bot."""
        return BotAnswer.of(self.subscriptions.account(name))

    def add(self, name: str, values: Mapping[str, Any]) -> BotMade:
        """Make a bot: a subscription that gets what concerns a user in the streams the user is a member of. What else
        holds for subscriptions is done under /v1/subscriptions.

        Without a secret in `values` a secret is made, and told in the answer.
        """

        def spec_of(given: Mapping[str, Any]) -> SubscriptionSpec:
            config: BotConfig = asked(name, given, BotConfig)
            if config.source not in self.sources:
                hint = f"there are {', '.join(sorted(self.sources))}" if self.sources else "there is none"
                raise refused(f"bot {name[:80]}", [Problem(("source",), "no source has this name", hint)])
            return config.to_spec(name, self.subscriptions.box)

        secret, warnings = self.subscriptions.make(values, spec_of)
        return BotMade.of(self.subscriptions.account(name), secret=secret, warnings=warnings)

    def change(self, name: str, values: Mapping[str, Any]) -> BotAnswer:
        """Change the mode, device or inbox of a bot; its other keys are changed under /v1/subscriptions."""
        given = read_as(BotChange, values, f"bot {name[:80]}")
        if not given.model_fields_set:
            raise refused(f"bot {name[:80]}", [Problem((), "nothing to change was given")])
        wanted = {"mode": given.mode or BotMode.ALL, "device": given.device or "", "inbox": given.inbox or ""}
        self._bot(name)
        changes = {"bot": {key: wanted[key] for key in given.model_fields_set}}
        of = self.subscriptions
        of.as_deliverer(lambda epoch: of.store.change(name, changes, epoch))
        return self.get(name)

    def remove(self, name: str) -> None:
        """Remove a bot, with its parked deliveries; the keys of its device stay."""
        self._bot(name)
        self.subscriptions.remove(name)

    def publish(self, name: str, values: Mapping[str, Any]) -> PublishedAnswer:
        """Publish session keys of the bot's device. Events that waited for them are sent, in order."""
        keys = read_as(KeysAsked, values).keys
        device = self._bot(name).device
        sealed = {session: self.subscriptions.box.seal(key) for session, key in keys.items()}
        now = self.subscriptions.clock()
        released = self.subscriptions.as_deliverer(lambda epoch: self.store.publish(device, sealed, now, epoch))
        failpoint.hit("keys.published")
        return PublishedAnswer(published=len(sealed), released=released)

    def keys(self, name: str, after: str = "", limit: int = 100) -> KeyPage:
        """The sessions that the bot's device has published keys for."""
        most = max(1, min(limit, PAGE_MAX))
        found = self.store.session_keys(self._bot(name).device, after=after, limit=most + 1)
        shown = found[:most]
        return KeyPage(
            keys=[KeyAnswer(session=key.session, published_at=key.published_at) for key in shown],
            after=shown[-1].session if len(found) > most else None,
        )

    def key(self, name: str, session: str) -> KeyAnswer:
        """The key of a session; needs a token that may do everything."""
        found = self.store.session_key(self._bot(name).device, session)
        opened = self.subscriptions.box.open(found.sealed)
        return KeyAnswer(session=found.session, published_at=found.published_at, key=opened)

    def withdraw(self, name: str, session: str) -> None:
        """Withdraw the key of a session: its events that were not tried yet wait for it again."""
        device, now = self._bot(name).device, self.subscriptions.clock()
        self.subscriptions.as_deliverer(lambda epoch: self.store.withdraw(device, session, now, epoch))

    def _bot(self, name: str) -> BotSpec:
        bot = self.subscriptions.store.subscription(name).spec.bot
        if bot is None:
            raise unknown_bot(name)
        return bot
