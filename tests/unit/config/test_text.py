"""The text of evermark.yaml: slips in keys and broken YAML are pointed at."""

from __future__ import annotations

import re
import string
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from evermark.config import load
from evermark.config.document import FILE_BYTES_MAX
from evermark.errors import ConfigError
from evermark.settings.fields import Model
from evermark.settings.problems import nearest
from tests.unit.config.config_file import MINIMAL, every_model, read, refused, source, subscription


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


MODELS = every_model()


def one_slip_apart(word: str, other: str) -> bool:
    """One letter more, less or other, or two neighbours swapped."""
    if len(word) == len(other):
        differing = [at for at in range(len(word)) if word[at] != other[at]]
        swapped = len(differing) == 2 and word[differing[0]] == other[differing[1]]
        return len(differing) <= 1 or (swapped and word[differing[1]] == other[differing[0]])
    short, long = sorted((word, other), key=len)
    return len(long) == len(short) + 1 and any(long[:at] + long[at + 1 :] == short for at in range(len(long)))


@st.composite
def slips(draw: st.DrawFn) -> tuple[type[Model], str, str]:
    model = draw(st.sampled_from(MODELS))
    key = draw(st.sampled_from(model.keys()))
    at = draw(st.integers(0, len(key) - 1))
    letter = draw(st.sampled_from(string.ascii_lowercase))
    slip = draw(st.sampled_from(["drop", "add", "change", "swap"]))
    if slip == "drop":
        return model, key, key[:at] + key[at + 1 :]
    if slip == "add":
        return model, key, key[:at] + letter + key[at:]
    if slip == "change":
        return model, key, key[:at] + letter + key[at + 1 :]
    return model, key, key[:at] + key[at + 1 : at + 2] + key[at] + key[at + 2 :]


@given(slip=slips())
def test_any_slip_in_a_key_suggests_the_key_that_was_meant(slip: tuple[type[Model], str, str]) -> None:
    """GIVEN one slip of the finger in a known key THEN that key is suggested, or one as near."""
    model, key, typed = slip
    assume(typed not in model.keys())  # noqa: SIM118 - keys() is ours, not a dict's
    found = nearest(typed, model.keys())
    assert found is not None
    assert found == key or one_slip_apart(found, typed)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (MINIMAL + "souces: {}\n", "souces: unknown key; did you mean sources?"),
        (MINIMAL + "log: {retension: 3d}\n", "log.retension: unknown key; did you mean retention?"),
        (source(schem="x"), "sources.shop.schem: unknown key; did you mean schema?"),
        (source(schema_name="x"), "sources.shop.schema_name: unknown key; did you mean schema?"),
        (source(tables="[{nam: a}]"), "sources.shop.tables[0].nam: unknown key; did you mean name?"),
        (subscription(frm="now"), "subscriptions.billing.frm: unknown key; did you mean from?"),
        (
            MINIMAL + "reliability: {shutdown: {flush_timeot: 1s}}\n",
            "reliability.shutdown.flush_timeot: unknown key; did you mean flush_timeout?",
        ),
    ],
)
def test_an_unknown_key_is_an_error_that_names_the_nearest(folder: Path, text: str, told: str) -> None:
    """At every depth, with its path."""
    assert told in refused(folder, text).message


@pytest.mark.parametrize("typed", ["retries", "max_attempts", "endpoint", "filter", "table", "name", "type", "token"])
def test_a_key_that_is_only_a_little_alike_is_not_suggested(folder: Path, typed: str) -> None:
    """A wrong guess misleads: `retries` is not `streams`. What may stand there is listed all the same."""
    error = refused(folder, subscription(**{typed: "x"}))
    assert f"subscriptions.billing.{typed}: unknown key" in error.message
    assert "did you mean" not in error.message
    assert "known here: url, secret, streams" in error.hint


def test_a_key_like_no_other_lists_what_is_known(folder: Path) -> None:
    """Without a near one, the hint says what may stand there."""
    error = refused(folder, MINIMAL + "log: {zzzzzz: 1}\n")
    assert "log.zzzzzz: unknown key" in error.message
    assert "path, retention" in error.hint


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("version: 1\nname: [a\n", r"line 3, column 1"),
        ("version: 1\n\tname: a\n", r"line 2, column 1"),
        ("version: 1\nname: 'a\n", r"line \d, column \d"),
        ("version: 1\nname: a\u0007b\n", r"line 2, column 8: a character"),
        ("version: 1\nname: *a\n", r"line 2, column 7: aliases"),
        ("version: 1\nname: !!python/object:os.system a\n", r"line 2, column 7"),
        ("version: 1\n---\nversion: 1\n", r"line 2, column 1"),
        ("version: 1\nname: a\nname: b\n", r"line 3: name: the key stands here twice \(first in line 2\)"),
        ("version: 1\nlog: {path: a, path: b}\n", r"log\.path: the key stands here twice"),
        ("version: 1\n2: a\n", r"line 2: the key 2 is not text"),
        ("version: 1\n[a]: a\n", r"line 2: a key is not text"),
        ("version: 1\nname: " + "[" * 100 + "]" * 100, r"nested deeper"),
        ("- version\n", r"line 1: expected a mapping"),
        ("", r"is empty"),
        ("# only a comment\n", r"is empty"),
        ("version: 1\nname: !!int x\n", r"a value cannot be read"),
        ('version: 1\nname: !!int ""\n', r"a value cannot be read"),
        ('version: 1\nname: !!float ""\n', r"a value cannot be read"),
        ("version: 1\nname: !!bool maybe\n", r"a value cannot be read"),
        ("version: 1\nname: !!timestamp tomorrow\n", r"a value cannot be read"),
    ],
)
def test_malformed_yaml_is_told_with_line_and_column(folder: Path, text: str, told: str) -> None:
    """Whatever is wrong with the text, the error points at it."""
    error = refused(folder, text)
    assert re.search(told, error.message), error.message
    assert "evermark.yaml" in error.message


def test_a_missing_huge_or_binary_file_is_a_clear_error(folder: Path) -> None:
    """Not even the wrong file makes a traceback."""
    (folder / "big.yaml").write_bytes(b"# " + b"x" * FILE_BYTES_MAX)
    (folder / "binary.yaml").write_bytes(b"version: 1\nname: \xff\xfe\n")
    for name, told in (
        ("absent.yaml", "there is no file"),
        ("big.yaml", "larger"),
        ("binary.yaml", "line 2: not UTF-8"),
    ):
        with pytest.raises(ConfigError, match=told):
            load(folder / name, {})
    with pytest.raises(ConfigError, match="cannot read"):
        load(folder, {})


@given(text=st.text(st.sampled_from("ab:-[]{}#&*!|>'\"%@` \n\t0$"), max_size=40))
def test_no_text_makes_anything_but_a_config_or_a_config_error(folder: Path, text: str) -> None:
    """Random YAML-like text never escapes as another exception."""
    try:
        read(folder, MINIMAL + text, {})
    except ConfigError:
        return


@pytest.mark.parametrize(
    ("version", "told"), [("2", "newer version"), ("0", "expected 1"), ("'1'", "expected 1"), ("true", "expected 1")]
)
def test_only_version_1_is_read_and_a_newer_one_says_upgrade(folder: Path, version: str, told: str) -> None:
    """A newer file is refused for its version, not for keys this program cannot know."""
    assert told in refused(folder, f"version: {version}\nname: a\nnew_key: 1\n").message
    assert "add the line: version: 1" in refused(folder, "name: a\n").hint
