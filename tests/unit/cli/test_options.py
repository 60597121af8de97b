"""Options that are the keys of a config model: each field is one, with its name, type, help and place in the file."""

from __future__ import annotations

from typing import Annotated, Any

import pytest
import typer
from pydantic import Field
from typer.testing import CliRunner, Result

from evermark.cli.main import loaded
from evermark.cli.options import Given, keys_as_options
from evermark.cli.subscription import NOT_OPTIONS
from evermark.config import BotConfig, SubscriptionConfig


class Newer(SubscriptionConfig):
    """The config of a later version, with keys of every form."""

    colour: Annotated[str, Field(title="Shade", description="The colour of the envelope.")] = "white"
    weight_limit: Annotated[int, Field(ge=1, description="Grams at most.")] = 20
    stamped: Annotated[bool, Field(description="Put a stamp on it.")] = False
    seals: Annotated[tuple[str, ...], Field(description="Only with this seal.")] = ()
    labels: Annotated[dict[str, str], Field(description="A label.")] = Field(default_factory=dict)
    street: Annotated[str, Field(description="Where it goes.")]


def command(seen: list[Given], **how: Any) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    @keys_as_options(Newer, **how)
    def add(name: Annotated[str, typer.Argument()], given: Given, loud: bool = False) -> None:
        assert name == "mail" and loud is False
        seen.append(given)

    return app


def run(*words: str, **how: Any) -> tuple[Result, Given]:
    seen: list[Given] = []
    result = CliRunner().invoke(command(seen, **how), ["mail", *words], env={"COLUMNS": "120"})
    return result, seen[0] if seen else {}


def test_a_new_field_is_an_option_at_once() -> None:
    """GIVEN a model with new fields WHEN a command has its keys as options THEN each is there and given as a key."""
    words = ("--colour", "red", "--weight-limit", "5", "--stamped", "--seal", "a,b", "--seals", "c", "--label", "x=y=z")
    result, given = run("--url", "https://x.example/", "--street", "Elm", *words, "--from", "now")
    assert result.exit_code == 0, result.output
    assert given == {
        "url": "https://x.example/",
        "street": "Elm",
        "colour": "red",
        "weight_limit": 5,
        "stamped": True,
        "seals": ["a", "b", "c"],
        "labels": {"x": "y=z"},
        "from": "now",
    }
    text = " ".join(run("--help")[0].output.split())
    for said in (
        "--street STREET Where it goes. [required]",
        "--colour SHADE The colour of the envelope.",
        "--weight-limit N Grams at most.",
        "--stamped / --no-stamped Put a stamp on it.",
        "--seals, --seal SEAL Only with this seal. Repeat it, or write a,b.",
        "--label NAME=VALUE A label. Repeatable.",
    ):
        assert said in text, text


def test_what_is_not_given_is_not_a_key_and_an_empty_text_is_the_default() -> None:
    """GIVEN no option is required WHEN some are given empty THEN only those are keys, and mean the default."""
    result, given = run("--colour", "", "--seals", "", "--label", "", "--no-stamped", optional=True)
    assert result.exit_code == 0, result.output
    assert given == {"colour": None, "seals": None, "labels": None, "stamped": False}
    assert run(optional=True)[1] == {}


def test_wrong_options_are_refused() -> None:
    """GIVEN a missing, mistyped or left-out option WHEN run THEN usage is wrong; a mapping needs its form."""
    assert run("--url", "https://x.example/")[0].exit_code == 2
    assert run("--weight-limit", "many", optional=True)[0].exit_code == 2
    assert run("--colour", "red", optional=True, but=("colour",))[0].exit_code == 2
    wrong = run("--label", "nonsense", optional=True)[0]
    assert "--label: expected NAME=VALUE" in str(wrong.exception)


@pytest.mark.parametrize(("noun", "model"), [("subscription", SubscriptionConfig), ("bot", BotConfig)])
def test_every_key_of_the_file_is_an_option_of_add(noun: str, model: type[SubscriptionConfig]) -> None:
    """GIVEN the keys of a section WHEN compared with `add` THEN each is an option with a help, but for the named."""
    parameters = loaded(noun).commands["add"].params
    options = {each.name: each for each in parameters if each.name.startswith("key_")}
    assert {name.removeprefix("key_") for name in options} == set(model.keys()) - set(NOT_OPTIONS)
    assert all(len(each.help) > 5 for each in options.values())
