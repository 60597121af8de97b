"""Values of columns as JSON, without a server (P3)."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evermark.sources.postgres.tables.values import Column, Form, ValueType, as_json, column, escaped, objects

TEXT = ValueType("text")
INTEGER, BIGINT, FLOAT = (ValueType(f.name, f) for f in (Form.INTEGER, Form.BIGINT, Form.FLOAT))
BOOLEAN, TIMESTAMP = ValueType("boolean", Form.BOOLEAN), ValueType("timestamptz", Form.TIMESTAMP)
PAIR = ValueType("pair", Form.COMPOSITE, fields=(("a", TEXT), ("b", BIGINT)))
texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=12)
bigints = st.integers(-(2**63), 2**63 - 1)


def array_of(element: ValueType) -> ValueType:
    return ValueType(f"{element.name}[]", Form.ARRAY, element)


def of_one(field: ValueType) -> ValueType:
    return ValueType(f"of {field.name}", Form.COMPOSITE, fields=(("f", field),))


def written(values: Any) -> str:
    """As Postgres writes an array: what needs no quotes has none."""
    if isinstance(values, list):
        return "{" + ",".join(written(value) for value in values) + "}"
    if values is None:
        return "NULL"
    text = {True: "t", False: "f"}.get(values, str(values)) if isinstance(values, bool) else str(values)
    needs = not text or text.upper() == "NULL" or any(c in '{}",\\ \t\n\r\v\f' for c in text)
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' if needs else text


@given(st.lists(texts, min_size=1))
@example(['a"b', "c\\d", "\x01", "\n"])
def test_strings_are_escaped_as_json_asks(values: list[str]) -> None:
    """All of a column at once, and every one can be read back."""
    found = escaped(pa.array(values, pa.string())).to_pylist()
    assert [json.loads(f'"{each}"') for each in found] == values


@given(st.lists(st.lists(st.one_of(texts, st.none()), max_size=4), min_size=1, max_size=5))
def test_arrays_of_text_are_read_back(values: list[list[str | None]]) -> None:
    """Quoted or not, alone or among others."""
    made = column(pa.array([written(each) for each in values], pa.string()), array_of(TEXT)).json()
    assert [json.loads(each) for each in made.to_pylist()] == values


@pytest.mark.parametrize(
    "odd", ["{}", "{NULL}", '{"a b"}', "{{a,b}}", "[0:1]={a,b}", "{1}2", "x{a}", "{\\x01}", "{\x01}"]
)
@given(st.lists(st.lists(st.sampled_from(["a", "-2.5", "é", "b c"]), min_size=1), min_size=1), st.integers(0, 1))
def test_plain_arrays_are_as_each_is_alone(odd: str, lists: list[list[str]], skipped: int) -> None:
    """GIVEN arrays that a look at their bytes tells to be lists WHEN one is written otherwise THEN it is noticed."""
    plain = ["{" + ",".join(each) + "}" for each in lists]
    for values in ([*plain, *plain], [*plain, odd, *plain]):
        made = column(pa.array(values, pa.string())[skipped:], array_of(TEXT))
        assert made.json().to_pylist() == [as_json(text, array_of(TEXT)) for text in values[skipped:]]
        assert made.text.to_pylist() == made.json().to_pylist()


def test_a_key_has_all_of_its_text() -> None:
    """GIVEN times in UTC WHEN they are taken as text, as a key is, THEN the zone is as in JSON."""
    made = column(pa.array(["2024-01-02 03:04:05+00"]), TIMESTAMP)
    assert made.text.to_pylist() == ["2024-01-02T03:04:05+00:00"] and made.json().to_pylist() == [
        '"2024-01-02T03:04:05+00:00"'
    ]


@pytest.mark.parametrize(
    ("element", "values"),
    [
        (FLOAT, [[1.5, -1e300], [2.0]]),
        (INTEGER, [[1], [2, 3]]),
        (INTEGER, [[1, None], [], [[1, 2], [3, -4]]]),
        (BIGINT, [[1, 2**53 - 1, None], [2**53, 5]]),
        (BOOLEAN, [[True, None, False]]),
        (FLOAT, [[1.5, None, -1e300], ["NaN", "-Infinity", 1.0]]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
def test_arrays_of_numbers(element: ValueType, values: list[Any]) -> None:
    """Numbers stay numbers where JSON can hold them."""
    made = column(pa.array([written(each) for each in values], pa.string()), array_of(element)).json()
    wanted = json.loads(json.dumps(values).replace(str(2**53), f'"{2**53}"'))
    assert [json.loads(each) for each in made.to_pylist()] == wanted


@given(st.lists(st.tuples(texts, bigints), min_size=1, max_size=5))
def test_composites_are_read_back(values: list[tuple[str, int]]) -> None:
    """Quotes and backslashes are doubled in them."""
    rows = ['("{}",{})'.format(a.replace("\\", "\\\\").replace('"', '""'), b) for a, b in values]
    made = [json.loads(each) for each in column(pa.array(rows, pa.string()), PAIR).json().to_pylist()]
    assert [(row["a"], int(row["b"])) for row in made] == values


@given(bigints)
@example(2**53)
@example(-(2**53))
@example(2**53 - 1)
def test_one_value_is_written_as_a_column_of_them(number: int) -> None:
    """The two ways to write a value agree."""
    for kind, text in ((BIGINT, str(number)), (FLOAT, "NaN"), (BOOLEAN, "t"), (TIMESTAMP, "2024-01-01 00:00:00+00 BC")):
        assert column(pa.array([text, None], pa.string()), kind).json().to_pylist() == [as_json(text, kind), "null"]


@pytest.mark.parametrize("text", ["{1", "1}", "{1}}", "{1}2", "", "[0:1]=", '{"a}', "(1,2)"])
def test_what_is_no_array_after_all_stays_text(text: str) -> None:
    """A type of an extension may call itself an array."""
    assert json.loads(as_json(text, array_of(TEXT))) == text


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (PAIR, "(x,1,new)"),
        (PAIR, "(x)"),
        (PAIR, "(x,abc)"),
        (PAIR, "(x,1.5)"),
        (of_one(INTEGER), "(abc)"),
        (of_one(FLOAT), "(abc)"),
        (of_one(BOOLEAN), "(7)"),
        (of_one(ValueType("json", Form.JSON)), "(abc)"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_a_composite_of_other_fields_than_the_catalog_told_stays_text(kind: ValueType, text: str) -> None:
    """Its type was altered since: nothing of it is dropped, it is valid JSON, and nothing stops."""
    assert json.loads(as_json(text, kind)) == text
    assert json.loads(as_json(f'{{"{text}"}}', array_of(kind))) == [text]


@pytest.mark.parametrize("text", ["1e+300", "-0", "1.5e-07", "NaN", "-Infinity", "12345678901234567890"])
def test_floats_of_a_composite_are_numbers(text: str) -> None:
    """However Postgres writes them."""
    assert as_json(f"({text})", of_one(FLOAT)) == f'{{"f": {as_json(text, FLOAT)}}}'


TIMES = st.one_of(
    st.none(),
    st.sampled_from(
        ["infinity", "-infinity", "0044-03-15 12:00:00+00 BC", "10000-01-01 00:00:00+00", "2024-01-02 03:04"]
    ),
    st.datetimes().filter(lambda when: when.year >= 1000).map(lambda when: f"{when}+00"),
)


@given(st.lists(TIMES, min_size=1, max_size=8), st.integers(0, 3))
@example(["2024-01-02 03:04:05+00"], 0)
@example(["2024-01-02 03:04:05+00", "infinity"], 0)
def test_timestamps_of_any_kind_together(texts: list[str | None], skipped: int) -> None:
    """GIVEN timestamps of one kind or several WHEN a column of them is written THEN each is as it is alone."""
    made = column(pa.array(texts, pa.string())[skipped:], TIMESTAMP).json().to_pylist()
    assert made == ["null" if text is None else as_json(text, TIMESTAMP) for text in texts[skipped:]]


@given(st.lists(st.lists(st.one_of(texts, st.none()), min_size=3, max_size=3), min_size=1, max_size=5))
def test_objects_are_read_back(rows: list[list[str | None]]) -> None:
    """GIVEN rows of texts, numbers and nulls WHEN they are written as objects THEN a JSON parser reads them back."""
    names = ["a", 'b"', "c"]
    columns = [Column(pa.array([row[n] for row in rows], pa.string())) for n in range(3)]
    numbers = Column(pa.array([str(n) for n in range(len(rows))]), quoted=False)
    made = objects([*names, "n"], [*columns, numbers], len(rows)).to_pylist()
    assert [json.loads(each) for each in made] == [
        dict(zip(names, row, strict=True)) | {"n": n} for n, row in enumerate(rows)
    ]
