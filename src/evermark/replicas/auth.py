"""Peers prove who they are with a key that the two of them share, in both directions.

A request is signed over cluster, sender, receiver, method, path, time, nonce and body; an answer over the nonce of its
request, its status and its body. So a name is bound to its key, a stranger of another cluster is refused though it has
the key, nothing can be sent again, and an answer cannot be given to another request.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

from evermark.errors import DeniedError
from evermark.secrets import Secret

KEY_CHARS_MIN = 32
NONCES_MAX = 200_000  # of each peer
TOLERANCE_MS = 300_000
_PREFIX = "evermark-"


def new_key() -> Secret:
    return Secret(secrets.token_urlsafe(32))


@dataclass(frozen=True)
class Party:
    """One side of a pair: who we are, who the other is, and the key they share."""

    cluster: str
    me: str
    peer: str
    key: Secret

    def sign_request(self, method: str, path: str, body: bytes, now_ms: int) -> dict[str, str]:
        nonce = secrets.token_hex(16)
        named = {"cluster": self.cluster, "node": self.me, "to": self.peer, "time": str(now_ms), "nonce": nonce}
        named["signature"] = self._signature("request", self.me, self.peer, method, path, str(now_ms), nonce, body)
        return {_PREFIX + name: value for name, value in named.items()}

    def check_request(self, method: str, path: str, headers: Mapping[str, str], body: bytes) -> None:
        time, nonce = headers.get(f"{_PREFIX}time", ""), headers.get(f"{_PREFIX}nonce", "")
        made = self._signature("request", self.peer, self.me, method, path, time, nonce, body)
        if not _is_same(made, headers.get(f"{_PREFIX}signature", "")):
            raise _denied("the signature of a request is wrong")

    def sign_answer(self, nonce: str, status: int, body: bytes) -> dict[str, str]:
        return {f"{_PREFIX}signature": self._signature("answer", self.me, self.peer, nonce, str(status), body)}

    def check_answer(self, nonce: str, status: int, signature: str, body: bytes) -> None:
        made = self._signature("answer", self.peer, self.me, nonce, str(status), body)
        if not _is_same(made, signature):
            raise _denied(f"an answer is not signed by {self.peer}")

    def _signature(self, *parts: str | bytes) -> str:
        digests = [hashlib.sha256(part if isinstance(part, bytes) else part.encode()).digest() for part in parts]
        message = b"evermark-replica-1" + hashlib.sha256(self.cluster.encode()).digest() + b"".join(digests)
        return hmac.new(self.key.reveal().encode(), message, hashlib.sha256).hexdigest()


class Gate:
    """Lets in requests of known peers, each once. Thread-safe."""

    def __init__(self, cluster: str, me: str, keys: Mapping[str, Secret], tolerance_ms: int = TOLERANCE_MS) -> None:
        self._cluster, self._me, self._keys, self._tolerance_ms = cluster, me, keys, tolerance_ms
        # Of each peer by itself: one that asks too often shuts out no other.
        self._seen: dict[str, OrderedDict[str, int]] = {name: OrderedDict() for name in keys}
        self._lock = threading.Lock()

    def expected(self, headers: Mapping[str, str], now_ms: int) -> Party:
        """The peer that this says to be from; `DeniedError` where no body could make it a request of a peer's. It is
        looked at before a body is read, and proves nothing."""
        name = headers.get(f"{_PREFIX}node", "")
        key = self._keys.get(name)
        if headers.get(f"{_PREFIX}cluster", "") != self._cluster or headers.get(f"{_PREFIX}to", "") != self._me:
            raise _denied("a request is for another cluster or node")
        if key is None:
            raise _denied("a request comes from a node that is not known here")
        time = headers.get(f"{_PREFIX}time", "")
        if not (time.isascii() and time.isdigit() and abs(int(time[:15]) - now_ms) <= self._tolerance_ms):
            raise _denied("a request is too old, or one of the two clocks is wrong")
        return Party(self._cluster, self._me, name, key)

    def check(self, method: str, path: str, headers: Mapping[str, str], body: bytes, now_ms: int) -> Party:
        """The peer that sent this; `DeniedError` unless it did."""
        party = self.expected(headers, now_ms)
        party.check_request(method, path, headers, body)
        self._once(party.peer, headers.get(f"{_PREFIX}nonce", ""), now_ms)
        return party

    def _once(self, peer: str, nonce: str, now_ms: int) -> None:
        with self._lock:
            seen = self._seen[peer]
            while seen and next(iter(seen.values())) < now_ms - 2 * self._tolerance_ms:
                seen.popitem(last=False)
            if nonce in seen:
                raise _denied("a request was sent before")
            if len(seen) >= NONCES_MAX:
                raise _denied("too many requests at once")
            seen[nonce] = now_ms


def _is_same(made: str, given: str) -> bool:
    return hmac.compare_digest(made.encode(), given.encode(errors="replace"))  # texts may be compared in ASCII alone


def _denied(text: str) -> DeniedError:
    return DeniedError(text, hint="compare cluster, names and keys: evermark replica list")
