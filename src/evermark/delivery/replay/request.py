"""The replay that is asked for by the control event of an UPDATE, or by times on a command line. Pure."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from evermark.delivery.replay.plan import AskedBy, Control, Request
from evermark.errors import ConfigError
from evermark.log.read import moment_of

# The times that every layer can hold; no event is outside.
TIME_MIN = datetime(1, 1, 2, tzinfo=UTC)
TIME_MAX = datetime(9999, 12, 30, tzinfo=UTC)
STREAMS_MAX = 1_000
CONTROL_CHARS_MAX = 64 * 1024


def request_of(source: str, control: Control) -> Request | None:
    """The replay a control event asks for; None when it asks for something else. Raises `ConfigError` for nonsense."""
    text = control.payload or ""
    if len(text) > CONTROL_CHARS_MAX:
        raise ConfigError(f"control event {control.event_id}: {len(text)} characters are too many")
    try:
        said: Any = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigError(f"control event {control.event_id} is not JSON") from None
    if not isinstance(said, dict) or said.get("action") != "replay":
        return None
    since, until = said.get("replay_from_ts"), said.get("replay_to_ts")
    if not isinstance(since, str) or not isinstance(until, str | None):
        raise ConfigError(f"control event {control.event_id} names no window of time")
    own_time = control.event_time or TIME_MAX
    return Request(
        AskedBy.SQL,
        source,
        _moment(since, control.event_id),
        _moment(until, control.event_id) if until is not None else min(own_time, TIME_MAX),
        streams=(control.stream,),
        control=control,
        asked_since=since,
        asked_until=until,
    )


def _moment(text: str, where: str) -> datetime:
    """A time as Postgres writes it in JSON; it knows infinities and years before Christ, which Python does not."""
    if text == "infinity":
        return TIME_MAX
    if text == "-infinity" or text.endswith(" BC"):
        return TIME_MIN
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigError(f"control event {where}: {text[:80]!r} is not a time") from None
    return bounded(moment if moment.tzinfo else moment.replace(tzinfo=UTC))


def window_of(since: str, until: str | None, now: datetime, prefix: str = "") -> tuple[datetime, datetime]:
    """The window that a person asks for; without an end it ends now. `prefix`: of the names, as the person writes."""
    begin = bounded(moment_of(since))
    end = bounded(moment_of(until)) if until is not None else now
    if until is None and end < begin:
        raise ConfigError(
            f"{prefix}since {since} is in the future", hint=f"it is {end:%Y-%m-%dT%H:%MZ} now: name a time before that"
        )
    if end < begin:
        raise ConfigError(
            f"{prefix}until {until} is before {prefix}since {since}", hint=f"name the earlier time with {prefix}since"
        )
    return begin, end


def bounded(moment: datetime) -> datetime:
    """The nearest time that every layer can hold."""
    return min(max(moment, TIME_MIN), TIME_MAX)
