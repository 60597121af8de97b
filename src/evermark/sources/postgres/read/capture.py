"""What a replication slot carries, and how it is decoded: one `Capture` for each mode of a Postgres source."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Protocol

from evermark.event import Seen
from evermark.event_file import Rows
from evermark.sources.postgres.connect import Link
from evermark.sources.postgres.lsn import Position
from evermark.sources.postgres.read.pgoutput import I64
from evermark.sources.postgres.survey import Survey
from evermark.sources.postgres.target import PostgresTarget


class RunQuery(Protocol):
    """Runs one query at the source's server, on the connection that the slot's reader keeps; returns its first row."""

    def __call__(self, query: str, args: tuple[object, ...] = (), *, doing: str) -> tuple[Any, ...] | None: ...


class Decoder(Protocol):
    """Fed with chunks of messages in the order the server sent them."""

    def batches(self, lengths: I64, data: bytes, skip: int = 0) -> Iterator[Rows]:
        """The events of a chunk, as `evermark.event.TAKEN`. To be read to its end before the next chunk is given.
        `skip`: so many bytes stand in front of each message, and belong to it by its length."""


class Capture(ABC):
    """Belongs to one reader of one slot, as its connections do: it does not travel."""

    options: ClassVar[Mapping[str, str]]  # of pgoutput, besides protocol and publication
    margin: ClassVar[int] = 0  # a slot is confirmed so many bytes late: an event's record may begin that much before it
    probe: ClassVar[str]  # whether any transaction with an event of ours commits in a range: upto, start as bytes

    def __init__(self, target: PostgresTarget) -> None:
        self.target = target

    @abstractmethod
    def look(self, link: Link) -> Survey:
        """The server and the slot at this moment."""

    @abstractmethod
    def decoder(self, run_query: RunQuery, start: Position, end: Position, encoding: str) -> Decoder:
        """Of what the slot gives in `[start, end)`."""

    def require_known(self, run_query: RunQuery, seen: Seen) -> None:  # noqa: B027 - not every mode can tell
        """Raise if the server does not have this event, though it should: it is a copy that has gone its own way."""

    def confirmed(self, run_query: RunQuery, position: Position) -> None:  # noqa: B027 - not every mode keeps something
        """Everything before `position` is taken."""

    def connected(self) -> None:  # noqa: B027 - not every mode keeps something
        """The reader has a new connection: it may be to another server."""
