"""Which Spark master a deployment may run on. Pure: nothing is started or asked."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from evermark.errors import ConfigError

_THREADS = re.compile(r"local(\[\s*(\*|\d+)\s*(,\s*\d+\s*)?\])?")
_PROCESSES = re.compile(r"local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]")
_CLUSTERS = ("spark://", "k8s://", "yarn")
_USE_LOCAL = 'use a local master, for example spark: {master: "local[16,4]"}'


def master_in_effect(master: str, conf: Mapping[str, str]) -> str:
    """`spark.conf` wins over `spark.master`, also for the master itself."""
    return conf.get("spark.master", master)


def require_slots(master: str, conf: Mapping[str, str], lanes: int) -> None:
    """Raise `ConfigError` if the lanes would leave no slot for jobs: they would wait for ever.

    A lane takes a slot for as long as it lives; when it is renewed, its successor takes another.
    """
    named, wanted = master_in_effect(master, conf), 2 * lanes + 2
    slots = _slots(named)
    if slots is not None and slots < wanted:
        raise ConfigError(
            f"spark.master: {named} has {slots} slots; {wanted} are needed with spark.lanes: {lanes}",
            hint=f"{_USE_LOCAL}: slots are threads, not cores",
        )


def _slots(master: str) -> int | None:
    """How many tasks run at a time; None where that is not said."""
    if found := _THREADS.fullmatch(master):
        return 1 if found[2] is None else (os.cpu_count() or 1) if found[2] == "*" else int(found[2])
    if _PROCESSES.fullmatch(master):
        processes, cores, _ = (int(number) for number in re.findall(r"\d+", master))
        return processes * cores
    return None


def require_local_master(master: str, conf: Mapping[str, str], log_path: str) -> None:
    """Raise `ConfigError` unless all executors surely see the disk that holds the log.

    Executors write the log's files where they stand. A `local` master and a `local-cluster` run them on this machine;
    any other master may run them elsewhere, where a local `log_path` names another disk.
    """
    if "spark.remote" in conf:
        raise ConfigError(
            "spark.conf: spark.remote names a Spark Connect server, on which Evermark cannot run",
            hint=f"remove spark.remote and {_USE_LOCAL}",
        )
    named = master_in_effect(master, conf)
    key = "spark.conf: spark.master" if "spark.master" in conf else "spark.master"
    if _THREADS.fullmatch(named) or _PROCESSES.fullmatch(named):
        return
    if not named.startswith(_CLUSTERS):
        raise ConfigError(f"{key}: {named!r} is not a Spark master", hint=_USE_LOCAL)
    # A log in an object store could be read there; how State, keys and this program get there is not settled yet.
    seen = "" if "://" in log_path else f", which do not see the log at {log_path} on this machine"
    raise ConfigError(
        f"{key}: {named} runs its tasks on other machines{seen or '; this version runs them on one'}", hint=_USE_LOCAL
    )
