"""Named places between two effects where a test may end the process, as a power cut would, or make a thread hang.

`EVERMARK_FAILPOINT=log.committed@3` kills the pipeline (SIGKILL) the third time that place is reached.
`EVERMARK_HANG=log.committed@3:/some/file` leaves the thread there for ever, and its process alive; once, as the file,
which must not exist, says to other processes. Without the variables `hit` costs a look at two names. Names are listed
in `NAMES`, so that a test can walk over all of them and a typing error in a name is found.
"""

from __future__ import annotations

import os
import signal
import threading

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
# keys kept and what waited released, before the publisher is told.
BOTS = ("bots.learned", "keys.noted", "keys.published")
# While rows from before a stream are copied.
COPY = ("copy.planned", "copy.begun", "copy.scanned", "copy.marked", "copy.ready", "copy.done")
NAMES = (*FLOW, *MEND, *REPLAY, *BOTS, *COPY)

_ENV = "EVERMARK_FAILPOINT"
_HANG_ENV = "EVERMARK_HANG"
_PID_ENV = "EVERMARK_PID"
_hits: dict[str, int] = {}


def _armed(env: str) -> tuple[str, int, str] | None:
    """The name, the how manieth time, and what stands behind the colon."""
    spec, _, rest = os.environ.get(env, "").partition(":")
    if not spec:
        return None
    name, _, nth = spec.partition("@")
    if name not in NAMES:
        raise ValueError(f"{env}: no failpoint is called {name!r}; there are {', '.join(NAMES)}")
    return name, int(nth or 1), rest


_ARMED, _HANGS = _armed(_ENV), _armed(_HANG_ENV)


def hit(name: str) -> None:
    """Die here, or hang, if a test asked for it. In a Spark worker the pipeline's main process dies first."""
    if _ARMED is not None and _ARMED[0] == name and _is_reached(name, _ARMED[1]):
        main = int(os.environ.get(_PID_ENV, "0") or 0)
        if main and main != os.getpid():
            os.kill(main, signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if _HANGS is not None and _HANGS[0] == name and _is_reached(name, _HANGS[1]) and _is_first(_HANGS[2]):
        threading.Event().wait()


def _is_reached(name: str, nth: int) -> bool:
    _hits[name] = _hits.get(name, 0) + 1
    return _hits[name] >= nth


def _is_first(file: str) -> bool:
    try:
        os.close(os.open(file, os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True
