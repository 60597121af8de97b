"""Matching a batch without Spark: who is found, who is left to Spark, and what it costs."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from evermark.event import EVENT, UNDELIVERED_OPS, Op
from evermark.predicate import vet, wanted_ops
from evermark.predicate.index import Filter
from evermark.predicate.matcher import Matcher, Wanted, matcher_of
from evermark.predicate.vectors import WORK_MAX, YES, Batch

OPS = tuple(op.value for op in Op)
STREAMS = ("a", "b")
WHERES = (
    *("data.x = 'p'", "data.x = 'q'", "data.x = 'q' and data.n > 1", "upper(data.x) = 'P'", "upper(data.x) = 'Q'"),
    *(
        "data.n = 1",
        "data.n = 2",
        "data.n > 1",
        "data.x like 'p%'",
        "key = 'k'",
        "data.ok",
        "stream = 'a'",
        "data.n < 0",
    ),
    *("lower('P') = 'p'", "upper('x') = 'P'", "coalesce(null, 'p') = 'p' and data.n > 1", "1 = 1", "1 > 2"),
    *("upper(data.x) = 'P' and data.n = 1", "lower(data.x) = upper(data.x)", "data.x = 'p' or op = 'delete'"),
)
filters = st.lists(
    st.builds(
        lambda where, streams, ops: Filter(streams, ops, vet(where)),
        st.sampled_from(WHERES),
        st.lists(st.sampled_from(STREAMS), max_size=2, unique=True).map(tuple),
        st.lists(st.sampled_from(sorted(set(OPS) - UNDELIVERED_OPS)), max_size=2, unique=True).map(tuple),
    ),
    min_size=1,
    max_size=30,
)
documents = st.fixed_dictionaries(
    {}, optional={"x": st.sampled_from(("p", "q", "P", "é", None, 1)), "n": st.sampled_from((1, 2, "1", None, True))}
).map(json.dumps)
events = st.lists(
    st.tuples(
        st.sampled_from(STREAMS),
        st.sampled_from(OPS),
        st.one_of(documents, documents, st.sampled_from(("{", '{"n": 1e400, "x": {}}', None))),
    ),
    max_size=12,
)


def table_of(found: list[tuple[str, str, str | None]]) -> pa.Table:
    streams, ops, payloads = ([event[n] for event in found] for n in range(3))
    given: dict[str, list[Any]] = {"stream": streams, "op": ops, "payload": payloads, "key": ["k"] * len(found)}
    return pa.table({f.name: pa.array(given.get(f.name, [None] * len(found)), f.type) for f in EVENT})


def pairs(wanted: Wanted) -> list[tuple[int, int]]:
    return list(zip(wanted.rows.tolist(), wanted.of.tolist(), strict=True))


def one_by_one(filters: list[Filter], rows: pa.Table) -> set[tuple[int, int]]:
    """Each filter tested for each row: where a row is in doubt it is not met."""
    found = set()
    streams, ops = rows["stream"].to_pylist(), rows["op"].to_pylist()
    for number, one in enumerate(filters):
        assert one.predicate.exact is not None
        met = Batch(rows, one.predicate.paths).condition(one.predicate.exact.whole) == YES
        for row in range(rows.num_rows):
            named = ops[row] in wanted_ops(one.ops) and (not one.streams or streams[row] in one.streams)
            if met[row] and named:
                found.add((row, number))
    return found


@given(filters, events)
def test_tables_and_tests_find_the_same(some: list[Filter], found: list[tuple[str, str, str | None]]) -> None:
    """GIVEN any filters and events WHEN matched by tables THEN each has what testing each row gives, or a doubt."""
    rows = table_of(found)
    wanted = matcher_of(some).wanted(rows)
    sure = {pair for pair in one_by_one(some, rows) if pair[1] not in wanted.unsure}
    assert sorted(pairs(wanted)) == sorted(sure)
    assert wanted.rows.tolist() == sorted(wanted.rows.tolist())


def test_a_doubt_leaves_only_those_to_spark_whom_it_concerns() -> None:
    """GIVEN a broken payload in one stream WHEN matched THEN subscriptions of other streams are not in doubt."""
    some = [Filter((stream,), (), vet(f"data.x = '{x}'")) for stream in STREAMS for x in ("p", "q")]
    wanted = matcher_of(some).wanted(table_of([("a", "insert", "{"), ("b", "insert", '{"x": "q"}')]))
    assert wanted.unsure == {0, 1}
    assert pairs(wanted) == [(1, 3)]


def test_what_is_never_delivered_is_not_read() -> None:
    """GIVEN poison WHEN matched THEN its broken payload is no doubt."""
    wanted = matcher_of([Filter((), (), vet("data.x = 'p'"))]).wanted(table_of([("a", "poison", "{")]))
    assert not wanted.unsure and not pairs(wanted)


def test_bytes_that_are_no_text_are_left_to_spark() -> None:
    """GIVEN a payload that is not UTF-8 WHEN matched THEN it is in doubt, and nothing is raised."""
    rows = table_of([("a", "insert", '{"x": "p"}')])
    payload = pa.Array.from_buffers(pa.string(), 1, [None, *pa.array([b'{"x": "\xff"}']).buffers()[1:]])
    odd = rows.set_column(rows.schema.names.index("payload"), "payload", payload)
    assert matcher_of([Filter((), (), vet("data.x = 'p'"))]).wanted(odd).unsure == {0}


def test_too_much_work_is_left_to_spark() -> None:
    """GIVEN more filters than there is time for WHEN matched THEN those not decided are in doubt, no others."""
    some = [Filter((), (), vet(f"data.x like '%{n}%' and data.n > {n}")) for n in range(50)]
    rows = table_of([("a", "insert", json.dumps({"x": f"x{n}", "n": 100})) for n in range(50)])
    everything = matcher_of(some).wanted(rows)
    bounded = matcher_of(some).wanted(rows, work_max=200_000)
    assert not everything.unsure
    assert 0 < len(bounded.unsure) < len(some)
    assert pairs(bounded) == [pair for pair in pairs(everything) if pair[1] not in bounded.unsure]


class Counted(Batch):
    """Counts the work that matching asks for."""

    spent = 0

    def work(self, amount: int) -> None:
        type(self).spent += amount
        super().work(amount)


def spent(matcher: Matcher, rows: pa.Table, monkeypatch: Any) -> int:
    monkeypatch.setattr("evermark.predicate.matcher.Batch", Counted)
    Counted.spent = 0
    assert not matcher.wanted(rows, WORK_MAX).unsure
    return Counted.spent


def test_cost_grows_with_matches_not_with_subscriptions(monkeypatch: Any) -> None:
    """GIVEN 10 and 1 000 subscriptions that match equally often WHEN matched THEN the work is less than twice."""

    def some(count: int) -> Matcher:
        forms = ("data.a{} = 'v{}'", "data.a{} = 'v{}' and data.n > 50", "upper(data.a{}) = 'V{}'")
        return matcher_of([Filter((), (), vet(forms[n % 3].format(count, n))) for n in range(count)])

    payloads = [json.dumps({"a10": f"v{n % 10}", "a1000": f"v{n % 1000}", "n": n % 100}) for n in range(500)]
    rows = table_of([("a", "insert", payload) for payload in payloads])
    assert spent(some(1_000), rows, monkeypatch) < 2 * spent(some(10), rows, monkeypatch)
