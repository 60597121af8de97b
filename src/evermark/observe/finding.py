"""Findings of an examination: one line each, with the repair to run. Values only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Grade(StrEnum):
    OK = "ok"
    WARNING = "warning"  # works, and will not for ever; or works less well than it could
    WRONG = "wrong"  # does not work, or loses something, until a person acts


@dataclass(frozen=True)
class Finding:
    """`repair` is exactly what to run or do: SQL or a command. Empty when there is nothing to do."""

    check: str
    grade: Grade
    found: str
    mend: str = ""


def ok(check: str, found: str) -> Finding:
    return Finding(check, Grade.OK, found)


def warning(check: str, found: str, mend: str) -> Finding:
    return Finding(check, Grade.WARNING, found, mend)


def wrong(check: str, found: str, mend: str) -> Finding:
    return Finding(check, Grade.WRONG, found, mend)


def worst(findings: Iterable[Finding]) -> Grade:
    order = list(Grade)
    return max((finding.grade for finding in findings), key=order.index, default=Grade.OK)


_OF_A_SOURCE = re.compile(r"evermark source (install|uninstall|maintain|recover|backfill)(?! [\w\"'])")


def for_source(said: str, source: str) -> str:
    """A hint as it can be run where there are several sources: its commands name this one."""
    return _OF_A_SOURCE.sub(rf"\g<0> {source}", said)
