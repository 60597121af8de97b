"""How the subscriptions of a delivery are spread over tasks."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.base import BEGINNING, SourcePartition, SubscriptionSpec
from evermark.delivery.work import Assignment, DeliveryOptions, Span
from evermark.secrets import KeyRef, SecretBox
from evermark.spark import deliver
from evermark.spark.deliver import PostApart, SparkDeliverer, shared_by_name


def assignment(name: str, rows: int) -> Any:
    return SimpleNamespace(spec=SimpleNamespace(name=name), span=SimpleNamespace(rows=rows))


@given(st.lists(st.tuples(st.sampled_from("abcdefgh"), st.integers(0, 100)), min_size=1), st.integers(1, 10))
def test_each_assignment_is_in_one_part_and_a_subscription_in_one(what: list[tuple[str, int]], parts_max: int) -> None:
    """GIVEN any assignments THEN none is lost or doubled, none of a subscription is apart, and no part is empty."""
    given_ones = [assignment(*one) for one in what]
    parts = shared_by_name(given_ones, parts_max)
    assert sorted(map(id, given_ones)) == sorted(id(one) for part in parts for one in part)
    names = [{one.spec.name for one in part} for part in parts]
    assert all(names) and len(parts) <= parts_max
    assert sum(map(len, names)) == len(set.union(*names))


def test_parts_are_about_equally_large() -> None:
    """GIVEN a large subscription and small ones THEN the large one is alone."""
    parts = shared_by_name([assignment("big", 100), *(assignment(f"s{n}", 10) for n in range(5))], 2)
    assert sorted(sum(one.span.rows for one in part) for part in parts) == [50, 100]


def test_d10_every_task_that_posts_is_told_of_the_deployments_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a deployment that shares its rates WHEN a delivery is spread over two tasks THEN each shares them."""
    begun: list[PostApart] = []

    def run_tasks(_context: Any, _count: int, work: PostApart, _failed: str) -> list[Any]:
        begun.append(work)
        return []

    def share_rates() -> AbstractContextManager[None]:
        return nullcontext()

    monkeypatch.setattr(deliver, "run_tasks", run_tasks)
    context: Any = SimpleNamespace(master="spark://cluster", defaultParallelism=4)
    span = Span(SourcePartition("shop", 0), BEGINNING, 1, ("file",), 1)
    mine = [Assignment(span, SubscriptionSpec(name, "https://example.org/in")) for name in ("a", "b")]
    SparkDeliverer(context, SecretBox(KeyRef("env", "KEY")), share_rates).deliver(mine, DeliveryOptions())
    assert [post.posting.share_rates for work in begun for post in work.posts] == [share_rates, share_rates]
