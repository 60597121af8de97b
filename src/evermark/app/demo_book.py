"""What the demo's shop did, compared with what the log says of it. Pure.

Every change of an order bears a number of its own. Those that were made while the replication slot was lost are in no
WAL any more: of each order that differs there is one `repaired` event, with the newest of its changes. The changes
before that one are overwritten, and nobody can have them. All others have to be in the log.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from evermark.event import Op


@dataclass(frozen=True)
class Change:
    """An insert, update or delete that the shop committed."""

    op: str
    order: int
    number: int  # what the order's row says; a delete leaves no row that could say it


@dataclass(frozen=True)
class Logged:
    """An event of the log about an order."""

    event_id: str
    op: str
    order: int
    number: int | None  # None: a delete
    total: Decimal | None
    at: datetime
    batch: int
    is_repaired: bool


@dataclass(frozen=True)
class Compared:
    """How many of the shop's changes the log has, how many were overwritten while the slot was lost, which the log
    lacks for no good reason, and which events of the log tell of nothing that the shop did."""

    taken: int
    overwritten: int
    lost: tuple[Change, ...]
    made_up: tuple[str, ...]


def compare(book: Sequence[Change], log: Iterable[Logged], repaired_at: int) -> Compared:
    """`book` is in the order of commits. `repaired_at`: so many changes were in it when the gap had been closed; what
    came later has to be in the log as it was written."""
    rows = list(log)
    repaired = {row.order: row for row in rows if row.is_repaired}
    streamed = {_name(row.op, row.order, row.number): row for row in rows if not row.is_repaired}
    in_gap = _gap(book[:repaired_at], streamed, repaired)
    missing = [n for n, each in enumerate(book) if _name(each.op, each.order, each.number) not in streamed]
    unread = [book[n] for n in missing if n in in_gap]
    came = {each.order for each in unread if each.op == Op.INSERT}
    went = {each.order for each in unread if each.op == Op.DELETE}
    taken, overwritten, lost = len(book) - len(missing), 0, []
    for n in missing:
        each, found = book[n], repaired.get(book[n].order)
        if n in in_gap and found is not None and _tells(found, each):
            taken += 1
        elif n in in_gap and (each.order in came & went or (found is not None and _hides(found, each))):
            overwritten += 1
        else:
            lost.append(each)
    known = {_name(each.op, each.order, each.number) for each in book}
    newest = {(each.order, None if each.op == Op.DELETE else each.number) for each in book}
    made_up = [row.event_id for name, row in streamed.items() if name not in known]
    made_up += [row.event_id for row in repaired.values() if (row.order, row.number) not in newest]
    return Compared(taken, overwritten, tuple(lost), tuple(made_up))


_Name = tuple[str, int, int | None]


def _name(op: str, order: int, number: int | None) -> _Name:
    return op, order, None if op == Op.DELETE else number


def _gap(book: Sequence[Change], streamed: Mapping[_Name, Logged], repaired: Mapping[int, Logged]) -> range:
    """The changes that the repair may have had to find: those that follow the last one that was read before it."""
    if not repaired:
        return range(0)
    first = min(row.batch for row in repaired.values())
    rows = [streamed.get(_name(each.op, each.order, each.number)) for each in book]
    return range(
        max((n + 1 for n, row in enumerate(rows) if row is not None and row.batch < first), default=0), len(book)
    )


def _tells(found: Logged, change: Change) -> bool:
    """Whether the repaired event is of just this change. An order that is new to the log comes as an insert, however
    often it was changed."""
    if Op.DELETE in (found.op, change.op):
        return found.op == change.op
    return found.number == change.number


def _hides(found: Logged, change: Change) -> bool:
    """Whether the repaired event is of a later change of the order."""
    if change.op == Op.DELETE:
        return False
    return found.op == Op.DELETE or (found.number or 0) > change.number
