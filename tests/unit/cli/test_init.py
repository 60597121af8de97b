"""`evermark init`: the starter file is right, and nothing is overwritten."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from evermark.cli.init import STARTER, starter, write_starter
from evermark.cli.main import app
from evermark.config import Config
from evermark.config.subscriptions import SubscriptionConfig
from evermark.errors import ConfigError
from evermark.secrets import KeyRef
from evermark.storage.access import VARIABLE
from tests.unit.config.config_file import read


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("config")


def switched_on(text: str) -> str:
    """With every commented setting (a `#` without a space) in effect."""
    return re.sub(r"(?m)^( *)#(?!\s[A-Z])", r"\1", text)


def test_the_starter_file_loads_as_it_stands_and_with_everything_switched_on(folder: Path) -> None:
    """What we hand out is right, and so is each setting it offers."""
    assert read(folder, starter("My Shop!")).name == "my-shop"
    everything = read(folder, switched_on(starter("shop")))
    assert everything.secrets.key == KeyRef("env", "EVERMARK_KEY")
    assert everything.subscriptions["billing"].rate == 50
    assert everything.model_fields_set == set(Config.model_fields)
    assert set(SubscriptionConfig.keys()) - set(re.findall(r"\w+", STARTER)) == set()


def test_the_starter_file_offers_only_what_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN everything it offers, switched on WHEN it is checked THEN nothing is wrong, nothing is without effect."""
    for name in ("SHOP_DSN", "STATE_DSN"):
        monkeypatch.setenv(name, "postgresql://db/shop")
    monkeypatch.setenv("BILLING_SECRET", "whsec_" + "A" * 43 + "=")
    monkeypatch.setenv("EVERMARK_KEY", "k" * 44)
    monkeypatch.setenv("OPS_TOKEN", "t" * 32)
    for name in ("S3_ACCESS_KEY", "S3_SECRET_KEY"):
        monkeypatch.setenv(name, "k" * 8)
    monkeypatch.setenv(VARIABLE, "{}")  # the command sets it, for its process
    path = tmp_path / "evermark.yaml"
    path.write_text(switched_on(starter("shop")))
    ran = CliRunner().invoke(app, ["config", "check", "-c", str(path), "--json"])
    assert [row for row in json.loads(ran.stdout)["findings"] if row["grade"] != "ok"] == []


def test_init_says_the_next_commands_in_their_order(tmp_path: Path) -> None:
    """GIVEN a file that was written THEN the secret's command, the check, install and up follow, for that file."""
    path = tmp_path / "mine.yaml"
    said = CliRunner().invoke(app, ["init", "-c", str(path)]).stdout
    order = ["evermark subscription secret", "evermark config check", "evermark source install", "evermark up"]
    places = [said.index(command) for command in order]
    assert places == sorted(places)
    assert f"evermark up -c {path}" in said


@given(name=st.text(max_size=60))
@example(name="no")
@example(name="2026")
@settings(max_examples=30, deadline=None)  # each is a whole file
def test_a_folder_of_any_name_gives_a_valid_starter(folder: Path, name: str) -> None:
    """The deployment's name is always one that loads."""
    read(folder, starter(name))


def test_init_does_not_overwrite_without_force(tmp_path: Path) -> None:
    """An existing file is left as it is, and no draft is left behind."""
    path = tmp_path / "evermark.yaml"
    path.write_text("mine")
    with pytest.raises(ConfigError, match="exists already") as caught:
        write_starter(path)
    assert "--force" in caught.value.hint
    assert path.read_text() == "mine"
    write_starter(path, force=True)
    assert "version: 1" in path.read_text()
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(ConfigError, match="cannot write"):
        write_starter(tmp_path / "absent" / "evermark.yaml")
