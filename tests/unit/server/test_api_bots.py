"""Bots over HTTP: made, listed, removed; session keys published, listed, read by whoever may."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from evermark.delivery.model import Cursor, GroupWork
from evermark.testing.contracts.bot_scene import waiting
from evermark.testing.contracts.scene import P0, T0, done
from tests.unit.server.api_scene import BOT, READER, SECRET, Scene, served_by_one


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Scene]:
    with served_by_one(tmp_path) as scene:
        yield scene


def test_a_bot_is_made_and_told_and_is_a_subscription(api: Scene) -> None:
    """GIVEN the keys of a bot WHEN it is made THEN both lists have it, and its secret is told once."""
    made = api.post("/v1/bots", {**BOT, "mode": "none", "inbox": "mail"})
    assert made.status == 201 and made.json["secret"].startswith("whsec_")
    told = api.get("/v1/bots/helper").json
    assert (told["source"], told["user"], told["mode"], told["inbox"]) == ("shop", "helper-bot", "none", "mail")
    assert "secret" not in told and told["state"] == "live"
    assert [bot["name"] for bot in api.get("/v1/bots").json["bots"]] == ["helper"]
    assert {one["name"] for one in api.get("/v1/subscriptions").json["subscriptions"]} == {"file", "helper"}
    wish = api.store.subscription("helper").spec.bot
    assert wish is not None and wish.device == "phone"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"source": "nowhere"}, "source"),
        ({"source": None}, "source"),
        ({"user": ""}, "user"),
        ({"user": "x" * 200}, "user"),
        ({"mode": "some"}, "mode"),
        ({"devise": "phone"}, "device"),
        ({"ordered": True}, "ordered"),
        ({"allow_networks": ["10.0.0.0/8"]}, "allow_networks"),
        ({"url": "http://127.0.0.1/x"}, "url"),
    ],
)
def test_a_bot_that_cannot_be_is_refused_with_the_key_named(api: Scene, changes: dict[str, object], named: str) -> None:
    """GIVEN something wrong THEN 422, the key named, and nothing made."""
    told = api.post("/v1/bots", {**BOT, **changes})
    assert told.status == 422 and named in told.error["message"], told.text
    assert set(api.store.subscriptions()) == {"file"}


def test_a_key_of_a_session_may_be_any_text(api: Scene) -> None:
    """GIVEN a key that holds NUL WHEN published THEN it is kept as it is: it is sealed."""
    assert api.post("/v1/bots", BOT).status == 201
    assert api.ask("PUT", "/v1/bots/helper/keys", {"keys": {"s1": "k\0"}}).status == 200
    assert api.get("/v1/bots/helper/keys/s1").json["key"] == "k\0"


def test_a_subscription_is_no_bot(api: Scene) -> None:
    """GIVEN a subscription WHEN asked for as a bot THEN 404, also for its keys; and it is not removed."""
    for method, path, body in (
        ("GET", "/v1/bots/file", None),
        ("DELETE", "/v1/bots/file", None),
        ("PUT", "/v1/bots/file/keys", {"keys": {"s": "k"}}),
        ("GET", "/v1/bots/file/keys/s", None),
        ("DELETE", "/v1/bots/file/keys/s", None),
        ("PATCH", "/v1/bots/file", {"mode": "none"}),
    ):
        assert api.ask(method, path, body).status == 404
    assert "file" in api.store.subscriptions()


def test_d3_publishing_keys_sends_what_waited(api: Scene) -> None:
    """GIVEN an event that waits WHEN its key is published THEN the answer says so, and the key comes back."""
    api.post("/v1/bots", BOT)
    members = api.store.group().members
    api.store.settle_group(
        GroupWork(P0, Cursor(0), Cursor(1), members), [done("helper", waiting(1, "a/b")), done("file")], T0, api.epoch
    )
    (row,) = api.get("/v1/deliveries").json["deliveries"]
    assert (row["state"], row["session"], row["next_attempt_at"]) == ("waiting", "a/b", None)
    refused = api.ask("POST", f"/v1/deliveries/{row['id']}/retry")
    assert refused.status == 409 and "waits for the key" in refused.error["message"]
    told = api.ask("PUT", "/v1/bots/helper/keys", {"keys": {"a/b": "the key", "c": "another"}})
    assert (told.status, told.json) == (200, {"published": 2, "released": 1})
    assert api.get("/v1/bots/helper/keys/a%2Fb").json["key"] == "the key"
    assert api.store.bots.session_key("phone", "a/b").sealed.startswith("sealed:")
    page = api.get("/v1/bots/helper/keys?limit=1").json
    assert ([key["session"] for key in page["keys"]], page["after"]) == (["a/b"], "a/b")
    assert page["keys"][0]["key"] is None
    assert [key["session"] for key in api.get("/v1/bots/helper/keys?after=a/b").json["keys"]] == ["c"]


def test_a_bots_mode_device_and_inbox_are_changed_and_nothing_else(api: Scene) -> None:
    """GIVEN a bot WHEN some of its keys are changed THEN those are, null means the default, and it stays what it is."""
    api.post("/v1/bots", {**BOT, "inbox": "mail"})
    told = api.ask("PATCH", "/v1/bots/helper", {"mode": "none", "inbox": None})
    assert told.status == 200, told.text
    assert (told.json["mode"], told.json["device"], told.json["inbox"]) == ("none", "phone", None)
    told = api.ask("PATCH", "/v1/bots/helper", {"mode": None, "device": "tablet", "inbox": "post"})
    assert (told.json["mode"], told.json["device"], told.json["inbox"]) == ("all", "tablet", "post")
    assert (told.json["user"], told.json["state"]) == ("helper-bot", "live")


def test_d3_another_device_sends_what_it_has_keys_of(api: Scene) -> None:
    """GIVEN events that wait WHEN the bot has another device THEN what that one has keys of is sent, at once."""
    api.post("/v1/bots", BOT)
    api.store.bots.publish("tablet", {"s1": "sealed"}, T0, api.epoch)
    both = [done("helper", waiting(1), waiting(2, "s2")), done("file")]
    api.store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), api.store.group().members), both, T0, api.epoch)
    api.ask("PATCH", "/v1/bots/helper", {"device": "tablet"})
    assert [row.waits for row in api.store.parked.rows()] == [False, True]


@pytest.mark.parametrize(
    ("changes", "named"),
    [({"user": "x"}, "user"), ({"mode": "some"}, "mode"), ({"device": ""}, "device"), ({}, "nothing")],
)
def test_a_change_that_cannot_be_is_refused(api: Scene, changes: dict[str, object], named: str) -> None:
    """GIVEN something else than these keys, or values they cannot have THEN 422 with the key named."""
    api.post("/v1/bots", BOT)
    told = api.ask("PATCH", "/v1/bots/helper", changes)
    assert told.status == 422 and named in told.error["message"], told.text


def test_a_bot_with_a_device_does_not_become_ordered(api: Scene) -> None:
    """GIVEN a bot with a device WHEN it is to be ordered, as the subscription it is THEN 422, as where it is made."""
    api.post("/v1/bots", BOT)
    assert api.ask("PATCH", "/v1/subscriptions/helper", {"ordered": True}).status == 422


def test_a_key_is_withdrawn(api: Scene) -> None:
    """GIVEN a published key WHEN it is withdrawn THEN 204, and it is gone; a second time 404."""
    api.post("/v1/bots", BOT)
    api.ask("PUT", "/v1/bots/helper/keys", {"keys": {"a/b": "the key", "c": "another"}})
    assert api.ask("DELETE", "/v1/bots/helper/keys/a%2Fb", token=READER).status == 403
    assert api.ask("DELETE", "/v1/bots/helper/keys/a%2Fb").status == 204
    assert api.ask("DELETE", "/v1/bots/helper/keys/a%2Fb").status == 404
    assert [key["session"] for key in api.get("/v1/bots/helper/keys").json["keys"]] == ["c"]


def test_a_token_that_may_read_is_told_no_key(api: Scene) -> None:
    """GIVEN `may: read` WHEN it asks for a key THEN 403; sessions it may list."""
    api.post("/v1/bots", BOT)
    api.ask("PUT", "/v1/bots/helper/keys", {"keys": {"s": "the key"}})
    assert api.ask("GET", "/v1/bots/helper/keys/s", token=READER).status == 403
    listed = api.ask("GET", "/v1/bots/helper/keys", token=READER)
    assert listed.status == 200 and "the key" not in listed.text


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"keys": {}},
        {"keys": {"s": ""}},
        {"keys": {"s": 7}},
        {"keys": {"s": "k" * 9000}},
        {"keys": {"": "k"}},
        {"keys": {"x" * 300: "k"}},
        {"keys": {f"s{n}": "k" for n in range(101)}},
        {"keys": {"s": "k"}, "more": 1},
    ],
)
def test_keys_that_cannot_be_are_refused(api: Scene, body: object) -> None:
    """GIVEN no keys, odd ones, or too many THEN 422, and nothing is kept or told."""
    api.post("/v1/bots", BOT)
    told = api.ask("PUT", "/v1/bots/helper/keys", body)
    assert told.status == 422 and told.error["message"]
    assert api.store.bots.session_keys("phone") == []


def test_a_bot_without_a_device_has_no_keys(api: Scene) -> None:
    """GIVEN a bot that needs none WHEN keys are published THEN 422 says why."""
    api.post("/v1/bots", {key: value for key, value in BOT.items() if key != "device"})
    told = api.ask("PUT", "/v1/bots/helper/keys", {"keys": {"s": "k"}})
    assert told.status == 422 and "device" in told.error["message"]


def test_a_bot_of_the_file_is_the_files(api: Scene) -> None:
    """GIVEN a bot of the file WHEN removed over HTTP THEN 409; its keys may be published: they are its device's."""
    api.post("/v1/bots", BOT)
    spec = api.store.subscription("helper").spec
    assert api.ask("DELETE", "/v1/bots/helper").status == 204
    assert api.ask("GET", "/v1/bots/helper").status == 404
    from evermark.delivery.model import MadeBy

    kept = api.store.subscription("file").spec
    api.store.register([kept, replace(spec, secrets=(api.box.seal(SECRET),))], MadeBy.FILE, {}, api.epoch)
    assert api.ask("DELETE", "/v1/bots/helper").status == 409
    assert api.ask("PUT", "/v1/bots/helper/keys", {"keys": {"s": "k"}}).status == 200
