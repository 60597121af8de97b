"""A subscription that is asked for at run time: keys and rules of the file, but for what only the operator may say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

from pydantic import ValidationError

from evermark.config.subscriptions import SubscriptionConfig
from evermark.settings.fields import NAME, KeyNotes
from evermark.settings.problems import Problem, from_validation, refused

# How the keys of the file are called in a `SubscriptionSpec`, where they differ.
_FIELDS = {
    "from": "start",
    "timeout": "timeout_s",
    "rate": "rate_per_s",
    "body_limit": "body_bytes_max",
    "parked_limit": "parked_max",
    "retry_waits": "retry_waits_s",
    "ttl": "ttl_s",
}
# Stand for what a change does not name, so that the rules of the whole can be asked; they are used for nothing else.
_UNCHANGED = {"url": "https://unchanged.example/", "secret": "whsec_" + "A" * 43 + "="}

_OPERATORS_LINE = "add to this subscription: "
_IN_THE_FILE = "only the operator's file may open an address: make the subscription in evermark.yaml with the line "
_REFUSED = {
    "allow_networks": Problem(
        ("allow_networks",),
        "only the operator's file may open networks: a user of the API could otherwise reach machines inside them",
        "make this subscription in evermark.yaml, with its allow_networks",
    ),
}
_FIXED = {
    "name": Problem(("name",), "a name cannot be changed", "remove the subscription and make it anew"),
    "from": Problem(
        ("from",), "where it began cannot be changed", "`evermark replay start` delivers the past once more"
    ),
    "secret": Problem(("secret",), "a secret is rotated, not changed", "use rotate: old and new are good meanwhile"),
}

Wanted = TypeVar("Wanted", bound=SubscriptionConfig)


def asked(name: str, values: Mapping[str, Any], model: type[Wanted] = SubscriptionConfig) -> Wanted:  # type: ignore[assignment]
    """The subscription that these keys ask for. Raises `ConfigError`, with everything that is wrong with them."""
    problems = [] if re.fullmatch(NAME.strip("^$"), name) else [Problem(("name",), f"must have the form {NAME}")]
    problems += [problem for key, problem in _REFUSED.items() if key in values]
    given = {key: value for key, value in values.items() if key not in _REFUSED}
    return _validated(name, given, model, problems)


def asked_changes(name: str, values: Mapping[str, Any]) -> tuple[SubscriptionConfig, dict[str, str]]:
    """What these keys are to be: a config that holds them, and its spec's field for each. Null: back to the default."""
    never = {**_REFUSED, **_FIXED}
    problems = [problem for key, problem in never.items() if key in values]
    given = {key: value for key, value in values.items() if key not in never}
    if "url" in given and given["url"] is None:
        problems.append(Problem(("url",), "is required"))
    # A model takes null for a key that was not given: an unknown key needs another value to be found.
    known = SubscriptionConfig.keys()
    changed = {k: "" if v is None else v for k, v in given.items() if v is not None or k not in known}
    config = _validated(name, {**_UNCHANGED, **changed}, SubscriptionConfig, problems)
    return config, {key: _FIELDS.get(key, key) for key in given}


def _validated(name: str, values: dict[str, Any], model: type[Wanted], problems: list[Problem]) -> Wanted:
    notes, found = KeyNotes(), None
    try:
        found = model.model_validate(values, context=notes)
    except ValidationError as error:
        problems = problems + from_validation(error, values, notes.known)
    if found is None or problems:
        told = [replace(p, hint=p.hint.replace(_OPERATORS_LINE, _IN_THE_FILE)) for p in problems]
        shown = "".join(char if char.isprintable() else "?" for char in name[:80])
        raise refused(f"subscription {shown}", told)
    return found
