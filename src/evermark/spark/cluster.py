"""What Spark is told when its executors are on other machines: addresses, a cap, and what their environment holds.

Executors share no file and no environment with the driver. What their Python processes need of it (where the channel is
and its key, how the log's bucket is reached, the values behind the names in `storage:`) is sealed with the deployment's
key into one variable. `spark.executorEnv` is shown in Spark's UI and written into its event logs: nothing in it is
plain but names. The key itself never travels: an executor has it in its own environment, put there by the operator.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import sys
import zipfile
from collections.abc import Iterable, Mapping, MutableMapping
from contextlib import suppress
from importlib import metadata

from evermark.errors import ConfigError, EvermarkError
from evermark.secrets import KeyRef, SecretBox

_SEALED, _SEALED_BY = "EVERMARK_SEALED", "EVERMARK_SEALED_BY"
# Of the driver's environment. An object store's own chain is part of it, where it stands in variables.
_TOLD = (
    "EVERMARK_CHANNEL",
    "EVERMARK_CHANNEL_KEY",
    "EVERMARK_STORAGE",
    "AWS_ACCESS_KEY_ID",
    "AWS_SECRET_ACCESS_KEY",
    "AWS_SESSION_TOKEN",
    "AWS_REGION",
    "AWS_DEFAULT_REGION",
    "AWS_ENDPOINT_URL",
)
_AWS_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_HOST_OF_MASTER = re.compile(r"(?:k8s://)?(?:spark|https?)://(\[[^\]]+\]|[^:/,\[\]]+)")
_VERSION = re.compile(rb"""__version__[^=]*=\s*["']([^"']+)""")

_SETTINGS = {
    # What one executor lacks (the key, a library, a route to State) fails a task there; its next try is elsewhere.
    "spark.excludeOnFailure.taskAndStage.enabled": "true",
    "spark.excludeOnFailure.task.maxTaskAttemptsPerExecutor": "1",
    # A machine may have several executors, and the death of one says nothing of the others. (It has to be less than
    # the tries of a task, four.)
    "spark.excludeOnFailure.task.maxTaskAttemptsPerNode": "3",
    "spark.scheduler.excludeOnFailure.unschedulableTaskSetTimeout": "2s",
    # Nothing is kept on executors that another one would want to have back.
    "spark.shuffle.service.enabled": "false",
    "spark.executor.extraJavaOptions": "-Xss16m -XX:+UseSerialGC -XX:TieredStopAtLevel=1 -XX:+ExitOnOutOfMemoryError",
}


def driver_address(master: str, conf: Mapping[str, str]) -> str:
    """Where executors find this process: what `spark.driver.host` says, or the address by which this machine reaches
    the master. On loopback when the master is.
    """
    if said := conf.get("spark.driver.host"):
        return said
    named = _HOST_OF_MASTER.match(master)
    try:
        # A connection of UDP sends nothing: it only asks which of this machine's addresses leads there.
        if named is not None:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
                probe.connect((named[1].strip("[]"), 7077))
                return str(probe.getsockname()[0])
        found = socket.gethostbyname(socket.gethostname())
    except OSError as error:
        raise ConfigError(
            f"spark.master: {master}: no address of this machine leads there ({error})", hint=_SAY_HOST
        ) from None
    if ipaddress.ip_address(found).is_loopback:
        raise ConfigError(f"spark.master: {master}: this machine's name is {found} to itself", hint=_SAY_HOST)
    return found


_SAY_HOST = (
    "write spark: {conf: {spark.driver.host: ADDRESS}}, an address of this machine that the executors reach, and"
    " spark.driver.bindAddress where it is not its own"
)


def cluster_settings(
    address: str, cores_max: int, box: SecretBox, names: Iterable[str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """The settings of a context on a cluster, beside those of any other. `names` are variables whose values executors
    need, too.
    """
    given = os.environ if environ is None else environ
    told = {name: given[name] for name in (*_TOLD, *names) if given.get(name)}
    return {
        **_SETTINGS,
        "spark.driver.host": address,
        "spark.driver.bindAddress": address,
        "spark.cores.max": str(cores_max),
        f"spark.executorEnv.{_SEALED}": box.seal(json.dumps(told)),
        f"spark.executorEnv.{_SEALED_BY}": str(box.key_ref),
    }


def unsealed_here(environ: MutableMapping[str, str] | None = None) -> str | None:
    """In a Python process of an executor: what the driver sealed is put into the environment, for this process and the
    workers it forks. Where a variable that is not Evermark's is there already, it is this machine's own, and stays.
    Returns why this machine cannot run tasks; None when it can, and where nothing was sealed: tasks run beside the
    driver.
    """
    given = os.environ if environ is None else environ
    sealed = given.get(_SEALED)
    if sealed is None:
        return None
    try:
        kind, _, name = given.get(_SEALED_BY, "").partition(":")
        told = json.loads(SecretBox(KeyRef(kind, name)).open(sealed))
    except EvermarkError as error:
        return f"{error.message}, on the executor at {socket.gethostname()} ({error.hint})"
    own_keys = any(name in given for name in _AWS_KEYS)  # the three belong together
    for key, value in told.items():
        if key.startswith("EVERMARK_") or not (key in given or (own_keys and key in _AWS_KEYS)):
            given[key] = value
    return None


def prefer_installed_pyspark() -> None:
    """Spark puts a zipped PySpark first on the path of its Python processes. What comes out of a zip is compiled each
    time: the import took 11 s where the installed package took 5. Both are the same if their versions are.
    """
    for path in [path for path in sys.path if path.endswith("pyspark.zip")]:
        with (
            suppress(OSError, KeyError, zipfile.BadZipFile, metadata.PackageNotFoundError),
            zipfile.ZipFile(path) as one,
        ):
            found = _VERSION.search(one.read("pyspark/version.py"))
            if found is not None and found[1].decode() == metadata.version("pyspark"):
                sys.path.remove(path)
