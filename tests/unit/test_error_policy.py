"""What is done about an error follows from its kind, and for an unknown error from how often it came."""

from __future__ import annotations

import pytest

from evermark.error_policy import UNKNOWN_TRIES, Action, action_after, action_for, action_while_reading, backoff_s
from evermark.errors import (
    BusyError,
    ConfigError,
    ConflictError,
    DeniedError,
    DiskFullError,
    EvermarkError,
    FormatError,
    GapError,
    StaleError,
    UnreachableError,
)

KNOWN = [
    (UnreachableError("x"), Action.RETRY),
    (BusyError("x"), Action.RETRY),
    (DiskFullError("x"), Action.RETRY),
    (DeniedError("x"), Action.STOP),
    (StaleError("x"), Action.STEP_DOWN),
    (ConflictError("x"), Action.STEP_DOWN),
    (GapError("x"), Action.STOP),
    (ConfigError("x"), Action.STOP),
    (FormatError("x"), Action.STOP),
]


@pytest.mark.parametrize(("error", "action"), KNOWN, ids=lambda value: type(value).__name__)
def test_a_known_kind_is_met_in_the_same_way_however_often_it_comes(error: EvermarkError, action: Action) -> None:
    """GIVEN an error of a known kind THEN its kind alone decides: no number of tries makes a retry of a stop."""
    assert action_for(error) is action
    assert {action_after(error, failures) for failures in (1, UNKNOWN_TRIES, 1_000_000)} == {action}


def test_an_unknown_error_is_tried_five_times_and_then_stops() -> None:
    """GIVEN an error of no kind, as a killed worker leaves one THEN five tries, and the sixth failure stops."""
    error = EvermarkError("the worker was killed")
    assert action_for(error) is Action.STOP
    tries = [action_after(error, failures) for failures in range(1, UNKNOWN_TRIES + 2)]
    assert tries == [Action.RETRY] * 5 + [Action.STOP]


def test_a_permission_that_is_lost_while_reading_is_waited_for() -> None:
    """GIVEN a refused key WHEN a partition is read THEN it is tried again; what stops otherwise stops there, too."""
    assert action_while_reading(DeniedError("403"), 1_000) is Action.RETRY
    assert action_while_reading(FormatError("x"), 1) is Action.STOP


def test_an_error_that_is_not_ours_stops_at_once() -> None:
    """GIVEN an exception from outside the tree of errors THEN it is never retried: nobody knows what it left."""
    assert action_after(RuntimeError("x"), 1) is Action.STOP


def test_waits_double_up_to_their_limit() -> None:
    """GIVEN failures in a row THEN each wait is twice the one before, and none is longer than the limit."""
    assert [backoff_s(attempt, max_s=4.0) for attempt in range(5)] == [0.5, 1.0, 2.0, 4.0, 4.0]
    assert backoff_s(10_000) == 60.0
