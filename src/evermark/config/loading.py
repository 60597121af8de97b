"""From a file to a `Config`, or to one error that says everything that is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from pydantic import ValidationError

from evermark.config.document import Document, read_document
from evermark.config.models import VERSION, Config
from evermark.config.variables import SEALING_KEY, Expanded
from evermark.errors import ConfigError
from evermark.settings.fields import KeyNotes
from evermark.settings.problems import KeyPath, Problem, from_validation, refused

# What is kept as a reference: executors are told where the key is, never what it is.
_REFERENCES: frozenset[KeyPath] = frozenset({SEALING_KEY, ("storage", "access_key"), ("storage", "secret_key")})


def load(path: str | Path, environ: Mapping[str, str] | None = None) -> Config:
    """Read, fill in, check and complete a file. Raises `ConfigError`, never with a value from a variable in it."""
    file = Path(path).expanduser().absolute()
    document = read_document(file)
    _check_version(document, file.name)
    expanded = Expanded(document.values, os.environ if environ is None else environ, file.parent, _REFERENCES)
    notes = KeyNotes()
    problems = list(expanded.problems)
    try:
        config = _complete(Config.model_validate(expanded.values, context=notes), file.parent)
    except ValidationError as error:
        found = from_validation(error, expanded.values, notes.known, expanded.from_variables)
        unread = {problem.path for problem in expanded.problems}
        # What a missing variable left behind is not worth a second complaint.
        problems += [problem for problem in found if not any(problem.path[: len(at)] == at for at in unread)]
    if problems:
        located = (replace(p, line=p.line or document.line(p.path)) for p in problems)
        raise refused(file.name, located) from None
    return config


def _check_version(document: Document, name: str) -> None:
    """First of all: in a newer version other keys may be right."""
    version = document.values.get("version")
    if version == VERSION and not isinstance(version, bool):
        return
    text, hint = f"expected {VERSION}", f"write: version: {VERSION}"
    if version is None:
        text, hint = "is required", f"add the line: version: {VERSION}"
    elif isinstance(version, int) and not isinstance(version, bool) and version > VERSION:
        text, hint = f"the file has a newer version than this program understands ({VERSION})", "upgrade evermark"
    raise refused(name, [Problem(("version",), text, hint, document.line(("version",)))])


def _complete(config: Config, folder: Path) -> Config:
    data = _absolute(str(config.data), folder)
    path = config.log.path
    if path is None:
        path = str(data / "log")
    elif "://" not in path:
        path = str(_absolute(path, folder))
    return config.model_copy(
        update={
            "data": data,
            "log": config.log.model_copy(update={"path": path}),
            "sources": {name: source.named(config.name, name) for name, source in config.sources.items()},
        }
    )


def _absolute(text: str, folder: Path) -> Path:
    try:
        return Path(os.path.normpath(folder / Path(text).expanduser()))
    except RuntimeError:
        raise ConfigError("a path begins with ~, and there is no home folder", hint="write the path out") from None
