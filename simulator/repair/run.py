"""One seed of slots that are lost: trouble, then calm, then the account."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field

from evermark.ingest.repair.base import Step
from simulator.baton import Process
from simulator.broken import Broken, require
from simulator.instance import Instance, owner_of
from simulator.mutants.mutant import Mutant
from simulator.repair.owner import RepairedObserver, RepairTools
from simulator.repair.world import NAME, MendWorld, scenario_of
from simulator.run import cut_off
from simulator.scenario import scenario

_CALM_STEPS_MAX = 8_000
_CALM_S_MAX = 100_000.0
_OPEN_MAX = 4


@dataclass(frozen=True)
class Ran:
    seed: int
    failure: str
    trace: str
    fingerprint: int
    met: Counter[str] = field(hash=False)


def run(seed: int, mutant: Mutant | None = None) -> Ran:
    """The same seed gives the same run."""
    with mutant.applied() if mutant is not None else nullcontext():
        return _run(seed)


def _run(seed: int) -> Ran:
    world = MendWorld(scenario_of(scenario(seed)))
    outside = Process("world")
    world.baton.spawn("operator", outside, lambda: _operate(world))
    world.baton.spawn("application", outside, lambda: _work(world))
    failure = ""
    try:
        world.baton.run(lambda: world.baton.steps >= world.scenario.steps)
        world.become_calm()
        world.baton.run(lambda: _is_over(world))
        world.met["taken"] = _account(world)
    except Exception as error:  # noqa: BLE001 - whatever ended the run is its result
        failure = f"{type(error).__name__}: {error}"
    finally:
        world.baton.close()
    trace = world.trace_text() if failure else ""
    world.met["crash"] = world.ledger.crashes
    return Ran(seed, failure, trace, world.fingerprint, world.met)


def _operate(world: MendWorld) -> None:
    """Starts instances, and those that died again; slots are lost, and people see to what needs them."""
    runs, names = 0, [f"i{number}" for number in range(world.scenario.instances)]
    world.restart_at = dict.fromkeys(names, 0.0)
    chance = world.rng.choice((0.02, 0.05, 0.15))
    while True:
        for name in names:
            current = world.running.get(name)
            if (current is None or current.dead) and world.restart_at[name] <= world.baton.now:
                runs += 1
                instance = Instance(world, name, runs)
                world.running[name] = instance
                world.say(f"START {instance.name}", "")
                owner = owner_of(instance, NAME, RepairTools(instance, world), RepairedObserver(instance, world))
                instance.runtime.spawn("source", owner.run)
        world.server.tick()
        world.people()
        if not world.calm and world.rng.random() < chance:
            world.trouble()
        if not world.calm:
            cut_off(world)
        if world.rng.random() < 0.3:
            world.logs[NAME].compact(world.rng.randint(2, 6))
        world.rest(1.0)


def _work(world: MendWorld) -> None:
    """Transactions that take their time, side by side; some come to nothing."""
    rng, server = world.rng, world.server
    while True:
        xids, drawn = list(server.open), rng.random()
        if world.calm:
            for xid in xids:
                server.commit(xid)
        elif drawn < 0.4 and len(xids) < _OPEN_MAX:
            xid = server.begin()
            server.insert(xid, world.baton.now)
            if rng.random() < 0.6:
                server.commit(xid)
        elif xids and drawn < 0.7:
            server.insert(rng.choice(xids), world.baton.now)
        elif xids and drawn < 0.85:
            (server.commit if rng.random() < 0.8 else server.abort)(rng.choice(xids))
        world.rest(rng.random() * rng.choice((0.2, 1, 3)))


def _is_over(world: MendWorld) -> bool:
    steps = world.baton.steps - world.scenario.steps
    if steps > _CALM_STEPS_MAX or world.baton.now > _CALM_S_MAX:
        world.baton.failure = Broken(f"no rest after {steps} calm steps: {world.unrest()}")
        return True
    return steps % 32 == 0 and not world.unrest()


def _account(world: MendWorld) -> int:
    """Every event that was committed is in the log, once, but for what a person gave up."""
    log = world.logs[NAME]
    ids = [row.event_id for append in log.commits for row in log.rows_of(append)]
    missing = {row.event_id for row in world.server.rows} - set(ids) - world.skipped
    require(not missing, f"{len(missing)} events are lost")
    require(len(ids) == len(set(ids)), "an event is in the log twice")
    repaired = sum(file.rows for append in log.commits for file in append.files if file.path in world.repaired)
    past = world.recoveries.past(NAME)
    counted, given_up = sum(one.taken for one in past), any(one.step is Step.FAILED for one in past)
    is_true = counted <= repaired if given_up else counted == repaired
    require(is_true, f"recoveries counted {counted} events, and repairs took {repaired}")
    return len(ids)
