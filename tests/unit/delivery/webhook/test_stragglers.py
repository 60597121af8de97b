"""How long the quick wait for the slow: fair to those who have more to send, and never for ever."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.webhook.sink import Stragglers


def test_nobody_is_hurried_before_half_are_done() -> None:
    """GIVEN five jobs WHEN two are done THEN nobody is cut off; WHEN a third is THEN the other two have some time."""
    patience = Stragglers([1] * 5, slack_s=0.5)
    patience.finished(0, 0.01)
    patience.finished(1, 0.02)
    assert patience.next_s() is None
    patience.finished(2, 0.03)
    assert patience.next_s() == 0.53
    assert patience.over(0.5) == []
    assert sorted(patience.over(0.6)) == [3, 4]
    # THEN each is named once, and the late answer of one starts no new wait
    assert patience.over(99.0) == []
    patience.finished(3, 0.61)
    assert patience.next_s() is None


def test_a_healthy_one_with_more_to_send_gets_the_time_for_it() -> None:
    """GIVEN one event for one receiver and 20 000 for another WHEN the first is done THEN the other is not cut off."""
    patience = Stragglers([10, 20_000, 10], slack_s=0.5)
    patience.finished(0, 0.002)
    patience.finished(2, 0.002)
    assert patience.over(7.9) == []
    assert patience.over(8.1) == [1]
    # WHEN it has more than anybody can wait for THEN they do not wait for all of it
    patience = Stragglers([1, 2_000_000, 1], slack_s=0.5)
    patience.finished(0, 0.002)
    patience.finished(2, 0.002)
    assert patience.over(10.1) == [1]


def test_without_slack_nobody_is_cut_off() -> None:
    """GIVEN no slack WHEN the others are long done THEN there is no hurry."""
    patience = Stragglers([1, 1], slack_s=None)
    patience.finished(0, 0.1)
    assert patience.next_s() is None
    assert patience.over(1e9) == []


@given(st.lists(st.integers(0, 10**6), min_size=1, max_size=8), st.data())
def test_whoever_is_not_done_is_cut_off_in_the_end(work: list[int], data: st.DataObject) -> None:
    """GIVEN any work WHEN half are done THEN everybody else gets at least the slack, and is cut off some time."""
    order = data.draw(st.permutations(range(len(work))))
    patience = Stragglers(work, slack_s=0.5)
    done = order[: len(work) - len(work) // 2]
    for at, job in enumerate(done):
        patience.finished(job, 0.1 * (at + 1))
    half_at = 0.1 * len(done)
    assert patience.over(half_at + 0.49) == []
    assert sorted(patience.over(1e12)) == sorted(set(range(len(work))) - set(done))
