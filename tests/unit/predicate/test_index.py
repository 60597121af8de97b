"""The index over subscriptions: whoever could want an event is found, and few others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from evermark.event import UNDELIVERED_OPS, Op
from evermark.predicate import vet
from evermark.predicate.index import ROWS_PER_FILTER_MAX, TABLES_MAX, Filter, Index, index_of


def filter_(where: str | None = None, streams: tuple[str, ...] = (), ops: tuple[str, ...] = ()) -> Filter:
    return Filter(streams, ops, vet(where))


def found(index: Index, event: dict[str, object]) -> set[int]:
    """Whom an event is looked at for: by the tables, or because every event is."""
    numbers = set(index.tested)
    for table in index.tables:
        key = tuple(event.get(column if isinstance(column, str) else column.json_path) for column in table.columns)
        numbers.update(table.rows.get(key, ()))  # type: ignore[arg-type]
    return numbers


STREAMS = ("a", "b", "c")
DELIVERED = sorted({str(op) for op in Op} - UNDELIVERED_OPS)
WISHES = st.builds(
    filter_,
    st.sampled_from([None, "data.x = 'p'", "data.x = 'q' and data.n > 1", "key = 'k'", "data.n > 2", "stream = 'a'"]),
    st.lists(st.sampled_from(STREAMS), max_size=3, unique=True).map(tuple),
    st.lists(st.sampled_from(DELIVERED), max_size=3, unique=True).map(tuple),
)
EVENTS = st.fixed_dictionaries(
    {
        "stream": st.sampled_from(STREAMS),
        "op": st.sampled_from(DELIVERED),
        "key": st.sampled_from(["k", "l", None]),
        "$.x": st.sampled_from(["p", "q", None]),
    }
)


def could_want(one: Filter, event: dict[str, object]) -> bool:
    """Whether nothing that an index can know speaks against it."""
    if one.streams and event["stream"] not in one.streams:
        return False
    if one.ops and event["op"] not in one.ops:
        return False
    return all(
        event.get(column if isinstance(column, str) else column.json_path) == value
        for column, value in one.predicate.equalities
    )


@given(st.lists(WISHES, max_size=40), EVENTS)
def test_whoever_could_want_an_event_is_found_once(filters: list[Filter], event: dict[str, object]) -> None:
    """GIVEN any filters WHEN an event is looked up THEN nobody who could want it is missing, in one table at most."""
    index = index_of(filters)
    numbers = found(index, event)
    assert {n for n, one in enumerate(filters) if could_want(one, event)} <= numbers
    homes = [n for table in index.tables for n in {n for row in table.rows.values() for n in row}]
    assert len(homes) == len(set(homes))
    assert not set(homes) & set(index.tested)
    assert len(index.tables) <= TABLES_MAX


def test_a_thousand_like_subscriptions_are_one_table() -> None:
    """GIVEN a thousand subscriptions to values of one path WHEN indexed THEN an event meets only its own."""
    filters = [filter_(f"data.customer = 'c{n}'", ("orders",), ("insert",)) for n in range(1000)]
    index = index_of(filters)
    assert (len(index.tables), index.tested, index.whole) == (1, (), frozenset())
    assert found(index, {"stream": "orders", "op": "insert", "$.customer": "c7"}) == {7}


def test_what_no_event_can_be_is_in_no_table() -> None:
    """GIVEN a stream list that contradicts the predicate WHEN indexed THEN it costs nothing."""
    index = index_of([filter_("stream = 'b'", ("a",))] * 5)
    assert (index.tables, index.tested) == ((), ())


def test_many_streams_and_operations_do_not_multiply_without_end() -> None:
    """GIVEN hundreds of streams times operations WHEN indexed THEN rows stay few, and what was left out is tested."""
    many = tuple(f"s{n}" for n in range(ROWS_PER_FILTER_MAX))
    index = index_of([filter_(None, many, ("insert", "update"))] * 3)
    assert sum(len(table.rows) for table in index.tables) <= ROWS_PER_FILTER_MAX
    assert index.whole == frozenset({0, 1, 2})
    wider = index_of([filter_(None, (*many, "one more"), ("insert",))] * 3)
    assert wider.tested == (0, 1, 2)


def test_numbers_that_do_not_fit_their_column_are_left_to_the_test() -> None:
    """GIVEN values that no column of that type can hold WHEN indexed THEN they are tested, not looked up."""
    index = index_of([filter_("partition = 99999999999"), filter_("partition = 99999999999")])
    assert index.tested == (0, 1)
    exact = index_of([filter_("data.n = 1.5 and key = 'k'")] * 2)
    assert exact.tables[0].columns != ("key",)
