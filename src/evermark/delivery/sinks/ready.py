"""Bundles made before they are sent, and once for all jobs that want the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from evermark.delivery.body import Rendering, Style
from evermark.delivery.sinks.base import Job
from evermark.delivery.sinks.packs import PIECE_BYTES_MAX, Packs

BUNDLE_LANES_MAX = 8
BUNDLE_MAX = 10_000


def key_numbers(events: pa.Table | pa.RecordBatch) -> np.ndarray:
    """A number per row, equal for rows of one (source, stream, key); rows without a key have numbers of their own."""
    source, stream, key = (_codes(events, name) for name in ("source", "stream", "key"))
    numbers: np.ndarray = (source * (int(stream.max(initial=0)) + 1) + stream) * (int(key.max(initial=0)) + 1) + key
    keyless = key < 0
    numbers[keyless] = -1 - np.flatnonzero(keyless)
    return numbers


def _codes(events: pa.Table | pa.RecordBatch, name: str) -> np.ndarray:
    column = events.column(name)
    whole = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    encoded = whole if pa.types.is_dictionary(whole.type) else whole.dictionary_encode()
    codes: np.ndarray = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes


def packs_of(job: Job, style: Style) -> Packs:
    how = Rendering(style, job.historical, job.attempt, job.replay_id)
    return Packs(job.events, key_numbers(job.events), how, *_cut(job), job.spec.body_bytes_max)


def _cut(job: Job) -> tuple[int, int]:
    """How many events to a bundle, and how many bundles may be under way."""
    bundle = min(max(1, job.spec.bundle), BUNDLE_MAX)
    return bundle, min(max(1, job.spec.concurrency), BUNDLE_LANES_MAX, -(-job.events.num_rows // bundle)) or 1


def prepared(jobs: Sequence[Job]) -> list[Job]:
    """The jobs, with the bundles made already of those that have some, unless they are too large to be held."""
    room = PIECE_BYTES_MAX
    known: dict[tuple[object, ...], Packs] = {}
    found: list[Job] = []
    for job in jobs:
        spec = job.spec
        if spec.bundle <= 1 or spec.body not in set(Style):
            found.append(job)
            continue
        # Jobs that want all rows of a chunk have them in common; whoever wants some of them has a copy.
        same = (id(job.events), spec.body, job.historical, job.attempt, job.replay_id, *_cut(job), spec.body_bytes_max)
        if same not in known and job.events.nbytes <= room:
            room -= job.events.nbytes
            known[same] = packs_of(job, Style(spec.body))
            known[same].make_all()
        found.append(replace(job, packer=known[same].taker()) if same in known else job)
    return found
