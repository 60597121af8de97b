"""Several instances under load, and faults at random: killed, stopped past their lease, cut off from State or from
etcd, drained. What is found is counted, and everything that breaks a promise is told at the end, with all figures.
"""

from __future__ import annotations

import math
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from psycopg.conninfo import conninfo_to_dict, make_conninfo

from evermark.testing.etcds import etcd_server
from evermark.testing.instances import PARTITIONS, InstancesStage, killed_whole
from evermark.testing.pipeline import Instance, Ledger
from evermark.testing.tcp_proxy import TcpProxy
from evermark.testing.until import until

TTL_S = 4.0
OVER_TTL_S_MAX = 5.0  # until others have what the victim had
HANDOFF_P99_S_MAX = 2.0
_NOTE_EVERY_S = 2.0


@dataclass(eq=False)
class _Running:
    instance: Instance
    state: TcpProxy  # between it and State
    etcd: TcpProxy | None  # between it and etcd


class InstancesFaulted:
    def __init__(self, stage: InstancesStage, dsn: str, etcd_url: str | None, stack: ExitStack, seed: int) -> None:
        self._stage, self._dsn, self._etcd_url, self._stack = stage, dsn, etcd_url, stack
        self._random = random.Random(seed)
        self._running: list[_Running] = []
        self._refusals: dict[Instance, float] = {}  # the last count it showed
        self.faults: Counter[str] = Counter()
        self._due: list[str] = []  # kinds of fault that have to come before one is left to chance
        self.takeovers_s: list[float] = []  # until others had the leases
        self.go_on_s: list[float] = []  # until others had committed a batch of each partition
        self.pauses_s: list[float] = []

    def start(self) -> None:
        at = conninfo_to_dict(self._dsn)
        proxy = self._stack.enter_context(TcpProxy(str(at.get("host", "127.0.0.1")), int(str(at["port"]))))
        self._stage.env["STATE_DSN"] = make_conninfo(self._dsn, host="127.0.0.1", port=proxy.port)
        etcd = None
        if self._etcd_url is not None:
            etcd = self._stack.enter_context(TcpProxy("127.0.0.1", urlsplit(self._etcd_url).port or 0))
            self._stage.env["ETCD_URL"] = f"http://127.0.0.1:{etcd.port}"
        self._running.append(_Running(self._stage.up(), proxy, etcd))

    @property
    def refusals(self) -> int:
        return int(sum(self._refusals.values()))

    def all_share(self) -> float:
        return self._stage.wait_shared(*(each.instance for each in self._running))

    def one_fault(self) -> str:
        """While one that was killed is started again, others are stopped and cut off: two that own something suffice.
        Before another is taken away, all are waited for. Each kind comes once before kinds are left to chance: what a
        run says of handoffs and refusals is said of at least one.
        """
        faults: dict[str, Callable[[_Running], None]] = {
            "killed": self._kill, "stopped": self._stop, "drained": self._drain,
            "cut off from State": lambda victim: self._cut(victim, victim.state),
            "State hung": lambda victim: self._hang(victim, victim.state),
        }  # fmt: skip
        if self._etcd_url is not None:
            faults |= {
                "cut off from etcd": lambda victim: self._cut(victim, victim.etcd),
                "etcd hung": lambda victim: self._hang(victim, victim.etcd),
            }
        if not self.faults:
            self._due = self._random.sample(list(faults), len(faults))
        name = self._due.pop() if self._due else self._random.choice(list(faults))
        settled = self._settled(len(self._running) if name in {"killed", "drained"} else 2)
        victim = self._random.choice(settled)
        faults[name](victim)
        self.faults[name] += 1
        self._stage.wait_delivered(self._stage.delivered("one") + 20)
        return name

    def _settled(self, count: int) -> list[_Running]:
        """Instances that own something, so many at least, while every partition has an owner."""

        def found() -> list[_Running]:
            for each in self._running:
                assert not each.instance.died(), each.instance.log.read_text()[-3000:]
            owners = self._stage.owners()
            mine = [each for each in self._running if self._stage.name_if_any(each.instance) in set(owners.values())]
            return mine if len(owners) == PARTITIONS and len(mine) >= count else []

        try:
            return until(found, f"{count} instances own all partitions")
        except AssertionError as error:
            said = {self._stage.name_if_any(each.instance): each.instance.ask("/health") for each in self._running}
            raise AssertionError(f"{error}; owners: {self._stage.owners()}; health: {said}") from error

    def _taken_over(self, victim: _Running, began: float, had: Mapping[int, int]) -> None:
        """Until each partition that the victim had was seen with another owner, and goes on under it: a lease that
        nobody reads with is no takeover."""
        at = time.time() - (time.monotonic() - began)
        name, left = self._stage.name_of(victim.instance), set(had)

        def all_seen() -> bool:
            left.difference_update(p for p, owner in self._stage.owners().items() if owner != name)
            return not left

        until(all_seen, f"others take over what {name} had")
        self.takeovers_s.append(time.monotonic() - began)
        self.go_on_s.append(self._stage.goes_on_s(at, had))

    def _begun(self, victim: _Running) -> tuple[float, dict[int, int]]:
        """When the fault begins, and which partitions the victim has, with the epochs of their last batches."""
        name, epochs = self._stage.name_of(victim.instance), self._stage.last_epochs()
        had = {p: epochs.get(p, 0) for p, owner in self._stage.owners().items() if owner == name}
        return time.monotonic(), had

    def _kill(self, victim: _Running) -> None:
        self._count(victim)
        begun = self._begun(victim)
        killed_whole(victim.instance)
        self._running.remove(victim)
        self._taken_over(victim, *begun)
        self.start()

    def _stop(self, victim: _Running) -> None:
        before = self._count(victim)
        begun = self._begun(victim)
        victim.instance.pause()
        self._taken_over(victim, *begun)
        victim.instance.wake()
        until(lambda: self._count(victim) > before, "what it wrote with an old epoch was refused, and counted")

    def _cut(self, victim: _Running, proxy: TcpProxy | None) -> None:
        assert proxy is not None
        begun = self._begun(victim)
        proxy.cut()
        self._without(victim, proxy, *begun)

    def _hang(self, victim: _Running, proxy: TcpProxy | None) -> None:
        assert proxy is not None
        begun = self._begun(victim)
        proxy.hang()
        self._without(victim, proxy, *begun)

    def _without(self, victim: _Running, proxy: TcpProxy, began: float, had: Mapping[int, int]) -> None:
        self._taken_over(victim, began, had)
        until(lambda: not self._is_healthy(victim), "an instance that owns nothing, and cannot, says so")
        proxy.restore()
        self._count(victim)

    def _is_healthy(self, victim: _Running) -> bool:
        return '"status": "healthy"' in victim.instance.ask("/health")[1].replace('":"', '": "')

    def _drain(self, victim: _Running) -> None:
        began, (_, had) = time.time(), self._begun(victim)
        self._stage.run("instance", "drain", self._stage.name_of(victim.instance))
        self.pauses_s += self._stage.pauses_s(began, had)
        self._count(victim)
        self._running.remove(victim)
        assert victim.instance.terminate() == 0
        self.start()

    def _count(self, victim: _Running) -> float:
        counted = self._stage.refusals(victim.instance)
        self._refusals[victim.instance] = counted
        return counted


def p99(seconds: Sequence[float]) -> float:
    """The least that at most one in a hundred exceeds."""
    ordered = sorted(seconds)
    return ordered[math.ceil(0.99 * len(ordered)) - 1] if ordered else 0.0


def _short(seconds: Sequence[float]) -> list[float]:
    return [round(each, 1) for each in seconds]


def _noted_all_along(stage: InstancesStage, stack: ExitStack) -> None:
    """Maintenance removes old commits: each is looked at before."""
    done = threading.Event()

    def note() -> None:
        while not done.wait(_NOTE_EVERY_S):
            stage.notes()

    thread = threading.Thread(target=note, name="notes", daemon=True)
    thread.start()
    stack.callback(thread.join)
    stack.callback(done.set)


def instances_faulted(
    folder: Path, dsn: str, instances: int, faults: int, seed: int, *, in_etcd: bool = False
) -> tuple[Ledger, dict[str, float]]:
    with ExitStack() as stack:
        etcd_url = stack.enter_context(etcd_server(folder / "etcd")).url if in_etcd else None
        stage = stack.enter_context(InstancesStage(folder, dsn, ttl_s=TTL_S, etcd_url=etcd_url))
        _noted_all_along(stage, stack)
        world = InstancesFaulted(stage, dsn, etcd_url, stack, seed)
        for _ in range(instances):
            world.start()
        world.all_share()
        began = time.monotonic()
        for number in range(faults):
            said, at = world.one_fault(), time.monotonic() - began
            figures_s = (
                f"takeovers {_short(world.takeovers_s[-3:])}, gone on after {_short(world.go_on_s[-3:])}, "
                f"pauses {_short(world.pauses_s[-12:])}"
            )
            sys.stderr.write(f"{number + 1} at {at:.0f} s: {said}; {figures_s}; refused {world.refusals}\n")
        world.all_share()
        stage.finish()
        ledger = stage.check_complete()
        stage.check_epochs()
    slow = [s for s in world.go_on_s if s > TTL_S + OVER_TTL_S_MAX]
    figures: dict[str, float] = {
        "seed": seed, "ttl_s": TTL_S, "commits": stage.commits_seen, "unseen": stage.commits_unseen,
        "takeovers": len(world.takeovers_s), "takeover_s_max": max(world.takeovers_s, default=0.0),
        "goes_on_s_max": max(world.go_on_s, default=0.0), "slow": len(slow),
        "handoffs": len(world.pauses_s), "handoff_p99_s": p99(world.pauses_s), "refused": world.refusals,
    }  # fmt: skip
    told = ", ".join(f"{count} × {name}" for name, count in sorted(world.faults.items()))
    sys.stderr.write(f"{told}; {figures}; {ledger}\n")
    assert ledger.has_each_once, ledger
    assert not slow, f"takeovers took longer than the lease and {OVER_TTL_S_MAX:g} s: {_short(slow)}"
    assert world.refusals >= world.faults["stopped"], f"stale writes were not counted: {world.refusals}"
    assert figures["unseen"] == 0, "commits were removed before they were looked at"
    assert p99(world.pauses_s) <= HANDOFF_P99_S_MAX, f"planned handoffs paused for {_short(world.pauses_s)}"
    return ledger, figures
