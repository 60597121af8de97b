"""Which tables of which node are read, and as whom."""

from __future__ import annotations

from dataclasses import dataclass

from evermark.secrets import Hidden


@dataclass(frozen=True)
class ReplicaTarget:
    """Picklable as far as its key is."""

    url: str
    cluster: str
    node: str  # what the peer knows us as
    peer: str
    key: Hidden
    tables: tuple[str, ...]
    copies: bool = False  # whether the rows of a table come first

    @property
    def copied(self) -> tuple[str, ...]:
        return self.tables if self.copies else ()
