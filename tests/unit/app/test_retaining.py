"""What the owner of a source tells the care of its log."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from evermark.app.ingesting import SourceRunner


def test_a_gap_that_is_found_while_the_log_is_cared_for_keeps_its_events() -> None:
    """GIVEN a round of care that began while nothing was wrong WHEN a gap is found before old events leave the log THEN
    they stay: the answer of before is not used."""
    allowed = [True, False]
    owner = SimpleNamespace(may_retain=lambda: allowed.pop(0))
    delivery = SimpleNamespace(least_cursors=lambda _: {0: 7})
    runner = cast("Any", SimpleNamespace(_owner=owner, delivery=delivery, name="shop"))
    assert [SourceRunner._least_cursors(runner) for _ in range(2)] == [{0: 7}, {}]
