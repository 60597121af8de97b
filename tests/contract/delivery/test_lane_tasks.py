"""What a lane posts by itself, and what it asks the driver's Spark for. A real receiver, no JVM."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pyarrow.parquet as pq
import pytest

from evermark.app.lane import DriverTasks
from evermark.delivery.model import Cursor, Fate, Outcome, SourcePartition, SubscriptionSpec
from evermark.delivery.run.matched_here import ROWS_MAX
from evermark.delivery.webhook.signing import new_secret
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.errors import EngineError, FormatError
from evermark.event import taken_batch
from evermark.log.write import BatchWriter
from evermark.runtime import Threads
from evermark.secrets import KeyRef, SecretBox
from evermark.spark.channel import LaneEnd
from evermark.testing.listener import Listener

SECRET = new_secret()


class Driver:
    """Notes for whom Spark was asked, and says that they are done."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[list[str]] = []
        self.error = error

    def call(self, name: str, assignments: Sequence[Assignment], _: DeliveryOptions) -> list[Outcome]:
        assert name == "deliver"
        self.asked.append([one.spec.name for one in assignments])
        if self.error is not None:
            raise self.error
        return [Outcome(one.spec.name, Fate.DONE, reached=Cursor(one.span.to)) for one in assignments]


@pytest.fixture
def receiver() -> Iterator[Listener]:
    with Listener(secrets=[SECRET]) as listener:
        yield listener


@pytest.fixture
def box(monkeypatch: pytest.MonkeyPatch) -> SecretBox:
    monkeypatch.setenv("LANE_KEY", "a key for this test only")
    return SecretBox(KeyRef("env", "LANE_KEY"))


def assignments(folder: Path, box: SecretBox, url: str, wheres: Sequence[str | None]) -> list[Assignment]:
    payloads = ['{"t": "a"}', '{"t": "b"}', '{"t": "a"}']
    columns: dict[str, Any] = {
        "event_id": [f"e{n}" for n in range(3)],
        "position": [f"{n:04}" for n in range(3)],
        "stream": ["s"] * 3,
        "op": ["insert"] * 3,
        "payload": payloads,
    }
    file = BatchWriter(folder, "shop", 0, 1).write_all([taken_batch(columns, 3)])
    assert file is not None
    path = str(folder / file.path)
    span = Span(SourcePartition("shop", 0), Cursor(0), 1, (path,), 3, exact=True, fresh=pq.read_table(path))
    return [
        Assignment(
            span,
            SubscriptionSpec(
                f"s{n}", url, (box.seal(SECRET),), where=where, concurrency=1, allow_networks=("127.0.0.0/8",)
            ),
        )
        for n, where in enumerate(wheres)
    ]


def tasks(driver: Driver, box: SecretBox) -> DriverTasks:
    return DriverTasks(cast("LaneEnd", driver), box, Threads())


@pytest.mark.parametrize(
    ("wheres", "asked", "accepted"),
    [
        (["data.t = 'a'", None], [], [2, 3]),
        (["data.t = 'a'", "data.t rlike '^a'", "data.t = 'z'"], [["s1"]], [2, 0, 0]),
        (["data.t rlike '^a'"], [["s0"]], [0]),
        (["data.t = 'z'"], [], [0]),
    ],
)
def test_a_lane_posts_what_it_can_match_and_spark_the_rest(
    tmp_path: Path,
    receiver: Listener,
    box: SecretBox,
    wheres: list[str | None],
    asked: list[list[str]],
    accepted: list[int],
) -> None:
    """GIVEN a fresh batch WHEN delivered THEN Spark is asked for what has no exact form; outcomes keep their order."""
    driver = Driver()
    mine = assignments(tmp_path, box, receiver.url, wheres)
    outcomes = tasks(driver, box).deliver(mine, DeliveryOptions())
    assert driver.asked == asked
    assert [outcome.subscription for outcome in outcomes] == [one.spec.name for one in mine]
    assert [outcome.accepted for outcome in outcomes] == accepted
    assert all(outcome.fate is Fate.DONE and outcome.reached == Cursor(1) for outcome in outcomes)
    assert len(receiver.records) == sum(accepted)


def test_an_error_of_spark_is_that_of_its_own_subscriptions(tmp_path: Path, receiver: Listener, box: SecretBox) -> None:
    """GIVEN a job that fails beside the posts of the lane WHEN delivered THEN nobody is sent the batch again for it."""
    driver = Driver(EngineError("no job today"))
    mine = assignments(tmp_path, box, receiver.url, ["data.t = 'a'", "data.t rlike '^a'"])
    done, left = tasks(driver, box).deliver(mine, DeliveryOptions())
    assert (done.subscription, done.fate, done.accepted) == ("s0", Fate.DONE, 2)
    assert (left.subscription, left.fate, left.reason) == ("s1", Fate.UNFINISHED, "no job today")
    assert len(receiver.records) == 2
    with pytest.raises(EngineError, match="no job today"):
        tasks(driver, box).deliver(mine[1:], DeliveryOptions())
    driver.error = FormatError("the file x is missing", hint="put it back")
    _, left = tasks(driver, box).deliver(mine, DeliveryOptions())
    assert (left.fate, left.reason) == (Fate.STUCK, "the file x is missing; put it back")


@pytest.mark.parametrize(
    ("wheres", "slack_s", "asked"),
    [
        (["data.t = 'a'", None], None, [["s0", "s1"]]),
        (["data.t = 'a'", "data.t rlike '^a'", None], None, [["s0", "s2"], ["s1"]]),
        (["data.t = 'a'", "data.t rlike '^a'", None], 1.0, [["s0", "s1", "s2"]]),
        (["data.t rlike '^a'"], None, [["s0"]]),
    ],
)
def test_those_that_spark_has_to_match_are_a_job_of_their_own(
    tmp_path: Path,
    receiver: Listener,
    box: SecretBox,
    wheres: list[str | None],
    slack_s: float | None,
    asked: list[list[str]],
) -> None:
    """GIVEN a batch that tasks are to post WHEN Spark has to match for some THEN the others do not wait for it, but for
    the live group: there who is slow is measured by the others."""
    driver = Driver()
    mine = assignments(tmp_path, box, receiver.url, wheres)
    many = [replace(one, span=replace(one.span, rows=ROWS_MAX + 1)) for one in mine]
    outcomes = tasks(driver, box).deliver(many, DeliveryOptions(slack_s=slack_s))
    assert sorted(driver.asked) == asked
    assert [outcome.subscription for outcome in outcomes] == [one.spec.name for one in mine]
