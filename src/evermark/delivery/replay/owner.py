"""The loop of replays: from the control event that asks for one to the tasks that deliver it beside everything else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import pyarrow as pa

from evermark.delivery.replay.base import ReplayStore
from evermark.delivery.replay.plan import Control, Due, Replay, Replayed, SliceLimits, Target, percent, rest_s, to_begin
from evermark.delivery.replay.replayer import Replayer
from evermark.delivery.replay.request import request_of
from evermark.error_policy import backoff_s
from evermark.errors import ConfigError, ConflictError, EvermarkError, StaleError, known
from evermark.runtime import Log, Runtime, Task, Wake, any_set
from evermark.sources.base import Source


@dataclass(frozen=True)
class ReplayLimits:
    look_every_s: float = 0.5
    at_once: int = 2
    at_once_flowing: int = 1
    rest_s_max: float = 10.0
    # A step that failed for a reason of our own (State is away, Spark was refused) is tried less and less often.
    failed_wait_s_max: float = 10.0
    failed_quietly_max: int = 3  # so often in a row; then it is said of the replay, too
    # How often ended requests are looked for; a source that cannot be told so is tried less and less often.
    clear_wait_s: float = 1.0
    clear_wait_s_max: float = 300.0
    slices: SliceLimits = field(default_factory=SliceLimits)


class ControlReader(Protocol):
    def controls(self, partition: int, after_batch: int, to_batch: int) -> pa.Table:
        """Control events of the batches `after_batch < batch <= to_batch`: the fields of `Control`, and positions."""


@dataclass
class RequestDesk:
    """Registers what control events of one source ask for; `BatchTaker` says where in the log to look."""

    replays: ReplayStore
    source: str
    reader: ControlReader
    epoch: int
    log: Log
    on_ignored: Callable[[], object] = lambda: None

    def __call__(self, partition: int, after: int, to: int) -> None:
        for row in self.reader.controls(partition, after, to).to_pylist():
            row.pop("position")
            control = Control(**row)
            try:
                request = request_of(self.source, control)
            except ConfigError as error:
                self.log.warning("control event not understood", event_id=control.event_id, error=error)
                request = None
            if request is None:
                self.on_ignored()
            elif self.replays.register(request, self.epoch, partition=partition):
                self.log.info(
                    "replay asked for", stream=control.stream, since=str(request.since), until=str(request.until)
                )


class ReplayObserver(Protocol):
    def replaying(self, replays: list[Replay]) -> None:
        """These wait or run now; none when this instance does not deliver any more."""

    def by_replay(self, due: Due, result: Replayed) -> None: ...

    def replay_stuck(self, replay: Replay, subscription: str | None, error: EvermarkError) -> None:
        """A replay cannot go on for a subscription, or (None) cannot start: the log cannot be read there. Told again
        while it lasts; what is said by `by_replay` of the same target, or its start, ends it.
        """


@dataclass
class ReplayLoop:
    """Looks for due targets and works for a few subscriptions at once. A bad receiver holds up no replay but its own,
    and no live delivery. `run` returns when one of `ends` is set and all work under way has ended.
    """

    replayer: Replayer
    sources: Mapping[str, Source]
    observer: ReplayObserver
    runtime: Runtime
    log: Log
    ends: tuple[Wake, ...]
    cores: int
    limits: ReplayLimits = ReplayLimits()
    _busy: set[str] = field(default_factory=set, init=False)
    _tasks: list[Task] = field(default_factory=list, init=False)
    _served: dict[str, float] = field(default_factory=dict, init=False)
    _failed: dict[str, tuple[int, float]] = field(default_factory=dict, init=False)  # how often, and not before when
    _clear_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self._wake = self.runtime.wake()
        self._clear_wait_s = self.limits.clear_wait_s
        self.replayer.on_step = self._on_step
        self.replayer.on_stuck = self.observer.replay_stuck
        self.replayer.on_ended = self._on_ended

    def run(self) -> None:
        try:
            while not any_set(self.ends):
                self._wake.clear()
                try:
                    self._look()
                    self._clear()
                except StaleError:
                    return  # the lease is another instance's now
                except Exception as error:  # noqa: BLE001 - tried again at the next turn
                    self.log.warning("replays wait", error=error)
                self.runtime.wait(self.limits.look_every_s, self._wake, *self.ends)
        finally:
            for task in self._tasks:
                task.join()
            self.observer.replaying([])

    def _look(self) -> None:
        busy = set(self._busy)  # before the look: what is seen of a target that is worked for may be old
        replays, due = self.replayer.look()
        self.observer.replaying(replays)
        if not due:
            return
        now = self.runtime.monotonic()
        due = [one for one in due if self._failed.get(one.target.subscription, (0, now))[1] <= now]
        at_once = self.limits.at_once_flowing if self.replayer.flowing() else self.limits.at_once
        for one in to_begin(due, busy, self._served, at_once):
            name = one.target.subscription
            self._served[name] = self.runtime.monotonic()
            self._busy.add(name)
            self._tasks = [task for task in self._tasks if not task.join(0.0)]
            self._tasks.append(self.runtime.spawn(f"replay {one.replay.id} {name}", partial(self._work, one)))

    def _work(self, one: Due) -> None:
        name = one.target.subscription
        again = True
        try:
            if any_set(self.ends):
                return
            flowing = self.replayer.flowing()
            took_s = self.replayer.step(one, flowing=flowing)
            self._failed.pop(name, None)
            rest = min(self.limits.rest_s_max, rest_s(took_s, flowing, self.cores))
            if rest:
                self.runtime.wait(rest, *self.ends)
        except ConflictError as error:
            self.log.info("replay looks again", subscription=name, error=error)
        except Exception as error:  # noqa: BLE001 - tried again, not at once: it fails again
            times, _ = self._failed.get(name, (0, 0.0))
            wait_s = backoff_s(times, base_s=self.limits.look_every_s, max_s=self.limits.failed_wait_s_max)
            self._failed[name] = times + 1, self.runtime.monotonic() + wait_s
            self.log.warning("replay not moved", subscription=name, tried_again_in_s=wait_s, error=error)
            if times >= self.limits.failed_quietly_max:
                self._hold_up(one, known(error))
            again = False
        finally:
            self._busy.discard(name)
        if again:
            self._wake.set()

    def _hold_up(self, one: Due, error: EvermarkError) -> None:
        try:
            self.replayer.hold_up(one, error)
        except EvermarkError as untold:  # it is State that is away, or the replay ended, or is another instance's
            self.log.debug("that a replay failed could not be noted", replay=one.replay.id, error=untold)

    def _clear(self) -> None:
        """Tell the sources that replays they asked for are over."""
        if self.runtime.monotonic() < self._clear_at:
            return
        for replay in self.replayer.replays.uncleared():
            try:
                self._clear_one(replay)
            except StaleError:
                raise
            except EvermarkError as error:
                self._clear_at = self.runtime.monotonic() + self._clear_wait_s
                self._clear_wait_s = min(self.limits.clear_wait_s_max, 2 * self._clear_wait_s)
                self.log.warning("source not told that its replay is over", replay=replay.id, error=error)
                return
        self._clear_wait_s = self.limits.clear_wait_s
        self._clear_at = self.runtime.monotonic() + self._clear_wait_s

    def _clear_one(self, replay: Replay) -> None:
        request = replay.request
        source = self.sources.get(request.source)
        if source is not None and request.asked_since is not None:
            for stream in request.streams:
                source.replayed(stream, request.asked_since, request.asked_until)
        self.replayer.replays.cleared(replay.id, self.replayer.epoch)
        self.log.info("replay over", replay=replay.id, state=str(replay.state), source=request.source)

    def _on_ended(self, replay: Replay, target: Target, why: str) -> None:
        done = f"{percent(replay, target):.1f} %"
        self.log.warning("replay given up", replay=replay.id, subscription=target.subscription, done=done, reason=why)

    def _on_step(self, one: Due, result: Replayed) -> None:
        self.observer.by_replay(one, result)
        name, outcome = one.target.subscription, result.outcome
        if outcome.fate not in ("done", "unfinished"):
            self.log.warning("replay waits", replay=one.replay.id, subscription=name, reason=outcome.reason)
