"""Who may use the HTTP API: bearer tokens, known here only by their hashes."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass

from starlette.authentication import AuthCredentials, AuthenticationBackend, AuthenticationError, BaseUser
from starlette.requests import HTTPConnection

from evermark.config import TokenConfig
from evermark.errors import DeniedError

_SCHEME = "bearer "
_HEADER_CHARS_MAX = 1024
_HINT = "send the header Authorization: Bearer …, with a token named under server.tokens in evermark.yaml"
_HINT_NO_TOKENS = (
    'add to evermark.yaml: server: {tokens: {NAME: "${VARIABLE}"}}, 24 characters at least, and start again'
)


@dataclass(frozen=True)
class Bearer(BaseUser):
    """A client that showed a token, by the token's name in the file."""

    name: str
    may_write: bool


class Tokens(AuthenticationBackend):
    """Compares a hash with the hashes of all tokens, so that the time taken tells neither a token nor its name."""

    def __init__(self, given: Mapping[str, TokenConfig]) -> None:
        self._known = [
            (_hash(token.token.reveal()), Bearer(name, may_write=token.may == "everything"))
            for name, token in given.items()
        ]

    def __repr__(self) -> str:
        return f"Tokens({len(self._known)})"

    async def authenticate(self, conn: HTTPConnection) -> tuple[AuthCredentials, BaseUser] | None:
        """Without a token a client learns nothing below /v1, not even which paths there are."""
        if not (conn.scope["path"] + "/").startswith("/v1/"):
            return None
        found = self.bearer(conn.headers.get("Authorization"))
        if found is None:
            raise AuthenticationError
        return AuthCredentials(), found

    def refusal(self, conn: HTTPConnection) -> DeniedError:
        """Why `authenticate` refused this request."""
        if not self._known:
            return DeniedError("there are no tokens, so nobody may use the API", hint=_HINT_NO_TOKENS)
        shown = "Authorization" in conn.headers
        return DeniedError("this token is not known" if shown else "this needs a token", hint=_HINT)

    def bearer(self, authorization: str | None) -> Bearer | None:
        """The client that sent this header; None when the header is missing or malformed, or its token unknown."""
        if authorization is None or len(authorization) > _HEADER_CHARS_MAX:
            return None
        if authorization[: len(_SCHEME)].lower() != _SCHEME:
            return None
        shown = _hash(authorization[len(_SCHEME) :].strip())
        found = [bearer for known, bearer in self._known if hmac.compare_digest(known, shown)]
        return found[0] if found else None


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).digest()
