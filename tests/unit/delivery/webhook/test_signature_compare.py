"""D9: signatures are compared in constant time, all of them, whichever is right."""

from __future__ import annotations

import hmac
from typing import Any

import pytest

import evermark_receiver
from evermark.delivery.webhook.signing import Signer, new_secret

NOW = 1_000_000
BODY = b'{"n": 1}'


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each comparison that takes constant time came to."""
    found: list[bool] = []
    real = hmac.compare_digest

    def recording(one: Any, other: Any) -> bool:
        found.append(real(one, other))
        return found[-1]

    monkeypatch.setattr(hmac, "compare_digest", recording)
    return found


@pytest.mark.parametrize("right", [0, 1, 2])
def test_d9_the_receiver_compares_every_pair_whichever_matches(compared: list[bool], right: int) -> None:
    """GIVEN three secrets here and two signatures there WHEN verified THEN six comparisons, in constant time each."""
    mine = [new_secret() for _ in range(3)]
    headers = Signer([mine[right], new_secret()]).headers("e1", NOW, BODY)
    assert evermark_receiver.verify(headers, BODY, mine, now=NOW).id == "e1"
    assert sorted(compared) == [False] * 5 + [True]


def test_d9_the_receiver_refuses_after_as_many_comparisons(compared: list[bool]) -> None:
    """GIVEN no right secret WHEN verified THEN as much is compared as when there is one."""
    headers = Signer([new_secret(), new_secret()]).headers("e1", NOW, BODY)
    with pytest.raises(evermark_receiver.VerificationError):
        evermark_receiver.verify(headers, BODY, [new_secret() for _ in range(3)], now=NOW)
    assert compared == [False] * 6
