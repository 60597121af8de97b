"""How long those who are done wait for those who are not."""

from __future__ import annotations

from collections.abc import Sequence

# The others may take this many times what it took the quicker half.
_TIMES = 2.0
# A larger share of the work is no reason to wait longer than this: whoever needs it is served beside the others.
_FAIR_S_MAX = 10.0


class Stragglers:
    """Begins when half of the jobs are done. A job with more to send than they had gets as many times longer."""

    def __init__(self, work: Sequence[int], slack_s: float | None) -> None:
        self._work = work
        self._slack_s = slack_s
        self._left = set(range(len(work)))
        self._cut_at: dict[int, float] = {}

    def finished(self, job: int, elapsed_s: float) -> None:
        self._left.discard(job)
        self._cut_at.pop(job, None)
        if self._slack_s is None or self._cut_at or len(self._left) > len(self._work) // 2:
            return
        most = max(size for n, size in enumerate(self._work) if n not in self._left)
        for n in self._left:
            fair_s = min(_FAIR_S_MAX, _TIMES * elapsed_s * self._work[n] / max(1, most))
            self._cut_at[n] = elapsed_s + max(self._slack_s, _TIMES * elapsed_s, fair_s)

    def next_s(self) -> float | None:
        """When somebody will have had enough time; None: nobody waits for anybody."""
        return min(self._cut_at.values(), default=None)

    def over(self, elapsed_s: float) -> list[int]:
        """Who had enough time, each named once."""
        late = [n for n, at in self._cut_at.items() if at <= elapsed_s]
        for n in late:
            del self._cut_at[n]
        if not self._cut_at:
            self._slack_s = None
        return late
