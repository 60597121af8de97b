"""Who comes last where there are not enough processors."""

from __future__ import annotations

import os
import threading
from contextlib import suppress

_HUMBLE = 10


def lower_priority() -> None:
    """This thread, and no other of its process, leaves the processor to whoever else wants it. It cannot step forward
    again: that takes a privilege.
    """
    with suppress(OSError, AttributeError):  # not on every system: then it competes like everybody
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _HUMBLE)
