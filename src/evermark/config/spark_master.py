"""Which Spark master a deployment may run on, and what a cluster asks of the file. Pure: nothing is started."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping

from evermark.errors import ConfigError
from evermark.secrets import KeyRef, Secret

_THREADS = re.compile(r"local(\[\s*(\*|\d+)\s*(,\s*\d+\s*)?\])?")
_PROCESSES = re.compile(r"local-cluster\[\s*\d+\s*,\s*\d+\s*,\s*\d+\s*\]")
_CLUSTERS = ("spark://", "k8s://", "yarn")
_USE_LOCAL = 'use a local master, for example spark: {master: "local[16,4]"}'
# What a Postgres address may name that is a file of the machine which opens the connection.
_FILES_OF_A_DSN = re.compile(r"(?:^|[\s?&])(passfile|sslkey|sslcert|service|servicefile)\s*=", re.ASCII)


def master_in_effect(master: str, conf: Mapping[str, str]) -> str:
    """`spark.conf` wins over `spark.master`, also for the master itself."""
    return conf.get("spark.master", master)


def is_cluster(master: str, conf: Mapping[str, str]) -> bool:
    """Whether tasks run on machines that need not be this one."""
    return master_in_effect(master, conf).startswith(_CLUSTERS)


def beside_an_instance(master: str, conf: Mapping[str, str]) -> tuple[str, Mapping[str, str]]:
    """Master and settings for a command that asks Spark by itself: on this machine, also where the instance runs on a
    cluster. A question should not wait for a cluster's cores, nor take them from the lanes.
    """
    return ("local[4,4]", {}) if is_cluster(master, conf) else (master, conf)


def require_master(master: str, conf: Mapping[str, str]) -> None:
    """Raise `ConfigError` for what is no master of Spark, or none that Evermark can run on."""
    if "spark.remote" in conf:
        raise ConfigError(
            "spark.conf: spark.remote names a Spark Connect server, on which Evermark cannot run",
            hint=f"remove spark.remote and {_USE_LOCAL}",
        )
    named = master_in_effect(master, conf)
    if not (_THREADS.fullmatch(named) or _PROCESSES.fullmatch(named) or named.startswith(_CLUSTERS)):
        key = "spark.conf: spark.master" if "spark.master" in conf else "spark.master"
        raise ConfigError(f"{key}: {named!r} is not a Spark master", hint=_USE_LOCAL)


def cores_max(master: str, conf: Mapping[str, str], cores: int | None, lanes: int) -> int | None:
    """How many cores of a cluster are taken at most; None where a local master says it. Without a cap the first
    application on a standalone cluster would take them all.
    """
    if not is_cluster(master, conf):
        return None
    said = conf.get("spark.cores.max", "")
    return int(said) if said.isdigit() else cores or 4 * lanes + 4


def require_slots(master: str, conf: Mapping[str, str], lanes: int, cores: int | None = None) -> None:
    """Raise `ConfigError` if the lanes would leave no slot for jobs: they would wait for ever.

    A lane takes a slot for as long as it lives; when it is renewed, its successor takes another. So lanes have at most
    half of the slots.
    """
    named, wanted = master_in_effect(master, conf), 2 * lanes + 2
    if (cap := cores_max(master, conf, cores, lanes)) is not None:
        if cap < wanted:
            key = "spark.conf: spark.cores.max" if "spark.cores.max" in conf else "spark.cores"
            raise ConfigError(
                f"{key}: {cap} cores are too few; {wanted} are needed with spark.lanes: {lanes}",
                hint=f"write spark: {{cores: {wanted}}} or more, or fewer lanes",
            )
        return
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


def not_for_a_cluster(
    master: str,
    conf: Mapping[str, str],
    *,
    log_path: str,
    state: Secret | None,
    key: KeyRef | None,
    store_keys: Mapping[str, KeyRef | None],
) -> Iterator[tuple[str, ConfigError]]:
    """What tasks on other machines could not reach, with the key of the file and the line to write instead.

    `store_keys`: the references of `storage:`, by their key in the file. Nothing is found for a local master, and
    nothing for a `local-cluster`, whose processes are on this machine.
    """
    if not is_cluster(master, conf):
        return
    elsewhere = f"{master_in_effect(master, conf)} runs its tasks on other machines"
    or_local = f"; or {_USE_LOCAL}"
    if "://" not in log_path:
        yield (
            "log.path",
            ConfigError(
                f"log.path: {elsewhere}, which do not see the log at {log_path} on this machine",
                hint=f"write log: {{path: s3://bucket/path}} (docs/storage.md){or_local}",
            ),
        )
    if state is None:
        yield (
            "state.dsn",
            ConfigError(
                f"state.dsn: is not set, and {elsewhere}, which do not reach the embedded Postgres",
                hint=f'write state: {{dsn: "${{STATE_DSN}}"}} and name a Postgres that they reach{or_local}',
            ),
        )
    elif found := _FILES_OF_A_DSN.search(state.reveal()):
        yield (
            "state.dsn",
            ConfigError(
                f"state.dsn: {found[1]} names a file, and {elsewhere}, which do not have it",
                hint="write the password into the variable that state.dsn names: it travels sealed",
            ),
        )
    if key is None or key.kind == "file":
        where = "is not set: the key would be a file of this machine" if key is None else f"is the file {key.name}"
        yield (
            "secrets.key",
            ConfigError(
                f"secrets.key: {where}, and {elsewhere}",
                hint='write secrets: {key: "${EVERMARK_KEY}"} and set that variable here and for the executors'
                f" (docs/cluster.md){or_local}",
            ),
        )
    for name, ref in store_keys.items():
        if ref is not None and ref.kind == "file":
            variable = name.rpartition(".")[2].upper()
            yield (
                name,
                ConfigError(
                    f"{name}: is the file {ref.name}, and {elsewhere}",
                    hint=f'write {name.rpartition(".")[2]}: "${{S3_{variable}}}" and set that variable here: its value'
                    " travels sealed",
                ),
            )
