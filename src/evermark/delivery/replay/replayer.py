"""Replays at work: requests are started, their targets moved on slice by slice, and ended.

Crash-safe by the same means as all delivery: read → send → settle by compare-and-set. Events that were sent and not
settled are sent again, under the same ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from evermark import failpoint
from evermark.delivery.bots.views import BotViews
from evermark.delivery.decide.retry import STUCK_REST_S
from evermark.delivery.model import BotView, Fate, Outcome, SourcePartition
from evermark.delivery.ports import DeliveryStore, LogView
from evermark.delivery.replay import plan as decide
from evermark.delivery.replay.base import ReplayStore
from evermark.delivery.replay.plan import Due, Replay, ReplayDeliverer, Replayed, ReplayState, ReplayWork, Target
from evermark.delivery.replay.timeslice import TimeSlice, next_slice, readable, rows_between
from evermark.error_policy import is_stuck
from evermark.errors import ConflictError, EvermarkError, FormatError, NotFoundError, StaleError, known
from evermark.log.opened import PLAYBOOK
from evermark.log.read import FileRange

# Fresh events flow when a head moved this recently.
FLOWING = timedelta(seconds=2)
# A request whose own event the log has lost (it was put back to an earlier day, perhaps) would wait for ever.
START_WAIT_MAX = timedelta(days=7)


@dataclass
class Replayer:
    replays: ReplayStore
    store: DeliveryStore
    log: LogView
    deliverer: ReplayDeliverer
    epoch: int
    clock: Callable[[], datetime]
    sources: Collection[str]  # a replay of any other source can never run
    bot_views: BotViews | None = None  # needed where there are bots
    stopwatch: Callable[[], float] = time.monotonic
    slices: decide.SliceLimits = decide.SLICES
    on_step: Callable[[Due, Replayed], None] = lambda _due, _result: None
    # It cannot go on for a subscription, or (None) cannot start, and waits.
    on_stuck: Callable[[Replay, str | None, EvermarkError], None] = lambda *_: None
    on_ended: Callable[[Replay, Target, str], None] = lambda _replay, _target, _why: None  # unfinished
    _prepared: dict[tuple[str, str], TimeSlice] = field(default_factory=dict)
    _start_at: dict[str, datetime] = field(default_factory=dict)  # replays that could not start: not before then
    _tried: set[tuple[str, str]] = field(default_factory=set)  # replays, and the subscriptions they were tried for

    def look(self) -> tuple[list[Replay], list[Due]]:
        """Start waiting replays, end replays that are over; one that cannot be started or ended holds up no other.
        Returns the open replays, and the due targets.
        """
        ended: set[tuple[str, str]] = set()
        found = self.replays.open()
        subscriptions = self.store.subscriptions() if found else {}
        now = self.clock()
        for replay in found:
            try:
                if replay.state is not ReplayState.WAITING:
                    self._end(replay, found, subscriptions, now, ended)
                elif self._start_at.get(replay.id, now) <= now:
                    self._start(replay, now)
            except StaleError:
                raise  # the lease is another instance's now
            except ConflictError:
                continue  # a person cancelled it meanwhile
            except Exception as error:  # noqa: BLE001 - it is said, and tried again
                self._hold_up_whole(replay, known(error), now)
        for target in decide.newly_stuck(found, subscriptions):
            self.replays.note_stuck(target, now, self.epoch)
        self._tried &= {(replay.id, target.subscription) for replay in found for target in replay.targets}
        self._start_at = {each.id: self._start_at[each.id] for each in found if each.id in self._start_at}
        due = decide.due(found, subscriptions, now)
        return found, [one for one in due if (one.replay.id, one.target.subscription) not in ended]

    def _end(
        self,
        replay: Replay,
        found: Sequence[Replay],
        subscriptions: decide.Subscriptions,
        now: datetime,
        ended: set[tuple[str, str]],
    ) -> None:
        """What is over of a replay, one of those `found`; `ended` is told of each target."""
        for target in replay.targets:
            tried = (replay.id, target.subscription) in self._tried
            is_running = target.state is decide.TargetState.RUNNING
            why = decide.is_over_for(target, subscriptions, now, was_tried=tried) if is_running else ""
            if why:
                if (after := decide.handed_on(replay, target, found, subscriptions)) is not None:
                    self.replays.note_stuck(*after, self.epoch)  # before the end, which a crash may come after
                self.replays.end_target(replay.id, target.subscription, why, self.epoch)
                ended.add((replay.id, target.subscription))
                self.on_ended(replay, target, why)
        if decide.has_ended(replay):
            self.replays.finish(replay.id, self.epoch)

    def flowing(self) -> bool:
        """Whether fresh events come in just now: a replay then rests as much as it works."""
        now = self.clock()
        return any(now - moved_at < FLOWING for _, moved_at in self.log.heads().values())

    def step(self, one: Due, *, flowing: bool) -> float:
        """One slice for one target, sent and settled; the seconds it took. Where the log cannot be read, the target
        waits right before that, and says so.
        """
        began = self.stopwatch()
        target, name, stuck = one.target, one.target.subscription, None
        piece: TimeSlice | None = TimeSlice(target.mark, target.mark.time, (), 0)  # as long as no other is known
        try:
            files = self._files(one.replay.request.source, one.replay.heads)
            rows = decide.rows_of(one, flowing=flowing, slices=self.slices)
            piece = self._slice(one, files, rows)
            if piece is None:
                self.replays.pass_by(target, self.epoch)
                return self.stopwatch() - began
            result = self._sent(one, piece, files, rows, flowing=flowing)
        except EvermarkError as error:
            if piece is None or not is_stuck(error):
                raise
            stuck, result = error, _stuck_by(one, error)
        failpoint.hit("replay.sent")
        took_s = self.stopwatch() - began
        pace = (decide.STEP_S_FLOWING if flowing else decide.STEP_S) / max(took_s, 0.001)
        after = self.replays.settle(target, piece, result, pace, self.clock(), self.epoch)
        self._tried.add((one.replay.id, name))
        failpoint.hit("replay.settled")
        if result.outcome.fate is Fate.GONE:
            self.store.disable(name, result.outcome.reason, self.epoch, generation=target.generation)
        if stuck is None:
            self.on_step(one, result)
        elif after.next_attempt_at is not None:  # else a smaller slice is tried at once
            self.on_stuck(one.replay, name, stuck)
        return took_s

    def hold_up(self, one: Due, error: EvermarkError) -> None:
        """No step of this target can be made, again and again, for a reason that is neither the log's nor the
        receiver's: it waits, says why, and is given up after the subscription's ttl, as one that the log holds up."""
        nothing = TimeSlice(one.target.mark, one.target.mark.time, (), 0)
        self.replays.settle(one.target, nothing, _stuck_by(one, error), 1.0, self.clock(), self.epoch)
        self._tried.add((one.replay.id, one.target.subscription))
        self.on_stuck(one.replay, one.target.subscription, error)

    def _hold_up_whole(self, replay: Replay, error: EvermarkError, now: datetime) -> None:
        """A replay that cannot start, as the log of its source cannot be read, waits as one that runs does."""
        self._start_at[replay.id] = now + timedelta(seconds=STUCK_REST_S)
        self.on_stuck(replay, None, error)
        with suppress(EvermarkError):  # it is State that is away
            self.replays.note_waiting(replay.id, _reason_of(error), self.epoch)

    def _sent(self, one: Due, piece: TimeSlice, files: list[FileRange], rows: int, *, flowing: bool) -> Replayed:
        name, spec = one.target.subscription, one.subscription.spec
        held = self.store.parked.held_keys([name], replay_id=one.replay.id).get(name, {}) if spec.ordered else {}
        work = decide.work_of(one, piece, files, rows, self.replays.parked_now(name), self._bot(one))
        ahead = None if flowing else self._ahead_of(one, work, files, rows)
        return self.deliverer.replay(replace(work, held=held), ahead)

    def _slice(self, one: Due, files: list[FileRange], rows: int) -> TimeSlice | None:
        """The next slice: the prepared slice, if it begins at the target's mark."""
        prepared = self._prepared.pop((one.replay.id, one.target.subscription), None)
        if prepared is not None and prepared.mark == one.target.mark and rows / 2 <= prepared.rows <= 2 * rows:
            return prepared
        return next_slice(one.target.mark, one.replay.request.until, files, rows)

    def _ahead_of(self, one: Due, work: ReplayWork, files: list[FileRange], rows: int) -> ReplayWork | None:
        """The work that comes next if this step goes well."""
        piece = next_slice(work.slice.end, one.replay.request.until, files, rows)
        if piece is None:
            return None
        self._prepared[one.replay.id, one.target.subscription] = piece
        return decide.work_of(one, piece, files, rows, bot=work.bot)

    def _bot(self, one: Due) -> BotView | None:
        if self.bot_views is None:
            return None
        source = one.replay.request.source
        heads = {SourcePartition(source, partition): batch for partition, batch in one.replay.heads.items()}
        return self.bot_views.view_of_all(one.subscription.spec, heads, one.replay.id)

    def _start(self, replay: Replay, now: datetime) -> None:
        request = replay.request
        if request.source not in self.sources:
            self._fail(replay, f"no source is called {request.source!r}")
            return
        heads = {place: head for place, (head, _) in self.log.heads().items()}
        if not decide.may_start(replay, heads):
            if replay.created_at is not None and now - replay.created_at > START_WAIT_MAX:
                self._fail(replay, f"the log of {request.source!r} never got to the event that asked for it")
            return
        mine = {place.partition: head for place, head in heads.items() if place.source == request.source}
        targets = decide.targets_of(replay, self.store.subscriptions(), self.slices)
        if isinstance(targets, str):
            self._fail(replay, targets)
            return
        rows = rows_between(request.since, request.until, self._files(request.source, mine))
        self.replays.start(replay.id, mine, rows, targets, self.epoch)

    def _fail(self, replay: Replay, why: str) -> None:
        self.replays.end(replay.id, ReplayState.FAILED, why, self.epoch)

    def _files(self, source: str, heads: Mapping[int, int]) -> list[FileRange]:
        try:
            return readable(self.log.files(source), heads)
        except NotFoundError as error:
            if any(heads.values()):
                hint = f"put it back from a copy; {PLAYBOOK}"
                raise FormatError(f"the log of {source} is gone", hint=hint) from error
            return []  # nothing was ever taken from it


def _stuck_by(one: Due, error: EvermarkError) -> Replayed:
    return Replayed(one.target.mark, Outcome(one.target.subscription, Fate.STUCK, reason=_reason_of(error)))


def _reason_of(error: EvermarkError) -> str:
    return "; ".join(filter(None, (error.message, error.hint)))
