"""Fields of MongoDB documents that are left out or hashed, wherever a change shows them."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

pytest.importorskip("pymongo", reason="no pymongo: no MongoDB source is tested. pip install 'evermark[mongo]'")

from bson.dbref import DBRef

from evermark.sources.mongo.hidden import HiddenFields


def sha(text: str) -> str:
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


FIELDS = HiddenFields(exclude=("password", "cards.number"), hash=("email", "address.street"))


@pytest.mark.parametrize(
    ("document", "shown"),
    [
        (None, None),
        ({"a": 1}, {"a": 1}),
        ({"password": "x", "email": "e", "a": 1}, {"email": sha("e"), "a": 1}),
        ({"email": None, "address": "none"}, {"email": None, "address": "none"}),
        ({"email": {"work": 1}}, {"email": sha('{"work":1}')}),
        ({"cards": [{"number": 1, "n": 2}, 7]}, {"cards": [{"n": 2}, 7]}),
        ({"address": {"street": "s", "city": "c"}}, {"address": {"street": sha("s"), "city": "c"}}),
    ],
)
def test_a_document_shows_nothing_of_them(document: Any, shown: Any) -> None:
    """At the top, inside documents, and in every element of an array; null stays null."""
    kept = repr(document)
    assert FIELDS.in_document(document) == shown
    assert repr(document) == kept, "the document itself is not changed"


@pytest.mark.parametrize(
    ("fields", "shown"),
    [
        ({"password": "x"}, {}),
        ({"password.old": "x"}, {}),
        ({"cards.0.number": 1, "cards.0.n": 2}, {"cards.0.n": 2}),
        ({"cards": [{"number": 1, "n": 2}]}, {"cards": [{"n": 2}]}),
        ({"email": "e"}, {"email": sha("e")}),
        ({"address.street": "s"}, {"address.street": sha("s")}),
        ({"address": {"street": "s"}}, {"address": {"street": sha("s")}}),
        ({"emails": "e", "addresses": 1}, {"emails": "e", "addresses": 1}),
    ],
)
def test_the_changes_of_an_update_show_nothing_of_them(fields: Any, shown: Any) -> None:
    """Paths of updates name a hidden field, a field inside it, or the document around it."""
    told = {"updatedFields": fields, "removedFields": ["password"]}
    assert FIELDS.in_update(told) == {"updatedFields": shown, "removedFields": ["password"]}


@pytest.mark.parametrize(
    ("path", "fields", "shown"),
    [
        ("scores.2024", {"scores.2024": 1, "scores.2025": 2}, {"scores.2025": 2}),
        ("scores.2024.points", {"scores.2024.points": 1, "scores.2024.n": 2}, {"scores.2024.n": 2}),
        ("scores.2024.points", {"scores.2024": {"points": 1, "n": 2}}, {"scores.2024": {"n": 2}}),
        ("scores.2024.points", {"scores.0.2024.points": 1}, {}),
        ("scores.2024.points", {"scores.0": {"2024": {"points": 1}}}, {"scores.0": {"2024": {}}}),
        ("2024", {"2024": 1, "a": 2}, {"a": 2}),
    ],
)
def test_a_number_in_an_update_is_read_as_a_field_and_as_an_index(path: str, fields: Any, shown: Any) -> None:
    """GIVEN a hidden field whose path has a number WHEN an update names it THEN it is hidden, in arrays too."""
    assert HiddenFields(exclude=(path,)).in_update({"updatedFields": fields}) == {"updatedFields": shown}
    hashed = HiddenFields(hash=("a.0",)).in_update({"updatedFields": {"a.0.0": "x"}})
    assert hashed == {"updatedFields": {"a.0.0": sha("x")}}, "once, though both readings lead there"


def test_a_reference_is_entered_as_a_document() -> None:
    """GIVEN a DBRef with more fields WHEN one of them is hidden THEN it is not shown."""
    document = {"owner": DBRef("users", 1, email="e", n=2)}
    assert HiddenFields(exclude=("owner.email",)).in_document(document) == {
        "owner": {"$ref": "users", "$id": 1, "n": 2}
    }
