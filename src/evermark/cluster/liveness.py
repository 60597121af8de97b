"""Whether a lease's holder still lives, and whether another may therefore have the lease.

Only a process that can be looked at is ever called gone: same host, same boot, same pid namespace. Of any other
process we know nothing, and wait for the lease to run out.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import psutil

from evermark.cluster.base import Holder

IsGone = Callable[[Holder], bool]

_PROC = Path("/proc")
_ENDED = ("Z", "X", "x")


@dataclass(frozen=True)
class Held:
    """A lease as the store has it. `holder` is None after a release."""

    holder: Holder | None
    epoch: int
    expires_at: datetime


def epoch_for(held: Held | None, holder: Holder, now: datetime, is_gone: IsGone) -> int | None:
    """The epoch with which `holder` gets the lease, or None while another holder has it. Pure, but for `is_gone`."""
    if held is None:
        return 1
    if held.holder == holder:
        return held.epoch
    if held.holder is None or held.expires_at <= now or is_gone(held.holder):
        return held.epoch + 1
    return None


def this_process(instance: str | None = None) -> Holder:
    """Without a name of its own it is called by host and pid, and by chance: containers may have the same host name,
    and count their processes from 1.
    """
    pid, host = os.getpid(), socket.gethostname()
    name = instance or f"{host}-{pid}-{secrets.token_hex(4)}"
    return Holder(instance=name, host=host, boot=_boot(), pid=pid, started=_started(pid) or "")


def is_gone(holder: Holder) -> bool:
    """True only when the holder's process certainly ended. A stopped process (SIGSTOP) is not gone."""
    if not holder.started or holder.host != socket.gethostname() or holder.boot != _boot():
        return False
    try:
        os.kill(holder.pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it exists; /proc says below whether it is the same one
    started = _started(holder.pid)
    # Without a start time the pid exists but may not be looked at: then we know nothing.
    return started is not None and started != holder.started


def _boot() -> str:
    """Tells runs of a machine apart, and containers that share a kernel (and perhaps a host name)."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{(_PROC / 'self/ns/pid').readlink()}"
    except OSError:
        return f"{psutil.boot_time():.0f}"


def _started(pid: int) -> str | None:
    """When a process began, as text to compare; "ended" for a zombie."""
    try:
        # Counted after the closing parenthesis of the name, the first field is the state and field 19 the start.
        fields = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()
        return "ended" if fields[0] in _ENDED else fields[19]
    except (OSError, IndexError):
        if (_PROC / "self/stat").exists():
            return None
    try:
        process = psutil.Process(pid)
        return "ended" if process.status() == psutil.STATUS_ZOMBIE else f"{process.create_time():.2f}"
    except psutil.Error:
        return None
