"""The proof that the simulations can fail: each deliberate bug is caught."""

from __future__ import annotations

from pathlib import Path

import pytest

from simulator.__main__ import PARTS, Part, hunt
from simulator.mutants import Mutant

_ALL = [mutant for part in PARTS for mutant in part.mutants]
_CHAPTERS = {
    "blocks": "## Block streams",
    "repair": "## Slots that are lost",
    "replays": "## Replays",
    "replicas": "## Replicas",
    "ledger": "## Mutants",
}


@pytest.mark.parametrize("mutant", _ALL, ids=lambda mutant: mutant.name)
def test_mutant_is_caught(mutant: Mutant) -> None:
    """Each deliberate bug breaks a promise within a bounded number of seeds."""
    caught = hunt(mutant)
    said = f"{mutant.name} survived {mutant.seeds_max} seeds: {mutant.what}"
    assert caught is not None, f"{said}. Did loops change? python -m simulator --mutants --note"
    assert caught.trace


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.name)
def test_every_mutant_is_in_the_docs(part: Part) -> None:
    """docs/simulator.md names each deliberate bug of a part in its chapter, and no other."""
    text = (Path(__file__).parents[2] / "docs/simulator.md").read_text()
    table = text.partition(_CHAPTERS[part.name])[2].partition("\n## ")[0]
    named = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert named == [mutant.name for mutant in part.mutants]
