"""Which streams of a source are taken. Only chosen streams are looked at, and only they keep state."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from evermark.secrets import Hidden
from evermark.sources.blocks.chain import StreamKind
from evermark.state.connection import State

if TYPE_CHECKING:
    from evermark.sources.kinds import BotReaders

AskMembers = Callable[[], frozenset[str]]

_VERSION_FOR_S = 1.0


class StreamChoice(Protocol):
    """Picklable. Asked in the process that plans, for every stream that has news."""

    @property
    def by_members(self) -> bool:
        """Whether the members of a stream decide. A stream with state is then looked at even if it is not chosen any
        longer: the leave that made the difference is taken too. After that the stream's state is removed."""
        ...

    def version(self) -> str:
        """A different text whenever the choice may have changed: all streams are then looked at once more."""
        ...

    def is_inbox(self, stream: str) -> bool:
        """Whether a bot names the stream as its inbox, whatever kind the stream is of."""
        ...

    def wants(self, stream: str, kind: str, members: AskMembers) -> bool:
        """`members` asks a node: call it only if nothing else decides."""
        ...


@dataclass(frozen=True)
class ChosenStreams:
    """By settings: these streams, and all streams of these kinds; every stream if nothing is named."""

    streams: frozenset[str] = frozenset()
    kinds: frozenset[StreamKind] = frozenset()
    by_members: ClassVar[bool] = False

    def version(self) -> str:
        text = "\n".join([*sorted(self.streams), "", *sorted(self.kinds)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_inbox(self, stream: str) -> bool:
        return False

    def wants(self, stream: str, kind: str, members: AskMembers) -> bool:
        return not (self.streams or self.kinds) or self.names(stream, kind)

    def names(self, stream: str, kind: str) -> bool:
        return stream in self.streams or kind in self.kinds


class Bots(Protocol):
    """The users that are bots. Picklable."""

    def users(self) -> frozenset[str]: ...

    def inboxes(self) -> frozenset[str]:
        """Streams that bots name as their inbox, whether or not the bots are members."""
        ...

    def version(self) -> str:
        """A different text whenever `users` or `inboxes` may have changed. Cheap: it is asked at every look."""
        ...


@dataclass(frozen=True)
class BotStreams:
    """Streams with a bot among their members (channels, direct streams, inboxes of bots), and the named streams."""

    bots: Bots
    named: ChosenStreams = ChosenStreams()
    by_members: ClassVar[bool] = True

    def version(self) -> str:
        return f"bots {self.named.version()} {self.bots.version()}"

    def is_inbox(self, stream: str) -> bool:
        return stream in self.bots.inboxes()

    def wants(self, stream: str, kind: str, members: AskMembers) -> bool:
        if self.named.names(stream, kind) or self.is_inbox(stream):
            return True
        users = self.bots.users()
        return bool(users) and not users.isdisjoint(members())


class BotsInState:
    """`Bots` of one source, read from State. Picklable: connections and what was read do not travel."""

    def __init__(self, dsn: Hidden, schema: str, source: str, read: BotReaders) -> None:
        self._dsn, self._schema, self._source, self._read = dsn, schema, source, read
        self._known: tuple[str, frozenset[str], frozenset[str]] | None = None
        self._versioned: tuple[float, str] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return BotsInState, (self._dsn, self._schema, self._source, self._read)

    def users(self) -> frozenset[str]:
        return self._current()[1]

    def inboxes(self) -> frozenset[str]:
        return self._current()[2]

    def _current(self) -> tuple[str, frozenset[str], frozenset[str]]:
        version = self.version()
        if self._known is None or self._known[0] != version:
            # The version was read first: users that came in between are read once more, not missed.
            asked = (self._state, self._source)
            self._known = (version, self._read.users(*asked), self._read.inboxes(*asked))
        return self._known

    def version(self) -> str:
        now = time.monotonic()
        if self._versioned is None or now - self._versioned[0] > _VERSION_FOR_S:
            self._versioned = (now, self._read.version(self._state, self._source))
        return self._versioned[1]

    @cached_property
    def _state(self) -> State:
        return State(self._dsn.open, self._schema, connections_max=2)
