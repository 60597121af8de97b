"""Slots that are lost at any moment, and repaired by the product's own steps; and the proof that this can fail."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from simulator.__main__ import PARTS, main
from simulator.repair.run import Ran, run

SEEDS = 25
_PART = next(part for part in PARTS if part.name == "repair")


@cache
def once(seed: int) -> Ran:
    return run(seed)


def test_no_seed_loses_an_event_or_takes_one_twice(capsys: pytest.CaptureFixture[str]) -> None:
    """Slots lost, dropped and moved, also while they are repaired, transactions open, crashes at each step."""
    status = main(["--seeds", str(SEEDS), "--repair"], [replace(_PART, run=lambda seed, mutant: once(seed))])
    said = capsys.readouterr().out
    assert status == 0, said
    line = said.splitlines()[-1]
    assert line.startswith(f"repair seeds={SEEDS} taken=") and line.endswith(" failed=0")


def test_seeds_come_upon_what_they_are_for() -> None:
    """Every way to lose a slot, every end of a recovery, and people who choose all occur."""
    met: Counter[str] = Counter()
    for seed in (2, 5, 6, 12, 24):
        met.update(once(seed).met)
    wanted = ("lost", "dropped", "moved", "publication", "recovered", "repaired", "crash", "person repair")
    assert not [what for what in wanted if not met[what]], met


def test_same_seed_gives_the_same_run() -> None:
    """A failure can be reproduced."""
    for seed in (2, 5):
        assert once(seed) == run(seed)
