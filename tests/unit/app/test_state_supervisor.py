"""Which deeds follow from what is seen of the embedded state server; it and the looks at it are stand-ins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
from structlog.testing import capture_logs

from evermark.app.state_supervisor import StateSupervisor
from evermark.embedded.hang import ASK_EVERY_S, Answer, Seen
from evermark.errors import BusyError, DiskFullError, UnreachableError
from evermark.testing.until import until


class Server:
    """Notes what is done to it. `seen` is what a look finds; it is ten seconds later whenever its clock is asked."""

    data = Path("state/data")

    def __init__(self, seen: Seen) -> None:
        self.seen: Seen | None = seen
        self.failures: dict[str, list[Exception]] = {}
        self.deeds: list[str] = []
        self.looks = 0
        self._now = 0.0
        self.on_look: Callable[[], None] = lambda: None
        self.on_deed: Callable[[], None] = lambda: None

    def look(self, _: Path) -> Seen | None:
        self.looks += 1
        self.on_look()
        return self.seen

    def clock(self) -> float:
        self._now += ASK_EVERY_S
        return self._now

    def end_hung(self, pid: int) -> None:
        self._do(f"end {pid}")
        self.seen = None

    def start(self, _: float) -> None:
        self._do("start")
        self.seen = Seen(2, Answer.IN)

    def _do(self, deed: str) -> None:
        self.deeds.append(deed)
        self.on_deed()
        if waiting := self.failures.get(deed):
            raise waiting.pop(0)


@contextmanager
def supervised(server: Server) -> Iterator[None]:
    keeper = StateSupervisor(
        cast(Any, server),
        is_there=lambda _: server.seen is not None,
        look=server.look,
        clock=server.clock,
        look_every_s=0.001,
    )
    try:
        yield
    finally:
        keeper.stop()


@pytest.mark.parametrize(
    "seen",
    [
        Seen(1, Answer.NOT_NOW, recovers=True),
        Seen(1, Answer.NOT_NOW, stops=True),
        Seen(1, Answer.IN),
        Seen(1, Answer.NONE),
    ],
    ids=["recovers", "stops", "lets in", "says nothing"],
)
def test_a_server_that_does_not_hang_is_left_alone(seen: Seen) -> None:
    """GIVEN a server in a long recovery, on its way to its end, at work, or stopped (SIGSTOP) WHEN it stays so for
    minutes THEN nothing is done to it."""
    server = Server(seen)
    with supervised(server):
        until(lambda: server.looks > 100, "it was looked at for a thousand seconds", timeout_s=30)
    assert server.deeds == []


def test_a_hung_server_is_ended_and_started_again_and_that_is_said() -> None:
    """GIVEN a server that lets nobody in and has no startup process WHEN a minute is over THEN that one is ended, and
    started again, once; the log says so."""
    server = Server(Seen(1, Answer.NOT_NOW))
    with capture_logs() as lines, supervised(server):
        until(lambda: server.seen == Seen(2, Answer.IN), "it is another one", timeout_s=30)
        until(lambda: server.looks > 50, "it was looked at for some minutes more", timeout_s=30)
    assert server.deeds == ["end 1", "start"]
    said = [line["event"] for line in lines]
    assert len(said) == 2 and "lets nobody in and does not recover" in said[0] and said[1].endswith("is back")
    assert lines[0]["pid"] == 1


def test_a_recovery_that_begins_within_the_minute_is_not_interrupted() -> None:
    """GIVEN a server that says "not now" WHEN it has a startup process every now and then THEN it is left alone."""
    server = Server(Seen(1, Answer.NOT_NOW))

    def now_and_then() -> None:
        server.seen = Seen(1, Answer.NOT_NOW, recovers=server.looks % 5 == 0)

    server.on_look = now_and_then
    with supervised(server):
        until(lambda: server.looks > 100, "it was looked at for a thousand seconds", timeout_s=30)
    assert server.deeds == []


def test_a_hung_server_that_cannot_be_ended_or_started_is_tried_again() -> None:
    """GIVEN a hung server WHEN ending it fails once, and starting it once THEN each is said and tried again."""
    server = Server(Seen(1, Answer.NOT_NOW))
    server.failures = {"end 1": [BusyError("it does not end")], "start": [DiskFullError("no space")]}
    with capture_logs() as lines, supervised(server):
        until(lambda: server.seen == Seen(2, Answer.IN), "it is back", timeout_s=30)
    assert server.deeds == ["end 1", "end 1", "start", "start"]
    failed = [line for line in lines if "does not start" in line["event"]]
    assert [str(line["error"]) for line in failed] == ["it does not end", "no space"]
    assert failed[1]["again_in_s"] > failed[0]["again_in_s"], "with longer waits, as before any other try"


def test_a_server_that_came_after_its_start_was_given_up_is_attached_to() -> None:
    """GIVEN a server that is gone WHEN its start is given up, and it is there all the same a moment later THEN it is
    started, which attaches to it, and said to be back."""
    server = Server(Seen(1, Answer.IN))
    server.seen = None
    server.failures = {"start": [UnreachableError("not ready in time")]}
    server.on_deed = lambda: setattr(server, "seen", Seen(2, Answer.IN))
    with capture_logs() as lines, supervised(server):
        until(lambda: lines and lines[-1]["event"].endswith("is back"), "it is said to be back", timeout_s=30)
        until(lambda: server.looks > 20, "it was looked at for some minutes more", timeout_s=30)
    assert server.deeds == ["start", "start"]
