"""What is wrong with a file, said so that a person finds and repairs it; never with a value that may be a secret."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from evermark.errors import ConfigError

KeyPath = tuple[str | int, ...]

_SHOWN_MAX = 20
_WORD_MAX = 200


@dataclass(frozen=True)
class Problem:
    path: KeyPath
    text: str
    hint: str = ""
    line: int | None = None


def shown(path: KeyPath) -> str:
    """`sources.shop.tables[1].exclude`"""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def refused(name: str, problems: Iterable[Problem]) -> ConfigError:
    """One error that tells all problems, in the order of the file."""
    unique = sorted(dict.fromkeys(problems), key=lambda problem: (problem.line or 0, shown(problem.path)))
    each = tuple(
        ConfigError(f"{name}, line {p.line}: {_said(p)}" if p.line else f"{name}: {_said(p)}", hint=p.hint)
        for p in unique
    )
    if len(each) == 1:
        return each[0]
    rows = []
    for problem in unique[:_SHOWN_MAX]:
        where = f"line {problem.line}: " if problem.line else ""
        hint = f" ({problem.hint})" if problem.hint else ""
        rows.append(f"\n  {where}{_said(problem)}{hint}")
    more = len(unique) - _SHOWN_MAX
    if more > 0:
        rows.append(f"\n  and {more} more")
    error = ConfigError(f"{name} has {len(unique)} problems:{''.join(rows)}", hint=f"correct them in {name}")
    error.each = each
    return error


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The known word that `word` was most likely meant to be; None rather than a guess that would mislead.

    It is a slip or two away (one in four letters, at least one), or it alone shares a part: schema_name, schema.
    """
    typed, words = word[:_WORD_MAX].lower(), list(known)
    by_slips = sorted((_slips(each, typed), index) for index, each in enumerate(words))
    if by_slips and by_slips[0][0] <= max(1, len(typed) // 4):
        return words[by_slips[0][1]]
    parts = {part for part in typed.split("_") if len(part) > 2}
    sharing = [each for each in words if parts & set(each.split("_"))]
    return sharing[0] if len(sharing) == 1 else None


def _slips(word: str, typed: str) -> int:
    """How many slips of the finger lie between two words: a letter more, less or other, or two in the wrong order."""
    word = word.lower()
    before: list[int] = []
    row = list(range(len(typed) + 1))
    for i, letter in enumerate(word, 1):
        earlier, before, row = before, row, [i]
        for j, other in enumerate(typed, 1):
            least = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != other))
            if i > 1 and j > 1 and letter == typed[j - 2] and word[i - 2] == other:
                least = min(least, earlier[j - 2] + 1)
            row.append(least)
    return row[-1]


def _unknown_key(path: KeyPath, keys: list[str]) -> Problem:
    near = nearest(str(path[-1]), keys)
    if near is not None:
        return Problem(path, f"unknown key; did you mean {near}?", f"known here: {', '.join(keys)}")
    return Problem(path, "unknown key", f"known here: {', '.join(keys)}" if keys else "nothing may stand here")


def _said(problem: Problem) -> str:
    return f"{shown(problem.path)}: {problem.text}" if problem.path else problem.text


_PHRASES: dict[str, tuple[str, str]] = {
    "missing": ("is required", ""),
    "string_type": ("expected text", "put quotes around it"),
    "int_parsing_size": ("expected a smaller whole number", ""),
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), ("expected a whole number", "")),
    **dict.fromkeys(("float_type", "float_parsing", "finite_number"), ("expected a number", "")),
    **dict.fromkeys(("bool_type", "bool_parsing"), ("expected true or false", "")),
    **dict.fromkeys(("list_type", "tuple_type"), ("expected a list", "write it as [a, b]")),
    **dict.fromkeys(("dict_type", "model_type", "model_attributes_type"), ("expected a mapping of keys to values", "")),
    **dict.fromkeys(("literal_error", "enum"), ("expected one of {expected}", "")),
    "greater_than_equal": ("must be at least {ge}", ""),
    "greater_than": ("must be more than {gt}", ""),
    "less_than_equal": ("must be at most {le}", ""),
    "less_than": ("must be less than {lt}", ""),
    "string_pattern_mismatch": ("must have the form {pattern}", ""),
    "string_too_short": ("must not be empty", ""),
    "string_too_long": ("must have at most {max_length} characters", ""),
    "too_long": ("must have at most {max_length} entries", ""),
    "too_short": ("must have at least {min_length} entries", ""),
}


def from_validation(
    refusal: ValidationError,
    values: Any,
    known_keys: Callable[[Any], list[str]],
    from_variables: Collection[KeyPath] = (),
) -> list[Problem]:
    """What is wrong with these values, in our words. `known_keys` names the keys that a mapping among them may have.

    Only phrases of our own are used: the validator's texts repeat the value. A refusal of ours may carry
    `hint_showing_value`, which is used only when the value stands in the file itself.
    """
    problems = []
    for error in refusal.errors(include_url=False, include_input=False):
        path = _written(values, error["loc"])
        context: Mapping[str, Any] = error.get("ctx") or {}
        if error["type"] == "extra_forbidden":
            problems.append(_unknown_key(path, known_keys(_value_at(values, path[:-1]))))
        elif error["type"] == "evermark":
            at = (*path, *context.get("at", ()))
            hint = context.get("hint", "")
            if at not in from_variables:
                hint = context.get("hint_showing_value") or hint
            problems.append(Problem(at, context["text"], hint))
        else:
            phrase, hint = _PHRASES.get(error["type"], (f"is not valid ({error['type']})", ""))
            problems.append(Problem(path, phrase.format_map(context), hint))
    return problems


def _written(values: Any, path: KeyPath) -> KeyPath:
    """`path` as far as the file goes: one text may stand for a list or a mapping, and has nothing below it."""
    for depth, part in enumerate(path):
        if not isinstance(values, (dict, list)):
            return path[:depth]
        values = _value_at(values, (part,))
        if values is None:
            break
    return path


def _value_at(values: Any, path: KeyPath) -> Any:
    for part in path:
        try:
            values = values[part]
        except (KeyError, IndexError, TypeError):
            return None
    return values
