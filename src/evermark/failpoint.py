"""Named places between two effects where a test may end the process, as a power cut would.

`EVERMARK_FAILPOINT=log.committed@3` kills the pipeline (SIGKILL) the third time that place is reached.
Without the variable `hit` costs one dictionary look-up. Names are listed in `NAMES`, so that a test can walk
over all of them and a typing error in a name is found.
"""

from __future__ import annotations

import os
import signal

# On every event's way.
FLOW = (
    "file.written",
    "log.committed",
    "log.synced",
    "head.moved",
    "checkpoint.saved",
    "source.confirmed",
    "post.sent",
    "settle.begun",
    "settle.done",
    "queue.claimed",
    "queue.posted",
    "queue.settled",
)
# While a lost slot is repaired.
MEND = (
    "repair.opened",
    "repair.cleared",
    "repair.slot_made",
    "repair.found",
    "repair.closed",
    "repair.old_dropped",
    "repair.renamed",
    "repair.done",
)
# While a replay is under way.
REPLAY = ("replay.sent", "replay.settled")
# What is known of bots: memberships kept, before anything is judged by them; keys asked for, before anybody is asked;
# keys kept and what waited released, before whoever published is told.
BOTS = ("bots.learned", "keys.noted", "keys.published")
# While rows from before a stream are copied.
COPY = ("copy.planned", "copy.begun", "copy.scanned", "copy.marked", "copy.ready", "copy.done")
NAMES = (*FLOW, *MEND, *REPLAY, *BOTS, *COPY)

_ENV = "EVERMARK_FAILPOINT"
_PID_ENV = "EVERMARK_PID"
_hits: dict[str, int] = {}


def _armed() -> tuple[str, int] | None:
    spec = os.environ.get(_ENV)
    if not spec:
        return None
    name, _, nth = spec.partition("@")
    if name not in NAMES:
        raise ValueError(f"{_ENV}: no failpoint is called {name!r}; there are {', '.join(NAMES)}")
    return name, int(nth or 1)


_ARMED = _armed()


def hit(name: str) -> None:
    """Die here if a test asked for it. In a Spark worker the pipeline's main process dies first."""
    if _ARMED is None or _ARMED[0] != name:
        return
    _hits[name] = _hits.get(name, 0) + 1
    if _hits[name] >= _ARMED[1]:
        main = int(os.environ.get(_PID_ENV, "0") or 0)
        if main and main != os.getpid():
            os.kill(main, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
