"""`make chaos ARGS=--engine`: Spark's processes killed under load, again and again, with a standby waiting.

Each time either the process starts Spark anew or the standby takes over; events arrive again within 30 seconds, and at
the end none is missing and none was handled twice.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import psutil

from evermark.testing.pipeline import Instance, Ledger, Scene, Writer
from evermark.testing.until import until

RESUMED_WITHIN_S = 30.0
_DAEMON = "evermark.app.daemon"


def spark_processes(instance: Instance) -> dict[str, list[psutil.Process]]:
    """The processes that Spark consists of in this instance, by what they are."""
    found: dict[str, list[psutil.Process]] = {"jvm": [], "daemon": [], "worker": []}
    for process in psutil.Process(instance.process.pid).children(recursive=True):
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        if words and Path(words[0]).name == "java":
            found["jvm"].append(process)
        elif _DAEMON in words:  # and the workers it has forked, lanes among them
            found["daemon"].append(process)
            if process.ppid() in {daemon.pid for daemon in found["daemon"]}:
                found["worker"].append(process)
    return found


def killed(instance: Instance, what: str) -> None:
    """Kill all processes of this kind, without a chance to say goodbye."""
    until(lambda: spark_processes(instance)[what], f"there is a {what}")
    for process in spark_processes(instance)[what]:
        process.kill()


def resumed_s(scene: Scene, name: str = "one", within_s: float = RESUMED_WITHIN_S) -> float:
    """How long it takes from now until an event arrives that is not committed yet."""
    began = time.monotonic()
    before = set(scene.committed())
    until(lambda: set(scene.handled[name]) - before, "events arrive again", timeout_s=within_s)
    return time.monotonic() - began


def owner(instances: Sequence[Instance]) -> Instance:
    """The instance that became the owner of the source last."""
    return max(instances, key=lambda instance: _said_last(instance, "source owned"))


def _said_last(instance: Instance, event: str) -> str:
    lines = [json.loads(line) for line in instance.log.read_text().splitlines() if line.startswith("{")]
    return max((line["timestamp"] for line in lines if line.get("event") == event), default="")


def engine_killed(folder: Path, dsn: str, kills: int) -> tuple[Ledger, dict[str, float]]:
    """Kill the owner's JVM `kills` times while a writer goes on and a standby waits; what was counted and measured."""
    with Scene(folder, dsn, {"one": None}) as scene:
        writer = Writer(dsn, pause_s=0.005)
        writer.start()
        try:
            instances = [scene.up()]
            scene.wait_delivered(20)
            instances.append(scene.up())
            until(lambda: instances[1].said("standing by"), "the standby waits")
            took_s = []
            for number in range(kills):
                mine = owner(instances)
                killed(mine, "jvm")
                took_s.append(resumed_s(scene))
                sys.stderr.write(f"JVM killed {number + 1} times: delivery went on after {took_s[-1]:.1f} s\n")
                ups = number + 1 + len(instances)
                until(partial(_came_up, instances, ups), "Spark runs again")
        finally:
            writer.finish()
        ledger = scene.check_complete()
        for instance in instances:
            assert instance.terminate() == 0, instance.log.read_text()[-2000:]
        return ledger, {"resumed_s_max": max(took_s)}


def _came_up(instances: Sequence[Instance], times: int) -> bool:
    """Whether Spark came up that often, in all of them together."""
    return sum(instance.log.read_text().count('"event": "up"') for instance in instances) >= times
