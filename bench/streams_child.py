"""A process that starts to read a block source with many known streams, and takes what is new of the active ones."""

from __future__ import annotations

import json
import pickle
import sys
import time
from pathlib import Path

import psutil

_BEGAN = time.perf_counter()

from evermark.sources.base import Limit  # noqa: E402 - the clock starts before anything is loaded
from evermark.sources.blocks.source import BlockStreams  # noqa: E402


def main() -> None:
    source: BlockStreams = pickle.loads(bytes.fromhex(sys.argv[1]))
    at, wanted = sys.argv[2], int(sys.argv[3])
    source.check({0: at})
    source.begin(0, at)
    ids: list[str] = []
    while len(ids) < wanted:
        end = source.latest({0: at}, Limit(wait_s=0.0))[0]
        if end == at:
            break
        for piece in source.slices(0, at, end):
            ids += [name for rows in source.read(piece) for name in rows["event_id"].to_pylist()]
        source.confirm(0, end)
        at = end
    seconds = time.perf_counter() - _BEGAN
    print(json.dumps({"seconds": seconds, "rss_mb": _peak_mb(), "at": at, "ids": ids}))


def _peak_mb() -> float:
    """Of this program alone: what `getrusage` says has the parent's in it, which is larger."""
    status = Path("/proc/self/status")
    if not status.exists():
        return psutil.Process().memory_info().rss / 2**20
    (line,) = [line for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


main()
