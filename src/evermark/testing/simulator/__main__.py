"""`python -m evermark.testing.simulator --seeds 200`: run seeds, or see every mutant caught."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Sequence

from evermark.testing.simulator.blocks import mutants as block_mutants
from evermark.testing.simulator.blocks import run as blocks
from evermark.testing.simulator.broken import Broken
from evermark.testing.simulator.mutants import BY_NAME, MUTANTS, Mutant
from evermark.testing.simulator.run import Ran, run
from evermark.testing.simulator.world import Ledger

_BLOCKS = {mutant.name: mutant for mutant in block_mutants.MUTANTS}
_COUNTED = ("crash", "takeover", "refused", "lie", "fork", "accepted")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m evermark.testing.simulator", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200, help="how many seeds to run")
    parser.add_argument("--first", type=int, help="the first of them")
    parser.add_argument(
        "--mutant", choices=sorted(BY_NAME | _BLOCKS), help="apply this deliberate bug: the run should fail"
    )
    parser.add_argument("--mutants", action="store_true", help="see every deliberate bug caught")
    parser.add_argument("--blocks", action="store_true", help="only block streams")
    asked = parser.parse_args(argv)
    if asked.mutants:
        return _hunt(asked.first)
    first, name = asked.first or 0, asked.mutant or ""
    failed = 0 if name in BY_NAME else _simulate_blocks(first, asked.seeds, _BLOCKS.get(name))
    if asked.blocks or name in _BLOCKS:
        return 1 if failed else 0
    return _simulate(first, asked.seeds, BY_NAME.get(name), failed)


def _simulate_blocks(first: int, seeds: int, mutant: Mutant | None) -> int:
    """How many seeds failed."""
    failed, taken = 0, 0
    met: Counter[str] = Counter()
    for seed in range(first, first + seeds):
        ran = blocks.run(seed, mutant)
        taken += ran.taken
        met.update(ran.met)
        if ran.failure:
            failed += 1
            print(_report(ran, mutant, " --blocks"))
            if mutant is not None:
                break
    print(f"blocks seeds={seeds} taken={taken} {' '.join(f'{what}={met[what]}' for what in _COUNTED)} failed={failed}")
    return failed


def _simulate(first: int, seeds: int, mutant: Mutant | None, failed: int) -> int:
    total = Ledger()
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


def _report(ran: Ran | blocks.Ran, mutant: Mutant | None, part: str = "") -> str:
    also = part + (f" --mutant {mutant.name}" if mutant else "")
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
    every: Sequence[Mutant] = (*MUTANTS, *block_mutants.MUTANTS)
    for mutant in every:
        began = time.monotonic()
        caught: Ran | blocks.Ran | None = blocks.hunt(mutant) if mutant.name in _BLOCKS else hunt(mutant, first)
        took = time.monotonic() - began
        if caught is None:
            survivors += 1
            print(f"SURVIVED  {mutant.name}: {mutant.what} ({mutant.seeds_max} seeds)")
        else:
            print(f"caught    {mutant.name} by seed {caught.seed} in {took:.1f} s: {caught.failure.splitlines()[0]}")
    print(f"mutants={len(every)} survived={survivors}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
