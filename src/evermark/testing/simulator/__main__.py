"""`python -m evermark.testing.simulator --seeds 200`: run seeds, or see every mutant caught."""

from __future__ import annotations

import argparse
import sys
import time

from evermark.testing.simulator.broken import Broken
from evermark.testing.simulator.mutants import BY_NAME, MUTANTS, Mutant
from evermark.testing.simulator.run import Ran, run
from evermark.testing.simulator.world import Ledger


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evermark.testing.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, help="the first of them")
    parser.add_argument("--mutant", choices=sorted(BY_NAME), help="apply this deliberate bug: the run should fail")
    parser.add_argument("--mutants", action="store_true", help="see every deliberate bug caught")
    asked = parser.parse_args(argv)
    if asked.mutants:
        return _hunt(asked.first)
    return _simulate(asked.first or 0, asked.seeds, BY_NAME.get(asked.mutant or ""))


def _simulate(first: int, seeds: int, mutant: Mutant | None) -> int:
    total, failed = Ledger(), 0
    for seed in range(first, first + seeds):
        ran = run(seed, mutant)
        total.add(ran.ledger)
        if ran.failure:
            failed += 1
            print(_report(ran, mutant))
            if mutant is not None:
                break
    if failed:
        print(f"{failed} seeds failed")
    print(total.line(seeds))
    return 1 if failed or total.lost else 0


def _report(ran: Ran, mutant: Mutant | None) -> str:
    also = f" --mutant {mutant.name}" if mutant else ""
    return (
        f"seed {ran.seed} failed: {ran.failure}\n{ran.trace}\n"
        f"again: python -m evermark.testing.simulator --first {ran.seed} --seeds 1{also}"
    )


def hunt(mutant: Mutant, first: int | None = None) -> Ran | None:
    """The first run that catches the mutant, within its bound. Falling over is not being caught."""
    begin = mutant.first if first is None else first
    for seed in range(begin, begin + mutant.seeds_max):
        ran = run(seed, mutant)
        if ran.failure.startswith(Broken.__name__):
            return ran
    return None


def _hunt(first: int | None) -> int:
    survivors = 0
    for mutant in MUTANTS:
        began = time.monotonic()
        caught = hunt(mutant, first)
        took = time.monotonic() - began
        if caught is None:
            survivors += 1
            print(f"SURVIVED  {mutant.name}: {mutant.what} ({mutant.seeds_max} seeds)")
        else:
            print(f"caught    {mutant.name} by seed {caught.seed} in {took:.1f} s: {caught.failure.splitlines()[0]}")
    print(f"mutants={len(MUTANTS)} survived={survivors}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
