"""When a server hangs, by what was seen of it. Pure."""

from __future__ import annotations

import pytest

from evermark.embedded.hang import Answer, HangClock, Seen

HUNG = Seen(7, Answer.NOT_NOW)
EVERY_S = 10.0


def when_hung(*looks: Seen | None, every_s: float = EVERY_S) -> int | None:
    """At which of the looks the server counts as hung; None: at none."""
    clock = HangClock(60.0, EVERY_S)
    said = [clock.hung(seen, 1000.0 + every_s * number) for number, seen in enumerate(looks)]
    return said.index(True) if True in said else None


def test_a_server_that_lets_nobody_in_and_does_not_recover_hangs_after_a_minute() -> None:
    """GIVEN a server without a startup process WHEN it says "not now" for a minute THEN it hangs, and not before."""
    assert when_hung(*[HUNG] * 6) is None
    assert when_hung(*[HUNG] * 7) == 6


@pytest.mark.parametrize(
    "honest",
    [
        Seen(7, Answer.NOT_NOW, recovers=True),
        Seen(7, Answer.NOT_NOW, stops=True),
        Seen(7, Answer.IN),
        Seen(7, Answer.NONE),
        None,
    ],
    ids=["recovers", "stops", "lets in", "says nothing", "gone"],
)
def test_a_server_that_recovers_stops_serves_or_says_nothing_is_left_alone(honest: Seen | None) -> None:
    """GIVEN such a server WHEN it stays so for ever, or was so a moment ago THEN it does not hang."""
    assert when_hung(*[honest] * 1000) is None
    assert when_hung(*[*[HUNG] * 6, honest] * 10) is None


def test_each_server_has_a_minute_of_its_own() -> None:
    """GIVEN a server that was ended and started again WHEN also the new one says "not now" THEN its minute begins."""
    assert when_hung(*[HUNG] * 6, *[Seen(8, Answer.NOT_NOW)] * 6) is None


def test_a_long_time_without_a_look_is_no_minute_of_hanging() -> None:
    """GIVEN a process that was stopped for an hour between two looks WHEN both see a server about to recover THEN it
    does not hang: what was in between is not known."""
    assert when_hung(HUNG, HUNG, every_s=3600.0) is None
