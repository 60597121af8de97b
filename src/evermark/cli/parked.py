"""Parked deliveries, for the commands that decide about them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING

from evermark.cli.deployment import as_deliverer
from evermark.delivery.model import ParkedRow

if TYPE_CHECKING:
    from evermark.app.build import Deployment

_PAGE = 1000
_AT_ONCE = 1000  # ids in one transaction


def all_parked(
    deployment: Deployment, subscription: str | None = None, *, dead: bool | None = None, after: int = 0
) -> Iterator[ParkedRow]:
    while page := deployment.delivery.parked.rows(subscription, dead=dead, after_id=after, limit=_PAGE):
        yield from page
        after = page[-1].id


def in_parts(deployment: Deployment, rows: list[ParkedRow], step: Callable[[list[int], int], int]) -> int:
    """Work in short transactions: an instance may be delivering meanwhile."""
    parts = (rows[begin : begin + _AT_ONCE] for begin in range(0, len(rows), _AT_ONCE))
    return sum(as_deliverer(deployment, partial(step, [row.id for row in part])) for part in parts)
