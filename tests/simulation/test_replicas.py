"""Replicas that write, meet, fail and come back, from seeds; the proof that this can fail is in test_mutants."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from simulator.__main__ import PARTS, main
from simulator.replicas.run import Ran, run

SEEDS = 8
_PART = next(part for part in PARTS if part.name == "replicas")


@cache
def once(seed: int) -> Ran:
    return run(seed)


def test_every_node_ends_with_the_same_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN drops, repeats, reordering, crashes, restores, clock steps, new links, collection, bootstrap and eviction
    WHEN all heals THEN digests are equal and nothing that a node still holds is missing anywhere."""
    status = main(["--seeds", str(SEEDS), "--replicas"], [replace(_PART, run=lambda seed, mutant: once(seed))])
    said = capsys.readouterr().out
    assert status == 0, said
    line = said.splitlines()[-1]
    assert line.startswith(f"replicas seeds={SEEDS} write=") and line.endswith(" failed=0")


def test_seeds_come_upon_what_they_are_for() -> None:
    """GIVEN some seeds of full lives THEN every fault and every way back has happened in them."""
    wanted = ("restored", "snapshot", "quarantined", "evicted", "isolated", "Crash", "UnreachableError", "rollback")
    collected = ("events collected", "tombstones collected")
    missing = {*wanted, *collected, "stepped", "relinked", "push"}
    for seed in range(4 * SEEDS):
        missing = {what for what in missing if not once(seed).met[what]}
        if not missing:
            return
    assert not missing


def test_same_seed_gives_the_same_run() -> None:
    """GIVEN a seed WHEN run twice THEN it goes the same way, so that a failure can be reproduced."""
    assert once(3) == run(3)
