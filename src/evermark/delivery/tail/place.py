"""Where a client of the live tail stands in the log, as the id of a server-sent event, and what it must be told. Pure.

The id names every partition that the client follows: the last batch it is done with, and inside the next batch the last
position. It means the same to every instance and after every restart, because batches and positions are the log's own.
A partition that an id does not name had no batch when the id was made: it is followed from its first batch on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import quote, unquote

from evermark.delivery.model import BEGINNING, Cursor, SourcePartition
from evermark.errors import ConfigError

# A request's head may have 16 KiB, and the id stands in one of its headers.
ID_CHARS_MAX = 8_000
PLACES_MAX = 100

_VERSION = "1:"
# source/partition@batch, then the number of the last resync if there was one, then the position inside the next batch.
_ENTRY = re.compile(
    r"(?P<source>[A-Za-z0-9_.~%-]{1,200})/(?P<partition>\d{1,9})@(?P<batch>\d{1,18})"
    r"(?:!(?P<resync>\d{1,18}))?(?:\+(?P<through>[A-Za-z0-9_.~%:-]{1,1000}))?"
)
_SAFE = ":"


@dataclass(frozen=True)
class Point:
    """How far a client is in one partition, and the number of the last resync it was told of there; 0: none."""

    cursor: Cursor = BEGINNING
    resync: int = 0


Places = Mapping[SourcePartition, Point]


class Why(StrEnum):
    STALE = "stale"  # the source cannot give what comes next, or a person let a gap be
    GONE = "gone"  # the log no longer has the events after the client's place
    AHEAD = "ahead"  # the client's place, or a gap it was told of, is later than any here: the log did not make it


@dataclass(frozen=True)
class Resync:
    """Events are missing for a client that goes on: it has to fetch anew what it keeps."""

    place: SourcePartition
    why: Why
    said: str

    def as_json(self) -> str:
        where = {"source": self.place.source, "partition": self.place.partition}
        return json.dumps({"reason": self.why.value, **where, "message": self.said[:500]}, ensure_ascii=False)


@dataclass(frozen=True)
class Stuck:
    """The log cannot be read on in a partition where a client stands. Nothing is missing yet: it goes on from there."""

    place: SourcePartition
    said: str

    def as_json(self) -> str:
        where = {"source": self.place.source, "partition": self.place.partition}
        return json.dumps({**where, "message": self.said[:500]}, ensure_ascii=False)


@dataclass(frozen=True)
class Trouble:
    """The last gap of a partition that left events out, by a number that only grows."""

    number: int
    said: str


_NO_TROUBLE = Trouble(0, "")


def entry(place: SourcePartition, point: Point) -> str:
    told = f"!{point.resync}" if point.resync else ""
    through = f"+{quote(point.cursor.through, safe=_SAFE)}" if point.cursor.through else ""
    return f"{quote(place.source, safe='')}/{place.partition}@{point.cursor.batch}{told}{through}"


def id_of(places: Places) -> str:
    return _VERSION + ",".join(entry(place, places[place]) for place in sorted(places))


def id_before(places: Places, moving: SourcePartition) -> str:
    """The id without the entry of one partition, which follows: all events of a piece have this in common."""
    others = "".join(f"{entry(place, places[place])}," for place in sorted(places) if place != moving)
    return _VERSION + others


def places_of(text: str) -> dict[SourcePartition, Point]:
    """What an id says; a client may send anything."""
    if len(text) > ID_CHARS_MAX or not text.startswith(_VERSION):
        raise _no_id()
    found: dict[SourcePartition, Point] = {}
    for part in filter(None, text.removeprefix(_VERSION).split(",")):
        said = _ENTRY.fullmatch(part)
        if said is None or len(found) >= PLACES_MAX:
            raise _no_id()
        try:
            names = [unquote(said[name] or "", errors="strict") for name in ("source", "through")]
        except UnicodeDecodeError:
            raise _no_id() from None
        place = SourcePartition(names[0], int(said["partition"]))
        if place in found:
            raise _no_id()
        found[place] = Point(Cursor(int(said["batch"]), names[1]), int(said["resync"] or 0))
    return found


def _no_id() -> ConfigError:
    return ConfigError(
        "Last-Event-ID is not an id of the live tail", hint="send an id as it came, or leave it out to begin from now"
    )


def require_few(places: Collection[SourcePartition]) -> None:
    """Every id names every partition."""
    if len(places) > PLACES_MAX:
        raise ConfigError(
            f"a live tail follows at most {PLACES_MAX} partitions, and these sources have {len(places)}",
            hint="name fewer of them with source=…",
        )


def now(
    heads: Mapping[SourcePartition, int], troubles: Mapping[SourcePartition, Trouble]
) -> dict[SourcePartition, Point]:
    """The end of the log."""
    return {
        place: Point(Cursor(heads.get(place, 0)), troubles[place].number if place in troubles else 0)
        for place in {*heads, *troubles}
    }


def resumed(asked: Places, end: Places, troubles: Mapping[SourcePartition, Trouble]) -> tuple[Places, list[Resync]]:
    """Where a client that sends an id goes on, and what it has to be told first. Sources that are gone are left out.

    `end`: the end of the log. No place of the result is behind it.
    """
    found: dict[SourcePartition, Point] = {}
    told: list[Resync] = []
    for place, last in sorted(end.items()):
        mine = asked.get(place, Point())
        cursor = mine.cursor
        if cursor > last.cursor:
            said = f"the id is at batch {cursor.batch}, and the log ends with batch {last.cursor.batch}"
            told.append(Resync(place, Why.AHEAD, said))
            cursor = last.cursor
        trouble = troubles.get(place, _NO_TROUBLE)
        if trouble.number > mine.resync:
            told.append(Resync(place, Why.STALE, trouble.said))
        elif trouble.number < mine.resync:
            told.append(Resync(place, Why.AHEAD, f"the id knows of gap {mine.resync}, and there was none so late"))
        found[place] = Point(cursor, trouble.number)
    return found, told


def knows_later(asked: Places, troubles: Mapping[SourcePartition, Trouble]) -> bool:
    """Whether an id knows of a gap that is later than these."""
    return any(point.resync > troubles.get(place, _NO_TROUBLE).number for place, point in asked.items())


def new_troubles(places: Places, troubles: Mapping[SourcePartition, Trouble]) -> list[Resync]:
    """The gaps that a client at these places was not told of."""
    return [
        Resync(place, Why.STALE, trouble.said)
        for place, trouble in sorted(troubles.items())
        if trouble.number > places.get(place, Point()).resync
    ]


def gone(place: SourcePartition, cursor: Cursor, first_batch: int | None, head: int) -> Resync | None:
    """Whether the log no longer has what comes after a cursor. `first_batch`: the first that it has; None: it has none.

    Batches are dense, and retention removes the oldest. So it has what comes next if it has anything as old.
    """
    if cursor.batch >= head or (first_batch is not None and first_batch <= cursor.batch + 1):
        return None
    until = f"before batch {first_batch}" if first_batch is not None else f"up to batch {head}"
    return Resync(place, Why.GONE, f"the log no longer has the events after batch {cursor.batch} and {until}")


def moved(places: Places, place: SourcePartition, cursor: Cursor) -> dict[SourcePartition, Point]:
    return {**places, place: Point(cursor, places.get(place, Point()).resync)}


def told_of(places: Places, resyncs: Iterable[Resync], troubles: Mapping[SourcePartition, Trouble]) -> Places:
    """The same places once a client was told."""
    found = dict(places)
    for resync in resyncs:
        if resync.why is Why.STALE:
            found[resync.place] = Point(found.get(resync.place, Point()).cursor, troubles[resync.place].number)
    return found


def told_up_to(places: Places, end: Places, troubles: Mapping[SourcePartition, Trouble]) -> tuple[Places, list[Resync]]:
    """The same places once a client was told of every gap that is told at that end, and what it is told."""
    late = [place for place, last in end.items() if places.get(place, Point()).resync < last.resync]
    told = new_troubles(places, {place: troubles[place] for place in late if place in troubles})
    numbers = {place: max(end[place].resync, troubles.get(place, _NO_TROUBLE).number) for place in late}
    return {**places, **{p: Point(places.get(p, Point()).cursor, number) for p, number in numbers.items()}}, told


def is_level(places: Places, end: Places) -> bool:
    """Whether a client at these places has and was told exactly what it has and was told at that end."""
    return all(places.get(place, Point()) == end.get(place, Point()) for place in {*places, *end})


def is_done(places: Places, end: Places) -> bool:
    """Whether these places are all at that end, or past it."""
    return all(places.get(place, Point()).cursor >= last.cursor for place, last in end.items())
