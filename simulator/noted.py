"""The seed at which each mutant was last caught, where the next hunt for it begins.

A bug that is met once in a hundred seeds need not cost a hundred each time. What is noted proves nothing: the seed runs
again, and so do those after it. `python -m simulator --mutants --note` notes anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

FILE = Path(__file__).with_name("noted.json")


@cache
def _noted() -> Mapping[str, int]:
    seeds: dict[str, int] = json.loads(FILE.read_text())
    return seeds


def noted_seed(mutant: str) -> int:
    """0 for a mutant that was never hunted for."""
    return _noted().get(mutant, 0)


def note(mutant: str, seed: int, known: set[str]) -> None:
    """Mutants that are no more are forgotten."""
    seeds = {name: last for name, last in {**_noted(), mutant: seed}.items() if name in known}
    FILE.write_text(json.dumps(seeds, indent=2) + "\n")
    _noted.cache_clear()
