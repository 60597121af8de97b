"""Reading a YAML file into plain values, strictly, with the line of every key."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import yaml

from evermark.errors import ConfigError
from evermark.settings.problems import KeyPath, Problem, refused

FILE_BYTES_MAX = 4 * 1024 * 1024  # ten thousand subscriptions and more
DEPTH_MAX = 32


@dataclass
class Document:
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[KeyPath, int] = field(default_factory=dict)  # counted from 1

    def line(self, path: KeyPath) -> int | None:
        """The line of `path`, or of what is nearest around it when the path itself is absent."""
        for end in range(len(path), 0, -1):
            if path[:end] in self.lines:
                return self.lines[path[:end]]
        return None


class _Loader(yaml.SafeLoader):
    """Safe, without aliases (they can make a small file huge), and bounded in depth."""

    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event: Any = cast(Any, self).peek_event()
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise yaml.MarkedYAMLError(problem="aliases (*name) are not allowed here", problem_mark=mark)
        self.depth += 1
        if self.depth > DEPTH_MAX:
            raise yaml.MarkedYAMLError(problem=f"nested deeper than {DEPTH_MAX} levels", problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


# `from: 2026-11-01` is a time for us to read, with our rules and our error, not a YAML date.
_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_document(path: Path) -> Document:
    return parse_document(_read_text(path), path.name)


def parse_document(text: str, name: str) -> Document:
    """The file's values. Duplicate keys, aliases, several documents and keys that are no text are errors."""
    document, problems = Document(), list[Problem]()
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            raise ConfigError(f"{name} is empty", hint=f"write a starter file with: evermark init -c {name} --force")
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{name}, line {root.start_mark.line + 1}: expected a mapping of keys to values",
                hint="a file begins with: version: 1",
            )
        document.values = _value(loader, root, (), document.lines, problems)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        what = error.problem or error.context or "not understood"
        raise ConfigError(f"{name}{where}: {what}", hint=_yaml_hint(what)) from None
    except yaml.reader.ReaderError as error:
        before = text[: error.position]
        line, column = before.count("\n") + 1, len(before) - before.rfind("\n")
        raise ConfigError(
            f"{name}, line {line}, column {column}: a character that YAML does not allow", hint="remove it, or quote it"
        ) from None
    except (ValueError, OverflowError, LookupError, AttributeError) as error:  # a number or tag that YAML cannot make
        raise ConfigError(f"{name}: a value cannot be read ({type(error).__name__})", hint="quote it") from None
    if problems:
        raise refused(name, problems)
    return document


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(FILE_BYTES_MAX + 1)
    except FileNotFoundError:
        raise ConfigError(f"there is no file {path}", hint="write a starter file with: evermark init") from None
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {(error.strerror or 'unknown reason').lower()}") from None
    if len(data) > FILE_BYTES_MAX:
        raise ConfigError(f"{path.name} is larger than {FILE_BYTES_MAX} bytes", hint="is it the right file?")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path.name}, line {line}: not UTF-8 text", hint="save the file as UTF-8") from None


def _value(loader: Any, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], problems: list[Problem]) -> Any:
    if isinstance(node, yaml.MappingNode):
        found: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            key = key_node.value if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key_node.tag != "tag:yaml.org,2002:str":
                shown = "a key" if key is None else f"the key {key}"
                problems.append(Problem(path, f"{shown} is not text", "put quotes around it", line))
                continue
            if key in found:
                first = lines[(*path, key)]
                text = f"the key stands here twice (first in line {first})"
                problems.append(Problem((*path, key), text, "keep one of them", line))
                continue
            lines[(*path, key)] = line
            found[key] = _value(loader, value_node, (*path, key), lines, problems)
        return found
    if isinstance(node, yaml.SequenceNode):
        items: list[Any] = []
        for index, item in enumerate(node.value):
            lines[(*path, index)] = item.start_mark.line + 1
            items.append(_value(loader, item, (*path, index), lines, problems))
        return items
    return loader.construct_object(node)


def _yaml_hint(problem: str) -> str:
    if "\\t" in problem:
        return "indent with spaces, not tabs"
    if "alias" in problem:
        return "write the value out, or put quotes around a text that begins with * or &"
    return "look at the indentation, quotes and brackets there and in the line above"
