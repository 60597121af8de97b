"""Who may use the HTTP API: bearer tokens, known here only by their hashes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from evermark.config import TokenConfig

_SCHEME = "bearer "
_HEADER_CHARS_MAX = 1024


@dataclass(frozen=True)
class Bearer:
    """Whoever showed a token: by the name it has in the file."""

    name: str
    may_write: bool


class Tokens:
    """Compares by hash and with all of them, so that the time taken tells neither a token nor whose it was."""

    def __init__(self, given: Mapping[str, TokenConfig]) -> None:
        self._known = [
            (_hash(token.token.reveal()), Bearer(name, may_write=token.may == "everything"))
            for name, token in given.items()
        ]

    def __repr__(self) -> str:
        return f"Tokens({len(self._known)})"

    def __bool__(self) -> bool:
        return bool(self._known)

    def bearer(self, authorization: str | None) -> Bearer | None:
        """Who sent this header; None when it is missing, malformed or nobody's."""
        if authorization is None or len(authorization) > _HEADER_CHARS_MAX:
            return None
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        shown = _hash(authorization[len(_SCHEME) :].strip())
        found = [bearer for known, bearer in self._known if hmac.compare_digest(known, shown)]
        return found[0] if found else None


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
