"""What receivers repeat of what they were told."""

from __future__ import annotations

import time

import pytest
from yarl import URL

from evermark.delivery.webhook.said import Confided

URL_ = URL("https://user:hunter22@shop.example/hooks/abc%20def?key=k3y-of-ours&n=1")
CONFIDED = Confided(URL_, ["Bearer t0ken-of-ours", "a=1; session=0123456789abcdef0", "x"])


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("bad token Bearer t0ken-of-ours!", "bad token ***!"),
        ("bad token t0ken-of-ours!", "bad token ***!"),
        ("no session 0123456789abcdef0", "no session ***"),
        ("Cannot POST /hooks/abc%20def?key=k3y-of-ours&n=1", "Cannot POST ***"),
        ("Cannot POST /hooks/abc def", "Cannot POST ***"),
        ("key k3y-of-ours, user:hunter22", "key ***, user:***"),
        ("who is t0ken-of", "who is ***"),  # it was cut
        ("who is t0ken-of-our", "who is ***"),
        ("x is no total, nor is 1", "x is no total, nor is 1"),  # too short to be told from other words
        ("an order has a total", "an order has a total"),
        ("", ""),
    ],
)
def test_what_was_confided_is_hidden(said: str, shown: str) -> None:
    """GIVEN an answer WHEN it repeats a header's value, its part behind a scheme, or the address, even cut off THEN
    that is hidden; other words stand as they were."""
    assert CONFIDED.hidden_in(said, is_cut=True) == shown


def test_what_was_not_cut_off_ends_as_it_ends() -> None:
    """GIVEN a whole answer WHEN it ends with how a value begins THEN that is another word."""
    assert CONFIDED.hidden_in("who is t0ken-of", is_cut=False) == "who is t0ken-of"


def test_as_many_values_as_there_may_be_cost_no_time() -> None:
    """GIVEN headers with as many tokens as fit WHEN a refusal is looked through THEN that takes the loop, which all
    subscriptions share, no time worth speaking of."""
    confided = Confided(URL_, [",".join(f"{header:03}{n:05}-of-ours" for n in range(250)) for header in range(32)])
    began = time.thread_time()
    assert confided.hidden_in("order 007 is of nobody" * 9, is_cut=True) == "order 007 is of nobody" * 9
    assert time.thread_time() - began < 0.05


def test_it_does_not_show_itself() -> None:
    """GIVEN what was confided WHEN it is printed THEN it shows nothing."""
    assert "ours" not in repr(CONFIDED) and "ours" not in str(CONFIDED)
