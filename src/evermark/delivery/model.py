"""The model of delivery: subscriptions, cursors, parked deliveries, bots, and outcomes of work.

A **bot** is a subscription that speaks for a user: it gets the events that concern that user in the streams the user is
a member of. A **stay** is one time of membership, from a join to a leave. A **session** names the key that the payload
of an event is encrypted with; a bot that has a **device** is sent such an event only when the key of (device, session)
is published.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum

from evermark.delivery.limits import RETRY_WAITS_S


@dataclass(frozen=True, order=True)
class SourcePartition:
    """An ordering domain of the log: one partition of one source."""

    source: str
    partition: int


@dataclass(frozen=True, order=True)
class Cursor:
    """How far a reader (the live group, or one subscription) is in one partition of the log.

    The reader is done with `batch`, and with the next batch up to and with position `through`; empty: with none of it.
    Done with an event means: it was accepted (2xx), parked durably, not matched, or expired and counted.
    A position means the same after a restart and after compaction: a batch is read in the order of its positions, and
    no two of its events share a position.
    """

    batch: int
    through: str = ""


BEGINNING = Cursor(0)
CursorVector = Mapping[SourcePartition, Cursor]

# With `ordered`, events of one (partition, stream, key) keep their order. Two streams may use the same keys.
HeldKey = tuple[SourcePartition, str, str]

# Where an event stands in its partition. Batches first: positions of two histories of a source have no common order.
Mark = tuple[int, str]


class SubscriptionState(StrEnum):
    LIVE = "live"
    BEHIND = "behind"
    SUSPENDED = "suspended"
    DISABLED = "disabled"


class MadeBy(StrEnum):
    FILE = "file"
    API = "api"


class BotMode(StrEnum):
    ALL = "all"
    MENTIONS_REPLIES_REACTIONS = "mentions_replies_reactions"
    NONE = "none"


@dataclass(frozen=True)
class BotSpec:
    """The settings that make a subscription a bot."""

    source: str
    user: str
    mode: BotMode = BotMode.ALL
    device: str = ""  # empty: it needs no session keys
    inbox: str = ""  # the stream that is its inbox, where the log does not say


@dataclass(frozen=True)
class SubscriptionSpec:
    """The settings of a subscription. All may be shown except the sealed values (see evermark.secrets)."""

    name: str
    url: str
    secrets: tuple[str, ...] = ()  # sealed, the newest first; each of them signs
    secrets_until: tuple[str, ...] = ()  # when each of `secrets` ends, as an ISO time; empty, or left out: never
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
    retry_waits_s: tuple[float, ...] = RETRY_WAITS_S  # of a refused event: before each retry; then it is dead
    ttl_s: float = 7 * 86_400.0  # an event that could not be delivered for this long is passed over; 0: never
    made_by: MadeBy = MadeBy.FILE
    bot: BotSpec | None = None

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
    """One delivery to be set aside: the event as the receiver would have got it, and why the receiver did not."""

    event_id: str
    place: SourcePartition
    batch: int
    position: str
    stream: str
    key: str | None
    event: str  # the log row as JSON, from which the body is rendered at every attempt
    reason: str
    status: int | None = None
    retry_after_s: float | None = None
    replay_id: str = ""  # the replay that sent it; empty: its first delivery
    session: str = ""  # not tried yet: it waits for the key of this session, or behind an event that does
    previous_key: str | None = None  # the key its record had before, if the change replaced it

    @property
    def held_keys(self) -> tuple[HeldKey, ...]:
        """With `ordered`: the keys that it waits behind, and holds back. An event that changed its key has two."""
        keys = (self.key, self.previous_key)
        return tuple((self.place, self.stream, key) for key in keys if key is not None)


class Fate(StrEnum):
    """How a piece of work ended for one subscription."""

    DONE = "done"  # every matched event was accepted or is in `parked`
    ENDPOINT_FAILED = "endpoint_failed"  # connect, timeout, 5xx, 429: nothing is wrong with the events
    GONE = "gone"  # 410, or webhook-delivery: disable
    FULL = "full"  # no more may be parked; nothing is wrong with the endpoint
    STUCK = "stuck"  # the log cannot be read there; nothing is wrong with the endpoint, and a person must act
    UNFINISHED = "unfinished"  # the time budget ran out; nothing failed


@dataclass(frozen=True)
class Outcome:
    """The outcome of a piece of work for one subscription.

    Of a span: each matched event up to `reached` was accepted, is in `parked`, or is counted in `expired`. Events after
    it count as not done, though some of them may have been accepted. Of work that is done, `reason` is why the
    subscription does not go on elsewhere.
    """

    subscription: str
    fate: Fate
    accepted: int = 0
    parked: tuple[ParkedEvent, ...] = ()
    reason: str = ""
    retry_after_s: float | None = None
    expired: int = 0  # events passed over because of the TTL; counted durably with the cursor's move
    reached: Cursor | None = None  # None: nowhere, or the work was of no span
    took_s: float | None = None  # until this subscription was finished; None: not measured

    def after(self, took_s: float) -> Outcome:
        """The same, with its time. Not by `replace`: there may be thousands in a second."""
        told = (self.accepted, self.parked, self.reason, self.retry_after_s, self.expired, self.reached)
        return Outcome(self.subscription, self.fate, *told, took_s)


@dataclass(frozen=True)
class GroupWork:
    """A piece of work of the live group: one partition's batches after `begun` up to and with `done`.

    `members` and `version` are those of the `Group` the work began with. The version tells a member that left and came
    back (perhaps removed and made anew) from a member that was there all the time; None: not compared.
    """

    place: SourcePartition
    begun: Cursor
    done: Cursor
    members: frozenset[str]
    version: int | None = None


@dataclass(frozen=True)
class Parked:
    """A row of `enqueued_messages`, claimed."""

    id: int
    subscription: str
    event: ParkedEvent
    attempt: int  # how many attempts were made before this one
    claimed_until: datetime
    generation: int = 0  # of its subscription: a later subscription may have the same name


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


@dataclass(frozen=True)
class Stay:
    """A time of membership: the events after `begin` up to and with `end`; without an end it lasts."""

    begin: Mark
    end: Mark | None = None
    inbox: bool = False

    def covers(self, at: Mark) -> bool:
        return self.begin < at and (self.end is None or at <= self.end)


@dataclass(frozen=True)
class BotView:
    """The memberships and session keys by which the events of a span are judged for one bot."""

    wish: BotSpec
    member: frozenset[str] = frozenset()  # streams it is a member of throughout the span
    partly: Mapping[str, tuple[Stay, ...]] = field(default_factory=dict)  # streams whose membership changes in the span
    inboxes: frozenset[str] = frozenset()
    clear: frozenset[str] = frozenset()  # sessions whose events may be sent; events of any other session are parked
    stopped: frozenset[str] = frozenset()  # streams with `parked_max` refused events: theirs are parked untried

    @property
    def streams(self) -> frozenset[str]:
        return self.member.union(self.partly, self.inboxes)


@dataclass(frozen=True)
class Membership:
    """The stays of a user by stream, and up to which batch (`to`) each partition was searched for joins and leaves."""

    to: Mapping[int, int] = field(default_factory=dict)
    stays: Mapping[str, tuple[Stay, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class MembershipDelta:
    """Found for one user in the batches `begun_at < batch <= done_to` of a partition: all stays of changed streams."""

    user: str
    begun_at: int
    done_to: int
    stays: Mapping[str, tuple[Stay, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class SessionKey:
    session: str
    sealed: str
    published_at: datetime


@dataclass(frozen=True)
class KeyWanted:
    """A session that some events of a bot wait for."""

    subscription: str
    device: str
    session: str
    stream: str  # of the first event that waits
    since: datetime
    asks: int  # how often it was asked for, this time included


@dataclass(frozen=True)
class Surplus:
    """The events of one stream of a bot that are parked beyond the limit: all up to the row `through`."""

    subscription: str
    stream: str
    through: int
    waits: bool = True  # for session keys; False: they were refused, or stand behind refused ones
