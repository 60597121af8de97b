"""The words of delivery, and the port that keeps its state.

A **cursor** is the last batch of one place that a reader (the live group, or one subscription) is done with. Being
done with a batch means that each of its events was accepted (2xx), parked durably, not matched, or expired and
counted. Cursors move only by compare-and-set from the exact batch the work began at.

Contract of `DeliveryStore` (checked by `DeliveryContract`, `ParkedContract` and `RosterContract` over every backend):

- Every call that writes takes the lease epoch and is refused with `StaleError` when it is old.
- `settle_*` is one transaction: parked rows, departures and the cursor move are seen together or not at all.
- `settle_group` covers exactly the members the work began with. Whoever joined meanwhile did not get these events:
  they leave the group, behind, at the cursor the work began from. Whoever left meanwhile is not touched.
- A cursor may stand inside a batch (`Reached`): what it says is done of it has the same meaning as a whole batch.
- A cursor that is not where the work began raises `ConflictError`, and nothing is written.
- A parked delivery is removed only by `delivered` (2xx), `drop` (a person), counted expiry, or with its subscription.
- A subscription is a member of the group if and only if its state is `live`. One that is `suspended` is tried again
  at its `next_attempt_at`; without one it was paused by a person, and only a person resumes it.
- `register` speaks for all subscriptions of an origin; `add`, `change`, `rotate`, `retire` and `remove` for one that
  was made by the API, in a time that does not grow with their number. `ConflictError` for one that the file made.
- Specs that are read carry only the secrets that have not expired by then.
- Several threads may call at once. Calls that read see one moment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Protocol

from evermark.delivery.bots.base import BotSpec


@dataclass(frozen=True, order=True)
class SourcePartition:
    """An ordering domain of the log: one partition of one source."""

    source: str
    partition: int


CursorVector = Mapping[SourcePartition, int]


@dataclass(frozen=True, order=True)
class Reached:
    """How far a reader is at one place: done with `batch`, and with the next one up to and with position `through`.

    A position means the same after a restart and after compaction: a batch is read in the order of its positions, and
    no two of its events have the same.
    """

    batch: int
    through: str = ""


# With `ordered`, what has to keep its order: (place, stream, key). Two streams of a source may use the same keys.
HeldKey = tuple[SourcePartition, str, str]

CLAIM_MAX = 10_000  # rows that one call may return


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
    """What the operator asked for. Everything in it may be shown, but what is sealed (see evermark.secrets)."""

    name: str
    url: str
    secrets: tuple[str, ...] = ()  # sealed (see evermark.secrets), the newest first; each of them signs
    secrets_until: tuple[str, ...] = ()  # when each of `secrets` ends, as an ISO time; empty, or left out: it does not
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
    headers: Mapping[str, str] = field(default_factory=dict)  # values sealed: they may be credentials
    allow_networks: tuple[str, ...] = ()
    body_bytes_max: int = 1024 * 1024
    parked_max: int = 10_000
    ttl_s: float = 7 * 86_400.0  # what could not be delivered for this long is passed over; 0: never
    made_by: MadeBy = MadeBy.FILE
    bot: BotSpec | None = None  # what makes it a bot

    @property
    def device(self) -> str:
        return self.bot.device if self.bot is not None else ""


@dataclass(frozen=True)
class Subscription:
    spec: SubscriptionSpec
    state: SubscriptionState
    reason: str = ""
    failures: int = 0  # consecutive failures of the endpoint
    next_attempt_at: datetime | None = None  # not before this, after a failure of the endpoint
    generation: int = 0  # tells it from a later subscription of the same name
    since: datetime | None = None  # when it was made; None: not known

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
    place: SourcePartition
    batch: int
    position: str
    stream: str
    key: str | None
    event: str  # the log row as JSON: what the body is rendered from at every attempt
    reason: str
    status: int | None = None
    retry_after_s: float | None = None
    replay_id: str = ""  # of the replay it was sent by; empty: the event's own delivery
    session: str = ""  # not tried yet: it waits for the key of this session, or behind what does
    previous_key: str | None = None  # the key that the change took away from its record, if it did

    @property
    def held_keys(self) -> tuple[HeldKey, ...]:
        """With `ordered`: what it waits behind, and holds back. A change of the key has two of them."""
        keys = (self.key, self.previous_key)
        return tuple((self.place, self.stream, key) for key in keys if key is not None)


class Fate(StrEnum):
    """What became of one subscription in a piece of work."""

    DONE = "done"  # every matched event was accepted or is in `parked`
    ENDPOINT_FAILED = "endpoint_failed"  # connect, timeout, 5xx, 429: nothing is wrong with the events
    GONE = "gone"  # 410, or webhook-delivery: disable
    FULL = "full"  # no more may be parked; nothing is wrong with the endpoint
    UNFINISHED = "unfinished"  # the time budget ran out; nothing failed


@dataclass(frozen=True)
class Outcome:
    subscription: str
    fate: Fate
    accepted: int = 0
    parked: tuple[ParkedEvent, ...] = ()
    reason: str = ""
    retry_after_s: float | None = None
    expired: int = 0  # events passed over because of the TTL; counted durably with the cursor's move
    reached: Reached | None = None  # not DONE, in the group: how far it got all the same, with nothing to park or count


@dataclass(frozen=True)
class Parked:
    """A row of `enqueued_messages`, claimed."""

    id: int
    subscription: str
    event: ParkedEvent
    attempt: int  # how many attempts were made before this one
    claimed_until: datetime
    generation: int = 0  # of the subscription it was parked for: another may have its name by now


@dataclass(frozen=True)
class ParkedRow:
    """A row of `enqueued_messages`, as a person sees it. `next_attempt_at = None`: dead, unless it waits for a key."""

    id: int
    subscription: str
    event: ParkedEvent
    attempts: int
    next_attempt_at: datetime | None
    created_at: datetime
    waits: bool = False  # for the key of its event's session

    @property
    def is_dead(self) -> bool:
        return self.next_attempt_at is None and not self.waits


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

    def subscriptions(self) -> dict[str, Subscription]:
        """All there are, by name, in one query."""

    def outside(self) -> dict[str, Subscription]:
        """Those that are behind or suspended. Asked for many times a second: there may be thousands that are live."""

    def subscription(self, name: str) -> Subscription:
        """One of them; raises `NotFoundError`."""

    def add(self, spec: SubscriptionSpec, start: CursorVector | None, epoch: int) -> None:
        """One more, made by the API: behind at `start`, or in the live group from now on without one.

        From now on means: every event of a batch that is not settled yet reaches it. A name that is taken, whoever
        has it, raises `ConflictError`.
        """

    def change(self, subscription: str, changes: Mapping[str, object], epoch: int) -> None:
        """Other values for these fields of its spec; of `bot` those of its fields that are given. State and cursor
        stay, as with a known one in `register`. With another device, what waits for a session key is decided anew."""

    def rotate(self, subscription: str, secret: str, until: datetime | None, now: datetime, epoch: int) -> None:
        """A new sealed secret, first; those it had sign too until then, or until `retire`."""

    def retire(self, subscription: str, epoch: int) -> None:
        """The newest secret alone signs from now on."""

    def remove(self, subscription: str, epoch: int) -> None:
        """It goes, with its cursors and its parked rows."""

    def suspend(self, subscription: str, reason: str, epoch: int) -> None:
        """A person pauses it: it leaves the group where the group stands, and is not tried until `resume`."""

    def disable(self, subscription: str, reason: str, epoch: int, *, generation: int | None = None) -> None:
        """Its receiver says it is gone: out of the group where the group stands. Harmless for one made anew since."""

    def resume(self, subscription: str, epoch: int) -> None:
        """A person wants it tried now: back to `behind`, with a clean record, whatever it waited for.

        So do its parked rows and its replays that failures of the endpoint put off; a refused event keeps its schedule.
        A member of the group stays one.
        """

    # cursors
    def group(self) -> Group: ...

    def cursors(self, subscription: str) -> CursorVector:
        """Where a subscription outside the group stands; empty for a member."""

    def cursors_outside(self) -> dict[str, CursorVector]:
        """The same for all subscriptions outside the group, at one moment."""

    def inside(self, subscriptions: Sequence[str]) -> dict[str, dict[SourcePartition, Reached]]:
        """Those of them that stopped in the middle of a batch, and where. A member of the group is never there."""

    def open_partition(self, place: SourcePartition, batch: int, epoch: int) -> None:
        """A place the group has not seen: its cursor begins at `batch`. Known places are left alone.

        Readers outside the group get the same place at batch 0: for them it all counts as backlog.
        """

    def settle_group(
        self,
        place: SourcePartition,
        begun_at: int,
        done_to: int,
        members: frozenset[str],
        outcomes: Sequence[Outcome],
        now: datetime,
        epoch: int,
        *,
        version: int | None = None,
    ) -> Group:
        """Close one piece of group work; returns the group as it then is.

        Members with fate DONE stay; their parked events are enqueued. All others leave, at `begun_at` or as far as
        their outcome has `reached`, with their own copy of the whole cursor vector; nothing of theirs is parked. The
        group's cursor moves to `done_to`.

        A member without an outcome leaves too: one that nothing matched has the outcome DONE with `accepted = 0`.
        Several outcomes of one member are taken together, and the worst fate counts. A member whose parked rows
        would exceed its `parked_max` leaves as `suspended`.

        `members` and `version` are those of the `Group` the work began with. The version tells a member that left
        and came back (perhaps removed and made anew) from one that was there all the time.
        """

    def settle_subscription(
        self,
        subscription: str,
        place: SourcePartition,
        begun_at: int,
        done_to: int,
        outcome: Outcome,
        now: datetime,
        epoch: int,
        *,
        generation: int | None = None,
        begun_through: str = "",
        done_through: str = "",
    ) -> bool:
        """The same for one subscription outside the group. A failed endpoint moves nothing but its backoff.

        The work may have begun in the middle of batch `begun_at + 1`, after position `begun_through`, and may end in
        that of `done_to + 1`: then all of it up to and with `done_through` is done. Both are part of the cursor.

        One that joined the group or was removed meanwhile raises `ConflictError`; `generation`, that of the
        subscription the work was done for, tells one that was removed and made anew. False: the cursor stays, because
        what would have to be parked has no room, or a person stopped it meanwhile.
        """

    def join(self, subscription: str, epoch: int) -> bool:
        """Enter the group iff every cursor equals the group's, decided under the group's lock."""

    # parked deliveries
    def claim(self, now: datetime, limit: int, lease_s: float, epoch: int) -> list[Parked]:
        """Due rows of subscriptions that are not paused, disabled or backing off; at most `CLAIM_MAX`.

        Invisible to others until the lease ends, or until the epoch that claimed them is old. A subscription that
        is suspended because it has too much parked is served here all the time: only this gets it out. With
        `ordered`, a row waits until no earlier one of its stream, key and replay is parked, dead ones included; a row
        that changed its record's key waits for both keys, and holds both back. Rows of replays come after all others.
        Everybody's first rows come before anybody's second ones: much that is due for one does not hold up the others.
        """

    def delivered(self, ids: Sequence[int], epoch: int) -> None:
        """Accepted with 2xx: the rows are deleted. True even if the claim has run out meanwhile."""

    def reschedule(
        self,
        parked: Parked,
        *,
        next_attempt_at: datetime | None,
        attempts: int,
        reason: str,
        status: int | None,
        epoch: int,
    ) -> None:
        """Back into the queue; `next_attempt_at = None` makes it `dead`: kept, and only a person moves it.

        With no more `attempts` than it had it was not tried: it keeps its time, and rests until `next_attempt_at`. One
        that a person asked for and that was tried goes back to the attempts and the time it had, which may be `dead`.
        Does nothing when the claim ran out and somebody else has the row now.
        """

    def retried(
        self, subscription: str, outcome: Outcome, now: datetime, epoch: int, *, generation: int | None = None
    ) -> None:
        """What some retries say about an endpoint: one outcome for all of them, and none of its parked rows is touched.

        It counts as that of a delivery does, but no cursor moves: whoever leaves the group leaves where the group
        stands. Harmless for one that was removed or made anew since.
        """

    def parked_counts(self) -> dict[str, dict[str, int]]:
        """Per subscription: waiting, dead."""

    def parked_since(self) -> dict[str, datetime]:
        """Per subscription that has something waiting: when the oldest of it was parked."""

    def parked(
        self, subscription: str | None = None, *, dead: bool | None = None, after_id: int = 0, limit: int = 100
    ) -> list[ParkedRow]:
        """Parked rows by id, waiting and dead or one of both, page by page; at most `CLAIM_MAX`."""

    def room(self, subscriptions: Sequence[str]) -> dict[str, int]:
        """How many more first deliveries may be parked for each of them that is there."""

    def held_keys(
        self, subscriptions: Sequence[str], places: Collection[SourcePartition] | None = None, replay_id: str = ""
    ) -> dict[str, dict[HeldKey, int]]:
        """Per ordered one of these: keys with something parked, and how much. Their next events are parked behind it.

        Those of some places, or of all. A replay holds back only its own: neither does it wait for the live deliveries
        of a key, nor they for it.
        """

    def release(self, ids: Sequence[int], now: datetime, epoch: int) -> int:
        """A person wants these tried again now, dead or not. Returns how many there were.

        That spends no attempt of theirs, unless they were due anyway (see `reschedule`). What waits for a session key
        goes on waiting.
        """

    def drop(self, ids: Sequence[int], epoch: int) -> int:
        """A person gives these up; counted as `dropped`. Returns how many there were."""

    def expire(self, subscription: str, before: datetime, now: datetime, epoch: int, limit: int = 1000) -> int:
        """Remove rows parked before then, at most `limit`; counted as `expired`. Rows under way are left alone."""

    def counted(self, name: str) -> dict[str, int]:
        """A durable count per subscription: `expired` or `dropped`."""
