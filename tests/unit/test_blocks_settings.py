"""What the file may say of a block source, and that its token is sealed before it goes anywhere."""

from __future__ import annotations

import pickle

import pytest
from pydantic import ValidationError

from evermark.errors import ConfigError
from evermark.secrets import KeyRef, Plain, Sealed, SecretBox
from evermark.sources.blocks.bots import BotsInState
from evermark.sources.blocks.settings import BlocksSettings
from evermark.sources.blocks.source import BlockStreams
from evermark.sources.blocks.target import place_of
from evermark.state.connection import State

TOKEN = "a token of some length, for tests"
GIVEN = {"type": "blocks", "nodes": ["http://127.0.0.1:8330/", "https://two.example"], "token": TOKEN}


def test_settings_become_a_place_once_they_are_sealed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the settings nor the pickled source show the token."""
    monkeypatch.setenv("BLOCKS_TEST_KEY", "a key for sealing, of some length")
    chosen = {"streams": ["room"], "kinds": ["inbox"], "partitions": 2, "start": "snapshot", "idle_after": "2h"}
    chosen |= {"requests_per_s": 7, "cold_streams_enabled": True}
    settings = BlocksSettings.model_validate(GIVEN | chosen)
    assert TOKEN not in repr(settings)
    assert TOKEN not in settings.model_dump_json()
    with pytest.raises(ConfigError, match="not complete"):
        place_of("chat", settings, Plain("x"), "s")
    sealed = settings.sealed(SecretBox(KeyRef("env", "BLOCKS_TEST_KEY")))
    place = place_of("chat", sealed, Plain("x"), "s")
    assert place.nodes == ("http://127.0.0.1:8330", "https://two.example")
    assert (place.partitions, place.whole, place.idle_after_s) == (2, False, 7200.0)
    assert (place.pace.requests_per_s, place.cold) == (7.0, True)
    assert place.wanted.wants("room", "channel", frozenset)
    assert place.wanted.wants("any", "inbox", frozenset)
    assert not place.wanted.wants("any", "channel", frozenset)
    assert isinstance(place.token, Sealed)
    assert TOKEN.encode() not in pickle.dumps(BlockStreams(place))


def _users(_: State, source: str) -> frozenset[str]:
    return frozenset({f"{source}-bot"})


def _inboxes(_: State, source: str) -> frozenset[str]:
    return frozenset({f"{source}-mail"})


def _version(_: State, source: str) -> str:
    return source


def test_streams_of_bots_are_chosen_by_who_is_in_them() -> None:
    """GIVEN streams_of: bots WHEN members are asked for THEN a bot among them decides, in a pickled source too."""
    settings = BlocksSettings.model_validate({"nodes": GIVEN["nodes"], "streams_of": "bots", "streams": ["room"]})
    with pytest.raises(ConfigError, match="streams_of"):
        place_of("chat", settings, Plain("x"), "s")
    bots = BotsInState(Plain("x"), "s", "chat", _users, _inboxes, _version)
    place = place_of("chat", settings, Plain("x"), "s", bots=bots)
    wanted = pickle.loads(pickle.dumps(BlockStreams(place))).place.wanted
    assert wanted.wants("any", "channel", lambda: frozenset({"ann", "chat-bot"}))
    assert not wanted.wants("any", "channel", lambda: frozenset({"ann"}))
    assert wanted.wants("room", "channel", frozenset)
    assert wanted.wants("chat-mail", "channel", frozenset)
    assert wanted.version().endswith(" chat")


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
