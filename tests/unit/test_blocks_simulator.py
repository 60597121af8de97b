"""Block streams under seeded faults, owners that overlap included; and the proof that the simulation can fail."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from evermark.testing.simulator.__main__ import hunt
from evermark.testing.simulator.blocks.mutants import MUTANTS
from evermark.testing.simulator.blocks.run import run
from evermark.testing.simulator.mutants.mutant import Mutant

SEEDS = 100


def test_no_seed_loses_an_event_or_takes_one_twice() -> None:
    """Any history, downtime, snapshots and crash point, by whoever owns it: all events are taken, none twice."""
    met: Counter[str] = Counter()
    for seed in range(SEEDS):
        ran = run(seed)
        assert not ran.failure, f"seed {seed}: {ran.failure}\n{ran.trace}"
        met.update(ran.met)
    faults = ("crash", "takeover", "refused", "lie", "fork", "accepted", "copied", "confirmed", "failed")
    members = ("join", "leave", "expired", "lost")
    assert not [what for what in (*faults, *members) if not met[what]], met


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    """Each deliberate bug breaks a promise within a bounded number of seeds."""
    caught = hunt(mutant)
    assert caught is not None, f"{mutant.name} survived {mutant.seeds_max} seeds: {mutant.what}"


def test_every_mutant_is_in_the_docs() -> None:
    """docs/simulator.md names each deliberate bug of block streams, and no other."""
    text = (Path(__file__).parents[2] / "docs/simulator.md").read_text()
    table = text.partition("## Block streams")[2].partition("\n## ")[0]
    named = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert named == [mutant.name for mutant in MUTANTS]


def test_same_seed_gives_the_same_run() -> None:
    """A failure can be reproduced."""
    for seed in (2, 5):
        assert run(seed) == run(seed)
