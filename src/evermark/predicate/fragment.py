"""Pieces of Spark SQL that we wrote ourselves, with the JSON paths still open.

Nothing from a user's text enters a fragment but through `string_sql`, a vetted number, a vetted time or a `Path`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from evermark.errors import ConfigError

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HALF_PAIR = re.compile("[\ud800-\udfff]")
_ESCAPED = re.compile("['\"\\\\{`;\x00-\x1f\x7f-\x9f\u2028\u2029]")
PATH_STEPS_MAX = 20
PATH_STEP_CHARS_MAX = 256
ARRAY_INDEX_MAX = 2**31 - 1


def refused(what: str, hint: str) -> ConfigError:
    return ConfigError(f"predicate: {what}", hint=hint)


def string_sql(value: str) -> str:
    """A Spark string literal that means exactly `value`.

    Quotes and backslashes are written as `\\uXXXX`, so that no setting of the parser's escapes can end the literal
    early. `{` too: Spark replaces `${env:NAME}` in any SQL text it parses, inside literals as well.
    """
    if _HALF_PAIR.search(value):
        raise refused("a string holds half a surrogate pair", "write the character itself")
    return "'" + _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04X}", value) + "'"


@dataclass(frozen=True, order=True)
class Path:
    """One JSON path read as one type. A matcher extracts each path once per event and gives it an alias."""

    column: Literal["payload", "before"]
    json_path: str
    cast: str

    def extract_sql(self, variant: str) -> str:
        """The Spark expression that reads this path from `variant`, a column made by `variant_sql`."""
        return f"try_variant_get({variant}, {string_sql(self.json_path)}, '{self.cast}')"


def variant_sql(column: str) -> str:
    """The Spark expression for the parsed form of a JSON column; null when it does not parse."""
    return f"try_parse_json({column})"


def json_path(steps: tuple[str | int, ...]) -> str:
    """A path in the syntax of `try_variant_get`, which has no escapes: only the choice between two quotes."""
    if len(steps) > PATH_STEPS_MAX:
        raise refused(f"a path has more than {PATH_STEPS_MAX} steps", "compare something less deep")
    out = ["$"]
    for step in steps:
        if isinstance(step, int):
            if not 0 <= step <= ARRAY_INDEX_MAX:
                raise refused(f"array index {step} is out of range", f"use an index from 0 to {ARRAY_INDEX_MAX}")
            out.append(f"[{step}]")
        elif len(step) > PATH_STEP_CHARS_MAX:
            raise refused("a path step is too long", f"use names of at most {PATH_STEP_CHARS_MAX} characters")
        elif _PLAIN.fullmatch(step):
            out.append(f".{step}")
        elif "'" not in step:
            out.append(f"['{step}']")
        elif '"' not in step:
            out.append(f'["{step}"]')
        else:
            raise refused("a path step holds both kinds of quotes", "Spark has no way to name such a key")
    return "".join(out)


Fragment = tuple[str | Path, ...]


def sql(*pieces: str | Path | Fragment) -> Fragment:
    """One fragment out of texts, paths and fragments; neighbouring texts are joined."""
    out: list[str | Path] = []
    for piece in pieces:
        for part in piece if isinstance(piece, tuple) else (piece,):
            if isinstance(part, str) and out and isinstance(out[-1], str):
                out[-1] += part
            elif part:
                out.append(part)
    return tuple(out)


def filled(template: str, *fragments: Fragment) -> Fragment:
    """The template with a fragment for each `{}`."""
    first, *rest = template.split("{}")
    return sql(first, *(piece for pair in zip(fragments, rest, strict=True) for piece in pair))


def joined(separator: str, fragments: list[Fragment]) -> Fragment:
    return filled(separator.join(["{}"] * len(fragments)), *fragments)


def paths_of(fragment: Fragment) -> tuple[Path, ...]:
    return tuple(dict.fromkeys(part for part in fragment if isinstance(part, Path)))


def chars_of(fragment: Fragment) -> int:
    return sum(len(part) if isinstance(part, str) else 16 for part in fragment)


def depth_of(fragment: Fragment) -> int:
    """How deep the parentheses nest. Literals hold no raw quote, so quotes simply alternate."""
    text = "".join(part for part in fragment if isinstance(part, str))
    steps = ((char == "(") - (char == ")") for unquoted in text.split("'")[::2] for char in unquoted)
    return max(accumulate(steps, initial=0))
