"""From a predicate's text to a syntax tree in which every node is on the allow list.

Fail-closed at every step: the size first, then the tokens, then each node's class, then each of its arguments.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise

from sqlglot import Token, TokenType, exp, parse_one
from sqlglot.dialects import Spark
from sqlglot.errors import ParseError, SqlglotError

from evermark.errors import ConfigError
from evermark.predicate.fragment import refused

TEXT_BYTES_MAX = 8 * 1024
TOKENS_MAX = 2000
DEPTH_MAX = 50
PARENTHESES_MAX = 25
NODES_MAX = 500

FUNCTIONS = (
    "coalesce, nullif, if, lower, upper, length, substring, trim, concat, startswith, endswith, contains, "
    "abs, round, floor, ceil, array_contains, size, cast"
)
# Every word that may stand before an opening parenthesis.
_SYNONYMS = (
    "nvl, ifnull, len, char_length, character_length, substr, lcase, ucase, ceiling, array_size, try_cast, regexp_like"
)
_WORDS = "and, or, not, in, is, between, like, ilike, rlike, regexp, from, case, when, then, else, decimal, numeric"
_CALLED = frozenset(f"{FUNCTIONS}, {_SYNONYMS}, {_WORDS}".split(", "))
_BOTH = frozenset({"this", "expression"})
_ONE = frozenset({"this"})

# The allow list: each class of the tree with the arguments it may have. `safe`, `coalesce`, `typed` and `nested` only
# say how another database would evaluate the node; we write our own SQL and do not look at them.
ALLOWED: dict[type[exp.Expr], frozenset[str]] = {
    **dict.fromkeys((exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.NullSafeEQ, exp.NullSafeNEQ), _BOTH),
    **dict.fromkeys((exp.And, exp.Or, exp.Is, exp.RegexpLike, exp.StartsWith, exp.EndsWith, exp.Contains), _BOTH),
    **dict.fromkeys((exp.Add, exp.Sub, exp.Mul, exp.Mod, exp.Nullif, exp.Dot, exp.ArrayContains), _BOTH),
    **dict.fromkeys((exp.Not, exp.Neg, exp.Paren, exp.Lower, exp.Upper, exp.Trim, exp.Abs), _ONE),
    **dict.fromkeys((exp.Length, exp.ArraySize, exp.Floor, exp.Ceil, exp.Boolean, exp.RawString), _ONE),
    **dict.fromkeys((exp.Like, exp.ILike), _BOTH | {"negate"}),
    **dict.fromkeys((exp.Cast, exp.TryCast), frozenset({"this", "to", "safe", "_type"})),
    exp.Div: _BOTH | {"safe", "typed"},
    exp.DPipe: _BOTH | {"safe"},
    exp.Concat: frozenset({"expressions", "safe", "coalesce"}),
    exp.In: frozenset({"this", "expressions"}),
    exp.Between: frozenset({"this", "low", "high"}),
    exp.Case: frozenset({"this", "ifs", "default"}),
    exp.If: frozenset({"this", "true", "false"}),
    exp.Coalesce: frozenset({"this", "expressions"}),
    exp.Substring: frozenset({"this", "start", "length"}),
    exp.Round: frozenset({"this", "decimals"}),
    exp.Column: frozenset({"this", "table", "db", "catalog"}),
    exp.Bracket: frozenset({"this", "expressions"}),
    exp.Identifier: frozenset({"this", "quoted"}),
    exp.Literal: frozenset({"this", "is_string"}),
    exp.Null: frozenset(),
    exp.DataType: frozenset({"this", "expressions", "nested"}),
    exp.DataTypeParam: _ONE,
}

_NAMED: tuple[tuple[tuple[type[exp.Expr], ...], str, str], ...] = (
    ((exp.Query, exp.Subquery, exp.Exists, exp.Table, exp.Unnest), "a subquery", "compare with literal values only"),
    ((exp.Lambda, exp.Kwarg), "a lambda", "use array_contains(data.list, value)"),
    ((exp.Window,), "a window function", "a predicate sees one event at a time"),
    ((exp.AggFunc, exp.Filter, exp.Distinct), "an aggregate", "a predicate sees one event at a time"),
    ((exp.Placeholder, exp.Parameter, exp.SessionParameter), "a parameter", "write the value itself"),
    ((exp.Star,), "a star", "name the column or the path, as in data.total"),
    ((exp.Escape,), "ESCAPE", r"escape with a backslash: '10\\%'"),
    ((exp.Interval,), "an interval", "compare with a fixed time, as in event_time > '2026-01-31T00:00:00Z'"),
    ((exp.IntDiv,), "DIV", "use floor(a / b)"),
    ((exp.Any, exp.All), "ANY or ALL", "join the comparisons with OR or AND"),
    ((exp.Collate,), "COLLATE", "use lower(…) or ILIKE"),
)
_OPENING = (TokenType.L_PAREN, TokenType.L_BRACKET, TokenType.CASE)
_CLOSING = (TokenType.R_PAREN, TokenType.R_BRACKET, TokenType.END)
_PREFIXES = (TokenType.NOT, TokenType.DASH, TokenType.PLUS, TokenType.TILDE)
_BETWEEN = (TokenType.AND, TokenType.OR, TokenType.COMMA, TokenType.WHEN, TokenType.THEN, TokenType.ELSE)
_FLATTEN = "flatten it: use IN (…), AND, OR, or two subscriptions"
# An escape Spark knows; any other loses its backslash without a word, and '\d+' would mean 'd+'.
_ESCAPE = re.compile(r"""\\(?:[0bnrtZ'"%_\\]|[01][0-7]{2}|u(?![Dd][89A-Fa-f])[0-9A-Fa-f]{4}|U[0-9A-Fa-f]{8})""")


def parse(text: str) -> exp.Expr:
    """The vetted tree of `text`."""
    if len(text.encode("utf-8", "surrogatepass")) > TEXT_BYTES_MAX:
        raise refused(f"it is longer than {TEXT_BYTES_MAX} bytes", "shorten it, or make two subscriptions")
    text = _checked_tokens(text)
    try:
        tree = parse_one(text, read="spark", into=exp.Condition)
    except ParseError as error:
        raise _unreadable(error) from error
    except RecursionError as error:
        raise _too_deep() from error
    except (SqlglotError, ValueError, TypeError, AttributeError, LookupError) as error:
        # A hostile text may trip the parser itself; that is the text's fault, not ours to die of.
        raise refused("it cannot be read", "see docs for the predicate language") from error
    for nodes, (node, depth) in enumerate(_walk(tree), start=1):
        if nodes > NODES_MAX:
            raise refused(f"it has more than {NODES_MAX} parts", "use IN (…) for many values, or two subscriptions")
        if depth > DEPTH_MAX:
            raise _too_deep()
        if isinstance(node, exp.Func) and type(node) not in ALLOWED and _named(node) is None:
            _check_called(text)  # names it as the user did
        check_node(node)
    _check_called(text)
    return tree


def _check_called(text: str) -> None:
    """Refuse a function by its name too: the parser maps many names to the classes we allow."""
    for one, two in pairwise(_tokens(text)):
        called = two.token_type is TokenType.L_PAREN and one.token_type is not TokenType.STRING
        if called and one.text.isidentifier() and one.text.lower() not in _CALLED:
            raise _refused_function(one.text)


def _too_deep() -> ConfigError:
    return refused(f"it nests deeper than {DEPTH_MAX}", _FLATTEN)


def _unreadable(error: ParseError) -> ConfigError:
    detail = error.errors[0] if error.errors else {}
    where = f" near {str(detail.get('highlight'))[:40]!r}, column {detail.get('col')}" if detail else ""
    return refused(f"it cannot be read{where}", "write one condition, such as: op = 'insert' and data.total > 100")


def _checked_tokens(text: str) -> str:
    """The text, once its tokens are known to be harmless; a doubled quote becomes an escaped one."""
    tokens = _tokens(text)
    if not tokens:
        raise refused("it is empty", "leave `where` out to match everything")
    written = text
    for one, two in pairwise(tokens):
        touching = one.token_type is two.token_type is TokenType.STRING and one.end + 1 == two.start
        if touching and text[one.end] == text[two.start]:
            text = text[: one.end] + "\\" + text[one.end] + text[two.start + 1 :]
    if text != written:
        tokens = _tokens(text)
    if len(tokens) > TOKENS_MAX:
        raise refused(f"it has more than {TOKENS_MAX} words", "shorten it, or make two subscriptions")
    strings = (TokenType.STRING, TokenType.RAW_STRING)
    if any(one.token_type in strings and two.token_type in strings for one, two in pairwise(tokens)):
        raise refused("two strings stand side by side", "join them with || or put an operator between them")
    _check_nesting(tokens)
    for token in tokens:
        if token.comments or token.token_type is TokenType.HINT:
            raise refused("a comment or hint is not allowed", "leave comments out of predicates")
        if token.token_type is TokenType.SEMICOLON:
            raise refused("a semicolon is not allowed", "write one condition, without ;")
        if token.token_type is TokenType.L_BRACE:
            raise refused("a brace is not allowed", "write values and function calls without { }")
        if token.token_type is TokenType.STRING and "\\" in _ESCAPE.sub("", text[token.start : token.end + 1]):
            raise refused(
                "a string has an unknown escape", r"double the backslash ('\\d+') or use a raw string (r'\d+')"
            )
    return text


def _tokens(text: str) -> list[Token]:
    try:
        return list(Spark().tokenize(text))
    except SqlglotError as error:
        raise refused("it cannot be read: a quote is left open", "close every ' \" and `") from error


def _check_nesting(tokens: list[Token]) -> None:
    """Refuse what would make the parser itself recurse too deep.

    It takes about 23 frames for a parenthesis or CASE and 6 for a NOT, of Python's 1000: the limit leaves the caller
    enough, so that a text taken in one place is not refused in another.
    """
    open_runs: list[int] = []  # how many prefix signs stand before each open parenthesis
    run = 0
    for token in tokens:
        if token.token_type in _PREFIXES:
            run += 1
        elif token.token_type in _OPENING:
            open_runs.append(run)
            run = 0
        elif token.token_type in _CLOSING or token.token_type in _BETWEEN:
            run = 0
            if token.token_type in _CLOSING and open_runs:
                open_runs.pop()
        if len(open_runs) > PARENTHESES_MAX or 4 * len(open_runs) + sum(open_runs) + run > 4 * PARENTHESES_MAX:
            raise refused(f"it nests more than {PARENTHESES_MAX} parentheses", _FLATTEN)


def _walk(tree: exp.Expr) -> Iterator[tuple[exp.Expr, int]]:
    """Every node with its depth; a chain of ANDs or of ORs counts as one level."""
    stack = [(tree, 1)]
    while stack:
        node, depth = stack.pop()
        yield node, depth
        for child in node.iter_expressions():
            flat = type(child) is type(node) and isinstance(node, exp.And | exp.Or)
            stack.append((child, depth if flat else depth + 1))


def check_node(node: exp.Expr) -> None:
    """Raise unless this node, with exactly these arguments, is on the allow list."""
    allowed = ALLOWED.get(type(node))
    if allowed is None:
        raise _refused_node(node)
    for name, value in node.args.items():
        if value in (None, [], False) or name in allowed:
            continue
        if isinstance(value, exp.Expr) and type(value) not in ALLOWED:
            raise _refused_node(value)
        raise refused(f"{_name(node)} with {name!r} is not allowed", f"use the plain form of {_name(node)}")


def _refused_node(node: exp.Expr) -> ConfigError:
    if (named := _named(node)) is not None:
        return refused(f"{named[0]} is not allowed", named[1])
    if isinstance(node, exp.Func):
        return _refused_function(_name(node))
    hint = f"use comparisons, AND, OR, NOT, IN, BETWEEN, LIKE; functions: {FUNCTIONS}"
    return refused(f"{_name(node)} is not allowed", hint)


def _named(node: exp.Expr) -> tuple[str, str] | None:
    return next(((what, hint) for classes, what, hint in _NAMED if isinstance(node, classes)), None)


def _refused_function(name: str) -> ConfigError:
    return refused(
        f"the function {name[:60].lower()} is not allowed",
        f"a predicate must mean the same live and in replay and touch nothing but the event; functions: {FUNCTIONS}",
    )


def _name(node: exp.Expr) -> str:
    if isinstance(node, exp.Anonymous):
        return str(node.this)[:60].lower()
    if isinstance(node, exp.Func):
        return node.sql_name().lower()
    return type(node).__name__.upper()
