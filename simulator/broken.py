"""How a broken promise is said."""

from __future__ import annotations


class Broken(AssertionError):
    """A promise was broken."""


def require(holds: bool, said: str) -> None:
    if not holds:
        raise Broken(said)
