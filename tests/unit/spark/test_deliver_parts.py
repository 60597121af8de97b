"""How the subscriptions of a delivery are spread over tasks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.decide.key_parts import cut_by_key
from evermark.delivery.model import BEGINNING, BotSpec, SourcePartition, SubscriptionSpec
from evermark.delivery.run.matched_here import ROWS_MAX
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.errors import EngineError
from evermark.secrets import KeyRef, SecretBox
from evermark.spark import deliver, parts
from evermark.spark.deliver import SparkDeliverer
from evermark.spark.parts import PostApart, Slots, shared_out


def assignment(name: str, rows: int) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(name=name), span=SimpleNamespace(rows=rows), part=None)


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 100)), min_size=1), st.integers(1, 10))
def test_each_assignment_is_in_one_part_and_a_subscription_in_one(what: list[tuple[str, int]], parts_max: int) -> None:
    """GIVEN any assignments THEN none is lost or doubled, none of a subscription is apart, and no part is empty."""
    given_ones = [assignment(*one) for one in what]
    shares = shared_out(given_ones, parts_max)
    assert sorted(map(id, given_ones)) == sorted(id(one) for share in shares for one in share)
    names = [{one.spec.name for one in share} for share in shares]
    assert all(names) and len(shares) <= parts_max
    assert sum(map(len, names)) == len(set.union(*names))


def test_parts_are_about_equally_large() -> None:
    """GIVEN a large subscription and small ones THEN the large one is alone."""
    shares = shared_out([assignment("big", 100), *(assignment(f"s{n}", 10) for n in range(5))], 2)
    assert sorted(sum(one.span.rows for one in share) for share in shares) == [50, 100]


def test_d10_every_task_that_posts_is_told_of_the_deployments_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a deployment that shares its rates WHEN a delivery is spread over two tasks THEN each shares them."""
    begun: list[PostApart] = []

    def run_tasks(_context: Any, _count: int, work: PostApart, _failed: str) -> list[Any]:
        begun.append(work)
        return []

    def share_rates() -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(deliver, "run_tasks", run_tasks)
    monkeypatch.setattr(parts, "slots_of", lambda _context: 4)
    context: Any = SimpleNamespace(master="spark://cluster")
    span = Span(SourcePartition("shop", 0), BEGINNING, 1, ("file",), 1)
    mine = [Assignment(span, SubscriptionSpec(name, "https://example.org/in")) for name in ("a", "b")]
    SparkDeliverer(context, SecretBox(KeyRef("env", "KEY")), share_rates).deliver(mine, DeliveryOptions())
    assert [post.posting.share_rates for work in begun for post in work.posts] == [share_rates, share_rates]


def test_calls_share_the_slots_that_lanes_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN eight slots and a lane THEN a call alone gets six tasks, a second beside it three; on one machine one."""
    monkeypatch.setattr(parts, "slots_of", lambda _context: 8)
    there: Any = SimpleNamespace(master="spark://cluster")
    slots = Slots(there, lanes=1)
    with slots.tasks() as alone, slots.tasks() as second:
        assert (alone, second) == (6, 3)
    with slots.tasks() as again:
        assert again == 6
    here: Any = SimpleNamespace(master="local[16,4]")
    with Slots(here).tasks() as one:
        assert one == 1


def hot(rows: int, name: str = "hot", **more: Any) -> Assignment:
    span = Span(SourcePartition("shop", 0), BEGINNING, 1, ("file",), rows)
    return Assignment(span, SubscriptionSpec(name, "https://example.org/in", **more))


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 9_000)), unique_by=lambda one: one[0]), st.data())
def test_parts_of_one_subscription_are_in_different_tasks(what: list[tuple[str, int]], data: st.DataObject) -> None:
    """GIVEN any assignments and tasks THEN each is whole or in all its parts, once each, and no two in one task."""
    tasks = data.draw(st.integers(1, 12))
    given_ones = [hot(rows, name, concurrency=data.draw(st.integers(1, 60))) for name, rows in what]
    shares = shared_out(cut_by_key(given_ones, tasks), tasks)
    assert len(shares) <= tasks
    for share in shares:
        assert len({one.spec.name for one in share}) == len(share)
    for whole in given_ones:
        mine = [one for share in shares for one in share if one.spec.name == whole.spec.name]
        numbers = sorted((one.part.number, one.part.of) for one in mine if one.part is not None)
        assert numbers == [(n, len(mine)) for n in range(len(mine))] or mine == [whole]
        assert sum(one.spec.concurrency for one in mine) == whole.spec.concurrency


def test_which_subscriptions_are_cut() -> None:
    """GIVEN a hot subscription THEN it is cut; not one that is seen as a whole, has few rows or few connections."""
    assert len(cut_by_key([hot(10_000)], 4)) == 4
    assert len(cut_by_key([hot(10_000), hot(10_000, "other")], 4)) == 4
    assert len(cut_by_key([hot(10_000, f"s{n}") for n in range(4)], 4)) == 4
    for whole in (
        hot(999),
        hot(10_000, concurrency=7),
        hot(10_000, rate_per_s=5.0),
        hot(10_000, bot=BotSpec("shop", "me")),
        replace(hot(10_000), probe=True),
        hot(10_000, where="op = 'insert'"),
    ):
        assert cut_by_key([whole], 4) == [whole]
    assert cut_by_key([hot(10_000)], 1) == [hot(10_000)]


@pytest.mark.parametrize("in_doubt", [{"b"}, {"a", "b"}])
@pytest.mark.parametrize("slack_s", [1.0, None])
def test_nobody_is_sent_a_span_again_because_spark_failed_for_others(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, in_doubt: set[str], slack_s: float | None
) -> None:
    """GIVEN a task that could not match for some WHEN the job that matches for them fails THEN the others are done; it
    is an error only if there are no others. While the live group waits for it, that job has little time."""
    asked: list[tuple[list[str], float | None]] = []

    def run_tasks(*_: object) -> list[Any]:
        return [{parts.IN_DOUBT: name, "task": 0} for name in sorted(in_doubt)]

    def by_spark(_: Any, _given: object, mine: list[Assignment], options: DeliveryOptions) -> list[Any]:
        asked.append(([one.spec.name for one in mine], options.budget_s))
        raise EngineError("no job today")

    monkeypatch.setattr(deliver, "run_tasks", run_tasks)
    monkeypatch.setattr(SparkDeliverer, "_matched_by_spark", by_spark)
    file = tmp_path / "batch.parquet"  # there, so that it is not what the error is about
    pq.write_table(pa.table({"position": [1]}), file)
    span = Span(SourcePartition("shop", 0), BEGINNING, 1, (str(file),), ROWS_MAX + 1)
    mine = [Assignment(span, SubscriptionSpec(n, "https://example.org/in", where="data.t = 'a'")) for n in "ab"]
    deliverer = SparkDeliverer(cast("Any", SimpleNamespace(master="local[2]")), SecretBox(KeyRef("env", "KEY")))
    options = DeliveryOptions(budget_s=100.0, slack_s=slack_s)
    if len(in_doubt) == 2:
        with pytest.raises(EngineError, match="no job today"):
            deliverer.deliver(mine, options)
    else:
        assert [one.subscription for one in deliverer.deliver(mine, options)] == ["a", "b"]
    assert asked == [(sorted(in_doubt), 10.0 if slack_s else 100.0)]
