"""The two compilations of a predicate held together: what steps say is what Spark says, or they say nothing.

`EVERMARK_EXAMPLES=200` looks deeper than the suite does.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from evermark.delivery.model import SubscriptionSpec
from evermark.errors import ConfigError
from evermark.event import EVENT
from evermark.log.frames import with_paths
from evermark.predicate import Predicate, vet
from evermark.predicate.index import Filter
from evermark.predicate.matcher import matcher_of
from evermark.predicate.vectors import NO, NULL, UNSURE, YES, Batch

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = int(os.environ.get("EVERMARK_EXAMPLES", "8"))
BIG = 2**53 + 1
TRUTH = {YES: True, NO: False, NULL: None}

NUMBERS = (
    *("0", "-0", "0.0", "-0.0", "-0e0", "0e5", "1", "-1", "7", "42", "100", "100.0", "100.00", "99.5", "99.50"),
    *("0.1", "1e2", "1E2", "1.5e3", "1e-7", "0.0000001", "0.000001", "1e400", "-1e400", "1e-400", "1e308"),
    *("1.7976931348623157e308", str(BIG - 1), str(BIG), str(BIG + 1), f"{BIG}.0", f"{BIG}.000000001", f"-{BIG}"),
    *("9223372036854775807", "9223372036854775808", "-9223372036854775808", "-9223372036854775809"),
    *("12345678901234567890", "1" * 29, "1" * 30, "1" * 38, "1" * 39, "9" * 38, "1" * 60, "1" * 1100),
    *("0." + "1" * 9, "0." + "1" * 10, "0." + "3" * 37, "0." + "3" * 39, "5e-324", "2.2250738585072014e-308"),
    *("0.30000000000000004", "179769313486231570000", "1e22", "1e23", "123456789.123456789"),
)
TEXTS = (
    *("", "a", "A", "abc", "ABC", "abcabc", "a%c", "a_c", "a\\c", "ab\nc", " a ", "\ta", "É", "é", "ß", "straße"),
    *("İ", "ı", "日本語", "😀", "😀😀", "é", "\x00", "\x7f", "\ufeff", "it's", '"', "{", "[1]", "true", "TRUE", "True"),
    *("t", "T", "yes", "no", "y", "n", "f", "0", "1", " 1", "1 ", "\n7\t", "-0", "+1", "+", "-", ".", ".5", "5."),
    *("1e2", "1E+2", "1e400", "1d", "1f", "0x10", "0x1p3", "NaN", "nan", "-NaN", "Infinity", "-inf", "+Inf"),
    *("infinity", "1_000", "1,000", "１２", "null", "none", "paid", str(BIG), str(BIG - 1), "00042", "99.50"),
    *("1" * 30, "0." + "1" * 12, "2026-01-01", "2026-01-02T03:04:05Z", "V1", "v1", "x" * 600, "-0.0", "1e-400"),
    *(" true ", "\u00a0true", "\u2028", "false\x00"),
)
BROKEN = (
    *("", " ", "{", "}", '{"t":', '{"t":1,}', '{"t":1} x', '{"t":1}{"t":2}', "{'t':1}", '{"t":01}', '{"t":1.}'),
    *('{"t":.5}', '{"t":NaN}', '{"t":Infinity}', '{"t":-Infinity}', '{"t":+1}', '{"t":"a\nb"}', '{"t":"\\x"}'),
    *('{"t":"\\ud800"}', '{"t":"\\ud83d\\ude00"}', '{"t":"\\ude00\\ud83d"}', '{"\\ud800":1,"t":1}'),
    *('{"t":"\\\\ud83d\\ude00"}', '{"t":1,"t":2}', '{"t":1,"t":1}', '{"t":{"u":1,"u":2}}'),
    *('{"x":{"u":1,"u":2},"t":1}', '{"\\u0074":1}', '{"T":1}', "null", "true", "7", '"text"', "[1]", '["t"]'),
    *("[" * 150 + "]" * 150, "[" * 250 + "]" * 250, "[" * 1500 + "]" * 1500, "\ufeff{}", "/* c */ {}"),
    *('{"t":1 /* c */}', '{"t":tru}', '{"t":nullx}', '\t\r\n {"t"\n:\t1 }\r\n', "\x0b{}", "\x00", '{"t":1}\x00'),
    *('{"":1,"t":1}'),
)

json_texts = st.one_of(st.sampled_from(TEXTS), st.text(max_size=6))
escaped = st.one_of(json_texts.map(json.dumps), json_texts.map(lambda text: json.dumps(text, ensure_ascii=False)))
digits = st.from_regex(r"\A-?(0|[1-9][0-9]{0,22})(\.[0-9]{1,12})?([eE][-+]?[0-9]{1,3})?\Z")
scalars = st.one_of(st.sampled_from(NUMBERS), digits, escaped, st.sampled_from(("true", "false", "null")))


def _array(values: list[str]) -> str:
    return f"[{', '.join(values)}]"


def _object(pairs: list[tuple[str, str]]) -> str:
    return "{" + ",".join(f"{name} :{value}" for name, value in pairs) + "}"


names = st.one_of(st.sampled_from(('"t"', '"u"', '"odd key"')), escaped)
values = st.recursive(
    scalars,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(_array), st.lists(st.tuples(names, inner), max_size=3).map(_object)
    ),
    max_leaves=4,
)
payloads = st.one_of(
    values.map(lambda value: f'{{"t": {value}}}'),
    st.tuples(values, values).map(lambda pair: f'{{"t": {pair[0]}, "u": {pair[1]}}}'),
    st.tuples(values, values).map(lambda pair: f'{{"t": {{"u": {pair[0]}}}, "u": [{pair[1]}]}}'),
    values,
    st.sampled_from(BROKEN),
    st.none(),
)

paths = st.sampled_from(
    ("data.t", "data.t", "data.t", "data.u", "before.t", "data.t.u", "data.t[0]", "data.u[0]", "data.`odd key`", "data")
)
plain_texts = st.sampled_from([text for text in TEXTS if text.isprintable() and "\\" not in text])
text_literals = plain_texts.map(lambda text: "'" + text.replace("'", "''") + "'")
NUMBER_LITERALS = (
    "0 1 -1 42 100 99.5 0.1 1e2 -0.0 1e300 1e-300 9223372036854775807 12345678901234567890 0.000000001 7L "
    "123456789.123456789 1111111111111111111111111111 9007199254740993 9007199254740993.5"
)
number_literals = st.sampled_from(NUMBER_LITERALS.split())
signs = st.sampled_from(("=", "<>", "<", "<=", ">", ">=", "<=>"))
columns = st.sampled_from(("key", "op", "stream", "tx"))
long_columns = st.sampled_from(("partition", "origin_seq", "schema_version"))
like_texts = st.sampled_from(
    ("a%", "%a", "%a%", "%", "%%", "", "a%c", "%b%c", "a%b%c%", "ab%bc", "%A%", "É%", "%😀", "a\\\\%c", "abc")
)


def _call(form: str, *inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.tuples(*inner).map(lambda found: form.format(*found))


numbers = st.deferred(
    lambda: st.one_of(
        paths,
        paths,
        number_literals,
        long_columns,
        _call("({} {} {})", numbers, st.sampled_from("+-*/"), numbers),
        _call("abs({})", numbers),
        _call("-({})", numbers),
        _call("length({})", texts),
        _call("size({})", paths),
        _call("coalesce({}, {})", numbers, numbers),
        _call("nullif({}, {})", numbers, numbers),
        _call("if({}, {}, {})", conditions, numbers, numbers),
        _call("cast({} as double)", paths),
    )
)
texts = st.deferred(
    lambda: st.one_of(
        paths,
        paths,
        text_literals,
        columns,
        _call("{}({})", st.sampled_from(("lower", "upper", "trim")), texts),
        _call("substring({}, {}, {})", texts, st.sampled_from("123"), st.sampled_from("0129")),
        _call("substring({}, {})", texts, st.sampled_from("12")),
        _call("coalesce({}, {})", texts, texts),
        _call("nullif({}, {})", texts, texts),
        _call("case when {} then {} else {} end", conditions, texts, texts),
        _call("case {} when {} then {} end", texts, texts, texts),
        _call("cast({} as string)", paths),
    )
)
simple = st.one_of(
    _call("{} {} {}", paths, signs, number_literals),
    _call("{} {} {}", paths, signs, text_literals),
    _call("{} {} {}", paths, signs, paths),
    _call("{} = {}", paths, st.sampled_from(("true", "false"))),
    _call("{} is {}", paths, st.sampled_from(("null", "not null", "true", "false", "not true"))),
    _call("{} in ({}, {}, {})", paths, text_literals, text_literals, text_literals),
    _call("{} in ({}, {}, {})", paths, number_literals, number_literals, number_literals),
    _call("{} not in (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 42, {})", paths, number_literals),
    _call("{} between {} and {}", paths, number_literals, number_literals),
    _call("{} {} '{}'", paths, st.sampled_from(("like", "ilike", "not like", "not ilike")), like_texts),
    _call("{}({}, {})", st.sampled_from(("startswith", "endswith", "contains")), paths, text_literals),
    _call("array_contains({}, {})", paths, st.one_of(text_literals, number_literals, st.just("true"))),
    _call(
        "event_time {} '{}'",
        signs,
        st.sampled_from(("2026-01-01", "2026-01-01T01:00:00+02:00", "1900-01-01T00:00:00.5Z")),
    ),
    _call("{} {} {}", long_columns, signs, number_literals),
    _call("{} is null", columns),
    paths,
)
conditions = st.deferred(
    lambda: st.one_of(
        simple,
        simple,
        _call("{} {} {}", numbers, signs, numbers),
        _call("{} {} {}", texts, signs, texts),
        _call("({} {} {})", conditions, st.sampled_from(("and", "or")), conditions),
        _call("not ({})", conditions),
        _call("({}) is {}", conditions, st.sampled_from(("null", "true", "not false"))),
        _call("coalesce({}, {})", conditions, st.sampled_from(("true", "false"))),
    )
)


def _vetted(where: str) -> Predicate | None:
    try:
        return vet(where)
    except ConfigError:
        return None


predicates = conditions.map(_vetted).filter(lambda found: found is not None)
PREDICATES, PAYLOADS = 30, 150


def table_of(found: list[str | None]) -> pa.Table:
    """Whole events with these payloads; `before` is the payload of the row above."""
    count = len(found)
    columns: dict[str, Any] = {field.name: [None] * count for field in EVENT}
    columns |= {
        "event_id": [str(n) for n in range(count)],
        "stream": ["a", "b"] * (count // 2) + ["a"] * (count % 2),
        "op": [("insert", "update", "delete", "schema", "poison")[n % 5] for n in range(count)],
        "key": [None if n % 7 == 0 else f"k{n % 3}" for n in range(count)],
        "partition": [n % 3 for n in range(count)],
        "origin_seq": [None if n % 5 == 0 else 2**53 + n for n in range(count)],
        "schema_version": [None if n % 2 else 3 for n in range(count)],
        "event_time": [None if n % 4 == 0 else datetime(2026, 1, 1, n % 3, tzinfo=UTC) for n in range(count)],
        "payload": found,
        "before": [None, *found[:-1]],
    }
    return pa.table({field.name: pa.array(columns[field.name], field.type) for field in EVENT})


SEEN: Counter[str] = Counter()


def held(spark: SparkSession, found: list[Predicate], rows: pa.Table) -> list[str]:
    """Where steps and Spark differ."""
    exact = [(predicate, predicate.exact) for predicate in found if predicate.exact is not None]
    SEEN["predicates"] += len(found)
    SEEN["exact"] += len(exact)
    if not exact:
        return []
    frame, alias = with_paths(spark.createDataFrame(rows).coalesce(1), [predicate for predicate, _ in exact])
    truths = [f"{predicate.sql(alias)} as c{n}" for n, (predicate, _) in enumerate(exact)]
    answers = {row[0]: row[1:] for row in frame.selectExpr("event_id", *truths).collect()}
    wrong = []
    for n, (predicate, steps) in enumerate(exact):
        states = Batch(rows, predicate.paths).condition(steps.whole)
        SEEN["unsure"] += int((states == UNSURE).sum())
        SEEN["states"] += len(states)
        for row, state in enumerate(states.tolist()):
            truth = answers[str(row)][n]
            if state != UNSURE and TRUTH[state] is not truth:
                payload, before = (rows.column(name)[row].as_py() for name in ("payload", "before"))
                seen = f"{str(payload)[:80]!r} (before {str(before)[:40]!r})"
                wrong.append(f"{predicate.text}: {seen} is {truth}, not {TRUTH[state]}")
    return wrong


@pytest.mark.timeout(EXAMPLES * 20)
def test_steps_say_what_spark_says_or_nothing(spark: SparkSession) -> None:
    """GIVEN any predicates over any payloads WHEN both compilations run THEN they never differ where steps are sure."""

    @settings(
        max_examples=EXAMPLES,
        phases=(Phase.generate,),
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(
        st.lists(predicates, min_size=PREDICATES, max_size=PREDICATES),
        st.lists(payloads, min_size=PAYLOADS, max_size=PAYLOADS),
    )
    def check(some: list[Predicate], found: list[str | None]) -> None:
        wrong = held(spark, some, table_of(found))
        assert not wrong, "\n".join(wrong[:10])

    check()
    print(dict(SEEN))
    assert SEEN["exact"] > SEEN["predicates"] / 2
    assert SEEN["unsure"] < SEEN["states"] / 2


def test_every_payload_listed_here_meets_every_simple_form(spark: SparkSession) -> None:
    """GIVEN each odd number, text and broken payload WHEN read as each type THEN steps and Spark agree."""
    listed = [f'{{"t": {number}}}' for number in NUMBERS] + [f'{{"t": {json.dumps(text)}}}' for text in TEXTS]
    wheres = [
        *(
            "data.t = 'a'",
            "data.t > 'a'",
            "data.t = 1",
            "data.t < 100",
            f"data.t = {BIG}",
            f"data.t >= {BIG}",
            "data.t",
        ),
        *(
            "data.t is null",
            "lower(data.t) = 'abc'",
            "data.t in (0, 1, 42)",
            "data.t <=> before.t",
            "data.t > before.t",
        ),
        *(
            "length(data.t) > 1",
            "data is null",
            "data.t ilike '%A%'",
            "data.t * 1 = 0",
            "data.t = '100'",
            "data.t = '0'",
        ),
    ]
    wrong = held(spark, [vet(where) for where in wheres], table_of([*listed, *BROKEN]))
    assert not wrong, "\n".join(wrong[:40])


def test_a_matcher_finds_what_spark_finds(spark: SparkSession) -> None:
    """GIVEN many subscriptions WHEN a batch is matched without Spark THEN Spark agrees, but for doubts."""
    from evermark.spark.match import SUBSCRIPTION, matched

    wheres = [
        *(f"data.t = '{text}'" for text in ("a", "abc", "true", "1", "100")),
        *(f"data.t = '{text}' and data.u > {n}" for text in ("a", "abc") for n in range(3)),
        *(f"data.t = {number}" for number in (0, 1, 42, BIG, 99.5)),
        *(f"upper(data.t) = '{text}'" for text in ("A", "ABC", "TRUE")),
        *("data.t", "data.t > 1", "partition = 1", "partition = 2", "key = 'k1'", "stream = 'a'", "op = 'insert'"),
    ]
    asked = [((), ()), (("a",), ()), (("a", "b"), ("insert", "delete")), (("b",), ("update",))]
    specs = [
        SubscriptionSpec(f"s{n}", "http://a.example", streams=asked[n % 4][0], ops=asked[n % 4][1], where=where)
        for n, where in enumerate(wheres * 3)
    ]
    plain = [f'{{"t": {json.dumps(text)}, "u": {n}}}' for n, text in enumerate(TEXTS[:8] * 3)]
    listed = [f'{{"t": {number}}}' for number in NUMBERS[:40]] + plain
    for found in (plain, [*listed, *BROKEN]):
        rows = table_of([*found, *(text for text in found for _ in range(2))])
        frame = spark.createDataFrame(rows).coalesce(1)
        theirs = {
            (int(row[0]), row[1])
            for row in matched(frame, specs, ("event_id",)).select("event_id", SUBSCRIPTION).collect()
        }
        matcher = matcher_of([Filter(spec.streams, spec.ops, vet(spec.where)) for spec in specs])
        wanted = matcher.wanted(rows)
        mine = set(zip(wanted.rows.tolist(), wanted.of.tolist(), strict=True))
        assert mine == {pair for pair in theirs if pair[1] not in wanted.unsure}
        assert (found is not plain) == bool(wanted.unsure)
        assert len(mine) > 20
