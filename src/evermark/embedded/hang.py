"""When a server hangs: it lets nobody in, and nothing is under way after which it would. Pure.

Postgres 18.4 to 18.6 come to this. One of their processes dies, the server starts anew in place, and the startup
process that should recover ends with an error (a full disk): then the main process (the postmaster) waits for ever for
a recovery that nobody does, and refuses every connection. It has to be ended, and started again.

Only the server's own word counts, "not now" (SQLSTATE 57P03), at every look for a minute. Left alone are

- a server with a startup process: recovery may take hours, and begins anew when it is interrupted;
- a server that was told to stop: its last checkpoint may take long, and it ends by itself;
- a server that refuses for another reason (too many connections, a lost password): it serves others;
- a server that says nothing: a busy machine, or somebody stopped it (SIGSTOP: a debugger, a frozen container). It goes
  on where it was, and connections that are open may be at work all the while.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

# Without a startup process an honest server is for seconds only: it gives the processes of before 5 s to end, kills
# those that are left, and starts the next. The rest is for a slow machine.
HUNG_AFTER_S = 60.0
ASK_EVERY_S = 10.0


class Answer(Enum):
    """To somebody who would like to connect."""

    IN = "in"  # or refused for a reason that is not the server's own state
    NOT_NOW = "not now"
    NONE = "none"


@dataclass(frozen=True)
class Seen:
    """A server, at one look."""

    pid: int
    answer: Answer
    recovers: bool = False  # it has a startup process
    stops: bool = False  # it was told to

    @property
    def is_idle(self) -> bool:
        """It lets nobody in, and nothing is under way after which it would."""
        return self.answer is Answer.NOT_NOW and not self.recovers and not self.stops


class HangClock:
    """How long one server has been idle so, at every look."""

    def __init__(self, hung_after_s: float = HUNG_AFTER_S, ask_every_s: float = ASK_EVERY_S) -> None:
        self._hung_after_s = hung_after_s
        # Of a longer time between two looks it is not known what was in it: this process may have been stopped.
        self._gap_s_max = 2 * ask_every_s
        self._last: Seen | None = None
        self._last_at = 0.0
        self._idle_s = 0.0

    def hung(self, seen: Seen | None, now: float) -> bool:
        """Whether the server of this look hangs. `now` goes on from look to look."""
        if seen is None or not seen.is_idle:
            self._last = None
            return False
        if self._last is None or self._last.pid != seen.pid:
            self._idle_s = 0.0
        else:
            self._idle_s += min(now - self._last_at, self._gap_s_max)
        self._last, self._last_at = seen, now
        return self._idle_s >= self._hung_after_s
