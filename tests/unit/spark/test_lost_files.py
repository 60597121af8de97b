"""A job of delivery that fails because of the log: said in our words, not in Spark's."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.delivery.model import Cursor, SubscriptionSpec
from evermark.delivery.replay.plan import ReplayWork
from evermark.delivery.replay.timeslice import Mark, TimeSlice
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.errors import BusyError, EngineError, FormatError
from evermark.ingest.repair.steps import RepairTarget
from evermark.log.read import FileRange
from evermark.sources.base import Gap
from evermark.spark import repair
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


@pytest.mark.parametrize("error", [RuntimeError("[PATH_NOT_FOUND]"), EngineError("failed"), BusyError("busy")])
def test_a_gap_that_cannot_be_compared_because_a_file_is_missing_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """GIVEN a comparison that Spark fails, while planning or at work WHEN a file is missing that may have events of the
    gap THEN that is the error; an older file is not looked at; what passes by itself is said as it is."""

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr(repair, "_found", fail)
    paths, times = [str(tmp_path / name) for name in ("old", "gone")], [T0 - timedelta(days=2), T0]
    old, gone = (
        FileRange(path, 0, 0, 1, 1, 1, 1, at, None, at, at, timeless=0) for path, at in zip(paths, times, strict=True)
    )
    gap = cast("Gap", SimpleNamespace(is_state=False, since=T0 - timedelta(days=1)))
    expected, said = (
        (BusyError, "busy") if isinstance(error, BusyError) else (FormatError, "gone of the log is missing")
    )
    with pytest.raises(expected, match=said):
        repair.found_missing(cast("Any", None), gap, [old, gone], RepairTarget("shop", 0, 1, 1, "0"), tmp_path)
