"""Bodies that several subscriptions want: rendered once for each style, all rows together.

A thousand subscriptions that want an event each would render a thousand tables of one row.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from evermark.delivery.model import SubscriptionSpec
from evermark.delivery.webhook.base import Bodies
from evermark.delivery.webhook.body import Rendering, Style, delivery_ids, render_sound

_STYLES = frozenset(Style)


class SharedBodies:
    """Of some rows, for the jobs that want a part of them each."""

    def __init__(self, rows: pa.RecordBatch, historical: bool) -> None:
        self._rows, self._historical = rows, historical
        self._made: dict[str, Bodies] = {}  # by style

    def of(self, spec: SubscriptionSpec, numbers: np.ndarray) -> Bodies | None:
        """The bodies of the rows with these numbers; None if the subscription does not get its events one by one."""
        if spec.bundle > 1 or spec.body not in _STYLES:
            return None
        all_ = self._made.get(spec.body) or self._rendered(Style(spec.body))
        wanted = numbers.tolist()
        bad = {n: all_.bad[row] for n, row in enumerate(wanted) if row in all_.bad} if all_.bad else {}
        return Bodies([all_.idents[row] for row in wanted], [all_.bodies[row] for row in wanted], bad)

    def _rendered(self, style: Style) -> Bodies:
        column, bad = render_sound(self._rows, Rendering(style, self._historical))
        idents = delivery_ids(self._rows.column("event_id").to_pylist(), None)
        made = self._made[style] = Bodies(idents, column.to_pylist(), bad)
        return made
