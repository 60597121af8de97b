"""How far a source went, and when that was seen: from it, for how long the log has been behind. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

MARKS_MAX = 512


@dataclass
class Mark:
    upto: str
    first: float  # when the source was first seen to go that far
    last: float  # when it was last seen to go no farther


@dataclass
class Marks:
    """What was seen of one partition, oldest first.

    Bounded: when there are too many, every second one goes, and what is said later is a little less exact.
    """

    seen: list[Mark] = field(default_factory=list)

    def note(self, upto: str, now: float) -> None:
        """The partition's events go on to `upto` now."""
        if self.seen and upto < self.seen[-1].upto:
            self.seen.clear()  # another history of the source
        if self.seen and upto == self.seen[-1].upto:
            self.seen[-1].last = now
        else:
            self.seen.append(Mark(upto, now, now))
        if len(self.seen) > MARKS_MAX:
            del self.seen[1::2]

    def behind_s(self, position: str, now: float) -> float:
        """For how long the partition has been seen to go beyond `position`; 0 when it does not."""
        self._forget(position)
        beyond = next((mark for mark in self.seen if mark.upto > position), None)
        return max(0.0, now - beyond.first) if beyond is not None else 0.0

    def level_s(self, position: str, now: float) -> float | None:
        """How long ago the partition was last seen to go no farther than `position`; None: it never was."""
        self._forget(position)
        passed = next((mark for mark in self.seen if mark.upto <= position), None)
        return max(0.0, now - passed.last) if passed is not None else None

    def _forget(self, position: str) -> None:
        """Of what the log has passed, only the newest says something."""
        while len(self.seen) > 1 and self.seen[1].upto <= position:
            del self.seen[0]
