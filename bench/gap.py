"""A gap in one stream, fetched from a node that answers after 20 ms, into the log, durable.

Against one page after the other by the same client, verified, decoded and written by the same code, without Spark.
Memory is the peak over all our processes, with a gap of 2 000 and of 20 000 blocks.

The size of a page is the node's choice, and it decides what is measured. With 20 blocks a page (`page`, the ratio
`sequential`) a gap of 20 000 blocks is 1 000 answers of 20 ms each: waiting, which tasks share. Our own node gives 500
(`page_default`): 40 answers, and the rest is verifying and decoding, which two cores share. That is measured as well,
and said as `sequential_default_page`.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from pathlib import Path

from bench.nodes import Kept, Reading, fill
from bench.report import PeakMemory, Report, say
from bench.taking import logged
from evermark.blocknode.settings import NodeSettings
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.write import BatchWriter
from evermark.sources.base import Limit
from evermark.sources.blocks.source import BlockStreams
from evermark.sources.blocks.target import BlocksTarget
from evermark.testing.blocknodes import Node

_BLOCKS = 20_000
_BLOCKS_SMALL = 2_000
_EVENTS_A_BLOCK = 10
_WHO = ("ours", "theirs", "wide_ours", "wide_theirs")  # each run of each is a source of its own
_PAGE_BLOCKS = 20
_PAGE_BLOCKS_DEFAULT = NodeSettings.page_blocks
_LATE_S = 0.02
_RUNS = 5
_RUNS_OF_SLOW = 2
_SLOW_S = 20.0
_RUNS_DEFAULT_PAGE = 3
_DEFAULT_PAGE_S = 40.0  # no further run is begun after that
_WARM_BLOCKS = 4_000  # enough that every task slot has had a worker


class _Gap:
    """A stream of which sources know the first block; then it grows."""

    def __init__(self, stream: str, node: Node, kept: Kept, names: list[str]) -> None:
        self.stream, self._node = stream, node
        client = node.client()
        client.create(stream)
        client.close()
        self.targets = {name: kept.target(name, node, [stream]) for name in names}
        self.starts = {name: _known(target) for name, target in self.targets.items()}

    def grow(self, blocks: int) -> set[str]:
        client = self._node.client()
        ids = fill(client, self.stream, blocks * _EVENTS_A_BLOCK)
        client.close()
        return set(ids)


def _known(target: BlocksTarget) -> str:
    """The first block, taken as if it were logged; where reading goes on."""
    source = BlockStreams(target)
    start = source.earliest(0)
    source.begin(0, start)
    end = source.latest({0: start}, Limit(wait_s=0.0))[0]
    source.confirm(0, end)
    source.close()
    return end


def _sequential(target: BlocksTarget, start: str, folder: Path) -> tuple[float, list[str]]:
    """One after the other: as much in one slice as there is, read and written in this process."""
    alone = replace(target, pace=replace(target.pace, slices_max=1, requests_per_s=1e9))
    source = BlockStreams(alone)
    log = DeltaLog(folder)
    began = time.perf_counter()
    source.begin(0, start)
    at, batch, epoch = start, log.fence(0, 1).batch, 1
    while True:
        end = source.latest({0: at}, Limit(wait_s=0.0))[0]
        if end == at:
            break
        rows = (rows for piece in source.slices(0, at, end) for rows in source.read(piece))
        batch += 1
        file = BatchWriter(folder, target.source, 0, batch).write_all(rows)
        log.commit(Append(0, batch, epoch, at, end, (file,) if file else ()))
        log.sync()
        source.confirm(0, end)
        at = end
    seconds = time.perf_counter() - began
    source.close()
    return seconds, logged(folder)


def _counted(ids: list[str], wanted: set[str]) -> int:
    return len(wanted - set(ids)) + (len(ids) - len(set(ids)))


def run(scale: float, folder: Path) -> Report:
    report = Report()
    late = [{"fault": "late", "op": op, "seconds": _LATE_S} for op in ("miniblocks", "stream")]
    options = ("--seal-events", str(_EVENTS_A_BLOCK), "--seal-after", "3600s")
    kept = Kept(folder)
    reading = Reading(folder, kept)
    try:
        with Node(folder / "node", *options, "--page-blocks", str(_PAGE_BLOCKS), faults=late) as node:
            gap, events = _measure(report, scale, folder, node, kept, reading)
        with Node(folder / "node", *options, faults=late, port=node.port):
            _measure_default_page(report, folder, gap, events, reading)
    finally:
        reading.close()
        kept.close()
    return report


def _measure(
    report: Report, scale: float, folder: Path, node: Node, kept: Kept, reading: Reading
) -> tuple[_Gap, set[str]]:
    """With small pages; the large gap and its events, for whoever reads it again."""
    warm = _Gap("warm", node, kept, ["warm"])
    wanted = warm.grow(_WARM_BLOCKS)
    say("warming up: session, workers, first batches")
    reading.drain(warm.targets["warm"], warm.starts["warm"], len(wanted))

    small, large = max(200, int(_BLOCKS_SMALL * scale)), max(2_000, int(_BLOCKS * scale))
    gaps = {
        small: _Gap("small", node, kept, [f"small_{n}" for n in range(_RUNS)]),
        large: _Gap("large", node, kept, [f"{who}_{n}" for n in range(_RUNS) for who in _WHO]),
    }
    events = {}
    for blocks, gap in gaps.items():
        say(f"making {blocks} blocks")
        events[blocks] = gap.grow(blocks)

    rates: list[float] = []
    theirs: list[float] = []
    peaks: dict[int, list[float]] = {small: [], large: []}
    slow = 0.0
    for n in range(_RUNS):
        if n >= _RUNS_OF_SLOW and slow > _SLOW_S:
            break
        for blocks, name in ((small, f"small_{n}"), (large, f"ours_{n}")):
            gap = gaps[blocks]
            with PeakMemory(without=[node.pid]) as memory:
                seconds, ids = reading.drain(gap.targets[name], gap.starts[name], len(events[blocks]))
            peaks[blocks].append(memory.mb)
            report.lost += _counted(ids, events[blocks])
        rates.append(len(ids) / seconds)
        name = f"theirs_{n}"
        slow, ids = _sequential(gaps[large].targets[name], gaps[large].starts[name], folder / "theirs" / name)
        report.lost += _counted(ids, events[large])
        theirs.append(len(ids) / slow)
        say(f"ours {rates[-1]:,.0f}/s, sequential {theirs[-1]:,.0f}/s, lost {report.lost}")
        say(f"peak {peaks[small][-1]:.0f} MB with {small} blocks, {peaks[large][-1]:.0f} MB with {large}")
    middle = report.spread("events_per_s", rates)
    report.spread("sequential_events_per_s", theirs)
    report.ratios["sequential"] = middle / statistics.median(theirs)
    less = report.spread("rss_mb_2000", peaks[small])
    more = report.spread("rss_mb_20000", peaks[large])
    report.ratios["memory"] = more / less
    report.figures["page"] = _PAGE_BLOCKS
    return gaps[large], events[large]


def _measure_default_page(report: Report, folder: Path, gap: _Gap, events: set[str], reading: Reading) -> None:
    """The same gap from the same node, which gives as many blocks at once as it does by default."""
    ours: list[float] = []
    theirs: list[float] = []
    began = time.monotonic()
    for n in range(_RUNS_DEFAULT_PAGE):
        if ours and time.monotonic() - began > _DEFAULT_PAGE_S:
            break
        name = f"wide_ours_{n}"
        seconds, ids = reading.drain(gap.targets[name], gap.starts[name], len(events))
        report.lost += _counted(ids, events)
        ours.append(len(ids) / seconds)
        name = f"wide_theirs_{n}"
        seconds, ids = _sequential(gap.targets[name], gap.starts[name], folder / "theirs" / name)
        report.lost += _counted(ids, events)
        theirs.append(len(ids) / seconds)
        say(f"pages of {_PAGE_BLOCKS_DEFAULT}: ours {ours[-1]:,.0f}/s, sequential {theirs[-1]:,.0f}/s")
    middle = report.spread("events_per_s_default_page", ours)
    report.ratios["sequential_default_page"] = middle / report.spread("sequential_events_per_s_default_page", theirs)
    report.figures["page_default"] = _PAGE_BLOCKS_DEFAULT
