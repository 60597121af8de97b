"""An event of a replicated table, and which of two images of a row wins."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

ORIGIN = re.compile(r"([a-z][a-z0-9-]{0,40})\.([0-9a-f]{12})([0-9a-f]{8})", re.ASCII)
NAME = re.compile(r"[a-z][a-z0-9-]{0,40}", re.ASCII)
UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", re.ASCII)

_as_text = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode  # made once: it costs

Image = Mapping[str, str | None]  # column → canonical text


class Operation(StrEnum):
    CREATE = "create"
    UPDATE = "update"
    DELETE = "delete"


class Version(NamedTuple):
    """Of a row. Versions of a table are totally ordered: first by the clock, then by origin, then by number.

    (origin, seq) is the event that made the version; it names the version's content for ever.
    """

    hlc: int
    origin: str
    seq: int


@dataclass(frozen=True)
class Event:
    id: str
    table: str
    operation: Operation
    record_id: str
    image: Image | None  # the whole row after the change; None after a delete
    timestamp: int  # ms, by the clock of the origin
    version: Version

    @property
    def content(self) -> tuple[object, ...]:
        """What two events with one (origin, seq) must agree on."""
        return (self.id, self.operation, self.record_id, self.version.hlc, image_text(self.image))


def image_text(image: Image | None) -> str | None:
    """One text for one image, whatever order its columns came in."""
    return None if image is None else _as_text(image)


def beats(new: Version, current: Version | None) -> bool:
    """Whether a row takes the new version: the order of arrival has no say."""
    return current is None or new > current


def winners(events: Iterable[Event]) -> dict[str, Event]:
    """By record, the event whose image wins among these."""
    found: dict[str, Event] = {}
    for event in events:
        best = found.get(event.record_id)
        if beats(event.version, None if best is None else best.version):
            found[event.record_id] = event
    return found


def member_of(origin: str) -> str:
    """The node whose origin id this is, or was: a restored node takes a new origin and keeps its name."""
    match = ORIGIN.fullmatch(origin)
    return match[1] if match else origin


def born_ms(origin: str) -> int:
    match = ORIGIN.fullmatch(origin)
    return int(match[2], 16) if match else 0


def new_origin(name: str, now_ms: int, chance: str) -> str:
    """`chance` has eight hex digits: two clones that take a new origin in one millisecond take two."""
    return f"{name}.{now_ms:012x}{chance}"
