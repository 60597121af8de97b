"""D11: a predicate is a text from outside. Each way out of it has its own test, at every door it may come in by.

`test_predicate.py` holds the whole table of what is refused; here are the attacks, in the disguises they come in.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from evermark.app.build import open_deployment
from evermark.config import Config, SubscriptionConfig
from evermark.errors import ConfigError
from evermark.predicate import vet
from tests.unit.server.api_scene import SECRET, WANTED, served

# Seconds of this thread's processor time, which other work on the machine does not lengthen: far more than it takes,
# far less than a bomb needs.
VET_S_MAX = 2.0


def refused(where: str, names: str | None = None) -> None:
    """Refused, quickly, with a hint of what to use instead."""
    begun = time.thread_time()
    with pytest.raises(ConfigError, match=names) as caught:
        vet(where)
    assert time.thread_time() - begun < VET_S_MAX
    assert caught.value.hint
    assert len(str(caught.value)) < 600


def disguises(call: str) -> list[str]:
    """A condition with the call in it: plain, in capitals, quoted, qualified, and inside what is allowed."""
    name, _, rest = call.partition("(")
    return [
        f"{call} = 'a'",
        f"{name.upper()}({rest} = 'a'",
        f"{name} ({rest} = 'a'",
        f"`{name}`({rest} = 'a'",
        f"system.builtin.{name}({rest} = 'a'",
        f"not ({call} is null)",
        f"coalesce({call}, op) = 'a'",
        f"op = 'insert' and (key = 'a' or lower({call}) = 'b')",
        f"case when false then {call} = 'a' else true end",
        f"op in ({call})",
        f"op like {call}",
        f"data.a[{call}] = 1",
        f"cast({call} as int) = 1",
    ]


@pytest.mark.parametrize("name", ["reflect", "try_reflect"])
@pytest.mark.parametrize("which", range(13))
def test_d11_reflect_is_refused_in_every_disguise(name: str, which: int) -> None:
    """It would call any static method of the JVM."""
    refused(disguises(f"{name}('java.lang.System', 'getenv', 'HOME')")[which])


@pytest.mark.parametrize("which", range(13))
def test_d11_java_method_is_refused_in_every_disguise(which: int) -> None:
    """The other name of the same thing."""
    refused(disguises("java_method('java.lang.Runtime', 'getRuntime')")[which])


@pytest.mark.parametrize(
    "where",
    [
        "op = (select max(op) from secrets)",
        "op in (select op from secrets)",
        "op = any (select op from secrets)",
        "exists (select 1 from secrets)",
        "not exists (select 1)",
        "coalesce((select true), false)",
        "case when true then (select true) end",
        "(with t as (select true as x) select x from t)",
        "op = (values ('a'))",
        "op = (table secrets)",
        "op in (from secrets select op)",
        "(((select true)))",
        "op = 'a' and (select count(*) from secrets) > 0",
    ],
)
def test_d11_a_subquery_is_refused(where: str) -> None:
    """No predicate reads anything but the event it is asked about."""
    refused(where)


@pytest.mark.parametrize(
    "where",
    [
        "op in (select value from text.`/etc/passwd`)",
        "exists (select 1 from parquet.`s3a://bucket/key`)",
        "csv.`/etc/passwd`.a = 1",
        "text.`file:///etc/passwd` = 'a'",
        "delta.`/log/shop`.op = 'a'",
        "op in (select * from read_files('/etc'))",
        "read_files('/etc/passwd') = 'a'",
        "input_file_name() = 'a'",
        "input_file_block_start() = 1",
        "_metadata.file_path = 'a'",
        "secrets.password = 'a'",
        "other_db.secrets.password = 'a'",
    ],
)
def test_d11_no_file_and_no_table_is_read(where: str) -> None:
    """Neither by a path, nor by a table function, nor by the name of a table or of a hidden column."""
    refused(where)


@pytest.mark.parametrize(
    "where",
    [
        "(" * 60 + "true" + ")" * 60,
        "(" * 8_000,
        "not " * 1_900 + "true",
        "lower(" * 400 + "op" + ")" * 400 + " = 'a'",
        "case when " * 300 + "true" + " then true end" * 300,
        "data" + ".a" * 3_000 + " = 1",
        "data" + "[0]" * 2_000 + " = 1",
        "op = 'a'" + " and op = 'a'" * 600,
        "op = 'a'" + " or (op = 'a'" * 300 + ")" * 300,
        "data.a = " + "-" * 4_000 + "1",
        "data.a = 1" + " + 1" * 1_900,
        "nullif(" * 40 + "data.a" + ", 1)" * 40 + " = 2",
    ],
    ids=lambda where: f"{where[:12]} {len(where)}",
)
def test_d11_a_bomb_of_nesting_is_refused_at_once(where: str) -> None:
    """Neither the parser's stack nor Spark's plan grows with what somebody sends."""
    refused(where)


@pytest.mark.parametrize(
    "where",
    [
        "op = '" + "a" * 9_000 + "'",
        "op = '" + "\\u0041" * 3_000 + "'",
        "data.a = " + "9" * 8_000,
        "data.a = 1e999999999",
        "data.a > 1e-999999999",
        "data.a = 0." + "0" * 5_000 + "1",
        "data.a = cast('1e999999999' as decimal(38, 0))",
        "op in (" + ",".join(["'a'"] * 2_000) + ")",
        "data.a in (" + ",".join(map(str, range(1_500))) + ")",
        "concat(" + ",".join(["op"] * 500) + ") = 'a'",
        "length(repeat('a', 2000000000)) > 1",
        "length(space(2000000000)) > 1",
        "length(lpad(op, 2000000000, 'x')) > 1",
        "size(sequence(1, 2000000000)) > 1",
        "size(array_repeat(op, 2000000000)) > 1",
        "round(data.a, 2147483647) = 1",
    ],
    ids=lambda where: f"{where[:24]} {len(where)}",
)
def test_d11_a_huge_literal_or_value_is_refused(where: str) -> None:
    """What is written is bounded, and nothing that is allowed makes much out of little."""
    refused(where)


@pytest.mark.parametrize(
    "pattern",
    [
        "(a+)+$", "(a*)*b", "(a|a)*$", "(a|aa)+$", "(.*a){25}", "(a?){30}a{30}", "([a-z]+)*@", "(.+)+x",
        "^(([a-z])+.)+$", "(a{1,50}){1,50}", ".*.*.*.*.*x", "(.*)\\\\1", "(?:(?:a+)+)+b", "(?=(a+)+)b", "a{2147483647}",
        "((((((((a)*)*)*)*)*)*)*)*",
    ],
)  # fmt: skip
@pytest.mark.parametrize("form", ["op rlike '{}'", "regexp_like(op, '{}')", "data.a rlike '{}'", "not key rlike '{}'"])
def test_d11_a_regex_bomb_is_refused(pattern: str, form: str) -> None:
    """A pattern that could backtrack for ages on a value of a hundred characters never reaches Java."""
    refused(form.format(pattern), "RLIKE")


@pytest.mark.parametrize(
    "where", ["op like '%_a%_a%_a%_b'", "op like '" + "%a" * 30 + "'", "op ilike '" + "%_" * 40 + "'"]
)
def test_d11_a_like_bomb_is_refused(where: str) -> None:
    """LIKE becomes a regular expression in Spark: the same bound holds."""
    refused(where, "LIKE|%")


def test_d11_an_allowed_pattern_runs_on_values_of_bounded_length() -> None:
    """Even a harmless pattern is not run over a megabyte somebody put into a field."""
    assert "length(key) <= 262144, " in vet("key rlike '^[a-z]+$'").sql(lambda path: "p")


ESCAPES = {
    "reflect": "reflect('java.lang.System', 'exit', 0) is null",
    "java_method": "java_method('java.lang.System', 'getenv', 'HOME') = 'a'",
    "subquery": "op in (select op from secrets)",
    "file": "csv.`/etc/passwd`.a = 1",
    "nesting": "(" * 60 + "true" + ")" * 60,
    "literal": "data.a = " + "9" * 4_000,
    "regex": "op rlike '(a+)+$'",
}


@pytest.mark.parametrize("escape", ESCAPES.values(), ids=ESCAPES.keys())
def test_d11_the_file_is_no_way_around(tmp_path: Path, escape: str) -> None:
    """GIVEN an escape in evermark.yaml WHEN the deployment is built THEN it ends there, naming the subscription."""
    asked = SubscriptionConfig(url="https://a.example/", secret=SECRET, where=escape)  # type: ignore[arg-type]
    config = Config(version=1, name="test", data=tmp_path, subscriptions={"billing": asked})
    with pytest.raises(ConfigError, match=r"subscriptions\.billing"):
        open_deployment(config)


def test_d11_the_api_is_no_way_around(tmp_path: Path) -> None:
    """GIVEN an escape WHEN a subscription is made with it or changed to it THEN 422, and none is kept."""
    with served(tmp_path) as api:
        for escape in ESCAPES.values():
            assert api.post("/v1/subscriptions", {**WANTED, "where": escape}).status == 422, escape
        assert "billing" not in api.store.subscriptions()
        assert api.post("/v1/subscriptions", WANTED).status == 201
        for escape in ESCAPES.values():
            assert api.ask("PATCH", "/v1/subscriptions/billing", {"where": escape}).status == 422, escape
        assert api.store.subscription("billing").spec.where is None
