"""Which streams are wanted. Only they are looked at, and only they keep state."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Protocol

from evermark.sources.blocks.chain import StreamKind


class Wanted(Protocol):
    """Picklable. Asked in the process that plans, for every stream that has news."""

    def version(self) -> str:
        """Another text whenever the choice may have changed: all streams are then looked at once more."""
        ...

    def wants(self, stream: str, kind: str) -> bool: ...


@dataclass(frozen=True)
class WantedStreams:
    """By settings: these streams, and all of these kinds; nothing named means everything."""

    streams: frozenset[str] = frozenset()
    kinds: frozenset[StreamKind] = frozenset()

    def version(self) -> str:
        text = "\n".join([*sorted(self.streams), "", *sorted(self.kinds)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def wants(self, stream: str, kind: str) -> bool:
        if not self.streams and not self.kinds:
            return True
        return stream in self.streams or kind in self.kinds
