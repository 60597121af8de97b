"""The ports of delivery: the store, by the parts it consists of, and the log as delivery reads it.

Contract of a `DeliveryStore` and its parts (checked over every backend by `DeliveryContract`, `ProgressContract`,
`ParkedContract`, `RegistrationContract`, `BotContract` and `SessionContract`):

- Every call that writes takes the lease epoch and is refused with `StaleError` when it is old.
- Cursors move only by compare-and-set from the exact cursor the work began at. A cursor that is elsewhere raises
  `ConflictError`, and nothing is written.
- `settle_*` is one transaction: parked rows, departures and the cursor's move are seen together or not at all.
- `settle_group` covers exactly the members the work began with. A member that joined meanwhile did not get these
  events: it leaves the group, behind, at the cursor the work began from. A member that left meanwhile is not touched.
- A parked delivery is removed only by `delivered` (2xx), `drop` (a person), counted expiry, or with its subscription.
- A subscription is a member of the group if and only if its state is `live`. A `suspended` subscription is tried
  again at its `next_attempt_at`; without that time it was paused by a person, and only a person resumes it.
- `register` acts on all subscriptions of an origin; `add`, `change`, `rotate`, `retire` and `remove` on one
  subscription made by the API, in a time that does not grow with their number. They raise `ConflictError` for a
  subscription that the file made.
- Specs that are read carry only the secrets that have not expired by then.
- `learn` is a compare-and-set per (source, user, partition); the stays are seen with it or not at all.
- An event that is parked for its session waits if and only if its key is not published; that, and the release of
  waiting events by `publish`, are decided one after another for each (device, session). With another device (`change`,
  `register`) it is decided anew for all events that were not tried yet and are not under way; of more than
  `RELEASED_MAX` for the others by `release_keyed`. No untried event of a session is claimed without its key, nor before
  every event of the session that was parked earlier.
- Events that wait for a key do not count for `parked_max`. Each stream of a bot keeps its newest `WAITING_MAX`;
  `expire_surplus` removes older ones, counted as `expired`.
- `keys_wanted` names a (bot, session) at most once in `KEY_ASKED_EVERY`, across crashes too.
- Subscriptions are spread over shards, each with a live group and a lease of its own. A store is that of one shard:
  `group`, `outside`, `open_partition`, `settle_group` and `join` are about this shard; its writes take the epoch of its
  lease. All else is about every shard. No subscription is in two groups at a time.
- Several threads may call at once. Calls that read see one moment.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from evermark.delivery.limits import RELEASED_MAX, WAITING_MAX
from evermark.delivery.model import (
    Cursor,
    CursorVector,
    Group,
    GroupWork,
    HeldKey,
    KeyWanted,
    MadeBy,
    Membership,
    MembershipDelta,
    Outcome,
    Parked,
    ParkedRow,
    SessionKey,
    SourcePartition,
    Subscription,
    SubscriptionSpec,
    Surplus,
)
from evermark.log.read import FileRange


class LogView(Protocol):
    """The log as delivery reads it."""

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        """Durable head of each partition, and when it moved there. Nothing beyond it is delivered."""

    def files(self, source: str) -> list[FileRange]: ...


class ParkedStore(Protocol):
    """Deliveries that were set aside, tried again on their schedule, and kept when they are dead."""

    def claim(
        self, now: datetime, limit: int, lease_s: float, epoch: int, *, without: Collection[str] = ()
    ) -> list[Parked]:
        """Due rows of subscriptions that are not paused, disabled or backing off, nor among `without`; at most
        `CLAIM_MAX`.

        No other claim sees these rows until the lease ends, or until the epoch that claimed them is old. A subscription
        suspended for too many parked rows is served at any time: only this gets it out. With `ordered`, a row waits
        while an earlier row of its stream, key and replay is parked, dead or not; a row that changed its record's key
        waits for both keys, and holds both back. Rows of replays come after all others. The first row of each
        subscription comes before the second row of any: a subscription with many due rows does not hold up the others.
        """

    def delivered(self, ids: Sequence[int], epoch: int) -> None:
        """Accepted with 2xx: the rows are deleted, even if the claim has run out meanwhile."""

    def reschedule(
        self, row: Parked, next_attempt_at: datetime | None, attempts: int, reason: str, status: int | None, epoch: int
    ) -> None:
        """Put the row back; `next_attempt_at = None` makes it `dead`: kept, and only a person moves it.

        If `attempts` did not grow, the row was not tried: it keeps its time, and rests until `next_attempt_at`. A row
        that was tried because a person asked goes back to the attempts and the time it had, which may be
        `dead`. Does nothing when the claim ran out and another claim has the row now.
        """

    def counts(self) -> dict[str, dict[str, int]]:
        """Per subscription: waiting, dead."""

    def oldest(self) -> dict[str, datetime]:
        """Per subscription with waiting rows: when the oldest was parked."""

    def rows(
        self, subscription: str | None = None, *, dead: bool | None = None, after_id: int = 0, limit: int = 100
    ) -> list[ParkedRow]:
        """Parked rows by id, waiting, dead or both, page by page; at most `CLAIM_MAX`."""

    def room(self, subscriptions: Sequence[str]) -> dict[str, int]:
        """Per existing subscription: how many more first deliveries may be parked. Below 0, no waiting event either."""

    def held_keys(
        self, subscriptions: Sequence[str], places: Collection[SourcePartition] | None = None, replay_id: str = ""
    ) -> dict[str, dict[HeldKey, int]]:
        """Per ordered subscription among these: keys with parked rows, and how many. Later events of such a key are
        parked behind them.

        Only keys of `places`, unless None. A replay holds back only its own events: it does not wait for the first
        deliveries of a key, nor they for it.
        """

    def release(self, ids: Sequence[int], now: datetime, epoch: int) -> int:
        """A person wants these rows tried again now, dead or not. Returns how many there were.

        This spends no attempt, unless the row was due anyway (see `reschedule`). Rows that wait for a session
        key go on waiting.
        """

    def drop(self, ids: Sequence[int], epoch: int) -> int:
        """A person gives these rows up; counted as `dropped`. Returns how many there were."""

    def expire(self, subscription: str, before: datetime, now: datetime, epoch: int, limit: int = 1000) -> int:
        """Remove rows parked before `before`, at most `limit`; counted as `expired`. Rows under way are left alone."""


class BotStore(Protocol):
    """Memberships of the users that bots speak for, and session keys of their devices."""

    def learned(self, source: str, user: str) -> Membership: ...

    def learn(self, source: str, partition: int, lessons: Sequence[MembershipDelta], epoch: int) -> None:
        """Store these lessons, all or none; `ConflictError` when a lesson does not begin where its user stands."""

    def forget_users(self, epoch: int) -> int:
        """Remove memberships of users that no bot speaks for any more. Returns of how many users."""

    def publish(self, device: str, keys: Mapping[str, str], now: datetime, epoch: int) -> int:
        """Keep sealed keys by session, and make due the events that waited for them. Returns how many events. The keys
        are kept all or none, in one transaction; very many events are made due in several, in their order."""

    def withdraw(self, device: str, session: str, now: datetime, epoch: int) -> int:
        """Remove a key; raises `NotFoundError`. Events that have not been tried yet, and are not under way, wait for it
        again: returns how many."""

    def session_key(self, device: str, session: str) -> SessionKey:
        """Raises `NotFoundError`."""

    def session_keys(self, device: str, *, after: str = "", limit: int = 100) -> list[SessionKey]:
        """By session, page by page."""

    def sessions_clear(self, subscriptions: Collection[str], replay_id: str = "") -> dict[str, frozenset[str]]:
        """Per subscription: sessions with a key for its device and without an untried parked event, also one that still
        waits though its key is there, both read at one moment. Newer events of other sessions are parked behind the
        earlier events."""

    def release_keyed(self, now: datetime, epoch: int, limit: int = RELEASED_MAX) -> int:
        """Make due events that wait although they need not: the key is there, or the bot has no device. Returns how
        many: if that is the limit, there may be more. And the other way round: events that were under way when their
        key was withdrawn wait for it again."""

    def stopped(self, subscriptions: Collection[str]) -> dict[str, frozenset[str]]:
        """Per bot: streams with `parked_max` first deliveries or more that were refused, or stand behind those. Later
        events of such a stream are parked untried."""

    def surplus(self, keep: int = WAITING_MAX) -> list[Surplus]:
        """The streams of bots with more than `keep` first deliveries that wait for keys, or that were refused or stand
        behind refused ones. Counts all of them: for a sweep."""

    def expire_surplus(self, surplus: Surplus, now: datetime, epoch: int, limit: int = 1000) -> int:
        """Remove events of it, the oldest first, but for those under way; counted as `expired`. Returns how many."""

    def keys_wanted(self, now: datetime, limit: int, epoch: int) -> list[KeyWanted]:
        """Sessions whose keys are to be asked for now; each is noted as asked for before this returns. One session of
        each stream, then the next: a stream with thousands of sessions does not hold up the others."""


class DeliveryStore(Protocol):
    """Subscriptions, their cursors and the live group; beside them, in the same transactions, its other parts."""

    @property
    def parked(self) -> ParkedStore: ...

    @property
    def bots(self) -> BotStore: ...

    # shards

    def of_shard(self, shard: int) -> DeliveryStore:
        """The same for the owner of another shard."""

    def spread(self, shards_wanted: int, epoch: int) -> None:
        """Make this many shards be there, each with the subscriptions that belong to it (`decide.shards`)."""

    def groups(self) -> dict[int, Group]:
        """The groups of all shards, at one moment."""

    # subscriptions

    def register(
        self, specs: Sequence[SubscriptionSpec], made_by: MadeBy, starts: Mapping[str, CursorVector], epoch: int
    ) -> None:
        """Make the subscriptions of this origin be exactly `specs`.

        A new subscription begins at `starts[name]` as `behind`; without an entry there it joins the live group, from
        now. A known subscription keeps state and cursor and takes the new spec; disabled by 410, it stays disabled
        unless its url changed. Subscriptions no longer named are removed with their cursors and their parked rows.
        """

    def subscriptions(self) -> dict[str, Subscription]:
        """All subscriptions, by name, in one query."""

    def outside(self) -> dict[str, Subscription]:
        """Of this shard, those behind or suspended. Asked for many times a second: thousands may be live."""

    def subscription(self, name: str) -> Subscription:
        """Raises `NotFoundError`."""

    def add(self, spec: SubscriptionSpec, start: CursorVector | None, epoch: int) -> None:
        """Add a subscription made by the API: behind at `start`; without a start, in the live group from now on.

        From now on means: every event of a batch that is not settled yet reaches it. A name that is taken raises
        `ConflictError`.
        """

    def change(self, subscription: str, changes: Mapping[str, object], epoch: int) -> None:
        """Set these fields of its spec; of `bot`, only the given fields. State and cursor stay."""

    def rotate(self, subscription: str, secret: str, until: datetime | None, now: datetime, epoch: int) -> None:
        """Put a new sealed secret first; the former secrets sign too until `until`, or until `retire`."""

    def retire(self, subscription: str, epoch: int) -> None:
        """The newest secret alone signs from now on."""

    def remove(self, subscription: str, epoch: int) -> None:
        """With its cursors and its parked rows."""

    def suspend(self, subscription: str, reason: str, epoch: int) -> None:
        """A person pauses it: it leaves the group where the group stands, and is not tried until `resume`."""

    def disable(self, subscription: str, reason: str, epoch: int, *, generation: int | None = None) -> None:
        """Its receiver says it is gone: out of the group where the group stands. Not if it was made anew since."""

    def resume(self, subscription: str, epoch: int) -> None:
        """A person wants it tried now: back to `behind`, with a clean record.

        Its parked rows and replays that failures of the endpoint put off are tried now, too; a refused event keeps its
        schedule. A member of the group stays a member.
        """

    def retried(
        self, subscription: str, outcome: Outcome, now: datetime, epoch: int, *, generation: int | None = None
    ) -> None:
        """Apply the one outcome of all retries of parked rows to the subscription; no row is touched.

        It counts as a delivery's outcome, but no cursor moves: a member that leaves the group leaves where the group
        stands. Does nothing to a subscription that was removed or made anew since.
        """

    def counted(self, name: str) -> dict[str, int]:
        """A durable count of events per subscription: `expired` or `dropped`."""

    # cursors

    def group(self) -> Group:
        """Of this shard. Raises `NotFoundError` when there is no such shard (any more)."""

    def cursors(self, subscription: str) -> CursorVector:
        """Of a subscription outside the group; empty for a member."""

    def cursors_outside(self) -> dict[str, CursorVector]:
        """The same for all subscriptions outside the group, at one moment."""

    def open_partition(self, place: SourcePartition, batch: int, epoch: int) -> None:
        """A partition the group has not seen: its cursor begins at `batch`. Known partitions are left alone.

        Readers outside the group get it at batch 0: for them it all counts as backlog.
        """

    def settle_group(self, work: GroupWork, outcomes: Sequence[Outcome], now: datetime, epoch: int) -> None:
        """Close one piece of group work.

        Members with fate DONE stay; their parked events are enqueued. All others leave, at `work.begun` or as far as
        their outcome has `reached`, with their own copy of the whole cursor vector; none of their events is parked. The
        group's cursor moves to `work.done`.

        A member without an outcome leaves too: a member that no event matched has the outcome DONE with `accepted = 0`.
        Several outcomes of one member are taken together, and the worst fate counts. A member whose parked rows would
        exceed its `parked_max` leaves as `suspended`.
        """

    def settle_subscription(
        self,
        subscription: str,
        place: SourcePartition,
        begun: Cursor,
        done: Cursor,
        outcome: Outcome,
        now: datetime,
        epoch: int,
        *,
        generation: int | None = None,
    ) -> bool:
        """The same for one subscription outside the group. A failed endpoint moves nothing but its backoff.

        A subscription that joined the group or was removed meanwhile raises `ConflictError`; `generation` of the
        subscription the work was done for tells whether it was removed and made anew. False: the cursor stays, because
        there is no room for the events to be parked, or a person stopped the subscription meanwhile.
        """

    def join(self, subscription: str, epoch: int) -> bool:
        """Enter the group iff every cursor equals the group's, decided under the group's lock."""
