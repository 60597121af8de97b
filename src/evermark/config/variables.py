"""`${VAR}`, `${VAR:-default}` and `${file:/path}` in the text values of a file.

A value that came from a variable is text and nothing else: it is not read as YAML, and `${…}` in it means nothing.
`$${` is a plain `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evermark.errors import ConfigError
from evermark.secrets import VARIABLE, KeyRef, read_small_file
from evermark.settings.problems import KeyPath, Problem

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
_FORM = "write ${NAME}, ${NAME:-default} or ${file:/path}; a plain ${ is written $${"


@dataclass
class Expanded:
    values: Any
    from_variables: set[KeyPath] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


class _UnreadableError(Exception):
    def __init__(self, text: str, hint: str) -> None:
        super().__init__(text)
        self.text = text
        self.hint = hint


def expand(values: Any, environ: Mapping[str, str], folder: Path, references: frozenset[KeyPath]) -> Expanded:
    """All text values with their variables filled in.

    At the paths in `references` the value is not read: it becomes the `KeyRef` that says where it is.
    """
    expanded = Expanded(None)
    expanded.values = _walk(values, (), environ, folder, references, expanded)
    return expanded


def _walk(
    value: Any,
    path: KeyPath,
    environ: Mapping[str, str],
    folder: Path,
    references: frozenset[KeyPath],
    expanded: Expanded,
) -> Any:
    if isinstance(value, dict):
        return {key: _walk(item, (*path, key), environ, folder, references, expanded) for key, item in value.items()}
    if isinstance(value, list):
        return [_walk(item, (*path, index), environ, folder, references, expanded) for index, item in enumerate(value)]
    if not isinstance(value, str):
        return value
    try:
        if path in references:
            return _reference(value, environ, folder)
        text = _filled(value, environ, folder)
    except _UnreadableError as missing:
        expanded.problems.append(Problem(path, missing.text, missing.hint))
        return value
    if _REFERENCE.search(value):
        expanded.from_variables.add(path)
    return text


def _filled(value: str, environ: Mapping[str, str], folder: Path) -> str:
    def fill(match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        if match[1] is None:
            raise _UnreadableError("a ${ without its }", _FORM)
        return _looked_up(match[1], environ, folder)

    return _REFERENCE.sub(fill, value)


def _looked_up(inside: str, environ: Mapping[str, str], folder: Path) -> str:
    if inside.startswith("file:"):
        path = _file(inside, folder)
        try:
            data = read_small_file(path, "a value")
        except ConfigError as error:
            raise _UnreadableError(error.message.removeprefix("a value: "), error.hint) from None
        try:
            text = data.decode("utf-8")
        except UnicodeDecodeError:
            raise _UnreadableError(
                f"the file {path} is not UTF-8 text", "name a file that holds only the value"
            ) from None
        return text.removesuffix("\n").removesuffix("\r")
    name, separator, default = inside.partition(":-")
    if not VARIABLE.fullmatch(name):
        raise _UnreadableError("a ${…} that names no variable", _FORM)
    value = environ.get(name)
    if separator:
        return value or default
    if value is None:
        raise _UnreadableError(f"the variable {name} is not set", f"set it: export {name}=…")
    return value


def _reference(value: str, environ: Mapping[str, str], folder: Path) -> KeyRef:
    match = _REFERENCE.fullmatch(value)
    inside = match[1] if match else None
    if not inside or ":-" in inside or not (inside.startswith("file:") or VARIABLE.fullmatch(inside)):
        # A key that is written out cannot be referred to, and would be read by all who can read the file.
        raise _UnreadableError(
            "a key is given by reference only, not written out",
            "write ${file:/run/secrets/evermark} or ${EVERMARK_KEY}",
        )
    ref = KeyRef("file", str(_file(inside, folder))) if inside.startswith("file:") else KeyRef("env", inside)
    try:
        ref.load(environ)
    except ConfigError as error:
        raise _UnreadableError(error.message.removeprefix("secrets.key: "), error.hint) from None
    return ref


def _file(inside: str, folder: Path) -> Path:
    name = inside.removeprefix("file:")
    if not name or "\0" in name:
        raise _UnreadableError("a ${file:…} without a path", _FORM)
    return (folder / name).absolute()
