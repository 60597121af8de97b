"""What the file may say of a block source, and that its token is sealed before it goes anywhere."""

from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from evermark.secrets import KeyRef, Plain, Sealed, SecretBox
from evermark.sources.blocks.kind import target_of
from evermark.sources.blocks.settings import BlocksSettings
from evermark.sources.blocks.source import BlockStreams
from evermark.sources.kinds import BotReaders, SourceContext
from evermark.state.connection import State

TOKEN = "a token of some length, for tests"
GIVEN = {"type": "blocks", "nodes": ["http://127.0.0.1:8330/", "https://two.example"], "token": TOKEN}


def _context(box: SecretBox | None = None) -> SourceContext:
    return SourceContext("chat", box, lambda: Plain("x"), "s", BotReaders(_users, _inboxes, _version))


def test_settings_become_a_target_with_a_sealed_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the settings nor the pickled source show the token; without a box it stays in this process, open."""
    monkeypatch.setenv("BLOCKS_TEST_KEY", "a key for sealing, of some length")
    chosen = {"streams": ["room"], "kinds": ["inbox"], "partitions": 2, "start": "snapshot", "idle_after": "2h"}
    chosen |= {"requests_per_s": 7, "cold_streams_enabled": True}
    settings = BlocksSettings.model_validate(GIVEN | chosen)
    assert TOKEN not in repr(settings)
    assert TOKEN not in settings.model_dump_json()
    box = SecretBox(KeyRef("env", "BLOCKS_TEST_KEY"))
    target = target_of(settings, _context(box))
    assert target.nodes == ("http://127.0.0.1:8330", "https://two.example")
    assert (target.partitions, target.whole, target.idle_after_s) == (2, False, 7200.0)
    assert (target.pace.requests_per_s, target.cold) == (7.0, True)
    assert target.choice.wants("room", "channel", frozenset)
    assert target.choice.wants("any", "inbox", frozenset)
    assert not target.choice.wants("any", "channel", frozenset)
    assert isinstance(target.token, Sealed)
    assert target.token.open() == TOKEN
    assert TOKEN.encode() not in pickle.dumps(BlockStreams(target))
    open_token = target_of(settings, _context()).token
    assert open_token is not None
    assert open_token.open() == TOKEN


def _users(_: State, source: str) -> frozenset[str]:
    return frozenset({f"{source}-bot"})


def _inboxes(_: State, source: str) -> frozenset[str]:
    return frozenset({f"{source}-mail"})


def _version(_: State, source: str) -> str:
    return source


def test_streams_of_bots_are_chosen_by_who_is_in_them() -> None:
    """GIVEN streams_of: bots WHEN members are asked for THEN a bot among them decides, in a pickled source too."""
    settings = BlocksSettings.model_validate({"nodes": GIVEN["nodes"], "streams_of": "bots", "streams": ["room"]})
    choice = pickle.loads(pickle.dumps(BlockStreams(target_of(settings, _context())))).target.choice
    assert choice.wants("any", "channel", lambda: frozenset({"ann", "chat-bot"}))
    assert not choice.wants("any", "channel", lambda: frozenset({"ann"}))
    assert choice.wants("room", "channel", frozenset)
    assert choice.wants("chat-mail", "channel", frozenset)
    assert choice.version().endswith(" chat")


@pytest.mark.parametrize(
    "wrong",
    [
        {"nodes": []},
        {"nodes": ["ftp://x.example"]},
        {"nodes": ["http://user:word@x.example"]},
        {"partitions": 0},
        {"streams": ["no/slash"]},
        {"kinds": ["opera"]},
        {"start": "now"},
        {"token": ""},
        {"requests_per_s": 0},
        {"unknown": 1},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    """Before anything is asked of anybody, and without repeating a secret."""
    with pytest.raises(ValidationError) as refused:
        BlocksSettings.model_validate(GIVEN | wrong)
    assert TOKEN not in str(refused.value)
    assert "word" not in str(refused.value)
