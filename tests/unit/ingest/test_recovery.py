"""When a gap is closed without asking, and when enough is enough."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from evermark.errors import BusyError, EvermarkError, GapError, IdentityError, SetupError
from evermark.ingest.repair.base import Choice, Recovery, Step, exhausted, given_up, may_open

NOW = datetime(2026, 11, 15, 12, tzinfo=UTC)
ONE = Recovery(1, "shop", 0, Choice.REPAIR, False, "lost", "", Step.DONE, None, 0, 0, "", NOW, NOW)


@pytest.mark.parametrize(
    ("error", "opened"),
    [
        (GapError("a slot was lost"), True),
        (IdentityError("another server"), False),
        (SetupError("no wal_level"), False),
        (BusyError("in use"), False),
        (EvermarkError("unknown"), False),
    ],
)
def test_only_a_gap_in_our_own_source_is_closed_unasked(error: EvermarkError, opened: bool) -> None:
    """Another server's events are not ours to take: a person must say so."""
    assert may_open(error) is opened


def many(*recoveries: Recovery) -> list[Recovery]:
    return [replace(recovery, id=n) for n, recovery in enumerate(recoveries)]


def test_three_tries_within_the_hour_are_enough() -> None:
    """A slot that is lost over and over is not repaired by repairing it once more."""
    assert not exhausted(many(ONE, ONE), NOW)
    assert exhausted(many(ONE, ONE, ONE), NOW)
    assert exhausted(many(replace(ONE, tries=3, step=Step.FAILED)), NOW)


def test_old_tries_do_not_count() -> None:
    """GIVEN three tries WHEN an hour has passed THEN there may be another."""
    assert not exhausted(many(ONE, ONE, ONE), NOW + timedelta(hours=1, seconds=1))


def test_a_persons_word_begins_the_count_anew() -> None:
    """GIVEN all tries spent WHEN a person asks for one more THEN only what came after it counts."""
    asked = replace(ONE, by_person=True)
    assert not exhausted(many(ONE, ONE, ONE, asked), NOW)
    assert exhausted(many(ONE, ONE, ONE, asked, ONE, ONE, ONE), NOW)


def test_giving_up_says_where_to_read_on() -> None:
    """The last error, and the page of the playbook."""
    error = given_up(GapError("the slot was lost again", hint="see `evermark doctor`"))
    assert "the slot was lost again" in error.message and "playbook" in error.hint and "source recover" in error.hint


def test_giving_up_on_what_is_not_set_up_says_what_sets_it_up() -> None:
    """Not what helps against a slot that is lost for another reason."""
    error = given_up(SetupError("no table t", hint="take it out of the file"))
    assert "no table t" in error.message and error.hint.startswith("take it out of the file. Then `evermark source")
    assert "max_slot_wal_keep_size" not in error.hint
