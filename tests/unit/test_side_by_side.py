"""`make test` in parts: no test is forgotten, no failure is hidden, and Ctrl-C ends every part in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from evermark.testing.until import until
from tests.side_by_side import (
    FOLDERS_OF_TESTS,
    INTERRUPTED,
    NOTHING_SELECTED,
    PARTS,
    ROOT,
    Runner,
    folders_in_memory,
)
from tests.turns import LONG, TURNS, resting, turn_of

SAID = 'import sys; print("1.50s call     tests/x.py::slow"); print(sys.argv[1]); sys.exit(int(sys.argv[2]))'


def ran(folder: Path, **parts: tuple[str, str]) -> int:
    """Parts that say a line, and end with a code."""
    return Runner(parts, (sys.executable, "-c", SAID), folder).run(2)


def test_every_file_of_tests_is_in_one_part() -> None:
    """A file that no part names would never run; one that two name would run twice."""
    files = Counter(
        file
        for paths in PARTS.values()
        for path in paths
        for file in ([ROOT / path] if path.endswith(".py") else (ROOT / path).rglob("test_*.py"))
    )
    assert set(files) == set((ROOT / "tests").rglob("test_*.py"))
    assert max(files.values()) == 1


def test_three_turns_in_a_row_run_every_long_test() -> None:
    """GIVEN any turn WHEN it and the next two have run THEN each long test ran once; all, where all are asked for."""
    every = {f"tests/{file}::{name}" for row in LONG for file, name in row}
    assert {len(row) for row in LONG} == {TURNS}
    for first in (0, 1, 1080):
        ran = Counter(test for turn in range(first, first + TURNS) for test in every.difference(resting(turn)))
        assert ran == Counter(every)
    assert resting(turn_of({"TURN": "all"})) == []
    assert len(resting(turn_of({"TURN": "7"}))) == len(resting(turn_of({}))) == len(every) * (TURNS - 1) // TURNS
    with pytest.raises(SystemExit, match="neither a number nor 'all'"):
        turn_of({"TURN": "some"})


def test_every_long_test_is_there() -> None:
    """A name that no test has any more would rest for ever unnoticed: it would run each time."""
    for file, name in (test for row in LONG for test in row):
        assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(), name


def test_the_names_of_failed_tests_come_last(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN a part that fails among others WHEN all have ended THEN the code says so, and so does the end."""
    code = ran(tmp_path, good=("== 7 passed ==", "0"), bad=("FAILED tests/x.py::wrong", "1"), dead=("gone", "3"))
    assert code == 1
    said = capsys.readouterr().out.splitlines()
    assert any((line.startswith("good") and line.endswith("7 passed")) or "1.50s" in line for line in said)
    *_, first, second, last = said
    assert {first, second} == {
        "FAILED tests/x.py::wrong",
        f"dead: pytest ended with code 3, see {tmp_path / 'dead.log'}",
    }
    assert last == "failed"


def test_a_part_without_a_chosen_test_is_no_failure(tmp_path: Path) -> None:
    """GIVEN -k on the command line WHEN a part has nothing of it THEN others decide; if none has, that is a failure."""
    assert ran(tmp_path, one=("1 passed", "0"), none=("", "5")) == 0
    assert ran(tmp_path, one=("", "5"), none=("", "5")) == NOTHING_SELECTED


def test_parts_keep_bytecode_though_the_shell_does_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a shell that forbids bytecode WHEN a part starts a process THEN that may write what the next one reads."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import sys; sys.exit(sys.dont_write_bytecode)"
    assert Runner({"one": ()}, (sys.executable, "-c", code), tmp_path).run(1) == 0


def test_folders_are_in_memory_where_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a disk in memory WHEN it is large THEN the parts have a folder there, which is gone afterwards, as is
    what a run that was killed has left; else, and where somebody has chosen another folder, nothing is said."""
    monkeypatch.delenv(FOLDERS_OF_TESTS, raising=False)
    killed, running = (tmp_path / f"evermark-tests-{pid}-x" for pid in (2**22 + 1, os.getpid()))
    for left in (killed, running):
        (left / "data").mkdir(parents=True)
    with folders_in_memory(tmp_path, 1) as environ:
        code = "import pathlib, os, sys; pathlib.Path(os.environ[sys.argv[1]], 'left').touch()"
        assert Runner({"one": ()}, (sys.executable, "-c", code, FOLDERS_OF_TESTS), tmp_path, environ).run(1) == 0
        assert [path.name for path in Path(environ[FOLDERS_OF_TESTS]).iterdir()] == ["left"]
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [running]
    with folders_in_memory(tmp_path, 2**60) as environ, folders_in_memory(tmp_path / "none", 1) as other:
        assert environ == other == {}
    monkeypatch.setenv(FOLDERS_OF_TESTS, "chosen")
    with folders_in_memory(tmp_path, 1) as environ:
        assert environ == {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_reaches_each_part_once(tmp_path: Path, number: signal.Signals) -> None:
    """GIVEN two parts that run and one that waits WHEN we are interrupted THEN both end in order, it never begins."""
    part = """
import signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
print("begun", flush=True)
signal.sigwait([signal.SIGINT])
print("in order", signal.sigpending())
sys.exit(2)
"""
    code = f"""
import signal, sys
from pathlib import Path
from tests.side_by_side import Runner
runner = Runner(dict.fromkeys("abc", ()), (sys.executable, "-c", {part!r}), Path({str(tmp_path)!r}))
signal.signal({int(number)}, runner.stop)
sys.exit(runner.run(2))
"""
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    logs = [tmp_path / "a.log", tmp_path / "b.log"]
    until(lambda: all(log.exists() and "begun" in log.read_text() for log in logs), "two parts run")
    process.send_signal(number)
    assert process.wait(60) == INTERRUPTED
    assert [log.read_text().splitlines()[-1] for log in logs] == ["in order set()"] * 2
    assert not (tmp_path / "c.log").exists()
