"""`python -m simulator --seeds 200`: run seeds, or see every mutant caught."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from simulator.blocks import mutants as block_mutants
from simulator.blocks import run as blocks
from simulator.broken import Broken
from simulator.mutants import MUTANTS, REPLAYS, Mutant
from simulator.noted import note, noted_seed
from simulator.repair import mutants as repairing_mutants
from simulator.repair import run as repairing
from simulator.replicas import mutants as replica_mutants
from simulator.replicas import run as replicas
from simulator.run import Ran, run
from simulator.world import Ledger


class Outcome(Protocol):
    """How a seed of any part ended."""

    @property
    def seed(self) -> int: ...

    @property
    def failure(self) -> str: ...

    @property
    def trace(self) -> str: ...

    @property
    def met(self) -> Mapping[str, int]: ...


@dataclass(frozen=True)
class Part:
    """A world with mutants of its own. What it counts is said in its line."""

    name: str
    run: Callable[[int, Mutant | None], Outcome]
    mutants: tuple[Mutant, ...]
    counted: tuple[str, ...]


def run_replays(seed: int, mutant: Mutant | None = None) -> Ran:
    return run(seed, mutant, replays=True)


LEDGER = Part("ledger", run, MUTANTS, ())
PARTS = (
    Part(
        "blocks",
        blocks.run,
        block_mutants.MUTANTS,
        ("logged", "crash", "takeover", "refused", "lie", "fork", "accepted"),
    ),
    Part(
        "repair",
        repairing.run,
        repairing_mutants.MUTANTS,
        ("taken", "recovered", "lost", "moved", "publication", "crash", "repaired", "given up"),
    ),
    Part(
        "replays",
        run_replays,
        REPLAYS,
        ("replayed", "replays.settle", "replay done", "replay cancelled", "replay failed"),
    ),
    Part(
        "replicas",
        replicas.run,
        replica_mutants.MUTANTS,
        ("write", "sync", "push", "restored", "snapshot", "quarantined", "evicted", "events collected"),
    ),
    LEDGER,
)
# A change of a loop moves all seeds: to note anew, a bug that is met once in hundreds of them is hunted for as long.
_SEEDS_TO_NOTE = 2_000
BY_MUTANT = {mutant.name: part for part in PARTS for mutant in part.mutants}


def main(argv: list[str] | None = None, parts: Sequence[Part] = PARTS) -> int:
    parser = argparse.ArgumentParser(prog="python -m simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, help="the first of them")
    parser.add_argument("--mutant", choices=sorted(BY_MUTANT), help="apply this deliberate bug: the run should fail")
    parser.add_argument("--mutants", action="store_true", help="see every deliberate bug caught")
    parser.add_argument("--note", action="store_true", help="with --mutants: note the seeds that caught them")
    only = parser.add_mutually_exclusive_group()
    for part in PARTS:
        only.add_argument(f"--{part.name}", dest="only", action="store_const", const=part.name, help="only this part")
    asked = parser.parse_args(argv)
    name = BY_MUTANT[asked.mutant].name if asked.mutant else asked.only
    chosen = [part for part in parts if name in (None, part.name)]
    if asked.mutants:
        return _hunt_all(chosen, asked.first, asked.note)
    mutants = {mutant.name: mutant for part in PARTS for mutant in part.mutants}
    failed = sum(_simulate(part, asked.first or 0, asked.seeds, mutants.get(asked.mutant or "")) for part in chosen)
    return 1 if failed else 0


def _simulate(part: Part, first: int, seeds: int, mutant: Mutant | None) -> int:
    """How many seeds failed."""
    failed, total = 0, Ledger()
    met: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        ran = part.run(seed, mutant)
        met.update(ran.met)
        if isinstance(ran, Ran):
            total.add(ran.ledger)
        if ran.failure:
            failed += 1
            print(_report(part, ran, mutant))
            if mutant is not None:
                break
    if part.name == LEDGER.name:
        if failed:
            print(f"{failed} seeds failed")
        print(total.line(seeds))
        return failed or int(total.lost > 0)
    counts = " ".join(f"{what.replace(' ', '_')}={met[what]}" for what in part.counted)
    print(f"{part.name} seeds={seeds} {counts} failed={failed}")
    return failed


def _report(part: Part, ran: Outcome, mutant: Mutant | None) -> str:
    also = f" --mutant {mutant.name}" if mutant else "" if part.name == LEDGER.name else f" --{part.name}"
    return (
        f"seed {ran.seed} failed: {ran.failure}\n{ran.trace}\n"
        f"again: python -m simulator --first {ran.seed} --seeds 1{also}"
    )


def hunt(mutant: Mutant, first: int | None = None, seeds: int | None = None) -> Outcome | None:
    """The first run that catches the mutant, within its bound, from where it was last caught. Falling over is not being
    caught.
    """
    part = BY_MUTANT[mutant.name]
    begin = noted_seed(mutant.name) if first is None else first
    for seed in range(begin, begin + (seeds or mutant.seeds_max)):
        ran = part.run(seed, mutant)
        if ran.failure.startswith(Broken.__name__):
            return ran
    return None


def _hunt_all(parts: Sequence[Part], first: int | None, is_noted: bool) -> int:
    survivors, every = 0, [mutant for part in parts for mutant in part.mutants]
    for mutant in every:
        began = time.monotonic()
        caught = hunt(mutant, first)
        if caught is None and is_noted:
            caught = hunt(mutant, first or 0, _SEEDS_TO_NOTE)
        took = time.monotonic() - began
        if caught is None:
            survivors += 1
            seeds = _SEEDS_TO_NOTE if is_noted else mutant.seeds_max
            print(f"SURVIVED  {mutant.name}: {mutant.what} ({seeds} seeds)")
        else:
            if is_noted:
                note(mutant.name, caught.seed, set(BY_MUTANT))
            print(f"caught    {mutant.name} by seed {caught.seed} in {took:.1f} s: {caught.failure.splitlines()[0]}")
    print(f"mutants={len(every)} survived={survivors}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
