"""Where wishes about bots are taken: whom they speak for, and the session keys of their devices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from evermark import failpoint
from evermark.config.asked import asked
from evermark.config.bots import BotConfig
from evermark.config.problems import Problem, refused
from evermark.delivery.base import KEY_CHARS_MAX, BotMode, BotSpec, MadeBy, SubscriptionSpec
from evermark.delivery.decide.registration import unknown_bot
from evermark.delivery.ports import DeliveryStore
from evermark.delivery.status import accounts
from evermark.secrets import SecretBox
from evermark.server.bot_shapes import BotAnswer, BotChange, BotMade, BotPage, KeyAnswer, KeyPage, PublishedAnswer
from evermark.server.desk import PAGE_MAX, Desk
from evermark.server.routing import asked_of


@dataclass(frozen=True)
class BotDesk:
    """Beside the desk for subscriptions: a bot is one, and what holds for them is done there."""

    desk: Desk
    store: DeliveryStore
    sources: Collection[str]

    @property
    def _box(self) -> SecretBox:
        return self.desk.box

    @property
    def _clock(self) -> Callable[[], datetime]:
        return self.desk.clock

    def page(self, after: str = "", limit: int = PAGE_MAX) -> BotPage:
        known = accounts(self.store, self.desk.heads(), self.desk.files)
        names = sorted(n for n, found in known.items() if n > after and found.subscription.spec.bot is not None)
        shown = names[: max(1, min(limit, PAGE_MAX))]
        return BotPage(
            bots=[BotAnswer(**BotAnswer.of(known[name])) for name in shown],
            after=shown[-1] if len(shown) < len(names) else None,
        )

    def one(self, name: str) -> BotAnswer:
        self.wish(name)
        return BotAnswer(**BotAnswer.of(self.desk.account(name)))

    def add(self, name: str, values: Mapping[str, Any]) -> BotMade:
        """Make one. Without a secret in `values` one is made, and told in the answer."""

        def spec_of(given: Mapping[str, Any]) -> SubscriptionSpec:
            config: BotConfig = asked(name, given, BotConfig)
            if config.source not in self.sources:
                hint = f"there are {', '.join(sorted(self.sources))}" if self.sources else "there is none"
                raise refused(f"bot {name[:80]}", [Problem(("source",), "no source has this name", hint)])
            return replace(config.to_spec(name, self._box), made_by=MadeBy.API)

        secret = self.desk.make(values, spec_of)
        return BotMade(**BotAnswer.of(self.desk.account(name)), secret=secret)

    def change(self, name: str, values: Mapping[str, Any]) -> BotAnswer:
        """Change what is named in `values`, and nothing else; null means the default."""
        given: BotChange = asked_of(BotChange, values, f"bot {name[:80]}")
        if not given.model_fields_set:
            raise refused(f"bot {name[:80]}", [Problem((), "nothing to change was given")])
        wanted = {"mode": given.mode or BotMode.ALL, "device": given.device or "", "inbox": given.inbox or ""}
        self.wish(name)
        changes = {"bot": {key: wanted[key] for key in given.model_fields_set}}
        self.desk.as_deliverer(lambda epoch: self.store.change(name, changes, epoch))
        return self.one(name)

    def remove(self, name: str) -> None:
        self.wish(name)
        self.desk.remove(name)

    def publish(self, name: str, keys: Mapping[str, Any]) -> PublishedAnswer:
        """Keep these keys, and send what waited for them."""
        device = self.wish(name).device
        problems = [
            Problem(("keys", session[:80]), f"expected a text of 1 to {KEY_CHARS_MAX} characters")
            for session, key in keys.items()
            if not isinstance(key, str) or not 0 < len(key) <= KEY_CHARS_MAX
        ]
        if problems:
            raise refused("the body", problems[:10])
        sealed = {session: self._box.seal(key) for session, key in keys.items()}
        now = self._clock()
        released = self.desk.as_deliverer(lambda epoch: self.store.bots.publish(device, sealed, now, epoch))
        failpoint.hit("keys.published")
        return PublishedAnswer(published=len(sealed), released=released)

    def keys(self, name: str, after: str = "", limit: int = 100) -> KeyPage:
        """The sessions there are keys for. The keys themselves are told one by one."""
        most = max(1, min(limit, PAGE_MAX))
        found = self.store.bots.session_keys(self.wish(name).device, after=after, limit=most + 1)
        shown = found[:most]
        return KeyPage(
            keys=[KeyAnswer(session=key.session, published_at=key.published_at) for key in shown],
            after=shown[-1].session if len(found) > most else None,
        )

    def key(self, name: str, session: str) -> KeyAnswer:
        found = self.store.bots.session_key(self.wish(name).device, session)
        return KeyAnswer(session=found.session, published_at=found.published_at, key=self._box.open(found.sealed))

    def withdraw(self, name: str, session: str) -> None:
        """Remove one of its keys: what was not tried yet, and what comes, waits for it again."""
        device, now = self.wish(name).device, self._clock()
        self.desk.as_deliverer(lambda epoch: self.store.bots.withdraw(device, session, now, epoch))

    def wish(self, name: str) -> BotSpec:
        wish = self.store.subscription(name).spec.bot
        if wish is None:
            raise unknown_bot(name)
        return wish
