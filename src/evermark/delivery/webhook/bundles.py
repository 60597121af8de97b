"""Bundles made column by column: no Python object per event, unless a bundle is refused.

The lines of a job are dealt out to a few shares; the events of a share keep their order. All bundles of a job are
planned at once; they are rendered a few at a time, each event with the comma that follows it, so that a bundle is a
piece of the rendered column as it lies in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pyarrow as pa

from evermark.delivery.webhook.base import Job
from evermark.delivery.webhook.body import (
    AROUND,
    BUNDLE_BYTES_AROUND,
    Rendering,
    Style,
    bundle_id_of,
    delivery_ids,
    render_sound,
)
from evermark.delivery.webhook.ordering import I64, keys_of
from evermark.delivery.webhook.signing import Body

BUNDLE_LANES_MAX = 8
BUNDLE_MAX = 10_000
PIECE_ROWS = 4_096
PIECE_BYTES_MAX = 64 * 1024 * 1024

# One event on its way: its row in the job, its webhook id, its body.
Parcel = tuple[int, str, bytes]


@dataclass(frozen=True)
class Bundle:
    """One bundle, ready to be sent, and the rows it was made of."""

    share: int
    rows: I64
    ident: str
    body: Body
    _ids: pa.Array  # of the events of several bundles
    _bodies: _Texts  # of the same events, each with its comma
    _at: int  # its first row in `_ids` and `_bodies`
    _replay_id: str | None
    problem: str = ""  # why its only event has no body

    def parcels(self) -> list[Parcel]:
        rows = self.rows.tolist()
        idents = delivery_ids(self._ids.slice(self._at, len(rows)).to_pylist(), self._replay_id)
        places = range(self._at, self._at + len(rows))
        bodies = [bytes(self._bodies.between(n, n + 1, 1)) for n in places]
        return list(zip(rows, idents, bodies, strict=True))


class _Texts:
    """A column of texts as they lie in memory."""

    def __init__(self, column: pa.Array) -> None:
        ends = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1]
        self.sizes = np.diff(ends)
        self._ends: list[int] = ends.tolist()
        self._memory = memoryview(column.buffers()[2])

    def between(self, start: int, stop: int, without: int = 0) -> memoryview:
        """The texts of some rows, one after another, without the last `without` characters."""
        return self._memory[self._ends[start] : self._ends[stop] - without]


class Bundles:
    """The bundles of some rows, made a few at a time, and kept until every reader has taken them."""

    def __init__(self, job: Job, style: Style) -> None:
        events = self._events = job.events
        self.keys = keys_of(events)
        self._how = Rendering(style, job.historical, job.attempt, job.replay_id)
        self._room = job.spec.body_bytes_max - BUNDLE_BYTES_AROUND
        bundle, shares = _cut(job)
        row_bytes = events.nbytes // max(1, events.num_rows) + 1
        self._piece_rows = max(1, min(PIECE_ROWS, PIECE_BYTES_MAX // row_bytes))
        # Large events make small bundles: a bundle must fit into a request, and into memory.
        bundle = max(1, min(bundle, self._room // row_bytes, self._piece_rows))
        self._plan = deque(_planned(self.keys.lines, shares, bundle))
        self._made: deque[list[Bundle]] = deque()
        self._gone = 0  # how many pieces every reader has taken
        self._readers = 0
        self._taken: dict[int, int] = {}  # by piece: how many readers have it
        self.body_bytes_max = 0  # of the bodies rendered so far

    def reader(self) -> BundleReader:
        """For one more job that wants all bundles. All jobs send from one thread."""
        self._readers += 1
        return BundleReader(self)

    def make_all(self) -> None:
        """Make all bundles now: in a thread that would only wait, and for rows that are not too large."""
        while self._plan:
            self._made.append(self._make())

    def has(self, piece: int) -> bool:
        return bool(self._plan) or piece < self._gone + len(self._made)

    def piece(self, piece: int) -> list[Bundle]:
        if piece >= self._gone + len(self._made):
            self._made.append(self._make())
        found = self._made[piece - self._gone]
        self._taken[piece] = self._taken.get(piece, 0) + 1
        while self._made and self._taken.get(self._gone) == self._readers:
            self._made.popleft()
            del self._taken[self._gone]
            self._gone += 1
        return found

    def _make(self) -> list[Bundle]:
        planned = [self._plan.popleft()]
        left = self._piece_rows - len(planned[0][1])
        while self._plan and len(self._plan[0][1]) <= left:
            planned.append(self._plan.popleft())
            left -= len(planned[-1][1])
        events = self._rows(np.concatenate([rows for _, rows in planned]))
        bodies, problems = render_sound(events, self._how, after=",")
        column = events.column("event_id")
        ids = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
        idents, texts, replay_id = _Texts(ids), _Texts(bodies), self._how.replay_id
        self.body_bytes_max = max(self.body_bytes_max, int(texts.sizes.max()) - 1)
        before, after = AROUND[self._how.style]
        bundles: list[Bundle] = []
        starts = np.cumsum([0, *(len(rows) for _, rows in planned)])
        fits = (np.add.reduceat(texts.sizes, starts[:-1]) <= self._room).tolist()
        for (share, rows), start, whole in zip(planned, starts[:-1].tolist(), fits, strict=True):
            cuts: Iterable[tuple[int, int]] = [(0, len(rows))]
            if problems or not whole:
                alone = [row - start for row in problems if start <= row < start + len(rows)]
                cuts = self._cuts(texts.sizes[start : start + len(rows)], alone)
            for at, stop in cuts:
                first, last = start + at, start + stop
                ident = bundle_id_of(idents.between(first, last), idents.sizes[first:last], replay_id)
                body = before, texts.between(first, last, len(",")), after
                problem = problems.get(first, "")
                bundles.append(Bundle(share, rows[at:stop], ident, body, ids, texts, first, replay_id, problem))
        return bundles

    def _rows(self, rows: I64) -> pa.Table | pa.RecordBatch:
        first = int(rows[0])
        if int(rows[-1]) - first == len(rows) - 1 and bool((np.diff(rows) == 1).all()):
            return self._events.slice(first, len(rows))
        return self._events.take(pa.array(rows))

    def _cuts(self, sizes: I64, alone: Sequence[int]) -> Iterator[tuple[int, int]]:
        """A planned bundle, cut so that each part fits into a request; events without a body stand alone."""
        bounds = sorted({0, len(sizes), *alone, *(row + 1 for row in alone)})
        for first, last in pairwise(bounds):
            yield from ((first + at, first + stop) for at, stop in self._fitting(sizes[first:last]))

    def _fitting(self, sizes: I64) -> Iterator[tuple[int, int]]:
        """Cut so that each part fits; one event always stays whole."""
        start, room = 0, self._room
        if int(sizes.sum()) > room:
            for n, size in enumerate(sizes.tolist()):
                if n > start and size > room:
                    yield start, n
                    start, room = n, self._room
                room -= size
        yield start, len(sizes)


class BundleReader:
    """How far one job is with its bundles."""

    def __init__(self, bundles: Bundles) -> None:
        self._bundles = bundles
        self.keys = bundles.keys
        self.at = 0

    @property
    def more(self) -> bool:
        return self._bundles.has(self.at)

    @property
    def body_bytes_max(self) -> int:
        return self._bundles.body_bytes_max

    def next(self) -> list[Bundle]:
        """The next few bundles, the one with the first row first."""
        self.at += 1
        return self._bundles.piece(self.at - 1)


def _cut(job: Job) -> tuple[int, int]:
    """How many events to a bundle, and how many bundles may be under way."""
    bundle = min(max(1, job.spec.bundle), BUNDLE_MAX)
    return bundle, min(max(1, job.spec.concurrency), BUNDLE_LANES_MAX, -(-job.events.num_rows // bundle)) or 1


def prepared(jobs: Sequence[Job]) -> list[Job]:
    """The jobs, with their bundles made already, unless these are too large to be held."""
    room = PIECE_BYTES_MAX
    known: dict[tuple[object, ...], Bundles] = {}
    found: list[Job] = []
    for job in jobs:
        spec = job.spec
        if spec.bundle <= 1 or spec.body not in set(Style):
            found.append(job)
            continue
        # Jobs that want all rows of a chunk share one table; a job that wants some of them has a copy.
        same = (id(job.events), spec.body, job.historical, job.attempt, job.replay_id, *_cut(job), spec.body_bytes_max)
        if same not in known and job.events.nbytes <= room:
            room -= job.events.nbytes
            known[same] = Bundles(job, Style(spec.body))
            known[same].make_all()
        found.append(replace(job, bundles=known[same].reader()) if same in known else job)
    return found


def _planned(lines: I64, shares: int, bundle: int) -> list[tuple[int, I64]]:
    """The share and the rows of each bundle, the one with the first row first."""
    rows = len(lines)
    if _all_differ(lines):
        # No event has to wait for another one: bundles are taken as the rows come.
        starts = range(0, rows, bundle)
        return [(n % shares, np.arange(at, min(at + bundle, rows))) for n, at in enumerate(starts)]
    of = lines % shares
    found: list[tuple[int, I64]] = []
    for share in range(shares):
        mine = np.flatnonzero(of == share)
        found += [(share, mine[at : at + bundle]) for at in range(0, len(mine), bundle)]
    return sorted(found, key=lambda one: int(one[1][0]))


def _all_differ(keys: I64) -> bool:
    if not len(keys):
        return True
    least = int(keys.min())
    # Numbers are dense where there is one stream: counting them takes a tenth of the time of sorting them.
    if int(keys.max()) - least < 4 * len(keys):
        return bool((np.bincount(keys - least) <= 1).all())
    return len(np.unique(keys)) == len(keys)
