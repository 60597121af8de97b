"""Signatures as in the Standard Webhooks specification.

What is signed is `<webhook-id>.<webhook-timestamp>.<body>`, the three exactly as they were received. The header
`webhook-signature` is a list separated by spaces, one `v1,<base64 of HMAC-SHA256>` for each key that is valid at the
sender; versions we do not know are passed over. `svix-id`, `svix-timestamp` and `svix-signature` are other names of the
three headers. A secret is `whsec_<base64 of the key>`; the prefix may be missing.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

TOLERANCE_S = 300.0
HEADER_CHARS_MAX = 8192

_PREFIX = "whsec_"
_FAMILIES = ("webhook-", "svix-")
_PARTS = ("id", "timestamp", "signature")
_NAMES = tuple(_FAMILIES[0] + part for part in _PARTS)
_WANTED = "pass your framework's request.headers, a mapping, or pairs of a name and a value"
_TIMESTAMP = re.compile(r"[0-9]{1,12}", re.ASCII)


class HasItems(Protocol):
    """`request.headers` of http.server, wsgiref, aiohttp, Starlette, Flask or Django; a dict; a WSGI environ."""

    def items(self) -> Iterable[tuple[Any, Any]]: ...


# Names in any case, names and values as text or bytes.
Headers = HasItems | Iterable[tuple[str | bytes, str | bytes]]
Secrets = str | bytes | Sequence[str | bytes]


class VerificationError(Exception):
    """The request is not a fresh delivery signed with one of the secrets."""


@dataclass(frozen=True)
class Verified:
    id: str
    timestamp: int


def verify(
    headers: Headers,
    body: bytes,
    secrets: Secrets,
    tolerance_s: float = TOLERANCE_S,
    now: float | None = None,
) -> Verified:
    """The delivery's id and time if one of `secrets` signed it, else `VerificationError`, whatever the input.

    `body` is the bytes as received: a body parsed and written again has another signature. An unusable secret is a
    mistake of the caller and raises `ValueError`.
    """
    return verify_with_keys(webhook_headers(headers), body, keys_of(secrets), tolerance_s, now)


def sign(webhook_id: str, timestamp: int, body: bytes, secrets: Secrets) -> dict[str, str]:
    """The three headers a sender adds; for tests of a receiver. One signature per secret."""
    signatures = (base64.b64encode(_digest(key, webhook_id, str(timestamp), body)).decode() for key in keys_of(secrets))
    return {
        "webhook-id": webhook_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{signature}" for signature in signatures),
    }


def keys_of(secrets: Secrets) -> tuple[bytes, ...]:
    """The keys behind one or several secrets. Bytes are taken as the key itself."""
    given = (secrets,) if isinstance(secrets, (str, bytes)) else tuple(secrets)
    if not given:
        raise ValueError("no webhook secret was given; without one nothing can be verified")
    return tuple(_key_of(secret) for secret in given)


def _key_of(secret: str | bytes) -> bytes:
    if isinstance(secret, bytes):
        key = secret
    else:
        text = secret.strip().removeprefix(_PREFIX).rstrip("=")
        try:
            key = base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
        except ValueError:
            # The cause would show the secret's text in a traceback's locals of some error reporters: cut it off.
            raise ValueError("a webhook secret is not base64; it should look like whsec_<base64>") from None
    if not key:
        raise ValueError("a webhook secret is empty; it should look like whsec_<base64>")
    return key


def webhook_headers(headers: Headers) -> dict[str, str]:
    """The signed headers, as `webhook-id`, `webhook-timestamp` and `webhook-signature`, those that are there.

    A request that has all three as `svix-*`, and not as `webhook-*`, is read by these; the two are never mixed. A
    header given twice is refused: which of the two was signed?
    """
    found: dict[str, list[str]] = {}
    for raw_name, raw_value in _pairs(headers):
        name = _text(raw_name).lower()
        if name.startswith("http_"):  # as WSGI and CGI write them
            name = name[5:].replace("_", "-")
        if name.startswith(_FAMILIES):
            values = raw_value if isinstance(raw_value, (list, tuple)) else (raw_value,)
            found.setdefault(name, []).extend(map(_text, values))
    whole = (family for family in _FAMILIES if all(any(found.get(family + part, ())) for part in _PARTS))
    chosen = next(whole, _FAMILIES[0])
    return {_FAMILIES[0] + part: _one(chosen + part, found[chosen + part]) for part in _PARTS if chosen + part in found}


def _one(name: str, values: Sequence[str]) -> str:
    if len(values) > 1:
        raise VerificationError(f"the header {name} is given twice")
    value = values[0] if values else ""
    if not value.isascii() or len(value) > HEADER_CHARS_MAX:
        raise VerificationError(f"the header {name} is malformed")
    return value


def _pairs(headers: Headers) -> Iterator[tuple[object, object]]:
    """Names and values of anything that has `items()` or is an iterable of pairs; `TypeError` for anything else."""
    items = getattr(headers, "items", None)
    given = items() if callable(items) else headers
    if isinstance(given, (str, bytes)) or not isinstance(given, Iterable):
        raise TypeError(f"headers are {type(headers).__name__}: {_WANTED}")
    for pair in given:
        if isinstance(pair, (str, bytes)) or not isinstance(pair, Sequence) or len(pair) != 2:
            raise TypeError(f"headers hold {type(pair).__name__}, not pairs of a name and a value: {_WANTED}")
        yield pair[0], pair[1]


def _text(given: object) -> str:
    return given.decode("latin-1") if isinstance(given, bytes) else str(given)


def verify_with_keys(
    headers: Mapping[str, str], body: bytes, keys: Sequence[bytes], tolerance_s: float, now: float | None
) -> Verified:
    """`verify` for headers and keys that were made ready once."""
    missing = [name for name in _NAMES if not headers.get(name)]
    if missing:
        raise VerificationError(f"missing headers: {', '.join(missing)}")
    webhook_id, timestamp_text = headers["webhook-id"], headers["webhook-timestamp"]
    if not _TIMESTAMP.fullmatch(timestamp_text):
        raise VerificationError("webhook-timestamp is not a number of seconds")
    timestamp = int(timestamp_text)
    age_s = (time.time() if now is None else now) - timestamp
    # Written so that a tolerance of NaN refuses everything instead of accepting it.
    if not abs(age_s) <= tolerance_s:
        raise VerificationError(f"the timestamp is too {'old' if age_s > 0 else 'new'}")
    offered = [signature for text in headers["webhook-signature"].split() if (signature := _signature_of(text))]
    matched = False
    for key in keys:
        expected = _digest(key, webhook_id, timestamp_text, body)
        for signature in offered:
            matched |= hmac.compare_digest(expected, signature)
    if not matched:
        raise VerificationError("no signature matches")
    return Verified(webhook_id, timestamp)


def _signature_of(text: str) -> bytes | None:
    version, _, encoded = text.partition(",")
    if version != "v1":
        return None
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError:
        return None


def _digest(key: bytes, webhook_id: str, timestamp: str, body: bytes) -> bytes:
    signed = hmac.new(key, f"{webhook_id}.{timestamp}.".encode(), hashlib.sha256)
    signed.update(body)
    return signed.digest()
