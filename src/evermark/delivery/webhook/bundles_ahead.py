"""Bundles made before they are sent, and once for all jobs that want the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from evermark.delivery.webhook.base import Job
from evermark.delivery.webhook.body import Rendering, Style
from evermark.delivery.webhook.bundles import PIECE_BYTES_MAX, Packs
from evermark.delivery.webhook.ordering import keys_of

BUNDLE_LANES_MAX = 8
BUNDLE_MAX = 10_000


def packs_of(job: Job, style: Style) -> Packs:
    how = Rendering(style, job.historical, job.attempt, job.replay_id)
    return Packs(job.events, keys_of(job.events), how, *_cut(job), job.spec.body_bytes_max)


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
