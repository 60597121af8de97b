"""The compare of a cursor's compare-and-set. Pure."""

from __future__ import annotations

from evermark.delivery.base import Reached, SourcePartition
from evermark.errors import ConflictError


def require_cursor(who: str, place: SourcePartition, stands: Reached | None, begun: Reached, done: Reached) -> None:
    """Work may be settled only from where it began, and only forward."""
    where = f"cursor of {who} at {place.source}/{place.partition}"
    if stands != begun:
        raise ConflictError(
            f"{where} is at {_said(stands)}, and the work began at {_said(begun)}",
            hint="somebody else did this work meanwhile; it is not repeated",
        )
    if done <= begun:
        raise ConflictError(f"{where} would go from {_said(begun)} to {_said(done)}", hint="a cursor only goes forward")


def _said(reached: Reached | None) -> str:
    if reached is None:
        return "no batch"
    return f"batch {reached.batch}" + (f", position {reached.through} of the next" if reached.through else "")
