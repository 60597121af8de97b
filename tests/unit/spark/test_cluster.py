"""What executors on other machines are told, and how."""

from __future__ import annotations

import json
import socket
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from evermark.errors import ConfigError
from evermark.secrets import KeyRef, SecretBox
from evermark.spark.cluster import cluster_settings, driver_address, prefer_installed_pyspark, unsealed_here

DRIVER = {
    "EVERMARK_CHANNEL": "10.0.0.1:4711",
    "EVERMARK_CHANNEL_KEY": "channel-key-in-the-clear",
    "EVERMARK_STORAGE": '{"s3://acme":{}}',
    "S3_SECRET": "store-secret-in-the-clear",
    "HOME": "/home/driver",
}


def told(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("DEPLOYMENT_KEY", "a key of sixteen bytes or more")
    box = SecretBox(KeyRef("env", "DEPLOYMENT_KEY"))
    return cluster_settings("10.0.0.1", 8, box, ["S3_SECRET", "NOT_SET"], DRIVER)


def on_executor(settings: dict[str, str], **more: str) -> dict[str, str]:
    names = {key.removeprefix("spark.executorEnv."): value for key, value in settings.items() if "executorEnv" in key}
    return {**names, **more}


def test_no_secret_is_plain_in_what_spark_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN secrets in the driver's environment THEN Spark's settings, which its UI and event logs show, hold names and
    a sealed text; the driver's other variables stay with it."""
    settings = told(monkeypatch)
    shown = json.dumps(settings)
    assert not any(value in shown for name, value in DRIVER.items() if name != "EVERMARK_CHANNEL")
    assert "a key of sixteen" not in shown
    assert settings["spark.driver.host"] == settings["spark.driver.bindAddress"] == "10.0.0.1"
    assert settings["spark.cores.max"] == "8"


def test_an_executor_with_the_key_gets_all_and_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN an executor that has the key and a variable of its own WHEN it unseals THEN it has the driver's, and
    its own is as it was."""
    env = on_executor(told(monkeypatch), S3_SECRET="its own")
    assert unsealed_here(env) is None
    assert {name: env[name] for name in DRIVER if name.startswith("EVERMARK_")} == {
        name: value for name, value in DRIVER.items() if name.startswith("EVERMARK_")
    }
    assert env["S3_SECRET"] == "its own"
    assert "HOME" not in env


def test_an_executor_without_the_key_says_so_and_which_machine_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN no key, or another one THEN the reason names the variable and the host; beside the driver nothing is
    sealed, and nothing is asked for."""
    env = on_executor(told(monkeypatch))
    monkeypatch.delenv("DEPLOYMENT_KEY")
    unfit = unsealed_here(env) or ""
    assert "the variable DEPLOYMENT_KEY is not set" in unfit and socket.gethostname() in unfit
    monkeypatch.setenv("DEPLOYMENT_KEY", "another key of sixteen bytes")
    assert "sealed with another key" in (unsealed_here(env) or "")
    assert unsealed_here({"HOME": "/"}) is None


def test_the_driver_is_where_the_master_can_reach_it() -> None:
    """On loopback for a master on loopback; what the file says wins; a name that leads nowhere is an error."""
    assert driver_address("spark://127.0.0.1:7077", {}) == "127.0.0.1"
    assert driver_address("spark://127.0.0.1:7077", {"spark.driver.host": "10.1.2.3"}) == "10.1.2.3"
    with pytest.raises(ConfigError, match="no address of this machine leads there") as caught:
        driver_address("spark://no-such-host.invalid:7077", {})
    assert "spark.driver.host" in caught.value.hint


def test_a_zipped_pyspark_gives_way_to_the_installed_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN the zip of the same version THEN it is left out; GIVEN another version THEN it stays."""
    same, other = tmp_path / "a" / "pyspark.zip", tmp_path / "b" / "pyspark.zip"
    for path, version in ((same, metadata.version("pyspark")), (other, "0.0.1")):
        path.parent.mkdir()
        with zipfile.ZipFile(path, "w") as file:
            file.writestr("pyspark/version.py", f"__version__: str = '{version}'\n")
    rest = [str(other), str(tmp_path / "gone" / "pyspark.zip"), *sys.path]
    monkeypatch.setattr(sys, "path", [str(same), *rest])
    prefer_installed_pyspark()
    assert sys.path == rest
