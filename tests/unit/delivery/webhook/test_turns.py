"""Turns of subscriptions with a rate, whose moments are taken ahead."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from evermark.delivery.webhook import client
from evermark.delivery.webhook.client import HttpLoop

WHO = ("billing", None)
RATE_PER_S = 200.0


class FailingOnce:
    """Rates that fail once, in a way that nobody thought of."""

    def __init__(self, failing: int) -> None:
        self._failing = failing
        self.asked = 0

    def take(self, subscription: str, replay_id: str, span_s: float, wait_s: float) -> float | None:
        self.asked += 1
        if self.asked == self._failing:
            raise RuntimeError("no thread")
        return 0.0

    def rest(self) -> None:
        pass


@pytest.fixture
def http() -> Iterator[HttpLoop]:
    made = HttpLoop()
    yield made
    made.close()


def test_a_look_ahead_that_failed_costs_one_turn(http: HttpLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN moments taken ahead WHEN that fails once, in a way nobody thought of THEN the turn that waits for them
    fails, and the turns after it do not."""
    rates = FailingOnce(2)
    monkeypatch.setattr(client._PROCESS, "rates", rates)

    async def turns() -> list[bool | str]:
        got: list[bool | str] = []
        while rates.asked < 4 and len(got) < 1_000:
            try:
                got.append(await http.turn(WHO, RATE_PER_S, http.loop.time() + 5.0))
            except RuntimeError as problem:
                got.append(str(problem))
        return got

    got = http.submit(turns()).result(30)
    assert got.count("no thread") == 1 and set(got) == {True, "no thread"}
