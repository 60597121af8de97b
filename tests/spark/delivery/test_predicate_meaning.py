"""What predicates mean, held against a Python oracle, and that none of them can make a job fail."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

import pytest

from evermark.delivery.model import SubscriptionSpec
from evermark.errors import ConfigError
from evermark.log.frames import SCHEMA as LOG_SCHEMA
from evermark.predicate import Path, Predicate, match_sql, variant_sql, vet
from evermark.predicate.index import Filter, index_of
from evermark.predicate.pattern import longest_searched

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SEED = int(os.environ.get("EVERMARK_SEED", "20261115"))
RANDOM_PREDICATES = 80
LOG_COLUMNS = [field.strip().split(" ", 1) for field in LOG_SCHEMA.split(",")]
QUOTED_A = "'a'"
TIMES = ("timestamp '9999-12-31'", "date '0001-01-01'")
SCHEMA = (
    "n int, event_id string, source string, partition int, stream string, key string, op string, tx string, "
    "origin string, origin_seq bigint, event_time timestamp, payload string, before string, schema_version int"
)
BIG = 2**53 + 1
NASTY = 'it\'s "q" \\ \\u0027 ${env:HOME} ${spark.app.name} {x} `b` -- /* ; \n\t\0 \u2028 é 😀'

# Each is the `t` of one payload; `before.t` is that of the row above.
VALUES: list[Any] = [
    *(0, 1, -1, 42, 100, 99.5, 100.5, 0.1, 1e-12, -0.5, 1e30, 1e300, BIG - 1, BIG, BIG + 1),
    *(12345678901234567890, 123456789012345678901234567890, "99.50", "100", "100.00", " 7 ", "-5", str(BIG)),
    *(str(BIG - 1), "1e30", "0042", "9", "10", "", "a", "A", "abc", "abcabc", "a%c", "a_c", "a\\c", "ab\nc"),
    *("É", "é", "straße", "日本語", "😀😀", "it's", NASTY, "a" * 20_000, "a" * 500, "true", "false", "null"),
    *("2026-01-01", "2026-01-02T03:04:05Z", "2026-01-01T01:00:00+02:00", True, False, None),
    *([], [1, "a", None], ["x", "y"], [BIG], {}, {"u": 1}, {"u": {"v": "w"}}, [{"sku": "s1"}, {"sku": "s2"}]),
]
BROKEN = ["", "not json", "{", '{"t":', "[1]", '"text"', "7", "null", "[" * 3000, "\0", None]

Row = dict[str, Any]
Truth = bool | None
Oracle = Callable[[Row], Truth]


def rows() -> list[Row]:
    payloads: list[str | None] = [json.dumps({"t": value, "odd key": value, "it's": 1}) for value in VALUES]
    payloads += [json.dumps({"other": 1}), *BROKEN]
    return [
        {
            "n": n,
            "event_id": f"e{n}",
            "source": "shop",
            "partition": n % 3,
            "stream": "public.orders",
            "key": None if n % 7 == 0 else NASTY if n % 7 == 1 else f"k-{n}",
            "op": "insert",
            "tx": None,
            "origin": None,
            "origin_seq": 2**53 + n,
            "schema_version": None if n % 2 else 3,
            "event_time": None if n % 5 == 0 else datetime(2026, 1, 1, n % 24, tzinfo=UTC),
            "payload": payload,
            "before": payloads[n - 1] if n else None,
        }
        for n, payload in enumerate(payloads)
    ]


def document(payload: str | None) -> Any:
    try:
        return json.loads(payload or "", parse_float=Decimal)
    except (ValueError, RecursionError):
        return None


def t(row: Row, column: str = "payload") -> Any:
    found = document(row[column])
    return found.get("t") if isinstance(found, dict) else None


def number(value: Any) -> Decimal | None:
    if isinstance(value, bool | int | Decimal):
        return Decimal(value)
    if isinstance(value, str) and re.fullmatch(r"\s*[-+]?\d+(\.\d+)?(e\d+)?\s*", value):
        return Decimal(value.strip())
    return None


def text(value: Any) -> str | None:
    if isinstance(value, bool | list | dict):
        return json.dumps(value, separators=(",", ":"), ensure_ascii=False)
    if isinstance(value, Decimal):
        return str(value).replace("E", ".0E").replace("+", "")
    return None if value is None else str(value)


def flag(value: Any) -> Truth:
    if isinstance(value, bool | int | Decimal):
        return bool(value)
    return {"true": True, "false": False}.get(value) if isinstance(value, str) else None


def num(relation: Callable[[Decimal], bool]) -> Oracle:
    return lambda row: None if (value := number(t(row))) is None else relation(value)


def txt(relation: Callable[[str], bool]) -> Oracle:
    return lambda row: None if (value := text(t(row))) is None else relation(value)


def arr(relation: Callable[[list[Any]], Truth]) -> Oracle:
    return lambda row: relation(t(row)) if isinstance(t(row), list) else None


def col(name: str, relation: Callable[[Any], bool]) -> Oracle:
    return lambda row: None if row[name] is None else relation(row[name])


def texts(relation: Callable[[str, str], bool]) -> Oracle:
    def oracle(row: Row) -> Truth:
        now, before = text(t(row)), text(t(row, "before"))
        return None if now is None or before is None else relation(now, before)

    return oracle


def like(pattern: str) -> Oracle:
    return txt(lambda value: len(value) < 1000 and re.fullmatch(pattern, value, re.DOTALL) is not None)


def has(value: Any, read: Callable[[Any], Any]) -> Oracle:
    def oracle(items: list[Any]) -> Truth:
        found = [read(item) for item in items]
        return True if value in found else None if None in found else False

    return arr(oracle)


def ordered_pair(row: Row) -> Truth:
    one, two = number(t(row)), number(t(row, "before"))
    if one is not None and two is not None:
        return one > two
    return texts(lambda now, before: now.encode() > before.encode())(row)


def day(row: Row) -> Truth:
    days = {"2026-01-01": True, "2026-01-02T03:04:05Z": False, "2026-01-01T01:00:00+02:00": True, "0042": False}
    return days.get(t(row)) if isinstance(t(row), str) else None


NUMBERS: dict[str, Oracle] = {
    "data.t > 100": num(lambda v: v > 100),
    "data.t >= 99.50": num(lambda v: v >= Decimal("99.5")),
    "data.t = 100": num(lambda v: v == 100),
    "100 <> data.t": num(lambda v: v != 100),
    "data.t < 0": num(lambda v: v < 0),
    "data.t > 0": num(lambda v: v > 0),
    f"data.t = {BIG}": num(lambda v: v == BIG),
    f"data.t < {BIG}": num(lambda v: v < BIG),
    f"data.t >= {BIG}": num(lambda v: v >= BIG),
    f"data.t <> {BIG}": num(lambda v: v != BIG),
    f"data.t in (1, 42, {BIG})": num(lambda v: v in (1, 42, BIG)),
    "data.t not in (1, -5)": num(lambda v: v not in (1, -5)),
    "data.t between 1 and 100": num(lambda v: 1 <= v <= 100),
    "data.t > 1e29": num(lambda v: v > Decimal("1e29")),
    "data.t = 1e-12": num(lambda v: v == Decimal("1e-12")),
    "data.t * 2 + 1 > 201": num(lambda v: v * 2 + 1 > 201),
    "data.t - 1 = -1": num(lambda v: float(v) - 1 == -1),
    "data.t / 0 > 1": lambda row: None,
    "data.t % 2 = 1": num(lambda v: v > 0 and float(v) % 2 == 1),
    "abs(data.t) = 1": num(lambda v: abs(v) == 1),
    "floor(data.t) = 99": num(lambda v: 99 <= v < 100),
    "ceil(data.t) = 1": num(lambda v: 0 < v <= 1),
    "floor(data.t) > 1e29": num(lambda v: v > Decimal("1e29")),
    "round(data.t) = 100": num(lambda v: Decimal("99.5") <= v < Decimal("100.5")),
    f"cast(data.t as bigint) = {BIG}": lambda row: (
        None if (v := number(t(row))) is None or abs(v) >= 2**63 else int(v) == BIG
    ),
    "coalesce(data.absent, data.t) > 100": num(lambda v: v > 100),
    "if(data.t > 100, 'big', 'small') = 'big'": lambda row: (number(t(row)) or 0) > 100,
    "data.t = origin_seq": lambda row: num(lambda v: v == row["origin_seq"])(row),
    "data.t > before.t": ordered_pair,
}
TEXTS: dict[str, Oracle] = {
    "data.t = 'a'": txt(lambda v: v == "a"),
    "data.t = '100'": txt(lambda v: v == "100"),
    "data.t <> 'abc'": txt(lambda v: v != "abc"),
    "data.t in ('a', 'É', '😀😀')": txt(lambda v: v in ("a", "É", "😀😀")),
    "data.t = 'it''s'": txt(lambda v: v == "it's"),
    "lower(data.t) = 'é'": txt(lambda v: v.lower() == "é"),
    "length(data.t) = 2": txt(lambda v: len(v) == 2),
    "substring(data.t, 2, 2) = 'bc'": txt(lambda v: v[1:3] == "bc"),
    "concat(data.t, '!') = 'a!'": txt(lambda v: v == "a"),
    "trim(data.t) = '7'": txt(lambda v: v.strip(" ") == "7"),
    "startswith(data.t, 'ab')": txt(lambda v: v.startswith("ab")),
    "endswith(data.t, 'c')": txt(lambda v: v.endswith("c")),
    "contains(data.t, '語')": txt(lambda v: "語" in v),
    "data.t like 'a%c'": like("a.*c"),
    "data.t like 'abc%bc'": like("abc.*bc"),
    "data.t like '%i%\\'%s \"%${e%: %😀'": like(".*i.*'.*s \".*\\$\\{e.*: .*😀"),
    "data.t like 'ab%bc'": like("ab.*bc"),
    "data.t like 'a%b%c%c'": like("a.*b.*c.*c"),
    "data.t like '%b%a%'": like(".*b.*a.*"),
    "data.t like '%bca%'": like(".*bca.*"),
    "data.t like 'abc'": like("abc"),
    "data.t like '%'": txt(lambda v: True),
    "data.t like 'a_c'": like("a.c"),
    "data.t like '_'": like("."),
    r"data.t like 'a\\%c'": like("a%c"),
    r"data.t like 'a\_c'": like("a_c"),
    r"data.t like 'a\\\\c'": like(r"a\\c"),
    "data.t not like 'a%'": txt(lambda v: not v.startswith("a")),
    "data.t ilike '%A%'": txt(lambda v: "a" in v.lower()),
    "data.t ilike 'A'": txt(lambda v: v.lower() == "a"),
    r"data.t rlike r'^\d+\.\d+$'": lambda row: (
        None
        if (v := text(t(row))) is None or len(v) > longest_searched(r"^\d+\.\d+$")
        else re.search(r"^\d+\.\d+$", v) is not None
    ),
    "data.t <> before.t": texts(lambda now, before: now != before),
    "data.t <=> before.t": lambda row: text(t(row)) == text(t(row, "before")),
    "data.t is distinct from before.t": lambda row: text(t(row)) != text(t(row, "before")),
    "coalesce(data.t, 'none') = 'none'": lambda row: text(t(row)) in (None, "none"),
    "nullif(data.t, 'a') is null": lambda row: text(t(row)) in (None, "a"),
    "case data.t when 'a' then 1 else 2 end = 1": lambda row: t(row) == "a",
}
OTHERS: dict[str, Oracle] = {
    "data.t": lambda row: flag(t(row)),
    "data.t = true": lambda row: flag(t(row)),
    "data.t is true": lambda row: flag(t(row)) is True,
    "data.t is null": lambda row: t(row) is None,
    "data.t is not null": lambda row: t(row) is not None,
    "data.`odd key` is null": lambda row: t(row) is None,
    'data["it\'s"] = 1': lambda row: True if row["n"] < len(VALUES) else None,
    "data.t.u.v = 'w'": lambda row: True if t(row) == {"u": {"v": "w"}} else None,
    "data.t[0].sku = 's1'": lambda row: True if t(row) == [{"sku": "s1"}, {"sku": "s2"}] else None,
    "data.t[1] = 'y'": arr(lambda v: v[1] == "y" if len(v) > 1 else None),
    "size(data.t) = 2": arr(lambda v: len(v) == 2),
    "array_contains(data.t, 'x')": has("x", text),
    f"array_contains(data.t, {BIG})": has(Decimal(BIG), number),
    "data.t = date '2026-01-01'": day,
    "data.t like '2026%' and data.t >= timestamp '2026-01-01'": txt(
        lambda v: v in ("2026-01-01", "2026-01-02T03:04:05Z")
    ),
    "case when data.t > 100 then true when data.t = 'a' then false end": lambda row: (
        True if (number(t(row)) or 0) > 100 else False if t(row) == "a" else None
    ),
    "before is null": lambda row: document(row["before"]) is None,
    "key = '" + "".join(f"\\u{ord(c):04X}" if ord(c) < 0x10000 else c for c in NASTY) + "'": col(
        "key", lambda v: v == NASTY
    ),
    "partition = 1": col("partition", lambda v: v == 1),
    f"origin_seq > {BIG}": col("origin_seq", lambda v: v > BIG),
    "schema_version > 2.5": col("schema_version", lambda v: v > 2.5),
    "event_time >= '2026-01-01T05:00:00+01:00'": col("event_time", lambda v: v >= datetime(2026, 1, 1, 4, tzinfo=UTC)),
    "event_time = date '2026-01-01'": col("event_time", lambda v: v == datetime(2026, 1, 1, tzinfo=UTC)),
    "tx is null and origin is null": lambda row: True,
    "event_id in ('e1', 'e2') and stream = 'public.orders'": lambda row: row["n"] in (1, 2),
}
CASES = {**NUMBERS, **TEXTS, **OTHERS}


def events(spark: SparkSession) -> DataFrame:
    columns = [field.split(" ")[0] for field in SCHEMA.split(", ")]
    frame = spark.createDataFrame([tuple(row[name] for name in columns) for row in rows()], SCHEMA)
    return frame.selectExpr("*", f"{variant_sql('payload')} payload_v", f"{variant_sql('before')} before_v")


OPS = ((), ("insert",), ("insert", "update"), ("delete",))


def whole_events(spark: SparkSession) -> DataFrame:
    """The same rows with every column of the log."""
    have = events(spark)
    missing = [f"cast(null as {kind}) as {name}" for name, kind in LOG_COLUMNS if name not in have.columns]
    return have.selectExpr("*", *missing)


def extracted(frame: DataFrame, predicates: list[Predicate]) -> tuple[DataFrame, Callable[[Path], str]]:
    """Each path once, under an alias, as a matcher does it."""
    aliases = {path: f"p{n}" for n, path in enumerate(sorted({p for predicate in predicates for p in predicate.paths}))}
    columns = [f"{path.extract_sql(path.column + '_v')} {name}" for path, name in aliases.items()]
    return frame.selectExpr("*", *columns), aliases.__getitem__


@pytest.fixture
def answers(spark: SparkSession) -> Callable[[list[str]], dict[int, list[Any]]]:
    """By row number: the truth of each predicate, all in one job."""

    def run(texts: list[str]) -> dict[int, list[Any]]:
        predicates = [vet(where) for where in texts]
        frame, alias = extracted(events(spark), predicates)
        truths = [f"{predicate.sql(alias)} as c{n}" for n, predicate in enumerate(predicates)]
        return {row[0]: list(row)[1:] for row in frame.selectExpr("n", *truths).collect()}

    return run


def test_a_predicate_means_what_the_oracle_says(answers: Callable[[list[str]], dict[int, list[Any]]]) -> None:
    """GIVEN payloads of every kind WHEN each predicate runs under ANSI THEN true, false and null are the oracle's."""
    found = answers(list(CASES))
    wrong = [
        f"{where}: row {row['n']} ({str(row['payload'])[:60]}) is {truth}, not {oracle(row)}"
        for row in rows()
        for (where, oracle), truth in zip(CASES.items(), found[row["n"]], strict=True)
        if truth != oracle(row)
    ]
    assert not wrong, "\n".join(wrong[:40])


class Maker:
    """Random predicates of every allowed form, with values chosen to overflow, divide by zero and fail casts."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def one(self, *forms: Callable[[], str]) -> str:
        return self.random.choice(forms)()

    def of(self, *texts: str) -> str:
        return self.random.choice(texts)

    def path(self) -> str:
        return self.of("data.t", "data.t", "before.t", "data.`odd key`", "data.t.u", "data.t[0]", "data.absent", "data")

    def number(self, depth: int) -> str:
        if depth <= 0:
            big = ("9223372036854775807", "-9223372036854775808", "12345678901234567890123456789", "1e300", "1e-300")
            return self.of(*big, "0", "-1", "0.1", "origin_seq", "partition", "schema_version", self.path())
        deeper = depth - 1
        return self.one(
            lambda: f"({self.number(deeper)} {self.of(*'+-*/%')} {self.number(deeper)})",
            lambda: f"{self.of('abs', 'floor', 'ceil', 'round')}({self.number(deeper)})",
            lambda: f"round({self.number(deeper)}, {self.of('-18', '0', '18')})",
            lambda: f"-({self.number(deeper)})",
            lambda: f"length({self.text(deeper)})",
            lambda: f"size({self.path()})",
            lambda: (
                f"cast({self.text(deeper)} as {self.of('int', 'bigint', 'double', 'decimal(3,2)', 'decimal(38,9)')})"
            ),
            lambda: f"cast({self.number(deeper)} as {self.of('bigint', 'double', 'decimal(5,0)')})",
            lambda: f"coalesce({self.number(deeper)}, {self.number(deeper)})",
            lambda: f"nullif({self.number(deeper)}, {self.number(deeper)})",
            lambda: f"if({self.condition(deeper)}, {self.number(deeper)}, {self.number(deeper)})",
        )

    def text(self, depth: int) -> str:
        if depth <= 0:
            return self.of("'a'", "''", "'99.5'", r"'\\'", "'é😀'", "key", "tx", "op", self.path(), self.path())
        deeper = depth - 1
        return self.one(
            lambda: f"{self.of('lower', 'upper', 'trim')}({self.text(deeper)})",
            lambda: f"substring({self.text(deeper)}, {self.number(deeper)}, {self.number(deeper)})",
            lambda: f"concat({self.text(0)}, {self.text(0)})",
            lambda: f"cast({self.number(deeper)} as string)",
            lambda: f"coalesce({self.text(deeper)}, {self.text(deeper)})",
            lambda: f"case when {self.condition(deeper)} then {self.text(deeper)} else {self.text(deeper)} end",
        )

    def condition(self, depth: int) -> str:
        if depth <= 0:
            return self.of(
                "true", "data.t", "not data.t", "key is null", "op = 'insert'", f"data.t = {BIG}", "data.t = 1"
            )
        deeper = depth - 1
        sign = self.of("=", "<>", "<", ">=", "<=>")
        return self.one(
            lambda: f"{self.number(deeper)} {sign} {self.number(deeper)}",
            lambda: f"{self.text(deeper)} {sign} {self.text(deeper)}",
            lambda: f"{self.path()} {sign} {self.path()}",
            lambda: f"({self.condition(deeper)} {self.of('and', 'or')} {self.condition(deeper)})",
            lambda: f"(op = 'insert' and {self.path()} = {self.of('1', chr(39) + 'a' + chr(39), 'true', str(BIG))})",
            lambda: f"not ({self.condition(deeper)})",
            lambda: f"{self.text(deeper)} {self.of('like', 'ilike')} '{self.of('%a%b%a', '_%', 'a%', '%', '', '%a_')}'",
            lambda: f"{self.text(deeper)} rlike '{self.of('^a*a*b', '[a-c]+b', '^(a|b)?c{0,9}$', '')}'",
            lambda: f"{self.of('startswith', 'endswith', 'contains')}({self.text(deeper)}, {self.text(deeper)})",
            lambda: f"array_contains({self.path()}, {self.of('1', str(BIG), 'true', chr(39) + 'x' + chr(39))})",
            lambda: f"{self.path()} > {self.of('event_time', *TIMES)}",
            lambda: f"{self.number(deeper)} in (1, -1.5, {BIG})",
            lambda: f"{self.number(deeper)} between {self.number(deeper)} and {self.number(deeper)}",
        )


def random_predicates(seed: int, wanted: int) -> list[Predicate]:
    maker = Maker(seed)
    made: list[Predicate] = []
    while len(made) < wanted:
        try:
            # Every other one begins with an equality, so that the index has something to do whatever the seed.
            equality = f"{maker.path()} = {maker.of('1', str(BIG), 'true', QUOTED_A)} and " if len(made) % 2 else ""
            made.append(vet(f"{equality}({maker.condition(maker.random.randint(1, 3))})"))
        except ConfigError:
            continue
    return made


def literal_sql(path: str | Path, value: object, alias: Callable[[Path], str]) -> str:
    """An equality as an index would hold it: the extracted value beside one of the same type."""
    left = path if isinstance(path, str) else alias(path)
    if isinstance(value, str):
        return f"{left} <=> decode(unhex('{value.encode().hex()}'), 'utf-8')"
    kind = "boolean" if isinstance(value, bool) else "bigint" if isinstance(path, str) else path.cast
    return f"{left} <=> cast('{value}' as {kind})"


def test_no_predicate_can_make_a_job_fail_and_the_index_changes_no_meaning(spark: SparkSession) -> None:
    """GIVEN random predicates over hostile payloads WHEN run under ANSI THEN no error, no null, one meaning."""
    print(f"seed {SEED}")
    assert spark.conf.get("spark.sql.ansi.enabled") == "true"
    predicates = random_predicates(SEED, RANDOM_PREDICATES)
    frame, alias = extracted(events(spark), predicates)
    checks = []
    for predicate in predicates:
        indexed = [literal_sql(path, value, alias) for path, value in predicate.equalities]
        residual = predicate.residual_sql(alias)
        by_index = " and ".join(indexed + ([residual] if residual else []))
        checks.append(f"{match_sql([], [], predicate, alias)} = coalesce({by_index}, false)")
    found = frame.selectExpr(*(f"{check} as c{n}" for n, check in enumerate(checks))).collect()
    wrong = {predicates[n].text for row in found for n, same in enumerate(row) if same is not True}
    assert not wrong, f"seed {SEED}: {sorted(wrong)[:5]}"
    assert sum(bool(predicate.equalities) for predicate in predicates) >= RANDOM_PREDICATES // 2


def random_specs(predicates: list[Predicate]) -> list[SubscriptionSpec]:
    """Subscriptions that name streams and operations, or not, and ask for more, or not."""
    rng = random.Random(SEED)
    choices = ((), ("public.orders",), ("public.orders", "public.users"), ("nobody.writes",))
    columns = (
        "partition = 99999999999",
        "schema_version = 2",
        "key = 'a'",
        "stream = 'public.orders'",
        "op = 'insert'",
    )
    wheres = [None, *columns, *(predicate.text for predicate in predicates)]
    return [
        SubscriptionSpec(f"s{n}", "http://a.example", streams=rng.choice(choices), ops=rng.choice(OPS), where=where)
        for n, where in enumerate(wheres * 2)
    ]


def test_looked_up_or_tested_one_by_one_the_same_events_match_in_the_same_order(spark: SparkSession) -> None:
    """GIVEN many subscriptions WHEN events are looked up in the index THEN each gets what testing each would give."""
    from evermark.spark.match import matched

    specs = random_specs(random_predicates(SEED, 40))
    # Of one line, or all would be tested or all in one table.
    index = index_of([Filter(spec.streams, spec.ops, vet(spec.where)) for spec in specs])
    assert len(index.tables) > 2
    assert len(index.whole) > 2
    assert len(index.tested) > 2
    frame = whole_events(spark).coalesce(1)
    order = [row[0] for row in frame.select("event_id").collect()]
    found = []
    for tested_max in (len(specs), 0):
        rows = matched(frame, specs, ("event_id",), tested_max).collect()
        assert list(dict.fromkeys(row[0] for row in rows)) == [i for i in order if i in {row[0] for row in rows}]
        found.append(sorted((row[0], row[1]) for row in rows))
    assert found[0]
    assert found[0] == found[1], f"seed {SEED}"


# Just inside the limits: each must get through Spark's parser, analyser and evaluation.
DEEPEST = [
    "(" * 25 + "true" + ")" * 25,
    "not " * 48 + "data.t",
    "lower(" * 25 + "key" + ")" * 25 + " = 'a'",
    "data.t" + " + 1" * 47 + " > 1",
    "case when " * 24 + "true" + " then true end" * 24,
    "not (" * 20 + "data.t" + ")" * 20,
    " or ".join(f"data.t = {n}" for n in range(80)),
    "data.t in (" + ",".join(str(n) for n in range(490)) + ")",
    " and ".join("data.t like '%a%a%a%a%a%a%a%a%a%a%b'" for _ in range(20)),
    " and ".join("data.t rlike '^a*a*b'" for _ in range(30)),
    "floor(" * 6 + "data.t" + ")" * 6 + " > before.t",
]


@pytest.mark.timeout(120)
def test_the_largest_allowed_predicates_run_in_bounded_time(
    answers: Callable[[list[str]], dict[int, list[Any]]],
) -> None:
    """GIVEN predicates at the limits and values that make patterns backtrack WHEN run THEN they come to an end."""
    found = answers(DEEPEST)
    assert len(found) == len(rows())
    assert all(row[0] is True for row in found.values())
