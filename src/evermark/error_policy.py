"""What is done about each kind of error. The only place that decides it.

The default is to stop and say so: an error nobody thought about is tried a few times at most, and never skipped.
"""

from __future__ import annotations

from enum import StrEnum

from evermark.errors import EvermarkError, Kind

UNKNOWN_TRIES = 5


class Action(StrEnum):
    RETRY = "retry"  # back off, then try the same thing again
    STEP_DOWN = "step_down"  # somebody else owns it: let go, then stand by for the lease
    STOP = "stop"  # this partition stops, loudly, until a person acts


_ACTIONS: dict[Kind, Action] = {
    Kind.UNREACHABLE: Action.RETRY,
    Kind.BUSY: Action.RETRY,
    Kind.ENGINE: Action.RETRY,
    Kind.DISK_FULL: Action.RETRY,
    Kind.CONFLICT: Action.STEP_DOWN,
    Kind.STALE: Action.STEP_DOWN,
}


def action_for(error: BaseException) -> Action:
    kind = error.kind if isinstance(error, EvermarkError) else Kind.UNKNOWN
    return _ACTIONS.get(kind, Action.STOP)


def action_after(error: BaseException, failures: int) -> Action:
    """What is done when it failed this often in a row. What nobody thought of is tried a few times before it stops: a
    worker that was killed looks like that, too.
    """
    is_unknown = type(error) is EvermarkError and failures <= UNKNOWN_TRIES
    return Action.RETRY if is_unknown else action_for(error)


def action_while_reading(error: BaseException, failures: int) -> Action:
    """The same for a partition that was being read: a key that ran out or a grant that was taken away is put right
    elsewhere, and nobody should have to restart for it.
    """
    denied = isinstance(error, EvermarkError) and error.kind is Kind.DENIED
    return Action.RETRY if denied else action_after(error, failures)


def is_stuck(error: BaseException) -> bool:
    """Whether a reader of the log cannot go on until somebody mends it, as where a file of it is missing or damaged;
    readers elsewhere in it can.
    """
    return isinstance(error, EvermarkError) and error.kind is Kind.FORMAT


def backoff_s(attempt: int, *, base_s: float = 0.5, max_s: float = 60.0) -> float:
    """Exponential, without jitter: the caller adds it, so that this stays a pure function."""
    return float(min(max_s, base_s * 2 ** min(attempt, 16)))
