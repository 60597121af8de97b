"""One deployment for the fault tests that need nothing of their own: a start of the real process is 13 s of processor.

Most of what they start is forked from a process that has loaded the program (`tests/forked.py`). One test of each kind
of source starts the real command (`commands=REAL`), and so does one of several instances, of a cluster, of Ctrl-C.

Tests that share the deployment run one after the other, after all others, and leave it whole: every order has arrived
at every receiver. A test that ended the instance, or killed it, leaves the next start to the test that follows.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from evermark.testing.pipeline import Instance, Stage, Writer
from evermark.testing.replays import ReplayScene
from evermark.testing.servers import PostgresServer, fresh_database
from tests.faults import own_sources
from tests.forked import FORKED

Stage.commands = FORKED


class OwnSourceStage(Stage):
    """A deployment with a source of a user's own (own_sources.py), read from its beginning."""

    source = "numbers"
    count = 50

    def __init__(self, folder: Path, kind: str) -> None:
        super().__init__(folder, {"one": None}, one="from: beginning")
        self.kind = kind

    def settings(self) -> str:
        (self.folder / "count").write_text(str(self.count))
        return f'{{type: "{own_sources.__name__}:{self.kind}", options: {{folder: "{self.folder}"}}}}'

    def committed(self) -> list[str]:
        return [f"n-{n}" for n in range(self.count)]


class SharedShop(ReplayScene):
    """A shop with three receivers: `one` accepts, `flaky` answers as a test says, `bundled` takes 20 at a time."""

    _running: Instance | None = None
    _failpoint: str | None = None

    def running(self, failpoint: str | None = None) -> Instance:
        """The instance that is up, with this failpoint if one is named; started if there is none."""
        if failpoint is not None and failpoint != self._failpoint:
            self.end()
        if self._running is None or self._running.died():
            self.take(self.up(failpoint), failpoint)
        assert self._running is not None
        return self._running

    def end(self) -> None:
        """In order, if an instance is up: a test wants to start one with a failpoint."""
        if self._running is not None and not self._running.died():
            assert self._running.terminate() == 0, self._running.text()[-2000:]

    def take(self, instance: Instance, failpoint: str | None = None) -> None:
        """The instance that the tests to come find running."""
        self._running, self._failpoint = instance, failpoint

    def begin(self) -> None:
        if self._running is not None:
            self._running.forget()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Orders are written all the while; afterwards every receiver must have every order once."""
        writer = Writer(self.dsn)
        writer.start()
        try:
            yield
        finally:
            writer.finish()
        self.check_complete()

    def wait_more(self, events: int) -> None:
        self.wait_delivered(self.delivered("one") + events)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Between two tests that share the deployment it should not idle through others."""
    items.sort(key=lambda item: "shared_shop" in getattr(item, "fixturenames", ()))


_LINES_SHOWN = 80


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Function, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A failure comes with the last lines of the instances that the test has run: they are gone with the machine."""
    report = yield
    if call.when == "call" and report.failed:
        given = item.funcargs.values()
        folders = {path for one in given if isinstance(path := getattr(one, "folder", one), Path)}
        for log in sorted(log for folder in folders for log in folder.rglob("up-*.log")):
            lines = log.read_text(errors="replace").splitlines()[-_LINES_SHOWN:]
            report.sections.append((f"the end of {log.name}", "\n".join(lines)))
    return report


@pytest.fixture(scope="session")
def shared_shop(pg_server: PostgresServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedShop]:
    folder = tmp_path_factory.mktemp("shared")
    folder.chmod(0o711)
    receivers = {"one": None, "flaky": None, "bundled": None}
    with fresh_database(pg_server) as dsn, SharedShop(folder, dsn, receivers, bundled="bundle: 20") as scene:
        yield scene
        scene.end()


@pytest.fixture
def shop(shared_shop: SharedShop) -> SharedShop:
    """The shared deployment; its instance's log is read from here on."""
    shared_shop.begin()
    return shared_shop
