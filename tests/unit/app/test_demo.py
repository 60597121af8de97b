"""Nobody is left alone with a silent terminal: what takes long says what it waits for."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from evermark.app import demo
from evermark.errors import EvermarkError

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(demo, "_SAY_EVERY_S", 0.0)
    monkeypatch.setattr(demo, "_LOOK_EVERY_S", 0.001)
    return []


def test_the_demo_says_what_it_waits_for(tmp_path: Path, said: list[str]) -> None:
    """GIVEN something that takes a while WHEN the demo waits for it THEN it says what and for how long."""
    looks = iter([False] * 5 + [True])
    demo.Demo(tmp_path, 1.0, 1.0, said.append)._wait(lambda: next(looks), "something new is delivered", 60.0)
    assert len(said) >= 3
    assert all(re.fullmatch(r"  waiting until something new is delivered: 0 s, of 60 s at most", line) for line in said)


def test_the_demo_names_what_did_not_come(tmp_path: Path, said: list[str]) -> None:
    """GIVEN something that never comes WHEN the time is over THEN the error names it and where to look."""
    with pytest.raises(EvermarkError, match="not within 0 s: something new is delivered") as caught:
        demo.Demo(tmp_path, 1.0, 1.0, said.append)._wait(lambda: False, "something new is delivered", 0.0)
    assert "up.log" in caught.value.hint


def test_the_demo_waits_for_no_pipeline_that_has_ended(tmp_path: Path, said: list[str]) -> None:
    """GIVEN a pipeline that ended by itself WHEN the demo waits for what it should do THEN it says so at once."""
    one = demo.Demo(tmp_path, 1.0, 1.0, said.append)
    one._pipeline = subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"])
    one._pipeline.wait()
    with pytest.raises(EvermarkError, match="the pipeline ended with code 3"):
        one._wait(lambda: False, "something new is delivered", 60.0)


def test_a_demo_that_is_ended_by_sigterm_stops_what_it_started(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a demo that runs WHEN it gets a SIGTERM THEN it ends as by Ctrl-C, so that its processes are stopped, and
    says where its folder is."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(demo.Demo, "run", lambda self: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(KeyboardInterrupt):
            demo.run_demo(1.0, 1.0, tmp_path, said.append)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert said == [f"what was left is in {tmp_path}"]


def test_setting_up_shows_that_it_moves() -> None:
    """GIVEN `make setup` THEN each step is said before it begins, and pip is not told to be quiet."""
    recipe = (ROOT / "Makefile").read_text().split("$(STAMP):")[1].split("\ndemo:")[0]
    assert [f"{n} of 3: " in recipe for n in (1, 2, 3)] == [True] * 3
    assert "pip install" in recipe and not re.search(r"pip install[^\n]*\s-q", recipe)
