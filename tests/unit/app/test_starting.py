"""What keeps `evermark up` from starting, what it waits for, and what it leaves for later."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from structlog.testing import capture_logs

from evermark.app import run
from evermark.app.run import Pipeline
from evermark.checkpoints.base import Checkpoint
from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.config import Config
from evermark.errors import (
    BusyError,
    ConfigError,
    DeniedError,
    EvermarkError,
    FormatError,
    GapError,
    SetupError,
    UnreachableError,
)

EMBEDDED = {"version": 1, "name": "scene"}
ELSEWHERE = {**EMBEDDED, "state": {"dsn": "postgresql://db.example/state"}}


def pipeline(document: Mapping[str, Any] = ELSEWHERE) -> Pipeline:
    return Pipeline(Config.model_validate(document))


class Checked:
    """A source of which only the check matters."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.resumes: list[Mapping[int, str]] = []

    def partitions(self) -> list[int]:
        return [0, 1]

    def check(self, resume: Mapping[int, str], newest: Any = None) -> None:
        self.resumes.append(resume)
        if self.error is not None:
            raise self.error


def check(**sources: Checked) -> tuple[EvermarkError | None, list[Any]]:
    """What ends the start, and the lines of its log."""
    deployment: Any = SimpleNamespace(sources=sources, checkpoints=MemoryCheckpoints())
    deployment.checkpoints.save("well", 1, Checkpoint("p", 1, 1))
    with capture_logs() as lines:
        try:
            pipeline()._check_sources(deployment)
        except EvermarkError as error:
            return error, lines
    return None, lines


@pytest.mark.parametrize(
    "error",
    [
        UnreachableError("away"),
        BusyError("too many connections"),
        ConnectionRefusedError("refused"),
        TypeError("a mistake in a source of the user's own"),
    ],
)
def test_a_source_that_cannot_be_reached_or_read_keeps_nobody_from_starting(error: Exception) -> None:
    """GIVEN one source that is away, or fails in a way nobody thought of, and one that is well WHEN it starts THEN both
    go on, and a warning is logged."""
    well = Checked()
    ended, lines = check(away=Checked(error), well=well)
    assert ended is None
    (said,) = lines
    assert (said["source"], said["log_level"]) == ("away", "warning")
    assert str(error) in str(said["error"])
    assert well.resumes == [{1: "p"}], "from where it was left"


@pytest.mark.parametrize(
    "error",
    [
        DeniedError("refused the login", hint="check the password"),
        SetupError("wal_level is replica", hint="set it"),
        ConfigError("no such thing", hint="name it"),
        FormatError("newer than this program", hint="upgrade"),
    ],
)
def test_what_only_a_person_can_change_ends_the_start(error: EvermarkError) -> None:
    """GIVEN a source that no waiting will repair, beside one that is away WHEN it starts THEN it ends and says why."""
    ended, _ = check(away=Checked(UnreachableError("away")), wrong=Checked(error), well=Checked())
    assert type(ended) is type(error)
    assert (ended.message, ended.hint) == (f"sources.wrong: {error.message}", error.hint)


def test_the_command_that_is_to_be_run_names_the_source_where_there_are_several() -> None:
    """GIVEN a source that is not installed, beside another WHEN it starts THEN the hint names it: without a name the
    command is refused. Where there is one source alone, no name is needed."""
    missing = SetupError("the outbox is not installed", hint="run `evermark source install` (or `--print` for a DBA)")
    ended, _ = check(shop=Checked(missing), well=Checked())
    assert ended is not None and ended.hint == "run `evermark source install shop` (or `--print` for a DBA)"
    alone, _ = check(well=Checked(missing))
    assert alone is not None and alone.hint == missing.hint


def test_a_gap_is_said_and_repaired_later() -> None:
    """GIVEN a slot that was lost WHEN it starts THEN that is an error in the log, and no end."""
    ended, lines = check(lost=Checked(GapError("the slot is gone")))
    assert ended is None and [line["log_level"] for line in lines] == ["error"]


def opened(monkeypatch: pytest.MonkeyPatch, made: Pipeline, *answers: object) -> list[object]:
    """Have state answer like this, one after the other; what was asked for."""
    left = list(answers)

    def open_deployment(*_: object) -> object:
        answer = left.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(run, "open_deployment", open_deployment)
    monkeypatch.setattr(run, "_STATE_PAUSE_S", 0.0)
    return left


def test_state_that_comes_up_a_little_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN state that does not answer at first WHEN it does THEN the start goes on; why it waits was said at once, and
    again only when it was another reason."""
    made, there = pipeline(), object()
    opened(monkeypatch, made, *[UnreachableError("refused")] * 5, *[BusyError("starting")] * 5, there)
    with capture_logs() as lines:
        assert made._opened() is there
    assert [(line["log_level"], line["error"].message) for line in lines] == [
        ("warning", "refused"),
        ("warning", "starting"),
    ]


def test_state_is_not_waited_for_for_ever_nor_when_waiting_does_not_help(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN state that stays away, refuses us, or is our own WHEN it starts THEN it ends: after a while, or at once."""
    made = pipeline()
    opened(monkeypatch, made, DeniedError("no"))
    with pytest.raises(DeniedError):
        made._opened()
    embedded = pipeline(EMBEDDED)
    opened(monkeypatch, embedded, UnreachableError("it did not start"))
    with pytest.raises(UnreachableError):
        embedded._opened()
    monkeypatch.setattr(run, "_STATE_WAIT_S", -1.0)
    opened(monkeypatch, made, UnreachableError("away"))
    with pytest.raises(UnreachableError):
        made._opened()


def test_told_to_stop_it_does_not_wait_for_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN state that is away WHEN it is told to stop THEN it stops, which is no error."""
    made = pipeline()
    left = opened(monkeypatch, made, UnreachableError("away"), object())
    monkeypatch.setattr(made._log, "warning", lambda *_, **__: made.stop())
    assert made._opened() is None and len(left) == 1


def test_a_start_of_state_that_was_interrupted_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN Ctrl-C while the server is being started WHEN its start fails for that THEN it stops, without an error."""
    made = pipeline(EMBEDDED)

    def open_deployment(*_: object) -> object:
        made.stop()
        raise SetupError("the server does not start")

    monkeypatch.setattr(run, "open_deployment", open_deployment)
    made._log = Mock()
    assert made._opened() is None
    assert made._log.method_calls == [call.info("stopping", during="start")]
