"""`evermark status`: what an instance says of itself is shown to the person who asks."""

from __future__ import annotations

from typing import Any

import pytest

from evermark.cli.status import _show
from evermark.observe.health import HealthBoard, PartitionHealth, as_json


def test_s1_a_store_of_checkpoints_that_is_away_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    """GIVEN an instance that cannot save checkpoints WHEN its status is shown THEN it says so, and why."""
    board = HealthBoard()
    board.put("shop", 0, PartitionHealth.HEALTHY)
    board.store_away("shop", "saving a checkpoint in etcd at http://etcd:2379: no connection", "")
    health = as_json(board.partitions(), version="1", uptime_s=1.0, stores_away=board.stores_away)
    empty: dict[str, Any] = {
        "sources": [],
        "subscriptions": [],
        "streams": [],
        "replays": [],
        "copies": [],
        "dropped": {},
    }
    _show({"deployment": "shop", "listen": "127.0.0.1:8320", "health": health, "expired": {}, **empty})
    said = capsys.readouterr().err
    assert "shop: degraded" in said
    assert "its checkpoints cannot be saved: saving a checkpoint in etcd at http://etcd:2379: no connection" in said
