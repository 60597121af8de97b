"""How much of a budget is left for sending when its rows were hard to find."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from evermark.delivery.run import post
from evermark.delivery.run.matched_here import matched_here
from evermark.delivery.run.post import MatchedRows, Posting
from evermark.delivery.webhook.base import Job
from evermark.delivery.work import DeliveryOptions
from evermark.secrets import KeyRef, SecretBox
from tests.unit.delivery.run.test_matched_here import PAYLOADS, assignments, span_of

BUDGET_S = 0.5


class Sending:
    """Instead of sinks: how much time each piece was given."""

    left_s: list[float]

    def deliver_each(self, jobs: Sequence[Job], left_s: float, *_: object) -> Iterator[Any]:
        type(self).left_s.append(left_s)
        yield from ()


@pytest.mark.parametrize("historical", [True, False])
def test_d10_however_long_rows_are_looked_for_a_reader_that_is_behind_is_sent_some(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, historical: bool
) -> None:
    """GIVEN rows that are found when the budget is over WHEN they are sent to a reader that is behind THEN it has the
    budget for sending; the live group, for which others wait, has none left. Rates are shared for as long."""
    monkeypatch.setattr(Sending, "left_s", [], raising=False)
    monkeypatch.setattr(post, "Sinks", Sending)
    mine = assignments(span_of(tmp_path, PAYLOADS), (None,))
    rows = matched_here(mine).found
    assert rows is not None
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(post, "time", clock)
    shares: list[AbstractContextManager[None]] = []

    def found() -> Iterator[MatchedRows]:
        assert len(shares) == 1
        clock.now += 2 * BUDGET_S
        yield rows

    def share() -> AbstractContextManager[None]:
        shares.append(nullcontext())
        return shares[-1]

    options = DeliveryOptions(historical=historical, budget_s=BUDGET_S)
    list(Posting(tuple(mine), SecretBox(KeyRef("env", "KEY")), options, share).results(found=found()))
    assert Sending.left_s == [BUDGET_S if historical else 0.0]
