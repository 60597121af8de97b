"""How far back a reader that lost its slot has to look. Pure.

A transaction that had ended when a sample was taken committed before the sample's WAL position, if at all. Once
everything up to that position is confirmed, no event of such a transaction can be missing from the log.
"""

from __future__ import annotations

from dataclasses import dataclass

NOTE_EVERY_S = 300.0


@dataclass(frozen=True)
class Sample:
    xmin: int  # every transaction below it had ended
    lsn: int  # where the WAL was written to, then or a little later


@dataclass
class XminFloor:
    """The transaction id below which the log has every event of the outbox: `noted` at the source, in its time."""

    sample: Sample | None = None
    noted: int = 0
    noted_at: float = float("-inf")

    def wants_sample(self, now: float, every_s: float | None = None) -> bool:
        return self.sample is None and now - self.noted_at >= (NOTE_EVERY_S if every_s is None else every_s)

    def proven(self, confirmed: int) -> int | None:
        """The floor that may be noted, now that everything before `confirmed` is taken. The sample is used up."""
        if self.sample is None or confirmed < self.sample.lsn:
            return None
        floor, self.sample = self.sample.xmin, None
        return floor if floor > self.noted else None  # as low as before while a transaction stays open

    def done(self, floor: int, now: float) -> None:
        self.noted, self.noted_at = floor, now
