"""Which streams are wanted. Only they are looked at, and only they keep state."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from evermark.sources.blocks.chain import StreamKind

Members = Callable[[], frozenset[str]]


class StreamChoice(Protocol):
    """Picklable. Asked in the process that plans, for every stream that has news."""

    @property
    def by_members(self) -> bool:
        """Whether the choice follows who is in a stream. One that was taken is then looked at once more when it is not
        wanted any longer, since the leave that made it so has to be taken too; after that its state goes."""
        ...

    def version(self) -> str:
        """Another text whenever the choice may have changed: all streams are then looked at once more."""
        ...

    def is_inbox(self, stream: str) -> bool:
        """Whether somebody named it as an inbox, whatever kind it is of."""
        ...

    def wants(self, stream: str, kind: str, members: Members) -> bool:
        """`members` asks a node: call it only if nothing else decides."""
        ...


@dataclass(frozen=True)
class ChosenStreams:
    """By settings: these streams, and all of these kinds; nothing named means everything."""

    streams: frozenset[str] = frozenset()
    kinds: frozenset[StreamKind] = frozenset()

    @property
    def by_members(self) -> bool:
        return False

    def version(self) -> str:
        text = "\n".join([*sorted(self.streams), "", *sorted(self.kinds)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_inbox(self, stream: str) -> bool:
        return False

    def wants(self, stream: str, kind: str, members: Members) -> bool:
        if not self.streams and not self.kinds:
            return True
        return self.names(stream, kind)

    def names(self, stream: str, kind: str) -> bool:
        return stream in self.streams or kind in self.kinds


class Bots(Protocol):
    """The users that are bots. Picklable."""

    def users(self) -> frozenset[str]: ...

    def inboxes(self) -> frozenset[str]:
        """Streams that are an inbox because somebody said so, whoever is in them."""
        ...

    def version(self) -> str:
        """Another text whenever these may answer something else. Cheap: it is asked at every look."""
        ...


@dataclass(frozen=True)
class BotStreams:
    """Streams with a bot among their members: channels, direct ones, and the inboxes of bots. Beside what is named."""

    bots: Bots
    named: ChosenStreams = ChosenStreams()

    @property
    def by_members(self) -> bool:
        return True

    def version(self) -> str:
        return f"bots {self.named.version()} {self.bots.version()}"

    def is_inbox(self, stream: str) -> bool:
        return stream in self.bots.inboxes()

    def wants(self, stream: str, kind: str, members: Members) -> bool:
        if self.named.names(stream, kind) or self.is_inbox(stream):
            return True
        users = self.bots.users()
        return bool(users) and not users.isdisjoint(members())
