"""The port between delivery and the sinks that take the events.

Contract of a `Sink`:

- Order: events of one subscription that share (source, stream, key) are sent strictly one after another, in the order
  of the rows given. Events of different keys, and events without a key, may overtake each other. An event that changed
  its record's key counts for both keys.
- Completeness: every (place, batch) among a job's rows gets exactly one `Result`. Its fate is DONE only if each of its
  rows was accepted or is in `parked`, and only if that holds for all earlier batches of the same place too: the DONE
  results of a place are always a prefix, so a cursor may be moved over them without looking any further.
- Duplicates: an event of a batch that is not DONE may have reached the receiver. It will be sent again.
- Isolation: subscriptions share nothing that one subscription could use up for another.
- A subscription stops at the first failure of its endpoint; events not sent by then are not tried.
- Time: no new request begins after `deadline_s`; requests under way get `grace_s` more (None: their own timeout).
- A sink never raises for a fault of a receiver or of a subscription's settings: such faults are in the results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import pyarrow as pa

from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import Outcome, SubscriptionSpec
from evermark.delivery.work import Result

if TYPE_CHECKING:
    from evermark.delivery.webhook.bundles import BundleReader

# Which events must keep their order among themselves: (source, stream, key).
Line = tuple[str, str, str]

OpenSecret = Callable[[str], str]


def as_it_is(secret: str) -> str:
    return secret


@dataclass(frozen=True)
class Bodies:
    """Of all rows of a job, in their order."""

    idents: list[str]
    bodies: list[bytes]
    bad: dict[int, str]  # rows that cannot be rendered, and why


@dataclass(frozen=True)
class Job:
    """Rows of the log for one subscription. At most one job per subscription in one call."""

    spec: SubscriptionSpec
    events: pa.Table | pa.RecordBatch  # log columns; per place in log order
    open_secret: OpenSecret = field(default=as_it_is, repr=False)
    historical: bool = False
    attempt: int = 1
    replay_id: str | None = None
    probe: bool = False  # the endpoint failed last time: send one at a time until one is accepted
    # With `ordered`: lines that have parked events waiting, and how many. Their events are parked behind these.
    held: Mapping[Line, int] = field(default_factory=dict)
    waits: Mapping[int, str] = field(default_factory=dict)  # rows to be parked until the key of a session is published
    stopped: frozenset[str] = frozenset()  # of a bot: streams whose rows are parked untried
    parked_room: int | None = None  # how many more may be parked; None: the subscription's `parked_max`
    bundles: BundleReader | None = field(default=None, repr=False)  # made ahead by `bundles.prepared`
    bodies: Bodies | None = field(default=None, repr=False)  # rendered for several jobs at once


@dataclass(frozen=True)
class Prefix:
    """The outcome of one subscription's rows, in the order given: the first `rows` were accepted or are parked.

    `outcome.parked` holds the parked ones among them; `outcome.accepted` counts all accepted rows, also later ones.
    """

    rows: int
    outcome: Outcome


@dataclass(frozen=True)
class Answer:
    """The answer to one request."""

    verdict: Verdict
    status: int | None = None
    reason: str = ""
    retry_after_s: float | None = None
    sent: bool = True  # False: no request was sent, and this was known before
    ours: bool = False  # this machine lacked something (descriptors, memory): the receiver is not to blame


@dataclass(frozen=True)
class Try:
    """One parked delivery, to be sent again."""

    spec: SubscriptionSpec
    event: str  # ParkedEvent.event
    attempt: int  # the number of this attempt: 2 for the first retry
    open_secret: OpenSecret = field(default=as_it_is, repr=False)
    historical: bool = False
    replay_id: str | None = None
    probe: bool = False  # as in `Job`; the same for all tries of a subscription
    session: str = ""  # tries of one session are one line: one without an answer holds the others back


class Rates(Protocol):
    """Shares out the time in which subscriptions with a `rate` may send, over all processes of a deployment."""

    def take(self, subscription: str, replay_id: str, span_s: float, wait_s: float) -> float | None:
        """Take the next `span_s` seconds that are still free; returns in how many seconds they begin. Blocks.

        None, and nothing is taken, when they begin in more than `wait_s`, which is `WAIT_S_MAX` at most.
        """

    def rest(self) -> None:
        """Nothing is asked for now: keep no connection."""


class Sink(Protocol):
    def deliver_each(
        self, jobs: Sequence[Job], deadline_s: float, grace_s: float | None = None, slack_s: float | None = None
    ) -> Iterator[list[Result]]:
        """Send; per job, as soon as it is finished, a result for each (partition, batch): no job waits for a slow job.

        `slack_s`: once half of the jobs are done, the others get this much longer, or as much as their share of the
        work makes fair, if that is more (`Stragglers`); then they are cut off, unfinished.
        """

    def deliver_prefix(self, job: Job, deadline_s: float, grace_s: float | None = None) -> Prefix:
        """The same for rows in an order of their own, of any partitions and batches: how far it got."""

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        """Send parked deliveries again; the answers come in the order of `tries`, when the last one is there: a caller
        that cannot wait for a slow receiver gives the tries of one subscription at a time.

        Tries of one line are sent in the given order; when a try fails, tries behind it answer BUSY unsent. After a
        failure of the endpoint the subscription's other tries of the same replay, or of none, answer ENDPOINT unsent.
        Tries that its rate leaves no time for answer BUSY unsent. None of these spends an attempt.
        """

    def close(self) -> None: ...
