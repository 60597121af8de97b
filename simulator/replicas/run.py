"""One seed: replicas that write, meet, fail and come back; then all heals, and every node must have the same rows.

The truth is the set of all events that some node holds, or held until a node that alone had it was restored from an
older backup. At rest each row is the one of the highest version among them.
"""

from __future__ import annotations

import random
import sqlite3
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field

from evermark.errors import EvermarkError
from evermark.replicas.diff import differences
from evermark.replicas.event import Image, Version
from evermark.replicas.members import merged_held
from evermark.replicas.ranges import NOTHING, lacking, union
from simulator.broken import Broken, require
from simulator.mutants.mutant import Mutant
from simulator.replicas.node import HOUR_MS, OFF_MS, TABLE, Link, Node

_STEPS = 100
_ROUNDS_MAX = 14
_TRACE_MAX = 60
_KEYS = 9
_START_MS = 1_800_000_000_000


@dataclass(frozen=True)
class Ran:
    seed: int
    failure: str
    trace: str
    met: Counter[str] = field(hash=False)


@dataclass
class World:
    rng: random.Random
    now_ms: int = _START_MS
    nodes: dict[str, Node] = field(default_factory=dict)
    links: set[tuple[str, str]] = field(default_factory=set)
    isolated: str | None = None
    truth: dict[tuple[str, int], tuple[str, Version, Image | None]] = field(default_factory=dict)
    met: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)

    def did(self, what: str) -> None:
        self.met[what.split(maxsplit=1)[0]] += 1
        self.trace.append(what)
        del self.trace[:-_TRACE_MAX]

    def add(self) -> Node:
        node = Node("abcdefgh"[len(self.nodes)], lambda: self.now_ms, self.rng)
        for key in range(self.rng.choice((0, 0, 3))):  # a table that had rows before it was replicated
            node.store.connection.execute(f"insert into {TABLE} values (?, ?, 0)", [key, f"old {node.name}"])
        node.install()
        for other in self.nodes.values():
            self.links |= {(node.name, other.name), (other.name, node.name)}
        self.nodes[node.name] = node
        self.did(f"added {node.name}")
        return node

    def note_events(self) -> None:
        """Put what nodes have made into the truth; a node that joins gives what it made before new versions."""
        for node in self.nodes.values():
            origin = node.store.identity()[0]
            rows = node.store.connection.execute(
                f'select v.record_id, v.hlc, v.origin_seq, v.is_deleted, n.text, n.n from "{TABLE}_Versions" v '
                f"left join {TABLE} n on cast(n.id as text) = v.record_id "
                "where v.origin_node_id = ?",
                [origin],
            ).fetchall()
            for record, hlc, seq, deleted, text, n in rows:
                image = None if deleted else {"text": text, "n": str(n)}
                self.truth[origin, seq] = (record, Version(hlc, origin, seq), image)

    def forget_lost(self) -> None:
        """After a restore: what nobody holds any more was only there."""
        every = [node.store.said().held[TABLE] for node in self.nodes.values()]
        for origin, seq in list(self.truth):
            if not any(seq in held.get(origin, ()) for held in every):
                del self.truth[origin, seq]


def _write(world: World) -> None:
    node = world.rng.choice(list(world.nodes.values()))
    connection, rng = node.store.connection, world.rng
    connection.execute("begin immediate")
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        key, text = rng.randrange(_KEYS), f"{node.name}{world.met['write']}"
        what = rng.random()
        if what < 0.6:
            connection.execute(
                f"insert into {TABLE} values (?, ?, ?) on conflict (id) do update set text = excluded.text, n = n + 1",
                [key, text, 0],
            )
        elif what < 0.75:
            connection.execute(f"update or replace {TABLE} set id = ? where id = ?", [_KEYS + key, key])
        else:
            connection.execute(f"delete from {TABLE} where id = ?", [key])
    is_kept = rng.random() < 0.9
    end_transaction(connection, is_kept)
    world.did(f"write by {node.name}" if is_kept else f"rollback by {node.name}")


def end_transaction(connection: sqlite3.Connection, is_kept: bool) -> None:
    connection.execute("commit" if is_kept else "rollback")


def _meet(world: World, *, push: bool = False) -> None:
    here, there = world.rng.choice(sorted(world.links))
    if world.isolated in (here, there):
        return
    _sync(world, here, there, push=push, trouble=0.04)


def _sync(world: World, here: str, there: str, *, push: bool = False, trouble: float = 0.0) -> None:
    one, other = world.nodes[here], world.nodes[there]
    one.crash_chance = other.crash_chance = trouble / 40
    link = Link(one, other, world.rng, trouble)
    try:
        done = one.replica.meetings.push(link) if push else one.replica.meetings.sync(link)
        world.met["snapshot"] += done.snapshots
        world.met["quarantined"] += done.quarantined
        world.did(f"{'push' if push else 'sync'} {here}→{there}: {done.taken} taken, {done.pushed} pushed")
    except EvermarkError as error:
        world.did(f"{type(error).__name__} {here}→{there}: {error.message}")
        require(type(error).__name__ != "ConflictError", f"{here}→{there}: {error.message}")
    finally:
        one.crash_chance = other.crash_chance = 0.0


def _restore(world: World) -> None:
    node = world.rng.choice(list(world.nodes.values()))
    if not node.backups:
        return
    backup = world.rng.choice(node.backups)
    if not node.may_restore(backup):
        return
    node.restore(backup)
    world.did(f"restored {node.name}, now {node.store.identity()[0]}")
    world.forget_lost()


def _collect(world: World, node: Node) -> None:
    done = node.replica.upkeep.collect()[TABLE]
    world.met["events collected"] += done.events
    known = node.store.members()
    for name, other in world.nodes.items():
        if name in known and known[name].origin == other.store.identity()[0] not in node.store.evicted():
            held = union(other.store.held(TABLE), node.store.lost(TABLE))  # what nobody holds is waited for no more
            early = [o for o, floor in done.floors.items() if held.get(o, NOTHING).contiguous < floor]
            require(not early, f"{node.name} collected events of {early} that {name} lacks")
    world.met["tombstones collected"] += done.tombstones
    evicted = node.store.evicted()
    if len(evicted) > world.met["evicted"]:
        world.met["evicted"] = len(evicted)
        for each in world.nodes.values():
            each.backups.clear()  # one from before an eviction does not know it; docs/replicas.md names that limit
    world.did(f"collected {node.name}: {done.events} events, {done.tombstones} tombstones")


def _give_up(world: World) -> None:
    """Somebody tries to give up what a node misses: refused where a member said that it has it. What a member has got
    since, it still tells, and all must be equal in the end."""
    node = world.rng.choice(list(world.nodes.values()))
    for origin, ranges in node.store.held(TABLE).items():
        if not ranges.missing:
            continue
        try:
            gone = node.replica.upkeep.give_up(TABLE, origin, ranges.missing)
        except EvermarkError:
            world.met["refused"] += 1
            continue
        for member in node.store.members().values():
            held = {} if member.said is None else member.said.held.get(TABLE, {})
            has = gone - (gone - held.get(origin, NOTHING))
            is_evicted = member.origin in node.store.evicted()
            require(is_evicted or not has, f"{node.name} gave up {has} of {origin}, which {member.name} has")
        world.did(f"given-up {node.name}: {gone} of {origin}")


def _step(world: World) -> None:
    rng, nodes = world.rng, list(world.nodes.values())
    what = rng.random()
    if what < 0.34:
        _write(world)
    elif what < 0.64:
        _meet(world)
    elif what < 0.72:
        _meet(world, push=True)
    elif what < 0.76:
        node = rng.choice(nodes)
        node.off_ms = rng.choice(OFF_MS)
        world.did(f"stepped {node.name} to {node.off_ms} ms")
    elif what < 0.80:
        rng.choice(nodes).back_up()
    elif what < 0.825:
        _restore(world)
    elif what < 0.92:
        world.now_ms += rng.choice((1000, 60_000, HOUR_MS))
        _collect(world, rng.choice(nodes))
    elif what < 0.95:
        pair = tuple(rng.sample(sorted(world.nodes), 2))
        world.links ^= {(pair[0], pair[1])}
        world.links = world.links or {(pair[0], pair[1])}
        world.did(f"relinked {pair[0]}→{pair[1]}")
    elif what < 0.96 and len(nodes) < 5:
        world.add()
    elif what < 0.965:
        _give_up(world)
    elif what < 0.98:
        world.isolated = None if world.isolated else rng.choice(sorted(world.nodes))
        world.did(f"isolated {world.isolated}")
    else:
        world.now_ms += 13 * HOUR_MS
        world.did("slept half a day")
    world.now_ms += rng.randrange(2000)
    world.note_events()


def _heal(world: World) -> None:
    """Every link is there, nothing is lost, clocks are right, and enough time has passed."""
    world.isolated = None
    for node in world.nodes.values():
        node.off_ms = 0
    world.now_ms += 2 * HOUR_MS
    names = sorted(world.nodes)
    for turn in range(_ROUNDS_MAX):
        before = [node.store.head() for node in world.nodes.values()]
        for here, there in zip(names, names[1:] + names[:1], strict=True):  # a ring: the rest is forwarded
            _sync(world, here, there)
            _sync(world, there, here)
        world.note_events()
        if turn % 3 == 2:
            for node in world.nodes.values():
                _collect(world, node)
        if before == [node.store.head() for node in world.nodes.values()] and turn > 3:
            return


def _check(world: World) -> None:
    best: dict[str, tuple[Version, Image | None]] = {}
    for record, version, image in world.truth.values():
        if record not in best or version > best[record][0]:
            best[record] = (version, image)
    wanted = {record: image for record, (_, image) in best.items() if image is not None}
    every = merged_held(node.store.said().held[TABLE] for node in world.nodes.values())
    for node in world.nodes.values():
        rows = {str(key): {"text": text, "n": str(n)} for key, text, n in node.rows()}
        lost = sorted(wanted.keys() - rows.keys())
        require(not lost, f"{node.name} lost the rows {lost}")
        more = sorted(rows.keys() - wanted.keys())
        require(not more, f"{node.name} has rows that were deleted: {more}")
        unlike = [record for record in sorted(rows) if rows[record] != wanted[record]]
        require(not unlike, f"{node.name} has another content than the winner in {unlike}")
        missing = lacking(node.store.said().held[TABLE], every)
        require(not missing, f"{node.name} still misses {missing}")
    first, *others = world.nodes.values()
    for other in others:
        found, _ = differences(first.replica.node, Link(first, other, world.rng, 0.0), TABLE)
        require(not found, f"digests of {first.name} and {other.name} differ: {found}")


def run(seed: int, mutant: Mutant | None = None) -> Ran:
    world = World(random.Random(seed))
    failure = ""
    with mutant.applied() if mutant is not None else nullcontext():
        try:
            for _ in range(world.rng.choice((3, 3, 4))):
                world.add()
            world.note_events()
            for _ in range(_STEPS):
                _step(world)
            _heal(world)
            _check(world)
        except Broken as broken:
            failure = f"{Broken.__name__}: {broken}"
        except Exception as error:  # noqa: BLE001 - whatever it is, the seed that finds it is told
            failure = f"{type(error).__name__}: {error}"
        finally:
            for node in world.nodes.values():
                node.store.close()
    return Ran(seed, failure, "\n".join(world.trace), world.met)
