"""Programs that tests start beside the product."""

from __future__ import annotations

import signal
import subprocess

_STOP_S = 30.0


def end_process(process: subprocess.Popen[bytes], how: signal.Signals) -> None:
    """Send the signal and wait for the end; a program that does not end by it is killed."""
    process.send_signal(how)
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
