"""A job of delivery that fails because of the log: said in our words, not in Spark's."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.delivery.base import Cursor, SubscriptionSpec
from evermark.delivery.replay.plan import ReplayWork
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.errors import EngineError, FormatError
from evermark.spark.deliver import SparkDeliverer
from evermark.spark.replay import SparkReplays
from evermark.testing.contracts.scene import P0, T0


def deliver(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """With Spark failing, as it does for any reason."""

    def fail(*_: Any) -> None:
        raise EngineError("delivery of batches 1 to 2 failed: Encountered error while reading file")

    monkeypatch.setattr(SparkDeliverer, "_delivered", fail)
    span = Span(P0, Cursor(0), 2, tuple(map(str, paths)), 2)
    deliverer = SparkDeliverer.__new__(SparkDeliverer)
    deliverer.deliver([Assignment(span, SubscriptionSpec("a", "https://a.example"))], DeliveryOptions())


def test_a_job_that_failed_because_a_file_is_missing_or_damaged_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a job of Spark's that fails WHEN a file of its span is missing or damaged THEN that is the error, with what
    to do; with files that can be read it is Spark's own."""
    good, bad = tmp_path / "good.parquet", tmp_path / "bad.parquet"
    pq.write_table(pa.table({"x": [1]}), good)
    bad.write_bytes(b"no file of ours")
    with pytest.raises(EngineError, match="failed: Encountered"):
        deliver(monkeypatch, good)
    with pytest.raises(FormatError, match=r"gone\.parquet of the log is missing") as lost:
        deliver(monkeypatch, good, tmp_path / "gone.parquet")
    assert "put it back" in cast("FormatError", lost.value).hint
    with pytest.raises(FormatError, match=r"bad\.parquet of the log is damaged"):
        deliver(monkeypatch, bad)


def test_a_slice_of_a_replay_that_failed_because_a_file_is_missing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a slice that Spark fails to send WHEN a file of it is missing THEN that is the error, with what to do."""

    def fail(*_: Any) -> None:
        raise EngineError("replay r1 for a failed: [PATH_NOT_FOUND]")

    monkeypatch.setattr(SparkReplays, "_replayed", fail)
    piece = TimeSlice(Mark(T0), T0, (str(tmp_path / "gone.parquet"),), 1)
    spec = SubscriptionSpec("a", "https://a.example")
    with pytest.raises(FormatError, match=r"gone\.parquet of the log is missing"):
        SparkReplays.__new__(SparkReplays).replay(ReplayWork("r1", piece, spec, (), None, None, 9, 1.0, False, 9))
