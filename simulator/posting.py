"""The `Deliverer` and the `Sink` that post to simulated receivers instead of Spark and HTTP."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import takewhile
from typing import Any

from evermark.delivery.bots.forward import forwards, is_member
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import BotView, Fate, HeldKey, Outcome, ParkedEvent, SourcePartition, SubscriptionSpec
from evermark.delivery.webhook.base import Answer, Try
from evermark.delivery.work import Assignment, DeliveryOptions, Result, Span, fold
from evermark.log.opened import lost
from evermark.predicate import wanted_ops
from simulator.account import Account
from simulator.broken import Broken
from simulator.promises import who
from simulator.source import About, Row, SimLog

_NEVER = float("inf")
# Whoever is not done after this many times what the quicker half needed is cut off.
_PATIENCE = 2.0

# (who, what is posted, by which replay, if any) -> the answer, with whatever fault strikes on the way.
Post = Callable[[SubscriptionSpec, Sequence[Row], str], Answer]


@dataclass
class SimDeliverer:
    """Reads files of the log, matches, posts in log order per key, bundle by bundle. A model of what Spark does.

    Subscriptions are served side by side, each on a clock of its own; the time of the slowest passes at the end.
    """

    account: Account
    logs: Mapping[str, SimLog]
    post: Post
    rng: random.Random
    now: Callable[[], float]
    sleep: Callable[[float], None]
    takes_s: Callable[[SubscriptionSpec], float]  # how long a receiver needs for a request
    ttl_s: Mapping[str, float]
    begin: Callable[[], None]  # called before anything is sent
    is_missing: Callable[[str], bool] = lambda _: False  # whether a file of the log cannot be read just now
    others: random.Random = field(default_factory=lambda: random.Random(0))  # for what not all seeds have

    def deliver(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        self.begin()
        stuck = self._stuck(assignments)
        served = self._delivered([one for one in assignments if one.spec.name not in stuck], options)
        by_name = {**stuck, **{outcome.subscription: outcome for outcome in served}}
        return [by_name[one.spec.name] for one in assignments]

    def _stuck(self, assignments: Sequence[Assignment]) -> dict[str, Outcome]:
        """Raises for a file that is missing; or it is missed by some of those who need it, and others had its rows at
        hand, as in a lane, where Spark reads beside."""
        missing = {one.spec.name: [p for p in one.span.paths if self.is_missing(p)] for one in assignments}
        if not any(missing.values()):
            return {}
        self.account.met[Fate.STUCK] += 1
        if self.others.random() < 0.5:
            raise lost(next(path for paths in missing.values() for path in paths))
        return {
            name: Outcome(name, Fate.STUCK, reason=lost(paths[0]).message)
            for name, paths in missing.items()
            if paths and self.others.random() < 0.5
        }

    def _delivered(self, assignments: Sequence[Assignment], options: DeliveryOptions) -> list[Outcome]:
        jobs = [self._job(assignment, options) for assignment in assignments]
        cut_s = _cut_s([job.needs_s for job in jobs], options.slack_s)
        for job in self.rng.sample(jobs, len(jobs)):
            self.work(job, options, cut_s)
        self.account.met.update(job.fate or Fate.DONE for job in jobs)
        took_s = max((job.took_s for job in jobs), default=0.0)
        if took_s > 0:
            self.sleep(took_s)
        took = {job.spec.name: job.took_s for job in jobs}
        found = fold(assignments, [result for job in jobs for result in job.results()])
        return [replace(one, took_s=took[one.subscription]) for one in found]

    def _rows(self, span: Span) -> list[Row]:
        contents = self.logs[span.place.source].contents
        rows = [row for path in span.paths for row in contents[path]]
        if not span.exact:
            rows = [r for r in rows if r.place == span.place and span.after < r.batch <= span.to]
        rows = [r for r in rows if r.batch > span.after + 1 or r.position > span.begun.through]
        return sorted(rows, key=lambda row: (row.batch, row.position))

    def _job(self, assignment: Assignment, options: DeliveryOptions) -> Job:
        spec = assignment.spec
        rows = [row for row in matching(spec, self._rows(assignment.span)) if concerns(assignment.bot, row)]
        clear = assignment.bot.clear if assignment.bot is not None else None
        job = Job(
            spec, rows, set(options.held.get(spec.name, ())), self.takes_s(spec), clear, room=assignment.parked_room
        )
        if spec.name in self.ttl_s:
            oldest = self.now() - self.ttl_s[spec.name]
            job.expired = {row.event_id for row in job.rows if row.made_at < oldest}
            self.account.expired[who(spec)] |= job.expired
            job.waiting = [row for row in job.waiting if row.event_id not in job.expired]
        return job

    def work(self, job: Job, options: DeliveryOptions, cut_s: float) -> None:
        """No request begins after the budget; what is under way may end within the grace, or is cut off."""
        budget_s = _NEVER if options.budget_s is None else options.budget_s
        grace_s = job.spec.timeout_s if options.grace_s is None else options.grace_s
        end_s = min(budget_s + grace_s, cut_s if job.needs_s > cut_s else _NEVER)
        while job.waiting and job.fate is None:
            if job.took_s >= min(budget_s, end_s):
                job.stop(Fate.UNFINISHED, "the time given to this work ran out")
                return
            self._send(job, job.take(self.rng), end_s)

    def _send(self, job: Job, rows: list[Row], end_s: float) -> None:
        rows = [row for row in rows if not job.is_held(row)]
        if not rows or job.fate is not None:
            return
        until_s = min(job.took_s + job.spec.timeout_s, end_s)
        if job.took_s + job.pace_s > until_s:
            if self.rng.random() < 0.5:
                self.post(job.spec, rows, job.replay)  # it came through, but nobody waited for the answer
            timed_out = until_s < end_s
            job.took_s = until_s
            job.stop(Fate.ENDPOINT_FAILED if timed_out else Fate.UNFINISHED, "no answer in time")
            return
        job.took_s += job.pace_s
        answer = self.post(job.spec, rows, job.replay)
        if answer.verdict is Verdict.REFUSED and len(rows) > 1:
            half = len(rows) // 2
            self._send(job, rows[:half], end_s)
            self._send(job, rows[half:], end_s)
        else:
            job.see(rows, answer)


def _cut_s(needed_s: Sequence[float], slack_s: float | None) -> float:
    """When those who are done have waited long enough for the others."""
    if slack_s is None or not needed_s:
        return _NEVER
    half_s = sorted(needed_s)[(len(needed_s) - 1) // 2]
    return half_s + max(slack_s, _PATIENCE * half_s)


@dataclass
class Job:
    """One subscription's share of a span."""

    spec: SubscriptionSpec
    rows: list[Row]
    held: set[HeldKey]
    pace_s: float
    clear: frozenset[str] | None = None  # of a bot: sessions whose events may be sent
    took_s: float = 0.0
    accepted: set[str] = field(default_factory=set)
    parked: dict[str, ParkedEvent] = field(default_factory=dict)
    expired: set[str] = field(default_factory=set)
    fate: Fate | None = None
    reason: str = ""
    replay: str = ""
    room: int | None = None  # how much may be parked; none: as much as its subscription allows

    def __post_init__(self) -> None:
        self.waiting = list(self.rows)

    @property
    def needs_s(self) -> float:
        return self.pace_s * -(-len(self.waiting) // self.spec.bundle)

    def take(self, rng: random.Random) -> list[Row]:
        """The next bundle. Keys may overtake each other; events of one key may not."""
        taken: list[Row] = []
        while self.waiting and len(taken) < self.spec.bundle:
            first: list[int] = []
            seen: set[str | None] = set()
            for index, row in enumerate(self.waiting[:4]):
                mine = {key for _, _, key in row.keys}
                first += [] if mine & seen else [index]
                seen |= mine
            taken.append(self.waiting.pop(rng.choice(first)))
        return taken

    def is_held(self, row: Row) -> bool:
        if self.clear is not None and row.about.session and row.about.session not in self.clear:
            self.park(row, "for its key", None, row.about.session)
            return True
        if not self.spec.ordered or self.held.isdisjoint(row.keys):
            return False
        self.park(row, "held behind its key", None)
        return True

    def see(self, rows: Sequence[Row], answer: Answer) -> None:
        if answer.verdict is Verdict.ACCEPTED:
            self.accepted.update(row.event_id for row in rows)
        elif answer.verdict is Verdict.REFUSED:
            self.park(rows[0], answer.reason, answer.status)
        elif answer.verdict is Verdict.GONE:
            self.stop(Fate.GONE, answer.reason)
        else:
            self.stop(Fate.ENDPOINT_FAILED, answer.reason)

    def park(self, row: Row, reason: str, status: int | None, session: str = "") -> None:
        counts = [event for event in self.parked.values() if self.replay or not event.session]
        by_stream = self.spec.bot is not None
        roomless = bool(session or by_stream) and not self.replay and (self.room is None or self.room >= 0)
        if not roomless and len(counts) >= (self.spec.parked_max if self.room is None else self.room):
            self.stop(Fate.FULL, "no room to park more")
            return
        self.parked[row.event_id] = replace(as_parked(row, reason, status), session=session, replay_id=self.replay)
        self.held.update(self.parked[row.event_id].held_keys)

    def stop(self, fate: Fate, reason: str) -> None:
        self.fate, self.reason = fate, reason

    def results(self) -> list[Result]:
        """What is done is a prefix: nothing after the first event that is not counts, in its batch and after it."""
        found: list[Result] = []
        over = self.accepted | self.parked.keys() | self.expired
        broken = False
        for batch in sorted({row.batch for row in self.rows}):
            rows = [row for row in self.rows if row.batch == batch]
            done = [] if broken else list(takewhile(lambda row: row.event_id in over, rows))
            broken = len(done) < len(rows)
            accepted = sum(row.event_id in self.accepted for row in rows)
            parked = tuple(self.parked[row.event_id] for row in done if row.event_id in self.parked)
            expired = sum(row.event_id in self.expired for row in done)
            fate = Fate.DONE if not broken else self.fate or Fate.UNFINISHED
            outcome = Outcome(self.spec.name, fate, accepted, parked, self.reason if broken else "", None, expired)
            found.append(Result(rows[0].place, batch, outcome, done[-1].position if done else None))
        return found


def matching(spec: SubscriptionSpec, rows: Sequence[Row]) -> list[Row]:
    """What a subscription gets, but for its predicate; which operations are delivered is the product's to say."""
    ops = frozenset(wanted_ops(spec.ops))
    return [row for row in rows if row.op in ops and (not spec.streams or row.stream in spec.streams)]


def concerns(bot: BotView | None, row: Row) -> bool:
    """Whether a bot is sent an event, by what the product learned of it."""
    if bot is None:
        return True
    member = is_member(bot, stream_of(row), (row.batch, row.position))
    return stream_of(row) in bot.streams and forwards(bot.wish, "message", said(row), member=member, inbox=False)


def stream_of(row: Row) -> str:
    """A stream of blocks is in one partition; those made up here are in all of them."""
    return f"{row.stream}@{row.place.partition}"


def said(row: Row) -> dict[str, Any]:
    about = row.about
    return {"kind": about.kind, "creator": "somebody", "member": "bot", "tags": {"session": about.session}}


def as_parked(row: Row, reason: str, status: int | None) -> ParkedEvent:
    where = (row.place, row.batch, row.position, row.stream, row.key)
    return ParkedEvent(row.event_id, *where, _json(row), reason, status, previous_key=row.previous_key)


def _json(row: Row) -> str:
    return json.dumps(asdict(row))


def from_json(text: str) -> Row:
    body: dict[str, Any] = json.loads(text)
    return Row(**{**body, "place": SourcePartition(**body["place"]), "about": About(**body["about"])})


@dataclass
class SimSink:
    """`Sink.attempt` over the same receivers; nothing else of a sink is needed by the queue."""

    post: Post
    busy: Callable[[], bool]
    on_failed: Callable[[str], None]  # a delivery that is no replay's met a failing endpoint
    begin: Callable[[], None]
    now: Callable[[], float]
    sleep: Callable[[float], None]
    takes_s: Callable[[SubscriptionSpec], float]  # how long a receiver needs for a request
    fail: Callable[[Exception], None]
    under_way: set[str] = field(default_factory=set)

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        self.begin()
        if any(json.loads(each.event)["op"] == "wanted" for each in tries):
            return [Answer(Verdict.ACCEPTED)] * len(tries)  # keys are asked for: what is answered changes nothing
        names = {each.spec.name for each in tries}
        if twice := names & self.under_way:
            self.fail(Broken(f"retries of {', '.join(twice)} begin while others of it are under way"))
        self.under_way |= names
        try:
            return self._attempt(tries, deadline_s)
        finally:
            self.under_way -= names

    def _attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        answers: list[Answer] = []
        until = self.now() + deadline_s
        failed: set[tuple[str, str, HeldKey | str]] = set()
        down: set[tuple[str, str]] = set()
        for each in tries:
            row, name = from_json(each.event), each.spec.name
            replay = each.replay_id or ""
            lines = {(name, replay, line) for line in ([each.session] if each.session else row.keys)}
            if (name, replay) in down:
                answer = Answer(Verdict.ENDPOINT, reason="its endpoint failed just now")
            elif lines & failed or self.now() >= until or self.busy():
                answer = Answer(Verdict.BUSY, reason="behind another of its key, or out of time")
            else:
                if takes_s := self.takes_s(each.spec):
                    self.sleep(min(takes_s, each.spec.timeout_s))
                answer = self.post(each.spec, [row], each.replay_id or "")
                if takes_s > each.spec.timeout_s:  # it came through, but nobody waited for the answer
                    answer = Answer(Verdict.ENDPOINT, reason="no answer in time")
                if answer.verdict is Verdict.ENDPOINT and not each.replay_id:
                    self.on_failed(name)
            if answer.verdict is Verdict.ENDPOINT:
                down.add((name, replay))
            if answer.verdict is not Verdict.ACCEPTED and not (each.session and answer.verdict is Verdict.REFUSED):
                failed |= lines
            answers.append(answer)
        return answers
