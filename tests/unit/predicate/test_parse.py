"""Predicates are hostile texts: what is not on the allow list is refused, and what runs is written by us."""

from __future__ import annotations

import pickle
import re
from decimal import Decimal

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sqlglot import exp
from sqlglot.dialects import Spark

from evermark.errors import ConfigError
from evermark.predicate import Path, Predicate, match_sql, variant_sql, vet
from evermark.predicate.fragment import json_path, string_sql
from evermark.predicate.pattern import longest_searched

# Every function our own SQL may call. None of them reads anything but its arguments, and none can raise.
WRITTEN = {
    *(
        "abs",
        "array_contains",
        "array_size",
        "cast",
        "ceil",
        "coalesce",
        "concat",
        "contains",
        "endswith",
        "floor",
        "if",
    ),
    *(
        "length",
        "lower",
        "round",
        "split",
        "try_element_at",
        "startswith",
        "substring",
        "trim",
        "try_cast",
        "try_divide",
    ),
    *("try_mod", "upper", "decimal", "in", "and", "or", "not", "when", "then", "else", "case"),
}
# What a user may call, with the other names the parser knows for the same things.
CALLABLE = {
    *("abs", "array_contains", "array_size", "size", "ceil", "ceiling", "coalesce", "nvl", "ifnull", "concat"),
    *("contains", "endswith", "floor", "if", "length", "len", "char_length", "character_length", "lower", "lcase"),
    *("nullif", "round", "startswith", "substring", "substr", "trim", "upper", "ucase", "cast", "try_cast"),
    *("regexp_like", "not", "and", "or", "like", "ilike", "rlike"),
}


def alias(path: Path) -> str:
    return f"{path.column}_{path.cast}_{path.json_path}"


def sql_of(where: str) -> str:
    return vet(where).sql(lambda path: "p")


def called(sql: str) -> set[str]:
    """The names before an opening parenthesis, outside of literals."""
    return set(re.findall(r"([a-zA-Z_]+) ?\(", re.sub(r"'[^']*'", "''", sql)))


REFUSED = {
    "reflect": ("reflect('java.lang.System', 'exit', 0) is null", "reflect"),
    "java_method": ("java_method('java.lang.System', 'getenv', 'HOME') = 'a'", "java_method"),
    "try_reflect": ("try_reflect('java.lang.System', 'getenv', 'HOME') = 'a'", "try_reflect"),
    "subquery": ("op = (select max(op) from secrets)", "subquery"),
    "bare_subquery": ("(select true)", "subquery"),
    "in_subquery": ("op in (select op from secrets)", "subquery"),
    "exists": ("exists (select 1)", "subquery"),
    "exists_lambda": ("exists(data.a, x -> x > 1)", "subquery"),
    "table": ("delta.`/etc/passwd`.a = 1", "unknown column"),
    "lambda": ("size(filter(data.a, x -> x > 1)) > 1", "filter"),
    "udf": ("my_udf(op) = 'a'", "my_udf"),
    "qualified_udf": ("cat.db.my_udf(op) = 'a'", "my_udf"),
    "window_over_allowed": ("lower(op) over () = 'a'", "window"),
    "window": ("row_number() over (order by op) = 1", "window"),
    "aggregate": ("sum(data.total) > 5", "aggregate"),
    "count_star": ("count(*) > 5", "aggregate|star"),
    "filtered_aggregate": ("length(op) filter (where true) = 1", "aggregate"),
    "input_file_name": ("input_file_name() = 'a'", "input_file_name"),
    "rand": ("rand() > 0.5", "rand"),
    "uuid": ("uuid() = op", "uuid"),
    "current_user": ("current_user() = 'root'", "current_user"),
    "current_user_bare": ("current_user = 'root'", "current_user"),
    "session_user": ("session_user() = 'root'", "session_user"),
    "now": ("event_time > now()", "now"),
    "current_timestamp": ("event_time > current_timestamp()", "current_timestamp"),
    "version": ("version() = 'a'", "version"),
    "repeat": ("length(repeat('a', 2000000000)) > 1", "repeat"),
    "rpad": ("length(rpad('a', 2000000000, 'b')) > 1", "rpad"),
    "lpad": ("length(lpad('a', 2000000000, 'b')) > 1", "lpad"),
    "space": ("length(space(2000000000)) > 1", "space"),
    "sequence": ("size(sequence(1, 2000000000)) > 1", "sequence"),
    "replace": ("replace(op, 'a', 'b') = 'a'", "replace"),
    "raise_error": ("raise_error('x')", "raise_error"),
    "assert_true": ("assert_true(false) is null", "assert_true"),
    "from_json": ("from_json(op, 'a int') is null", "from_json"),
    "secret": ("secret('a', 'b') = 'c'", "secret"),
    "hint": ("/*+ broadcast(t) */ op = 'a'", "comment or hint"),
    "line_comment": ("op = 'a' -- and key = 'b'", "comment"),
    "block_comment": ("op = 'a' /* and key = 'b' */", "comment"),
    "only_a_comment": ("-- nothing", "empty"),
    "two_statements": ("op = 'a'; drop table t", "semicolon"),
    "semicolon": ("op = 'a';", "semicolon"),
    "statement": ("drop table t", "cannot be read"),
    "select": ("select 1", "cannot be read"),
    "set": ("set spark.sql.ansi.enabled = false", "cannot be read"),
    "union": ("op = 'a' union select 1", "cannot be read"),
    "alias": ("op = 'a' as x", "cannot be read"),
    "named_parameter": ("op = :p", "parameter"),
    "question_mark": ("op = ?", "parameter"),
    "variable": ("op = ${spark.app.name}", "brace"),
    "at_variable": ("op = @x", "parameter"),
    "odbc_function": ("{fn lower(op)} = 'a'", "brace"),
    "huge": ("op = '" + "a" * 9000 + "'", "longer than"),
    "huge_in_bytes": ("op = '" + "é" * 4500 + "'", "longer than"),
    "deep_parentheses": ("(" * 60 + "true" + ")" * 60, "nests"),
    "deepest_parentheses": ("(" * 8000, "more than 2000"),
    "deep_not": ("not " * 60 + "true", "deeper"),
    "deep_minus": ("data.a = " + "- " * 60 + "1", "deeper"),
    "deep_functions": ("lower(" * 51 + "op" + ")" * 51 + " = 'a'", "nests"),
    "deep_case": ("case when " * 60 + "true" + " then true end" * 60, "nests"),
    "deep_arithmetic": ("data.a" + " + 1" * 60 + " = 1", "deeper"),
    "deep_dots": ("data" + ".a" * 60 + " = 1", "deeper"),
    "many_nodes": ("op in (" + ",".join(["'a'"] * 600) + ")", "more than 500"),
    "many_words": ("op in (" + ",".join(["1"] * 3000) + ")", "more than 2000"),
    "growing": ("data.a < " + "nullif(data.a, ".join([""] * 3) + "floor(" * 20 + "data.b" + ")" * 22, "too large|deep"),
    "nested_nullif": ("nullif(" * 20 + "data.a" + ", 1)" * 20 + " = 2", "too large"),
    "unknown_column": ("payload = 'a'", "unknown column"),
    "unknown_position": ("position = 'a'", "unknown column"),
    "unknown_qualified": ("t.op = 'a'", "unknown column"),
    "field_of_a_column": ("key.a = 1", "unknown column"),
    "backtick_column": ("`op` = 'a'", "quoted column"),
    "backtick_root": ("`data`.a = 'a'", "quoted column"),
    "star": ("data.* = 1", "star"),
    "tuple": ("(op, key) = ('a', 'b')", "TUPLE"),
    "struct": ("struct(1) = 1", "struct"),
    "hex": ("key = X'41'", "HEXSTRING"),
    "interval": ("event_time > '2026-01-01' + interval 1 day", "interval"),
    "collate": ("op = 'a' collate utf8_lcase", "COLLATE"),
    "bitwise": ("origin_seq & 1 = 1", "BITWISEAND"),
    "slice": ("data.items[0:2] = 1", "SLICE"),
    "computed_index": ("data.items[data.a] = 1", "index"),
    "negative_index": ("data.items[-1] = 1", "index"),
    "huge_index": ("data.items[99999999999] = 1", "out of range"),
    "both_quotes_in_a_key": ("data['a\\'b\"c'] = 1", "both kinds of quotes"),
    "method": ("data.a.b(1) = 1", "function b"),
    "not_a_condition": ("length(op)", "not a condition"),
    "a_text": ("'a'", "not a condition"),
    "number_for_text": ("key = 42", "text meets a number"),
    "text_for_number": ("origin_seq = '5'", "meets"),
    "text_arithmetic": ("op + 1 = 2", "text stands where a number"),
    "not_a_time": ("event_time > 'yesterday'", "not a time"),
    "time_as_text": ("lower(event_time) = 'a'", "stands where"),
    "cast_of_a_time": ("cast(event_time as string) = 'a'", "cast of a time"),
    "cast_to_array": ("cast(data.a as array<int>) is null", "array"),
    "cast_to_binary": ("cast(op as binary) is null", "cast to"),
    "cast_decimal": ("cast(data.a as decimal(38,38)) > 1", "decimal"),
    "null": ("null", "NULL is not a condition"),
    "null_in_brackets": ("op = 'insert' and (null)", "NULL is not a condition"),
    "not_null": ("not null or data.a", "NULL is not a condition"),
    "all_of_data": ("data", "data is not a condition"),
    "all_of_before": ("data.a = 1 and not BEFORE", "(?i)before is not a condition"),
    "comparison_with_null": ("data.a = null", "IS NULL"),
    "null_in_list": ("data.a in (1, null)", "literals"),
    "path_in_list": ("data.a in (data.b)", "literals"),
    "empty_list": ("data.a in ()", "literals"),
    "like_computed": ("op like key", "literal pattern"),
    "like_escape": ("op like 'a%' escape '/'", "ESCAPE"),
    "like_any": ("op like any ('a%', 'b%')", "ANY"),
    "like_lone_backslash": (r"op like 'a\\b'", "lone backslash"),
    "like_bomb": ("op like '%_a%_a%_a%_b'", "_ between several %"),
    "like_many": ("op like '" + "%a" * 30 + "'", "too many %"),
    "like_long": ("op like '" + "a" * 600 + "'", "too long"),
    "rlike_computed": ("op rlike key", "literal pattern"),
    "trim_chars": ("trim(both 'x' from op) = 'a'", "trim with"),
    "between_symmetric": ("data.a between symmetric 2 and 1", "symmetric"),
    "concat_nested": ("concat(concat(op, op), op) = 'a'", "concat"),
    "concat_many": ("concat(op,op,op,op,op,op,op,op,op) = 'a'", "concat"),
    "round_digits": ("round(data.a, 2147483647) = 1", "round"),
    "round_computed": ("round(data.a, origin_seq) = 1", "round"),
    "too_many_digits": ("data.a = " + "9" * 40, "too many digits"),
    "number_out_of_range": ("data.a = 1e999", "out of range"),
    "unknown_escape": (r"op = '\d'", "unknown escape"),
    "side_by_side": ("op = 'a' 'b'", "side by side"),
    "open_quote": ("op = 'a", "quote is left open"),
    "lone_quote": ("'", "quote is left open"),
    "surrogate": ("op = '\ud800'", "surrogate"),
    "escaped_surrogate": (r"op = '\ud800'", "unknown escape"),
}


@pytest.mark.parametrize(("where", "names"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_not_on_the_allow_list_is_refused_by_name_with_a_way_out(where: str, names: str) -> None:
    """GIVEN a hostile or mistaken predicate WHEN it is vetted THEN the error names the part and what to use."""
    with pytest.raises(ConfigError, match=names) as caught:
        vet(where)
    assert caught.value.hint
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "pattern",
    ["(a+)+b", "(a*)*", "(a|a)*b", "(a|b)+", "(ab){2,}", "(.*)\\1", "(?=a)", "(?<x>a)", "(?i)a", "a++", "a**",
     "a{1000}", "a{2", "a{,3}", "a{3,2}", "[a", "[]", "[a-", "[z-a]", "[a&&b]", "[[a]]",
     "(a", "a)", "*a", "|+", "\\", "\\k", "\\p{L}", "\\Qa\\E", "\\x41", "^*", "$+", "\\b+", "a" * 300, "a*b*c*d*",
     ".*.*.*", "^.*.*.*.*", "(a|a)" * 30, "a?" * 60,
     "a{0,99}" * 6, "()" * 30, "a\nb", "]", "}"],
)  # fmt: skip
def test_regular_expressions_that_could_run_away_are_refused(pattern: str) -> None:
    """GIVEN a pattern that backtracks without bound, or that Java would refuse WHEN vetted THEN it is refused."""
    escaped = pattern.replace("\\", "\\\\").replace("\n", "\\n")
    with pytest.raises(ConfigError, match="RLIKE"):
        vet(f"op rlike '{escaped}'")


@pytest.mark.parametrize(
    "pattern",
    ["", "a", "^ord-[0-9]+$", "^[^@]+@[^@]+\\.com$", "(gmail|yahoo)\\.com$", "^(?:a|b)?c", "\\bfoo\\b",
     "^a{2,5}[A-Za-z_-]{1,20}", "^\\d{3}-\\d{4}$", "[\\w.]+", "a*?b", "é+", "^$", "a|", "[-a]", "[.+*?]"],
)  # fmt: skip
def test_ordinary_regular_expressions_are_taken(pattern: str) -> None:
    """GIVEN a bounded pattern WHEN vetted THEN it runs on values of bounded length."""
    sql = sql_of("key rlike '" + pattern.replace("\\", "\\\\") + "'")
    assert f"length(key) <= {longest_searched(pattern)}, " in sql


@pytest.mark.parametrize(
    ("pattern", "chars"),
    [("gmail|yahoo", 2**18), ("^[a-z]+$", 2**18), ("x.*y", 2**12), ("^.*x.*y", 2**12), ("x.*y.{1,60}z", 512),
     ("^a{2,5}$", 2**18), ("a{0,63}" + "a{100}" * 32 + "b", 512), ("a{100}" * 33 + "b", 4096)],
)  # fmt: skip
def test_how_long_a_value_is_searched_is_up_to_the_pattern(pattern: str, chars: int) -> None:
    """GIVEN patterns that can match in more and more ways WHEN vetted THEN the work stays the same, not the length."""
    assert longest_searched(pattern) == chars


def test_a_path_takes_the_type_of_what_it_meets() -> None:
    """GIVEN one path in several comparisons WHEN vetted THEN it is extracted once per type."""
    cases = {
        "data.a > 100": ["double"],
        "data.a > 9007199254740993": ["double", "decimal(38,9)"],
        "data.a = 'x'": ["string"],
        "data.a = true": ["boolean"],
        "data.a": ["boolean"],
        "not data.a": ["boolean"],
        "data.a > timestamp '2026-01-01 00:00:00'": ["timestamp"],
        "data.a = date '2026-01-01'": ["date"],
        "data.a is null": ["string"],
        "data.a + 1 > 2": ["double"],
        "coalesce(data.a, 0) > 2": ["double"],
        "case when true then data.a else 'x' end = 'y'": ["string"],
        "data.a between 1 and 2": ["double"],
        "data.a in ('x', 'y')": ["string"],
        "data.a > 1 and data.a < 5": ["double"],
        "array_contains(data.a, 'x')": ["array<string>"],
        "array_contains(data.a, 5)": ["array<double>"],
        "size(data.a) > 1": ["array<variant>"],
        "1 < data.a": ["double"],
        "data.a = origin_seq": ["double", "decimal(38,9)"],
        "data.a = key": ["string"],
    }
    for where, casts in cases.items():
        paths = vet(where).paths
        assert [path.cast for path in paths] == casts, where
        assert {(path.column, path.json_path) for path in paths} == {("payload", "$.a")}


def test_paths_may_hold_odd_names_and_indexes() -> None:
    """GIVEN quoted, nested and indexed paths WHEN vetted THEN each names its key exactly."""
    cases = {
        "data.a.b.c.d.e.f = 1": ("payload", "$.a.b.c.d.e.f"),
        "before.a = 1": ("before", "$.a"),
        "DATA.CamelCase = 1": ("payload", "$.CamelCase"),
        "data.`weird key`.b = 1": ("payload", "$['weird key'].b"),
        "data.items[0].sku = 1": ("payload", "$.items[0].sku"),
        "data['a.b'][1]['x'] = 1": ("payload", "$['a.b'][1].x"),
        "data['it\\'s'] = 1": ("payload", '$["it\'s"]'),
        "data.`a``b` = 1": ("payload", "$['a`b']"),
        "data.order = 1": ("payload", "$.order"),
        "data.é = 1": ("payload", "$['é']"),
        "data[''] = 1": ("payload", "$['']"),
        "before is null": ("before", "$"),
    }
    for where, (column, path) in cases.items():
        (found,) = vet(where).paths
        assert (found.column, found.json_path) == (column, path), where


def test_top_level_equalities_are_given_to_the_index_and_the_rest_is_residual() -> None:
    """GIVEN a conjunction WHEN vetted THEN its equalities and the rest of it come apart."""
    predicate = vet(
        "op = 'insert' and (data.a = 'x' and 5 = data.b) and data.c = true and data.d and origin_seq = 7 "
        "and stream in ('s') and data.e > 5 and (key = 'k' or key = 'l') and event_time = '2026-01-01'"
    )
    assert predicate.equalities == (
        ("op", "insert"),
        (Path("payload", "$.a", "string"), "x"),
        (Path("payload", "$.b", "double"), 5.0),
        (Path("payload", "$.c", "boolean"), True),
        (Path("payload", "$.d", "boolean"), True),
        ("origin_seq", 7),
        ("stream", "s"),
    )
    residual = predicate.residual_sql(alias)
    assert residual is not None
    assert residual.startswith("(payload_double_$.e > 5.0D) and ((key = 'k') or (key = 'l')) and (event_time = ")
    assert vet("op = 'a'").residual_sql(alias) is None
    assert vet("op = 'a' or key = 'b'").equalities == ()
    assert vet("not op = 'a'").equalities == ()


def test_an_exact_number_is_indexed_and_checked_again() -> None:
    """GIVEN an equality beyond 2^53 WHEN vetted THEN the index narrows by decimal and the residual decides."""
    predicate = vet("data.id = 9007199254740993")
    assert predicate.equalities == ((Path("payload", "$.id", "decimal(38,9)"), Decimal(9007199254740993)),)
    assert predicate.residual_sql(alias) == predicate.sql(alias)


@pytest.mark.parametrize("where", [None, "", "  \n"])
def test_no_predicate_matches_everything(where: str | None) -> None:
    """GIVEN no `where` WHEN vetted THEN it is true and needs no path."""
    predicate = vet(where)
    assert predicate.sql(alias) == "true"
    assert predicate == Predicate("", (), (), ("true",), None)


@pytest.mark.parametrize("where", ["null", "data", "not before and op = 'insert'"])
def test_a_stored_predicate_that_never_holds_stops_no_delivery(where: str) -> None:
    """GIVEN a condition that an earlier version accepted WHEN read from State THEN it compiles, and matches none."""
    with pytest.raises(ConfigError, match="is not a condition"):
        vet(where)
    assert vet(where, stored=True).sql(lambda path: "x")
    assert vet("data.paid").equalities and vet("data is not null").sql(lambda path: "x")


def test_a_match_restricts_stream_and_operation_and_is_never_null() -> None:
    """GIVEN streams, operations and a predicate WHEN joined THEN one expression, with undelivered operations out."""
    predicate = vet("data.a = 1 or op = 'x'")
    assert match_sql(["public.o'rders"], ["insert"], predicate, lambda path: "p0") == (
        "coalesce(op in ('insert') and stream in ('public.o\\u0027rders') and (((p0 = 1.0D) or (op = 'x'))), false)"
    )
    everything = match_sql([], [], vet(None), alias)
    assert everything == (
        "coalesce(op in ('delete', 'insert', 'message', 'read', 'truncate', 'update') and (true), false)"
    )
    for op in ("control", "poison", "schema", "inserts"):
        with pytest.raises(ConfigError, match="never delivered"):
            match_sql([], [op], predicate, alias)


@pytest.mark.parametrize(
    "where",
    ["op = 'it\\'s' and data.`a b`[0].c > 1.5", r"key rlike r'^\d+$'", "not data.a is null and data.b <=> before.b",
     "event_time > timestamp '2026-01-01 00:00:00' and data.d = date '2026-01-01'", "5L < origin_seq or data.a > 1.5D",
     r"key = 'a\\b\n${x}%' and key like '10\\%\_%'",
     "case op when 'a' then 1 else 2 end = 1 and cast(data.a as decimal(9,2)) > 5.0BD",
     "key = 'it''s' and key = \"d'q\"", "data.a not like 'a%' and key || 'x' = 'y'", "data.a is not distinct from 5"],
)  # fmt: skip
def test_the_canonical_text_means_the_same(where: str) -> None:
    """GIVEN a vetted predicate WHEN its canonical text is vetted THEN the same predicate comes out, also by pickle."""
    predicate = vet(where)
    again = vet(predicate.text)
    assert again.sql(alias) == predicate.sql(alias)
    assert again.text == predicate.text
    assert pickle.loads(pickle.dumps(predicate)) == predicate
    assert hash(predicate) == hash(vet(where))


def test_every_function_the_parser_knows_is_refused_unless_listed() -> None:
    """GIVEN every function name in the parser's registry WHEN called THEN only listed ones pass."""
    names = {name.lower() for name in exp.FUNCTION_BY_NAME} | {name.lower() for name in Spark.Parser.FUNCTIONS}
    names |= {token.name.lower() for token in Spark.Parser.NO_PAREN_FUNCTIONS}
    names |= {name.lower() for name in Spark.Parser.FUNCTION_PARSERS}
    assert len(names) > 500
    passed = set()
    for name in sorted(names):
        for arguments in ("op", "data.a", "data.a, 'x'", "data.a, 1, 2"):
            for where in (f"{name}({arguments})", f"{name}({arguments}) is null"):
                try:
                    sql = sql_of(where)
                except ConfigError:
                    continue
                passed.add(name)
                assert called(sql) <= WRITTEN, where
    assert passed <= CALLABLE
    assert {"lower", "coalesce", "substring", "abs", "size", "contains"} <= passed


_VOCABULARY = """
    op key data.a before.`b` data.x[0] origin_seq event_time 'a' 'it''s' '\\\\' "q" r'\\' 1 -1 1.5 1e9
    9007199254740993 true null ( ) , = <> < >= <=> + - * / % and or not is in between like ilike rlike case when then
    else end cast( as string bigint decimal(9,2) lower( coalesce( nullif( if( floor( length( concat( substring(
    startswith( array_contains( size( reflect( exists( select from rand() ; -- /* */ ? :p ${x} { } [ ] . * -> || ::
    over filter distinct timestamp date '2026-01-01' interval collate escape
"""


@settings(max_examples=400, deadline=None, derandomize=True)
@given(st.one_of(st.lists(st.sampled_from(_VOCABULARY.split()), max_size=25).map(" ".join), st.text(max_size=60)))
@example("op = '" + "\\" * 7)
@example("((((" + "\x00")
def test_any_text_is_refused_cleanly_or_becomes_sql_of_our_own(where: str) -> None:
    """GIVEN any text at all WHEN vetted THEN a ConfigError, or SQL that calls nothing but what we write."""
    try:
        sql = sql_of(where)
    except ConfigError:
        return
    bare = re.sub(r"'[^']*'", "''", sql)
    assert called(sql) <= WRITTEN
    assert not set(bare) & set(';{}`"\\$')
    assert "--" not in bare.replace("(- -", "") and "/*" not in bare
    assert bare.count("(") == bare.count(")")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=40))
def test_no_string_gets_out_of_its_literal(value: str) -> None:
    """GIVEN any value WHEN it is written as a literal THEN no quote, backslash or ${…} of it reaches Spark's parser."""
    try:
        literal = string_sql(value)
    except ConfigError:
        assert any(0xD800 <= ord(char) <= 0xDFFF for char in value)
        return
    inside = literal[1:-1]
    assert not set(inside) & set("'\"`{;\n\r\x00")
    assert re.sub(r"\\u([0-9A-F]{4})", lambda match: chr(int(match[1], 16)), inside) == value
    assert "\\" not in re.sub(r"\\u[0-9A-F]{4}", "", inside)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=20))
def test_no_key_gets_out_of_its_path(name: str) -> None:
    """GIVEN any key WHEN it is a step of a path THEN it is quoted whole, or refused."""
    try:
        path = json_path((name, 0))
    except ConfigError:
        assert "'" in name and '"' in name
        return
    assert path in (f"$.{name}[0]", f"$['{name}'][0]", f'$["{name}"][0]')
    assert path != f"$.{name}[0]" or re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)


def test_a_path_is_read_without_errors() -> None:
    """GIVEN a path WHEN it is extracted THEN by functions that give null for what they cannot read."""
    path = vet("data.`it's` > 1").paths[0]
    assert path.extract_sql("v") == "try_variant_get(v, '$[\\u0022it\\u0027s\\u0022]', 'double')"
    assert variant_sql("payload") == "try_parse_json(payload)"


def test_a_time_means_the_same_in_every_session() -> None:
    """GIVEN times with and without an offset WHEN vetted THEN they are written in UTC."""
    assert sql_of("event_time > '2026-01-01'") == "(event_time > timestamp '2026-01-01 00:00:00.000000+00:00')"
    assert sql_of("event_time > '2026-01-01T01:00:00+02:00'") == (
        "(event_time > timestamp '2025-12-31 23:00:00.000000+00:00')"
    )
