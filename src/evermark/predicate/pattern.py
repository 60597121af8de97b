"""LIKE and RLIKE patterns that cannot run away.

Spark turns both into Java regular expressions, which backtrack: `'%a%a%a%b'` takes as long as `(a*)*b`, and a repeated
group overflows the stack on a long value. So LIKE becomes a chain of searches that each look at a character once,
and RLIKE takes a subset whose number of ways to match is bounded before it runs.
"""

from __future__ import annotations

from evermark.predicate.fragment import Fragment, joined, refused, sql, string_sql

LIKE_CHARS_MAX = 512
LIKE_PIECES_MAX = 16
REGEX_CHARS_MAX = 200
REGEX_REPEAT_MAX = 100
REGEX_GROUPS_MAX = 20
# In so many ways at most a pattern may match a value. A pattern that stays below it for values of the first length is
# taken; how long a value it searches is up to the pattern, and RLIKE is null for longer ones. Of these, each way may
# compare as many characters as all its counted repetitions name.
REGEX_WAYS_MAX = 2**24
REGEX_VALUE_CHARS_MIN = 512
REGEX_VALUE_CHARS_MAX = 2**18

_QUANTIFIERS = ("?", "*", "+", "{")
_HINT = "allowed: text . [a-z] \\d \\w \\s ^ $ ( | ) and ? * + {m,n} after one character or class"


def like_sql(value: Fragment, pattern: str, *, fold: bool) -> Fragment:
    """`value LIKE pattern`; with `fold`, ILIKE."""
    if len(pattern) > LIKE_CHARS_MAX:
        raise refused("a LIKE pattern is too long", f"use at most {LIKE_CHARS_MAX} characters")
    pieces = like_pieces(pattern)
    if any(None in piece for piece in pieces):
        return _like_with_any_char(value, pieces, fold=fold)
    texts = ["".join(char for char in piece if char is not None) for piece in pieces]
    if len(texts) > LIKE_PIECES_MAX:
        raise refused("a LIKE pattern has too many %", f"use at most {LIKE_PIECES_MAX - 1}")
    if fold:
        value, texts = sql("lower(", value, ")"), [text.lower() for text in texts]
    if len(texts) == 1:
        return sql("(", value, f" = {string_sql(texts[0])})")
    return _search_chain(value, texts[0], [text for text in texts[1:-1] if text], texts[-1])


def like_pieces(pattern: str) -> list[list[str | None]]:
    """The pattern split at `%`; None stands for `_`."""
    pieces: list[list[str | None]] = [[]]
    chars = iter(pattern)
    for char in chars:
        if char == "\\":
            escaped = next(chars, "")
            if escaped not in ("%", "_", "\\"):
                raise refused(
                    "a LIKE pattern has a lone backslash", r"write \\ for a backslash, \% or \_ for the signs"
                )
            pieces[-1].append(escaped)
        elif char == "%":
            pieces.append([])
        else:
            pieces[-1].append(None if char == "_" else char)
    return pieces


def _like_with_any_char(value: Fragment, pieces: list[list[str | None]], *, fold: bool) -> Fragment:
    # One % cannot backtrack, nor can a last one that takes all the rest.
    inner = [piece for index, piece in enumerate(pieces) if piece or index in (0, len(pieces) - 1)]
    if len(inner) > 3 or (len(inner) == 3 and (inner[0] or inner[2])):
        raise refused("a LIKE pattern has _ between several %", "use one %, or one at either end, when there is a _")
    escape = {"%": "\\%", "_": "\\_", "\\": "\\\\", None: "_"}
    text = "%".join("".join(escape.get(char, char or "") for char in piece) for piece in inner)
    return sql("(", value, " ilike " if fold else " like ", string_sql(text), ")")


def _search_chain(value: Fragment, prefix: str, middles: list[str], suffix: str) -> Fragment:
    # `value` is written a fixed number of times, and nullif is avoided: Spark writes its argument twice, and nested
    # that doubles at every step.
    rest = sql("substring(", value, f", {len(prefix) + 1})") if prefix else value
    for text in middles:
        rest = sql("try_element_at(split(", rest, f", {string_sql(_literally(text))}, 2), 2)")
    checks: list[Fragment] = []
    if prefix or not (middles or suffix):
        checks.append(sql("startswith(", value, f", {string_sql(prefix)})"))
    if len(middles) == 1 and not prefix and not suffix:
        checks.append(sql("contains(", value, f", {string_sql(middles[0])})"))
    elif middles:
        ended = sql("coalesce(endswith(", rest, f", {string_sql(suffix)}), false)")
        checks.append(sql("if(", value, " is null, cast(null as boolean), ", ended, ")"))
    elif suffix:
        checks.append(sql("endswith(", rest, f", {string_sql(suffix)})"))
    return sql("(", joined(" and ", checks), ")")


def _literally(text: str) -> str:
    """A Java regular expression that matches exactly `text`."""
    return "".join(f"\\{char}" if char.isascii() and not char.isalnum() else char for char in text)


def rlike_sql(value: Fragment, pattern: str) -> Fragment:
    """`value RLIKE pattern`, null for values too long to search."""
    short = sql("if(length(", value, f") <= {longest_searched(pattern)}, ", value, ", cast(null as string))")
    return sql("(", short, " rlike ", string_sql(pattern), ")")


def longest_searched(pattern: str) -> int:
    """How many characters a value may have that is searched for the pattern. Raises where the pattern is refused."""
    if not _Regex(pattern, REGEX_VALUE_CHARS_MIN).is_bounded():
        raise refused(
            "an RLIKE pattern can match in too many ways",
            "begin it with ^, write {1,20} for * or +, or use LIKE",
        )
    chars = REGEX_VALUE_CHARS_MIN
    while chars < REGEX_VALUE_CHARS_MAX and _Regex(pattern, 2 * chars).is_bounded(by_steps=True):
        chars *= 2
    return chars


class _Regex:
    """Reads a pattern and counts in how many ways it could match a value of so many characters: that is what
    backtracking may have to try.
    """

    def __init__(self, pattern: str, value_chars: int) -> None:
        if len(pattern) > REGEX_CHARS_MAX:
            raise refused("an RLIKE pattern is too long", f"use at most {REGEX_CHARS_MAX} characters")
        self._pattern = pattern
        self._value_chars = value_chars
        self._at = 0
        self._groups = 0
        self._counted_chars = 1

    def is_bounded(self, *, by_steps: bool = False) -> bool:
        ways, anchored = self._either()
        if self._at < len(self._pattern):
            raise self._bad("a ) without its (")
        each = self._counted_chars if by_steps else 1
        return ways * (1 if anchored else self._value_chars) * each <= REGEX_WAYS_MAX

    def _peek(self, ahead: int = 0) -> str:
        return self._pattern[self._at + ahead : self._at + ahead + 1]

    def _take(self, text: str) -> bool:
        """Whether `text` comes next; it is stepped over."""
        found = self._pattern.startswith(text, self._at)
        self._at += len(text) if found else 0
        return found

    def _bad(self, what: str) -> Exception:
        return refused(f"an RLIKE pattern has {what} (character {self._at + 1})", _HINT)

    def _either(self) -> tuple[int, bool]:
        ways, anchored = self._sequence()
        while self._take("|"):
            more, also = self._sequence()
            ways, anchored = ways + more, anchored and also
        return ways, anchored

    def _sequence(self) -> tuple[int, bool]:
        ways, anchored = 1, self._peek() == "^"
        while self._peek() not in ("", "|", ")"):
            atom, group = self._atom()
            ways = min(ways * self._repeated(atom, group=group), REGEX_WAYS_MAX + 1)
        return ways, anchored

    def _atom(self) -> tuple[int, bool | None]:
        """The ways of one atom, and whether it is a group (None: it cannot be repeated)."""
        char = self._peek()
        if char in "*+?{":
            raise self._bad(f"a {char} with nothing to repeat")
        if char in "}]":
            raise self._bad(f"a lone {char}")
        if char == "(":
            return self._group(), True
        if char == "[":
            self._class()
            return 1, False
        if char == "\\":
            return 1, self._escape()
        if not (char.isprintable() or char == "\t"):
            raise self._bad("a control character")
        self._at += 1
        return 1, None if char in "^$" else False

    def _group(self) -> int:
        self._at += 1
        self._groups += 1
        if self._groups > REGEX_GROUPS_MAX:
            raise self._bad(f"more than {REGEX_GROUPS_MAX} groups")
        if self._peek() == "?" and not self._take("?:"):
            raise self._bad("a look-around, a named group or a flag")
        ways, _ = self._either()
        if not self._take(")"):
            raise self._bad("a ( without its )")
        return ways

    def _escape(self) -> bool | None:
        char = self._peek(1)
        if not char or not (char in "bBdDwWsStnr" or (char.isascii() and not char.isalnum() and char.isprintable())):
            raise self._bad("a back reference or an unknown escape" if char else "a backslash at its end")
        self._at += 2
        return None if char in "bB" else False

    def _class(self) -> None:
        self._at += 1
        self._take("^")
        last, members = "", 0  # `last`: what a range would begin with
        while self._peek() != "]":
            char = self._peek()
            if char == "" or char in "[&^" or not char.isprintable():
                raise self._bad("an open [" if char == "" else f"an unescaped {char!r} in [ ]")
            if char == "\\":
                char = self._pattern[self._at : self._at + 2]
                if self._escape() is None:
                    raise self._bad("a word boundary in [ ]")
            elif char == "-" and members and (end := self._peek(1)) != "]":
                if not (last.isalnum() and end.isalnum() and last <= end):
                    raise self._bad("a range in [ ] that is not from a letter or digit to a later one")
                self._at += 2
                char = ""
            else:
                self._at += 1
            last, members = char, members + 1
        if not members:
            raise self._bad("an empty [ ]")
        self._at += 1

    def _repeated(self, ways: int, *, group: bool | None) -> int:
        char = self._peek()
        if char not in _QUANTIFIERS:
            return ways
        if group is None:
            raise self._bad("a repeated ^, $ or word boundary")
        if group and char != "?":
            raise self._bad("a repeated group (nested quantifiers)")
        self._at += 1
        choices = {"?": 2, "*": self._value_chars, "+": self._value_chars}.get(char) or self._counted()
        self._take("?")
        if self._peek() in _QUANTIFIERS:
            raise self._bad("a quantifier after a quantifier")
        return ways + 1 if group else choices

    def _counted(self) -> int:
        end = self._pattern.find("}", self._at)
        low, comma, high = self._pattern[self._at : max(end, self._at)].partition(",")
        if end < 0 or not (low.isascii() and low.isdigit()) or (high and not (high.isascii() and high.isdigit())):
            raise self._bad("a { } that is not {m}, {m,} or {m,n}")
        if len(low) > 3 or len(high) > 3 or max(int(low), int(high or 0)) > REGEX_REPEAT_MAX:
            raise self._bad(f"a repetition of more than {REGEX_REPEAT_MAX}")
        if high and int(high) < int(low):
            raise self._bad("a {m,n} with n < m")
        self._at = end + 1
        self._counted_chars += int(high or low)
        if comma and not high:
            return self._value_chars
        return int(high) - int(low) + 1 if comma else 1
