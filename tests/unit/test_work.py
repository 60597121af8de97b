"""D1: how far a reader may go after a piece of work. Only over batches all of whose events were accepted or parked."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.base import Fate, Outcome
from evermark.delivery.follower import stages
from evermark.delivery.live import group_outcome
from evermark.delivery.work import BatchResult, Delivered, Errand, Span, fold
from evermark.testing.contracts.scene import P0, event, spec

AFTER = 10
fates = st.sampled_from([*[Fate.DONE] * 4, *Fate])


@st.composite
def works(draw: st.DrawFn) -> tuple[Span, dict[int, Outcome]]:
    """A span of a few batches; of some of them, in any order, there are results: the others matched nothing."""
    span = Span(P0, AFTER, AFTER + draw(st.integers(1, 6)), ("f",), 10)
    batches = draw(st.lists(st.integers(AFTER + 1, span.to), unique=True))
    return span, {
        batch: Outcome("a", draw(fates), draw(st.integers(0, 3)), (event(batch),), f"batch {batch}", 7.0, 1)
        for batch in batches
    }


def folded(work: tuple[Span, dict[int, Outcome]]) -> Delivered:
    span, outcomes = work
    (found,) = fold(
        [Errand(span, spec("a"))], [BatchResult("a", batch, outcome) for batch, outcome in outcomes.items()]
    )
    return found


@given(works())
def test_d1_no_batch_is_passed_that_was_not_done(work: tuple[Span, dict[int, Outcome]]) -> None:
    """GIVEN results in any order WHEN folded THEN it ends right before the first that is not done, and says why."""
    span, outcomes = work
    found = folded(work)
    broken = [batch for batch in sorted(outcomes) if outcomes[batch].fate is not Fate.DONE]
    assert found.done_to == (broken[0] - 1 if broken else span.to)
    assert found.outcome.fate is (outcomes[broken[0]].fate if broken else Fate.DONE)
    if broken:
        assert (found.outcome.reason, found.outcome.retry_after_s) == (f"batch {broken[0]}", 7.0)


@given(works())
def test_d1_what_was_parked_and_expired_on_the_way_is_kept_and_nothing_beyond(
    work: tuple[Span, dict[int, Outcome]],
) -> None:
    """GIVEN refusals WHEN folded THEN exactly those of passed batches are parked: the others are sent once more."""
    _, outcomes = work
    found = folded(work)
    passed = [batch for batch in sorted(outcomes) if batch <= found.done_to]
    assert [parked.batch for parked in found.outcome.parked] == passed
    assert found.outcome.expired == len(passed)


@given(works())
def test_d1_a_follower_settles_what_was_done_and_then_the_failure(work: tuple[Span, dict[int, Outcome]]) -> None:
    """GIVEN a span that ended anywhere WHEN settled THEN only a stage that is done and complete carries parked rows."""
    span, _ = work
    found = folded(work)
    at, parked, expired = span.after, 0, 0
    for done_to, outcome in stages(span, found):
        assert done_to > at
        at = done_to
        if outcome.fate is Fate.DONE:
            assert done_to == found.done_to
            parked, expired = parked + len(outcome.parked), expired + outcome.expired
        else:
            assert (outcome.parked, outcome.expired, outcome.accepted) == ((), 0, 0)
            assert (outcome.fate, outcome.retry_after_s) == (found.outcome.fate, 7.0)
    if found.done_to > span.after:
        assert (parked, expired) == (len(found.outcome.parked), found.outcome.expired)
    assert stages(span, found)[-1][1].fate is found.outcome.fate


@given(works())
def test_d1_a_member_that_did_not_finish_takes_nothing_with_it(work: tuple[Span, dict[int, Outcome]]) -> None:
    """It leaves at the span's beginning, so what it parked on the way comes again and must not be there twice."""
    found = folded(work)
    outcome = group_outcome(found)
    assert outcome.fate is found.outcome.fate
    if outcome.fate is Fate.DONE:
        assert outcome == found.outcome
    else:
        assert (outcome.parked, outcome.expired) == ((), 0)


@given(works())
def test_d1_somebody_without_a_result_had_nothing_to_get(work: tuple[Span, dict[int, Outcome]]) -> None:
    """GIVEN several subscriptions WHEN folded THEN there is one result each, and none is lost among them."""
    span, outcomes = work
    results = [BatchResult("a", batch, outcome) for batch, outcome in outcomes.items()]
    found = {one.subscription: one for one in fold([Errand(span, spec(name)) for name in "ab"], results)}
    assert found["a"] == folded(work)
    assert found["b"] == Delivered("b", span.to, Outcome("b", Fate.DONE))
