"""Delivery, from lease to threads: the live group, the follower, the queue."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Protocol

from evermark.app.build import Deployment
from evermark.app.leasing import HeldLease, acquire
from evermark.app.replaying import ReplayRunner
from evermark.app.reporting import DeliveryReport
from evermark.cluster.fence import DELIVER_LEASE
from evermark.delivery.base import CursorVector, MadeBy, SourcePartition
from evermark.delivery.bots.views import BotViews
from evermark.delivery.decide import registration
from evermark.delivery.decide.turns import ALONE_AT_ONCE, Turn, TurnClass, goes_on, next_turns
from evermark.delivery.replay.plan import ReplayDeliverer
from evermark.delivery.replay.replayer import Replayer
from evermark.delivery.run.expiry import sweep, sweep_waiting
from evermark.delivery.run.follower import Follower
from evermark.delivery.run.key_requests import KeyAsker
from evermark.delivery.run.live import LiveGroup
from evermark.delivery.run.parked_retries import CLAIM_LIMIT, ParkedQueue
from evermark.delivery.status import accounts, kept_for, least_cursors
from evermark.delivery.webhook.base import Sink
from evermark.delivery.work import Deliverer, Span
from evermark.error_policy import Action, action_for
from evermark.errors import ConflictError, EvermarkError, NotFoundError
from evermark.log.read import FileRange, LogReader
from evermark.observe.health import HealthBoard
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics

_FOLLOW_EVERY_S = 0.2
_QUEUE_EVERY_S = 1.0
_REPORT_EVERY_S = 2.0
_SWEEP_EVERY_S = 60.0
_ASK_EVERY_S = 1.0
_END_S = 5.0  # what has not ended by then posts to a slow receiver; its epoch is old when it comes back


def _now() -> datetime:
    return datetime.now(UTC)


class DeploymentLog:
    """`LogView` over state's heads and the Delta tables. When a head moved is when we first saw it there."""

    def __init__(self, deployment: Deployment) -> None:
        self._d = deployment
        self._readers: dict[str, LogReader] = {}
        self._seen: dict[SourcePartition, tuple[int, datetime]] = {}
        self._lock = threading.Lock()

    def heads(self) -> Mapping[SourcePartition, tuple[int, datetime]]:
        now = _now()
        with self._lock:
            for source in self._d.sources:
                for partition, head in self._d.heads.load(source).items():
                    place = SourcePartition(source, partition)
                    if self._seen.get(place, (-1, now))[0] != head.batch:
                        self._seen[place] = (head.batch, now)
            return dict(self._seen)

    def files(self, source: str) -> list[FileRange]:
        return self.reader(source).files()

    def reader(self, source: str) -> LogReader:
        with self._lock:
            return self._readers.setdefault(source, LogReader(self._d.log_folder(source)))


class BothDeliverer(Deliverer, ReplayDeliverer, Protocol):
    """What delivers spans of the log, and slices of its past."""


class DeliveryRunner:
    """Stands by for the `deliver` lease; while it has it, nobody else delivers for this deployment."""

    name = "delivery"

    def __init__(
        self, deployment: Deployment, deliverer: BothDeliverer, sink: Sink, board: HealthBoard, metrics: Metrics
    ) -> None:
        self._d = deployment
        self._deliverer = deliverer
        self._sink = sink
        self._board = board
        self._metrics = metrics
        self._log = get_logger(part="deliver")
        self._told = DeliveryReport(metrics, self._log)
        self._view = DeploymentLog(deployment)
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._live: LiveGroup | None = None
        self._busy: dict[str, TurnClass] = {}
        self._served_at: dict[str, float] = {}
        self._queued = False  # whether somebody waits for a turn of its own
        self._busy_lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="deliver", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._wake.set()

    def join(self, timeout_s: float) -> bool:
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def on_span(self, span: Span) -> None:
        """A batch was just taken: deliver it now if the live group is right before it."""
        live = self._live
        if live is None:
            return
        try:
            done = live.hand_over(span)
        except Exception as error:  # noqa: BLE001 - an optimisation that fails must not reach ingest
            self._log.warning("hand-over failed; the follower takes it", error=error, batch=span.to)
            done = False
        self._metrics.handovers.labels("delivered" if done else "left").inc()
        if not done:
            self._wake.set()

    def least_cursors(self, source: str) -> dict[int, int]:
        """Per partition of a source, the batch that every reader has passed; none while a replay may need it all."""
        if source in self._d.replays.open_sources():
            return {}
        return least_cursors(self._d.delivery.group(), self._d.delivery.cursors_outside(), source)

    def _run(self) -> None:
        while not self._stopping.is_set():
            lease = acquire(self._d.leases, DELIVER_LEASE, self._d.holder, self._stopping, self._say_standby)
            if lease is None:
                return
            held = HeldLease(self._d.leases, lease, self._wake.set)
            self._metrics.lease_held.labels(lease.name).set(1)
            try:
                self._own(held)
            except Exception as error:  # noqa: BLE001 - an unknown failure must not end the thread in silence
                self._log.error("delivery failed; it is started again", error=error)
                self._stopping.wait(1.0)
            finally:
                self._live = None
                self._board.delivering = False
                self._metrics.lease_held.labels(lease.name).set(0)
                held.close()
                self._told.accounts({}, _now())  # what another instance does with them, this one does not know

    def _own(self, held: HeldLease) -> None:
        epoch = held.lease.epoch
        store = self._d.delivery
        self._register(epoch)
        store.bots.forget_users(epoch)
        bot_views = BotViews(store.bots, self._view.files, epoch)
        live = LiveGroup(store, self._deliverer, epoch, _now, self._told.by_group, bot_views)
        follower = Follower(store, self._view, live, self._deliverer, epoch, _now, self._told.by_follower, bot_views)
        queue = ParkedQueue(store, self._sink, self._d.box.open, epoch, _now, random.random, self._told.by_queue)
        asker = KeyAsker(
            store.bots, store.subscriptions, self._sink, self._d.box.open, epoch, _now, self._told.by_asker
        )
        self._live = live
        self._board.delivering, self._board.delivery_standby = True, False
        self._log.info("delivering", epoch=epoch, subscriptions=len(store.subscriptions()))
        ended = threading.Event()

        def over() -> bool:
            return ended.is_set() or self._stopping.is_set() or held.lost.is_set()

        def run_queue() -> None:
            while not over() and queue.run() >= CLAIM_LIMIT:
                pass  # more is due than one turn takes

        def sweep_parked() -> None:
            sweep(store, _now(), epoch, over)
            store.bots.release_keyed(_now(), epoch)
            if given_up := sweep_waiting(store.bots, epoch, over):
                self._log.warning("too many events of a stream waited for session keys", expired=given_up)

        with ThreadPoolExecutor(ALONE_AT_ONCE + len(TurnClass), thread_name_prefix="behind") as pool:
            repeated: list[tuple[str, Callable[[], object], float]] = [
                ("queue", run_queue, _QUEUE_EVERY_S),
                ("report", self._report, _REPORT_EVERY_S),
                ("sweep", sweep_parked, _SWEEP_EVERY_S),
                ("expire", lambda: follower.expire_stopped(over), _SWEEP_EVERY_S),
                ("ask", asker.run, _ASK_EVERY_S),
            ]
            threads = [
                threading.Thread(target=self._repeat, args=(step, ended, over, every_s), name=name, daemon=True)
                for name, step, every_s in repeated
            ]
            replayer = Replayer(
                self._d.replays, store, self._view, self._deliverer, epoch, _now, self._d.sources, bot_views=bot_views
            )
            replays = ReplayRunner(self._d, replayer, self._board, self._metrics, over)
            for thread in threads:
                thread.start()
            replays.start()
            try:
                self._follow(follower, pool, over)
            finally:
                self._live = None  # before anybody is waited for: what is handed over from here on is another's work
                ended.set()
                deadline = time.monotonic() + _END_S
                replays.join(timeout_s=_END_S)
                for thread in threads:
                    thread.join(max(0.0, deadline - time.monotonic()))

    def _register(self, epoch: int) -> None:
        mine, taken = registration.free_names(self._d.specs, self._d.delivery.subscriptions())
        for name in taken:
            self._log.error(
                "a subscription of the file is left out: its name was taken at run time",
                subscription=name,
                hint=f"rename it in the file, or run: evermark subscription remove {name}",
            )
        self._d.delivery.register(mine, MadeBy.FILE, self._starts(), epoch)

    def _follow(self, follower: Follower, pool: ThreadPoolExecutor, over: Callable[[], bool]) -> None:
        while not over():
            moved = False
            try:
                moved = follower.catch_up_group()
                self._serve(follower, pool, over)
            except (ConflictError, NotFoundError) as error:
                self._log.info("follower looks again", error=error)
            except EvermarkError as error:
                if action_for(error) is not Action.RETRY:
                    raise
                self._log.warning("follower waits", error=error)
                self._stopping.wait(1.0)
            if not moved:
                self._wake.wait(_FOLLOW_EVERY_S)
                self._wake.clear()

    def _serve(self, follower: Follower, pool: ThreadPoolExecutor, over: Callable[[], bool]) -> None:
        with self._busy_lock:
            waiting = [one for one in follower.due() if one.name not in self._busy]
            serving = list(self._busy.values())
        waiting.sort(key=lambda one: self._served_at.get(one.name, 0.0))
        turns, self._queued = next_turns(waiting, follower.turn_class, serving)
        for turn in turns:
            self._begin(turn, follower, pool, over)

    def _begin(self, turn: Turn, follower: Follower, pool: ThreadPoolExecutor, over: Callable[[], bool]) -> None:
        began = time.monotonic()
        with self._busy_lock:
            self._busy.update(dict.fromkeys(turn.names, turn.turn_class))
        self._served_at.update(dict.fromkeys(turn.names, began))

        def work() -> bool:
            on = follower.catch_up(*turn.subscriptions)
            moved = bool(on)
            while on and not over() and goes_on(turn, time.monotonic() - began, queued=self._queued):
                current = [one for one in follower.due() if one.name in on]
                on = follower.catch_up(*current) if current else frozenset()
            return moved

        def done(future: Future[bool]) -> None:
            with self._busy_lock:
                for name in turn.names:
                    del self._busy[name]
            error = future.exception()
            if error is not None:
                self._log.warning("subscriptions not moved", subscriptions=turn.names, error=error)
            elif future.result():
                self._wake.set()  # the next turn begins at once

        pool.submit(work).add_done_callback(done)

    def _repeat(
        self, step: Callable[[], object], ended: threading.Event, over: Callable[[], bool], every_s: float
    ) -> None:
        while not over():
            try:
                step()
            except Exception as error:  # noqa: BLE001 - tried again at the next turn
                self._log.warning("delivery step failed", step=step.__qualname__, error=error)
            ended.wait(every_s)

    def _report(self) -> None:
        heads = {place: head for place, (head, _) in self._view.heads().items()}
        known = accounts(self._d.delivery, heads, lambda source: self._view.reader(source).files_if_any())
        now = _now()
        self._told.accounts(known, now)
        self._told.kept(self._kept_beyond_retention(now))
        self._told.counted(self._d.delivery.counted("expired"), self._d.delivery.counted("dropped"))

    def _kept_beyond_retention(self, now: datetime) -> dict[str, int]:
        horizon = now - self._d.config.log.retention
        files = {source: self._view.reader(source).files_if_any() for source in self._d.sources}
        return kept_for(self._d.delivery.cursors_outside(), files, horizon)

    def _starts(self) -> dict[str, CursorVector]:
        """Where new subscriptions begin that do not begin now."""
        places = self._view.heads()
        starts = {spec.name: registration.start_vector(spec.start, places, self._d.batch_at) for spec in self._d.specs}
        return {name: start for name, start in starts.items() if start is not None}

    def _say_standby(self) -> None:
        self._log.info("standing by: another instance delivers")
        self._board.delivery_standby = True
