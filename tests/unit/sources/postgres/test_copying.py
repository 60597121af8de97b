"""Decisions of a copy: what a snapshot shows, what is told of a row at its mark, what becomes of an attempt (X6)."""

from __future__ import annotations

import json
import random
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evermark.errors import FormatError
from evermark.sources.copies import CHUNK_ROWS_MAX, CHUNK_ROWS_MIN, Mark, row_id, row_ids, rows_of_chunk
from evermark.sources.postgres.tables.copying import sampled_percent
from evermark.sources.postgres.tables.overlap import Change, Overlap, completed
from evermark.sources.postgres.tables.snapshot import Snapshot


def test_what_a_snapshot_shows() -> None:
    """GIVEN transactions before, running at and after a snapshot WHEN asked THEN only what had ended is shown."""
    snapshot = Snapshot.parse("100:110:103,105")
    assert [xid for xid in range(95, 115) if not snapshot.shows(xid)] == [103, 105, 110, 111, 112, 113, 114]
    assert Snapshot.parse("7:7:").shows(6) and not Snapshot.parse("7:7:").shows(7)
    with pytest.raises(FormatError):
        Snapshot.parse("7:7")


@pytest.mark.parametrize("epoch", [0, 1, 5])
def test_numbers_that_wrapped_around(epoch: int) -> None:
    """GIVEN a snapshot near a wrap of 32 bits WHEN numbers of either side are asked THEN they count as 64 bits do."""
    rng = random.Random(epoch)
    for edge in (1 << 32, (1 << 32) + 5, (1 << 31), (1 << 32) - 3):
        xmax = (epoch << 32) + edge
        running = frozenset(xmax - n for n in (2, 7))
        snapshot = Snapshot(xmax - 10, xmax, running)
        for _ in range(200):
            whole = (
                xmax + rng.randint(-min(xmax - 3, 2**31 - 1), 2**31 - 1)
                if rng.random() < 0.5
                else xmax - rng.randint(-9, 9)
            )
            assert snapshot.shows(whole % (1 << 32)) == (whole < xmax and whole not in running)


def applied(rows: dict[str, dict[str, Any]], *changes: Change) -> dict[str, tuple[str, dict[str, Any]]]:
    batch = pa.RecordBatch.from_pydict({
        "event_id": list(rows), "key": list(rows), "payload": [_json(row) for row in rows.values()],
    })  # fmt: skip
    found = Overlap.of(changes).applied(batch, lambda key: f"moved {key}")
    return {row["key"]: (row["event_id"], json.loads(row["payload"])) for row in found.to_pylist()}


def _json(row: dict[str, Any]) -> str:
    return json.dumps(row, separators=(",", ":"))


ROWS = {"1": {"id": 1, "n": 0, "big": "a"}, "2": {"id": 2, "n": 0, "big": "b"}}


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ([], {"1": 0, "2": 0}),
        ([Change("update", "1")], {"2": 0}),
        ([Change("delete", "1")], {"2": 0}),
        ([Change("insert", "3")], {"1": 0, "2": 0}),
        ([Change("truncate", None)], {}),
        ([Change("update", "3", "1")], {"2": 0}),
        ([Change("update", "1", partial='{"id":1,"n":5}')], {"1": 5, "2": 0}),
        ([Change("update", "1", partial='{"n":5}'), Change("update", "1", partial='{"n":6}')], {"1": 6, "2": 0}),
        ([Change("update", "1", partial='{"id":1,"n":5}'), Change("update", "1")], {"2": 0}),
        ([Change("update", "1"), Change("update", "1", partial='{"id":1,"n":5}')], {"2": 0}),
        ([Change("delete", "1"), Change("insert", "1"), Change("update", "1", partial='{"id":1,"n":5}')], {"2": 0}),
        ([Change("update", "3", "1", partial='{"id":3,"n":5}')], {"3": 5, "2": 0}),
        ([Change("update", "3", "1", partial='{"id":3,"n":5}'), Change("delete", "3")], {"2": 0}),
        ([Change("delete", "2"), Change("update", "2", "1", partial='{"id":2,"n":5}')], {"2": 5}),
        ([Change("update", "3", "1", partial='{"id":3,"n":5}'), Change("insert", "1")], {"3": 5, "2": 0}),
    ],
)  # fmt: skip
def test_what_is_told_of_rows_that_changed(changes: list[Change], told: dict[str, int]) -> None:
    """GIVEN changes after the snapshot WHEN rows are told at the mark THEN only those that the stream told in part, or
    not at all, and with the newest values."""
    found = applied(ROWS, *changes)
    assert {key: row["n"] for key, (_, row) in found.items()} == told
    for key, (event_id, row) in found.items():
        assert str(row["id"]) == key
        assert event_id in (key, f"moved {key}")
        assert row["big"] in "ab"


def test_values_stay_as_they_are_written() -> None:
    """GIVEN numbers and text that parsing would change WHEN an object is completed THEN they stay the same."""
    long = "1" * 5000
    whole = '{"a b\\"c":1.10,"d":' + long + ',"e":[1, {"x": "}"}],"f":"\\u00e4"}'
    assert completed(whole, []) == whole
    assert completed(whole, ['{"d":-0.0}', '{"f":null}']) == whole.replace(long, "-0.0").replace('"\\u00e4"', "null")
    assert completed("{}", ["{}"]) == "{}"


def test_blanks_around_a_value_stay_with_it() -> None:
    """GIVEN values with blanks around them, as a column of type json keeps them WHEN an object is completed THEN its
    members are found, and these values stay the same."""
    whole = '{"a": {"b": 1} ,"c":\t\r\n[1] ,"d":2}'
    assert completed(whole, []) == whole
    assert completed(whole, ['{"d": 3\t}']) == whole.replace("2}", " 3\t}")
    assert completed(whole, ['{"a":1,"c":null}']) == '{"a":1,"c":null,"d":2}'


def test_marks_and_ids() -> None:
    """GIVEN a mark WHEN it is written and read THEN it is the same; other texts are none, and ids differ."""
    mark = Mark("0123456789abcdef", 3, 4)
    assert Mark.parse(str(mark)) == mark
    ours = f"copy/{mark.copy}"
    for end in ("", "/b/c", "/1", "/1/2/3", "/-1/2", "/1/²", f"/{'9' * 5000}/1", "/1/1\n"):
        assert Mark.parse(f"{ours}{end}") is None
    for text in ("", "copy", "copy/\0/1/1", "copy//1/1", f"k{mark}"):
        assert Mark.parse(text) is None


@given(st.lists(st.one_of(st.integers().map(str), st.text(max_size=50), st.from_regex(r"[\w\-]{1,45}")), max_size=20))
@example(["1", "a b", "", "x" * 40, "x" * 41, "é", "1\n"])
def test_ids_of_copied_rows(keys: list[str]) -> None:
    """GIVEN keys of any kind WHEN they get ids THEN one by one and together they are the same, no two are, another copy
    has others, and each may stand in a header."""
    ids = row_ids("0" * 16, "s", pa.array(keys, pa.string())).to_pylist()
    assert ids == [row_id("0" * 16, "s", key) for key in keys]
    assert len(set(ids)) == len(set(keys))
    assert not set(ids) & set(row_ids("1" * 16, "s", pa.array(keys, pa.string())).to_pylist())
    assert all(each.isascii() and each.isprintable() and len(each) <= 57 for each in ids)


def test_how_much_of_a_table_is_sampled() -> None:
    """GIVEN tables of many and few pages WHEN they are to be cut THEN a sample is taken where it is a small part."""
    assert sampled_percent(50, 100_000) == 1.5
    assert sampled_percent(50, 10_000) is None and sampled_percent(0, 10_000) is None
    assert sampled_percent(3, 0) is None


def test_the_size_of_a_chunk() -> None:
    """GIVEN small, large and unknown rows WHEN a table is cut THEN chunks are bounded in rows and, about, in bytes."""
    assert rows_of_chunk(10**9, 10**7) == CHUNK_ROWS_MAX
    assert rows_of_chunk(10**12, 1000) == CHUNK_ROWS_MIN
    assert rows_of_chunk(10**9, 10**5) == 32 * 1024 * 1024 // 10**4
    assert rows_of_chunk(0, 0) == CHUNK_ROWS_MAX
