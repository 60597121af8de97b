"""Signatures of the Standard Webhooks specification: HMAC-SHA256 over `id.timestamp.body`.

A subscription may have several secrets while they are rotated; then one signature per secret is sent, and a
receiver that knows any of them is content. A secret is `whsec_` followed by base64; its text never appears in errors.
"""

from __future__ import annotations

import base64
import binascii
import hmac
import secrets as randomness
from collections.abc import Sequence
from typing import TypeAlias

from evermark.delivery.limits import SECRETS_MAX
from evermark.errors import ConfigError

# A body, or its parts: a bundle is never put together before it is sent.
Body: TypeAlias = bytes | tuple[bytes | memoryview, ...]

PREFIX = "whsec_"
_KEY_BYTES_MIN, _KEY_BYTES_MAX = 16, 256


def new_secret() -> str:
    return PREFIX + base64.b64encode(randomness.token_bytes(32)).decode()


def key_of(secret: str) -> bytes:
    """The key bytes of a secret as people write it down."""
    hint = f"use {PREFIX} followed by base64 of {_KEY_BYTES_MIN} to {_KEY_BYTES_MAX} random bytes"
    try:
        key = base64.b64decode(secret.strip().removeprefix(PREFIX), validate=True)
    except (binascii.Error, ValueError):
        raise ConfigError("a webhook secret is not base64", hint=hint) from None
    if not _KEY_BYTES_MIN <= len(key) <= _KEY_BYTES_MAX:
        raise ConfigError(f"a webhook secret has {len(key)} bytes", hint=hint)
    return key


class Signer:
    """Signs with every secret given; signs nothing when there is none."""

    __slots__ = ("_begun", "_keys")

    def __init__(self, secrets: Sequence[str]) -> None:
        if len(secrets) > SECRETS_MAX:
            raise ConfigError(f"{len(secrets)} webhook secrets", hint=f"keep at most {SECRETS_MAX} during a rotation")
        self._keys = tuple(key_of(secret) for secret in secrets)
        # The key's part of the work, done once: bodies in parts are signed with copies.
        self._begun = tuple(hmac.new(key, digestmod="sha256") for key in self._keys)

    def __repr__(self) -> str:
        return f"Signer({len(self._keys)} secrets)"

    def headers(self, webhook_id: str, timestamp: int, body: Body) -> dict[str, str]:
        signed = {"webhook-id": webhook_id, "webhook-timestamp": str(timestamp)}
        if self._keys:
            signed["webhook-signature"] = self._signature(webhook_id, timestamp, body)
        return signed

    def _signature(self, webhook_id: str, timestamp: int, body: Body) -> str:
        if isinstance(body, bytes):
            content = b"%b.%d.%b" % (webhook_id.encode(), timestamp, body)
            return " ".join("v1," + _b64(hmac.digest(key, content, "sha256")) for key in self._keys)
        before = b"%b.%d." % (webhook_id.encode(), timestamp)
        return " ".join(["v1," + _b64(_digest(begun.copy(), before, body)) for begun in self._begun])


def _digest(made: hmac.HMAC, before: bytes, parts: tuple[bytes | memoryview, ...]) -> bytes:
    made.update(before)
    for part in parts:
        made.update(part)
    return made.digest()


def _b64(digest: bytes) -> str:
    return binascii.b2a_base64(digest, newline=False).decode()
