"""Fields of MongoDB documents that are left out or hashed, wherever a change shows them."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

pytest.importorskip("pymongo", reason="no pymongo: no MongoDB source is tested. pip install 'evermark[mongo]'")

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
