"""Options that commands share; and options that are the keys of a config model, a new field an option at once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from evermark.errors import ConfigError

if TYPE_CHECKING:
    from evermark.settings.fields import Model

ConfigOption = Annotated[Path, typer.Option("--config", "-c", envvar="EVERMARK_CONFIG", help="The deployment's file.")]
DEFAULT_CONFIG = Path("evermark.yaml")
JsonOption = Annotated[bool, typer.Option("--json", help="Report as JSON, for programs.")]
YesOption = Annotated[bool, typer.Option("--yes", help="Do not ask.")]
Given = Mapping[str, Any]  # the keys that were given; None for a key that is to have its default
Command = Callable[..., None]

_NEGATED = {"ordered": "unordered"}  # a flag whose opposite has a word of its own
_TYPES: dict[Any, Any] = {"integer": int, "boolean": bool, "array": list[str], "object": list[str]}
_MORE = {"array": " Repeat it, or write a,b.", "object": " Repeatable."}


def keys_as_options(
    model: type[Model], *, but: Collection[str] = (), optional: bool = False
) -> Callable[[Command], Command]:
    """Give a command an option for each key of `model`, `but` for these, in place of its parameter `given`.

    The key's name, type and description become the option's; its title stands for the value. The option of a list or
    mapping may be repeated. With `optional` no option is required, whatever the model says.
    """
    schema = model.model_json_schema()
    keys = {f"key_{key}": (key, each) for key, each in schema["properties"].items() if key not in but}
    required = () if optional else schema.get("required", ())
    options = [_option(name, key, each, required=key in required) for name, (key, each) in keys.items()]
    options.sort(key=lambda option: option.default is None)  # required options stand first in the help

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def run(**values: Any) -> None:
            typed = {key: (each, values.pop(name)) for name, (key, each) in keys.items()}
            given = {key: _value(key, each, value) for key, (each, value) in typed.items() if value not in (None, [])}
            command(**values, given=given)

        parameters: list[inspect.Parameter] = []
        for each in inspect.signature(command, eval_str=True).parameters.values():
            parameters += options if each.name == "given" else [each.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        vars(run)["__signature__"] = inspect.Signature(parameters)
        run.__annotations__ = {each.name: each.annotation for each in parameters}
        return run

    return decorate


def _option(name: str, key: str, schema: Mapping[str, Any], *, required: bool) -> inspect.Parameter:
    kind, word = str(schema.get("type")), key.replace("_", "-")
    metavar = str(schema.get("title", key)).upper().replace(" ", "_")
    names = [f"--{word}"]
    if kind == "integer":
        metavar = "N"
    elif kind == "boolean":
        names = [f"--{word}/--{_NEGATED.get(word, f'no-{word}')}"]
    elif kind == "array":
        names, metavar = [f"--{word}", f"--{word.removesuffix('s')}"], metavar.removesuffix("S")
    elif kind == "object":
        names, metavar = [f"--{word.removesuffix('s')}"], "NAME=VALUE"
    option = typer.Option(
        *dict.fromkeys(names),
        metavar=None if kind == "boolean" else metavar,
        help=schema.get("description", "") + _MORE.get(kind, ""),
        show_default=False,
    )
    return inspect.Parameter(
        name,
        inspect.Parameter.KEYWORD_ONLY,
        default=inspect.Parameter.empty if required else None,
        annotation=Annotated[_TYPES.get(kind, str) if required else _TYPES.get(kind, str) | None, option],
    )


def _value(key: str, schema: Mapping[str, Any], value: Any) -> Any:
    """The value as the file would have it; an empty text is the default."""
    if schema.get("type") == "object":
        return _mapping(key, value)
    if isinstance(value, list):
        return [part.strip() for text in value for part in text.split(",") if part.strip()] or None
    return None if value == "" else value


def _mapping(key: str, texts: list[str]) -> dict[str, str] | None:
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals and text:
            option = f"--{key.removesuffix('s')}"
            raise ConfigError(f"{option}: expected NAME=VALUE", hint=f"for example {option} X-Team=billing")
        if name:
            found[name.strip()] = value
    return found or None
