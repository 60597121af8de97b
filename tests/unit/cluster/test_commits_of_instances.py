"""What chaos says of the commits of several instances: that it would see one that breaks a promise."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from evermark.log.format import CommitNote
from evermark.testing.instances import broken_promise


def _commits(*epochs_and_batches: tuple[int, int]) -> Sequence[CommitNote]:
    return [CommitNote(0, batch, epoch, "", "", 1, ()) for epoch, batch in epochs_and_batches]


def test_commits_of_one_owner_after_the_other_break_no_promise() -> None:
    """GIVEN two owners, one after the other WHEN their commits are looked at THEN nothing is told."""
    assert broken_promise(_commits((3, 1), (3, 2), (7, 3), (7, 4))) is None


@pytest.mark.parametrize(
    ("commits", "told"),
    [
        (((3, 1), (7, 2), (3, 3)), "a stale owner"),
        (((3, 1), (3, 2), (7, 2)), "one after the other"),
        (((3, 1), (3, 2), (7, 4)), "one after the other"),
        (((3, 2), (3, 3)), "one after the other"),
    ],
    ids=["stale", "twice", "gap", "beginning"],
)
def test_a_commit_that_breaks_a_promise_is_told(commits: tuple[tuple[int, int], ...], told: str) -> None:
    """GIVEN a commit of a stale owner, or a number that is not the next one WHEN looked at THEN it is told."""
    assert told in (broken_promise(_commits(*commits)) or "")
