"""The id of a server-sent event: it says exactly where a client stands, and anything else is refused."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from evermark.delivery.model import Cursor, SourcePartition
from evermark.delivery.tail.place import (
    ID_CHARS_MAX,
    Point,
    Trouble,
    Why,
    entry,
    gone,
    id_before,
    id_of,
    places_of,
    require_few,
    resumed,
)
from evermark.errors import ConfigError

NAMES = st.from_regex(r"[a-z][a-z0-9_]{0,20}", fullmatch=True) | st.text(min_size=1, max_size=5)
POINTS = st.builds(
    Point,
    st.builds(Cursor, st.integers(0, 10**17), st.text(max_size=20)),
    st.integers(0, 10**9),
)
PLACES = st.dictionaries(st.builds(SourcePartition, NAMES, st.integers(0, 999)), POINTS, max_size=5)


@given(PLACES)
def test_an_id_says_where_a_client_stands_and_fits_a_header(places: dict[SourcePartition, Point]) -> None:
    """GIVEN any places WHEN written as an id THEN it is one line of printable ASCII, and reads as the same places."""
    text = id_of(places)
    assert text.isascii() and text.isprintable() and " " not in text
    assert places_of(text) == places
    for place, point in places.items():
        assert places_of(id_before(places, place) + entry(place, point)) == places


@given(st.text(max_size=60) | st.text("1:shop/0@9!+,%", max_size=40))
@example("1:shop/0@1,shop/0@2")
@example("1:shop/0@1+%ff")
@example("2:shop/0@1")
@example("1:" + "a" * ID_CHARS_MAX)
def test_anything_else_is_refused_and_never_an_error_of_ours(text: str) -> None:
    """GIVEN any text as an id WHEN read THEN it is places, or an error with a hint."""
    with suppress(ConfigError):
        assert id_of(places_of(text)), "an id again"


def test_too_many_partitions_name_the_way_out() -> None:
    """GIVEN more partitions than an id can name WHEN followed THEN the refusal says how to follow fewer."""
    with pytest.raises(ConfigError) as refused:
        require_few([SourcePartition(f"s{n}", 0) for n in range(101)])
    assert "source=" in refused.value.hint


@pytest.mark.parametrize(
    ("cursor", "first", "is_gone"),
    [
        (Cursor(3), 4, False),
        (Cursor(3), 1, False),
        (Cursor(3), 5, True),
        (Cursor(3, "x"), 4, False),
        (Cursor(3, "x"), 5, True),
        (Cursor(3), None, True),
        (Cursor(9), None, False),
    ],
)
def test_what_the_log_no_longer_has_is_known_by_its_first_batch(
    cursor: Cursor, first: int | None, is_gone: bool
) -> None:
    """GIVEN the first batch that the log has, of nine WHEN a client goes on THEN it is told iff its next is gone."""
    assert (gone(SourcePartition("shop", 0), cursor, first, 9) is not None) == is_gone


def test_an_id_that_knows_of_a_later_gap_than_state_is_of_another_state() -> None:
    """GIVEN an id with a gap that State never had WHEN a client goes on from it THEN it is told, and once only."""
    place, end = SourcePartition("shop", 0), Cursor(5)
    for troubles in ({}, {place: Trouble(2, "lost")}):
        places, told = resumed({place: Point(end, 7)}, {place: Point(end)}, troubles)
        assert [each.why for each in told] == [Why.AHEAD]
        assert resumed(places, {place: Point(end)}, troubles) == (places, [])
