"""Several instances under load, and faults at random: killed, stopped past their lease, cut off from State, drained."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from evermark.cluster.holding import LIMITS
from evermark.testing.instances import InstancesStage, killed_whole, name_of
from evermark.testing.pipeline import Instance, Ledger
from evermark.testing.tcp_proxy import TcpProxy
from evermark.testing.until import until

TAKEOVER_S_MAX = LIMITS.ttl_s + 5.0


@dataclass
class _Running:
    instance: Instance
    proxy: TcpProxy  # between it and State


class InstancesFaulted:
    def __init__(self, stage: InstancesStage, dsn: str, stack: ExitStack, seed: int) -> None:
        self._stage, self._dsn, self._stack = stage, dsn, stack
        self._random = random.Random(seed)
        self._running: list[_Running] = []
        self._refusals: dict[int, float] = {}  # by process: the last count it showed
        self.takeovers_s: list[float] = []
        self.pauses_s: list[float] = []

    def start(self) -> None:
        at = conninfo_to_dict(self._dsn)
        proxy = self._stack.enter_context(TcpProxy(str(at.get("host", "127.0.0.1")), int(str(at["port"]))))
        self._stage.env["STATE_DSN"] = make_conninfo(self._dsn, host="127.0.0.1", port=proxy.port)
        self._running.append(_Running(self._stage.up(), proxy))

    @property
    def refusals(self) -> int:
        return int(sum(self._refusals.values()))

    def all_share(self) -> float:
        return self._stage.wait_shared(*(each.instance for each in self._running))

    def one_fault(self) -> str:
        faults: dict[str, Callable[[_Running], None]] = {
            "killed": self._kill, "stopped": self._stop, "cut off": self._cut,
            "hung": self._hang, "drained": self._drain,
        }  # fmt: skip
        name, victim = self._random.choice(list(faults)), self._random.choice(self._running)
        faults[name](victim)
        self.all_share()
        delivered = self._stage.delivered("one")
        self._stage.wait_delivered(delivered + 20)
        return name

    def _others_take_over(self, victim: _Running) -> None:
        others = [each.instance for each in self._running if each is not victim]
        self.takeovers_s.append(self._stage.wait_shared(*others))

    def _kill(self, victim: _Running) -> None:
        self._count(victim)
        killed_whole(victim.instance)
        self._others_take_over(victim)
        self._running.remove(victim)
        self.start()

    def _stop(self, victim: _Running) -> None:
        victim.instance.pause()
        self._others_take_over(victim)
        victim.instance.wake()
        self._is_refused(victim)

    def _cut(self, victim: _Running) -> None:
        victim.proxy.cut()
        self._others_take_over(victim)
        victim.proxy.restore()
        self._count(victim)

    def _hang(self, victim: _Running) -> None:
        victim.proxy.hang()
        self._others_take_over(victim)
        victim.proxy.restore()
        self._count(victim)

    def _drain(self, victim: _Running) -> None:
        began = time.time()
        self._stage.run("instance", "drain", "--instance", name_of(victim.instance))
        self._stage.wait_shared(*(each.instance for each in self._running if each is not victim))
        self.pauses_s += self._stage.pauses_s(began)
        self._count(victim)
        assert victim.instance.terminate() == 0
        self._running.remove(victim)
        self.start()

    def _is_refused(self, victim: _Running) -> None:
        before = self._refusals.get(victim.instance.process.pid, 0.0)
        until(lambda: self._count(victim) > before, "what it wrote with an old epoch was refused, and counted")

    def _count(self, victim: _Running) -> float:
        counted = self._stage.refusals(victim.instance)
        self._refusals[victim.instance.process.pid] = counted
        return counted


def _short(seconds: list[float]) -> list[float]:
    return [round(each, 1) for each in seconds]


def instances_faulted(
    folder: Path, dsn: str, instances: int, faults: int, seed: int
) -> tuple[Ledger, dict[str, float]]:
    with ExitStack() as stack:
        stage = stack.enter_context(InstancesStage(folder, dsn))
        world = InstancesFaulted(stage, dsn, stack, seed)
        for _ in range(instances):
            world.start()
        world.all_share()
        for number in range(faults):
            said = world.one_fault()
            figures_s = f"takeovers {_short(world.takeovers_s[-3:])}, pauses {_short(world.pauses_s[-12:])}"
            sys.stderr.write(f"{number + 1}: {said}; {figures_s}\n")
        stage.finish()
        ledger = stage.check_complete()
        stage.check_epochs()
    slow = [s for s in world.takeovers_s if s > TAKEOVER_S_MAX]
    figures = {"seed": seed, "takeover_s_max": max(world.takeovers_s, default=0.0), "takeovers_slow": len(slow)}
    if world.pauses_s:
        figures["handoff_p99_s"] = sorted(world.pauses_s)[int(0.99 * (len(world.pauses_s) - 1))]
    return ledger, figures | {"refused": world.refusals}
