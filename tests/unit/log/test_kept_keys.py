"""When an update that names no former key is known to have left the key as it was."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.log.kept_keys import all_kept


def kept(key: str, payload: str | None, before: str) -> bool:
    return all_kept(pa.array([key]), pa.array([payload], pa.string()), pa.array([before]))


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
    assert all_kept(pa.array(keys), pa.array(texts[0]), pa.array(texts[1])) == all(alone)
    for known, key, image, before in zip(alone, keys, new, old, strict=True):
        members = [name for name in image if name in before and text(image[name]) == text(before[name]) == key]
        assert known == bool(members)


def text(value: object) -> str | None:
    return None if value is None else str(value).lower() if isinstance(value, bool) else str(value)
