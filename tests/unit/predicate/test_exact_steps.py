"""Which predicates have steps that need no Spark, what JSON is beyond doubt, and that neither can run away."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pytest

from evermark.event import EVENT
from evermark.predicate import vet
from evermark.predicate.json_values import DOUBT, document, followed, path_steps, read_as
from evermark.predicate.vectors import NO, NULL, UNSURE, YES, Batch, TooMuchWorkError

EXACT = [
    *("op = 'insert'", "data.total > 100", "data.a = 'x' and data.b in (1, 2)", "data.paid", "before.a <> data.a"),
    *("data.a like 'x%y%z'", "data.a ilike '%X%'", "upper(data.a) = 'X'", "size(data.items) > 2", "data.a is not null"),
    *("array_contains(data.tags, 'x')", "data.a * 2 + 1 > 7", "coalesce(data.a, data.b) = 'x'", "partition = 1"),
    *("event_time > '2026-01-01'", "case when data.a = 1 then true else false end", "cast(data.a as double) > 1"),
]
# Left to Spark: its own regular expressions, roundings, casts and readings of times.
FOR_SPARK = [
    *("data.a rlike '^x'", "data.a like 'x_'", "round(data.a) = 1", "floor(data.a) = 1", "data.a % 2 = 1"),
    *("cast(data.a as bigint) = 1", "data.a > timestamp '2026-01-01'", "data.a = date '2026-01-01'"),
    *("substring(data.a, data.b) = 'x'", "substring(data.a, -1) = 'x'", "concat(data.a, 'x') = 'x'"),
    *("cast(data.a as decimal(10,2)) = 1", "data.a = 1 and data.b rlike '^x'", "(data.a * -1) in (0, 1)"),
]


def rows(*payloads: str | None, **columns: list[Any]) -> pa.Table:
    given: dict[str, list[Any]] = {"payload": list(payloads), "stream": ["s"] * len(payloads)} | columns
    given.setdefault("op", ["insert"] * len(payloads))
    count = len(payloads)
    return pa.table({f.name: pa.array(given.get(f.name, [None] * count), f.type) for f in EVENT})


def states(where: str, table: pa.Table) -> list[int]:
    predicate = vet(where)
    assert predicate.exact is not None, where
    return Batch(table, predicate.paths).condition(predicate.exact.whole).tolist()


@pytest.mark.parametrize("where", EXACT)
def test_what_has_an_exact_form_needs_no_spark(where: str) -> None:
    """GIVEN a predicate of plain comparisons WHEN vetted THEN it has steps, which survive a pickle."""
    predicate = vet(where)
    assert predicate.exact is not None
    assert pickle.loads(pickle.dumps(predicate)).exact == predicate.exact


@pytest.mark.parametrize("where", FOR_SPARK)
def test_what_has_none_is_left_to_spark(where: str) -> None:
    """GIVEN a part that only Spark evaluates exactly WHEN vetted THEN the whole predicate has no steps."""
    assert vet(where).exact is None


@pytest.mark.parametrize(
    "payload",
    [
        *("", "{", '{"a":1,"a":2}', '{"a":NaN}', '{"a":1} x', '{"a":"\\ud800"}', '{"\\udc00":1}', '{"a":"\x01"}'),
        *("[" * 250 + "]" * 250, '{"a":' + "1" * 400 + "}", '{"' + "k" * 60_000 + '":1}', '"' + "x" * 2**20 + '"'),
    ],
)
def test_a_payload_that_spark_may_read_otherwise_is_in_doubt(payload: str) -> None:
    """GIVEN JSON that parsers disagree about WHEN it is read THEN nothing is said about it."""
    assert document(payload) is DOUBT
    assert states("data.a = 1", rows(payload)) == [UNSURE]
    assert states("data.a is null", rows(payload)) == [UNSURE]


def test_a_doubt_that_changes_nothing_is_none() -> None:
    """GIVEN an event in doubt WHEN another part decides THEN the condition is known."""
    table = rows("{", '{"a": 1}')
    assert states("op = 'delete' and data.a = 1", table) == [NO, NO]
    assert states("op = 'insert' or data.a = 1", table) == [YES, YES]
    assert states("op = 'insert' and data.a = 1", table) == [UNSURE, YES]
    assert states("data.b > 1", table) == [UNSURE, NULL]


@pytest.mark.parametrize(
    ("form", "value", "read"),
    [
        *(("string", "12.5", "12.5"), ("string", "12.50", DOUBT), ("string", "1e2", DOUBT), ("string", "[1]", DOUBT)),
        *(("string", "true", "true"), ("string", "9223372036854775808", DOUBT), ("string", '"\\u00e9"', "é")),
        *(("double", '"paid"', None), ("double", '"1d"', DOUBT), ("double", '" 1"', DOUBT), ("double", '"1e2"', 100.0)),
        *(("double", "1e400", DOUBT), ("double", '"NaN"', DOUBT), ("double", "{}", None), ("double", '""', None)),
        *(
            ("double", '"-0"', DOUBT),
            ("boolean", '"Yes"', True),
            ("boolean", '"maybe"', None),
            ("boolean", "0.0", False),
        ),
        *(("boolean", '" true"', DOUBT), ("boolean", "[]", None), ("double", "null", None)),
    ],
)
def test_a_value_is_read_as_spark_reads_it_or_not_at_all(form: str, value: str, read: object) -> None:
    """GIVEN a JSON value WHEN it is read as a type THEN the result is beyond doubt, or DOUBT."""
    assert read_as(form)(document(value)) == read


def test_paths_are_followed_as_they_were_written() -> None:
    """GIVEN names of every kind WHEN a path is read back THEN the value is found; where there is none it is null."""
    inner = {"odd key": {"it's": [1, {"x": 2}]}, 'say "a"': 3, "": 4}
    found = document(json.dumps({"a": inner}))
    asked = {"data.a.`odd key`['it\\'s'][1].x": 2, "data.a['say \"a\"']": 3, "data.a['']": 4, "data.a[0]": None}
    asked |= {"data.a.`odd key`.x": None, "data.a.`odd key`['it\\'s'][9]": None}
    for where, value in asked.items():
        (path,) = vet(f"{where} = 1").paths
        assert followed(found, path_steps(path.json_path)) == value, where


def test_columns_and_times_are_read() -> None:
    """GIVEN columns of the event WHEN compared THEN nulls are null and times are moments."""
    moment = datetime(2026, 1, 1, 12, tzinfo=UTC)
    table = rows("{}", "{}", event_time=[moment, None], partition=[1, 2], key=["a", None], schema_version=[None, 3])
    assert states("event_time = '2026-01-01T14:00:00+02:00'", table) == [YES, NULL]
    assert states("partition > 1.5", table) == [NO, YES]
    assert states("key is null", table) == [NO, YES]
    assert states("schema_version = 3", table) == [NULL, YES]
    assert states("1 = 1", table) == [YES, YES]


def test_too_much_work_is_refused_before_it_is_done() -> None:
    """GIVEN a predicate that reads long texts again and again WHEN its work is bounded THEN it is given up."""
    where = " and ".join(f"upper(data.a) like '%x{n}%y%'" for n in range(40))
    table = rows(*(json.dumps({"a": f"{n}" + "x" * 10_000}) for n in range(100)))
    predicate = vet(where)
    assert predicate.exact is not None
    with pytest.raises(TooMuchWorkError):
        Batch(table, predicate.paths, work_max=10_000_000).condition(predicate.exact.whole)
