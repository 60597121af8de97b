"""Secrets: sealed wherever they leave the process, shown nowhere."""

from __future__ import annotations

import copy
import os
import pickle
import stat
import threading
from pathlib import Path
from typing import TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.errors import ConfigError, DeniedError, FormatError
from evermark.secrets import KeyRef, Sealed, Secret, SecretBox, key_for

T = TypeVar("T")
KEY = "a key that nobody will ever guess"


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> SecretBox:
    path = tmp_path_factory.mktemp("keys") / "key"
    path.write_text(KEY + "\n")
    return SecretBox(KeyRef("file", str(path)))


@pytest.fixture(scope="module")
def sealed(box: SecretBox) -> str:
    return box.seal("some plain text!!")  # 17 bytes: the last character of the base64 carries no unused bits


def sent(value: T) -> T:
    """As it arrives in another process."""
    arrived: T = pickle.loads(pickle.dumps(value))
    return arrived


@given(text=st.text(st.characters(exclude_categories=()), max_size=500))
def test_any_text_comes_back_out_of_the_box(box: SecretBox, text: str) -> None:
    """Sealing loses nothing, whatever characters the text has."""
    sealed = box.seal(text)
    assert sealed.startswith("sealed:")
    assert box.open(sealed) == text


@given(text=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=12, max_size=200))
def test_a_sealed_text_never_contains_the_plain_text(box: SecretBox, text: str) -> None:
    """Neither the sealed text, nor its pickle or repr, show what was sealed."""
    sealed = Sealed.seal(text, box)
    for seen in (sealed.text, repr(sealed), str(sealed), pickle.dumps(sealed).decode("latin-1")):
        assert text not in seen
    assert sent(sealed).open() == text


def test_the_same_text_is_sealed_differently_each_time(box: SecretBox) -> None:
    """Equal secrets cannot be told from their sealed forms."""
    assert box.seal("the same") != box.seal("the same")


def test_a_box_is_pickled_without_its_key(box: SecretBox) -> None:
    """GIVEN a box that has used its key WHEN it is pickled THEN only the reference travels, and it works there."""
    sealed = box.seal("plain")
    pickled = pickle.dumps(box)
    assert KEY.encode() not in pickled
    assert KEY not in repr(box) + str(vars(sent(box)))
    assert sent(box).open(sealed) == "plain"


def test_the_key_is_read_only_when_it_is_used(tmp_path: Path) -> None:
    """A box may be made and sent where the key is not; only opening needs it."""
    box = sent(SecretBox(KeyRef("file", str(tmp_path / "absent"))))
    with pytest.raises(ConfigError, match="cannot read the file"):
        box.seal("x")


def test_a_wrong_key_is_told_clearly_and_shows_nothing(
    box: SecretBox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a text sealed with one key WHEN opened with another THEN the error names both ids and no contents."""
    monkeypatch.setenv("OTHER_KEY", "another key, equally long")
    sealed = box.seal("the plain text")
    with pytest.raises(DeniedError, match="sealed with another key") as caught:
        SecretBox(KeyRef("env", "OTHER_KEY")).open(sealed)
    said = str(caught.value)
    assert "env:OTHER_KEY" in said
    for hidden in ("the plain text", "equally long", sealed):
        assert hidden not in said


@given(data=st.data())
def test_a_changed_sealed_text_never_opens(box: SecretBox, sealed: str, data: st.DataObject) -> None:
    """Any changed character is found: as damage, as another key, or as no sealed text at all."""
    at = data.draw(st.integers(0, len(sealed) - 1))
    other = data.draw(st.sampled_from("ABCxyz019:_-").filter(lambda char: char != sealed[at]))
    with pytest.raises((DeniedError, FormatError)):
        SecretBox(box.key_ref).open(sealed[:at] + other + sealed[at + 1 :])


@pytest.mark.parametrize("text", ["", "plain", "sealed:", "sealed:v1:", "sealed:v1:zz:zz", "sealed:v1:00000000:"])
def test_what_is_not_sealed_is_refused_without_being_repeated(box: SecretBox, text: str) -> None:
    """A plain text in place of a sealed one is an error that does not show it."""
    with pytest.raises(FormatError) as caught:
        box.open(text)
    assert not text or text not in str(caught.value)


def test_a_newer_sealed_format_asks_for_an_upgrade(box: SecretBox) -> None:
    """A text sealed by a newer program is told apart from a damaged one."""
    with pytest.raises(FormatError, match="newer version"):
        box.open("sealed:v2:whatever")


def test_a_plain_secret_shows_nothing_and_cannot_be_pickled() -> None:
    """Logs, reprs and Spark closures cannot carry a plain secret by accident."""
    secret = Secret("hunter2")
    assert "hunter2" not in f"{secret} {secret!r} {[secret]}"
    with pytest.raises(TypeError, match="seal it"):
        pickle.dumps(secret)
    assert copy.deepcopy(secret) == secret == Secret("hunter2") != Secret("hunter3")
    assert secret != "hunter2"
    assert secret.reveal() == "hunter2"


@pytest.mark.parametrize(
    "text", ["", "file:relative", "env:", "env:not a name", "http://x", "plain key text", "env:A\n"]
)
def test_a_key_reference_is_a_file_or_a_variable(text: str) -> None:
    """Anything else, a written-out key above all, is refused and not repeated."""
    with pytest.raises(ConfigError) as caught:
        KeyRef(*text.partition(":")[::2])
    assert "plain key text" not in str(caught.value)


def test_a_key_reference_reads_back_as_itself() -> None:
    """Text and reference are the same thing in two forms."""
    for ref in (KeyRef("file", "/run/secrets/evermark"), KeyRef("env", "EVERMARK_KEY")):
        assert KeyRef(*str(ref).partition(":")[::2]) == ref


def test_a_short_or_missing_key_is_refused_with_a_way_to_make_one(tmp_path: Path) -> None:
    """Fewer than 16 bytes is no key; the error does not repeat it."""
    short = tmp_path / "short"
    short.write_text("only 15 bytes!!\n")
    for ref, environ in (
        (KeyRef("file", str(short)), {}),
        (KeyRef("env", "K"), {"K": "only 15 bytes!!"}),
        (KeyRef("env", "K"), {}),
        (KeyRef("env", "K"), {"K": ""}),
    ):
        with pytest.raises(ConfigError) as caught:
            ref.load(environ)
        assert "token_urlsafe" in caught.value.hint
        assert "only 15" not in str(caught.value)


def test_a_pipe_in_place_of_a_key_file_does_not_hang(tmp_path: Path) -> None:
    """A fifo, a folder and a huge file are refused at once."""
    pipe, huge = tmp_path / "pipe", tmp_path / "huge"
    os.mkfifo(pipe)
    huge.write_bytes(b"x" * 100_000)
    for path in (pipe, tmp_path, huge):
        with pytest.raises(ConfigError):
            KeyRef("file", str(path)).load()


def test_without_a_key_one_is_made_once_private_and_announced(tmp_path: Path) -> None:
    """GIVEN no secrets.key WHEN asked twice THEN one file of mode 0600, one warning, one and the same key."""
    data = tmp_path / "data"
    ref, warning = key_for(None, data, shared_state=False)
    again, silence = key_for(None, data, shared_state=False)
    path = data / "secrets.key"
    assert ref == again == KeyRef("file", str(path))
    assert warning is not None
    assert str(path) in warning
    assert path.read_text().strip() not in warning
    assert silence is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert list(data.iterdir()) == [path]
    assert SecretBox(again).open(SecretBox(ref).seal("x")) == "x"


def test_a_given_key_is_used_and_nothing_is_made(tmp_path: Path) -> None:
    """A configured reference is passed on as it is."""
    given_ref = KeyRef("env", "EVERMARK_KEY")
    assert key_for(given_ref, tmp_path / "data", shared_state=False) == (given_ref, None)
    assert not (tmp_path / "data").exists()


def test_a_made_key_with_shared_state_warns_that_all_instances_need_it(tmp_path: Path) -> None:
    """Two instances with a key each could not open each other's secrets."""
    _, warning = key_for(None, tmp_path, shared_state=True)
    assert warning is not None
    assert "same key" in warning


def test_a_key_file_others_can_read_is_pointed_out(tmp_path: Path) -> None:
    """A loosened mode is reported with the command that repairs it."""
    key_for(None, tmp_path, shared_state=False)
    (tmp_path / "secrets.key").chmod(0o644)
    _, warning = key_for(None, tmp_path, shared_state=False)
    assert warning is not None
    assert "chmod 600" in warning


def test_many_starting_at_once_agree_on_one_key(tmp_path: Path) -> None:
    """GIVEN several beginners at once THEN exactly one makes the key, and all read the same whole one."""
    barrier = threading.Barrier(8)
    seen: list[tuple[bytes, str | None]] = []

    def begin() -> None:
        barrier.wait()
        ref, warning = key_for(None, tmp_path, shared_state=False)
        seen.append((ref.load(), warning))

    threads = [threading.Thread(target=begin) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 8
    assert len({key for key, _ in seen}) == 1
    assert sum(warning is not None for _, warning in seen) == 1
