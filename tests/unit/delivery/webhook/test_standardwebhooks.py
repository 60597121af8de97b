"""Our signatures and those of the `standardwebhooks` package are the same, in both directions.

Two verify, the package and the receiver kit: they accept and refuse the same messages.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

import evermark_receiver
from evermark.delivery.webhook import signing

SECRET, OTHER = ("whsec_" + base64.b64encode(key * 24).decode() for key in (b"k", b"o"))
REFUSALS = (WebhookVerificationError, evermark_receiver.VerificationError)

Headers = Mapping[str, str]
Sign = Callable[[str, int, bytes, str], Headers]
Verify = Callable[[Headers, bytes, str], object]

ids = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=60)
# The package takes bodies as text; everything we send is UTF-8.
bodies = st.text(st.characters(codec="utf-8"), max_size=300).map(str.encode)
secrets = st.binary(min_size=24, max_size=64).map(lambda key: "whsec_" + base64.b64encode(key).decode())


def theirs(webhook_id: str, at: int, body: bytes, secret: str) -> Headers:
    signature = Webhook(secret).sign(webhook_id, datetime.fromtimestamp(at, UTC), body.decode())
    return {"webhook-id": webhook_id, "webhook-timestamp": str(at), "webhook-signature": signature}


def ours(webhook_id: str, at: int, body: bytes, secret: str) -> Headers:
    return signing.Signer([secret]).headers(webhook_id, at, body)


def ours_in_parts(webhook_id: str, at: int, body: bytes, secret: str) -> Headers:
    """As bundles are signed: without putting the body together."""
    parts = (body[:1], memoryview(body)[1:7], body[7:])
    return signing.Signer([secret]).headers(webhook_id, at, parts)


def by_the_package(headers: Headers, body: bytes, secret: str) -> object:
    return Webhook(secret).verify(body, dict(headers), json_parse=False)


def by_the_kit(headers: Headers, body: bytes, secret: str) -> object:
    return evermark_receiver.verify(headers, body, secret)


every_signer = pytest.mark.parametrize("sign", [theirs, ours, ours_in_parts])
every_verifier = pytest.mark.parametrize("verify", [by_the_package, by_the_kit])


@every_verifier
@every_signer
@given(webhook_id=ids, body=bodies, secret=secrets)
@example(webhook_id="a.b", body=b"", secret=SECRET)
@example(webhook_id="x" * 256, body=b'{"data": "a.b\\n"}', secret=SECRET)
@settings(max_examples=30, derandomize=True, deadline=None)
def test_what_one_signs_every_other_verifies(
    sign: Sign, verify: Verify, webhook_id: str, body: bytes, secret: str
) -> None:
    """GIVEN any id, body and secret WHEN one side signs THEN every side accepts it."""
    verify(sign(webhook_id, int(time.time()), body, secret), body, secret)


@given(webhook_id=ids, body=bodies, secret=secrets, at=st.integers(0, 4_000_000_000))
@settings(max_examples=60, derandomize=True, deadline=None)
def test_all_sign_alike(webhook_id: str, body: bytes, secret: str, at: int) -> None:
    """GIVEN the same id, time, body and secret WHEN both sides and the kit sign THEN the headers are the same."""
    kit = evermark_receiver.sign(webhook_id, at, body, secret)
    assert theirs(webhook_id, at, body, secret) == ours(webhook_id, at, body, secret) == kit
    assert kit == ours_in_parts(webhook_id, at, body, secret)


@every_verifier
@every_signer
@given(webhook_id=ids, body=bodies, changed=bodies, other_id=ids)
@settings(max_examples=20, derandomize=True, deadline=None)
def test_what_was_changed_no_one_accepts(
    sign: Sign, verify: Verify, webhook_id: str, body: bytes, changed: bytes, other_id: str
) -> None:
    """GIVEN a signed request WHEN body, id or secret is another one THEN every side refuses it."""
    headers = sign(webhook_id, int(time.time()), body, SECRET)
    with pytest.raises(REFUSALS):
        verify(headers, changed if changed != body else body + b" ", SECRET)
    with pytest.raises(REFUSALS):
        verify({**headers, "webhook-id": other_id if other_id != webhook_id else "x" + webhook_id}, body, SECRET)
    with pytest.raises(REFUSALS):
        verify(headers, body, OTHER)


@every_verifier
@every_signer
@pytest.mark.parametrize("age_s", [-360, 360])
def test_an_old_or_early_timestamp_no_one_accepts(sign: Sign, verify: Verify, age_s: int) -> None:
    """GIVEN a good signature WHEN it is six minutes away THEN every side refuses it; at four all accept it."""
    now = int(time.time())
    with pytest.raises(REFUSALS):
        verify(sign("a", now - age_s, b"{}", SECRET), b"{}", SECRET)
    verify(sign("a", now - age_s * 4 // 6, b"{}", SECRET), b"{}", SECRET)


@every_verifier
def test_a_signature_moved_to_a_fresh_timestamp_no_one_accepts(verify: Verify) -> None:
    """GIVEN an old request WHEN its timestamp is made fresh THEN every side refuses it: the time is signed too."""
    now = int(time.time())
    with pytest.raises(REFUSALS):
        verify({**theirs("a", now - 3600, b"{}", SECRET), "webhook-timestamp": str(now)}, b"{}", SECRET)


@every_verifier
@pytest.mark.parametrize("known", [SECRET, OTHER])
def test_during_a_rotation_either_secret_is_enough(verify: Verify, known: str) -> None:
    """GIVEN a request signed with the new and the old secret WHEN one of them is known THEN every side accepts it."""
    verify(signing.Signer([SECRET, OTHER]).headers("a", int(time.time()), b"{}"), b"{}", known)
