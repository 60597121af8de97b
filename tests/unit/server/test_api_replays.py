"""Replays over the HTTP API: asked for, listed, looked at, cancelled, by the rules of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evermark.testing.contracts.scene import T0
from tests.unit.server.api_scene import READER, Scene, served

WINDOW: dict[str, Any] = {"since": "2020-01-01T10:00Z", "until": "2020-01-01T12:00Z"}


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with served(tmp_path) as made:
        yield made


def test_p4_a_replay_is_asked_for_listed_and_cancelled(scene: Scene) -> None:
    """GIVEN a subscription WHEN a window is asked for THEN it is a replay that waits, is listed, and ends when a person
    says so; to end it twice changes nothing (P4).
    """
    wanted = {**WINDOW, "subscription": "file", "streams": ["public.orders"], "where": "op = 'insert'", "rate": 5}
    made = scene.post("/v1/replays", wanted)
    assert made.status == 200, made.text
    ident = made.json["id"]
    assert (made.json["state"], made.json["asked_by"], made.json["source"]) == ("waiting", "api", "shop")
    assert (made.json["since"], made.json["until"]) == ("2020-01-01T10:00:00Z", "2020-01-01T12:00:00Z")
    (kept,) = scene.replays.open()
    assert (kept.request.where, kept.request.subscription, kept.request.rate_per_s) == ("op = 'insert'", "file", 5)
    assert [one["id"] for one in scene.get("/v1/replays").json["replays"]] == [ident]
    assert scene.ask("GET", f"/v1/replays/{ident}", token=READER).json["targets"] == []
    for _ in range(2):
        assert scene.post(f"/v1/replays/{ident}/cancel").json["state"] == "cancelled"
    assert scene.replays.open() == []


@pytest.mark.parametrize(
    ("changed", "status", "said"),
    [
        ({"since": "yesterday"}, 422, "yesterday"),
        ({"since": "2020-01-02"}, 422, "before"),
        ({"since": "9000-01-01", "until": None}, 422, "in the future"),
        ({"where": "reflect('a', 'b')"}, 422, "reflect"),
        ({"subscription": "nobody"}, 404, "nobody"),
        ({"source": "nowhere"}, 422, "nowhere"),
        ({"rate": -1}, 422, "rate"),
        ({"sinc": "2020-01-01"}, 422, "since"),
    ],
)
def test_what_is_not_right_is_refused_and_asks_for_nothing(
    scene: Scene, changed: dict[str, Any], status: int, said: str
) -> None:
    """GIVEN a window, predicate or name that is not right WHEN asked for THEN it is refused and named."""
    refused = scene.post("/v1/replays", {**WINDOW, **changed})
    assert refused.status == status and said in refused.error["message"] + refused.error["hint"], refused.text
    assert scene.replays.open() == []


def test_p5_status_is_healthy_failover_with_its_event_or_replay_with_its_window(scene: Scene) -> None:
    """GIVEN a receiver that is down, one replayed to, one that is well WHEN asked THEN each in its words (P5)."""
    told = {one.pop("subscription"): one for one in scene.ask("GET", "/v1/status", token=READER).json["streams"]}
    at = T0.isoformat().replace("+00:00", "Z")
    assert told["billing"] == {
        "status": "failover", "failover": {"checkpoint_event_id": "e1", "since": at}, "replay": None,
    }  # fmt: skip
    assert told["file"] == {"status": "replay", "failover": None, "replay": {"from": at, "to": at}}
    assert told["mail"] == {"status": "healthy", "failover": None, "replay": None}
    assert scene.get("/v1/status/mail").json["status"] == "healthy"


def test_a_token_that_may_only_read_asks_for_no_replay(scene: Scene) -> None:
    """GIVEN a token that may only read WHEN it asks for a replay, or ends one THEN 403; an unknown one is 404."""
    assert scene.ask("POST", "/v1/replays", WINDOW, token=READER).status == 403
    assert scene.ask("POST", "/v1/replays/x/cancel", token=READER).status == 403
    assert scene.get("/v1/replays/x").status == 404
