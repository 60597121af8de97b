"""How carefully a deployment reads its sources: the `reliability` section of its file, in the words of ingest."""

from __future__ import annotations

from dataclasses import dataclass, field

from evermark.breaker import BreakerLimits
from evermark.ingest.checkpoint_saver import SavePolicy
from evermark.ingest.dedup import RecentLimits
from evermark.ingest.gaps import GapLimits


@dataclass(frozen=True)
class ReadingLimits:
    saving: SavePolicy = field(default_factory=SavePolicy)
    breaker: BreakerLimits = field(default_factory=BreakerLimits)
    recent: RecentLimits | None = field(default_factory=RecentLimits)  # None: no ids are kept in memory
    gaps: GapLimits = field(default_factory=GapLimits)
