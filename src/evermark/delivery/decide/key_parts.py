"""A subscription with more events than one task can post is divided by key. Pure.

Each event is in one part, the same wherever that is computed: by its stream and key. Events that have to keep their
order are in one part: all events of a key; and all of a stream in which a record changed its key, or which was
truncated. Each part is delivered as if there were no other, with its share of the connections. The subscription's
cursor moves as far as every part has come.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from evermark.delivery.model import Cursor, Fate, Outcome, ParkedEvent, SubscriptionSpec
from evermark.delivery.work import Assignment, KeyPart, Result, both, fold
from evermark.event import Op

I64 = npt.NDArray[np.int64]

# Smaller parts are not worth a task, and with fewer connections a task would mostly wait.
PART_ROWS_MIN = 500
PART_CONNECTIONS_MIN = 4
# Of the time of a turn; and how a pace grows with each turn in one piece.
_OF_BUDGET = 0.7
_GROWS, _PER_S_MAX = 1.05, 1_000_000.0


def part_numbers(keys: pa.Table, parts: int) -> I64:
    """The part of each row. `keys`: stream, op, key and previous key of all events of one source's span, in order."""
    streams = keys["stream"].combine_chunks().cast(pa.binary()).fill_null(b"").dictionary_encode()
    of_stream = streams.indices.to_numpy(zero_copy_only=False).astype(np.int64)
    seeds: I64 = np.array([zlib.crc32(name) for name in streams.dictionary.to_pylist()], np.int64)
    key = keys["key"].cast(pa.binary())
    seed_of = seeds[of_stream]
    texts = key.fill_null(b"").to_pylist()
    numbers: I64 = np.fromiter(map(zlib.crc32, texts, seed_of.tolist()), np.int64, len(texts))
    keyless = pc.is_null(key).to_numpy()
    numbers[keyless] = np.flatnonzero(keyless)  # they need not keep an order
    joins = pc.or_(pc.is_valid(keys["previous_key"]), pc.fill_null(pc.equal(keys["op"], str(Op.TRUNCATE)), False))
    whole = np.isin(of_stream, np.unique(of_stream[joins.to_numpy()]))
    numbers[whole] = seed_of[whole]
    return numbers % parts


def parts_max(spec: SubscriptionSpec, rows: int, *, probe: bool = False) -> int:
    """In how many parts events of a subscription may be delivered: one where something must be seen as a whole.

    A `rate` and the probe of an endpoint are of all its requests; a bot's streams are stopped one by one; events that
    Spark has to match are matched and posted in one pass.
    """
    if probe or spec.rate_per_s or spec.bot is not None or spec.where:
        return 1
    return max(1, min(rows // PART_ROWS_MIN, spec.concurrency // PART_CONNECTIONS_MIN))


def share_of(spec: SubscriptionSpec, part: KeyPart) -> SubscriptionSpec:
    """The subscription with this part's share of its connections: all parts together have its `concurrency`."""
    each, left = divmod(spec.concurrency, part.of)
    return replace(spec, concurrency=each + (part.number < left))


def cut_by_key(
    assignments: Sequence[Assignment], tasks: int, rows_max: Mapping[str, int] | None = None
) -> list[Assignment]:
    """The same assignments, but an assignment with more rows than a task's share of all rows is cut into parts of at
    least that share: so there are never more parts than tasks. `rows_max`: by name, the most events of a subscription
    that is cut.
    """
    rows = sum(one.span.rows for one in assignments)
    found: list[Assignment] = []
    for one in assignments:
        fair = one.span.rows * tasks // max(1, rows)
        most = (rows_max or {}).get(one.spec.name)
        mine = one.span.rows if most is None else min(most, one.span.rows)
        parts = min(fair, parts_max(one.spec, mine, probe=one.probe)) if tasks > 1 else 1
        found += [_part(one, KeyPart(n, parts, most)) for n in range(parts)] if parts > 1 else [one]
    return found


def pace_after(per_s: float | None, outcome: Outcome, *, cut: bool, ended: bool) -> float | None:
    """Events a second of a subscription in parts, for the next turn; None: not known.

    `ended`: all parts did what the turn asked of them. If not, what the quicker parts had sent is sent again: the next
    turn asks for half. A subscription that is in one piece, because parts were too slow, is tried in parts again later.
    """
    if not cut:
        return None if per_s is None else min(_PER_S_MAX, per_s * _GROWS)
    passed = outcome.accepted + len(outcome.parked) + outcome.expired
    if not outcome.took_s or not passed:
        return per_s
    return passed / outcome.took_s / (1 if ended else 2)


def rows_in(per_s: float | None, parts: int, budget_s: float) -> int:
    """How many events parts should post in a turn; some time is left, since none may be late."""
    return 2 * PART_ROWS_MIN * parts if per_s is None else int(per_s * budget_s * _OF_BUDGET)


def _part(one: Assignment, part: KeyPart) -> Assignment:
    span = replace(one.span, rows=-(-one.span.rows // part.of), fresh=None)
    return replace(one, span=span, spec=share_of(one.spec, part), part=part)


def joined(assignment: Assignment, parts: Iterable[Iterable[Result]]) -> Outcome:
    """The outcome of an assignment from the results of all its parts.

    Its cursor moves to the place that every part has reached. Events beyond it come again: what was parked of them is
    left out. Each part may park as many as the subscription, so the cursor stops before one too many.
    """
    results = [list(part) for part in parts]
    outcomes = [fold([assignment], part)[0] for part in results]
    reached = min(cast("Cursor", one.reached) for one in outcomes)
    parked = passed_by(reached, outcomes)
    room = assignment.spec.parked_max if assignment.parked_room is None else assignment.parked_room
    full = []
    if len(parked) > room:
        reached = cursor_at(parked[room - 1]) if room > 0 else assignment.span.begun
        full = [Outcome(assignment.spec.name, Fate.FULL, reason=f"no room to park more than {room}")]
    late = [one for part in results for one in part if one.outcome.expired]
    # How many expired rows of such a batch stand before the cursor is not known: it does not stand inside.
    if any(one.batch == reached.batch + 1 and not _passed(one, reached) for one in late):
        reached = max(assignment.span.begun, Cursor(reached.batch))
    whole = reduce(both, [*(with_room(one, room, len(parked)) for one in outcomes), *full])
    times = [one.took_s for one in outcomes if one.took_s is not None]
    return replace(
        whole,
        parked=tuple(passed_by(reached, outcomes)),
        expired=sum(one.outcome.expired for one in late if _passed(one, reached)),
        reached=reached,
        took_s=max(times, default=None),
    )


def with_room(outcome: Outcome, room: int, parked: int) -> Outcome:
    """A part that had no more room parked events beyond the place that all reached: they are left out, and there is."""
    if outcome.fate is Fate.FULL and len(outcome.parked) >= room > parked:
        return replace(outcome, fate=Fate.UNFINISHED)
    return outcome


def passed_by(reached: Cursor, outcomes: Iterable[Outcome]) -> list[ParkedEvent]:
    """What was parked up to a cursor, in the order of the log."""
    parked = [event for one in outcomes for event in one.parked if cursor_at(event) <= reached]
    return sorted(parked, key=cursor_at)


def cursor_at(event: ParkedEvent) -> Cursor:
    """Right behind an event."""
    return Cursor(event.batch - 1, event.position)


def _passed(result: Result, reached: Cursor) -> bool:
    """Whether all expired rows of a result stand before the cursor: they do not stand behind its `through`."""
    inside = result.through is not None and Cursor(result.batch - 1, result.through) <= reached
    return inside or Cursor(result.batch) <= reached
