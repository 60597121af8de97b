"""How an instance stops: the order of it, its time, and what a second signal does."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

from evermark.app import run
from evermark.app.run import Pipeline
from evermark.config import Config


class Parts:
    """The API and the lanes of an instance, which note what they are told. Lanes end after `looks`, or when hurried."""

    def __init__(self, looks: int = 0) -> None:
        self.told: list[str] = []
        self.looks = looks

    def refuse(self) -> None:
        self.told.append("the API refuses")

    def stop(self) -> None:
        self.told.append("lanes stop")

    def hurry(self) -> None:
        if "lanes hurry" not in self.told:
            self.told.append("lanes hurry")

    def join(self, timeout_s: float) -> bool:
        self.looks -= 1
        if self.looks > 0:
            threading.Event().wait(timeout_s)  # as a thread that does not end
        return self.looks <= 0


def stopping(parts: Parts, wait_s: float, *, signals: int = 1) -> tuple[Pipeline, float]:
    """A pipeline that was told to stop, and how long it took to."""
    pipeline = Pipeline(Config.model_validate({"version": 1, "name": "scene"}))
    pipeline._refuse_requests = parts.refuse
    for _ in range(signals):
        pipeline.stop()
    began, lanes = time.monotonic(), parts
    given: Any = lanes
    pipeline._shut_down(given, wait_s)
    return pipeline, time.monotonic() - began


def test_s9_the_api_refuses_before_anything_ends_and_the_instance_is_not_ready() -> None:
    """GIVEN a running instance WHEN it is told to stop THEN requests are refused first, then lanes stop; and from the
    signal on it says that it is stopping."""
    parts = Parts(looks=2)
    pipeline, _ = stopping(parts, 10.0)
    assert parts.told == ["the API refuses", "lanes stop"]
    assert pipeline.board.is_stopping


def test_s9_lanes_that_do_not_end_are_waited_for_no_longer_than_said() -> None:
    """GIVEN lanes that hang THEN the stop takes its time, and no longer."""
    _, took_s = stopping(Parts(looks=1000), 0.5)
    assert 0.4 < took_s < 30.0


def test_s9_a_second_signal_hurries(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN lanes that hang, and a minute to wait WHEN a second signal comes THEN lanes are told to hurry, and the stop
    is over in a moment."""
    monkeypatch.setattr(run, "_HURRY_S", 0.2)
    parts = Parts(looks=1000)
    _, took_s = stopping(parts, 60.0, signals=2)
    assert parts.told == ["the API refuses", "lanes stop", "lanes hurry"]
    assert took_s < 30.0
