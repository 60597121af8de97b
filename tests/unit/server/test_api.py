"""The HTTP API: what it takes, answers and refuses, over a store in memory."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from evermark.delivery.decide.answers import Verdict
from evermark.delivery.model import Cursor, Fate, GroupWork, Outcome, SubscriptionState
from evermark.delivery.webhook.base import Answer
from evermark.errors import BusyError, ConflictError, EvermarkError, FormatError, Kind, UnreachableError
from evermark.secrets import KeyRef, SecretBox
from evermark.server.api import BODY_BYTES_MAX, STATUSES, WAITING_MAX
from evermark.testing.contracts.scene import P0, P1, T0, done, event
from evermark.testing.until import until
from tests.unit.server.api_scene import BOT, READER, SECRET, WANTED, WRITER, Scene, served, served_by_one


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Scene]:
    with served_by_one(tmp_path) as scene:
        yield scene


def parked(api: Scene, *numbers: int) -> list[int]:
    """Park these events for a subscription of the API's own; the first is dead."""
    assert api.post("/v1/subscriptions", WANTED).status == 201
    members = api.store.group().members
    outcomes = [done(name, *(event(n) for n in numbers if name == "billing")) for name in members]
    api.store.settle_group(GroupWork(P0, Cursor(0), Cursor(1), members), outcomes, T0, api.epoch)
    (first, *_) = api.store.parked.claim(T0 + timedelta(minutes=1), 1, 30, api.epoch)
    api.store.parked.reschedule(first, next_attempt_at=None, attempts=8, reason="no", status=400, epoch=api.epoch)
    return [row.id for row in api.store.parked.rows()]


def test_a_subscription_is_made_shown_and_removed(api: Scene) -> None:
    """GIVEN a wish WHEN posted THEN it is live from now, shown with what it has, and gone after DELETE."""
    made = api.post("/v1/subscriptions", {**WANTED, "secret": SECRET, "headers": {"X-Key": "hidden-value"}})
    assert made.status == 201
    assert api.store.subscription("billing").state is SubscriptionState.LIVE
    shown = api.get("/v1/subscriptions/billing")
    assert shown.status == 200
    told = shown.json
    assert (told["state"], told["made_by"], told["from"], told["timeout"]) == ("live", "api", "now", "10s")
    assert (told["lag_batches"], told["lag_events"], told["oldest"]) == (10, 700, "2026-11-15T12:00:00Z")
    assert told["headers"] == ["X-Key"] and told["secrets"] == [{"expires_at": None}]
    assert {**made.json, "secret": None} == {**told, "secret": None, "warnings": []}
    assert [s["name"] for s in api.get("/v1/subscriptions").json["subscriptions"]] == ["billing", "file"]
    gone = api.ask("DELETE", "/v1/subscriptions/billing")
    assert (gone.status, gone.text) == (204, "")
    assert api.get("/v1/subscriptions/billing").error["kind"] == "not_found"


def test_no_secret_comes_back_but_one_that_was_made_here_once(api: Scene) -> None:
    """GIVEN secrets given and made WHEN everything is read THEN only the answer that made one holds it."""
    given = api.post("/v1/subscriptions", {**WANTED, "secret": SECRET, "headers": {"X-Key": "hidden-value"}})
    made = api.post("/v1/subscriptions", {**WANTED, "name": "other"})
    fresh = made.json["secret"]
    assert fresh.startswith("whsec_") and given.json["secret"] is None
    assert api.box.open(api.store.subscription("other").spec.secrets[0]) == fresh
    rotated = api.post("/v1/subscriptions/other/rotate", {"secret": SECRET})
    again = api.post("/v1/subscriptions/other/rotate", {"overlap": "1h"}).json["secret"]
    assert again not in (None, fresh)
    everything = [
        given,
        rotated,
        api.get("/v1/subscriptions"),
        api.get("/v1/subscriptions/other"),
        api.get("/v1/deliveries"),
    ]
    for hidden in (SECRET, fresh, again, "hidden-value", "sealed:", "sealed"):
        assert not any(hidden in told.text for told in everything), hidden


def test_a_subscription_begins_where_it_was_asked_to(api: Scene) -> None:
    """GIVEN now, beginning and a time WHEN made THEN live, behind at 0, and behind right before that time."""
    for name, start in (("a", "now"), ("b", "beginning"), ("c", "2026-11-01T12:00:00Z")):
        assert api.post("/v1/subscriptions", {**WANTED, "name": name, "from": start}).status == 201
    assert api.store.subscription("a").state is SubscriptionState.LIVE
    assert api.store.cursors("b") == {P0: Cursor(0), P1: Cursor(0)}
    assert api.store.cursors("c") == {P0: Cursor(2), P1: Cursor(2)}


def test_a_change_changes_what_is_given_and_nothing_else(api: Scene) -> None:
    """GIVEN one with wishes WHEN patched THEN the others stay; null takes one back to its default."""
    api.post("/v1/subscriptions", {**WANTED, "where": "data.n = 1", "bundle": 5, "rate": "60/m", "secret": SECRET})
    before = api.store.subscription("billing").spec
    changed = api.ask("PATCH", "/v1/subscriptions/billing", {"url": "https://new.example/", "where": None})
    assert changed.status == 200 and changed.json["url"] == "https://new.example/"
    after = api.store.subscription("billing").spec
    assert (after.url, after.where) == ("https://new.example/", None)
    assert (after.bundle, after.rate_per_s, after.streams, after.secrets) == (5, 1.0, before.streams, before.secrets)


def test_streams_that_nothing_is_known_of_are_warned_of(api: Scene) -> None:
    """GIVEN streams that nothing is known of WHEN made or changed THEN it is done, and the answer names them."""
    assert api.post("/v1/subscriptions", WANTED).json["warnings"] == []
    made = api.post("/v1/subscriptions", {**WANTED, "name": "typo", "streams": ["public.ordres"]})
    assert (made.status, made.json["warnings"]) == (201, ["stream public.ordres: not known"])
    changed = api.ask("PATCH", "/v1/subscriptions/billing", {"streams": ["public.orders", "a.b"]})
    assert (changed.status, changed.json["warnings"]) == (200, ["stream a.b: not known"])
    assert api.ask("PATCH", "/v1/subscriptions/typo", {"bundle": 2}).json["warnings"] == []
    bot = api.post("/v1/bots", {**BOT, "streams": ["room"]})
    assert (bot.status, bot.json["warnings"]) == (201, ["stream room: not known"])


def test_pause_and_resume(api: Scene) -> None:
    """GIVEN a live one WHEN paused and resumed THEN suspended with the reason, then behind; also after a 410."""
    api.post("/v1/subscriptions", WANTED)
    paused = api.post("/v1/subscriptions/billing/pause", {"reason": "moving"})
    assert (paused.json["state"], paused.json["reason"]) == ("suspended", "moving")
    assert api.post("/v1/subscriptions/billing/resume").json["state"] == "behind"
    assert api.post("/v1/subscriptions/billing/pause").json["reason"] == "paused by a person"
    api.store.settle_subscription("billing", P0, Cursor(0), Cursor(1), Outcome("billing", Fate.GONE), T0, api.epoch)
    assert api.get("/v1/subscriptions/billing").json["state"] == "disabled"
    assert api.post("/v1/subscriptions/billing/resume").json["state"] == "behind"


def test_rotation_overlaps_until_it_is_ended(api: Scene) -> None:
    """GIVEN a secret WHEN rotated THEN both are there with the end told; `end` leaves the newest."""
    api.post("/v1/subscriptions", {**WANTED, "secret": SECRET})
    told = api.post("/v1/subscriptions/billing/rotate", {"overlap": "24h"}).json
    assert [one["expires_at"] is None for one in told["secrets"]] == [True, False]
    opened = [api.box.open(sealed) for sealed in api.store.subscription("billing").spec.secrets]
    assert opened == [told["secret"], SECRET]
    ended = api.post("/v1/subscriptions/billing/rotate", {"end": True}).json
    assert len(ended["secrets"]) == 1 and ended["secret"] is None
    for wrong in ({"end": True, "overlap": "1h"}, {"secret": "short"}, {"overlap": 5}, {"overlaps": "1h"}):
        refused = api.post("/v1/subscriptions/billing/rotate", wrong)
        assert refused.status == 422 and "short" not in refused.text, refused.text


def test_a_rotation_to_a_secret_that_signs_already_is_refused(api: Scene) -> None:
    """GIVEN one that is rotated WHEN rotated to its new or former secret THEN 409, untold, until that one has ended."""
    other = "whsec_" + "B" * 43 + "="
    api.post("/v1/subscriptions", {**WANTED, "secret": SECRET})
    assert api.post("/v1/subscriptions/billing/rotate", {"secret": other}).status == 200
    before = api.store.subscription("billing").spec
    for known in (other, SECRET):
        refused = api.post("/v1/subscriptions/billing/rotate", {"secret": known})
        assert (refused.status, refused.error["kind"]) == (409, "conflict") and known not in refused.text
    assert api.store.subscription("billing").spec == before
    api.post("/v1/subscriptions/billing/rotate", {"end": True})
    assert api.post("/v1/subscriptions/billing/rotate", {"secret": SECRET}).status == 200


def test_a_rotation_replaces_a_secret_that_does_not_open(api: Scene) -> None:
    """GIVEN a secret that was sealed with a key that is gone WHEN rotated to one that is given THEN that one signs."""
    api.post("/v1/subscriptions", {**WANTED, "secret": SECRET})
    (api.folder / "other").write_text("another key that nobody will guess")
    lost = SecretBox(KeyRef("file", str(api.folder / "other"))).seal(SECRET)
    api.store.rotate("billing", lost, None, T0, api.epoch)
    api.store.retire("billing", api.epoch)
    told = api.post("/v1/subscriptions/billing/rotate", {"secret": SECRET})
    assert (told.status, len(told.json["secrets"])) == (200, 2)


def test_a_test_fire_is_told_and_changes_nothing(api: Scene) -> None:
    """GIVEN a receiver that accepts, then refuses WHEN fired THEN each is told with its status; ids are unique."""
    api.post("/v1/subscriptions", WANTED)
    before = api.store.subscriptions()
    good = api.post("/v1/subscriptions/billing/test")
    assert good.status == 200
    assert (good.json["accepted"], good.json["verdict"], good.json["status"]) == (True, "accepted", 204)
    api.sink.answer = Answer(Verdict.ENDPOINT, 503, "HTTP 503")
    bad = api.post("/v1/subscriptions/file/test").json
    assert (bad["accepted"], bad["status"], bad["reason"]) == (False, 503, "HTTP 503")
    assert bad["id"] != good.json["id"]
    row = json.loads(api.sink.tries[0].event)
    assert f"{row['stream']}.{row['op']}" == "evermark.test" and row["flags"] == ["test"]
    assert row["event_id"] == good.json["id"]
    assert api.store.subscriptions() == before and api.store.parked.rows() == []


def test_what_the_file_made_is_refused_with_where_to_edit_it(api: Scene) -> None:
    """GIVEN one of the file WHEN changed, rotated, removed or made again THEN 409; pausing it is a person's right."""
    calls: list[tuple[str, str, Any]] = [
        ("PATCH", "", {"bundle": 2}),
        ("DELETE", "", None),
        ("POST", "/rotate", {}),
        ("POST", "/rotate", {"end": True}),
    ]
    for method, path, body in calls:
        told = api.ask(method, f"/v1/subscriptions/file{path}", body)
        assert told.status == 409 and "evermark.yaml" in told.error["hint"]
    assert api.post("/v1/subscriptions", {**WANTED, "name": "file"}).status == 409
    assert api.post("/v1/subscriptions/file/pause").status == 200


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"urls": "x"}, "did you mean url"),
        ({"url": None}, "url: is required"),
        ({"url": "http://billing.example/"}, "http sends events unencrypted"),
        ({"url": "https://10.1.2.3/"}, "private address is refused"),
        ({"url": "https://169.254.169.254/latest"}, "private address is refused"),
        ({"secret": "plain"}, "secret: expected whsec_"),
        ({"where": "drop table x"}, "billing"),
        ({"bundle": 0}, "bundle: must be at least 1"),
        ({"bundle": True}, "bundle: expected a number"),
        ({"from": "yesterday"}, "from: expected now"),
        ({"headers": {"webhook-id": "1"}}, "set by evermark"),
        ({"allow_networks": ["127.0.0.0/8"]}, "only the operator's file"),
        ({"allow_networks": []}, "only the operator's file"),
        ({"name": "No Name"}, "name: must have the form"),
        ({"name": ""}, "name: must have the form"),
        ({"name": 5}, "name: expected text"),
        ({"name": None}, "name: is required"),
        ({"made_by": "file"}, "made_by: unknown key"),
    ],
)
def test_a_wrong_key_or_value_is_named_and_nothing_is_made(api: Scene, wrong: dict[str, Any], told: str) -> None:
    """The same rules as the file's, told as 422; the refusal never repeats a secret."""
    before = api.store.subscriptions()
    refused = api.post("/v1/subscriptions", {**WANTED, **wrong})
    assert refused.status == 422
    assert told in refused.error["message"] and refused.error["kind"] == "config"
    assert "plain" not in refused.text
    assert api.store.subscriptions() == before


def test_a_private_address_is_refused_with_the_line_for_the_file(api: Scene) -> None:
    """D16: whoever may use the API cannot open a network; the operator is told what to write."""
    told = api.post("/v1/subscriptions", {**WANTED, "url": "https://10.1.2.3/"}).error
    assert "evermark.yaml" in told["hint"] and "allow_networks: [10.1.2.3/32]" in told["hint"]
    told = api.post("/v1/subscriptions", {**WANTED, "allow_networks": ["10.0.0.0/8"]}).error
    assert "evermark.yaml" in told["hint"]


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"name": "other"}, "name cannot be changed"),
        ({"from": "now"}, "where it began"),
        ({"secret": SECRET}, "rotated"),
        ({"allow_networks": []}, "only the operator's file"),
        ({"wher": None}, "did you mean where"),
        ({"url": None}, "url: is required"),
        ({"url": "http://x.example"}, "unencrypted"),
        ({"where": "drop table x"}, "billing"),
    ],
)
def test_a_wrong_change_is_named_and_nothing_is_changed(api: Scene, wrong: dict[str, Any], told: str) -> None:
    """GIVEN a good key beside a bad one WHEN patched THEN neither is taken."""
    api.post("/v1/subscriptions", WANTED)
    before = api.store.subscriptions()
    refused = api.ask("PATCH", "/v1/subscriptions/billing", {"bundle": 9, **wrong})
    assert refused.status == 422 and told in refused.error["message"]
    assert api.store.subscriptions() == before


def test_parked_deliveries_are_paged_inspected_retried_and_dropped(api: Scene) -> None:
    """GIVEN three parked, one dead WHEN listed and decided on THEN pages, filters, retry and drop do as they say."""
    ids = parked(api, 1, 2, 3)
    first = api.get("/v1/deliveries?limit=2").json
    assert [d["id"] for d in first["deliveries"]] == ids[:2] and first["after"] == ids[1]
    rest = api.get(f"/v1/deliveries?limit=2&after={first['after']}").json
    assert [d["id"] for d in rest["deliveries"]] == ids[2:] and rest["after"] is None
    assert [d["state"] for d in api.get("/v1/deliveries?dead=true").json["deliveries"]] == ["dead"]
    assert len(api.get("/v1/deliveries?dead=false&subscription=billing").json["deliveries"]) == 2
    assert api.get("/v1/deliveries?subscription=file").json["deliveries"] == []
    assert api.get(f"/v1/deliveries/{ids[1]}").json["event"] == {"n": 2}
    assert api.get("/v1/subscriptions/billing").json["dead"] == 1
    retried = api.post(f"/v1/deliveries/{ids[0]}/retry")
    assert retried.status == 200 and retried.json["state"] == "waiting"
    assert api.store.parked.rows()[0].next_attempt_at is not None
    assert api.ask("DELETE", f"/v1/deliveries/{ids[0]}").status == 204
    assert api.store.counted("dropped") == {"billing": 1}
    for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/retry")):
        assert api.ask(method, f"/v1/deliveries/{ids[0]}{path}").error["kind"] == "not_found"


@pytest.mark.parametrize(
    "path",
    ["deliveries?limit=0", "deliveries?limit=x", "deliveries?dead=maybe", "deliveries?after=-1", "deliveries?ded=true"],
)
def test_a_wrong_parameter_is_named(api: Scene, path: str) -> None:
    """A misspelt filter must not list something else than what was asked for."""
    told = api.get(f"/v1/{path}")
    assert told.status == 422 and path.partition("?")[2].partition("=")[0] in told.error["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status"),
    [
        ("POST", "/v1/subscriptions", b"{", 400),
        ("POST", "/v1/subscriptions", b"[1]", 400),
        ("POST", "/v1/subscriptions", b'{"a": 1, "a": 2}', 400),
        ("POST", "/v1/subscriptions", b'{"a": NaN}', 400),
        ("POST", "/v1/subscriptions", b"[" * 60_000, 400),
        ("POST", "/v1/subscriptions", b"\xff\xfe", 400),
        ("POST", "/v1/subscriptions", None, 422),
        ("POST", "/v1/subscriptions", b'"' + b"x" * BODY_BYTES_MAX + b'"', 413),
        ("POST", "/v1/subscriptions/file/resume", b"{}", 422),
        ("PUT", "/v1/subscriptions", None, 405),
        ("DELETE", "/v1/subscriptions", None, 405),
        ("GET", "/v1", None, 404),
        ("GET", "/v1/nothing", None, 404),
        ("GET", "/v1/deliveries/abc", None, 404),
        ("GET", "/v1/deliveries/99999999999999999999999", None, 404),
        ("GET", "/v1/subscriptions/%00", None, 404),
        ("GET", "/v1/subscriptions/..%2f..", None, 404),
    ],
)
def test_every_refusal_has_one_form(api: Scene, method: str, path: str, body: bytes | None, status: int) -> None:
    """Bad JSON, huge or deep bodies, unknown paths and methods: a status that fits, and kind, message, hint."""
    told = api.ask(method, path, body)
    assert told.status == status
    assert told.error["message"]


def test_a_method_that_is_not_known_names_those_that_are(api: Scene) -> None:
    """GIVEN a path with several methods WHEN asked with another THEN 405 and all of them; HEAD is GET without body."""
    told = api.ask("PUT", "/v1/subscriptions")
    assert told.headers["Allow"] == "GET, HEAD, POST" and told.error["hint"] == "use GET, HEAD, POST"
    head = api.ask("HEAD", "/v1/subscriptions")
    assert (head.status, head.text) == (200, "")
    assert api.ask("HEAD", "/v1/subscriptions", token=None).status == 401


def test_kinds_of_error_have_a_status_of_their_own(api: Scene) -> None:
    """GIVEN each kind from below WHEN it comes up THEN it is told with the status of the table, or 500."""
    from evermark.errors import of_kind

    for kind in Kind:
        error = of_kind(kind, "what happened", "what to do")

        def fail(error: EvermarkError = error) -> None:
            raise error

        api.before = fail
        told = api.post("/v1/subscriptions/file/resume")
        assert told.status == STATUSES.get(kind, 500)
        assert told.error == {"kind": kind.value, "message": "what happened", "hint": "what to do"}


def test_the_character_nul_names_nothing(api: Scene) -> None:
    """GIVEN NUL, which State takes in no text WHEN it stands in a path THEN 404; in a query or body THEN 422, named."""
    for method, path in (
        ("GET", "/v1/subscriptions/%00"),
        ("POST", "/v1/subscriptions/file%00/resume"),
        ("GET", "/v1/status/%00"),
        ("GET", "/v1/replays/%00"),
        ("POST", "/v1/replays/%00/cancel"),
        ("GET", "/v1/bots/helper/keys/a%00"),
    ):
        told = api.ask(method, path)
        assert (told.status, told.error["message"][:12]) == (404, "there is no "), path
    window = {"since": "2020-01-01T10:00Z", "until": "2020-01-01T12:00Z"}
    for method, path, body, named in (
        ("GET", "/v1/deliveries?subscription=%00", None, "the query: subscription"),
        ("GET", "/v1/bots?after=a%00", None, "the query: after"),
        ("POST", "/v1/replays", {**window, "streams": ["a", "a\0b"]}, "the body: streams[1]"),
        ("POST", "/v1/replays", {**window, "where": "key = 'a\0'"}, "the body: where"),
        ("POST", "/v1/subscriptions/file/pause", {"reason": "\0"}, "the body: reason"),
    ):
        told = api.ask(method, path, body)
        assert (told.status, told.error["message"]) == (422, f"{named}: holds the character NUL"), told.text
    assert api.replays.open() == [] and api.store.subscription("file").state is SubscriptionState.LIVE


def test_what_is_answered_with_500_stands_in_our_log(api: Scene, capfd: pytest.CaptureFixture[str]) -> None:
    """GIVEN trouble of our own WHEN it comes up THEN the log says which; what the client can mend is not logged."""
    for error, is_ours in ((FormatError("a sealed secret is damaged"), True), (ConflictError("it is taken"), False)):

        def fail(error: EvermarkError = error) -> None:
            raise error

        api.before = fail
        capfd.readouterr()
        assert (api.post("/v1/subscriptions/file/resume").status == 500) is is_ours
        told = capfd.readouterr()
        assert ("a request failed" in told.out + told.err and error.message in told.out + told.err) is is_ours


def test_a_state_that_is_busy_or_away_is_503_with_a_time_to_come_back(api: Scene) -> None:
    """GIVEN a state that cannot answer WHEN asked to write THEN 503, Retry-After, and the next one is answered."""
    for error in (BusyError("locked"), UnreachableError("away")):

        def fail(error: EvermarkError = error) -> None:
            raise error

        api.before = fail
        told = api.post("/v1/subscriptions", WANTED)
        assert (told.status, told.headers["Retry-After"]) == (503, "1")
    api.before = lambda: None
    assert api.post("/v1/subscriptions", WANTED).status == 201


def test_an_unknown_failure_is_500_and_tells_nothing_of_itself(api: Scene) -> None:
    """A bug in one request neither ends the server nor shows its insides."""

    def fail() -> None:
        raise RuntimeError(f"with {SECRET}")

    api.before = fail
    told = api.post("/v1/subscriptions/file/resume")
    assert told.status == 500 and SECRET not in told.text and "RuntimeError" not in told.text
    assert api.get("/v1/subscriptions/file").status == 200


def test_a_slow_state_holds_up_neither_livez_nor_metrics(api: Scene) -> None:
    """GIVEN every thread of the API waiting for state WHEN others ask THEN they are answered; too many are told so."""
    gate = threading.Event()
    waiting = threading.Semaphore(0)

    def hang() -> None:
        waiting.release()
        gate.wait(20)

    api.before = hang
    with ThreadPoolExecutor(WAITING_MAX + 1) as clients:
        asked = [clients.submit(api.post, "/v1/subscriptions/file/resume") for _ in range(WAITING_MAX)]
        try:
            assert waiting.acquire(timeout=20)
            assert api.ask("GET", "/livez", token=None).status == 200
            assert api.ask("GET", "/metrics", token=None).status == 200
            busy = until(lambda: _refused(api), "one more than may wait is told to come back")
            assert busy.headers["Retry-After"] == "1"
            assert api.ask("GET", "/livez", token=None).status == 200
        finally:
            gate.set()
        assert {one.result().status for one in asked} <= {200, 503}


def test_a_stop_does_not_wait_for_a_state_that_hangs(tmp_path: Path) -> None:
    """GIVEN a request that waits for state WHEN the server is told to stop THEN it does, and its client sees it."""
    gate = threading.Event()
    hanging = threading.Event()

    def hang() -> None:
        hanging.set()
        gate.wait(60)

    with served(tmp_path) as scene, ThreadPoolExecutor(1) as client:
        scene.before = hang
        asked = client.submit(scene.post, "/v1/subscriptions/file/resume")
        assert hanging.wait(20)
        begun = time.monotonic()
        scene.server.stop()
        assert time.monotonic() - begun < 5
        gate.set()
        assert asked.exception() is not None or asked.result().status >= 500


def _refused(api: Scene) -> Any:
    with ThreadPoolExecutor(1) as one:
        asked = one.submit(api.ask, "GET", "/v1/subscriptions/file")
        told = asked.result()
    return told if told.status == 503 else None


def test_before_it_is_open_the_api_says_come_back(tmp_path: Path) -> None:
    """GIVEN an instance that is starting WHEN asked THEN 503 with a time, and 401 still comes first."""
    with served(tmp_path, opened=False) as scene:
        told = scene.get("/v1/subscriptions")
        assert told.status == 503 and "Retry-After" in told.headers
        assert scene.ask("GET", "/v1/subscriptions", token=None).status == 401


def test_nobody_learns_anything_without_a_token(api: Scene) -> None:
    """GIVEN no, a wrong or a malformed token WHEN anything below /v1 is asked THEN 401, whatever it is."""
    headers: list[dict[str, str]] = [
        {},
        {"Authorization": f"Bearer {WRITER}x"},
        {"Authorization": f"Bearer {WRITER[:-1]}"},
        {"Authorization": "Bearer "},
        {"Authorization": f"Basic {WRITER}"},
        {"Authorization": WRITER},
        {"Authorization": "Bearer " + "x" * 5000},
    ]
    for sent in headers:
        for method, path in (
            ("GET", "/v1/subscriptions"),
            ("GET", "/v1/openapi.json"),
            ("GET", "/v1/nothing"),
            ("PUT", "/v1/subscriptions"),
        ):
            told = api.ask(method, path, token=None, headers=sent)
            assert told.status == 401 and told.headers["WWW-Authenticate"].startswith("Bearer")
            assert WRITER not in told.text
    assert api.ask("GET", "/v1/subscriptions", token=None, headers={"authorization": f"bearer {WRITER}"}).status == 200
    assert api.ask("GET", "/livez", token=None).status == 200


def test_without_tokens_the_api_says_which_key_to_add(tmp_path: Path) -> None:
    """GIVEN a file without tokens WHEN asked with any THEN 401, naming server.tokens."""
    with served(tmp_path, {}) as scene:
        for token in (None, WRITER, ""):
            told = scene.ask("GET", "/v1/subscriptions", token=token)
            assert told.status == 401 and "server: {tokens:" in told.error["hint"]


def test_a_token_that_may_read_writes_nothing(api: Scene) -> None:
    """GIVEN `may: read` WHEN it reads THEN 200; WHEN it writes anything THEN 403 and nothing happens."""
    from evermark.server.calls import CALLS

    before = api.store.subscriptions()
    for call in CALLS:
        told = api.ask(call.method, call.path.format(name="file", id=1, session="s", replay="r"), None, token=READER)
        assert (told.status == 403) == (call.writes or "{session}" in call.path), call
    assert api.ask("GET", "/v1/openapi.json", token=READER).status == 200
    assert api.store.subscriptions() == before and api.sink.tries == []


def test_subscriptions_are_paged_by_name(api: Scene) -> None:
    """GIVEN more than a page WHEN followed by `after` THEN each is seen once, in order."""
    for number in range(7):
        assert api.post("/v1/subscriptions", {**WANTED, "name": f"s{number}"}).status == 201
    seen: list[str] = []
    after = ""
    while after is not None:
        page = api.get(f"/v1/subscriptions?limit=3&after={after}").json
        seen += [one["name"] for one in page["subscriptions"]]
        after = page["after"]
    assert seen == sorted([*(f"s{n}" for n in range(7)), "file"])
