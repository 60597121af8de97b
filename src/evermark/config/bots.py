"""The `bots:` section: the keys of a subscription, and who the bot speaks for."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import AfterValidator, Field, model_validator

from evermark.config.subscriptions import SubscriptionConfig
from evermark.delivery.model import BotMode, BotSpec, SubscriptionSpec
from evermark.secrets import SecretBox
from evermark.settings.fields import NAME, refusal


def _printable(text: str) -> str:
    if not text.isprintable():
        raise refusal("expected printable characters")
    return text


Named = Annotated[str, Field(min_length=1, max_length=128), AfterValidator(_printable)]


class BotConfig(SubscriptionConfig):
    source: Annotated[str, Field(pattern=NAME, description="The source that has its streams.")]
    user: Annotated[Named, Field(description="The user it acts for.")]
    mode: Annotated[BotMode, Field(description=f"Which events: {', '.join(mode.value for mode in BotMode)}.")] = (
        BotMode.ALL
    )
    device: Annotated[
        Named | None, Field(description="The device whose session keys the bot uses, for encrypted messages.")
    ] = None
    inbox: Annotated[
        Named | None, Field(title="Stream", description="The stream that is the bot's inbox, if the log does not say.")
    ] = None

    @model_validator(mode="after")
    def _sessions_keep_their_own_order(self) -> BotConfig:
        if self.ordered and self.device is not None:
            raise refusal(
                "a bot with a device keeps the order of each session; by key, one that waits would stop its stream",
                hint="remove ordered, or device",
                at=("ordered",),
            )
        return self

    def wish(self) -> BotSpec:
        return BotSpec(self.source, self.user, self.mode, self.device or "", self.inbox or "")

    def to_spec(self, name: str, box: SecretBox) -> SubscriptionSpec:
        return replace(super().to_spec(name, box), bot=self.wish())
