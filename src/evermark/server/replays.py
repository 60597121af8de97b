"""Replays as the HTTP API asks for, shows and ends them. The rules are those of the command line."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Annotated, Any, Self

from pydantic import Field

from evermark.delivery.limits import REPLAY_RATE_MAX
from evermark.delivery.replay.base import ReplayStore
from evermark.delivery.replay.plan import AskedBy, Replay, Request
from evermark.delivery.replay.request import STREAMS_MAX, window_of
from evermark.delivery.replay.shown import summary, target_shown
from evermark.errors import NotFoundError
from evermark.predicate import vet
from evermark.server.messages import PAGE_MAX, Answer, Asked, Limit, read_as
from evermark.server.subscriptions import AsDeliverer
from evermark.settings.problems import Problem, refused

_Name = Annotated[str, Field(min_length=1, max_length=200)]
_Time = Annotated[str, Field(min_length=1, max_length=64)]


class ReplayAsked(Asked):
    """A window of time, both ends included, and which of its events go to whom. Without `until` it ends now; without
    `subscription` it goes to all that want these events. `source` is needed only where there are several.
    """

    since: _Time
    until: _Time | None = None
    source: _Name | None = None
    subscription: _Name | None = None
    streams: Annotated[tuple[_Name, ...], Field(max_length=STREAMS_MAX)] = ()
    where: Annotated[str, Field(min_length=1, max_length=8192)] | None = None
    rate: Annotated[float, Field(ge=0, le=REPLAY_RATE_MAX, description="Requests a second at most; 0: no limit.")] = 0.0


class ReplaysAsked(Asked):
    limit: Limit = 100


class TargetAnswer(Answer):
    """How far a replay is with one subscription."""

    subscription: str
    state: str
    percent: float
    at: datetime
    delivered: int
    parked: int
    failures: int
    next_attempt_at: datetime | None
    reason: str | None


class ReplayAnswer(Answer):
    """A replay. Its percentage is that of its slowest subscription."""

    id: str
    state: str
    asked_by: str
    source: str
    streams: list[str] | None
    since: datetime
    until: datetime
    where: str | None
    subscription: str | None
    rate_per_s: float | None
    percent: float
    delivered: int
    parked: int
    asked_at: datetime | None
    ended_at: datetime | None
    reason: str | None
    targets: list[TargetAnswer]
    warnings: list[str] = Field(default_factory=list)

    @classmethod
    def of(cls, replay: Replay, warnings: Sequence[str] = ()) -> Self:
        targets = [target_shown(replay, target) for target in replay.targets]
        return cls.model_validate({**summary(replay), "targets": targets, "warnings": list(warnings)})


class ReplayPage(Answer):
    """The newest first."""

    replays: list[ReplayAnswer]


@dataclass(frozen=True)
class ReplayService:
    store: ReplayStore
    as_deliverer: AsDeliverer
    sources: Collection[str]
    subscriptions: Callable[[], Collection[str]]  # the names there are
    warnings: Callable[[Sequence[str]], list[str]]  # a sentence for each of these streams that nothing is known of
    clock: Callable[[], datetime] = lambda: datetime.now(UTC)

    def page(self, limit: int = PAGE_MAX) -> ReplayPage:
        """The newest replays, also those that are over."""
        return ReplayPage(replays=[ReplayAnswer.of(each) for each in self.store.newest(limit)])

    def get(self, replay: str) -> ReplayAnswer:
        """A replay, and how far it is with each subscription."""
        return ReplayAnswer.of(self.store.one(replay))

    def ask(self, values: Mapping[str, Any]) -> ReplayAnswer:
        """Deliver the events of a window of time again."""
        given = read_as(ReplayAsked, values)
        since, until = window_of(given.since, given.until, self.clock())
        vet(given.where)
        if given.subscription is not None and given.subscription not in self.subscriptions():
            raise NotFoundError(f"no subscription is called {given.subscription[:80]!r}", hint="see /v1/subscriptions")
        request = Request(
            AskedBy.API,
            self._source(given.source),
            since,
            until,
            streams=tuple(dict.fromkeys(given.streams)),
            where=given.where,
            subscription=given.subscription,
            rate_per_s=given.rate,
        )
        made = self.as_deliverer(lambda epoch: self.store.request(request, epoch))
        return ReplayAnswer.of(self.store.one(made), self.warnings(request.streams))

    def cancel(self, replay: str) -> ReplayAnswer:
        """End a replay now; one that is over stays as it is. Its parked deliveries are dropped."""
        self.as_deliverer(lambda epoch: self.store.cancel(replay, epoch))
        return self.get(replay)

    def _source(self, name: str | None) -> str:
        known = sorted(self.sources)
        if name is None and len(known) == 1:
            return known[0]
        if name in known:
            return str(name)
        said = "is required where there are several sources" if name is None else f"no source is called {name[:80]}"
        raise refused("the body", [Problem(("source",), said, f"there are {', '.join(known[:20]) or 'none'}")])
