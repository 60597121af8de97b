"""The receiver kit's signatures, with the `standardwebhooks` package as an oracle in both directions."""

from __future__ import annotations

import base64
import json
import time
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from evermark_receiver import VerificationError, sign, verify

SECRET = "whsec_" + base64.b64encode(b"k" * 24).decode()
OTHER = "whsec_" + base64.b64encode(b"o" * 24).decode()
BODY = '{"data": "grüße"}'.encode()
NOW = 1_800_000_000


def signed(body: bytes = BODY, secrets: str | list[str] = SECRET, at: int = NOW) -> dict[str, str]:
    return sign("evt_1", at, body, secrets)


@given(
    webhook_id=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40),
    body=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3).map(json.dumps),
    key=st.binary(min_size=1, max_size=64),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_what_the_oracle_signs_is_verified(webhook_id: str, body: str, key: bytes) -> None:
    """GIVEN any id, body and key WHEN the reference library signs THEN we accept it."""
    secret = "whsec_" + base64.b64encode(key).decode()
    signature = Webhook(secret).sign(webhook_id, datetime.fromtimestamp(NOW, UTC), body)
    headers = {"webhook-id": webhook_id, "webhook-timestamp": str(NOW), "webhook-signature": signature}
    assert verify(headers, body.encode(), secret, now=NOW).id == webhook_id


@given(
    webhook_id=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=40),
    body=st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3).map(json.dumps),
    key=st.binary(min_size=1, max_size=64),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_what_we_sign_is_verified_by_the_oracle(webhook_id: str, body: str, key: bytes) -> None:
    """GIVEN any id, body and key WHEN we sign THEN the reference library accepts it."""
    secret = "whsec_" + base64.b64encode(key).decode()
    headers = sign(webhook_id, int(time.time()), body.encode(), secret)
    assert Webhook(secret).verify(body, headers) == json.loads(body)


def test_a_changed_byte_is_refused_as_by_the_oracle() -> None:
    """GIVEN a signed body WHEN one byte of body, id or time changes THEN both refuse it."""
    at = int(time.time())
    headers = sign("evt_1", at, BODY, SECRET)
    for changed, body in (
        ({}, BODY + b" "),
        ({"webhook-id": "evt_2"}, BODY),
        ({"webhook-timestamp": str(at + 1)}, BODY),
    ):
        with pytest.raises(VerificationError, match="no signature matches"):
            verify({**headers, **changed}, body, SECRET)
        with pytest.raises(WebhookVerificationError):
            Webhook(SECRET).verify(body, {**headers, **changed})


def test_any_of_several_secrets_and_signatures_is_enough() -> None:
    """GIVEN a rotation WHEN either side still uses the old or already the new secret THEN it is accepted."""
    assert verify(signed(secrets=OTHER), BODY, [SECRET, OTHER], now=NOW).id == "evt_1"
    assert verify(signed(secrets=[SECRET, OTHER]), BODY, OTHER, now=NOW).id == "evt_1"
    with pytest.raises(VerificationError):
        verify(signed(secrets=SECRET), BODY, OTHER, now=NOW)


def test_secrets_without_prefix_or_padding_are_the_same_secret() -> None:
    """GIVEN a key whose base64 needs padding WHEN prefix, padding or whitespace vary THEN it is the same key."""
    secret = "whsec_" + base64.b64encode(b"k" * 25).decode()
    headers = signed(secrets=secret)
    for form in (secret.removeprefix("whsec_"), secret.rstrip("="), secret + "\n", b"k" * 25):
        assert verify(headers, BODY, form, now=NOW).id == "evt_1"


@pytest.mark.parametrize("offset", [-301, 301])
def test_a_request_older_or_newer_than_the_tolerance_is_refused(offset: int) -> None:
    """GIVEN a good signature WHEN it is more than five minutes away THEN refused; at five minutes it is taken."""
    with pytest.raises(VerificationError, match=r"too (old|new)"):
        verify(signed(at=NOW + offset), BODY, SECRET, now=NOW)
    assert verify(signed(at=NOW + offset // 301 * 300), BODY, SECRET, now=NOW).id == "evt_1"


def test_a_tolerance_that_is_no_number_accepts_nothing() -> None:
    """GIVEN tolerance NaN WHEN a good request comes THEN it is refused instead of every replay accepted."""
    with pytest.raises(VerificationError):
        verify(signed(), BODY, SECRET, tolerance_s=float("nan"), now=NOW)


def test_header_names_are_found_in_any_case_and_form() -> None:
    """GIVEN upper case names, or pairs of bytes as ASGI has them WHEN verified THEN accepted."""
    upper = {name.title(): value for name, value in signed().items()}
    pairs = [(name.encode(), value.encode()) for name, value in signed().items()]
    assert verify(upper, BODY, SECRET, now=NOW).id == "evt_1"
    assert verify(pairs, BODY, SECRET, now=NOW).id == "evt_1"


def test_signatures_of_other_versions_are_passed_over() -> None:
    """GIVEN the right digest under another version WHEN alone THEN refused; beside a v1 it does no harm."""
    headers = signed()
    other = headers["webhook-signature"].replace("v1,", "v1a,")
    with pytest.raises(VerificationError):
        verify({**headers, "webhook-signature": other}, BODY, SECRET, now=NOW)
    both = f"{other} junk {headers['webhook-signature']}"
    assert verify({**headers, "webhook-signature": both}, BODY, SECRET, now=NOW).id == "evt_1"


def test_a_header_given_twice_is_refused() -> None:
    """GIVEN two webhook-id headers WHEN verified THEN refused, for only one of them can be the signed one."""
    pairs = [*signed().items(), ("Webhook-Id", "evt_2")]
    with pytest.raises(VerificationError, match="twice"):
        verify(pairs, BODY, SECRET, now=NOW)


@pytest.mark.parametrize("name", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_a_missing_header_is_named(name: str) -> None:
    """GIVEN a request without one of the headers WHEN verified THEN the error names it."""
    headers = {other: value for other, value in signed().items() if other != name}
    with pytest.raises(VerificationError, match=name):
        verify(headers, BODY, SECRET, now=NOW)


@given(
    header=st.sampled_from(["webhook-id", "webhook-timestamp", "webhook-signature"]),
    value=st.one_of(
        st.text(max_size=60),
        st.binary(max_size=60),
        st.sampled_from(["v1", "v1,", "v1,=", "v1,ü", ",", "v2,AAAA", "1e9", "٣", "-1", "9" * 13, "x" * 9000]),
    ),
)
@settings(max_examples=300, derandomize=True, deadline=None)
def test_malformed_headers_raise_nothing_but_a_verification_error(header: str, value: str | bytes) -> None:
    """GIVEN any text or bytes in any header WHEN verified THEN it passes or raises VerificationError only."""
    pairs: list[tuple[str | bytes, str | bytes]] = [(n, v) for n, v in signed().items() if n != header]
    with pytest.raises(VerificationError):
        verify([*pairs, (header, value)], BODY, SECRET, now=NOW)


@pytest.mark.parametrize("secret", ["", "whsec_", "whsec_not base64!", "whsec_A", b"", []])
def test_an_unusable_secret_is_an_error_that_does_not_show_it(secret: str | bytes | list[str]) -> None:
    """GIVEN a secret that is empty or no base64 WHEN used THEN ValueError, without the secret in its text."""
    with pytest.raises(ValueError, match="secret") as caught:
        verify(signed(), BODY, secret, now=NOW)
    assert "not base64!" not in str(caught.value)
