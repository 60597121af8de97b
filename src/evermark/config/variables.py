"""`${VAR}`, `${VAR:-default}` and `${file:/path}` in the text values of a file.

A value that came from a variable is text and nothing else: it is not read as YAML, and `${…}` in it means nothing.
`$${` is a plain `${`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from evermark.errors import ConfigError
from evermark.secrets import VARIABLE, KeyRef, read_small_file
from evermark.settings.problems import KeyPath, Problem

_REFERENCE = re.compile(r"\$\$\{|\$\{([^{}]*)\}|\$\{")
SEALING_KEY: KeyPath = ("secrets", "key")
_FORM = "write ${NAME}, ${NAME:-default} or ${file:/path}; a plain ${ is written $${"


class Expanded:
    """`values` with the variables of all texts filled in; which of them came from variables; what could not be read.

    At the paths in `references` the value is not read: it becomes the `KeyRef` that says where it is.
    """

    def __init__(
        self, values: Any, environ: Mapping[str, str], folder: Path, references: frozenset[KeyPath] = frozenset()
    ) -> None:
        self._environ, self._folder, self._references = environ, folder, references
        self.from_variables: set[KeyPath] = set()
        self.problems: list[Problem] = []
        self.values = self._walk(values, ())

    def _walk(self, value: Any, path: KeyPath) -> Any:
        if isinstance(value, dict):
            return {key: self._walk(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._walk(item, (*path, index)) for index, item in enumerate(value)]
        if not isinstance(value, str):
            return value
        try:
            if path in self._references:
                return self._reference(value, path)
            text = _REFERENCE.sub(self._fill, value)
        except ConfigError as error:
            said = error.message.removeprefix("a value: ").removeprefix(f"{'.'.join(map(str, path))}: ")
            self.problems.append(Problem(path, said, error.hint))
            return value
        if _REFERENCE.search(value):
            self.from_variables.add(path)
        return text

    def _fill(self, match: re.Match[str]) -> str:
        if match[0] == "$${":
            return "${"
        inside = match[1]
        if inside is None:
            raise ConfigError("a ${ without its }", hint=_FORM)
        if inside.startswith("file:"):
            path = self._file(inside)
            try:
                text = read_small_file(path, "a value").decode("utf-8")
            except UnicodeDecodeError:
                hint = "name a file that holds only the value"
                raise ConfigError(f"the file {path} is not UTF-8 text", hint=hint) from None
            return text.removesuffix("\n").removesuffix("\r")
        name, separator, default = inside.partition(":-")
        if not VARIABLE.fullmatch(name):
            raise ConfigError("a ${…} that names no variable", hint=_FORM)
        value = self._environ.get(name)
        if separator:
            return value or default
        if value is None:
            raise ConfigError(f"the variable {name} is not set", hint=f"set it: export {name}=…")
        return value

    def _reference(self, value: str, path: KeyPath) -> KeyRef:
        match = _REFERENCE.fullmatch(value)
        inside = match[1] if match else None
        if not inside or ":-" in inside or not (inside.startswith("file:") or VARIABLE.fullmatch(inside)):
            # A key that is written out cannot be referred to, and would be read by all who can read the file.
            raise ConfigError(
                "a key is given by reference only, not written out",
                hint="write ${file:/run/secrets/evermark} or ${EVERMARK_KEY}",
            )
        ref = KeyRef("file", str(self._file(inside))) if inside.startswith("file:") else KeyRef("env", inside)
        if path == SEALING_KEY:
            ref.load(self._environ)
        else:
            ref.read(".".join(map(str, path)), self._environ)
        return ref

    def _file(self, inside: str) -> Path:
        name = inside.removeprefix("file:")
        if not name or "\0" in name:
            raise ConfigError("a ${file:…} without a path", hint=_FORM)
        return (self._folder / name).absolute()
