"""Which event of a peer stands at which position. No I/O.

A peer knows its events by table, origin and number. Origins come and go while it runs, and events of several
origins arrive mixed, so none of the three is an order. The order is ours: what the peer has and we had not planned yet
is put behind all that was planned before, part by part. A position is the number of an event in that order. A part is
never changed once it is planned: the same positions are the same events, for every reader, until they are confirmed.

Rows that are copied stand in the same order: parts that are chunks of a snapshot, in front of the events after it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from typing import Any

from evermark.errors import ConflictError, FormatError, GapError, StaleError
from evermark.replicas.exchange import Chunk, Manifest
from evermark.replicas.ranges import NOTHING, Held, Ranges, held_as_json, held_from, lacking, union

_DIGITS = 20
EVERYTHING = 10**_DIGITS - 1
JUMP = 10**12  # from the end of a plan to where the next begins when a gap was closed: room for the rows between

HeldByTable = Mapping[str, Held]


@dataclass(frozen=True)
class ChunkOf:
    """A chunk of a snapshot that the peer made."""

    snapshot: str
    made_ms: int
    number: int
    rows: int
    size: int
    digest: str

    @property
    def wanted(self) -> Chunk:
        return Chunk(self.rows, self.size, self.digest)


@dataclass(frozen=True)
class Part:
    """Events `first` to `last` of an origin; they stand at `at` and the positions behind it.

    With a chunk: its rows `first` to `last`, the first of all being 0, as the copy tells them whose id is `origin`.
    Rows that are none any more leave their positions empty.
    """

    at: int
    table: str
    origin: str
    first: int
    last: int
    chunk: ChunkOf | None = None

    @property
    def end(self) -> int:
        return self.at + self.last - self.first + 1

    def between(self, start: int, end: int) -> Part | None:
        """The part of it that stands in [start, end)."""
        first, last = max(start, self.at), min(end, self.end)
        if first >= last:
            return None
        return replace(self, at=first, first=self.first + first - self.at, last=self.first + last - self.at - 1)

    def as_json(self) -> list[Any]:
        chunk = [] if self.chunk is None else [list(astuple(self.chunk))]
        return [self.table, self.origin, self.first, self.last, *chunk]

    @classmethod
    def from_json(cls, at: int, value: Sequence[Any]) -> Part:
        table, origin, first, last, *chunk = value
        return cls(at, table, origin, first, last, ChunkOf(*chunk[0]) if chunk else None)


@dataclass(frozen=True)
class Copied:
    """A copy of a table's rows, for `start: copy`. Not `whole`: chunks of it have to be planned anew, because the peer
    has their snapshot no more; rows of others may be in the log."""

    id: str
    whole: bool = True


@dataclass(frozen=True)
class Plan:
    """`done` is what stands before `start`; `parts` follow it without a gap. `origin` is what the peer knows us by.

    `epoch` is that of the owner who changed it last: an earlier one may not change it any more. `pending` replaces it
    when the gap is closed that is being repaired.
    """

    origin: str
    start: int = 0
    done: HeldByTable = field(default_factory=dict)
    parts: tuple[Part, ...] = ()
    repeats_to: int = 0  # the log may hold events before it already: State was lost, or the checkpoint set back
    epoch: int = 0
    pending: Plan | None = None
    copies: Mapping[str, Copied] = field(default_factory=dict)  # by table

    @property
    def end(self) -> int:
        return self.parts[-1].end if self.parts else self.start

    def known(self, table: str) -> dict[str, Ranges]:
        """What was planned, ever."""
        found = dict(self.done.get(table, {}))
        for part in self.parts:
            if part.table == table and part.chunk is None:
                found = union(found, {part.origin: Ranges(((part.first, part.last),))})
        return found

    def rows_left(self, since: int = 0) -> int:
        """Rows of copies from there on."""
        return sum(max(0, part.end - max(part.at, since)) for part in self.parts if part.chunk is not None)

    def between(self, start: int, end: int) -> list[Part]:
        if not self.start <= start <= end <= self.end:
            raise ConflictError(
                f"no plan leads from {start} to {end}: it is known from {self.start} to {self.end}",
                hint="State was lost or set back, or another instance reads now; it is planned anew at the next start",
            )
        return [found for part in self.parts if (found := part.between(start, end)) is not None]

    def batch_end(self, start: int, most: int) -> int:
        """Where a batch of at most so many ends: before a chunk rather than within it, which would be fetched twice."""
        end = min(self.end, start + most)
        cut = (part.at for part in self.parts if part.chunk is not None and start < part.at < end < part.end)
        return next(cut, end)

    def cuts(self, start: int, end: int, most: int) -> list[int]:
        """The edges of the slices of [start, end): of at most so many events each; a chunk is a slice of its own."""
        edges = [start]
        for part in self.between(start, end):
            if part.chunk is not None:
                edges += [part.at, part.end]
            while part.end - edges[-1] > most:
                edges.append(edges[-1] + most)
        return sorted({*edges, end})


def position(number: int) -> str:
    return f"{number:0{_DIGITS}d}"


def number_of(text: str) -> int:
    if len(text) != _DIGITS or not (text.isascii() and text.isdigit()):
        raise FormatError(f"{text[:60]!r} is no position of a replica", hint="the checkpoint is of another source")
    return int(text)


def begun(origin: str, tables: Sequence[str], floors: Mapping[str, Mapping[str, int]]) -> Plan:
    """The first plan: it begins with the oldest event of each origin that the peer still has."""
    return Plan(origin, done={table: _through(floors.get(table, {})) for table in tables})


def anew(origin: str, at: int, tables: Sequence[str], copied: Sequence[str] = ()) -> Plan:
    """A plan from `at` on, when none leads there: all that the peer has may be in the log already, and nothing need be.
    So events that it collected are a gap. Nothing is copied: either the peer has all events, or a repair brings rows.
    """
    return Plan(origin, at, {table: {} for table in tables}, repeats_to=EVERYTHING, copies=all_copied(copied))


def all_copied(tables: Iterable[str]) -> dict[str, Copied]:
    """Of tables whose rows come in another way than by a copy."""
    return {table: Copied("") for table in tables}


def uncopied(plan: Plan | None, wanted: Sequence[str]) -> list[str]:
    """The tables whose rows are still to be copied, or planned once more."""
    copies = {} if plan is None else plan.copies
    return [table for table in wanted if table not in copies or not copies[table].whole]


def with_copy(plan: Plan, manifest: Manifest, copy: str) -> Plan:
    """With the rows of a snapshot behind all that was planned; nothing that was planned is newer than they are.

    What the snapshot has of a table that was not read yet is told by its rows alone. Of one that was, events come
    first that its rows have seen: so no row is older than an event in front of it, and each later event is behind it.
    """
    table, before = manifest.table, plan.copies.get(manifest.table)
    if table in plan.done:
        found = grown(plan, [table], {table: manifest.held})
    else:
        found = replace(plan, done={**plan.done, table: manifest.held})
    parts, at = list(found.parts), found.end
    for number, chunk in enumerate(manifest.chunks):
        if chunk.rows:
            of = ChunkOf(manifest.id, manifest.made_ms, number, chunk.rows, chunk.size, chunk.digest)
            parts.append(Part(at, table, copy if before is None else before.id, 0, chunk.rows - 1, of))
            at = parts[-1].end
    # Rows of an earlier snapshot are in the log under the same ids. What was lost at the peer may still come back.
    repeats_to = at if before is not None and plan.repeats_to < EVERYTHING else plan.repeats_to
    copies = {**plan.copies, table: Copied(copy) if before is None else replace(before, whole=True)}
    return replace(found, parts=tuple(parts), repeats_to=repeats_to, copies=copies)


def check_owner(plan: Plan | None, epoch: int) -> None:
    """`StaleError` when a later owner has taken the plan up: positions of this one may be of another plan."""
    if plan is not None and plan.epoch > epoch:
        raise StaleError(
            f"the plan is of the owner of epoch {plan.epoch}, and ours is {epoch}",
            hint="another instance reads this source now; nothing is to be done",
        )


def _through(floors: Mapping[str, int]) -> dict[str, Ranges]:
    return {origin: Ranges.through(floor) for origin, floor in floors.items()}


def with_tables(plan: Plan, tables: Sequence[str], floors: Mapping[str, Mapping[str, int]]) -> Plan:
    """With tables that the file names since: each begins with its oldest event."""
    new = {table: _through(floors.get(table, {})) for table in tables if table not in plan.done}
    return replace(plan, done={**plan.done, **new}) if new else plan


def check_floors(
    peer: str, plan: Plan, tables: Sequence[str], held: HeldByTable, floors: Mapping[str, Mapping[str, int]]
) -> None:
    """`GapError` where the peer has changes without their events: collected, or taken by it with a snapshot."""
    for table, by_origin in unplanned(plan, tables, held).items():
        for origin, ranges in by_origin.items():
            first, floor = ranges.parts[0][0], floors.get(table, {}).get(origin, 0)
            if first <= floor:
                raise GapError(
                    f"{peer} has no events {first} to {floor} of {origin}, only the rows of {table} that they made",
                    hint="it is repaired by a snapshot of the rows: evermark source recover --choice repair",
                )


def unplanned(plan: Plan, tables: Sequence[str], held: HeldByTable) -> dict[str, dict[str, Ranges]]:
    found = {table: lacking(plan.known(table), held.get(table, {})) for table in tables}
    return {table: each for table, each in found.items() if each}


def grown(plan: Plan, tables: Sequence[str], held: HeldByTable) -> Plan:
    """With all that the peer has behind what was planned before. What it has when it is planned anew for the first time
    is all that the log may hold."""
    parts, at = list(plan.parts), plan.end
    for table, by_origin in sorted(unplanned(plan, tables, held).items()):
        for origin, ranges in sorted(by_origin.items()):
            for first, last in ranges:
                parts.append(Part(at, table, origin, first, last))
                at = parts[-1].end
    return replace(plan, parts=tuple(parts), repeats_to=min(plan.repeats_to, at))


def confirmed(plan: Plan, upto: int) -> Plan:
    """Without what stands before `upto`, which is in the log. An older position changes nothing."""
    upto = min(upto, plan.end)
    if upto <= plan.start:
        return plan
    done = {table: dict(held) for table, held in plan.done.items()}
    for part in plan.parts:
        taken = part.between(plan.start, upto)
        if taken is not None and taken.chunk is None:
            held = done.setdefault(part.table, {})
            held[part.origin] = held.get(part.origin, NOTHING) | Ranges(((taken.first, taken.last),))
    left = tuple(rest for part in plan.parts if (rest := part.between(upto, part.end)) is not None)
    return replace(plan, start=upto, done=done, parts=left)


def without_vanished(plan: Plan, start: int, held: HeldByTable, lost: Collection[str] = ()) -> Plan:
    """What is still to be read from `start` on, up to the first part that the peer has no more: a peer that was
    restored gets such events back from others, maybe, and in another order. `lost`: snapshots that it has no more."""
    for part in plan.parts:
        rest = part.between(start, part.end)
        if rest is not None and not _is_there(rest, held, lost):
            kept = (cut for each in plan.parts if (cut := each.between(plan.start, rest.at)) is not None)
            repeats_to = EVERYTHING if plan.repeats_to > rest.at else plan.repeats_to  # it may come back later
            broken = {each.table for each in plan.parts if each.chunk is not None and each.end > rest.at}
            copies = {
                table: replace(copied, whole=copied.whole and table not in broken)
                for table, copied in plan.copies.items()
            }
            return replace(plan, parts=tuple(kept), repeats_to=repeats_to, copies=copies)
    return plan


def _is_there(part: Part, held: HeldByTable, lost: Collection[str]) -> bool:
    if part.chunk is not None:
        return part.chunk.snapshot not in lost
    return held.get(part.table, {}).get(part.origin, NOTHING).covers(Ranges(((part.first, part.last),)))


def as_json(plan: Plan) -> dict[str, Any]:
    copies = {table: [copied.id, copied.whole] for table, copied in plan.copies.items()}
    return {
        "v": 2 if copies else 1,  # programs of before know of no copies
        "origin": plan.origin,
        "start": plan.start,
        "done": {table: held_as_json(held) for table, held in plan.done.items()},
        "parts": [part.as_json() for part in plan.parts],
        "repeats_to": plan.repeats_to,
        "epoch": plan.epoch,
        "pending": None if plan.pending is None else as_json(plan.pending),
        **({"copies": copies} if copies else {}),
    }


def from_json(value: Any) -> Plan:
    if value.get("v") not in (1, 2):
        raise FormatError("the plan of a replica is of a newer version of evermark", hint="upgrade")
    parts, at = list[Part](), int(value["start"])
    for part in value["parts"]:
        parts.append(Part.from_json(at, part))
        at = parts[-1].end
    done = {table: held_from(held) for table, held in value["done"].items()}
    pending = None if value["pending"] is None else from_json(value["pending"])
    repeats_to, epoch = int(value["repeats_to"]), int(value["epoch"])
    copies = {table: Copied(*copied) for table, copied in value.get("copies", {}).items()}
    return Plan(value["origin"], int(value["start"]), done, tuple(parts), repeats_to, epoch, pending, copies)
