"""Bearer tokens: how the file names them, and how they are compared and kept to themselves."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.server.tokens import Bearer, Tokens
from tests.unit.config.config_file import MINIMAL, read, refused
from tests.unit.server.api_scene import READER, TOKENS, WRITER

LONG = "a-token-of-thirty-two-characters"


def test_a_token_is_a_text_or_says_what_it_may(tmp_path: Path) -> None:
    """GIVEN both forms WHEN read THEN the plain one may do everything, the other what it says; none is shown."""
    text = MINIMAL + 'server: {tokens: {ops: "${OPS}", board: {token: "${BOARD}", may: read}}}\n'
    config = read(tmp_path, text, {"OPS": LONG, "BOARD": f"{LONG}-2"})
    tokens = Tokens(config.server.tokens)
    assert tokens.bearer(f"Bearer {LONG}") == Bearer("ops", may_write=True)
    assert tokens.bearer(f"bearer   {LONG}-2") == Bearer("board", may_write=False)
    assert LONG not in f"{config!r} {config.server!r} {config.server.tokens!r} {tokens!r} {vars(tokens)!r}"
    assert LONG not in config.model_dump_json()
    assert not read(tmp_path, MINIMAL).server.tokens


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ("{ops: short-token}", "server.tokens.ops: expected 24 to 512 printable characters"),
        ("{ops: 'has spaces in it, and is long enough'}", "server.tokens.ops: expected 24"),
        ('{ops: "tab\\tin-it-and-otherwise-long-enough"}', "server.tokens.ops: expected 24"),
        ("{ops: größer-als-vierundzwanzig-zeichen}", "server.tokens.ops: expected 24"),
        ("{ops: 123456789012345678901234567890}", "server.tokens.ops"),
        ("{ops: {may: read}}", "server.tokens.ops.token: is required"),
        (f"{{ops: {{token: {LONG}, may: write}}}}", "server.tokens.ops.may: expected one of 'read' or 'everything'"),
        (f"{{ops: {{token: {LONG}, mai: read}}}}", "unknown key; did you mean may?"),
        (f"{{ops: {LONG}, board: {LONG}}}", "server.tokens.board: this token stands here twice"),
        (f"{{Ops Team: {LONG}}}", "server.tokens"),
        ("[a]", "server.tokens: expected a mapping"),
    ],
)
def test_a_weak_or_misspelt_token_is_refused_without_being_shown(tmp_path: Path, tokens: str, told: str) -> None:
    """Every check of the section, one by one."""
    error = refused(tmp_path, MINIMAL + f"server: {{tokens: {tokens}}}\n")
    assert told in error.message, error.message
    assert LONG not in str(error) and "short-token" not in str(error)


@given(st.text(max_size=40))
def test_nothing_but_a_token_is_one(text: str) -> None:
    """Whatever else is sent is nobody: other schemes, half a token, characters of any kind."""
    tokens = Tokens(TOKENS)
    for header in (text, f"Bearer {text}", f"Bearer {WRITER}{text.strip()}x", f"Basic {WRITER}"):
        assert tokens.bearer(header) is None
    assert tokens.bearer(None) is None
    assert tokens.bearer(f"Bearer {READER}") == Bearer("dashboard", may_write=False)
    assert Tokens({}).bearer(f"Bearer {WRITER}") is None


def test_every_token_is_compared_with_and_always_by_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time taken tells neither which token it was nor how much of it was right."""
    compared: list[tuple[bytes, bytes]] = []

    def watched(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return one == other

    tokens = Tokens(TOKENS)
    monkeypatch.setattr("evermark.server.tokens.hmac.compare_digest", watched)
    for shown in (WRITER, READER, "nobody"):
        compared.clear()
        tokens.bearer(f"Bearer {shown}")
        assert len(compared) == len(TOKENS)
        assert all(len(one) == len(other) == 32 for one, other in compared)


def test_no_token_is_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """GIVEN requests that work, are refused and fail WHEN all is logged THEN who asked is there, the token is not."""
    from evermark.observe.logging import set_up_logging
    from tests.unit.server.api_scene import WANTED, served

    set_up_logging(json=True)
    caplog.set_level(logging.DEBUG)

    def fail() -> None:
        raise RuntimeError("a bug")

    with served(tmp_path) as scene:
        made = scene.post("/v1/subscriptions", WANTED).json["secret"]
        scene.ask("GET", "/v1/subscriptions", token=f"{WRITER}x")
        scene.before = fail
        scene.post("/v1/subscriptions/billing/resume")
    said = capsys.readouterr()
    everything = said.out + said.err + caplog.text
    assert '"by": "ops"' in everything and "a bug" in everything
    assert WRITER not in everything and made not in everything
