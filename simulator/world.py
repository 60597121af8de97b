"""Everything outside the instances: stores, sources, receivers, and the faults that strike between any two effects."""

from __future__ import annotations

import random
import zlib
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from evermark.checkpoints.stores import MemoryCheckpoints
from evermark.cluster.base import Holder, Lease, owner_epoch
from evermark.cluster.memory import MemoryLeases
from evermark.delivery.decide.retry import EndpointLimits
from evermark.delivery.model import SourcePartition, SubscriptionSpec
from evermark.delivery.replay.plan import SliceLimits
from evermark.errors import EvermarkError, UnreachableError
from evermark.ingest.repair.memory import MemoryRecoveries
from evermark.log.head import MemoryHeads
from evermark.sources.base import Limit
from simulator.account import Account
from simulator.baton import Baton, Ended, Process, Task
from simulator.broken import Broken
from simulator.ports import SimReplayStore, SimStore
from simulator.promises import identified, who
from simulator.receiver import Receiver
from simulator.replayed import ReplayAccount
from simulator.scenario import Scenario
from simulator.source import SimLog, SimSource
from simulator.standings import SUSPEND_AFTER
from simulator.truth import Truth

_TRACE_LINES = 80
_PAUSE_S_MAX = 30.0
_STALL_S_MAX = 15.0
_RESTART_S_MAX = 6.0
_FOREVER = 1e12
CALM_TTL_S = 10_000_000.0
CALM_IDLE_S_MAX = 3_600.0
SLICES = SliceLimits(rows_start=6, rows_min=1, rows_max=12, rows_max_flowing=4)


@dataclass
class Ledger:
    """What became of everything."""

    produced: int = 0
    taken: int = 0
    delivered: int = 0
    duplicates_dropped: int = 0
    parked: int = 0
    expired: int = 0
    crashes: int = 0
    lost: int = 0

    def add(self, other: Ledger) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def line(self, seeds: int) -> str:
        return f"ledger seeds={seeds} " + " ".join(f"{f.name}={getattr(self, f.name)}" for f in fields(self))


class CalmLeases(MemoryLeases):
    """In the calm a lease that is held is not lost: nobody wakes up every few seconds to renew it."""

    calm = False

    def acquire(self, name: str, holder: Holder, ttl_s: float) -> Lease | None:
        return super().acquire(name, holder, CALM_TTL_S if self.calm else ttl_s)

    def acquire_all(self, names: Sequence[str], holder: Holder, ttl_s: float) -> list[Lease]:
        return super().acquire_all(names, holder, CALM_TTL_S if self.calm else ttl_s)

    def renew(self, leases: Sequence[Lease], ttl_s: float) -> float:
        return super().renew(leases, CALM_TTL_S if self.calm else ttl_s)


class World:
    """The ports' far side. `effect` is the one door between the instances and all of it."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.rng = random.Random(scenario.seed * 7919 + 1)
        # Of what not all seeds have: it changes nothing for the others.
        self.others = random.Random(f"{scenario.seed} others")
        self.baton = Baton(self.rng, scenario.switch_chance, scenario.tick_s)
        self.calm = False
        self.ledger = Ledger()
        self.counted: Counter[str] = Counter()
        self.trace: deque[tuple[int, float, str, str]] = deque(maxlen=_TRACE_LINES)
        self.fingerprint = 0  # of the whole trace: two runs of a seed have the same
        self.running: dict[str, Process] = {}
        self.restart_at: dict[str, float] = {}
        self.moved = 0  # how much has happened
        self.able: dict[str, set[str]] = {}  # by instance: the leases that it can take, where they share
        self.beaten: dict[str, float] = {}  # when it last said that it lives
        self.leases = CalmLeases(clock=self.clock, is_gone=self._is_gone)
        self.recoveries = MemoryRecoveries(self.leases, self.clock)
        self.heads = MemoryHeads(self.leases)
        self.checkpoints = MemoryCheckpoints(self.leases)
        limits = EndpointLimits(threshold=3, timeout_s=6.0, suspend_after=SUSPEND_AFTER)
        self.store = SimStore(self.leases, jitter=self.rng.random, clock=self.clock, limits=limits)
        reach = scenario.repeat_reach if scenario.repeat_chance else 0
        sends = Limit(rows_max=scenario.rows_max) if scenario.sends else None
        self.sources = {
            name: SimSource(name, {p: [] for p in partitions}, reach, sends, from_now=scenario.from_now)
            for name, partitions in scenario.sources.items()
        }
        self.logs = {name: SimLog(name) for name in self.sources}
        self.truth = Truth(self.logs, self.leases, self.checkpoints, from_now=scenario.from_now)
        self.account = Account(self.logs, self.leases, self.heads, self.store, self.rng, self.clock)
        self.replays = SimReplayStore(self.store, clock=self.clock, new_id=lambda: f"r{self.number()}", slices=SLICES)
        self.replayed = ReplayAccount(self.account, self.replays, self.leases, self.logs)
        self._receivers: dict[str, Receiver] = {}
        self._missing: dict[str, float] = {}  # by file of a log: until when
        self.joined: set[tuple[SourcePartition, str]] = set()  # where the bot is a member, as the source has it

    def effect(self, process: Process, label: str, act: Callable[[], Any]) -> Any:
        """Carry out `act`, unless a fault strikes before it; a fault may strike after it, too."""
        if process.dead or self.baton.closing:
            raise Ended  # a thread that unwinds touches nothing any more
        failure = None if self.calm else self._strike(process, label)
        self.baton.step()
        if failure == "before" or self._is_cut_off(process, label):
            self.say(label, "does not answer")
            raise UnreachableError(f"{label} does not answer")
        try:
            result = act()
        except (EvermarkError, Broken) as error:
            self.say(label, f"{type(error).__name__}: {error}".splitlines()[0])
            if isinstance(error, Broken):
                self.fail(error)
            raise
        self.say(label, "" if failure is None else "done, but the answer is lost")
        if failure == "after":
            raise UnreachableError(f"{label} did not answer")
        return result

    def fail(self, error: Exception) -> None:
        """At once, whoever catches it: loops of the product go on after any error."""
        self.baton.failure = self.baton.failure or error
        raise error

    @contextmanager
    def judged(self) -> Iterator[None]:
        """A promise that is found broken outside of an effect ends the run as well."""
        try:
            yield
        except Broken as error:
            self.fail(error)

    def stretched(self, task: Task, seconds: float) -> float:
        """In the calm retries are hours apart: while nothing happens, each wait of a loop is twice the one before."""
        if not self.calm:
            return seconds
        if " watch " in task.name:  # of a lease, whose renewals are as far apart then
            return CALM_TTL_S
        moved, times = task.idle
        task.idle = (self.moved, 1.0 if moved != self.moved else 2 * times)
        return max(seconds, min(seconds * task.idle[1], CALM_IDLE_S_MAX))

    def rest(self, seconds: float) -> None:
        self.baton.sleep(self.stretched(self.baton.current, seconds))

    def say(self, label: str, what: str) -> None:
        who = self.baton.current_name
        self.fingerprint = zlib.crc32(f"{who}|{label}|{what}".encode(), self.fingerprint)
        self.trace.append((self.baton.steps, self.baton.now, who, f"{label} {what}"))

    def trace_text(self) -> str:
        return "\n".join(f"  {step:6d} {now:10.2f}s  {who:24s} {what}" for step, now, who, what in self.trace)

    def count(self, what: str) -> None:
        self.counted[what] += 1

    def receiver(self, one: str) -> Receiver:
        """Whoever makes a subscription of the same name anew has another receiver."""
        if one not in self._receivers:
            rng = random.Random(f"{self.scenario.seed} {one}")
            made = Receiver(self.account, rng, self.scenario.receiver_chance, calm=self.calm)
            made.before_replay, made.on_replayed = self.replayed.before_offer, self.replayed.on_handled
            self._receivers[one] = made
        return self._receivers[one]

    def receiver_of(self, spec: SubscriptionSpec) -> Receiver:
        return self.receiver(who(spec))

    def file_specs(self) -> list[SubscriptionSpec]:
        """What the file says now; half-way through it names one more."""
        late = self.scenario.late_spec
        named = late is not None and (self.calm or self.baton.steps > self.scenario.steps // 2)
        return [*self.scenario.specs, late] if named and late is not None else list(self.scenario.specs)

    def new_spec(self, spec: SubscriptionSpec) -> SubscriptionSpec:
        """The same, told apart from any other that had or will have its name, with a secret of its own."""
        return replace(identified(spec, f"{spec.name}#{self.number()}"), secrets=(self.new_secret(),))

    def new_secret(self) -> str:
        return f"secret {self.number()}"

    def number(self) -> int:
        self.counted["numbers"] += 1
        return self.counted["numbers"]

    def owner_epoch(self, lease: str) -> int | None:
        """The epoch of whoever holds a lease now, as the table of leases shows it."""
        return owner_epoch(self.leases, lease)

    def forgets_tail(self) -> bool:
        return self.rng.random() < self.scenario.forgets_tail

    def crash(self, process: Process) -> None:
        """kill -9: nothing of it goes on, what it wrote stays."""
        process.dead = True
        self.restart_at[process.name.partition(".")[0]] = self.baton.now + self.rng.random() * _RESTART_S_MAX
        self.ledger.crashes += 1

    def lose_file(self) -> None:
        """Somebody removes a file of a log, and puts it back later."""
        files = [file.path for log in self.logs.values() for file in log.files()]
        if files:
            path = self.others.choice(files)
            self._missing[path] = self.baton.now + self.others.random() * self.others.choice((5, 60, 300))
            self.say("FILE", f"{path} is missing until {self._missing[path]:.2f}s")

    def is_missing(self, path: str) -> bool:
        return bool(self._missing) and self._missing.get(path, 0.0) > self.baton.now

    def lose_checkpoints(self) -> None:
        """All of them, whoever reads meanwhile."""
        self.say("CHECKPOINTS", "are lost")
        for place in self.scenario.places:
            self.truth.before_loss(place)
            self.checkpoints.delete(place.source, place.partition)
        self.account.met["checkpoints lost"] += 1

    def crash_machine(self) -> None:
        """A power cut: every instance dies, and the log falls back to what was synced."""
        for process in self.running.values():
            if not process.dead:
                self.crash(process)
        for log in self.logs.values():
            log.crash()

    def become_calm(self) -> None:
        self.calm = self.leases.calm = True
        self._missing.clear()
        for process in self.running.values():
            process.paused_until = 0.0
        for receiver in self._receivers.values():
            receiver.calm, receiver.gone, receiver.down_until = True, False, 0.0
            receiver.slow_until = _FOREVER if receiver.pace_s <= self.scenario.calm_pace_s else 0.0
        self.restart_at = dict.fromkeys(self.restart_at, self.baton.now)

    def _strike(self, process: Process, label: str) -> str | None:
        """Draw a fault for this effect; says when the port is to fail."""
        rates = self.scenario.rates
        drawn = self.rng.random()
        if (drawn := drawn - rates.crash) < 0:
            self.say(label, "CRASH before it")
            self.crash(process)
            raise Ended
        if (drawn := drawn - rates.machine) < 0:
            self.say(label, "POWER CUT before it")
            self.crash_machine()
            raise Ended
        if (drawn := drawn - rates.pause) < 0:
            process.paused_until = self.baton.now + self.rng.random() * _PAUSE_S_MAX
            self.say(label, f"PAUSE of {process.name} until {process.paused_until:.2f}s")
            self.baton.switch()
        elif (drawn := drawn - rates.stall) < 0:
            self.say(label, "STALL")
            self.baton.sleep(self.rng.random() * _STALL_S_MAX)
        elif drawn < rates.fail:
            return "before" if self.rng.random() < 0.5 else "after"
        return None

    def _is_cut_off(self, process: Process, label: str) -> bool:
        """Whether State does not answer this instance for a while."""
        is_state = label.startswith(("leases.", "heads.", "checkpoints.", "delivery.", "replays.", "recoveries."))
        return is_state and not self.calm and self.baton.now < process.cut_off_until

    def clock(self) -> datetime:
        return datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=self.baton.now)

    def _is_gone(self, holder: Holder) -> bool:
        current = self.running.get(holder.instance.partition("/")[0])
        gone = current is None or current.dead or current.name != holder.started
        return self.scenario.sees_gone and gone
