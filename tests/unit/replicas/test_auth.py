"""Who may speak to a replica."""

from __future__ import annotations

import pytest

from evermark.errors import DeniedError
from evermark.replicas import auth
from evermark.replicas.auth import Gate, Party, new_key
from evermark.secrets import Secret

KEY, OTHER = new_key(), new_key()
PATH, BODY, NOW = "/v1/replica/pull", b"body", 1_000_000
A = Party("shop", "a", "b", KEY)


def gate(**keys: Secret) -> Gate:
    return Gate("shop", "b", keys or {"a": KEY, "c": OTHER}, tolerance_ms=1000)


def test_r12_a_known_peer_is_let_in_once() -> None:
    """GIVEN a request with the right key THEN it is the peer's; sent again it is refused."""
    guard = gate()
    headers = A.sign_request("POST", PATH, BODY, NOW)
    assert guard.check("POST", PATH, headers, BODY, NOW).peer == "a"
    with pytest.raises(DeniedError, match="before"):
        guard.check("POST", PATH, headers, BODY, NOW + 10)


@pytest.mark.parametrize(
    ("party", "said"),
    [
        (Party("shop", "a", "b", OTHER), "signature"),
        (Party("shop", "c", "b", KEY), "signature"),
        (Party("shop", "stranger", "b", KEY), "not known"),
        (Party("shop-2", "a", "b", KEY), "another cluster"),
        (Party("shop", "a", "d", KEY), "another cluster or node"),
    ],
)
def test_r12_a_name_is_bound_to_its_key_and_its_cluster(party: Party, said: str) -> None:
    """GIVEN another key, another's name, a stranger, another cluster, another receiver THEN each is refused."""
    with pytest.raises(DeniedError, match=said):
        gate().check("POST", PATH, party.sign_request("POST", PATH, BODY, NOW), BODY, NOW)


def test_r12_what_was_changed_or_is_old_is_refused() -> None:
    """GIVEN another body, path, time or cluster under a signature THEN it is refused; so is one from long ago."""
    headers = A.sign_request("POST", PATH, BODY, NOW)
    for method, path, body in (("GET", PATH, BODY), ("POST", "/v1/replica/push", BODY), ("POST", PATH, b"evil")):
        with pytest.raises(DeniedError, match="signature"):
            gate().check(method, path, headers, body, NOW)
    with pytest.raises(DeniedError, match="signature"):
        gate().check("POST", PATH, headers | {"evermark-time": str(NOW + 1)}, BODY, NOW)
    of_another = Party("shop-2", "a", "b", KEY).sign_request("POST", PATH, BODY, NOW)
    with pytest.raises(DeniedError, match="signature"):
        gate().check("POST", PATH, of_another | {"evermark-cluster": "shop"}, BODY, NOW)
    with pytest.raises(DeniedError, match="too old"):
        gate().check("POST", PATH, headers, BODY, NOW + 1001)


def test_r12_an_answer_is_the_peers_and_of_this_request() -> None:
    """GIVEN an answer WHEN it is of another request, status, body or key THEN it is refused."""
    b = Party("shop", "b", "a", KEY)
    signature = b.sign_answer("nonce", 200, b"yes")["evermark-signature"]
    A.check_answer("nonce", 200, signature, b"yes")
    for nonce, status, body in (("other", 200, b"yes"), ("nonce", 404, b"yes"), ("nonce", 200, b"no")):
        with pytest.raises(DeniedError, match="not signed"):
            A.check_answer(nonce, status, signature, body)
    with pytest.raises(DeniedError, match="not signed"):
        Party("shop", "a", "b", OTHER).check_answer("nonce", 200, signature, b"yes")


def test_r12_a_signature_that_is_no_ascii_is_wrong() -> None:
    """GIVEN a signature with another character in it THEN a request is refused as with any wrong one, and an answer."""
    headers = A.sign_request("POST", PATH, BODY, NOW)
    with pytest.raises(DeniedError, match="signature"):
        gate().check("POST", PATH, headers | {"evermark-signature": "\xe9" * 64}, BODY, NOW)
    with pytest.raises(DeniedError, match="not signed"):
        A.check_answer("nonce", 200, "\udc80", b"yes")


def test_r12_a_peer_that_asks_too_often_shuts_out_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN as many requests of a peer as are remembered THEN its next is refused until one of them is old, and another
    peer's is let in."""
    monkeypatch.setattr(auth, "NONCES_MAX", 3)
    guard, c = gate(), Party("shop", "c", "b", OTHER)

    def ask(party: Party, now_ms: int) -> str:
        return guard.check("POST", PATH, party.sign_request("POST", PATH, BODY, now_ms), BODY, now_ms).peer

    for _ in range(3):
        ask(A, NOW)
    with pytest.raises(DeniedError, match="too many"):
        ask(A, NOW)
    assert ask(c, NOW) == "c"
    assert ask(A, NOW + 2001) == "a"
