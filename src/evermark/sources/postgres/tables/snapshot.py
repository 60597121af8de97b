"""Which transactions a snapshot shows. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from evermark.errors import FormatError

_WRAP = 1 << 32


@dataclass(frozen=True)
class Snapshot:
    """As `pg_current_snapshot()` writes it: numbers of transactions there have 64 bits."""

    xmin: int  # all before it have ended
    xmax: int  # none from it on had begun
    running: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        try:
            xmin, xmax, running = text.split(":")
            return cls(int(xmin), int(xmax), frozenset(int(each) for each in running.split(",") if each))
        except ValueError:
            raise FormatError(f"{text[:80]!r} is not a snapshot", hint="report this, with the log") from None

    def shows(self, xid: int) -> bool:
        """Whether a transaction that has committed is in it; `xid` has 32 bits, as a slot tells it. Nearly always it
        is not far from `xmax`: numbers of living transactions are never 2^31 apart."""
        whole = self.xmax + ((xid - self.xmax + _WRAP // 2) % _WRAP) - _WRAP // 2
        return whole < self.xmax and whole not in self.running
