"""What a posting task keeps from one chunk of its rows to the next."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest

from evermark.delivery.base import SubscriptionSpec
from evermark.delivery.signing import new_secret
from evermark.delivery.work import Manner
from evermark.event import EVENT
from evermark.secrets import KeyRef, SecretBox
from evermark.spark.deliver import _Post
from evermark.spark.match import SUBSCRIPTION
from evermark.testing.listener import Failing, Listener


@pytest.fixture
def receiver() -> Iterator[Listener]:
    """Refuses the first request it gets, and takes all others."""
    with Listener(secrets=[SECRET], failing=Failing.parse("422:1")) as listener:
        yield listener


SECRET = new_secret()


def chunk(number: int, key: str) -> pa.RecordBatch:
    row: dict[str, Any] = dict.fromkeys(EVENT.names)
    row |= {"event_id": f"e{number}", "source": "shop", "partition": 0, "position": f"{number:04}", "batch": 1}
    row |= {"stream": "s", "key": key, "op": "insert", "payload": "{}", "flags": []}
    row["ingested_at"] = row["event_time"] = 0
    columns = [pa.array([row[field.name]], field.type) for field in EVENT]
    schema = EVENT.append(pa.field(SUBSCRIPTION, pa.int32()))
    return pa.RecordBatch.from_arrays([*columns, pa.array([0], pa.int32())], schema=schema)


@pytest.mark.parametrize(("ordered", "parked"), [(True, ["e1", "e2"]), (False, ["e1"])])
def test_what_one_chunk_parks_holds_back_its_key_in_the_next(
    receiver: Listener, ordered: bool, parked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN `ordered` WHEN an event is refused in one chunk THEN the next of its key waits, and no other key does."""
    monkeypatch.setenv("POSTING_KEY", "a key for this test only")
    box = SecretBox(KeyRef("env", "POSTING_KEY"))
    spec = SubscriptionSpec("one", receiver.url, (box.seal(SECRET),), ordered=ordered, allow_networks=("127.0.0.0/8",))
    post = _Post((spec,), box, Manner(), None)
    rows = list(post(iter([chunk(1, "a"), chunk(2, "a"), chunk(3, "b")])))
    found = [one for row in rows for text in row["row"].to_pylist() for one in json.loads(text)["parked"]]
    assert [one["event_id"] for one in found] == parked
    taken = {record.event.id for record in receiver.records}
    assert taken == {"e1", "e2", "e3"} - set(parked)
