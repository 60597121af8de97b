"""The `bots:` section: understood, or the key named."""

from __future__ import annotations

from pathlib import Path

import pytest

from evermark.delivery.model import BotMode, BotSpec
from evermark.secrets import KeyRef, SecretBox
from tests.unit.config.config_file import MINIMAL, WHSEC, read, refused

BOT = f"url: https://helper.example/hooks, secret: {WHSEC}, source: chat, user: helper-bot"


def bots(keys: str) -> str:
    return f"{MINIMAL}bots:\n  helper: {{{keys}}}\n"


def test_a_bot_of_the_file_has_a_subscriptions_keys_and_its_own(tmp_path: Path) -> None:
    """GIVEN a bot THEN its spec is a subscription's with a wish; what is not said has its default."""
    key = tmp_path / "key"
    key.write_text("a key that nobody will ever guess")
    box = SecretBox(KeyRef("file", str(key)))
    plain = read(tmp_path, bots(BOT)).bots["helper"].to_spec("helper", box)
    assert plain.bot == BotSpec("chat", "helper-bot", BotMode.ALL)
    whole = read(tmp_path, bots(f"{BOT}, mode: mentions_replies_reactions, device: d1, inbox: mail, bundle: 5"))
    spec = whole.bots["helper"].to_spec("helper", box)
    assert spec.bot == BotSpec("chat", "helper-bot", BotMode.MENTIONS_REPLIES_REACTIONS, "d1", "mail")
    assert spec.bundle == 5 and spec.url == "https://helper.example/hooks"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (BOT.replace(", user: helper-bot", ""), "bots.helper.user"),
        (BOT.replace(", source: chat", ""), "bots.helper.source"),
        (f"{BOT}, mode: some", "bots.helper.mode"),
        (f"{BOT}, devise: d", "device"),
        (f"{BOT}, device: d, ordered: true", "bots.helper.ordered"),
        (f"{BOT}, device: {'d' * 200}", "bots.helper.device"),
        (BOT.replace("https", "http"), "bots.helper.url"),
    ],
)
def test_what_is_wrong_with_a_bot_is_named(tmp_path: Path, keys: str, said: str) -> None:
    """GIVEN a key that is missing, misspelt or wrong THEN the error names it."""
    assert said in str(refused(tmp_path, bots(keys)))


def test_a_bot_and_a_subscription_cannot_share_a_name(tmp_path: Path) -> None:
    """GIVEN both under one name THEN it is refused: a bot is a subscription."""
    text = bots(BOT) + f"subscriptions:\n  helper: {{url: https://a.example/, secret: {WHSEC}}}\n"
    assert "bots.helper" in str(refused(tmp_path, text))
