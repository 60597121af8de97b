"""Deliberate bugs, applied to the product's own code while a seed runs. A check that no mutant trips guards nothing."""

from __future__ import annotations

from simulator.mutants.bots import BOTS
from simulator.mutants.delivery import DELIVERY
from simulator.mutants.endurance import ENDURANCE
from simulator.mutants.ingest import INGEST
from simulator.mutants.loops import LOOPS
from simulator.mutants.mutant import Mutant
from simulator.mutants.replays import REPLAYS
from simulator.mutants.wishes import WISHES

MUTANTS: tuple[Mutant, ...] = (*INGEST, *DELIVERY, *WISHES, *ENDURANCE, *BOTS, *LOOPS)

__all__ = ["MUTANTS", "REPLAYS", "Mutant"]
