"""A node that goes on under a new origin."""

from __future__ import annotations

from typing import Any

import pytest

from evermark.replicas.identity import Tokens, claim


class _Restored:
    """A database with an older token than the folder's."""

    def __init__(self, origin: str) -> None:
        self.origin = origin

    def identity(self) -> tuple[str, str]:
        return self.origin, "an older token"

    def renew(self, origin: str, *, is_noted: bool) -> None:
        self.origin = origin

    def set_token(self, token: str) -> None: ...

    def token_kept(self) -> None: ...


@pytest.mark.parametrize(
    ("here", "kept"),
    [
        ("a.000000000001aaaaaaaa", "a.000000000009aaaaaaaa"),
        ("a.000000000009aaaaaaaa", "a.000000000001aaaaaaaa"),
        ("a.000000000009aaaaaaaa", ""),
    ],
    ids=["the folder's is younger", "the database's is younger", "the folder knows none"],
)
def test_r2_a_new_origin_is_younger_than_every_one_before(here: str, kept: str) -> None:
    """GIVEN a database that was restored, of a node that may have had later origins WHEN it takes a new one THEN it is
    born after the last of them, as others take the youngest for the node."""
    store: Any = _Restored(here)
    asked: list[str] = []

    def fresh(last: str) -> str:
        asked.append(last)
        return "a.00000000000aaaaaaaaa"

    assert claim(store, Tokens("a token", "", kept), lambda _: None, fresh)
    assert asked == ["a.000000000009aaaaaaaa"]
    assert store.origin == "a.00000000000aaaaaaaaa"
