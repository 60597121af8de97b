"""Signatures agree with the Standard Webhooks reference and keep their secrets to themselves."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook

import evermark_receiver
from evermark.delivery.webhook.signing import Signer, new_secret
from evermark.errors import ConfigError
from evermark_receiver import VerificationError


@given(st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40), st.text(max_size=200))
def test_the_reference_implementation_accepts_our_signatures(webhook_id: str, text: str) -> None:
    """`standardwebhooks` verifies whatever we sign."""
    secret, body, now = new_secret(), ('"' + text.encode("unicode_escape").hex() + '"').encode(), int(time.time())
    headers = Signer([secret]).headers(webhook_id, now, body)
    Webhook(secret).verify(body, headers)
    assert evermark_receiver.verify(headers, body, secret, now=now).id == webhook_id


def test_during_a_rotation_either_secret_verifies() -> None:
    """A receiver that still has the old secret, or already the new one, is content."""
    old, new, now = new_secret(), new_secret(), int(time.time())
    headers = Signer([new, old]).headers("e1", now, b"{}")
    Webhook(old).verify(b"{}", headers)
    Webhook(new).verify(b"{}", headers)
    with pytest.raises(VerificationError):
        evermark_receiver.verify(headers, b"{}", new_secret(), now=now)


@pytest.mark.parametrize("change", ["webhook-id", "webhook-timestamp", "webhook-signature", "body"])
def test_nothing_signed_can_be_changed(change: str) -> None:
    """Id, time, body and signature hang together."""
    secret, body = new_secret(), b"{}"
    headers = Signer([secret]).headers("e1", 1_000, body)
    if change == "body":
        body = b"{ }"
    else:
        headers[change] = {"webhook-id": "e2", "webhook-timestamp": "1001", "webhook-signature": "v1"}[change]
    with pytest.raises(VerificationError):
        evermark_receiver.verify(headers, body, secret, now=1_000.0)


def test_a_signature_is_good_for_five_minutes() -> None:
    """Older and younger ones are refused, right or not."""
    secret = new_secret()
    headers = Signer([secret]).headers("e1", 1_000, b"{}")
    assert evermark_receiver.verify(headers, b"{}", secret, now=1_300.0).id == "e1"
    for now in (1_301.0, 699.0):
        with pytest.raises(VerificationError):
            evermark_receiver.verify(headers, b"{}", secret, now=now)


@pytest.mark.parametrize("secret", ["whsec_not base64!", "whsec_c2hvcnQ=", "plainly-wrong-secret"])
def test_a_bad_secret_is_named_without_being_shown(secret: str) -> None:
    """The error helps, and gives nothing away."""
    with pytest.raises(ConfigError) as caught:
        Signer([secret])
    assert secret.removeprefix("whsec_") not in str(caught.value)


def test_a_signer_does_not_show_its_keys() -> None:
    """Not even to a debugger's repr."""
    assert repr(Signer([new_secret()])) == "Signer(1 secrets)"


def test_without_secrets_nothing_is_signed() -> None:
    """The id and the time are sent all the same."""
    assert Signer([]).headers("e1", 7, b"") == {"webhook-id": "e1", "webhook-timestamp": "7"}
