"""`evermark bot` against a real state: made, shown, removed, and its session keys."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from evermark.app.build import open_deployment
from evermark.cli.main import app
from evermark.config import load
from evermark.errors import ConfigError

SECRET = "whsec_" + "A" * 43 + "="
FILE = """
version: 1
name: shop
state: {dsn: "${PG_DSN}"}
server: {listen: "127.0.0.1:0"}
sources:
  chat: {type: postgres, dsn: "${PG_DSN}", tables: [public.orders]}
bots:
  filed: {url: "https://filed.example/", secret: "${SECRET}", source: chat, user: filed-bot}
"""


@pytest.fixture
def file(tmp_path: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PG_DSN", pg_dsn)
    monkeypatch.setenv("SECRET", SECRET)
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE)
    return path


def run(file: Path, *args: str, given: str | None = None) -> Result:
    return CliRunner().invoke(app, ["bot", *args, "--config", str(file)], input=given)


def told(result: Result) -> Any:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


ADD = ("--url", "https://helper.example/hooks", "--source", "chat", "--user", "helper-bot", "--device", "phone")


def test_a_bot_is_made_shown_given_keys_and_removed(file: Path) -> None:
    """GIVEN a deployment WHEN a bot is added THEN it is listed and shown, takes keys and tells them, and goes."""
    made = told(run(file, "add", "helper", *ADD, "--mode", "none", "--secret", SECRET, "--json"))
    assert (made["user"], made["mode"], made["device"]) == ("helper-bot", "none", "phone")
    assert [bot["name"] for bot in told(run(file, "list", "--json"))] == ["helper"]
    assert told(run(file, "show", "helper", "--json"))["source"] == "chat"
    keys = json.dumps({f"s{n:03}": f"key {n}" for n in range(150)})
    published = told(run(file, "keys", "helper", "--publish", "-", "--json", given=keys))
    assert published == {"published": 150, "released": 0}
    listed = told(run(file, "keys", "helper", "--json"))
    assert len(listed) == 150 and "key" not in listed[0]
    assert run(file, "keys", "helper", "--session", "s007").stdout.strip() == "key 7"
    assert run(file, "keys", "helper", "--withdraw", "s007").exit_code == 0
    assert run(file, "keys", "helper", "--session", "s007").exit_code == 1
    changed = told(run(file, "set", "helper", "--mode", "all", "--device", "", "--json"))
    assert (changed["user"], changed["mode"], changed["device"]) == ("helper-bot", "all", None)
    assert run(file, "remove", "helper", "--yes").exit_code == 0
    assert told(run(file, "list", "--json")) == []


@pytest.mark.parametrize(
    "args",
    [
        ("add", "helper", *ADD[:2], "--source", "nowhere", "--user", "x", "--secret", SECRET),
        ("add", "helper", *ADD, "--mode", "some", "--secret", SECRET),
        ("add", "helper", *ADD),
        ("show", "nobody"),
        ("keys", "nobody"),
        ("keys", "helper", "--publish", "missing.json"),
        ("keys", "helper", "--publish", "-", "--session", "s"),
        ("keys", "helper", "--session", "s", "--withdraw", "s"),
        ("set", "nobody", "--mode", "all"),
        ("set", "helper"),
    ],
)
def test_what_cannot_be_done_says_why(file: Path, args: tuple[str, ...]) -> None:
    """GIVEN something wrong THEN exit code 1 and a line that says what, without a trace."""
    result = run(file, *args)
    assert result.exit_code == 1 and "Traceback" not in result.output and result.output.strip()


def test_a_bot_of_a_source_that_is_not_there_is_named(file: Path) -> None:
    """GIVEN a bot of the file whose source is misspelt THEN nothing starts, and the key is named."""
    file.write_text(FILE.replace("source: chat", "source: chatt"))
    with pytest.raises(ConfigError, match=r"bots\.filed\.source"):
        open_deployment(load(file))
