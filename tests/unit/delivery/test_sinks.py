"""A subscription's events go to the sink of its url's scheme; several sinks work side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa
import pytest

from evermark.delivery import sinks
from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import Fate, Outcome
from evermark.delivery.sinks import Sinks
from evermark.delivery.webhook.base import Answer, Job, Prefix, Try
from evermark.delivery.work import Result
from evermark.testing.contracts.scene import P0, spec


class Recorder:
    """A sink that takes everything, once `ready` says so."""

    def __init__(self, *, low_priority: bool = False) -> None:
        self.low_priority = low_priority
        self.got: list[str] = []
        self.ready = threading.Event()
        self.ready.set()
        self.closed = False
        MADE[type(self).__name__] = self

    def deliver_each(self, jobs: Sequence[Job], *_: Any) -> Iterator[list[Result]]:
        for job in jobs:
            assert self.ready.wait(30)
            self.got.append(job.spec.name)
            yield [Result(P0, 1, Outcome(job.spec.name, Fate.DONE))]

    def deliver_prefix(self, job: Job, *_: Any) -> Prefix:
        return Prefix(0, Outcome(type(self).__name__, Fate.DONE))

    def attempt(self, tries: Sequence[Try], _deadline_s: float) -> list[Answer]:
        return [Answer(Verdict.ACCEPTED, reason=f"{type(self).__name__} {one.spec.name}") for one in tries]

    def close(self) -> None:
        self.closed = True


class Broken(Recorder):
    def deliver_each(self, jobs: Sequence[Job], *_: Any) -> Iterator[list[Result]]:
        raise RuntimeError("no sink")


class Other(Recorder):
    pass


MADE: dict[str, Recorder] = {}


@pytest.fixture(autouse=True)
def schemes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sinks, "SINKS", {"https": Recorder, "other": Other, "broken": Broken})
    monkeypatch.setattr(sinks, "_DEFAULT", Recorder)


def job(name: str, scheme: str) -> Job:
    return Job(spec(name, url=f"{scheme}://{name}.example"), pa.table({}))


def test_each_job_goes_to_the_sink_of_its_scheme_and_none_waits_for_another_sink() -> None:
    """GIVEN jobs for two sinks, one of which stands still THEN the results of the other come all the same."""
    both = Sinks(low_priority=True)
    assert {made.low_priority for made in MADE.values()} == {True}
    MADE["Other"].ready.clear()
    found = both.deliver_each([job("a", "other"), job("b", "https"), job("c", "nonsense")], 5)
    assert [next(found)[0].subscription, next(found)[0].subscription] == ["b", "c"]
    MADE["Other"].ready.set()
    assert [some[0].subscription for some in found] == ["a"]
    assert (MADE["Recorder"].got, MADE["Other"].got) == (["b", "c"], ["a"])
    assert list(both.deliver_each([], 5)) == []
    assert both.deliver_prefix(job("d", "other"), 5).outcome.subscription == "Other"
    both.close()
    assert all(made.closed for made in MADE.values())


def test_a_sink_that_raises_is_heard() -> None:
    """GIVEN two sinks of which one raises THEN so does the whole."""
    with pytest.raises(RuntimeError):
        list(Sinks().deliver_each([job("a", "broken"), job("b", "https")], 5))


def test_answers_come_in_the_order_of_the_tries() -> None:
    """GIVEN tries for two sinks, mixed THEN each is answered by its own, and in its place."""
    tries = [Try(job(name, scheme).spec, "{}", 2) for name, scheme in (("a", "other"), ("b", "https"), ("c", "other"))]
    assert [answer.reason for answer in Sinks().attempt(tries, 5)] == ["Other a", "Recorder b", "Other c"]
