"""Which Java Spark is started with. The runtimes here are scripts; tests/spark runs the real ones."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from evermark.embedded import java
from evermark.errors import ConfigError, SetupError


def fake_java(home: Path, version: str, *, status: int = 0) -> Path:
    """A Java home whose `java` says what a real one would say, then lists its arguments."""
    command = home / "bin" / "java"
    command.parent.mkdir(parents=True)
    command.write_text(
        "#!/bin/sh\n"
        f'echo "    java.home = {home}" >&2\n'
        f'echo "    java.specification.version = {version}" >&2\n'
        'for arg do printf "[%s]" "$arg"; done\n'
        f"exit {status}\n"
    )
    command.chmod(0o755)
    return home


@pytest.fixture
def bundled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    home = fake_java(tmp_path / "it's bundled", "25")
    (home / "release").write_text("here")
    monkeypatch.setattr(java, "bundled_runtime", lambda: home)
    return home


def test_java_home_comes_first_when_new_enough(tmp_path: Path, bundled: Path) -> None:
    """A machine's own Java is used as it is."""
    home = fake_java(tmp_path / "own", "17")
    assert java.ensure_java(tmp_path / "cache", {"JAVA_HOME": str(home), "PATH": ""}) == home


def test_java_on_the_path_is_used_when_java_home_is_too_old(tmp_path: Path, bundled: Path) -> None:
    """An old JAVA_HOME does not hide a good Java on the PATH."""
    old, good = fake_java(tmp_path / "old", "1.8"), fake_java(tmp_path / "good", "21")
    env = {"JAVA_HOME": str(old), "PATH": f"{good / 'bin'}{os.pathsep}/bin{os.pathsep}/usr/bin"}
    assert java.ensure_java(tmp_path / "cache", env) == good


@pytest.mark.parametrize("env", [{"EVERMARK_JAVA": "bundled"}, {"JAVA_HOME": "/nowhere"}, {}])
def test_bundled_java_serves_when_asked_for_or_when_there_is_no_other(
    tmp_path: Path, bundled: Path, env: dict[str, str]
) -> None:
    """Forced, or for want of another: the bundled runtime behind a folder of our own."""
    home = java.ensure_java(tmp_path / "cache", {"PATH": "", **env})
    assert home.parent == tmp_path / "cache"
    assert (home / "release").read_text() == "here"


def test_bundled_java_is_not_given_the_argument_it_lacks(tmp_path: Path, bundled: Path) -> None:
    """One argument is dropped; all others arrive as they were, in order, spaces and all."""
    home = java.shim_home(bundled, tmp_path / "cache")
    given = ["-cp", "a b", "--add-modules=jdk.incubator.vector", "", "x*", "--add-modules=ALL-SYSTEM"]
    ran = subprocess.run([home / "bin" / "java", *given], capture_output=True, text=True, check=True)
    assert ran.stdout == "[-cp][a b][][x*][--add-modules=ALL-SYSTEM]"


def test_folder_for_the_bundled_java_is_made_once_and_whole(tmp_path: Path, bundled: Path) -> None:
    """Any number may ask for it at the same time; all get the same folder, and nothing is left lying about."""
    cache = tmp_path / "cache"
    with ThreadPoolExecutor(8) as pool:
        homes = set(pool.map(lambda _: java.shim_home(bundled, cache), range(16)))
    assert len(homes) == 1
    assert list(cache.iterdir()) == list(homes)


def test_no_java_at_all_says_what_was_tried_and_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names each Java that was looked at, and both ways out."""
    monkeypatch.setattr(java, "bundled_runtime", lambda: None)
    old = fake_java(tmp_path / "old", "11")
    with pytest.raises(SetupError) as caught:
        java.ensure_java(tmp_path / "cache", {"JAVA_HOME": str(old), "PATH": ""})
    assert "version 11" in caught.value.message
    assert "JAVA_HOME" in caught.value.hint
    assert "evermark[embedded]" in caught.value.hint


def test_bundled_java_that_does_not_run_is_an_error_here_and_not_in_spark(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime that cannot be executed is found before Spark trips over it."""
    broken = fake_java(tmp_path / "broken", "25", status=1)
    monkeypatch.setattr(java, "bundled_runtime", lambda: broken)
    with pytest.raises(SetupError, match="does not run"):
        java.ensure_java(tmp_path / "cache", {"PATH": ""})


def test_unknown_choice_names_the_known_ones(tmp_path: Path) -> None:
    """A typing error in EVERMARK_JAVA is not taken for `auto`."""
    with pytest.raises(ConfigError, match="bundeld") as caught:
        java.ensure_java(tmp_path, {"EVERMARK_JAVA": "bundeld"})
    assert "bundled" in caught.value.hint
