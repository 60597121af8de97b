"""Replays, from the control event that asks to the threads that deliver them beside everything else."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import pyarrow as pa

from evermark.app.build import Deployment
from evermark.delivery.replay.base import ReplayStore
from evermark.delivery.replay.plan import (
    Control,
    Due,
    Replay,
    Replayed,
    Target,
    percent,
    rest_s,
    running_windows,
    to_begin,
)
from evermark.delivery.replay.replayer import Replayer
from evermark.delivery.replay.request import request_of
from evermark.errors import ConfigError, ConflictError, EvermarkError, StaleError
from evermark.observe.health import HealthBoard
from evermark.observe.logging import get_logger
from evermark.observe.metrics import Metrics

_LOOK_EVERY_S = 0.5
_REST_S_MAX = 10.0
_AT_ONCE = 2
_AT_ONCE_FLOWING = 1
# How often is looked for requests that are over; a source that cannot be told so is asked more and more seldom.
_CLEAR_WAIT_S = 1.0
_CLEAR_WAIT_S_MAX = 300.0


class ControlReader(Protocol):
    def controls(self, partition: int, after_batch: int, to_batch: int) -> pa.Table:
        """Control events of the batches `after_batch < batch <= to_batch`: what `Control` has, and their positions."""


@dataclass
class RequestDesk:
    """Registers what control events of one source ask for; `Taker` says where in the log to look."""

    replays: ReplayStore
    source: str
    reader: ControlReader
    epoch: int
    metrics: Metrics

    def __call__(self, partition: int, after: int, to: int) -> None:
        log = get_logger(source=self.source)
        for row in self.reader.controls(partition, after, to).to_pylist():
            row.pop("position")
            control = Control(**row)
            try:
                request = request_of(self.source, control)
            except ConfigError as error:
                log.warning("control event not understood", event_id=control.event_id, error=error)
                request = None
            if request is None:
                self.metrics.controls_ignored.labels(self.source).inc()
            elif self.replays.register(request, self.epoch):
                log.info("replay asked for", stream=control.stream, since=str(request.since), until=str(request.until))


class ReplayRunner:
    """One look-out and a few workers. A bad receiver holds up nobody's replay but its own, and nothing that is live."""

    def __init__(
        self, deployment: Deployment, replayer: Replayer, board: HealthBoard, metrics: Metrics, over: Callable[[], bool]
    ) -> None:
        self._d = deployment
        self._replayer = replayer
        self._board = board
        self._metrics = metrics
        self._over = over
        self._log = get_logger(part="replay")
        self._wake = threading.Event()
        self._busy: set[str] = set()
        self._served: dict[str, float] = {}
        self._lock = threading.Lock()
        self._clear_at = 0.0
        self._clear_wait_s = _CLEAR_WAIT_S
        replayer.on_step = self._on_step
        replayer.on_ended = self._on_ended
        self._thread = threading.Thread(target=self._run, name="replay", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self, timeout_s: float) -> None:
        self._wake.set()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="replay") as pool:
            while not self._over():
                try:
                    self._look(pool)
                    self._clear()
                except StaleError:
                    return  # the lease is somebody else's now
                except Exception as error:  # noqa: BLE001 - tried again at the next turn
                    self._log.warning("replays wait", error=error)
                self._wake.wait(_LOOK_EVERY_S)
                self._wake.clear()
        self._tell([])

    def _look(self, pool: ThreadPoolExecutor) -> None:
        with self._lock:
            busy = set(self._busy)
        running, due = self._replayer.look()
        self._tell(running)
        if not due:
            return
        at_once = _AT_ONCE_FLOWING if self._replayer.flowing() else _AT_ONCE
        for one in to_begin(due, busy, self._served, at_once):
            name = one.target.subscription
            with self._lock:
                self._busy.add(name)
            self._served[name] = time.monotonic()
            pool.submit(self._work, one).add_done_callback(partial(self._done, name))

    def _work(self, one: Due) -> None:
        flowing = self._replayer.flowing()
        took_s = self._replayer.step(one, flowing=flowing)
        rest = min(_REST_S_MAX, rest_s(took_s, flowing, os.cpu_count() or 1))
        until = time.monotonic() + rest
        while not self._over() and time.monotonic() < until:
            time.sleep(min(0.1, rest))

    def _done(self, name: str, done: Future[None]) -> None:
        with self._lock:
            self._busy.discard(name)
        error = done.exception()
        if isinstance(error, ConflictError):
            self._log.info("replay looks again", subscription=name, error=error)
        elif error is not None:
            self._log.warning("replay not moved", subscription=name, error=error)
            return  # not at once: it fails again
        self._wake.set()

    def _clear(self) -> None:
        """Tell the sources that what their rows asked for is over."""
        if time.monotonic() < self._clear_at:
            return
        for replay in self._d.replays.uncleared():
            try:
                self._clear_one(replay)
            except StaleError:
                raise
            except EvermarkError as error:
                self._clear_at = time.monotonic() + self._clear_wait_s
                self._clear_wait_s = min(_CLEAR_WAIT_S_MAX, 2 * self._clear_wait_s)
                self._log.warning("source not told that its replay is over", replay=replay.id, error=error)
                return
        self._clear_wait_s = _CLEAR_WAIT_S
        self._clear_at = time.monotonic() + _CLEAR_WAIT_S

    def _clear_one(self, replay: Replay) -> None:
        request = replay.request
        source = self._d.sources.get(request.source)
        if source is not None and request.asked_since is not None:
            for stream in request.streams:
                source.replayed(stream, request.asked_since, request.asked_until)
        self._d.replays.cleared(replay.id, self._replayer.epoch)
        self._log.info("replay over", replay=replay.id, state=str(replay.state), source=request.source)

    def _tell(self, replays: list[Replay]) -> None:
        self._board.replaying(running_windows(replays))
        for source in self._d.sources:
            running = sum(replay.request.source == source for replay in replays)
            self._metrics.replays_running.labels(source).set(running)

    def _on_ended(self, replay: Replay, target: Target, why: str) -> None:
        done = f"{percent(replay, target):.1f} %"
        self._log.warning("replay given up", replay=replay.id, subscription=target.subscription, done=done, reason=why)

    def _on_step(self, one: Due, result: Replayed) -> None:
        name, outcome = one.target.subscription, result.outcome
        self._metrics.replay_delivered.labels(name).inc(outcome.accepted)
        if outcome.parked:
            self._metrics.parked.labels(name).inc(len(outcome.parked))
        if outcome.fate not in ("done", "unfinished"):
            self._log.warning("replay waits", replay=one.replay.id, subscription=name, reason=outcome.reason)
