"""Where reading begins again, decided from what the log, the head and the checkpoint say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.checkpoints.base import Checkpoint
from evermark.errors import FormatError
from evermark.ingest.dedup import looked_up_from
from evermark.ingest.resume import Resume, resume
from evermark.log.base import Tail
from evermark.log.head import NO_VERSION, Head

positions = st.integers(0, 99).map("{:03}".format)


def head(batch: int, passed: str = "") -> Head:
    return Head(batch, 1, f"{10 * batch:03}", batch, passed, batch)


def test_nothing_yet_begins_at_the_source_s_beginning() -> None:
    """No log, no checkpoint: the source says where."""
    assert resume(Tail(0, 1, None), None, None, None, "shop/0") == Resume(None, 0)


def test_a_checkpoint_of_the_last_batch_is_where_to_go_on() -> None:
    """It may stand beyond the batch's end: empty batches move it alone."""
    assert resume(Tail(3, 1, "030"), head(3), Checkpoint("044", 3, 1), "029", "shop/0") == Resume("044", 3)
    assert resume(Tail(0, 1, None), None, Checkpoint("044", 0, 1), None, "shop/0") == Resume("044", 0)


@pytest.mark.parametrize("checkpoint", [None, Checkpoint("020", 2, 1)])
def test_what_was_passed_without_events_is_known_without_the_checkpoint(checkpoint: Checkpoint | None) -> None:
    """GIVEN a head that notes what was passed behind its batch WHEN the checkpoint is lost, or an old one was put back
    THEN reading goes on behind it: the source may have forgotten the rest."""
    assert resume(Tail(3, 1, "030"), head(3, "044"), checkpoint, "029", "shop/0") == Resume("044", 3)


@pytest.mark.parametrize(("passed", "goes_on"), [("", "007"), ("044", "044")])
def test_a_partition_that_never_had_an_event_goes_on_where_it_began(passed: str, goes_on: str) -> None:
    """GIVEN a partition that has begun, and no batch in the log WHEN its checkpoint is lost THEN reading goes on where
    it began, or what it passed since, and not at what is the source's earliest by now."""
    begun = Head(0, 1, "007", NO_VERSION, passed)
    assert resume(Tail(0, 1, None), begun, None, None, "shop/0") == Resume(goes_on, 0)
    assert resume(Tail(0, 1, None), begun, Checkpoint("055", 0, 1), None, "shop/0") == Resume("055", 0)
    assert resume(Tail(1, 1, "030"), begun, None, "029", "shop/0") == Resume("030", 1), "its first batch was committed"


def test_a_checkpoint_says_it_better_than_the_head() -> None:
    """GIVEN both of the last batch THEN the checkpoint counts: a program of before notes nothing in the head."""
    assert resume(Tail(3, 1, "030"), head(3, "044"), Checkpoint("055", 3, 1), "029", "shop/0") == Resume("055", 3)


def test_what_was_passed_before_the_last_batch_says_nothing() -> None:
    """GIVEN a process that ended between commit and head THEN the log says more than the head."""
    assert resume(Tail(3, 1, "030"), head(2, "025"), None, "029", "shop/0") == Resume("030", 3)


def test_what_an_older_program_left_behind_another_batch_says_nothing() -> None:
    """GIVEN a head that a program of before moved on, and left what was passed as it was THEN the log's end counts."""
    moved = replace(head(3, "025"), passed_batch=2)
    assert resume(Tail(3, 1, "030"), moved, None, "029", "shop/0") == Resume("030", 3)


def test_a_batch_the_checkpoint_does_not_know_is_not_read_again() -> None:
    """The process ended between commit and checkpoint: the log's own note says where the batch ended."""
    for checkpoint in (None, Checkpoint("020", 2, 1)):
        assert resume(Tail(3, 1, "030"), head(2), checkpoint, "029", "shop/0") == Resume("030", 3)


def test_a_batch_whose_end_nobody_knows_is_read_again_and_excluded() -> None:
    """From the checkpoint, or from the last event, with what is logged left out by id."""
    assert resume(Tail(3, 1, None), head(2), Checkpoint("020", 2, 1), "029", "shop/0") == Resume("020", 3, "029")
    assert resume(Tail(3, 1, None), head(2), None, "029", "shop/0") == Resume("029", 3, "029")


def test_exclusion_is_remembered_by_the_log_and_not_by_the_checkpoint() -> None:
    """A second crash right after the first: the checkpoint knows the batch, and still stands before its events."""
    assert resume(Tail(3, 2, None), head(3), Checkpoint("020", 3, 2), "029", "shop/0") == Resume("020", 3, "029")


@given(st.integers(0, 9), st.integers(0, 9), st.none() | st.integers(0, 9), positions, st.none() | positions, positions)
def test_a_log_that_lacks_a_batch_known_to_be_taken_is_a_gap(
    tail: int, taken: int, checkpoint: int | None, at: str, end: str | None, logged_to: str
) -> None:
    """Whatever the rest says: a batch that was taken and is not there is never passed over in silence."""
    saved = None if checkpoint is None else Checkpoint(at, checkpoint, 1)
    known = max(taken, checkpoint or 0)
    moved = head(taken) if taken else None
    arguments = (Tail(tail, 1, end if tail else None), moved, saved, logged_to if tail else None, "shop/0")
    if tail < known:
        with pytest.raises(FormatError, match=f"batch {known} was taken"):
            resume(*arguments)
        return
    found = resume(*arguments)
    assert found.batch == tail
    if found.position is not None and tail and found.position <= logged_to:
        assert looked_up_from(found.position, found.position, found.repeats_to) == found.position


@given(positions, positions, st.none() | positions)
def test_exclusion_begins_early_enough(start: str, repeats_from: str, repeats_to: str | None) -> None:
    """At or before both the start and where the source may repeat from; none only when nothing can repeat."""
    excluded = looked_up_from(start, repeats_from, repeats_to)
    if repeats_from < start:
        assert excluded == repeats_from
    elif repeats_to is not None and start <= repeats_to:
        assert excluded == start
    else:
        assert excluded is None
