"""Left-out values are taken from the images before: by which task, how often these are looked through, and how many
are held."""

from __future__ import annotations

import json
import random
import re
from collections import defaultdict
from typing import Any

import pyarrow as pa
import pytest

from evermark.event import UNKNOWN
from evermark.log import large_values
from evermark.log.large_values import PIECE_SIZE, Unfinished, filling, shared_keys


def test_keys_share_a_number_exactly_if_a_record_may_have_come_from_one_to_the_other() -> None:
    """GIVEN moves at random WHEN keys are numbered THEN two have one number just where moves lead from one to the
    other, whichever way; another partition's keys are others."""
    for seed in range(60):
        rng = random.Random(seed)
        moves = [("t", rng.randrange(2), str(rng.randrange(30)), str(rng.randrange(30))) for _ in range(12)]
        beside = defaultdict(set)
        for stream, partition, key, other in moves:
            beside[stream, partition, key].add((stream, partition, other))
            beside[stream, partition, other].add((stream, partition, key))
        found = {place: number for *place_, number in shared_keys(moves) for place in [tuple(place_)]}
        assert found.keys() == beside.keys(), seed
        for place, number in found.items():
            reached, todo = {place}, [place]
            while todo:
                more = beside[todo.pop()] - reached
                reached |= more
                todo += more
            assert {each for each in found if found[each] == number} == reached, seed


def test_a_long_chain_of_moves_is_one_record() -> None:
    """GIVEN a record that moved from key to key many times WHEN its keys are numbered THEN all have one number."""
    found = shared_keys([("t", 0, str(n), str(n + 1)) for n in range(20_000)])
    assert len(found) == 20_001 and {number for *_, number in found} == {0}


class Looked:
    """`re`, which counts the characters that are looked through."""

    DOTALL = re.DOTALL

    def __init__(self) -> None:
        self.characters = 0

    def finditer(self, pattern: str, text: str, flags: int) -> Any:
        self.characters += len(text)
        return re.finditer(pattern, text, flags)


@pytest.fixture
def looked(monkeypatch: pytest.MonkeyPatch) -> Looked:
    found = Looked()
    monkeypatch.setattr(large_values, "re", found)
    return found


LARGE = "x" * 100_000
LACKS = [f"{UNKNOWN}t", f"{UNKNOWN}u"]
MARKS = pa.schema(
    [
        *(pa.field(name, pa.string()) for name in ("stream", "row_key", "previous_key", "alone", "payload", "kept")),
        *(pa.field(name, pa.bool_()) for name in ("gone", "moved", "is_kept")),
        pa.field("partition", pa.int32()),
        pa.field("shared", pa.int64()),
        pa.field("flags", pa.list_(pa.string())),
    ]
)


def image(number: int) -> str:
    return json.dumps({"id": 1, "n": number, "t": LARGE, "u": [1.10, LARGE]}, separators=(",", ":"))


def marks(records: int, updates: int) -> pa.RecordBatch:
    """Records that are kept with large values, and updates that left these out."""
    place = {"stream": "", "partition": 0, "gone": False, "moved": False}
    rows: list[dict[str, Any]] = []
    for record in range(records):
        mine = {**place, "row_key": str(record), "alone": str(record)}
        rows.append({**mine, "is_kept": True, "kept": image(-1)})
        rows += [{**mine, "flags": LACKS, "payload": f'{{"id":1,"n":{number}}}'} for number in range(updates)]
    return pa.RecordBatch.from_pylist(rows, MARKS)


def test_a_large_image_is_looked_through_once_for_all_updates_of_its_record(looked: Looked) -> None:
    """GIVEN a record of large values, and many updates that left out several WHEN they are given back THEN the image is
    looked through once, and every digit is as it was."""
    events = [
        {
            "batch": number,
            "position": "",
            "row_key": "1",
            "gone": False,
            "flags": LACKS,
            "payload": f'{{"id":1,"n":{number}}}',
        }
        for number in range(50)
    ]
    unfinished = Unfinished()
    assert unfinished.add(events) == []
    (row,) = unfinished.filled({"1": image(-1)})
    assert row["payload"] == image(49)
    assert looked.characters < 1.1 * len(image(0))
    looked.characters = 0
    (batch,) = filling()([marks(1, 50)])
    assert batch["payload"].to_pylist() == [None, *(image(number) for number in range(50))]
    assert looked.characters < 1.1 * len(image(0))


def test_left_out_values_are_given_back_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN many small updates of records with large values WHEN Spark gets these back THEN few are in memory at a
    time, in the order of the updates, and none is missing."""
    monkeypatch.setattr(large_values, "PIECE_SIZE", 1_000_000)
    given = marks(5, 30)
    found, sizes = [], []
    for batch in filling()([given, given.slice(0, 0), marks(1, 0)]):
        assert batch.schema == given.schema
        found += batch.select(["row_key", "payload"]).to_pylist()
        sizes.append(sum(len(payload or "") for payload in batch["payload"].to_pylist()))
    wanted = [(str(record), image(number) if number >= 0 else None) for record in range(5) for number in range(-1, 30)]
    assert [(row["row_key"], row["payload"]) for row in found] == [*wanted, ("0", None)]
    assert max(sizes) <= 1_000_000 + len(image(0)) < PIECE_SIZE
