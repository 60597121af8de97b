"""The Spark home that lacks the zipped copy of PySpark, and whose archive of classes it starts with."""

from __future__ import annotations

import os
from pathlib import Path

import pyspark
import pytest

from evermark.embedded.java import CACHE_ENV, shim_home
from evermark.spark.home import archive_of, java_options, spark_home

INSTALLED = Path(pyspark.__file__).resolve().parent
WHOLE = bytes.fromhex("a8ab0bf0") + b"classes"


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "cache"))
    monkeypatch.delenv("SPARK_HOME", raising=False)


def test_it_has_what_starts_spark_and_nothing_that_shadows_the_installed_package() -> None:
    """GIVEN no home WHEN one is made, twice THEN it leads to the jars and the programs, and to no zip."""
    home = spark_home("local[4]")
    assert spark_home("local[4]") == home
    assert sorted(p.name for p in home.iterdir()) == ["bin", "jars", "sbin"]
    assert (home / "jars").resolve() == INSTALLED / "jars"
    assert (home / "bin" / "spark-submit").exists()


def test_links_that_lead_elsewhere_are_repaired() -> None:
    """GIVEN a home whose jars lead nowhere WHEN it is asked for THEN they lead to the installed ones again."""
    home = spark_home("local[4]")
    (home / "jars").unlink()
    (home / "jars").symlink_to("/nowhere")
    assert (spark_home("local[4]") / "jars").resolve() == INSTALLED / "jars"


def test_a_home_of_the_users_own_and_one_that_others_share_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN SPARK_HOME, or a cluster that is sent PySpark from there WHEN the home is asked for THEN nothing of ours is
    put in its place."""
    assert spark_home("yarn") == spark_home("k8s://https://127.0.0.1:6443") == INSTALLED
    monkeypatch.setenv("SPARK_HOME", "/opt/spark")
    assert spark_home("local[4]") == Path("/opt/spark")


def test_a_cache_that_cannot_be_written_costs_time_only(tmp_path: Path) -> None:
    """GIVEN a file where the cache should be WHEN the home is asked for THEN it is PySpark's own."""
    (tmp_path / "cache").write_text("")
    assert spark_home("local[4]") == INSTALLED


def test_deployments_on_the_bundled_java_share_the_archive_that_setup_made(tmp_path: Path) -> None:
    """GIVEN folders through which deployments use one runtime THEN they have one archive; another Java has its own."""
    home = spark_home("local[4]")
    one, other = tmp_path / "runtime", tmp_path / "newer"
    for runtime in (one, other):
        (runtime / "lib").mkdir(parents=True)
    folders = [shim_home(one, tmp_path / name / "java") for name in ("cache", "shop", "chat")]
    assert len(set(folders)) == 3
    assert {archive_of(str(folder), home) for folder in (one, *folders)} == {archive_of(str(one), home)}
    assert archive_of(str(shim_home(other, tmp_path / "shop")), home) != archive_of(str(one), home)


def a_runtime(folder: Path, version: str) -> str:
    (folder / "lib").mkdir(parents=True)
    (folder / "release").write_text(f'IMPLEMENTOR="Somebody"\nJAVA_VERSION="{version}"\n')
    return str(folder)


def test_each_java_is_given_the_kind_of_archive_that_it_has(tmp_path: Path) -> None:
    """GIVEN an old Java and one that archives linked classes WHEN their options are asked for THEN the old one leaves
    an archive behind, the new one, which would take a minute for it, does not; and both use one that is there."""
    home = spark_home("local[4]")
    old, new = a_runtime(tmp_path / "17", "17.0.20.1"), a_runtime(tmp_path / "25", "25.0.2")
    assert f"-XX:ArchiveClassesAtExit={archive_of(old, home)}." in java_options(old, home)
    assert java_options(new, home) == ""
    for java in (old, new):
        archive_of(java, home).write_bytes(WHOLE)
    assert f"-XX:SharedArchiveFile={archive_of(old, home)} " in java_options(old, home)
    assert f"-XX:AOTCache={archive_of(new, home)} " in java_options(new, home)


def test_what_a_jvm_left_behind_is_taken_over_when_it_is_whole(tmp_path: Path) -> None:
    """GIVEN what an ended process and one that runs have left, and notes of a JVM that was at it WHEN the options are
    asked for THEN only what the ended one left is the archive."""
    home, java = spark_home("local[4]"), a_runtime(tmp_path / "17", "17.0.20.1")
    archive = archive_of(java, home)
    ended, running, notes = (archive.with_name(f"{archive.name}.{end}") for end in (2**22 + 1, os.getpid(), "config"))
    for left in (running, notes):
        left.write_bytes(WHOLE)
    assert "ArchiveClassesAtExit" in java_options(java, home)
    ended.write_bytes(WHOLE)
    assert "SharedArchiveFile" in java_options(java, home)
    assert archive.read_bytes() == WHOLE
    assert running.exists() and notes.exists()


@pytest.mark.parametrize("half", [b"", bytes(8192) + b"classes"], ids=["nothing", "without its head"])
def test_what_a_killed_jvm_left_half_written_is_no_archive(tmp_path: Path, half: bytes) -> None:
    """GIVEN an archive whose JVM was killed at it WHEN the options are asked for THEN a whole archive stays what it
    was; and where the half has the archive's place, the next JVM makes one."""
    home, java = spark_home("local[4]"), a_runtime(tmp_path / "17", "17.0.20.1")
    archive = archive_of(java, home)
    left = archive.with_name(f"{archive.name}.{2**22 + 1}")
    archive.write_bytes(WHOLE)
    left.write_bytes(half)
    assert "SharedArchiveFile" in java_options(java, home)
    assert archive.read_bytes() == WHOLE and not left.exists()

    archive.write_bytes(half)
    assert "ArchiveClassesAtExit" in java_options(java, home)
    left.write_bytes(WHOLE)
    assert "SharedArchiveFile" in java_options(java, home)
    assert archive.read_bytes() == WHOLE
