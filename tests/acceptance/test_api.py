"""Subscriptions at run time, against a real `evermark up`: made, changed and removed while it delivers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psycopg

from evermark.state.connection import schema_for
from evermark.testing.until import until
from tests.acceptance.api_scene import READER, Running, running


def test_subscriptions_come_change_and_go_while_events_flow(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN one instance WHEN the API makes, changes, pauses, rotates, tests and removes THEN no event goes astray."""
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("create table public.orders (id bigint generated always as identity primary key, total int)")
    with running(tmp_path, pg_dsn) as scene:
        _installed(scene)
        early = scene.order(3)
        scene.up()
        until(scene.base, "the instance is up")
        scene.arrive("/by_file", early)
        until(lambda: scene.good("GET", "subscriptions/by_file")["lag_batches"] == 0, "the early ones are settled")

        secret = _made(scene, early)
        _changed_and_paused(scene)
        _rotated(scene, secret)
        _fired(scene)
        _gone_and_back(scene)
        _dead_and_retried(scene)
        _told_to_come_back_tomorrow(scene)
        _beside_the_file(scene)
        _removed(scene)
        assert scene.instance is not None and scene.instance.terminate() == 0
        said = scene.log.read_text()
        assert "acceptance-" not in said and "whsec_" not in said


def _installed(scene: Running) -> None:
    command = [sys.executable, "-m", "evermark.cli.main", "source", "install", "-c", str(scene.config)]
    subprocess.run(command, env=scene.env, check=True, capture_output=True)


def _made(scene: Running, early: set[int]) -> str:
    """From now on: every event committed after the answer. From the beginning: those before it too."""
    made = scene.good("POST", "subscriptions", {"name": "fresh", "url": f"{scene.hooks.url}/fresh"})
    orders = scene.order(5)
    scene.good("POST", "subscriptions", {"name": "old", "url": f"{scene.hooks.url}/old", "from": "beginning"})
    scene.arrive("/fresh", orders)
    scene.arrive("/old", early | orders)
    assert not early & scene.hooks.ids("/fresh")
    assert all(got.is_signed_by(made["secret"]) for got in scene.hooks.got["/fresh"])
    status, told = scene.ask("POST", "subscriptions", {"name": "inside", "url": "https://10.1.2.3/"})
    assert status == 422 and "allow_networks: [10.1.2.3/32]" in told["error"]["hint"]
    assert scene.ask("GET", "subscriptions", token=None)[0] == 401
    assert scene.ask("POST", "subscriptions/fresh/pause", token=READER)[0] == 403
    return str(made["secret"])


def _changed_and_paused(scene: Running) -> None:
    """A new url takes what comes after it; a pause keeps everything for later."""
    scene.good("PATCH", "subscriptions/fresh", {"url": f"{scene.hooks.url}/moved"})
    orders = scene.order(2)
    scene.arrive("/moved", orders)
    scene.good("POST", "subscriptions/fresh/pause", {"reason": "rest"})
    orders = scene.order(2)
    scene.arrive("/by_file", orders)
    assert scene.state_of("fresh") == "suspended" and not orders & scene.hooks.ids("/moved")
    scene.good("POST", "subscriptions/fresh/resume")
    scene.arrive("/moved", orders)


def _rotated(scene: Running, old: str) -> None:
    """In the overlap a receiver may know either secret; after it only the new one."""
    new = scene.good("POST", "subscriptions/fresh/rotate", {"overlap": "1h"})["secret"]
    before = len(scene.hooks.got["/moved"])
    scene.arrive("/moved", scene.order())
    both = scene.hooks.got["/moved"][before:]
    assert both and all(got.is_signed_by(old) and got.is_signed_by(new) for got in both)
    scene.good("POST", "subscriptions/fresh/rotate", {"end": True})
    before = len(scene.hooks.got["/moved"])
    scene.arrive("/moved", scene.order())
    one = scene.hooks.got["/moved"][before:]
    assert one and all(got.is_signed_by(new) and not got.is_signed_by(old) for got in one)


def _fired(scene: Running) -> None:
    """A test-fire is told, can be told apart, and changes nothing, accepted or not."""
    fired = scene.good("POST", "subscriptions/fresh/test")
    assert fired["accepted"] and fired["status"] == 204
    (got,) = [got for got in scene.hooks.got["/moved"] if got.headers["webhook-id"] == fired["id"]]
    assert got.event["type"] == "evermark.test" and got.event["evermark"]["flags"] == ["test"]
    scene.hooks.statuses["/moved"] = 500
    fired = scene.good("POST", "subscriptions/fresh/test")
    assert (fired["accepted"], fired["verdict"], fired["status"]) == (False, "endpoint", 500)
    scene.hooks.statuses["/moved"] = 204
    assert scene.good("GET", "subscriptions/fresh")["failures"] == 0


def _gone_and_back(scene: Running) -> None:
    """410 disables; resumed, it gets what it was not sent."""
    scene.hooks.statuses["/moved"] = 410
    orders = scene.order()
    until(lambda: scene.state_of("fresh") == "disabled", "fresh is disabled")
    scene.hooks.statuses["/moved"] = 204
    before = len(scene.hooks.got["/moved"])
    scene.good("POST", "subscriptions/fresh/resume")
    until(lambda: any(g.event["data"]["id"] in orders for g in scene.hooks.got["/moved"][before:]), "it came again")


def _dead_and_retried(scene: Running) -> None:
    """A refused event is parked; once dead, it is listed, looked at and retried by a person."""
    until(lambda: scene.state_of("fresh") == "live", "fresh is live again")
    scene.hooks.statuses["/moved"] = 400
    (order,) = scene.order()
    waiting = "deliveries?subscription=fresh"
    (parked,) = until(lambda: scene.good("GET", waiting)["deliveries"], "it is parked")
    with psycopg.connect(scene.dsn, autocommit=True) as conn:  # eight refusals later; that takes a day
        conn.execute(f"update {schema_for('api')}.enqueued_messages set next_attempt_at = null")
    (dead,) = scene.good("GET", f"{waiting}&dead=true")["deliveries"]
    assert dead["id"] == parked["id"]
    assert str(order) in scene.good("GET", f"deliveries/{dead['id']}")["event"]["payload"]
    scene.hooks.statuses["/moved"] = 204
    before = len(scene.hooks.got["/moved"])
    scene.good("POST", f"deliveries/{dead['id']}/retry")
    until(lambda: any(g.event["data"]["id"] == order for g in scene.hooks.got["/moved"][before:]), "it was delivered")
    until(lambda: scene.good("GET", waiting)["deliveries"] == [], "its row is gone")


def _told_to_come_back_tomorrow(scene: Running) -> None:
    """Resumed by the API or by the command line, one that waits out a day is tried by the running instance at once."""
    command = [sys.executable, "-m", "evermark.cli.main", "subscription", "resume", "fresh", "-c", str(scene.config)]
    for resume in (
        lambda: scene.good("POST", "subscriptions/fresh/resume"),
        lambda: subprocess.run(command, env=scene.env, check=True, capture_output=True),
    ):
        until(lambda: scene.state_of("fresh") == "live", "fresh is live")
        scene.hooks.statuses["/moved"], scene.hooks.retry_after_s["/moved"] = 429, 86_400
        (order,) = scene.order()
        until(lambda: scene.good("GET", "subscriptions/fresh")["next_attempt_at"], "fresh was told to come back")
        scene.hooks.statuses["/moved"] = 204
        del scene.hooks.retry_after_s["/moved"]
        before = len(scene.hooks.got["/moved"])
        resume()
        until(
            lambda order=order, before=before: any(
                g.event["data"]["id"] == order for g in scene.hooks.got["/moved"][before:]
            ),
            "it came, and not tomorrow",
        )


def _beside_the_file(scene: Running) -> None:
    """What the file made stays the file's."""
    for method, path in (("PATCH", ""), ("DELETE", ""), ("POST", "/rotate")):
        status, told = scene.ask(method, f"subscriptions/by_file{path}", {"bundle": 2} if method == "PATCH" else None)
        assert status == 409 and "evermark.yaml" in told["error"]["hint"]
    names = [one["name"] for one in scene.good("GET", "subscriptions")["subscriptions"]]
    assert names == ["by_file", "fresh", "old"]


def _removed(scene: Running) -> None:
    """After DELETE nothing more is sent; the others go on."""
    scene.good("DELETE", "subscriptions/fresh")
    assert scene.ask("GET", "subscriptions/fresh")[0] == 404
    orders = scene.order(2)
    scene.arrive("/old", orders)
    scene.arrive("/by_file", orders)
    assert not orders & scene.hooks.ids("/moved")
