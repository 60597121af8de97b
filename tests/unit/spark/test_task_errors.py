"""What the driver makes of an error that a task of ours raised, out of Spark's text."""

from __future__ import annotations

import pytest

from evermark.errors import BusyError, EngineError, EvermarkError, UnreachableError
from evermark.spark.job import error_of_task

_SAID = """An error occurred while calling o123.collectToPython.
: org.apache.spark.SparkException: Job aborted due to stage failure: Task 0 in stage 1.0 failed 1 times: Traceback (most recent call last):
  File "repair.py", line 1, in read
{}
\tat org.apache.spark.api.python.BasePythonRunner.handlePythonException(PythonRunner.scala:1)
Driver stacktrace:
"""  # noqa: E501
_BUSY = "evermark.errors.BusyError: table orders was truncated while it was read\n  hint: it begins again"
_UNKNOWN = "evermark.errors.EvermarkError: reading the rows of orders: no such column [42703]"
_BETWEEN = "\nThe above exception was the direct cause of the following exception:\n"


@pytest.mark.parametrize(
    ("raised", "kind", "hint"),
    [
        (_BUSY, BusyError, "it begins again"),
        (_UNKNOWN + _BETWEEN + _BUSY, BusyError, "it begins again"),
        ("evermark.errors.UnreachableError: nobody answers", UnreachableError, ""),
        (_UNKNOWN, EngineError, None),
        (_BUSY + _BETWEEN + _UNKNOWN, EngineError, None),
        ("MemoryError", EngineError, None),
    ],
)
def test_a_place_that_is_busy_or_away_is_no_failure_of_spark(
    raised: str, kind: type[EvermarkError], hint: str | None
) -> None:
    """GIVEN what a task raised, and what that came of WHEN it was the place's THEN it is told as that; all else, a row
    that cannot be read among it, is Spark's, and counts as a try."""
    error = error_of_task("looking for what the log lacks failed", RuntimeError(_SAID.format(raised)))
    assert type(error) is kind
    assert error.message.startswith("looking for what the log lacks failed: ")
    assert hint is None or error.hint == hint
