"""Session keys: which may be published, and when a missing key is asked for. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime, timedelta

from evermark.delivery.bots.forward import is_session
from evermark.delivery.limits import KEY_ASKED_EVERY, KEY_ASKED_EVERY_MAX, KEYS_AT_ONCE_MAX, KEYS_MAX, SESSION_CHARS_MAX
from evermark.errors import ConfigError, ConflictError, NotFoundError


def require_keys(device: str, keys: Mapping[str, str]) -> None:
    if not device:
        raise ConfigError("this bot has no device, so it needs no session keys", hint="name its `device`")
    if not 0 < len(keys) <= KEYS_AT_ONCE_MAX:
        raise ConfigError(f"{len(keys)} keys were given", hint=f"publish 1 to {KEYS_AT_ONCE_MAX} at a time")
    for session in keys:
        if not is_session(session):
            raise ConfigError(
                "a session has a name that cannot be one", hint=f"1 to {SESSION_CHARS_MAX} printable characters"
            )


def require_room(device: str, keys: int) -> None:
    if keys > KEYS_MAX:
        raise ConflictError(
            f"device {device!r} would have {keys} session keys, and {KEYS_MAX} is the most",
            hint="use another device for new sessions",
        )


def unknown_key(session: str) -> NotFoundError:
    return NotFoundError(f"no key is published for session {session[:80]!r}", hint="publish it: PUT …/keys")


def key_asked_next_at(asked_at: datetime | None, asks: int, now: datetime) -> datetime:
    """When a key is asked for again, after `asks` times, the last at `asked_at`."""
    wait: timedelta = min(KEY_ASKED_EVERY_MAX, KEY_ASKED_EVERY * 2.0 ** (min(asks, 20) - 1))
    return now if asked_at is None else asked_at + wait
