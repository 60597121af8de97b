"""A command that is forked for a test behaves as the real one, in all that tests look at."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from evermark.testing.commands import REAL, Commands, Process
from evermark.testing.until import until
from tests.forked import FORKED

BOTH = pytest.mark.parametrize("commands", [FORKED, REAL], ids=["forked", "real"])


def _listening(out: Path, commands: Commands) -> Process:
    with out.open("wb") as file:
        process = commands.start(["listen", "--port", "0"], os.environ, file)
    until(lambda: "listening on" in out.read_text(), "it listens")
    return process


@BOTH
def test_signals_end_it_as_they_should_and_each_has_a_group_of_its_own(tmp_path: Path, commands: Commands) -> None:
    """GIVEN a command that runs WHEN it is killed, terminated or interrupted THEN its code says so."""
    killed, told, interrupted = (_listening(tmp_path / name, commands) for name in ("killed", "told", "interrupted"))
    assert len({os.getpgid(one.pid) for one in (killed, told, interrupted)} - {os.getpgid(0)}) == 3
    assert psutil.Process(killed.pid).cwd() == str(Path.cwd())
    killed.kill()
    assert killed.wait(30) == killed.returncode == -signal.SIGKILL
    assert told.poll() is None
    told.terminate()
    assert told.wait(30) == 0
    os.killpg(interrupted.pid, signal.SIGINT)
    assert interrupted.wait(30) == 0
    assert "requests 0" in (tmp_path / "interrupted").read_text()
    interrupted.kill()  # of what has ended nobody is hit


@BOTH
def test_what_it_says_and_how_it_ends_is_the_commands_own(tmp_path: Path, commands: Commands) -> None:
    """GIVEN commands that succeed, fail and are used wrongly THEN code, output and errors are those of the command."""
    version = commands.run(["--version"], os.environ)
    assert (version.returncode, version.stderr) == (0, "") and version.stdout.startswith("evermark ")
    failed = commands.run(["status", "-c", str(tmp_path / "none.yaml")], os.environ)
    assert (failed.returncode, failed.stdout) == (1, "") and f"there is no file {tmp_path}/none.yaml" in failed.stderr
    assert commands.run(["nonsense"], os.environ).returncode == 2
    (tmp_path / "given.yaml").write_text("version: 1\nname: ${GIVEN}\n")
    told = [
        commands.run(["config", "check", "-c", str(tmp_path / "given.yaml")], {**os.environ, **more})
        for more in ({}, {"GIVEN": "1x"})
    ]
    assert "GIVEN" in told[0].stderr and "GIVEN" not in told[1].stderr


@BOTH
def test_what_does_not_end_in_time_is_killed(commands: Commands) -> None:
    """GIVEN a command that goes on WHEN it is run for a limited time THEN that is told, and none of it is left."""
    seed = str(random.randrange(10**8, 10**9))  # by which it is found
    with pytest.raises(subprocess.TimeoutExpired):
        commands.run(["listen", "--port", "0", "--seed", seed], os.environ, 2.0)
    words = (process.info["cmdline"] or () for process in psutil.process_iter(["cmdline"]))
    assert not any(seed in each for each in words)


def test_other_sources_are_never_those_of_the_fork(tmp_path: Path) -> None:
    """GIVEN another PYTHONPATH, as a test of an upgrade has WHEN a command is run THEN it is the one found there."""
    package = tmp_path / "evermark" / "cli"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "main.py").write_text("print('an older one')")
    assert FORKED.run(["--version"], {**os.environ, "PYTHONPATH": str(tmp_path)}).stdout == "an older one\n"
