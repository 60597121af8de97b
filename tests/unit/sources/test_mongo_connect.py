"""What is said of a url, and of a driver that cannot use it; no server is asked."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest

pytest.importorskip("pymongo", reason="no pymongo: no MongoDB source is tested. pip install 'evermark[mongo]'")

import pymongo
from dns.resolver import NoNameservers
from pymongo.errors import ConfigurationError

from evermark.errors import ConfigError, SetupError, UnreachableError
from evermark.secrets import Plain
from evermark.sources.mongo.changes import Changes
from evermark.sources.mongo.connect import open_client, translate, where
from evermark.sources.mongo.feed import SharedFeed
from evermark.sources.mongo.positions import Position
from evermark.sources.mongo.repair import DocumentsGap
from evermark.sources.mongo.target import MongoTarget

SRV = "mongodb+srv://ann:pa55@cluster.example.com/"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("mongodb://ann:pa55@a:1,b:2/db?replicaSet=rs", "a:1,b:2"),
        ("mongodb://a:1", "a:1"),
        ("mongodb://ann:pa?55@host:27017/db", "an unreadable url"),
        ("mongodb://ann:p@a?55@host:27017/db", "an unreadable url"),
        ("ann:pa55@host", "an unreadable url"),
    ],
)
def test_hosts_are_shown_and_nothing_of_a_password(url: str, shown: str) -> None:
    """Whatever stands unescaped in the password."""
    assert where(url) == shown


def test_a_url_that_cannot_be_read_names_what_to_write_instead() -> None:
    """GIVEN a password with a bare question mark WHEN the client is opened THEN no part of it is said."""
    with pytest.raises(ConfigError) as refused:
        open_client(Plain("mongodb://ann:pa?55@host:27017/db"))
    assert "an unreadable url" in str(refused.value)
    assert "ann" not in str(refused.value).replace("cannot", "")
    assert "%3F" in refused.value.hint


def failed_lookup(*, hides_cause: bool) -> ConfigurationError:
    """As the driver tells it."""
    try:
        try:
            raise NoNameservers
        except NoNameservers as error:
            raise ConfigurationError("no names") from (None if hides_cause else error)
    except ConfigurationError as error:
        return error


@pytest.mark.parametrize("hides_cause", [False, True])
def test_names_that_cannot_be_looked_up_just_now_stop_no_source(
    hides_cause: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a DNS server that does not answer WHEN a client is opened, or used, THEN it is tried again later."""
    error = failed_lookup(hides_cause=hides_cause)

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    monkeypatch.setattr(pymongo, "MongoClient", fail)
    with pytest.raises(UnreachableError, match="NoNameservers") as refused:
        open_client(Plain(SRV))
    assert "pa55" not in str(refused.value)
    assert isinstance(translate(error, "place", "reading"), UnreachableError)
    assert isinstance(translate(ConfigurationError("no"), "place", "reading"), SetupError)


def test_a_feed_that_cannot_be_opened_says_so() -> None:
    """GIVEN a client that finds no server WHEN a feed is to begin THEN its reader is woken, and hears why."""
    woken = threading.Event()

    def fail(_: Position) -> Changes:
        raise UnreachableError("no server")

    shared = SharedFeed(
        MongoTarget(Plain(SRV)),
        fail,
        lambda start, upto, _: (max(start, upto), []),
        lambda *_: iter(()),
        lambda _: False,
    )
    feed = shared.join(0, Position(1), woken.set, lambda _: None)
    try:
        with suppress(UnreachableError):  # it may have failed already
            assert feed.next() is None
        assert woken.wait(60)
        with pytest.raises(UnreachableError, match="no server"):
            feed.next()
    finally:
        feed.close()


def test_a_gap_covers_what_is_chosen_whether_it_is_there_or_not() -> None:
    """GIVEN chosen collections WHEN one was dropped THEN it is compared; one that is not chosen any more is not."""
    url = Plain(SRV)
    chosen = DocumentsGap(MongoTarget(url, "shop", collections=("shop.orders",)), 0, 1, [])
    assert chosen.covers("shop.orders")
    assert not chosen.covers("shop.users")
    whole = DocumentsGap(MongoTarget(url, "shop"), 0, 1, [])
    assert whole.covers("shop.a.b")
    assert not whole.covers("shopping.orders")
    assert DocumentsGap(MongoTarget(url), 0, 1, []).covers("any.thing")
