"""Structured logs: one line an event, JSON unless a person watches the terminal, and never a secret."""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Callable, MutableMapping
from typing import Any, TextIO, cast

import structlog

from evermark.errors import EvermarkError
from evermark.observe.finding import for_source

_HIDDEN = "***"
_SECRET_KEY = re.compile(r"secret|password|passwd|token|dsn|authorization|signature", re.IGNORECASE)
# user:password@ in any address (the password may have an @), and password=… in any connection string, also in the
# texts of drivers.
_IN_TEXT = (
    (re.compile(r"(\w+://[^\s:/@]+:)\S+@"), rf"\1{_HIDDEN}@"),
    (re.compile(r"(password\s*=\s*)('[^']*'|\S+)", re.IGNORECASE), rf"\1{_HIDDEN}"),
    (re.compile(r"whsec_[A-Za-z0-9+/=_-]+"), _HIDDEN),
)


def without_secrets(text: str) -> str:
    for pattern, instead in _IN_TEXT:
        text = pattern.sub(instead, text)
    return text


def _redact(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    for key, value in event.items():
        if _SECRET_KEY.search(key) and value is not None:
            event[key] = _HIDDEN
        elif isinstance(value, str):
            event[key] = without_secrets(value)
    return event


def _unfold_errors(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    error = event.get("error")
    if isinstance(error, EvermarkError):
        event["error"], event["kind"] = error.message, str(error.kind)
        if error.hint:
            about = event.get("source")
            event["hint"] = for_source(error.hint, about) if isinstance(about, str) else error.hint
    elif isinstance(error, BaseException):
        event["error"] = f"{type(error).__name__}: {error}"
    return event


class _Stderr:
    """The current stderr: it may be redirected, and closed again, after loggers were made."""

    def write(self, text: str) -> int:
        return sys.stderr.write(text)

    def flush(self) -> None:
        sys.stderr.flush()


def set_up_logging(*, json: bool | None = None, level: str = "info") -> None:
    """For the whole process; `json=None` means JSON unless stderr is a terminal."""
    as_json = not sys.stderr.isatty() if json is None else json
    renderer: Any = structlog.processors.JSONRenderer() if as_json else structlog.dev.ConsoleRenderer(pad_event_to=24)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            _unfold_errors,
            _redact,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=structlog.PrintLoggerFactory(cast("TextIO", _Stderr())),
        cache_logger_on_first_use=True,
    )


_forward: Callable[[str, dict[str, Any]], None] | None = None


def forward_logging(send: Callable[[str, dict[str, Any]], None]) -> None:
    """In a process whose stderr nobody reads: each event goes to `send(level, event)`, without secrets."""
    global _forward  # noqa: PLW0603 - loggers are kept longer than the lane that made them
    _forward = send

    def give(_logger: Any, method: str, event: MutableMapping[str, Any]) -> Any:
        if _forward is not None:
            _forward(method, dict(event))
        raise structlog.DropEvent

    structlog.configure(
        processors=[structlog.contextvars.merge_contextvars, _unfold_errors, _redact, give],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        cache_logger_on_first_use=True,
    )


def get_logger(**bound: Any) -> Any:
    return structlog.get_logger(**bound)
