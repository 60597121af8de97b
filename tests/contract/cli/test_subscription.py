"""`evermark subscription` against a real state: made, changed, rotated, tried and removed, an instance or none."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from evermark.app.build import Deployment, open_deployment
from evermark.cli.main import app
from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.config import load
from evermark.delivery.decide.registration import secret_ends
from evermark.delivery.model import Cursor, GroupWork, MadeBy, SourcePartition, SubscriptionState
from evermark.testing.contracts.scene import done, event
from evermark.testing.listener import Failing, Listener

SECRET = "whsec_" + "A" * 43 + "="
OTHER = Holder("shop", "elsewhere", "boot", 4711, "1")  # an instance on a machine we cannot look into
PLACE = SourcePartition("shop", 0)
FILE = """
version: 1
name: shop
state: {{dsn: "${{PG_DSN}}"}}
server: {{listen: "127.0.0.1:0"}}
sources:
  shop: {{type: postgres, dsn: "${{PG_DSN}}", tables: [public.orders]}}
subscriptions:
  billing: {{url: "{url}", secret: "${{SECRET}}", allow_networks: [127.0.0.0/8]}}
"""


@pytest.fixture
def receiver() -> Iterator[Listener]:
    with Listener(secrets=[SECRET]) as listening:
        yield listening


@pytest.fixture
def file(tmp_path: Path, pg_dsn: str, receiver: Listener, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PG_DSN", pg_dsn)
    monkeypatch.setenv("SECRET", SECRET)
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE.format(url=receiver.url))
    return path


@pytest.fixture
def deployment(file: Path) -> Iterator[Deployment]:
    """The same deployment, open as an instance has it."""
    opened = open_deployment(load(file))
    yield opened
    opened.close()


def invoke(file: Path, *words: object) -> Result:
    return CliRunner().invoke(app, ["subscription", *map(str, words), "-c", str(file)])


def good(file: Path, *words: object) -> Result:
    result = invoke(file, *words)
    assert result.exit_code == 0, result.output
    return result


def told(file: Path, *words: object) -> Any:
    return json.loads(good(file, *words, "--json").stdout)


def refused(file: Path, *words: object) -> str:
    result = invoke(file, *words)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output and "error: " in result.stderr
    return result.stderr


def add(file: Path, name: str = "mail", *words: object) -> Any:
    return told(file, "add", name, "--url", f"https://{name}.example/", "--secret", SECRET, *words)


@pytest.mark.parametrize("owned", [False, True])
def test_a_subscription_is_made_changed_and_removed(file: Path, deployment: Deployment, owned: bool) -> None:
    """GIVEN state, with and without an instance WHEN a person decides THEN it is done under whoever delivers."""
    lease = deployment.leases.acquire(DELIVER_LEASE, OTHER, 60.0) if owned else None
    store = deployment.delivery
    made = add(file, "mail", "--streams", "public.orders,public.users", "--ops", "insert", "--op", "update",
               "--where", "data.total > 5", "--from", "beginning", "--ordered", "--bundle", 10, "--concurrency", 3,
               "--timeout", "2s", "--rate", "60/m", "--header", "X-Team=mail", "--header", "X-B=a=b",
               "--body-limit", "2KiB", "--parked-limit", 7)  # fmt: skip
    assert (made["state"], made["made_by"], made["headers"]) == ("behind", "api", ["X-B", "X-Team"])
    assert SECRET not in json.dumps(made)
    found = store.subscription("mail").spec
    assert deployment.box.open(found.secrets[0]) == SECRET
    assert (found.streams, found.ops) == (("public.orders", "public.users"), ("insert", "update"))
    assert (found.where, found.start, found.ordered, found.bundle) == ("data.total > 5", "beginning", True, 10)
    assert (found.concurrency, found.timeout_s, found.rate_per_s) == (3, 2.0, 1.0)
    opened = {name: deployment.box.open(value) for name, value in found.headers.items()}
    assert (opened, found.body_bytes_max, found.parked_max) == ({"X-Team": "mail", "X-B": "a=b"}, 2048, 7)

    good(file, "set", "mail", "--url", "https://new.example/", "--where", "", "--unordered")
    after = store.subscription("mail").spec
    assert (after.url, after.where, after.ordered) == ("https://new.example/", None, False)
    assert (after.bundle, after.headers, after.secrets) == (10, found.headers, found.secrets)

    assert "not confirmed" in refused(file, "remove", "mail")
    good(file, "remove", "mail", "--yes")
    assert "mail" not in store.subscriptions() and store.cursors("mail") == {}
    if lease is not None:
        deployment.leases.require(lease)


def test_streams_that_nothing_is_known_of_are_warned_of(file: Path, deployment: Deployment) -> None:
    """GIVEN a file with one table WHEN other streams are asked for THEN they are taken, with a warning each."""
    made = good(
        file, "add", "mail", "--url", "https://m.example/", "--secret", SECRET, "--streams", "public.order,mail"
    )
    assert "warning: stream public.order: the log has no event of it yet" in made.stderr
    assert "did you mean public.orders?" in made.stderr and "stream mail: " in made.stderr
    changed = good(file, "set", "mail", "--streams", "public.orders")
    assert "warning" not in changed.stderr
    assert "did you mean public.orders?" in good(file, "set", "mail", "--streams", "Orders").stderr
    assert deployment.delivery.subscription("mail").spec.streams == ("Orders",)


def test_a_secret_that_is_made_is_printed_once(file: Path, deployment: Deployment) -> None:
    """GIVEN --new-secret WHEN made and rotated THEN stdout is the secret and nothing else, and no list shows it."""
    first = good(file, "add", "mail", "--url", "https://mail.example/", "--new-secret").stdout.strip()
    second = good(file, "rotate", "mail").stdout.strip()
    opened = [deployment.box.open(sealed) for sealed in deployment.delivery.subscription("mail").spec.secrets]
    assert opened == [second, first] and first != second
    assert told(file, "rotate", "mail")["secret"].startswith("whsec_")
    shown = good(file, "list", "--json").output
    assert first not in shown and second not in shown


def test_rotation_overlaps_until_a_time_or_until_it_is_ended(file: Path, deployment: Deployment) -> None:
    """GIVEN a secret WHEN rotated with and without a time THEN the end is kept; --end leaves the newest."""
    add(file)
    other = "whsec_" + "B" * 43 + "="
    made = told(file, "rotate", "mail", "--secret", other, "--overlap", "24h")
    assert "secret" not in made and len(made["secrets"]) == 2
    first, second = secret_ends(deployment.delivery.subscription("mail").spec)
    assert first is None and second is not None
    assert abs(second - datetime.now(UTC) - timedelta(hours=24)) < timedelta(minutes=5)
    assert "one secret" in good(file, "rotate", "mail", "--end").stderr
    (alone,) = deployment.delivery.subscription("mail").spec.secrets
    assert deployment.box.open(alone) == other
    assert "stands alone" in refused(file, "rotate", "mail", "--end", "--overlap", "1h")
    assert "whsec_" in refused(file, "rotate", "mail", "--secret", "short")
    assert "overlap" in refused(file, "rotate", "mail", "--overlap", "soon")


def test_the_variable_of_add_is_not_what_rotate_changes_to(
    file: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN one added with the secret in the variable WHEN rotated THEN to a new one; its own is refused."""
    monkeypatch.setenv("EVERMARK_SIGNING_SECRET", SECRET)
    good(file, "add", "mail", "--url", "https://mail.example/")
    second = good(file, "rotate", "mail").stdout.strip()
    opened = [deployment.box.open(sealed) for sealed in deployment.delivery.subscription("mail").spec.secrets]
    assert opened == [second, SECRET] and second != SECRET
    for known in opened:
        assert "signed with this secret already" in refused(file, "rotate", "mail", "--secret", known)


def test_what_the_file_made_is_edited_in_the_file(file: Path, deployment: Deployment) -> None:
    """GIVEN one of the file WHEN changed, rotated, removed or made again THEN refused, saying where to edit it."""
    lease = deployment.leases.acquire(DELIVER_LEASE, deployment.holder, 60.0)
    assert lease is not None
    deployment.delivery.register(deployment.specs, MadeBy.FILE, {}, lease.epoch)
    before = deployment.delivery.subscriptions()
    for words in (("set", "billing", "--bundle", 2), ("rotate", "billing"), ("rotate", "billing", "--end"),
                  ("remove", "billing")):  # fmt: skip
        assert "subscriptions.billing in evermark.yaml" in refused(file, *words)
    assert "there already" in refused(file, "add", "billing", "--url", "https://x.example/", "--new-secret")
    assert deployment.delivery.subscriptions() == before


def test_a_wrong_option_is_named_and_nothing_is_made(file: Path, deployment: Deployment) -> None:
    """GIVEN values the file would refuse WHEN given as options THEN the same refusal, without the secret."""
    for words, said in (
        (("--url", "http://x.example/", "--new-secret"), "unencrypted"),
        (("--url", "https://127.0.0.1/", "--new-secret"), "allow_networks: [127.0.0.1/32]"),
        (("--url", "https://x.example/", "--secret", "mine-is-short"), "secret: expected whsec_"),
        (("--url", "https://x.example/", "--new-secret", "--bundle", "0"), "bundle: must be at least 1"),
        (("--url", "https://x.example/", "--new-secret", "--where", "drop table x"), "predicate"),
        (("--url", "https://x.example/", "--new-secret", "--header", "nonsense"), "NAME=VALUE"),
        (("--url", "https://x.example/", "--new-secret", "--from", "soon"), "from: expected now"),
        (("--url", "https://x.example/"), "which secret"),
        (("--url", "https://x.example/", "--new-secret", "--secret", SECRET), "which secret"),
    ):
        error = refused(file, "add", "mail", *words)
        assert said in error and "mine-is-short" not in error
    add(file)
    assert "there already" in refused(file, "add", "mail", "--url", "https://x.example/", "--new-secret")
    assert "nothing to change" in refused(file, "set", "mail")
    assert "nobody" in refused(file, "set", "nobody", "--bundle", 2)
    assert "nobody" in refused(file, "remove", "nobody", "--yes")
    assert "nobody" in refused(file, "test", "nobody")
    assert set(deployment.delivery.subscriptions()) == {"mail"}


def test_a_test_fire_says_what_came_back_and_changes_nothing(
    file: Path, deployment: Deployment, receiver: Listener
) -> None:
    """GIVEN a receiver that takes it, then fails WHEN fired THEN exit code 0, then 1, each told with its status."""
    fired = told(file, "test", "billing")
    assert (fired["accepted"], fired["verdict"], fired["status"]) == (True, "accepted", 200) and fired["took_ms"] > 0
    (record,) = receiver.records
    assert (record.event.type, record.event.flags, record.event.delivery_id) == (
        "evermark.test",
        ("test",),
        fired["id"],
    )
    again = told(file, "test", "billing")
    assert again["id"] != fired["id"] and not receiver.records[-1].duplicate
    receiver.failing = Failing(503, count=10_000)
    result = invoke(file, "test", "billing", "--json")
    assert result.exit_code == 1
    answer = json.loads(result.stdout)
    assert (answer["accepted"], answer["verdict"], answer["status"]) == (False, "endpoint", 503)
    assert invoke(file, "test", "billing").exit_code == 1
    assert deployment.delivery.subscriptions() == {} and deployment.delivery.parked.rows() == []


def test_the_guard_holds_for_a_test_fire_too(file: Path, deployment: Deployment, receiver: Listener) -> None:
    """GIVEN one made by the API whose row names a private address WHEN fired THEN refused at the dial, unsent."""
    add(file)
    with deployment.state.connection() as conn:
        inside = json.dumps({"url": receiver.url, "allow_networks": ["127.0.0.0/8"]})
        conn.execute("update subscriptions set spec = spec || %s::jsonb where name = 'mail'", (inside,))
    result = invoke(file, "test", "mail", "--json")
    assert result.exit_code == 1 and "not allowed" in json.loads(result.stdout)["reason"]
    assert receiver.requests == 0


def test_removing_says_what_goes_with_it(file: Path, deployment: Deployment) -> None:
    """GIVEN parked deliveries WHEN asked to remove THEN their number is in the question, and they go."""
    add(file)
    lease = deployment.leases.acquire(DELIVER_LEASE, deployment.holder, 60.0)
    assert lease is not None
    store = deployment.delivery
    store.open_partition(PLACE, 0, lease.epoch)
    assert store.subscription("mail").state is SubscriptionState.LIVE
    store.settle_group(
        GroupWork(PLACE, Cursor(0), Cursor(1), frozenset({"mail"})),
        [done("mail", event(1), event(2))],
        datetime.now(UTC),
        lease.epoch,
    )
    assert "2 parked deliveries" in refused(file, "remove", "mail")
    assert len(store.parked.rows("mail")) == 2
    good(file, "remove", "mail", "--yes")
    assert store.parked.rows() == []
