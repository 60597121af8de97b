"""`make chaos`: the real process killed at every effect boundary, each time ending exact.

`python -m evermark.testing.chaos [--failpoint NAME] [--chain]` runs on a server and folders of its own; its last
line is a ledger. With `--slot` the replication slot is thrown away as well, and the deaths come while it is repaired.
With `--mongo` it is the primary of a MongoDB replica set that dies. With `--copy` it dies while a full table is copied,
with `--oracle` beside a native subscriber of Postgres, whose tables must be those of the log. With `--replicas` it is
three replicas that die and are cut off from each other; with `--instances`, instances that share a source.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

from evermark import failpoint
from evermark.testing.chaos_cluster import cluster_killed
from evermark.testing.chaos_copy import copy_killed
from evermark.testing.chaos_down import down_and_back
from evermark.testing.chaos_engine import engine_killed
from evermark.testing.chaos_instances import instances_faulted
from evermark.testing.chaos_mongo import primaries_killed
from evermark.testing.chaos_oracle import oracle_asked
from evermark.testing.chaos_replay import replay_beside_live
from evermark.testing.chaos_replicas import replicas_killed
from evermark.testing.chaos_upgrade import upgraded
from evermark.testing.listener import Failing
from evermark.testing.lost_slot import (
    forgetful_server,
    losing_scene,
    one_of_several_repaired,
    repaired,
    repaired_twice,
)
from evermark.testing.pipeline import Instance, Ledger, Scene, Writer, died_by_itself
from evermark.testing.servers import fresh_database, postgres_server

_PRIMARIES = 5
_COPY_ROWS = 5_000_000
_REPLICA_FAULTS = 12
_CLUSTER_ROUNDS = 5


def killed_at_each(names: Sequence[str], folder: Path, dsn: str) -> Ledger:
    """Die at each of `names` in turn while a writer goes on; then drain and require exactness; what was counted."""
    with Scene(folder, dsn, {"steady": None, "refusing": None}) as scene:
        last = die_at_each(names, scene, "refusing")
        ledger = scene.check_complete()
        code = last.terminate()
        assert code == 0, f"the last instance ended with {code}"
        return ledger


def die_at_each(names: Sequence[str], scene: Scene, refusing: str, then: str | None = None) -> Instance:
    """Die at each of `names` while a writer goes on, and drain; the instance that did, still running. It was started
    with the failpoint `then`, which it has not come to."""
    # Refused events are parked, so that the queue's failpoints are reached too.
    scene.receivers[refusing].failing = Failing.parse("422:3%")
    writer = Writer(scene.dsn, pause_s=0.05)
    writer.start()
    try:
        for name in names:
            died_by_itself(scene.up(f"{name}@2"))
        last = scene.up(then)
        scene.wait_delivered(scene.delivered(next(iter(scene.handled))))
    finally:
        writer.finish()
    scene.accept_all(refusing)
    scene.check_complete()
    return last


def _one_scene(scene: Callable[[Path, str, int], tuple[Ledger, dict[str, float]]], amount: int, title: str) -> int:
    root = Path(tempfile.mkdtemp(prefix="evermark-chaos-"))
    root.chmod(0o711)
    try:
        with postgres_server(root / "postgres") as server, fresh_database(server) as dsn:
            folder = root / "scene"
            folder.mkdir(mode=0o711)
            ledger, found = scene(folder, dsn, amount)
    except BaseException:
        sys.stderr.write(f"the scene, with the logs of its instances, is left in {root}\n")
        raise
    shutil.rmtree(root)
    figures = " ".join(f"{name}={value:.3g}" for name, value in found.items())
    sys.stdout.write(f"ledger {title} {figures} {ledger}\n")
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m evermark.testing.chaos", description=__doc__)
    parser.add_argument("--failpoint", action="append", choices=failpoint.NAMES, help="only this one; may be repeated")
    parser.add_argument(
        "--chain", action="store_true", help="one scene, killed at one after the other: a third of the time"
    )
    parser.add_argument(
        "--slot", action="store_true", help="lose the replication slot, and die at each step of repairing"
    )
    parser.add_argument(
        "--events", type=int, default=200_000, help="with --slot, --replay, --down or --mongo: how many"
    )
    parser.add_argument("--replay", action="store_true", help="a long replay beside live traffic, killed three times")
    parser.add_argument("--down", action="store_true", help="a receiver that is down for many events, and comes back")
    parser.add_argument("--engine", action="store_true", help="kill Spark's JVM under load, a standby waiting")
    parser.add_argument("--kills", type=int, default=10, help="with --engine: how often")
    parser.add_argument("--mongo", action="store_true", help="kill primaries of a MongoDB replica set under load")
    parser.add_argument("--upgrade", metavar="REVISIONS", help="run these older revisions first, comma between them")
    parser.add_argument(
        "--copy", type=int, nargs="?", const=_COPY_ROWS, metavar="ROWS", help="kill three times while rows are copied"
    )
    parser.add_argument("--oracle", type=int, metavar="SEED", help="beside a native subscriber, by this seed")
    parser.add_argument("--replicas", type=int, metavar="WRITES", help="three replicas, killed and cut off")
    parser.add_argument("--cluster", type=int, nargs="?", const=_CLUSTER_ROUNDS, help="on a Spark cluster that dies")
    parser.add_argument("--instances", type=int, metavar="N", help="N instances share partitions, faults at random")
    parser.add_argument("--faults", type=int, default=100, help="with --instances: how many")
    parser.add_argument("--etcd", action="store_true", help="with --instances: leases in etcd")
    parser.add_argument("--seed", type=int, default=1, help="with --instances: which faults")
    return parser.parse_args()


def main() -> int:
    given = _arguments()
    if (several := _several(given)) is not None:
        return several
    if given.upgrade:
        return _one_scene(
            lambda folder, dsn, _: (upgraded(folder, dsn, given.upgrade.split(",")), {}),
            0,
            f"upgraded_from={given.upgrade}",
        )
    if given.oracle is not None:
        sys.stdout.write(f"oracle seed={given.oracle} compared={oracle_asked(given.oracle)} different=0\n")
        return 0
    if given.copy is not None:
        return _one_scene(copy_killed, given.copy, f"copied={given.copy}")
    if given.mongo:
        return _primaries(given.events)
    if given.engine:
        return _one_scene(engine_killed, given.kills, f"jvm_kills={given.kills}")
    if given.replay:
        return _one_scene(replay_beside_live, given.events, f"kills=3 replayed={2 * given.events}")
    if given.down:
        return _one_scene(down_and_back, given.events, "down=1")
    if given.slot:
        return _lost_slots(given.events)
    return _killed(given.failpoint or failpoint.FLOW, chain=given.chain)


def _several(given: argparse.Namespace) -> int | None:
    """Scenes of several machines, if one is asked for."""
    if given.cluster is not None:
        return _cluster(given.cluster)
    if given.instances is not None:
        return _one_scene(
            lambda folder, dsn, number: instances_faulted(
                folder, dsn, number, given.faults, given.seed, in_etcd=given.etcd
            ),
            given.instances,
            f"instances={given.instances} faults={given.faults} leases_in={'etcd' if given.etcd else 'postgres'}",
        )
    if given.replicas is not None:
        return _one_scene(
            lambda folder, dsn, writes: (replicas_killed(folder, dsn, writes, _REPLICA_FAULTS), {}),
            given.replicas,
            f"replicas=3 kills={_REPLICA_FAULTS}",
        )
    return None


def _killed(names: Sequence[str], *, chain: bool) -> int:
    scenes = [("chain", names)] if chain else [(name, [name]) for name in names]
    total = Ledger()
    with tempfile.TemporaryDirectory(prefix="evermark-chaos-") as root:
        Path(root).chmod(0o711)
        with postgres_server(Path(root) / "postgres") as server:
            for title, kills in scenes:
                folder = Path(root) / title
                folder.mkdir(mode=0o711)
                with fresh_database(server) as dsn:
                    ledger = killed_at_each(kills, folder, dsn)
                total += ledger
                sys.stderr.write(f"killed at {', '.join(kills)}: {ledger}\n")
    sys.stdout.write(f"ledger kills={len(names)} {total}\n")
    return 0


def _cluster(rounds: int) -> int:
    with tempfile.TemporaryDirectory(prefix="evermark-chaos-") as root:
        Path(root).chmod(0o711)
        ledger, found = cluster_killed(Path(root), rounds)
    figures = " ".join(f"{name}={value:.3g}" for name, value in found.items())
    sys.stdout.write(f"ledger cluster_rounds={rounds} {figures} {ledger}\n")
    return 0


def _primaries(events: int) -> int:
    with tempfile.TemporaryDirectory(prefix="evermark-chaos-") as root:
        Path(root).chmod(0o711)
        ledger = primaries_killed(Path(root), events, _PRIMARIES)
    sys.stdout.write(f"ledger primaries_killed={_PRIMARIES} {ledger}\n")
    return 0


def _lost_slots(events: int) -> int:
    total = Ledger()
    with tempfile.TemporaryDirectory(prefix="evermark-chaos-") as root:
        Path(root).chmod(0o711)
        with forgetful_server(Path(root) / "postgres") as server:
            scenes: list[tuple[str, int, Callable[[Scene], Instance]]] = [
                ("slot lost", 1, lambda scene: repaired(scene, server, events)),
                ("killed at every step", 1, lambda scene: repaired(scene, server, events, failpoint.MEND)),
                ("lost again", 1, lambda scene: repaired_twice(scene, server, events, scene.up("repair.closed@1"))),
                ("one of several dropped", 3, lambda scene: one_of_several_repaired(scene, events)),
            ]
            for title, slots, lost in scenes:
                folder = Path(root) / title.replace(" ", "-")
                folder.mkdir(mode=0o711)
                with losing_scene(folder, server, slots) as scene:
                    last = lost(scene)
                    ledger = scene.check_complete()
                    assert last.terminate() == 0
                total += ledger
                sys.stderr.write(f"{title}: {ledger}\n")
    sys.stdout.write(f"ledger slots_lost=5 kills={len(failpoint.MEND) + 1} {total}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
