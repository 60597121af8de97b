"""Who comes last where there are not enough processors."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

_HUMBLE = 10


def lower_priority() -> None:
    """This thread, and no other of its process, runs only when no other one wants the processor. It cannot step forward
    again: that takes a privilege.
    """
    with suppress(OSError, AttributeError):  # not on every system: then it competes like any thread
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _HUMBLE)
