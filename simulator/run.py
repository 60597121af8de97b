"""One seed from beginning to end: faults, then calm, then the account."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from evermark.delivery.model import Cursor, SourcePartition, SubscriptionState
from evermark.event import Op
from simulator.baton import Process
from simulator.broken import Broken, require
from simulator.delivering import delivery_of
from simulator.instance import Instance, SimSourceObserver, SimTools, owner_of
from simulator.mutants import Mutant
from simulator.people import Desk, window
from simulator.quiet import quiet
from simulator.scenario import OPS, ROWS_PER_TRANSACTION_MAX, STREAMS, Scenario, scenario, session_of
from simulator.source import About, Made, position
from simulator.world import Ledger, World

_CALM_STEPS_MAX = 20_000
_CALM_S_MAX = 500_000.0  # whoever is asked once an hour has time enough
_KEYS = 4
_CUT_S_MAX = 40.0
_SHARING = 3
_LOST = 0.5  # how often an instance starts after all checkpoints were lost
_OTHERS_FIRST_MAX = 12
_HOLE = 0.1  # how often a file of the log is taken away, per second


@dataclass(frozen=True)
class Ran:
    """How a seed ended. `failure` is empty when every promise held; `met` counts what it came upon."""

    seed: int
    ledger: Ledger
    fingerprint: int
    failure: str = ""
    trace: str = ""
    met: Mapping[str, int] = field(default_factory=dict)


def run(seed: int, mutant: Mutant | None = None, *, replays: bool = False, divided: bool = False) -> Ran:
    """Run one seed; a mutant is applied to the product's code for as long as it runs. `divided`: instances share the
    partitions.
    """
    of = scenario(seed)
    with quiet(), mutant.applied() if mutant is not None else nullcontext():
        instances = max(of.instances, _SHARING) if divided else of.instances
        # What is asked for before reading begins would never be answered.
        from_now = of.from_now and not replays
        return _run(replace(of, replays=replays, divided=divided, instances=instances, from_now=from_now))


def _run(of: Scenario) -> Ran:
    world = World(of)
    outside = Process("world")
    world.baton.spawn("operator", outside, lambda: _operate(world))
    world.baton.spawn("producer", outside, lambda: _produce(world))
    failure = ""
    try:
        world.baton.run(lambda: world.baton.steps >= world.scenario.steps)
        world.become_calm()
        world.baton.run(lambda: _is_over(world))
        _account(world)
    except Exception as error:  # noqa: BLE001 - whatever ended the run is its result
        failure = f"{type(error).__name__}: {error}"
    finally:
        world.baton.close()
    trace = world.trace_text() if failure else ""
    return Ran(of.seed, world.ledger, world.fingerprint, failure, trace, world.account.met)


def _operate(world: World) -> None:
    """Starts instances, and those that died again; plays the receivers' bad days and the log's care."""
    runs = 0
    names = [f"i{number}" for number in range(world.scenario.instances)]
    world.restart_at = dict.fromkeys(names, 0.0)
    while True:
        for name in names:
            current = world.running.get(name)
            if (current is None or current.dead) and world.restart_at[name] <= world.baton.now:
                runs += 1
                _start(world, name, runs)
        if not world.calm:
            _bad_days(world)
            cut_off(world)
        for log in world.logs.values():
            if world.rng.random() < 0.3:
                log.compact(world.rng.randint(2, 6))
        world.baton.sleep(1.0 if not world.calm else 3_600.0)


def _start(world: World, name: str, run: int) -> None:
    if world.scenario.from_now and world.others.random() < _LOST:
        world.lose_checkpoints()
    instance = Instance(world, name, run)
    world.running[name] = instance
    world.say(f"START {instance.name}", "")
    shards = world.scenario.shards - run % world.scenario.shards  # not always as many as before
    instance.delivery = [delivery_of(instance, shard, shards) for shard in range(shards)]
    instance.on_span = instance.hand_over
    for source in world.sources:
        reader = owner_of(instance, source, SimTools(instance, source), SimSourceObserver(instance, source))
        instance.runtime.spawn(f"source {source}", reader.run)
    for owner in instance.delivery:
        instance.runtime.spawn("deliver" + f" {owner.shard}" * (owner.shard > 0), owner.run)
    instance.runtime.spawn("desk", Desk(instance).run)
    if world.scenario.divided:
        instance.candidate.share.set([])
        instance.runtime.spawn("membership", instance.share_out)


def cut_off(world: World) -> None:
    """Now and then State does not answer an instance, for longer than its leases last, perhaps."""
    if world.scenario.cuts and world.rng.random() < world.scenario.cuts:
        instance = world.rng.choice(list(world.running.values()))
        instance.cut_off_until = world.baton.now + world.rng.random() * _CUT_S_MAX
        world.say(f"CUT OFF {instance.name}", f"until {instance.cut_off_until:.2f}s")


def _bad_days(world: World) -> None:
    chance, rng = world.scenario.receiver_chance, world.rng
    for one in world.account.current.values():
        receiver, now = world.receiver(one), world.baton.now
        if rng.random() < chance["down"] / 8:
            receiver.down_until = now + rng.random() * rng.choice((3, 30, 300))
        elif rng.random() < chance["gone"] / 8:
            receiver.gone = True
        elif rng.random() < chance["slow"]:
            receiver.slow_until, receiver.pace_s = now + rng.random() * 60, rng.choice((0.2, 1.2, 6, 20))
    if world.scenario.holes and world.others.random() < _HOLE:
        world.lose_file()


def _produce(world: World) -> None:
    rng, numbers = world.rng, dict.fromkeys(world.scenario.places, 0)
    others = world.others if world.scenario.from_now else None
    for _ in range(others.randint(0, _OTHERS_FIRST_MAX) if others is not None else 0):
        world.baton.sleep(world.others.random() * 4)
        _write_others(world, numbers)
    for _ in range(world.scenario.transactions):
        if others is not None and others.random() < 0.5:
            _write_others(world, numbers)
        if not world.calm:
            world.baton.sleep(rng.random() * rng.choice((0.1, 1, 4)))
        place = rng.choice(world.scenario.places)
        transaction: list[Made] = []
        for _ in range(rng.randint(1, ROWS_PER_TRANSACTION_MAX)):
            numbers[place] += rng.randint(1, 2)
            transaction.append(_make(world, place, position(numbers[place])))
        world.sources[place.source].made[place.partition].append(transaction)
        if world.scenario.replays and rng.random() < 0.1:
            numbers[place] += 1
            world.sources[place.source].made[place.partition].append([_ask(world, place, position(numbers[place]))])


def _write_others(world: World, numbers: dict[SourcePartition, int]) -> None:
    """Something that is none of ours: a reader passes it, and has nothing to take."""
    place = world.others.choice(world.scenario.places)
    numbers[place] += 1
    world.sources[place.source].others[place.partition] = position(numbers[place] + 1)


def _make(world: World, place: SourcePartition, at: str) -> Made:
    rng, made = world.rng, world.truth.made[place]
    if rng.random() < world.scenario.repeat_chance:
        within = [m for m in made if int(at) - int(m.position) <= world.scenario.repeat_reach]
        if within:
            again = rng.choice(within)
            return replace(again, position=at, again=True)
    event = Made(
        f"{place.source}{place.partition}-{at}",
        at,
        rng.choice(STREAMS),
        f"k{rng.randrange(_KEYS)}",
        rng.choice(OPS),
        world.baton.now,
    )
    if world.scenario.has_bot and place.source == "shop":
        event = replace(event, about=_about(world, place, event.stream, event.key))
    elif world.scenario.moves_keys and event.op == "update":
        event = replace(event, previous_key=_left_key(event))
    made.append(event)
    world.ledger.produced += 1
    return event


def _left_key(event: Made) -> str | None:
    """The key that a change took away from its record, if it did. Drawn from numbers of their own: seeds without such
    changes stay what they were."""
    rng = random.Random(event.event_id)
    left = f"k{rng.randrange(_KEYS)}"
    return left if left != event.key and rng.random() < 0.7 else None


def _ask(world: World, place: SourcePartition, at: str) -> Made:
    """`update pgstream.streams set replay_from_ts = …`: the row shows it, and a control event asks for it."""
    rng, source, stream = world.rng, world.sources[place.source], world.rng.choice(STREAMS)
    since, until = (moment.isoformat() for moment in window(rng, world.baton.now))
    shown = (since, until if rng.random() < 0.7 else None)
    source.asked[stream] = source.asked.get(stream, shown) if rng.random() < 0.3 else shown
    asked = {"action": "replay", "replay_from_ts": source.asked[stream][0], "replay_to_ts": source.asked[stream][1]}
    about = About(asks=json.dumps(asked))
    name = f"{place.source}{place.partition}-{at}"
    event = Made(name, at, stream, "", Op.CONTROL, world.baton.now, about=about)
    world.truth.made[place].append(event)
    world.ledger.produced += 1
    return event


def _about(world: World, place: SourcePartition, stream: str, key: str) -> About:
    """Some events are about where the bot is a member, and some are encrypted."""
    rng, here = world.rng, (place, stream)
    drawn, member = rng.random(), here in world.joined
    if drawn < 0.15:
        (world.joined.discard if member else world.joined.add)(here)
        return About("leave" if member else "join", member=True)
    return About(session=session_of(place.partition, stream, key) if drawn < 0.6 else "", member=member)


def _is_over(world: World) -> bool:
    steps = world.baton.steps - world.scenario.steps
    if steps > _CALM_STEPS_MAX or world.baton.now > _CALM_S_MAX:
        world.baton.failure = Broken(f"no rest after {steps} calm steps: {_unrest(world)}")
        return True
    return steps % 32 == 0 and not _unrest(world)


def _unrest(world: World) -> str:
    """What is still to be done; empty when everything has come to rest."""
    for place in world.scenario.places:
        made = world.truth.made[place]
        head = world.heads.load(place.source).get(place.partition)
        head = head if head is not None and head.batch else None  # else it has begun, and has no batch yet
        log = world.logs[place.source]
        taken = sum(a.rows for a in log.commits if a.partition == place.partition)
        if taken < len(made):
            return f"{place} has {len(made) - taken} events that are not taken"
        if head is not None and any(a.batch > head.batch for a in log.commits if a.partition == place.partition):
            return f"the head of {place} is behind"
        groups = [group.cursors for group in world.store.groups().values()]
        if head is not None and any(group.get(place, Cursor(-1)) < Cursor(head.batch) for group in groups):
            return f"a live group is behind at {place}"
    expected = {spec.name for spec in world.scenario.specs}
    for name, subscription in world.store.subscriptions().items():
        expected.discard(name)
        if subscription.state is not SubscriptionState.LIVE:
            return f"{name} is {subscription.state}: {subscription.reason}"
    over = [replay.id for replay in world.replays.open()]
    shown = {name: source.asked for name, source in world.sources.items() if source.asked}
    if over or shown or world.replays.uncleared():
        return f"replays {over} are not over, {shown} is not cleared"
    waiting = {name: counts["waiting"] for name, counts in world.store.parked.counts().items() if counts["waiting"]}
    return f"{waiting} wait in the queue" if waiting else f"{expected} are not registered" if expected else ""


def _account(world: World) -> None:
    """The last look: everything produced is in the log once, in order, and came to everybody who wanted it."""
    truth, ledger = world.truth, world.ledger
    for place in world.scenario.places:
        log = world.logs[place.source]
        ids = [row.event_id for a in log.commits if a.partition == place.partition for row in log.rows_of(a)]
        require(ids == [m.event_id for m in truth.made[place]], f"the log of {place} is not what was produced")
        require(log.durable_commits() == len(log.commits), f"{place} has commits that are not durable")
        ledger.taken += len(ids)
    ledger.produced -= truth.never_owed
    account, queued = world.account, world.account.queued
    counted = world.store.counted("expired")
    for name, one in account.current.items():
        missing = account.owed[one] - account.handled[one] - queued.dropped[one] - queued.dead(name)
        expired = missing & account.expired[one]
        require(len(expired) <= counted.get(name, 0), f"{one}: {len(expired)} expired, {counted} counted")
        ledger.lost += len(missing - expired)
    ledger.expired += sum(counted.values())
    ledger.delivered += sum(map(len, account.handled.values()))
    ledger.parked += sum(map(len, queued.parked.values()))
    ledger.duplicates_dropped += account.duplicates.total()
    world.account.met["replayed"] = world.replayed.account_for(lambda what: world.account.met.update([what]))
    require(ledger.lost == 0, f"{ledger.lost} deliveries are lost")
