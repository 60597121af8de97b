"""The Spark home that lacks the zipped copy of PySpark, and whose archive of classes it starts with."""

from __future__ import annotations

from pathlib import Path

import pyspark
import pytest

from evermark.embedded.java import CACHE_ENV, shim_home
from evermark.spark.home import archive_of, spark_home

INSTALLED = Path(pyspark.__file__).resolve().parent


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
