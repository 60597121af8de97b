"""Spans of time as people write them: `500ms`, `5s`, `3m`, `1h30m`, `30d`, `2w`."""

from __future__ import annotations

import math
import re
from datetime import timedelta

FORM = "a number with a unit (ms, s, m, h, d, w), for example 30s or 1h30m"

_UNIT_US = {
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
    "d": 86_400_000_000,
    "w": 604_800_000_000,
}
_PART = re.compile(r"(\d{1,12}(?:\.\d{1,6})?)(ms|s|m|h|d|w)", re.ASCII)
_WHOLE = re.compile(rf"(?:{_PART.pattern}){{1,6}}", re.ASCII)
_MAX_US = 36_500 * _UNIT_US["d"]


def parse(text: str) -> timedelta:
    """The span `text` says. Raises `ValueError` without repeating the text: it may come from a secret's variable."""
    stripped = text.strip()
    if not _WHOLE.fullmatch(stripped):
        raise ValueError(f"expected {FORM}")
    total_us = 0
    least_us = math.inf
    for number, unit in _PART.findall(stripped):
        if _UNIT_US[unit] >= least_us:
            raise ValueError("expected larger units before smaller ones, each once")
        least_us = _UNIT_US[unit]
        whole, _, fraction = number.partition(".")
        total_us += int(whole) * _UNIT_US[unit] + int(fraction.ljust(6, "0") or 0) * _UNIT_US[unit] // 1_000_000
    if total_us > _MAX_US:
        raise ValueError("expected at most 100 years")
    return timedelta(microseconds=total_us)


def show(span: timedelta) -> str:
    """The shortest text in whole units that `parse` reads back as the same span (rounded down to milliseconds)."""
    left_us = span // timedelta(microseconds=1)
    if left_us < 0:
        raise ValueError("a negative span has no text form")
    parts: list[str] = []
    for unit in ("d", "h", "m", "s", "ms"):
        count, left_us = divmod(left_us, _UNIT_US[unit])
        if count:
            parts.append(f"{count}{unit}")
    return "".join(parts) or "0s"
