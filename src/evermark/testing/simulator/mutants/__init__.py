"""Deliberate bugs, applied to the product's own code while a seed runs. A check that no mutant trips guards nothing."""

from __future__ import annotations

from evermark.testing.simulator.mutants.bots import BOTS
from evermark.testing.simulator.mutants.delivery import DELIVERY
from evermark.testing.simulator.mutants.endurance import ENDURANCE
from evermark.testing.simulator.mutants.ingest import INGEST
from evermark.testing.simulator.mutants.loops import LOOPS
from evermark.testing.simulator.mutants.mutant import Mutant
from evermark.testing.simulator.mutants.replays import REPLAYS
from evermark.testing.simulator.mutants.wishes import WISHES

MUTANTS: tuple[Mutant, ...] = (*INGEST, *DELIVERY, *WISHES, *ENDURANCE, *BOTS, *LOOPS)

__all__ = ["MUTANTS", "REPLAYS", "Mutant"]
