"""When an update that names no former key is known to have left the key as it was."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pyarrow as pa
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evermark.log import kept_keys
from evermark.log.kept_keys import KeyCheck

Update = tuple[str, str | None, str]


def all_kept(check: KeyCheck, updates: Sequence[Update]) -> bool:
    return check.all_kept(*(pa.array(list(column), pa.string()) for column in zip(*updates, strict=True)))


def kept(key: str, payload: str | None, before: str) -> bool:
    return all_kept(KeyCheck(), [(key, payload, before)])


@pytest.mark.parametrize(
    ("key", "payload", "before"),
    [
        ("7", '{"id":7,"n":1}', '{"id":7,"n":2}'),
        ("7", '{"id": 7}', '{"id": 7}'),
        ("a b", '{"name":"a b","n":1}', '{"name":"a b"}'),
        ("7", '{"n":1,"id":7}', '{"n":2,"id":7}'),  # the key is not the first
        ("7", '{"id":"7"}', '{"id":"7"}'),
        ("true", '{"yes":true}', '{"yes":true}'),
        ("1.50", '{"id":1.50}', '{"id":1.50}'),
        ('a"b', '{"id":"a\\\\"b"}', '{"id":"a\\\\"b"}'),
        ('{"a": 1, "b": "x"}', '{"a":1,"b":"x","n":1}', '{"a":1,"b":"x","n":2}'),
        ("8", '{"id":8,"n":8}', '{"id":7,"n":8}'),  # nothing is concluded of two members that disagree
    ],
)
def test_an_update_with_its_key_in_both_images_kept_it(key: str, payload: str, before: str) -> None:
    """GIVEN an update whose key stands in the same place before and after THEN it is known to have kept it."""
    assert kept(key, payload.replace("\\\\", "\\"), before.replace("\\\\", "\\"))


@pytest.mark.parametrize(
    ("key", "payload", "before"),
    [
        ("8", '{"id":8,"n":1}', '{"id":7,"n":1}'),
        ("8", '{"id":8,"n":1}', '{"n":8,"id":7}'),  # the same text, of another member
        ("8", '{"id":8}', '{"name":8}'),
        ("8", '{"id":8}', '{"id":88}'),
        ("8", None, '{"id":8}'),
        ("8", "8", '{"id":8}'),
        ("8", '{"id":8}', "no object"),
        ('{"a": 1, "b": 2}', '{"a":1,"b":2}', '{"a":1,"b":3}'),
        ('{"a": 1, "b": 2}', '{"a":1,"n":2}', '{"a":1,"n":2}'),
        ("{}", "{}", "{}"),
        pytest.param("8", '{"id":8,"n":' + "[" * 100_000, '{"id":8}', id="too deep"),
    ],
)
def test_an_update_that_may_have_left_a_key_is_not_taken_for_another(
    key: str, payload: str | None, before: str
) -> None:
    """GIVEN an update whose key is not seen in both images THEN nothing is known of it."""
    assert not kept(key, payload, before)


IMAGE = st.dictionaries(
    st.sampled_from(["id", "n", "m"]), st.sampled_from([1, 2, "1", "x", "", None, True]), max_size=3
)


@given(st.lists(st.tuples(st.sampled_from(["1", "2", "x", "true"]), IMAGE, IMAGE), min_size=1, max_size=5))
def test_many_updates_are_looked_at_as_each_is_alone(
    updates: list[tuple[str, dict[str, object], dict[str, object]]],
) -> None:
    """GIVEN updates WHEN they are looked at together THEN it is known of all that it is known of each, and only where
    some member has the key in both images."""
    keys, new, old = (list(column) for column in zip(*updates, strict=True))
    texts = [[json.dumps(image) for image in images] for images in (new, old)]
    alone = [kept(*each) for each in zip(keys, *texts, strict=True)]
    assert all_kept(KeyCheck(), list(zip(keys, *texts, strict=True))) == all(alone)
    for known, key, image, before in zip(alone, keys, new, old, strict=True):
        members = [name for name in image if name in before and text(image[name]) == text(before[name]) == key]
        assert known == bool(members)


def text(value: object) -> str | None:
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@pytest.mark.parametrize("name", ["id", "order_id", "größe", "a b", "a.b*(c)[d]^-{e}|$", "-]^", "i", "", "ü" * 63])
@pytest.mark.parametrize("value", ['"x"', "1.50", "true", '""', '"a b, c: }"', "-1e-5"])
def test_of_updates_that_are_alike_few_are_parsed(name: str, value: str) -> None:
    """GIVEN many updates whose key is some member, among others that have much of it in them WHEN they are looked at
    THEN few are parsed; one that took another key is found among them."""

    def image(number: int, key: str) -> str:
        other = {"n": number, name + "x": 1, name[:-1] + "y": 2, "t": 'a "b" \\ \n', "deep": [{"other": [3]}, "]"]}
        more = {"last": None, "f": -1.5, "c": f'"{name}": 7', "inner": {name: [{name: 3}, "]"]}}
        first, quoted, last = (json.dumps(each, ensure_ascii=False) for each in (other, name, more))
        return f"{first[:-1]}, {quoted}: {key},{last[1:]}"

    told = value.strip('"')
    updates: list[Update] = [(told, image(n, value), image(n + 1, value)) for n in range(500)]
    check = KeyCheck()
    assert all_kept(check, updates) and check.parsed <= 16
    updates[400] = ("other", *updates[400][1:])
    assert not all_kept(check, updates)


@pytest.mark.parametrize("spaces", [(", ", ": "), (",", ":")])
def test_of_keys_of_several_columns_few_are_parsed(spaces: tuple[str, str]) -> None:
    """GIVEN many updates whose key is an object WHEN they are looked at THEN few are parsed; one is found in which a
    part of the key is another, and one whose key has more parts."""

    def update(number: int, was: int, more: str = "") -> Update:
        new, old = ({"n": n, "b": f"x {at}", "t": [1], "a": at} for n, at in ((1, number), (2, was)))
        key = json.dumps({"a": number, "b": f"x {number}"})
        return f"{key[:-1]}{more}}}", *(json.dumps(each, separators=spaces) for each in (new, old))

    check = KeyCheck()
    updates = [update(n, n) for n in range(500)]
    assert all_kept(check, updates) and check.parsed <= 16
    assert not all_kept(check, [*updates[:300], update(1, 2), *updates[301:]])
    assert not all_kept(check, [*updates[:300], update(1, 1, ', "c": 1'), *updates[301:]])


def test_many_updates_that_have_to_be_parsed_are_too_many() -> None:
    """GIVEN updates of which only a parser sees that they kept their key WHEN they are more than a bound, in one piece
    or in several THEN they are not looked at any further."""
    updates: list[Update] = [('a"b', r'{"id":"a\"b"}', r'{"id":"a\"b"}')] * 60
    assert all_kept(check := KeyCheck(60), updates) and check.parsed == 60
    assert not all_kept(check, updates)
    assert check.parsed <= 60 + 16
    assert kept_keys.PARSED_MAX > 60


NAMES = ["id", "n", "i", "idx", "", r"\u0069d", r"i\"d", r"a\"id", r"\"", r"\\", "é"]
VALUES = [
    "7", '"7"', "8", '"8"', "7.0", "-7", "null", "true", '""', '"id"',
    r'"\u0037"', r'"\"id\": 7"', r'", \"id\": 7, \""',
    r'"\\"', '"{"', '"}"', "{}", "[]", '{"id": 7}', '[{"id": 7, "n": 8}]', '{"id": 8, "x": "}"}', '[[[["id"]]]]',
    '{"a": {"b": {"c": {"id": 7}}}}', '[7, "id", 7]', '{"a": 7, "id": [7]}',
]  # fmt: skip
SPACE = st.sampled_from(["", "", " ", "\n\t"])
MEMBER = st.builds(
    lambda name, value, *s: f'{s[0]}"{name}"{s[1]}:{s[2]}{value}{s[3]}',
    st.one_of(st.just("id"), st.just("n"), st.sampled_from(NAMES)),
    st.one_of(st.just("7"), st.just("8"), st.sampled_from(VALUES)),
    *[SPACE] * 4,
)
NASTY = st.one_of(
    st.builds(lambda members, s: f"{s}{{{','.join(members)}}}{s}", st.lists(MEMBER, min_size=1, max_size=5), SPACE),
    st.sampled_from(
        [*VALUES, '{"id": 7', '{"id": 7}}', '{"id": 7}, "n": 8}', '{"id": 7 8}', '{"id": 07}', '{"id": 7,}']
    ),
)
KEY = st.one_of(
    st.sampled_from(
        ["7", "8", "7.0", "", "true", "id", "null", '{"id": 7', '{"id": 7, "id": 8}', '{"id": 7, "n": [8]}']
    ),
    st.builds(lambda a, b: f'{{"id": {a}, "n": {b}}}', *[st.sampled_from(VALUES)] * 2),
)
TAUGHT: list[Update] = [("7", '{"id":7}', '{"id":7}'), ('{"id": 1, "n": 2}', *['{"id":1,"n":2}'] * 2)]


@example("7", r'{"a\"id": 7}', '{"id": 7}')
@example("null", '{"id": null}', '{"id": null}')
@example(r"\u0037", r'{"id": "\u0037"}', r'{"id": "\u0037"}')
@example("7", r'{"id": 7, "\u0069d": 8}', '{"id": 7}')
@example("8", r'{"\u0069d": 7, "id": 8}', '{"id": 8}')
@example("7", '{"n": {"id": 7}}', '{"id": 7}')
@example("7", '{"n": [{"x": "id", "id": 7}], "id": 8}', '{"id": 7}')
@given(KEY, NASTY, st.none() | NASTY)
def test_what_was_learned_proves_no_more_than_a_parser(key: str, payload: str, before: str | None) -> None:
    """GIVEN texts with names in texts, in objects and twice, with escapes and spaces, or that are no JSON WHEN it has
    been learned which members are the key THEN it is known of them what a parser finds, no more and no less."""
    check = KeyCheck()
    for taught in TAUGHT:
        assert all_kept(check, [taught])
    was = payload if before is None else before
    assert all_kept(check, [(key, payload, was)]) == parsed_kept(key, payload, was)


def parsed_kept(key: str, payload: str, before: str) -> bool:
    new, old, parts = map(parsed, (payload, before, key))
    if any(value == key == old.get(name) for name, value in new.items()):
        return True
    missing = object()
    return bool(parts) and all(new.get(name, missing) == value == old.get(name) for name, value in parts.items())


def parsed(image: str) -> dict[str, object]:
    try:
        found = json.loads(image, parse_int=str, parse_float=str)
    except ValueError:
        return {}
    return (
        {name: text(value) if isinstance(value, bool) else value for name, value in found.items()}
        if isinstance(found, dict)
        else {}
    )
