"""This node, as its own parts know it: its name and origin, its store, its clock and its limits."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from evermark.errors import BusyError, NotFoundError
from evermark.replicas.base import ReplicaStore
from evermark.replicas.event import born_ms, new_origin
from evermark.replicas.exchange import PAGE_EVENTS, PROTOCOL
from evermark.replicas.values import Table

_T = TypeVar("_T")

DAY_MS = 86_400_000
_BUSY_TRIES = 6


@dataclass(frozen=True)
class Limits:
    skew_ms: int = 5 * 60_000  # an event from further in the future is quarantined
    retention_ms: int = 7 * DAY_MS
    safety_ms: int = 3_600_000
    dead_ms: int = 30 * DAY_MS  # a member that was silent for so long is evicted
    snapshot_age_ms: int = 600_000  # one that is younger serves the next peer, too
    collect_batch: int = 10_000
    page: int = PAGE_EVENTS
    retention_by_table_ms: Mapping[str, int] = field(default_factory=dict)


class LocalNode:
    def __init__(
        self,
        name: str,
        store: ReplicaStore,
        now_ms: Callable[[], int],
        limits: Limits | None = None,
        protocol: int = PROTOCOL,
        chance: Callable[[], str] = lambda: secrets.token_hex(4),
        renewed: Callable[[str], None] = lambda origin: None,
        sleep: Callable[[float], None] = time.sleep,
        note: Callable[[LocalNode], None] | None = None,
    ) -> None:
        """`renewed` is told of an origin before the node goes on under it. `note` leaves a new token."""
        self.name, self.store, self.now_ms, self.protocol = name, store, now_ms, protocol
        self.limits = limits or Limits()
        self._chance, self._renewed = chance, renewed
        self._sleep, self._note = sleep, note or _left

    def origin(self) -> str:
        return self.store.identity()[0]

    def fresh_origin(self, last: str = "") -> str:
        """One that is born after the `last`."""
        return new_origin(self.name, max(self.now_ms(), born_ms(last) + 1), self._chance())

    def next_origin(self) -> str:
        """The origin that this node is about to go on under."""
        origin = self.fresh_origin(self.origin())
        self._renewed(origin)
        return origin

    def note(self) -> None:
        """Leave a token with the numbers that there are."""
        self.patiently(lambda: self._note(self))

    def table(self, name: str) -> Table:
        found = self.store.tables().get(name)
        if found is None:
            raise NotFoundError(f"{name[:60]!r} is not replicated here", hint="evermark replica init --table NAME")
        return found

    def patiently(self, write: Callable[[], _T]) -> _T:
        """Users' transactions go first: what is in their way gives way, and is tried again."""
        for attempt in range(_BUSY_TRIES):
            try:
                return write()
            except BusyError:
                if attempt == _BUSY_TRIES - 1:
                    raise
                self._sleep(0.02 * 2**attempt)
        raise AssertionError("unreachable")


def _left(node: LocalNode) -> None:
    """For a node without a folder: its numbers are noted with the token that it has."""
    node.store.set_token(node.store.identity()[1])
    node.store.token_kept()
