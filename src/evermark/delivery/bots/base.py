"""The words of bots, and the port that keeps what is known of them.

A **bot** is a subscription that speaks for a user: it gets what concerns that user in the streams the user is a member
of. A **stay** is one time of membership, from a join to a leave. A **session** is what the payload of an event is
encrypted with; a bot that has a **device** is sent such an event only when the key of (device, session) is published.

Contract of `BotStore` (checked by `BotContract` and `SessionContract` over every backend):

- Every call that writes takes the lease epoch of delivery, and is refused with `StaleError` when it is old.
- `learn` is a compare-and-set per (source, user, partition); what was learned is seen with it or not at all.
- An event that is parked for its session waits if and only if its key is not published; that, and the release of what
  waits by `publish`, are decided one after another for each (device, session). Nothing of a session is claimed before
  everything of it that was parked earlier. With another device (`change`, `register`) it is decided anew for all that
  was not tried yet and is not under way.
- What waits for a key takes no room from anything else: it does not count for `parked_max`. Each stream of a bot keeps
  its newest `WAITING_MAX`; `expire_waiting` removes older ones, counted as `expired`.
- `keys_wanted` names a (bot, session) at most once in `ASK_EVERY`, whatever crashes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from typing import Protocol

SESSION_CHARS_MAX = 200
KEY_CHARS_MAX = 8192
KEYS_AT_ONCE_MAX = 100
KEYS_MAX = 100_000  # of one device
# Events of one stream that wait for their keys; beyond it the oldest of that stream expire. As many of it may be on
# their way out, once their keys came, without counting for `parked_max`.
WAITING_MAX = 100_000
ASK_EVERY = timedelta(seconds=5)
ASK_EVERY_MAX = timedelta(minutes=5)

# Where an event stands in its partition. Batches first: positions of two histories of a source have no common order.
Mark = tuple[int, str]


class BotMode(StrEnum):
    ALL = "all"
    MENTIONS_REPLIES_REACTIONS = "mentions_replies_reactions"
    NONE = "none"


@dataclass(frozen=True)
class BotSpec:
    """What makes a subscription a bot."""

    source: str
    user: str
    mode: BotMode = BotMode.ALL
    device: str = ""  # empty: it needs no session keys
    inbox: str = ""  # the stream that is its inbox, where the log does not say


@dataclass(frozen=True)
class Stay:
    """A time of membership: the events after `begin` up to and with `end`; without an end it lasts."""

    begin: Mark
    end: Mark | None = None
    inbox: bool = False

    def covers(self, at: Mark) -> bool:
        return self.begin < at and (self.end is None or at <= self.end)


@dataclass(frozen=True)
class Move:
    """A user became a member of a stream, or is none any more."""

    stream: str
    user: str
    at: Mark
    joins: bool
    inbox: bool = False


@dataclass(frozen=True)
class BotView:
    """What has to be known to judge the events of a span for one bot."""

    wish: BotSpec
    member: frozenset[str] = frozenset()  # streams it is a member of throughout the span
    partly: Mapping[str, tuple[Stay, ...]] = field(default_factory=dict)  # those where that changes within it
    inboxes: frozenset[str] = frozenset()
    clear: frozenset[str] = frozenset()  # sessions whose events may be sent; those of any other wait in the queue

    @property
    def streams(self) -> frozenset[str]:
        return self.member.union(self.partly, self.inboxes)


@dataclass(frozen=True)
class Membership:
    """What is known of one user of a source: how far each partition was looked through, and its stays by stream."""

    to: Mapping[int, int] = field(default_factory=dict)
    stays: Mapping[str, tuple[Stay, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class MembershipDelta:
    """What was found for one user in the batches `begun_at < batch <= done_to` of a partition: whole streams."""

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
    """What waits in one stream of a bot beyond what is kept: everything up to this row."""

    subscription: str
    stream: str
    through: int


class BotStore(Protocol):
    # membership
    def learned(self, source: str, user: str) -> Membership: ...

    def learn(self, source: str, partition: int, lessons: Sequence[MembershipDelta], epoch: int) -> None:
        """Keep some lessons, all or none; `ConflictError` when one does not begin where its user stands."""

    def forget_users(self, epoch: int) -> int:
        """Remove what was learned of users that no bot speaks for any more. Returns how many."""

    # session keys
    def publish(self, device: str, keys: Mapping[str, str], now: datetime, epoch: int) -> int:
        """Keep sealed keys by session, and make due what waited for them. Returns how many events that were."""

    def withdraw(self, device: str, session: str, now: datetime, epoch: int) -> int:
        """Remove a key; raises `NotFoundError`. What has not been tried yet, and is not under way, waits for it again:
        returns how many events."""

    def session_key(self, device: str, session: str) -> SessionKey:
        """One of them; raises `NotFoundError`."""

    def session_keys(self, device: str, *, after: str = "", limit: int = 100) -> list[SessionKey]:
        """By session, page by page."""

    def sessions_clear(self, subscriptions: Collection[str], replay_id: str = "") -> dict[str, frozenset[str]]:
        """Per subscription: sessions its device has a key for, and nothing of which is in the queue untried, both at
        one moment. Newer events of the others queue behind what is there."""

    def release_keyed(self, now: datetime, epoch: int) -> int:
        """Make due what waits although it need not: its key is there, or its bot has no device. Returns how many."""

    def waiting_beyond(self, keep: int = WAITING_MAX) -> list[Surplus]:
        """The streams of bots with more than `keep` first deliveries waiting for keys. Counts all that wait: a step of
        a sweep."""

    def expire_waiting(self, surplus: Surplus, epoch: int, limit: int = 1000) -> int:
        """Remove what still waits of it, the oldest first, at most `limit`; counted as `expired`. Returns how many."""

    def keys_wanted(self, now: datetime, limit: int, epoch: int) -> list[KeyWanted]:
        """Sessions whose keys are to be asked for now; each is noted as asked for before this returns. One of each
        stream, then the next: one with thousands of them keeps no other waiting."""
