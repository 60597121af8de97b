"""One seed: nodes that live and fail, owners that follow each other, and the promise that nothing is lost or twice.

An owner is a generator: it stops between any two effects, and the seed says who goes on. One that was replaced may go
on as well, as a paused process does that wakes up too late: the log refuses what it commits, and State does not.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from evermark.delivery.bots.membership import lesson, moves_of
from evermark.errors import EvermarkError
from evermark.sources.base import Limit
from evermark.sources.blocks.decide.ticks import partition_of
from evermark.sources.blocks.nodes.client import NodeClient
from evermark.sources.blocks.source import BlockStreams
from simulator.blocks.node import FORGED, ModelNode
from simulator.blocks.pipeline import PACE, place
from simulator.blocks.plans import MemoryPlans
from simulator.broken import Broken, require
from simulator.mutants.mutant import Mutant
from simulator.quiet import quiet

STREAMS = ("a", "b", "c", "d")
USERS = ("x", "y", "z")  # `z` is everywhere from the beginning
_STEPS = 160
_REST_STEPS_MAX = 4000
_TRACE_MAX = 40
_PACE = replace(PACE, slice_s=0.0002)  # a gap of a few blocks is read in several slices


@dataclass(frozen=True)
class Ran:
    seed: int
    failure: str
    trace: str
    met: Counter[str] = field(hash=False)


@dataclass
class World:
    """What outlives every process."""

    rng: random.Random
    chance: random.Random  # of those who come and go, and of what the log loses
    nodes: list[ModelNode]
    plans: MemoryPlans
    partitions: int
    garbler: ModelNode  # sends events in a form that cannot be read; only one does, or they would be poison
    log: dict[int, list[dict[str, object]]] = field(default_factory=dict)
    expired: dict[int, list[dict[str, object]]] = field(default_factory=dict)  # by retention
    ends: dict[int, str] = field(default_factory=dict)
    epoch: int = 0
    forked: set[str] = field(default_factory=set)  # events of a history that nobody has accepted
    was_forked: bool = False
    met: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)

    def did(self, what: str) -> None:
        self.met[what.split(maxsplit=1)[0]] += 1
        self.trace.append(what)
        del self.trace[:-_TRACE_MAX]

    def source(self) -> BlockStreams:
        here = place(nodes=len(self.nodes), partitions=self.partitions, pace=_PACE)
        return BlockStreams(here, lambda _: self.plans, lambda _: NodeClient(self.nodes, here.pace))

    def commit(self, epoch: int, partition: int, end: str, rows: list[dict[str, object]]) -> bool:
        """The log's compare-and-set: only the newest owner's batch lands."""
        if epoch != self.epoch:
            self.did(f"refused {epoch}")
            return False
        self.log.setdefault(partition, []).extend(rows)
        self.ends[partition] = end
        ids = [row["event_id"] for row in self.log[partition]]
        twice = [name for name, count in Counter(ids).items() if count > 1]
        require(not twice, f"{len(twice)} events are in the log twice, {twice[0] if twice else ''} first")
        require(self.forked.isdisjoint(ids), "events of a fork were taken before anybody accepted it")
        require(not any(FORGED in str(row["payload"]) for row in rows), "what a node forged is in the log")
        require(not any(row["op"] == "poison" for row in rows), "what another node gives readable is poison")
        return True

    def logged(self, stream: str) -> list[dict[str, object]]:
        """All that ever was."""
        at = partition_of(stream, self.partitions)
        return [row for rows in (self.expired, self.log) for row in rows.get(at, ()) if row["stream"] == stream]

    def ids(self, stream: str) -> list[object]:
        """Events by when they were first logged: what retention removed may be logged again."""
        rows = (row for row in self.logged(stream) if row["op"] not in ("truncate", "schema"))
        return list(dict.fromkeys(row["event_id"] for row in rows))

    def members(self, stream: str) -> set[str]:
        """As it is learned from the log."""
        moves = list(moves_of(({**row, "batch": 1} for row in self.logged(stream)), USERS, lambda _: ()))
        stays = {user: lesson(user, 0, 1, {}, moves).stays.get(stream, ()) for user in USERS}
        return {user for user, times in stays.items() if times and times[-1].end is None}


def owner(world: World) -> Iterator[str]:
    """A process that reads, from its first breath; it yields where it may be stopped."""
    world.epoch += 1
    epoch, source = world.epoch, world.source()
    at = {p: world.ends.get(p) or source.earliest(p) for p in source.partitions()}
    yield "fenced"
    source.check(at)
    for partition, position in at.items():
        source.begin(partition, position)
        yield "begun"
    while True:
        limit = Limit(rows_max=world.rng.choice((1, 3, 8, 1000)), wait_s=0.0)
        ends = source.latest(at, limit)
        yield "idle" if ends == at else "planned"
        for partition, end in ends.items():
            start = at[partition]
            if end == start:
                continue
            rows: list[dict[str, object]] = []
            since = source.may_repeat_from(partition, start)
            for piece in source.slices(partition, start, end):
                rows += [row for batch in source.read(piece) for row in batch.to_pylist()]
                yield "read"
            had = {row["event_id"] for row in world.log.get(partition, ()) if str(row["position"]) >= since}
            kept = [row for row in rows if since == start or row["event_id"] not in had]
            if not world.commit(epoch, partition, end, kept):
                return
            yield "logged"
            if world.rng.random() < 0.8:  # a source that is busy is told later
                source.confirm(partition, end)
                yield "confirmed"
        at = ends


def _advance(world: World, owners: list[Iterator[str]], which: int) -> str:
    """One step of an owner; one that failed begins anew if it is the newest, and is gone if it is not."""
    try:
        said = next(owners[which])
    except StopIteration:
        said = "ended"
    except EvermarkError as error:
        said = f"failed {type(error).__name__}"
    world.did(f"{said} by owner {which - len(owners)}")
    if said.split()[0] in {"ended", "failed"}:
        if which == len(owners) - 1:
            owners[which] = owner(world)
        else:
            del owners[which]
    return said


def _people(world: World) -> None:
    """Somebody writes; a block is sealed; a gap's worth of blocks is made at once."""
    rng, leader = world.rng, world.nodes[0]
    if leader.down:
        return
    stream = rng.choice(STREAMS)
    match rng.randrange(5):
        case 0 | 1:
            leader.say(stream, rng.randint(1, 4))
        case 2 | 3:
            leader.seal(stream)
        case _:
            for _ in range(rng.randint(2, 12)):
                leader.say(stream)
                leader.seal(stream)
    world.did(f"people at {stream}")
    if world.chance.random() < 0.3:
        user = world.chance.choice(USERS)
        leave = user in leader.members(stream)
        leader.join(stream, user, leave=leave)
        world.did(f"{'leave' if leave else 'join'} of {user} at {stream}")


def _expire(world: World) -> None:
    """Retention removes the oldest rows of a partition."""
    partition = world.chance.randrange(world.partitions)
    rows = world.log.get(partition, [])
    old = world.chance.randint(0, len(rows) // 2)
    world.expired.setdefault(partition, []).extend(rows[:old])
    del rows[:old]
    world.did(f"expired {old} of {partition}")


def _trouble(world: World) -> None:
    rng, (leader, follower) = world.rng, world.nodes
    match rng.randrange(8):
        case 0:
            leader.down = not leader.down
            world.did(f"leader {'down' if leader.down else 'up'}")
        case 1:
            rng.choice(world.nodes).refusing = rng.randint(1, 3)
            world.did("refusing")
        case 2:
            stream = rng.choice(STREAMS)
            lied = (stream, rng.randrange(len(leader.streams[stream].blocks)))
            rng.choice(world.nodes).lies.add(lied)
            world.did(f"lie about {lied}")
        case 3:
            for node in world.nodes:
                node.lies.clear()
                node.garbled.clear()
            world.did("honest")
        case 4 | 5:
            if not leader.down:
                _copy(world, leader, follower)
        case 6:
            stream = rng.choice(STREAMS)
            newest = len(leader.streams[stream].blocks)  # what is sealed next, too
            world.garbler.garbled |= {(stream, number) for number in range(rng.randrange(newest + 1), newest + 2)}
            world.did(f"garbled {stream} at {world.garbler.name}")
        case _:
            _fork(world, leader)


def _copy(world: World, leader: ModelNode, follower: ModelNode) -> None:
    copied = leader.copied(follower.name)
    for stream, it in copied.streams.items():
        if not (stream == "d" and world.was_forked):  # a follower never takes over a rewritten history
            follower.streams[stream] = it
    follower._touched = copied._touched
    follower.owed = int(world.was_forked)
    world.did("copied")


def _fork(world: World, leader: ModelNode) -> None:
    """Rewrite blocks of `d` that were taken already."""
    move = world.plans.known(["d"]).get("d")
    if world.was_forked or leader.down or move is None or move.known is None or move.known.cookie.minipool_gen < 4:
        return
    world.forked = set(leader.rewrite("d", world.rng.randint(2, move.known.cookie.minipool_gen - 1)))
    world.was_forked = True
    world.did("fork")


def _rest(world: World, owners: list[Iterator[str]]) -> None:
    """Faults end, a person accepts the fork, and one owner reads until nothing is new."""
    for node in world.nodes:
        node.down, node.refusing = False, 0
        node.lies.clear()
        node.garbled.clear()
    for accepted in (False, False, True):
        owners[:] = [owner(world)]  # anew: who was content with the copy asks the first node again, after a while
        steps = (_advance(world, owners, 0) for _ in range(_REST_STEPS_MAX))
        require("idle" in steps, "it does not come to rest")
        if not accepted and "d" in world.plans.stale(partition_of("d", world.partitions)):
            world.forked.clear()
            world.source().accept_fork("d")
            world.did("accepted")
    require(not world.plans.gaps, f"stale though every node is well: {world.plans.gaps}")


def _account(world: World) -> None:
    for stream in STREAMS:
        there, taken = world.nodes[0].hashes(stream), world.ids(stream)
        missing = set(there) - set(taken)
        require(not missing, f"{len(missing)} of {len(there)} events of {stream} were never taken")
        if stream == "d" and world.was_forked:
            continue
        require(taken == there, f"the events of {stream} are not in their order")
    for stream in STREAMS:
        there, learned = sorted(world.nodes[0].members(stream)), sorted(world.members(stream))
        require(there == learned, f"in {stream} are {there}, and by the log {learned}")


def run(seed: int, mutant: Mutant | None = None) -> Ran:
    """The same seed gives the same run."""
    rng = random.Random(seed)
    leader = ModelNode(
        snapshot_every=rng.randint(1, 5),
        page_blocks=rng.randint(1, 3),
        resume_blocks=rng.randint(0, 6),
        numbers=itertools.count(),
    )
    for stream in STREAMS:
        leader.create(stream, members=["z"])
    nodes = [leader, leader.copied("two")]
    world = World(rng, random.Random(-1 - seed), nodes, MemoryPlans(), rng.randint(1, 2), rng.choice(nodes))
    failure = ""
    with quiet(), mutant.applied() if mutant is not None else nullcontext():
        try:
            _play(world)
        except Broken as error:
            failure = f"{type(error).__name__}: {error}"
        except Exception as error:  # noqa: BLE001 - falling over is a failure of its own
            failure = f"fell over: {type(error).__name__}: {error}"
    world.met["logged"] = sum(map(len, world.log.values()))
    return Ran(seed, failure, "\n".join(world.trace), world.met)


def _play(world: World) -> None:
    rng, owners = world.rng, [owner(world)]
    for _ in range(_STEPS):
        roll = rng.random()
        if roll < 0.3:
            _people(world)
        elif roll < 0.42:
            _trouble(world)
            if world.chance.random() < 0.1:
                _expire(world)
        elif roll < 0.46:
            if not world.was_forked and world.chance.random() < 0.05:
                world.plans = MemoryPlans()  # State is lost, and nobody is left who knows more
                owners.clear()
                owners.append(owner(world))
                world.did("lost State")
            else:
                owners[-1] = owner(world)  # killed, and started again
            world.did("crash")
        elif roll < 0.50 and len(owners) < 3:
            owners.append(owner(world))  # the one before it is paused, and does not know
            world.did("takeover")
        else:
            which = len(owners) - 1 if rng.random() < 0.8 else rng.randrange(len(owners))
            _advance(world, owners, which)
    _rest(world, owners)
    _account(world)
