"""Bodies that several subscriptions want: rendered once for each style, all rows together.

A thousand subscriptions that want an event each would render a thousand tables of one row.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pyarrow as pa

from evermark.delivery.webhook.base import Bodies, Job
from evermark.delivery.webhook.body import Rendering, Style, delivery_ids, render_sound


class SharedBodies:
    """Of some rows, for the jobs that want a part of them each."""

    def __init__(self, rows: pa.RecordBatch) -> None:
        self._rows = rows
        self._made: dict[Rendering, Bodies] = {}

    def given_to(self, job: Job, numbers: np.ndarray) -> Job:
        """The job with its bodies, if it sends its events one by one. `numbers`: of its rows among all."""
        spec = job.spec
        if spec.bundle > 1 or spec.body not in set(Style):
            return job
        return replace(job, bodies=self._of(Rendering(Style(spec.body), job.historical), numbers))

    def _of(self, how: Rendering, numbers: np.ndarray) -> Bodies:
        if how not in self._made:
            column, bad = render_sound(self._rows, how)
            idents = delivery_ids(self._rows.column("event_id").to_pylist(), how.replay_id)
            self._made[how] = Bodies(idents, column.to_pylist(), bad)
        all_, wanted = self._made[how], numbers.tolist()
        bad = {n: all_.bad[row] for n, row in enumerate(wanted) if row in all_.bad} if all_.bad else {}
        return Bodies([all_.idents[row] for row in wanted], [all_.bodies[row] for row in wanted], bad)
