"""Delivery of a deployment: its owner (`delivery/run/owner.py`) over State, the Delta log and Spark; its reports."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from evermark.app.build import Stores
from evermark.app.failovers import Failovers
from evermark.cluster.fence import deliver_lease
from evermark.cluster.holding import Candidate, Share
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.decide.shards import FIRST
from evermark.delivery.model import Fate, KeyWanted, Outcome, SourcePartition, SubscriptionState
from evermark.delivery.replay.plan import Due, Replay, Replayed, ReplayState, TargetState, running_windows
from evermark.delivery.run.live import HandoverLimits
from evermark.delivery.run.owner import BothDeliverer, DeliveryLimits, DeliveryOwner, DeliveryTools
from evermark.delivery.run.parked_retries import Tried
from evermark.delivery.status import Account, accounts, durable_heads, kept_for, least_cursors
from evermark.delivery.webhook.base import Answer, Sink
from evermark.delivery.work import Span
from evermark.errors import EvermarkError, FormatError, NotFoundError
from evermark.log.opened import GONE_HINT
from evermark.log.read import FileRange, LogReader
from evermark.observe.health import HealthBoard
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Labelled, Metrics
from evermark.runtime import Runtime, Task

Gauges = dict[Labelled, float]
_STOPPED = {Fate.ENDPOINT_FAILED: "endpoint", Fate.GONE: "gone"}


_IDLE_S = 60.0
_STATES = tuple(state.value for state in SubscriptionState)
_ALL_SHOWN_EVERY = 16
_REPLAYS = "replay"
_RESTS = 20  # times as long as a report took, before the next


class DeploymentLog:
    """`LogView` over state's heads and the Delta tables. When a head moved is when we first saw it there."""

    def __init__(self, deployment: Stores) -> None:
        self._d = deployment
        self._readers: dict[str, LogReader] = {}
        self._seen: dict[SourcePartition, tuple[int, datetime]] = {}
        self._taken: dict[str, dict[int, int]] = {}  # the last batches that State knew when it was asked last
        self._lock = threading.Lock()

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        now = datetime.now(UTC)
        with self._lock:
            taken: dict[str, dict[int, int]] = {}
            for place, batch in durable_heads(self._d.heads, self._d.sources).items():
                taken.setdefault(place.source, {})[place.partition] = batch
                if self._seen.get(place, (-1, now))[0] != batch:
                    self._seen[place] = (batch, now)
            self._taken = taken
            return dict(self._seen)

    def files(self, source: str) -> list[FileRange]:
        """Raises `FormatError` where the log does not reach its head."""
        with self._lock:
            taken = {partition: batch for partition, batch in self._taken.get(source, {}).items() if batch}
        reader = self.reader(source)
        try:
            files = reader.files()
        except NotFoundError as error:
            if not taken:
                raise
            said = f"the log at {reader.folder} is gone: batch {max(taken.values())} was in it"
            raise FormatError(said, hint=GONE_HINT) from error
        for partition, batch in taken.items():
            reader.require_whole(partition, batch, f"{source}/{partition}")
        return files

    def reader(self, source: str) -> LogReader:
        with self._lock:
            return self._readers.setdefault(source, LogReader(self._d.log_folder(source)))


class DeliveryReport:
    def __init__(self, metrics: Metrics, log: Any) -> None:
        self._metrics = metrics
        self._log = log
        self._shown: dict[str, Gauges] = {"accounts": {}, "kept": {}}
        self._shows = dict.fromkeys(self._shown, 0)
        self._counts_begun: set[str] = set()

    def accounts(self, known: Mapping[str, Account], now: datetime) -> None:
        """Gauges for every subscription there is, and for no other."""
        gauges = Gauges()
        for name, account in known.items():
            gauges["lag_batches", (name,)] = account.lag_batches
            gauges["lag_events", (name,)] = account.lag_events
            age_s = (now - account.oldest).total_seconds() if account.oldest is not None else 0.0
            gauges["oldest_s", (name,)] = max(0.0, age_s)
            for state in _STATES:
                gauges["state", (name, state)] = state == account.subscription.state
            gauges["queue_rows", (name, "waiting")] = account.waiting
            gauges["queue_rows", (name, "dead")] = account.dead
        self._show("accounts", gauges)

    def kept(self, events: Mapping[str, int]) -> None:
        """Subscriptions that keep the log beyond its retention: a line when it begins, a gauge while it lasts."""
        for name in sorted(events.keys() - {labels[0] for _, labels in self._shown["kept"]}):
            self._log.warning(
                "the log keeps events beyond log.retention, because this subscription has not passed them",
                subscription=name,
                events=events[name],
                hint=f"resume, change its ttl or remove it: evermark subscription resume | set --ttl | remove {name}",
            )
        self._show("kept", {("kept_events", (name,)): number for name, number in events.items()})

    def _show(self, what: str, gauges: Gauges) -> None:
        """The last values of something that is gone would look like present ones: they go, too.

        Of thousands few change. Now and then all are told: the lane before may have said last that they are gone.
        """
        before, self._shows[what] = self._shown[what], self._shows[what] + 1
        is_all = self._shows[what] % _ALL_SHOWN_EVERY == 1
        changed = gauges if is_all else {of: value for of, value in gauges.items() if before.get(of) != value}
        gone = before.keys() - gauges.keys()
        if changed or gone:
            self._metrics.set_all(changed, gone)
        self._shown[what] = gauges

    def counted(self, expired: Mapping[str, int], dropped: Mapping[str, int]) -> None:
        """The all-time counts in State, so that a restart neither forgets an event nor counts it twice."""
        for what, by_name in (("expired", expired), ("dropped", dropped)):
            for name, number in by_name.items():
                self._metrics.raise_to(what, name, number)

    def by_queue(self, tried: Sequence[Tried]) -> None:
        """Retries of parked deliveries, one by one. Deliveries of a replay are counted apart."""
        for parked, answer in tried:
            if answer.sent:
                self._metrics.attempts.labels(parked.subscription, answer.verdict.value).inc()
            if answer.verdict is Verdict.ACCEPTED:
                metric = self._metrics.replay_delivered if parked.event.replay_id else self._metrics.delivered
                metric.labels(parked.subscription).inc()

    def by_asker(self, asked: Sequence[tuple[KeyWanted, Answer]]) -> None:
        for wanted, answer in asked:
            self._metrics.keys_asked.labels(wanted.subscription, answer.verdict.value).inc()

    def by_group(self, place: SourcePartition, outcomes: Sequence[Outcome]) -> None:
        """A subscription that did not finish leaves the group: worth one line."""
        self._settled(place, outcomes, (Fate.DONE,), "subscription fell behind")

    def by_follower(self, place: SourcePartition, outcomes: Sequence[Outcome]) -> None:
        """A turn that ended before its work is no failure: the next one goes on where it stopped."""
        self._settled(place, outcomes, (Fate.DONE, Fate.UNFINISHED), "subscription stays behind")

    def _settled(self, place: SourcePartition, outcomes: Sequence[Outcome], well: Sequence[Fate], said: str) -> None:
        counts: dict[Labelled, float] = {}
        for outcome in outcomes:
            if outcome.accepted or outcome.fate is not Fate.DONE or outcome.parked or outcome.expired:
                counts |= self._counted(outcome)
            elif outcome.subscription not in self._counts_begun:  # of thousands, most want nothing of a batch
                counts["delivered", (outcome.subscription,)] = 0
            name, fate, reason = outcome.subscription, outcome.fate, outcome.reason
            if fate not in well:
                counts["failures", (name, str(fate))] = 1
                self._log.warning(said, subscription=name, source=place.source, fate=str(fate), reason=reason)
        self._counts_begun.update(labels[0] for _, labels in counts)
        if counts:
            self._metrics.add_all(counts)

    def _counted(self, outcome: Outcome) -> dict[Labelled, float]:
        name = outcome.subscription
        counts: dict[Labelled, float] = {("delivered", (name,)): outcome.accepted}
        if outcome.expired:
            self._log.warning(
                "events expired: older than the subscription's ttl", subscription=name, events=outcome.expired
            )
        if outcome.parked:
            counts["parked", (name,)] = len(outcome.parked)
        refused = sum(event.status is not None for event in outcome.parked)
        tried = {"accepted": outcome.accepted, "refused": refused}
        if outcome.fate in _STOPPED:  # once: whatever else was under way was not waited for
            tried[_STOPPED[outcome.fate]] = 1
        return counts | {("attempts", (name, what)): number for what, number in tried.items() if number}


class DeploymentReport(DeliveryReport):
    """Reports delivery to the health board, too, and what State and the log say of it."""

    def __init__(
        self, deployment: Stores, view: DeploymentLog, board: HealthBoard, metrics: Metrics, shard: int
    ) -> None:
        super().__init__(metrics, get_logger(part="deliver"))
        self._shard = shard
        self._report_at = 0.0
        self._d = deployment
        self._view = view
        self._board = board
        # By source and by what stands still: who cannot go on there, and why.
        self._stuck: dict[tuple[str, str], dict[str, EvermarkError]] = {}
        self._telling_stuck = threading.Lock()
        self._failovers = Failovers(deployment, view.reader)
        self._replays_shown: Counter[str] | None = None

    def standby(self) -> None:
        self._board.deliver(here=False, standby=True, shard=self._shard)

    def owned(self) -> None:
        self._board.deliver(here=False, shard=self._shard)  # not yet, and no other instance does
        self._metrics.lease_held.labels(deliver_lease(self._shard)).set(1)

    def delivering(self) -> None:
        self._board.deliver(here=True, shard=self._shard)

    def released(self) -> None:
        self._board.deliver(here=False, shard=self._shard)
        self._metrics.lease_held.labels(deliver_lease(self._shard)).set(0)
        if self._shard == FIRST:
            self.accounts({}, datetime.now(UTC))  # what another instance does with them, this one does not know

    def stuck(self, place: SourcePartition, subscription: str | None, error: EvermarkError) -> None:
        self._stands(place.source, self._delivery_of(place), _who(subscription), error)

    def replay_stuck(self, replay: Replay, subscription: str | None, error: EvermarkError) -> None:
        self._stands(replay.request.source, _REPLAYS, _whose(replay, subscription), error)

    def _stands(self, source: str, what: str, who: str, error: EvermarkError) -> None:
        with self._telling_stuck:
            mine = self._stuck.setdefault((source, what), {})
            if who not in mine:
                self._log.error("delivery cannot go on", who=who, source=source, error=error)
            mine[who] = error
            self._tell_stuck(source, what, mine)

    def by_group(self, place: SourcePartition, outcomes: Sequence[Outcome]) -> None:
        super().by_group(place, outcomes)
        if self._stuck:  # seldom
            self._goes_on(place.source, self._delivery_of(place), _who(None))

    def by_follower(self, place: SourcePartition, outcomes: Sequence[Outcome]) -> None:
        super().by_follower(place, outcomes)
        for outcome in outcomes if self._stuck else ():
            self._goes_on(place.source, self._delivery_of(place), _who(outcome.subscription))

    def _delivery_of(self, place: SourcePartition) -> str:
        shard = f" by shard {self._shard}" if self._shard != FIRST else ""
        return f"delivery of partition {place.partition}{shard}"

    def _goes_on(self, source: str, what: str, *those: str) -> None:
        """What was delivered from there could be read."""
        with self._telling_stuck:
            mine = self._stuck.get((source, what), {})
            over = mine.keys() & set(those)
            for who in over:
                del mine[who]
            if over:
                self._tell_stuck(source, what, mine)
            if not mine:
                self._stuck.pop((source, what), None)

    def _tell_stuck(self, source: str, what: str, stuck: Mapping[str, EvermarkError]) -> None:
        if not stuck:
            self._board.log_well(source, what)
            return
        who = min(stuck, key=lambda each: (each != _who(None), each))
        more = f", and {len(stuck) - 1} more" if len(stuck) > 1 else ""
        self._board.log_unwell(source, what, f"{who}{more}: {stuck[who].message}", stuck[who].hint)

    def handed_over(self, delivered: bool) -> None:
        self._metrics.handovers.labels("delivered" if delivered else "left").inc()

    def report(self) -> None:
        """With many thousands of subscriptions less often: counting them must not take what delivering them needs."""
        began = time.monotonic()
        if began >= self._report_at:
            self._report()
            self._report_at = began + _RESTS * (time.monotonic() - began)

    def _report(self) -> None:
        store, now = self._d.delivery, datetime.now(UTC)
        heads = {place: head for place, (head, _) in self._view.heads().items()}
        self.accounts(accounts(store, heads, lambda source: self._view.reader(source).files_if_any()), now)
        outside = store.cursors_outside()
        files = {source: self._view.reader(source).files_if_any() for source in self._d.sources} if outside else {}
        self.kept(kept_for(outside, files, now - self._d.retention))
        self.counted(store.counted("expired"), store.counted("dropped"))
        if self._shard == FIRST:
            self._failovers.look(heads)

    def replaying(self, replays: list[Replay]) -> None:
        self._board.replaying(running_windows(replays))
        self._without_ended(replays)
        running = (replay for replay in replays if replay.state is ReplayState.RUNNING)
        counts, shown = Counter(replay.request.source for replay in running), self._replays_shown
        if counts == shown:
            return
        self._replays_shown = counts
        for source in self._d.sources:
            if shown is None or shown[source] != counts[source]:  # of a thousand sources few have a replay
                self._metrics.replays_running.labels(source).set(counts[source])

    def by_replay(self, due: Due, result: Replayed) -> None:
        name, outcome = due.target.subscription, result.outcome
        self._metrics.replay_delivered.labels(name).inc(outcome.accepted)
        if outcome.parked:
            self._metrics.parked.labels(name).inc(len(outcome.parked))
        if self._stuck:
            self._goes_on(due.replay.request.source, _REPLAYS, _whose(due.replay, name))

    def _without_ended(self, replays: Sequence[Replay]) -> None:
        """A replay that was cancelled, or given up, stands before nothing any more, and one that runs has started."""
        if not self._stuck:
            return  # the usual case
        left = {_whose(each, None) for each in replays if each.state is ReplayState.WAITING}
        targets = ((each, target) for each in replays for target in each.targets)
        left |= {_whose(each, t.subscription) for each, t in targets if t.state is TargetState.RUNNING}
        with self._telling_stuck:
            stood = {source: set(mine) for (source, what), mine in self._stuck.items() if what == _REPLAYS}
        for source, those in stood.items():
            self._goes_on(source, _REPLAYS, *(those - left))


def _whose(replay: Replay, subscription: str | None) -> str:
    return f"replay {replay.id}" + (f" for subscription {subscription}" if subscription is not None else "")


def _who(subscription: str | None) -> str:
    return "the live group" if subscription is None else f"subscription {subscription}"


def limits_for(at_once: int) -> DeliveryLimits:
    """On a cluster work beside the live group spreads over its cores; on one machine the defaults are measured ones."""
    usual = DeliveryLimits()
    replay = replace(usual.replay, at_once=max(usual.replay.at_once, at_once // 2))
    return replace(usual, alone_at_once=max(usual.alone_at_once, at_once), replay=replay)


class DeliveryRunner:
    name = "delivery"

    def __init__(
        self,
        deployment: Stores,
        deliverer: BothDeliverer,
        sink: Sink,
        board: HealthBoard,
        metrics: Metrics,
        runtime: Runtime,
        shard: int = FIRST,
        shards: int = 1,
        tell_others: Callable[[Span], None] = lambda _span: None,
        at_once: int = 0,
        share: Share | None = None,
    ) -> None:
        """`tell_others`: the owners of the other shards of a batch that was taken here. `at_once`: how many jobs Spark
        may run for this shard, where a cluster has room for more than a single machine.
        """
        self._d = deployment
        self._runtime = runtime
        self._tell_others = tell_others
        self._shard, self._board, self._metrics = shard, board, metrics
        self.hangs: str | None = None  # why the lease was let go of, if its loop hangs: the lane has to end
        view = DeploymentLog(deployment)
        tools = DeliveryTools(
            deployment.delivery.of_shard(shard),
            deployment.replays,
            view,
            deliverer,
            sink,
            deployment.box.open,
            deployment.sources,
            lambda: deployment.specs,
            deployment.batch_at,
            os.cpu_count() or 1,
        )
        self._owner = DeliveryOwner(
            tools,
            DeploymentReport(deployment, view, board, metrics, shard),
            Candidate(
                deployment.leases,
                deployment.holder,
                runtime,
                get_logger(part="deliver"),
                deployment.lease_limits,
                share=share or Share(),
                on_refused=lambda lease: metrics.refused.labels(lease).inc(),
                on_hanging=self._say_hanging,
            ),
            shard=shard,
            shards=shards,
            limits=limits_for(at_once),
        )
        self._task: Task | None = None
        self._lock = threading.Lock()
        self._fresh: dict[SourcePartition, deque[Span]] = {}
        self._news = runtime.wake()
        self._stopping = runtime.wake()

    def start(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called when delivery is let go of."""

        def run() -> None:
            self._owner.run()
            on_end()

        self._task = self._runtime.spawn("deliver", run)
        self._runtime.spawn("hand over", self._hand_over)

    def stop(self) -> None:
        self._stopping.set()
        self._owner.stop()

    def drain(self) -> None:
        """Begin no more turns, and end what takes long; fresh batches are handed over meanwhile."""
        self._owner.drain()

    def drained(self) -> bool:
        return self._owner.drained()

    def join(self, timeout_s: float) -> bool:
        return self._task is None or self._task.join(timeout_s)

    def _say_hanging(self, reason: str) -> None:
        self._board.deliver(here=False, shard=self._shard)
        self._metrics.hanging.labels(deliver_lease(self._shard)).inc()
        self.hangs = reason

    def on_span(self, span: Span) -> None:
        """A batch was taken here. It is delivered beside the reading of the next one."""
        self.on_told(span)
        self._tell_others(replace(span, fresh=None))

    def on_told(self, span: Span) -> None:
        """A batch was taken, here or in another lane, whose files have it."""
        with self._lock:
            # As many as the live group would deliver together: if more come, the follower takes them.
            self._fresh.setdefault(span.place, deque(maxlen=HandoverLimits.batches_max)).append(span)
        self._news.set()

    def _hand_over(self) -> None:
        while not self._stopping.is_set():
            self._runtime.wait(_IDLE_S, self._news, self._stopping)
            self._news.clear()
            with self._lock:
                fresh, self._fresh = self._fresh, {}
            for spans in fresh.values():
                self._owner.hand_over(*spans)

    def least_cursors(self, source: str) -> dict[int, int]:
        """Per partition of a source, the batch that every reader has passed; none while a replay may need it all."""
        if source in self._d.replays.open_sources():
            return {}
        return least_cursors(self._d.delivery.groups().values(), self._d.delivery.cursors_outside(), source)
