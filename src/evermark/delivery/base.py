"""The words of delivery, and the port that keeps its state.

A **cursor** is the last batch of one place that a reader (the live group, or one subscription) is done with. Being
done with a batch means that each of its events was accepted (2xx), parked durably, not matched, or expired and
counted. Cursors move only by compare-and-set from the exact batch the work began at.

Contract of `DeliveryStore` (checked by `evermark.testing.DeliveryContract` over every backend):

- Every call that writes takes the lease epoch and is refused with `StaleError` when it is old.
- `settle_*` is one transaction: parked rows, departures and the cursor move are seen together or not at all.
- `settle_group` covers exactly the members the work began with. Whoever joined meanwhile did not get these events:
  they leave the group, behind, at the cursor the work began from. Whoever left meanwhile is not touched.
- A cursor that is not where the work began raises `ConflictError`, and nothing is written.
- A parked delivery is removed only by `delivered` (2xx), `drop` (a person) or counted expiry.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol


@dataclass(frozen=True, order=True)
class Place:
    """An ordering domain of the log: one partition of one source."""

    source: str
    partition: int


CursorVector = Mapping[Place, int]


class SubscriptionState(StrEnum):
    LIVE = "live"
    BEHIND = "behind"
    SUSPENDED = "suspended"
    DISABLED = "disabled"


class MadeBy(StrEnum):
    FILE = "file"
    API = "api"


@dataclass(frozen=True)
class SubscriptionSpec:
    """What the operator asked for. Everything in it may be shown, but `secrets`, which are sealed."""

    name: str
    url: str
    secrets: tuple[str, ...] = ()  # sealed (see evermark.secrets); the first signs, all are offered in a rotation
    streams: tuple[str, ...] = ()  # empty: all streams
    ops: tuple[str, ...] = ()  # empty: all delivered operations
    where: str | None = None
    start: str = "now"  # now | beginning | an ISO time
    ordered: bool = False
    bundle: int = 1
    concurrency: int = 20
    timeout_s: float = 10.0
    rate_per_s: float = 0.0  # 0: no limit
    body: str = "standard"
    headers: Mapping[str, str] = field(default_factory=dict)
    allow_networks: tuple[str, ...] = ()
    body_bytes_max: int = 1024 * 1024
    parked_max: int = 10_000
    made_by: MadeBy = MadeBy.FILE


@dataclass(frozen=True)
class Subscription:
    spec: SubscriptionSpec
    state: SubscriptionState
    reason: str = ""
    failures: int = 0  # consecutive failures of the endpoint
    next_attempt_at: datetime | None = None  # not before this, after a failure of the endpoint

    @property
    def name(self) -> str:
        return self.spec.name


@dataclass(frozen=True)
class Group:
    """The live group. `version` changes whenever membership does."""

    version: int
    members: frozenset[str]
    cursors: CursorVector


@dataclass(frozen=True)
class ParkedEvent:
    """One delivery to be set aside: the event as the receiver would have got it, and why it did not take it."""

    event_id: str
    place: Place
    batch: int
    position: str
    key: str | None
    event: str  # the log row as JSON: what the body is rendered from at every attempt
    reason: str
    status: int | None = None
    retry_after_s: float | None = None


class Fate(StrEnum):
    """What became of one subscription in a piece of work."""

    DONE = "done"  # every matched event was accepted or is in `parked`
    ENDPOINT_FAILED = "endpoint_failed"  # connect, timeout, 5xx, 429: nothing is wrong with the events
    GONE = "gone"  # 410, or webhook-delivery: disable
    UNFINISHED = "unfinished"  # the time budget ran out; nothing failed


@dataclass(frozen=True)
class Outcome:
    subscription: str
    fate: Fate
    accepted: int = 0
    parked: tuple[ParkedEvent, ...] = ()
    reason: str = ""
    retry_after_s: float | None = None


@dataclass(frozen=True)
class Parked:
    """A row of `enqueued_messages`, claimed."""

    id: int
    subscription: str
    event: ParkedEvent
    attempt: int  # how many attempts were made before this one
    claimed_until: datetime


class DeliveryStore(Protocol):
    # subscriptions
    def register(
        self, specs: Sequence[SubscriptionSpec], made_by: MadeBy, starts: Mapping[str, CursorVector], epoch: int
    ) -> None:
        """Make the subscriptions of this origin be exactly `specs`.

        New ones begin at `starts[name]` as `behind`, or join the live group when they have no entry there (from
        now). Known ones keep state and cursor and take the new spec; one that was disabled by 410 stays disabled
        unless its url changed. Ones no longer named are removed with their cursors; their parked rows too.
        """

    def subscriptions(self) -> dict[str, Subscription]: ...

    # cursors
    def group(self) -> Group: ...

    def cursors(self, subscription: str) -> CursorVector:
        """Where a subscription outside the group stands; empty for a member."""

    def open_place(self, place: Place, batch: int, epoch: int) -> None:
        """A place the group has not seen: its cursor begins at `batch`. Known places are left alone.

        Readers outside the group get the same place at batch 0: for them it all counts as backlog.
        """

    def settle_group(
        self,
        place: Place,
        begun_at: int,
        done_to: int,
        members: frozenset[str],
        outcomes: Sequence[Outcome],
        now: datetime,
        epoch: int,
    ) -> Group:
        """Close one piece of group work; returns the group as it then is.

        Members with fate DONE stay; their parked events are enqueued. All others leave, at `begun_at`, with their
        own copy of the whole cursor vector; nothing of theirs is parked. The group's cursor moves to `done_to`.
        """

    def settle_subscription(
        self, subscription: str, place: Place, begun_at: int, done_to: int, outcome: Outcome, now: datetime, epoch: int
    ) -> None:
        """The same for one subscription outside the group. A failed endpoint moves nothing but its backoff."""

    def join(self, subscription: str, epoch: int) -> bool:
        """Enter the group iff every cursor equals the group's, decided under the group's lock."""

    # parked deliveries
    def claim(self, now: datetime, limit: int, lease_s: float, epoch: int) -> list[Parked]:
        """Due rows of subscriptions that are not suspended or disabled; invisible to others until the lease ends."""

    def delivered(self, ids: Sequence[int], epoch: int) -> None: ...

    def reschedule(
        self, parked: Parked, *, next_attempt_at: datetime | None, attempts: int, reason: str, status: int | None, epoch: int
    ) -> None:
        """Back into the queue; `next_attempt_at = None` makes it `dead`: kept, and only a person moves it."""

    def parked_counts(self) -> dict[str, dict[str, int]]:
        """Per subscription: waiting, dead."""
