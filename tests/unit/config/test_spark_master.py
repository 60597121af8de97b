"""Which Spark masters a deployment may run on, and what a cluster asks of its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from evermark.app.run import Pipeline
from evermark.config import Config
from evermark.config.spark_master import beside_an_instance, cores_max, is_cluster, require_master, require_slots
from evermark.errors import ConfigError
from tests.unit.config.config_file import read, source


@pytest.mark.parametrize(
    "master",
    [
        "local",
        "local[4]",
        "local[*]",
        "local[16,4]",
        "local[*, 4]",
        "local-cluster[2,1,1024]",
        "local-cluster[2, 1, 512]",
    ],
)
def test_a_master_that_runs_its_tasks_on_this_machine_is_accepted(master: str) -> None:
    """Threads of this process, or processes beside it: both see this machine's disks."""
    require_master(master, {})


CLUSTERS = ["spark://10.0.0.1:7077", "spark://a:7077,b:7077", "yarn", "k8s://https://api:6443"]


def found(config: Config) -> dict[str, str]:
    return {key: f"{error.message}\n{error.hint}" for key, error in config.not_for_a_cluster()}


@pytest.mark.parametrize("master", CLUSTERS)
def test_a_cluster_is_told_each_line_that_its_machines_cannot_reach(tmp_path: Path, master: str) -> None:
    """GIVEN a file for one machine WHEN its master is a cluster THEN log, State and key are refused, each with the line
    to write; GIVEN files behind the store's keys and in State's address THEN these, too.
    """
    require_master(master, {})
    texts = found(read(tmp_path, source() + f"spark: {{master: '{master}'}}\n"))
    assert list(texts) == ["log.path", "state.dsn", "secrets.key"]
    assert all(master in text and 'master: "local[16,4]"' in text for text in texts.values())
    assert "write log: {path: s3://" in texts["log.path"]
    assert 'write state: {dsn: "${STATE_DSN}"}' in texts["state.dsn"]
    assert 'write secrets: {key: "${EVERMARK_KEY}"}' in texts["secrets.key"]
    for name in ("k", "a", "s"):
        (tmp_path / name).write_text("a text that is long enough to be a key")
    files = (
        f"spark: {{master: '{master}'}}\nlog: {{path: s3://b/l}}\nstate: {{dsn: 'host=h passfile=/p'}}\n"
        "secrets: {key: '${file:k}'}\nstorage: {access_key: '${file:a}', secret_key: '${file:s}'}\n"
    )
    texts = found(read(tmp_path, source() + files))
    assert list(texts) == ["state.dsn", "secrets.key", "storage.access_key", "storage.secret_key"]
    assert "passfile" in texts["state.dsn"] and str(tmp_path / "k") in texts["secrets.key"]
    assert "${S3_SECRET_KEY}" in texts["storage.secret_key"]


def test_a_file_that_is_fit_for_a_cluster_is_taken(tmp_path: Path) -> None:
    """Log in a bucket, State a server, key in a variable. A file for one machine has nothing to change either."""
    fit = (
        "spark: {master: 'spark://a:7077'}\nlog: {path: s3://b/l}\nstate: {dsn: 'host=h password=p'}\n"
        "secrets: {key: '${EVERMARK_KEY}'}\n"
        "storage: {access_key: '${S3_ACCESS_KEY}', secret_key: '${S3_SECRET_KEY}'}\n"
    )
    assert found(read(tmp_path, source() + fit)) == {}
    assert found(read(tmp_path, source())) == {}


@pytest.mark.parametrize(
    "master", ["locall", "local[", "local[x]", "local-cluster", "mesos://a:5050", "sparc://a:1", ""]
)
def test_what_is_no_master_is_told_so(master: str) -> None:
    """Before any JVM starts."""
    with pytest.raises(ConfigError, match="is not a Spark master"):
        require_master(master, {})


def test_a_master_or_a_connect_server_named_in_the_conf_is_found_too() -> None:
    """`spark.conf` wins over `spark.master`, so it cannot be a way round the check."""
    assert is_cluster("local", {"spark.master": "spark://a:1"})
    assert not is_cluster("spark://a:1", {"spark.master": "local[2]"})
    with pytest.raises(ConfigError, match=r"^spark\.conf: spark\.master: 'x' is not"):
        require_master("local", {"spark.master": "x"})
    with pytest.raises(ConfigError, match=r"spark\.remote"):
        require_master("local", {"spark.remote": "sc://a"})


def test_up_refuses_a_cluster_before_it_starts_anything(tmp_path: Path) -> None:
    """GIVEN a cluster's master and a local log WHEN the deployment is started THEN it ends, and has made no folder."""
    config = read(tmp_path, source() + "spark: {master: 'spark://127.0.0.1:1'}\n")
    with pytest.raises(ConfigError, match="do not see the log"):
        Pipeline(config).run()
    assert not config.data.exists()


def test_a_master_without_a_slot_beside_its_lanes_is_refused() -> None:
    """A lane takes a slot for as long as it lives: a job would wait for one for ever."""
    for master in ("local", "local[3]", "local-cluster[3,1,1024]"):
        with pytest.raises(ConfigError, match=r"4 are needed with spark\.lanes: 1"):
            require_slots(master, {}, 1)
    with pytest.raises(ConfigError, match="has 8 slots; 10 are needed"):
        require_slots("local[16,4]", {"spark.master": "local[8]"}, 4)
    for master in ("local[4]", "local[16,4]", "local-cluster[2,2,1024]", "spark://somewhere:7077"):
        require_slots(master, {}, 1)
    require_slots("local[10]", {}, 4)


def test_a_command_beside_the_instance_asks_a_spark_of_its_own() -> None:
    """GIVEN a cluster THEN a question runs here, without the cluster's settings; a local master is used as it is."""
    assert beside_an_instance("spark://a:1", {"spark.cores.max": "9"}) == ("local[4,4]", {})
    assert beside_an_instance("local[2]", {"a": "b"}) == ("local[2]", {"a": "b"})


def test_a_cluster_is_not_taken_whole_and_gives_lanes_half_of_the_cap() -> None:
    """The cap is what the file says, or grows with the lanes; jobs have a slot beside them in any case."""
    assert cores_max("local[16,4]", {}, 3, 1) is None
    assert cores_max("spark://a:1", {}, None, 1) == 8
    assert cores_max("spark://a:1", {}, None, 10) == 44
    assert cores_max("spark://a:1", {}, 100, 1) == 100
    assert cores_max("spark://a:1", {"spark.cores.max": "12"}, 100, 1) == 12
    with pytest.raises(ConfigError, match=r"^spark\.cores: 5 cores are too few; 6 are needed with spark\.lanes: 2"):
        require_slots("spark://a:1", {}, 2, 5)
    with pytest.raises(ConfigError, match=r"^spark\.conf: spark\.cores\.max: 3 cores"):
        require_slots("spark://a:1", {"spark.cores.max": "3"}, 1)
    require_slots("spark://a:1", {}, 64)
