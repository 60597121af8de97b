"""Which Spark masters may write a log on a local disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from evermark.app.run import Pipeline
from evermark.config.spark_master import require_local_master, require_slots
from evermark.errors import ConfigError
from tests.unit.config.config_file import read, source

LOG = "/data/log"


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
    require_local_master(master, {}, LOG)


@pytest.mark.parametrize("master", ["spark://10.0.0.1:7077", "spark://a:7077,b:7077", "yarn", "k8s://https://api:6443"])
def test_a_cluster_is_refused_while_the_log_is_on_a_local_disk(master: str) -> None:
    """The error names the key, the master, the log's path and a master to use instead."""
    with pytest.raises(ConfigError) as caught:
        require_local_master(master, {}, LOG)
    assert caught.value.message.startswith(f"spark.master: {master} runs its tasks on other machines")
    assert LOG in caught.value.message
    assert 'master: "local[16,4]"' in caught.value.hint


@pytest.mark.parametrize(
    "master", ["locall", "local[", "local[x]", "local-cluster", "mesos://a:5050", "sparc://a:1", ""]
)
def test_what_is_no_master_is_told_so(master: str) -> None:
    """Before any JVM starts."""
    with pytest.raises(ConfigError, match="is not a Spark master"):
        require_local_master(master, {}, LOG)


def test_a_master_or_a_connect_server_named_in_the_conf_is_found_too() -> None:
    """`spark.conf` wins over `spark.master`, so it cannot be a way round the check."""
    with pytest.raises(ConfigError, match=r"^spark\.conf: spark\.master: spark://a:1 runs its tasks"):
        require_local_master("local", {"spark.master": "spark://a:1"}, LOG)
    with pytest.raises(ConfigError, match=r"spark\.remote"):
        require_local_master("local", {"spark.remote": "sc://a"}, LOG)
    require_local_master("spark://a:1", {"spark.master": "local[2]"}, LOG)


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
