"""D1: how far a reader may go after a piece of work. Only over batches all of whose events were accepted or parked."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.model import Cursor, Fate, Outcome
from evermark.delivery.run.live import group_outcome, stages
from evermark.delivery.work import Assignment, Result, Span, fold
from evermark.testing.contracts.scene import P0, event, spec

AFTER = 10
fates = st.sampled_from([*[Fate.DONE] * 4, *Fate])
Work = tuple[Span, dict[int, Outcome], str | None]


@st.composite
def works(draw: st.DrawFn) -> Work:
    """A span of a few batches; of some of them, in any order, there are results: the others matched nothing. It may
    begin inside a batch, and each result may say how far it got inside.
    """
    begun = draw(st.sampled_from(["", "000004"]))
    span = Span(P0, Cursor(AFTER, begun), AFTER + draw(st.integers(1, 6)), ("f",), 10)
    batches = draw(st.lists(st.integers(AFTER + 1, span.to), unique=True))
    outcomes = {
        batch: Outcome("a", draw(fates), draw(st.integers(0, 3)), (event(batch),), f"batch {batch}", 7.0, 1)
        for batch in batches
    }
    return span, outcomes, draw(st.sampled_from([None, "000007"]))


def folded(work: Work) -> Outcome:
    span, outcomes, through = work
    results = [Result(P0, batch, outcome, through) for batch, outcome in outcomes.items()]
    (found,) = fold([Assignment(span, spec("a"))], results)
    return found


@given(works())
def test_d1_no_batch_is_passed_that_was_not_done(work: Work) -> None:
    """GIVEN results in any order WHEN folded THEN it ends right before the first that is not done, and says why."""
    span, outcomes, _ = work
    found = folded(work)
    broken = [batch for batch in sorted(outcomes) if outcomes[batch].fate is not Fate.DONE]
    assert found.reached.batch == (broken[0] - 1 if broken else span.to)
    assert found.fate is (outcomes[broken[0]].fate if broken else Fate.DONE)
    if broken:
        assert (found.reason, found.retry_after_s) == (f"batch {broken[0]}", 7.0)


@given(works())
def test_d1_a_batch_that_failed_in_its_middle_is_kept_as_far_as_it_was_done(work: Work) -> None:
    """GIVEN one that stopped inside a batch WHEN folded THEN it stands there; it never goes back."""
    span, _, through = work
    found = folded(work)
    assert found.reached >= span.begun
    if found.fate is Fate.DONE:
        assert found.reached == Cursor(span.to)
    else:
        begun = span.begun.through if found.reached.batch == span.after else ""
        assert found.reached.through == (through if through is not None else begun)


@given(works())
def test_d1_what_was_parked_and_expired_on_the_way_is_kept_and_nothing_beyond(work: Work) -> None:
    """GIVEN refusals WHEN folded THEN those are parked that are passed, inside a batch too; others are sent again."""
    _, outcomes, through = work
    found = folded(work)
    stopped_in = {found.reached.batch + 1} if through is not None and found.fate is not Fate.DONE else set()
    passed = [batch for batch in sorted(outcomes) if batch <= found.reached.batch or batch in stopped_in]
    assert [parked.batch for parked in found.parked] == passed
    assert found.expired == len(passed)


@given(works())
def test_d1_a_follower_settles_what_was_done_and_then_the_failure(work: Work) -> None:
    """GIVEN a span that ended anywhere WHEN settled THEN only a stage that is done and complete carries parked rows."""
    span, _, _ = work
    found = folded(work)
    at, parked, expired, accepted = span.begun, 0, 0, 0
    for done, outcome in stages(span, found):
        assert done > at
        at = done
        accepted += outcome.accepted
        if outcome.fate is Fate.DONE:
            assert done == found.reached
            parked, expired = parked + len(outcome.parked), expired + outcome.expired
        else:
            assert (outcome.parked, outcome.expired) == ((), 0)
            assert (outcome.fate, outcome.retry_after_s) == (found.fate, 7.0)
    assert accepted == found.accepted
    if found.reached > span.begun:
        assert (parked, expired) == (len(found.parked), found.expired)
    assert stages(span, found)[-1][1].fate is found.fate


@given(works())
def test_d1_a_member_that_did_not_finish_takes_nothing_with_it(work: Work) -> None:
    """It leaves where it got to, or at the span's beginning if something would have to be parked or counted."""
    found = folded(work)
    outcome = group_outcome(found)
    assert outcome.fate is found.fate
    if outcome.fate is Fate.DONE:
        assert outcome == found
    else:
        assert (outcome.parked, outcome.expired) == ((), 0)
        refused = found.parked or found.expired
        assert outcome.reached == (None if refused else found.reached)


@given(works())
def test_d1_somebody_without_a_result_had_nothing_to_get(work: Work) -> None:
    """GIVEN several subscriptions WHEN folded THEN there is one result each, and none is lost among them."""
    span, outcomes, through = work
    results = [Result(P0, batch, outcome, through) for batch, outcome in outcomes.items()]
    found = {one.subscription: one for one in fold([Assignment(span, spec(name)) for name in "ab"], results)}
    assert found["a"] == folded(work)
    assert found["b"] == replace(Outcome("b", Fate.DONE), reached=Cursor(span.to), took_s=0.0)
