"""Receivers with bad days, and the `Deliverer` and `Sink` that post to them instead of Spark and HTTP."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from evermark.delivery.base import Fate, Outcome, ParkedEvent, Place, SubscriptionSpec
from evermark.delivery.retry import Verdict
from evermark.delivery.sinks.base import Answer, Try
from evermark.delivery.work import BatchResult, Delivered, Manner, Span, fold
from evermark.testing.simulator.source import Row, SimLog
from evermark.testing.simulator.truth import Truth, wants

REFUSALS_FOREVER = 1_000


@dataclass
class Receiver:
    """Deduplicates by id, as a receiver must; what it is asked is checked by `truth`."""

    truth: Truth
    rng: random.Random
    chance: Mapping[str, float]
    down_until: float = 0.0
    gone: bool = False
    calm: bool = False
    _refusals: dict[str, int] = field(default_factory=dict)

    def post(self, spec: SubscriptionSpec, row: Row, now: float) -> Answer:
        if now < self.down_until:
            return Answer(Verdict.ENDPOINT, reason="connection refused")
        if self.gone:
            return Answer(Verdict.GONE, 410, "gone")
        self.truth.before_offer(spec.name, row)
        if self._refuses(spec.name, row):
            return Answer(Verdict.EVENT, 400, "refused")
        self.truth.on_handled(spec, row)
        if not self.calm and self.rng.random() < self.chance["lost_answer"]:
            return Answer(Verdict.ENDPOINT, reason="the answer was lost")
        return Answer(Verdict.ACCEPTED, 200)

    def _refuses(self, name: str, row: Row) -> bool:
        if row.event_id not in self._refusals:
            count = 0
            if self.rng.random() < self.chance["refuse"]:
                count = self.rng.choice((1, 1, 2, 4, REFUSALS_FOREVER))
            self._refusals[row.event_id] = count
        left = self._refusals[row.event_id]
        if left == REFUSALS_FOREVER:
            self.truth.refused_forever[name].add(row.event_id)
            return True
        self._refusals[row.event_id] = max(0, left - 1)
        return left > 0


# (label, what is posted) -> the answer, with whatever fault strikes on the way.
Post = Callable[[SubscriptionSpec, Row], Answer]


@dataclass
class SimDeliverer:
    """Reads files of the log, matches by stream, posts in log order per key. A model of what Spark does."""

    truth: Truth
    logs: Mapping[str, SimLog]
    post: Post
    rng: random.Random
    now: Callable[[], float]
    ttl_s: Mapping[str, float]
    slow: Callable[[], bool]

    def deliver(self, span: Span, specs: Sequence[SubscriptionSpec], manner: Manner) -> list[Delivered]:
        contents = self.logs[span.place.source].contents
        rows = [row for path in span.paths for row in contents[path]]
        if not span.exact:
            rows = [r for r in rows if r.place == span.place and span.after < r.batch <= span.to]
        rows.sort(key=lambda row: (row.batch, row.position))
        results: list[BatchResult] = []
        for spec in self.rng.sample(list(specs), len(specs)):
            results += self._deliver(spec, [row for row in rows if wants(spec, row)], manner)
        return fold(span, specs, results)

    def _deliver(self, spec: SubscriptionSpec, rows: list[Row], manner: Manner) -> list[BatchResult]:
        job = _Job(spec, rows, set(manner.held.get(spec.name, frozenset())))
        self._expire(job)
        budget = self.rng.randint(0, 6) if self.slow() else len(rows)
        while job.waiting and job.fate is None:
            if budget == 0:
                job.fate, job.reason = Fate.UNFINISHED, "the time given to this work ran out"
                break
            budget -= 1
            row = job.take(self.rng)
            if spec.ordered and (row.place, row.key) in job.held:
                job.park(row, "held behind its key", None)
            else:
                job.see(row, self.post(spec, row))
        return job.results()

    def _expire(self, job: _Job) -> None:
        if job.spec.name not in self.ttl_s:
            return
        oldest = self.now() - self.ttl_s[job.spec.name]
        job.expired = {row.event_id for row in job.rows if row.made_at < oldest}
        self.truth.expired[job.spec.name] |= job.expired
        job.waiting = [row for row in job.waiting if row.event_id not in job.expired]


@dataclass
class _Job:
    """One subscription's share of a span."""

    spec: SubscriptionSpec
    rows: list[Row]
    held: set[tuple[Place, str]]
    accepted: set[str] = field(default_factory=set)
    parked: dict[str, ParkedEvent] = field(default_factory=dict)
    expired: set[str] = field(default_factory=set)
    fate: Fate | None = None
    reason: str = ""

    def __post_init__(self) -> None:
        self.waiting = list(self.rows)

    def take(self, rng: random.Random) -> Row:
        """Keys may overtake each other; events of one key may not."""
        first: dict[str, int] = {}
        for index, row in enumerate(self.waiting[:4]):
            first.setdefault(row.key, index)
        return self.waiting.pop(rng.choice(list(first.values())))

    def see(self, row: Row, answer: Answer) -> None:
        if answer.verdict is Verdict.ACCEPTED:
            self.accepted.add(row.event_id)
        elif answer.verdict is Verdict.EVENT:
            self.park(row, answer.reason, answer.status)
        elif answer.verdict is Verdict.GONE:
            self.fate, self.reason = Fate.GONE, answer.reason
        else:
            self.fate, self.reason = Fate.ENDPOINT_FAILED, answer.reason

    def park(self, row: Row, reason: str, status: int | None) -> None:
        if len(self.parked) >= self.spec.parked_max:
            self.fate, self.reason = Fate.ENDPOINT_FAILED, "no room to park more"
            return
        self.parked[row.event_id] = as_parked(row, reason, status)
        self.held.add((row.place, row.key))

    def results(self) -> list[BatchResult]:
        """DONE results are a prefix: nothing after an incomplete batch counts."""
        found: list[BatchResult] = []
        broken = False
        for batch in sorted({row.batch for row in self.rows}):
            ids = [row.event_id for row in self.rows if row.batch == batch]
            finished = [i for i in ids if i in self.accepted or i in self.parked or i in self.expired]
            broken = broken or len(finished) < len(ids)
            accepted = sum(i in self.accepted for i in ids)
            parked = tuple(self.parked[i] for i in ids if i in self.parked)
            expired = sum(i in self.expired for i in ids)
            fate = Fate.DONE if not broken else self.fate or Fate.UNFINISHED
            outcome = Outcome(self.spec.name, fate, accepted, parked, self.reason if broken else "", None, expired)
            found.append(BatchResult(self.spec.name, batch, outcome))
        return found


def as_parked(row: Row, reason: str, status: int | None) -> ParkedEvent:
    return ParkedEvent(row.event_id, row.place, row.batch, row.position, row.key, _json(row), reason, status)


def _json(row: Row) -> str:
    return json.dumps(asdict(row))


def from_json(text: str) -> Row:
    body: dict[str, Any] = json.loads(text)
    return Row(**{**body, "place": Place(**body["place"])})


@dataclass
class SimSink:
    """`Sink.attempt` over the same receivers; nothing else of a sink is needed by the queue."""

    post: Post
    busy: Callable[[], bool]

    def attempt(self, tries: Sequence[Try], deadline_s: float) -> list[Answer]:
        answers: list[Answer] = []
        failed: set[tuple[str, Place, str]] = set()
        down: set[str] = set()
        for each in tries:
            row, name = from_json(each.event), each.spec.name
            lane = (name, row.place, row.key)
            if name in down:
                answer = Answer(Verdict.ENDPOINT, reason="its endpoint failed just now")
            elif lane in failed or self.busy():
                answer = Answer(Verdict.BUSY, reason="behind another of its key")
            else:
                answer = self.post(each.spec, row)
            if answer.verdict is Verdict.ENDPOINT:
                down.add(name)
            if answer.verdict is not Verdict.ACCEPTED:
                failed.add(lane)
            answers.append(answer)
        return answers
