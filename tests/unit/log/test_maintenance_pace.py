"""How often a log is maintained."""

from __future__ import annotations

from evermark.log.maintenance import EVERY_S_MAX, EVERY_S_MIN, next_round_s


def test_a_log_that_rests_is_maintained_once_a_minute() -> None:
    """GIVEN a round with nothing to do WHEN the next is asked for THEN it comes in a minute."""
    assert next_round_s(EVERY_S_MIN, has_grown=False, did_something=False, others_append=False) == EVERY_S_MAX == 60.0


def test_a_round_that_fails_is_tried_again_ever_later() -> None:
    """GIVEN rounds that fail WHEN the next is asked for THEN each comes later, a minute apart at most."""
    waits = [EVERY_S_MIN]
    for _ in range(10):
        waits.append(next_round_s(waits[-1], has_grown=False, did_something=None, others_append=False))
    assert waits[:4] == [1.0, 2.0, 4.0, 8.0]
    assert waits[-1] == EVERY_S_MAX


def test_a_log_that_grows_or_has_work_left_is_maintained_at_once() -> None:
    """GIVEN a log that rested WHEN it grows, or a round did something THEN the next round comes after a second."""
    for others in (False, True):
        assert next_round_s(60.0, has_grown=True, did_something=False, others_append=others) == EVERY_S_MIN
        assert next_round_s(60.0, has_grown=False, did_something=True, others_append=others) == EVERY_S_MIN


def test_a_log_to_which_others_append_is_looked_at_again_soon() -> None:
    """GIVEN a source whose partitions other instances read, too WHEN a round had nothing to do THEN the next comes
    later, and not in a minute at once: this instance does not hear how the log grows."""
    assert next_round_s(EVERY_S_MIN, has_grown=False, did_something=False, others_append=True) == 2 * EVERY_S_MIN
    assert next_round_s(50.0, has_grown=False, did_something=False, others_append=True) == EVERY_S_MAX
