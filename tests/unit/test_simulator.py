"""The product's recovery, delivery and lease logic under seeded faults; and the proof that the simulator can fail."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from evermark.testing.simulator.__main__ import hunt, main
from evermark.testing.simulator.baton import Baton, Process, SimLock
from evermark.testing.simulator.mutants import MUTANTS, Mutant
from evermark.testing.simulator.run import run
from evermark.testing.simulator.scenario import scenario

SEEDS = 40


def test_no_seed_loses_an_event(capsys: pytest.CaptureFixture[str]) -> None:
    """Crashes, pauses, power cuts and failing ports between any two effects: the ledger ends with lost=0."""
    # WHEN a few dozen seeds run
    status = main(["--seeds", str(SEEDS)])

    # THEN none failed, and the last line is the ledger; a failing seed prints how to run it again
    said = capsys.readouterr().out
    assert status == 0, said
    last = said.splitlines()[-1]
    assert last.startswith(f"ledger seeds={SEEDS} produced=") and last.endswith(" lost=0")
    counts = dict(part.split("=") for part in last.split()[1:])
    assert counts["produced"] == counts["taken"]
    assert all(int(counts[name]) > 0 for name in ("delivered", "duplicates_dropped", "parked", "expired", "crashes"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    """Each deliberate bug breaks a promise within a bounded number of seeds."""
    caught = hunt(mutant)
    assert caught is not None, f"{mutant.name} survived {mutant.seeds_max} seeds: {mutant.what}"
    assert caught.trace


def test_every_mutant_is_in_the_docs() -> None:
    """docs/simulator.md names each deliberate bug, and no other."""
    table = (Path(__file__).parents[2] / "docs/simulator.md").read_text().partition("## Mutants")[2]
    named = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert named == [mutant.name for mutant in MUTANTS]


def test_same_seed_gives_the_same_run() -> None:
    """A failure can be reproduced: two runs of one seed take the same steps and end with the same ledger."""
    for seed in (1, 3, 8):
        first, second = run(seed), run(seed)
        assert (first.fingerprint, first.ledger) == (second.fingerprint, second.ledger)
        assert scenario(seed) == scenario(seed)


def test_failing_seed_says_how_to_run_it_again(capsys: pytest.CaptureFixture[str]) -> None:
    """A failure names its seed, the last steps, and the command that repeats it."""
    # GIVEN a deliberate bug
    # WHEN seeds run until it shows
    status = main(["--seeds", "20", "--mutant", "failed-endpoint-passed"])

    # THEN the run fails with all that is needed to look into it
    said = capsys.readouterr().out
    assert status == 1
    assert "again: python -m evermark.testing.simulator --first 0 --seeds 1 --mutant failed-endpoint-passed" in said
    assert "delivery.settle" in said


def test_mutant_leaves_nothing_behind() -> None:
    """What a mutant changed is as it was once its run is over."""
    before = run(1)
    assert run(1, MUTANTS[0]).failure
    assert run(1) == before


def test_lock_hands_the_baton_on_while_it_waits() -> None:
    """A simulated thread that waits for a lock lets its owner run, and gets the lock afterwards."""
    baton, process, order = Baton(random.Random(0), 1.0, 0.01), Process("p"), list[str]()
    lock = SimLock(baton)

    def hold(name: str) -> None:
        with lock:
            order.append(f"{name} in")
            baton.sleep(1.0)
            order.append(f"{name} out")

    # WHEN two threads want the same lock
    for name in ("a", "b"):
        baton.spawn(name, process, lambda name=name: hold(name))
    baton.run(lambda: len(order) == 4)
    baton.close()

    # THEN one was in only after the other was out
    first = order[0][0]
    second = "b" if first == "a" else "a"
    assert order == [f"{first} in", f"{first} out", f"{second} in", f"{second} out"]
