"""Start and memory of a block source with 100 000 known streams, 100 of them active; against one with 1 000 known.

Measured is the process that plans and reads: loaded, connected, and done with what is new of the active streams.
"""

from __future__ import annotations

import json
import pickle
import sqlite3
import statistics
import subprocess
import sys
from pathlib import Path

from bench.nodes import Kept, create
from bench.report import Report, say
from evermark.sources.blocks.chain import Cookie
from evermark.sources.blocks.decide.resume import StreamState
from evermark.sources.blocks.decide.ticks import Item, Move, Position, Tick
from evermark.sources.blocks.source import BlockStreams
from evermark.testing.blocknodes import Node

_KNOWN, _FEW = 100_000, 1_000
_ACTIVE = 100
_EVENTS = 3
_RUNS = 7
_AT_ONCE = 10_000
_OPTIONS = ("--seal-after", "3600s")
_HEADS = "select stream, kind, incarnation, next_number, last_hash from streams order by stream"


class _Place:
    """A node with so many streams, all of them known to a source, and a hundred that are written to."""

    def __init__(self, folder: Path, kept: Kept, known: int) -> None:
        self.known = known
        self.node = Node(folder / f"node_{known}", *_OPTIONS).start()
        say(f"making {known} streams")
        self.streams = [f"room{n:06d}" for n in range(known)]
        create(self.node, self.streams)
        self._source = BlockStreams(kept.target(f"known_{known}", self.node))
        self.at = self._know(folder / f"node_{known}" / "blocknode.db")

    def _know(self, file: Path) -> str:
        """As it would be had all of them been taken; taking them one by one is not what is measured."""
        with sqlite3.connect(f"file:{file}?mode=ro", uri=True) as node:
            heads = node.execute(_HEADS).fetchall()
        client = self.node.client()
        touched = client.good("GET", "/v1/streams", touched_after=0, limit=1)["touched"]
        while (more := client.good("GET", "/v1/streams", touched_after=touched))["streams"]:
            touched = more["touched"]
        client.close()
        source, plans, tick = self._source, self._source.plans, 0
        source.begin(0, source.earliest(0))
        plans.begin(0, 0)
        version = source.target.choice.version()
        for at in range(0, len(heads), _AT_ONCE):
            items = [
                Item(stream, move=Move(kind, StreamState(0, Cookie(number, _hex(last)), incarnation)))
                for stream, kind, incarnation, number, last in heads[at : at + _AT_ONCE]
            ]
            tick = plans.add(0, Tick(tick, 0, touched, version), items)
            plans.confirm(0, tick)
        return str(Position(tick))

    def turn(self) -> tuple[float, float, int]:
        """Something new in the active streams, then a start: its seconds, its peak, and how many events it lacks."""
        client = self.node.client()
        step = max(1, self.known // _ACTIVE)
        wanted = {name for stream in self.streams[::step][:_ACTIVE] for name in client.say(stream, _EVENTS)}
        client.close()
        packed = pickle.dumps(self._source).hex()
        command = [sys.executable, "-m", "bench.streams_child", packed, self.at, str(len(wanted))]
        ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        said = json.loads(ran.stdout.splitlines()[-1])
        self.at = said["at"]
        lost = len(wanted - set(said["ids"])) + (len(said["ids"]) - len(set(said["ids"])))
        return said["seconds"], said["rss_mb"], lost

    def close(self) -> None:
        self._source.close()
        self.node.kill()


def _hex(value: str | bytes) -> str:
    return value.hex() if isinstance(value, bytes) else value


def run(scale: float, folder: Path) -> Report:
    report = Report()
    kept = Kept(folder)
    places: list[_Place] = []
    try:
        places.extend(_Place(folder, kept, known) for known in (_FEW, max(2 * _FEW, int(_KNOWN * scale))))
        seconds: dict[int, list[float]] = {place.known: [] for place in places}
        peaks: dict[int, list[float]] = {place.known: [] for place in places}
        for _ in range(_RUNS):
            for place in places:
                took, peak, lost = place.turn()
                seconds[place.known].append(took)
                peaks[place.known].append(peak)
                report.lost += lost
                say(f"{place.known} known: {took:.2f} s, {peak:.0f} MB, lost {report.lost}")
    finally:
        for place in places:
            place.close()
        kept.close()
    few, many = (place.known for place in places)
    start = report.spread("start_s", seconds[many])
    memory = report.spread("rss_mb", peaks[many])
    report.ratios["start"] = start / statistics.median(seconds[few])
    report.ratios["memory"] = memory / statistics.median(peaks[few])
    report.figures["start_s_1000"] = statistics.median(seconds[few])
    report.figures["rss_mb_1000"] = statistics.median(peaks[few])
    return report
