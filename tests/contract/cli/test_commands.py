"""The command line against a real Postgres: what it reports, what it changes, and what it refuses to change."""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner, Result

from evermark.app.build import Deployment, open_deployment
from evermark.checkpoints.base import Checkpoint
from evermark.cli.main import app
from evermark.cluster.base import Holder, Lease
from evermark.cluster.fence import DELIVER_LEASE, source_lease
from evermark.config import load
from evermark.delivery.model import Cursor, GroupWork, MadeBy, SourcePartition, SubscriptionState
from evermark.event import taken_batch
from evermark.ingest.repair.base import Choice
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.head import NO_VERSION, Head
from evermark.log.maintenance import Maintenance
from evermark.log.write import BatchWriter
from evermark.testing.contracts.scene import done, event
from evermark.testing.servers import free_port
from tests.forked import FORKED

SECRET = "whsec_" + "A" * 43 + "="
PLACE = SourcePartition("shop", 0)
OTHER = Holder("shop", "elsewhere", "boot", 4711, "1")  # an instance on a machine we cannot look into
AHEAD = json.dumps(
    {
        "format": "evermark-checkpoints",
        "version": 1,
        "deployment": "shop",
        "checkpoints": [{"source": "shop", "partition": 0, "position": "9", "batch": 9, "epoch": 1}],
    }
)
FILE = """
version: 1
name: shop
state: {dsn: "${PG_DSN}"}
server: {listen: "127.0.0.1:0"}
spark: {master: "local[4]"}
sources:
  shop: {type: postgres, dsn: "${PG_DSN}", tables: [public.orders]}
subscriptions:
  billing: {url: "https://billing.example/hooks", secret: "${SECRET}", headers: {X-Token: header-secret}}
"""


@pytest.fixture
def file(tmp_path: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A deployment whose state and source are the test's own database, with a table to capture."""
    monkeypatch.setenv("PG_DSN", pg_dsn)
    monkeypatch.setenv("SECRET", SECRET)
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE)
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key, total numeric)")
    return path


def kept_in(file: Path, backend: str, request: pytest.FixtureRequest) -> Path:
    """The same deployment with its checkpoints elsewhere."""
    if backend == "etcd":
        url = request.getfixturevalue("etcd").url
        settings = f"etcd: {{endpoints: '{url}', prefix: /{secrets.token_hex(6)}/}}"
    elif backend == "mongo":
        url, database = request.getfixturevalue("mongo_server").url, request.getfixturevalue("mongo_database")
        settings = f"mongo: {{url: '{url}', database: {database}}}"
    else:
        return file
    section = f"reliability: {{checkpoint: {{backend: {backend}, {settings}}}}}\n"
    file.write_text(file.read_text() + section)
    return file


@pytest.fixture
def deployment(file: Path) -> Iterator[Deployment]:
    """The same deployment, open as an instance has it."""
    opened = open_deployment(load(file))
    yield opened
    opened.close()


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def said(*args: object) -> str:
    """What a command that works says to the person at the terminal."""
    result = invoke(*args)
    assert result.exit_code == 0, result.output
    return result.stderr


def told(*args: object) -> Any:
    """What a command that works reports to a program: JSON on stdout, and none of the secrets."""
    result = invoke(*args, "--json")
    assert result.exit_code == 0, result.output
    assert SECRET not in result.output and "header-secret" not in result.output
    return json.loads(result.stdout)


def refused(*args: object) -> str:
    result = invoke(*args)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output and "error: " in result.stderr and "\nhint: " in result.stderr
    return result.stderr


def held_elsewhere(deployment: Deployment, name: str) -> Lease:
    lease = deployment.leases.acquire(name, OTHER, 60.0)
    assert lease is not None
    return lease


def park(deployment: Deployment, *numbers: int) -> None:
    """Register the file's subscriptions and park these events for billing."""
    lease = deployment.leases.acquire(DELIVER_LEASE, deployment.holder, 60.0)
    assert lease is not None
    store = deployment.delivery
    store.open_partition(PLACE, 0, lease.epoch)
    store.register(deployment.specs, MadeBy.FILE, {}, lease.epoch)
    outcome = done("billing", *(event(number, key=f"key {number}") for number in numbers))
    group = store.group()
    store.settle_group(GroupWork(PLACE, Cursor(0), Cursor(1), group.members), [outcome], datetime.now(UTC), lease.epoch)
    deployment.leases.release(lease)


def log_batches(folder: Path, epoch: int, first: int, last: int) -> None:
    """Batches of one event each, committed as an owner would."""
    log = DeltaLog(folder)
    log.fence(0, epoch)
    for batch in range(first, last + 1):
        row = taken_batch(
            {
                "event_id": [f"e{batch}"],
                "position": [f"{batch:06}"],
                "stream": ["public.orders"],
                "key": [f"order {batch}"],
                "op": ["insert"],
                "event_time": [datetime.now(UTC)],
                "payload": ['{"n": 1}'],
                "bytes": [b"\x00\xff"],
            },
            1,
        )
        written = BatchWriter(folder, "shop", 0, batch).write_all([row])
        assert written is not None
        log.commit(Append(0, batch, epoch, f"{batch:06}", f"{batch + 1:06}", [written]))
    log.sync()


def test_migrate_says_from_where_to_where(file: Path) -> None:
    """GIVEN an empty database WHEN migrated twice THEN it goes from 0 to the newest, and then stays."""
    first, again = told("migrate", "-c", file), told("migrate", "-c", file)
    assert first["from"] == 0 and first["to"] > 0
    assert again == {**first, "from": first["to"]}
    assert "nothing to do" in said("migrate", "-c", file)


def test_a_source_is_installed_twice_and_uninstalled(file: Path, pg_dsn: str) -> None:
    """GIVEN a table WHEN installed, installed again and uninstalled THEN slot and trigger are there, then gone."""
    first = said("source", "install", "-c", file)
    assert "evermark_shop_shop" in first and "orders" in first and "next: evermark up" in first
    said("source", "install", "-c", file)
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        slots = "select count(*) from pg_replication_slots where slot_name = 'evermark_shop_shop'"
        triggers = "select count(*) from pg_trigger where tgname like 'pgstream%' and not tgisinternal"
        assert conn.execute(slots).fetchone() == (1,)
        found = conn.execute(triggers).fetchone()
        assert found is not None and found[0] > 0
        assert "not confirmed" in refused("source", "uninstall", "-c", file)
        assert conn.execute(slots).fetchone() == (1,)
        said("source", "uninstall", "shop", "--yes", "-c", file)
        assert conn.execute(slots).fetchone() == (0,) and conn.execute(triggers).fetchone() == (0,)


def test_a_source_that_is_being_read_is_not_uninstalled(file: Path, deployment: Deployment, pg_dsn: str) -> None:
    """GIVEN an instance that owns the source WHEN it is to be uninstalled THEN refused, and the slot stays."""
    said("source", "install", "-c", file)
    held_elsewhere(deployment, source_lease("shop"))
    assert "elsewhere" in refused("source", "uninstall", "--yes", "-c", file)
    with psycopg.connect(pg_dsn) as conn:
        assert conn.execute("select count(*) from pg_replication_slots where database = current_database()").fetchone()


def test_a_table_that_is_not_there_is_named(file: Path) -> None:
    """GIVEN a table nobody made WHEN it is to be captured THEN the error names it."""
    assert "public.nowhere" in refused("source", "install", "--table", "nowhere", "-c", file)


def test_status_tells_all_without_an_instance(file: Path, deployment: Deployment) -> None:
    """GIVEN state and no instance WHEN asked for the status THEN sources, heads, lag and parked counts are told."""
    park(deployment, 1, 2)
    lease = held_elsewhere(deployment, source_lease("shop"))
    deployment.heads.move("shop", 0, Head(1, lease.epoch, "000001", 1))
    deployment.heads.move("shop", 0, Head(2, lease.epoch, "000002", 2))
    deployment.checkpoints.save("shop", 0, Checkpoint("000002", 2, lease.epoch))
    status = told("status", "-c", file)
    (source,), (billing,) = status["sources"], status["subscriptions"]
    assert status["health"] is None and status["delivery"]["owner"] is None
    assert source == {
        "source": "shop",
        "partition": 0,
        "owner": "elsewhere:4711",
        "epoch": lease.epoch,
        "log_head": 2,
        "checkpoint": 2,
        "position": "000002",
    }
    assert (billing["state"], billing["lag_batches"], billing["waiting"] + billing["dead"]) == ("live", 1, 2)
    assert billing["headers"] == ["X-Token"]
    result = invoke("status", "-c", file)
    assert "elsewhere:4711" in result.stdout and "billing" in result.stdout and "no instance answers" in result.stderr


def test_a_subscription_no_instance_has_seen_is_listed_as_new(file: Path) -> None:
    """GIVEN a file that was never run WHEN subscriptions are listed THEN its own are there, as new."""
    (row,) = told("subscription", "list", "-c", file)
    assert (row["subscription"], row["state"]) == ("billing", "new")


def test_a_subscription_is_paused_and_resumed_while_an_instance_delivers(file: Path, deployment: Deployment) -> None:
    """GIVEN an instance that delivers WHEN a person pauses and resumes THEN it happens under the instance's epoch."""
    park(deployment)
    lease = held_elsewhere(deployment, DELIVER_LEASE)
    said("subscription", "pause", "billing", "--reason", "moving house", "-c", file)
    paused = deployment.delivery.subscriptions()["billing"]
    assert (paused.state, paused.reason) == (SubscriptionState.SUSPENDED, "moving house")
    said("subscription", "resume", "billing", "-c", file)
    assert deployment.delivery.subscriptions()["billing"].state is SubscriptionState.BEHIND
    deployment.leases.require(lease)
    assert "nobody" in refused("subscription", "pause", "nobody", "-c", file)


@pytest.mark.parametrize("owned", [False, True])
def test_parked_deliveries_are_listed_shown_retried_and_dropped(
    file: Path, deployment: Deployment, owned: bool
) -> None:
    """GIVEN parked deliveries, with and without an instance WHEN a person decides THEN it is done and counted."""
    park(deployment, 1, 2, 3)
    if owned:
        held_elsewhere(deployment, DELIVER_LEASE)
    with deployment.state.connection() as conn:
        conn.execute("update enqueued_messages set next_attempt_at = null where event_id = 'e1'")
        conn.execute("update enqueued_messages set next_attempt_at = now() + '1 hour' where event_id <> 'e1'")
    rows = told("delivery", "list", "-s", "billing", "-c", file)
    ids = {row["event_id"]: row["id"] for row in rows}
    assert [row["state"] for row in rows] == ["dead", "waiting", "waiting"]
    assert [row["event_id"] for row in told("delivery", "list", "--state", "dead", "-c", file)] == ["e1"]
    assert told("delivery", "show", ids["e2"], "-c", file)["event"] == {"n": 2}

    said("delivery", "retry", ids["e1"], "-c", file)
    due = {row.event.event_id: row.next_attempt_at for row in deployment.delivery.parked.rows()}
    assert due["e1"] is not None and due["e1"] <= datetime.now(UTC)
    assert due["e2"] is not None and due["e2"] > datetime.now(UTC)

    assert "not confirmed" in refused("delivery", "drop", ids["e1"], "-c", file)
    assert "999999" in refused("delivery", "drop", ids["e1"], 999999, "--yes", "-c", file)
    assert len(deployment.delivery.parked.rows()) == 3
    said("delivery", "drop", ids["e1"], ids["e3"], "--yes", "-c", file)
    assert [row.event.event_id for row in deployment.delivery.parked.rows()] == ["e2"]
    assert deployment.delivery.counted("dropped") == {"billing": 2}
    assert told("status", "-c", file)["dropped"] == {"billing": 2}


def test_deliveries_are_chosen_by_id_or_by_subscription(file: Path, deployment: Deployment) -> None:
    """GIVEN many parked WHEN paged, chosen by subscription, or by nothing THEN each does what it says."""
    park(deployment, *range(1, 6))
    first = invoke("delivery", "list", "--limit", "2", "--json", "-c", file)
    after = json.loads(first.stdout)[-1]["id"]
    assert f"--after {after}" in first.stderr
    assert len(told("delivery", "list", "--after", after, "-c", file)) == 3
    assert "which deliveries" in refused("delivery", "drop", "--yes", "-c", file)
    assert "5 to be tried" in said("delivery", "retry", "-s", "billing", "-c", file)
    said("subscription", "pause", "billing", "-c", file)
    assert "subscription resume billing" in said("delivery", "retry", "-s", "billing", "-c", file)
    said("delivery", "drop", "-s", "billing", "--yes", "-c", file)
    assert deployment.delivery.parked.rows() == []


def test_a_subscription_that_is_not_there_has_nothing_to_decide_about(file: Path, deployment: Deployment) -> None:
    """GIVEN a name that was mistyped WHEN its deliveries are to be tried or dropped THEN refused; one without parked
    deliveries has none."""
    for words in (("retry",), ("drop", "--yes")):
        assert "no subscription is called 'biling'" in refused("delivery", *words, "-s", "biling", "-c", file)
    assert "0 to be tried" in said("delivery", "retry", "-s", "billing", "-c", file)


def test_a_retry_that_cannot_happen_yet_says_until_when_and_resume_ends_the_wait(
    file: Path, deployment: Deployment
) -> None:
    """GIVEN a receiver that said "in a day" WHEN a person retries THEN the wait is told; resumed, it is tried now."""
    park(deployment, 1)
    with deployment.state.connection() as conn:
        conn.execute(
            "update subscriptions set state = 'behind', failures = 1, reason = 'HTTP 429',"
            " next_attempt_at = now() + '1 day'"
        )
    told_so = said("delivery", "retry", "-s", "billing", "-c", file)
    assert "failed (HTTP 429), and is not tried before 20" in told_so
    assert "subscription resume billing" in told_so
    assert "tries it now" in said("subscription", "resume", "billing", "-c", file)
    found = deployment.delivery.subscription("billing")
    assert (found.failures, found.next_attempt_at) == (0, None)
    assert "resume" not in said("delivery", "retry", "-s", "billing", "-c", file)


@pytest.mark.parametrize("backend", ["postgres", "etcd", "mongo"])
def test_checkpoints_are_backed_up_and_restored(
    backend: str, file: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """GIVEN a backup WHEN later checkpoints are replaced by it THEN position and batch are back, under a new epoch."""
    file = kept_in(file, backend, request)
    deployment: Deployment = request.getfixturevalue("deployment")
    lease = held_elsewhere(deployment, source_lease("shop"))
    log_batches(deployment.log_folder("shop"), lease.epoch, 1, 3)
    deployment.checkpoints.save("shop", 0, Checkpoint("000002", 2, lease.epoch))
    kept = tmp_path / "kept.json"
    said("checkpoint", "backup", kept, "-c", file)
    assert "exists already" in refused("checkpoint", "backup", kept, "-c", file)
    deployment.checkpoints.save("shop", 0, Checkpoint("000003", 3, lease.epoch))

    assert "elsewhere" in refused("checkpoint", "restore", kept, "-c", file)
    assert deployment.checkpoints.load("shop", 0).batch == 3
    deployment.leases.release(lease)
    said("checkpoint", "restore", kept, "-c", file)
    found = deployment.checkpoints.load("shop", 0)
    assert (found.position, found.batch) == ("000002", 2) and found.epoch > lease.epoch
    assert [row["batch"] for row in told("checkpoint", "list", "-c", file)] == [2]


@pytest.mark.parametrize(("passed", "restored"), [("000009", "000009"), ("000001", "000002"), ("", "000002")])
def test_a_restored_checkpoint_does_not_go_back_behind_what_was_passed(
    file: Path, deployment: Deployment, tmp_path: Path, passed: str, restored: str
) -> None:
    """GIVEN a backup, and a source that was passed since without an event WHEN the backup is restored THEN reading does
    not go back behind that: the source may have forgotten it."""
    lease = held_elsewhere(deployment, source_lease("shop"))
    log_batches(deployment.log_folder("shop"), lease.epoch, 1, 2)
    deployment.checkpoints.save("shop", 0, Checkpoint("000002", 2, lease.epoch))
    said("checkpoint", "backup", tmp_path / "kept.json", "-c", file)
    head = Head(2, lease.epoch, "000002", 2, passed, 2)
    deployment.heads.move("shop", 0, head, recovered=True)
    deployment.leases.release(lease)
    said("checkpoint", "restore", tmp_path / "kept.json", "-c", file)
    assert deployment.checkpoints.load("shop", 0).position == restored


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not JSON"),
        ("[]", "no checkpoints"),
        ('{"format": "evermark-checkpoints", "version": 2}', "version 2"),
        ('{"format": "evermark-checkpoints", "version": 1, "deployment": "shop", "checkpoints": [{}]}', "damaged"),
        ('{"format": "evermark-checkpoints", "version": 1, "deployment": "x", "checkpoints": []}', "deployment 'x'"),
        (
            AHEAD,
            "the log ends at 0",
        ),
        (AHEAD.replace('"partition": 0', '"partition": 3'), "no such partition"),
        (AHEAD.replace('"position": "9"', r'"position": "9\u0000"').replace('"batch": 9', '"batch": 0'), "damaged"),
        (AHEAD.replace('"position": "9"', r'"position": "\ud800"').replace('"batch": 9', '"batch": 0'), "damaged"),
    ],
)
def test_a_backup_that_does_not_fit_is_refused(file: Path, tmp_path: Path, text: str, words: str) -> None:
    """GIVEN a file that is damaged, newer, of another deployment, ahead of the log or of a partition that is not there
    WHEN restored THEN refused."""
    kept = tmp_path / "kept.json"
    kept.write_text(text)
    assert words in refused("checkpoint", "restore", kept, "-c", file)
    assert told("checkpoint", "list", "-c", file) == []


def test_reset_brings_readers_back_to_a_log_that_was_put_back(file: Path, deployment: Deployment) -> None:
    """GIVEN a log that ends before what was taken WHEN reset THEN head and cursors are at its end: none is skipped."""
    park(deployment)
    lease = held_elsewhere(deployment, source_lease("shop"))
    log_batches(deployment.log_folder("shop"), lease.epoch, 1, 2)
    for batch in range(1, 6):
        deployment.heads.move("shop", 0, Head(batch, lease.epoch, f"{batch:06}", batch))
    deployment.checkpoints.save("shop", 0, Checkpoint("000005", 5, lease.epoch))
    with deployment.state.connection() as conn:
        conn.execute("update cursors set batch = 5")
        for reader, batch in (("inside-kept", 1), ("inside-lost", 2), ("inside-later", 4)):
            given = (reader, PLACE.source, PLACE.partition, batch)
            conn.execute("insert into cursors values (%s, %s, %s, %s, '000003')", given)
    assert "elsewhere" in refused("checkpoint", "reset", "shop", "-c", file)
    deployment.leases.release(lease)
    assert "back at batch 2" in said("checkpoint", "reset", "shop", "-c", file)
    assert deployment.checkpoints.list("shop") == {} and deployment.heads.load("shop") == {}
    assert deployment.delivery.group().cursors == {PLACE: Cursor(2)}
    # THEN nobody is inside a batch that is made anew
    stood = {"inside-kept": Cursor(1, "000003"), "inside-lost": Cursor(2), "inside-later": Cursor(2)}
    assert {reader: deployment.delivery.cursors(reader)[PLACE] for reader in stood} == stood
    assert "no checkpoint" in refused("checkpoint", "reset", "shop", "-c", file)


@pytest.mark.parametrize("backend", ["postgres", "etcd", "mongo"])
def test_reset_leaves_head_and_cursors_of_a_whole_log_alone(
    backend: str, file: Path, request: pytest.FixtureRequest
) -> None:
    """GIVEN a log that holds all that was taken WHEN reset THEN only the checkpoint goes, wherever it is kept."""
    file = kept_in(file, backend, request)
    deployment: Deployment = request.getfixturevalue("deployment")
    park(deployment)
    lease = held_elsewhere(deployment, source_lease("shop"))
    log_batches(deployment.log_folder("shop"), lease.epoch, 1, 1)
    deployment.heads.move("shop", 0, Head(1, lease.epoch, "000001", 1))
    deployment.checkpoints.save("shop", 0, Checkpoint("000001", 1, lease.epoch))
    deployment.leases.release(lease)
    said("checkpoint", "reset", "shop", "--partition", "0", "-c", file)
    assert deployment.checkpoints.list("shop") == {}
    assert deployment.heads.load("shop")[0].batch == 1 and deployment.delivery.group().cursors == {PLACE: Cursor(1)}


@pytest.mark.parametrize("backend", ["etcd", "mongo"])
def test_reset_forgets_a_checkpoint_that_cannot_be_read(
    backend: str, file: Path, request: pytest.FixtureRequest
) -> None:
    """GIVEN a checkpoint that something else wrote WHEN a person does what the error says THEN it is gone and named."""
    file = kept_in(file, backend, request)
    deployment: Deployment = request.getfixturevalue("deployment")
    if backend == "etcd":
        key = f"{deployment.config.reliability.checkpoint.etcd.prefix}shop/partition-0"
        deployment.checkpoints.save("shop", 0, Checkpoint("000001", 0, 1))  # claims the prefix
        request.getfixturevalue("etcd").control("put", key, "not json")
    else:
        with request.getfixturevalue("mongo_server").client() as client:
            rows = client[request.getfixturevalue("mongo_database")]["checkpoints"]
            rows.insert_one({"_id": "shop/partition-0", "token": "000001", "batch": "none"})
    assert "`evermark checkpoint reset` forgets it" in refused("checkpoint", "list", "-c", file)
    heard = said("checkpoint", "reset", "shop", "-c", file)
    assert "warning: " in heard and "shop/partition-0" in heard and "shop/0: forgotten" in heard
    assert told("checkpoint", "list", "-c", file) == []


@pytest.mark.parametrize(
    ("chosen", "is_kept", "said_of_it"),
    [("log", True, "where it began"), ("resync", True, "where it began"), ("oldest", False, "as at the first start")],
)
def test_s10_a_reset_before_the_first_event_says_where_reading_goes_on(
    file: Path, deployment: Deployment, pg_dsn: str, chosen: str, is_kept: bool, said_of_it: str
) -> None:
    """GIVEN a partition that has begun, and never had an event WHEN reset THEN it goes on where it began, unless a
    person says that it begins anew; there is nothing to compare with."""
    said("source", "install", "--table", "orders", "-c", file)
    lease = held_elsewhere(deployment, source_lease("shop"))
    begun = Head(0, lease.epoch, "000004", NO_VERSION)
    deployment.heads.move("shop", 0, begun)
    deployment.checkpoints.save("shop", 0, Checkpoint("000006", 0, lease.epoch))
    deployment.leases.release(lease)
    told = said("checkpoint", "reset", "shop", "--from", chosen, "-c", file)
    assert said_of_it in told
    # AND whoever asked for a comparison is told that there was none, and when there can be one
    assert ("nothing is compared" in told) == (chosen == "resync")
    assert deployment.checkpoints.list("shop") == {}
    assert deployment.heads.load("shop") == ({0: begun} if is_kept else {})
    assert deployment.recoveries.current("shop", 0) is None


def test_s10_a_reset_says_where_reading_goes_on(file: Path, deployment: Deployment, pg_dsn: str) -> None:
    """GIVEN a log of two batches, and no checkpoint WHEN a person chooses THEN `oldest`, `resync`
    and `now` leave their word for the next start; `now` must be confirmed."""
    said("source", "install", "--table", "orders", "-c", file)
    lease = held_elsewhere(deployment, source_lease("shop"))
    log_batches(deployment.log_folder("shop"), lease.epoch, 1, 2)
    for batch in (1, 2):
        deployment.heads.move("shop", 0, Head(batch, lease.epoch, f"{batch:06}", batch))
    deployment.leases.release(lease)

    assert "by itself reading goes on where batch 2" in said("checkpoint", "reset", "shop", "-c", file)
    assert deployment.checkpoints.list("shop") == {}

    for chosen in ("oldest", "resync"):
        assert "compares the source" in said("checkpoint", "reset", "shop", "--from", chosen, "-c", file)
        asked = deployment.recoveries.current("shop", 0)
        assert asked is not None and (asked.choice, asked.by_person) == (Choice.REPAIR, True)
        assert deployment.checkpoints.list("shop") == {}

    assert "not confirmed" in refused("checkpoint", "reset", "shop", "--from", "now", "-c", file)
    assert "skips to now" in said("checkpoint", "reset", "shop", "--from", "now", "--yes", "-c", file)
    asked = deployment.recoveries.current("shop", 0)
    assert asked is not None and asked.choice is Choice.SKIP
    assert deployment.checkpoints.list("shop") == {}


@pytest.mark.parametrize("chosen", ["now", "resync", "oldest"])
def test_reset_only_forgets_a_partition_that_the_source_has_no_more(
    file: Path, deployment: Deployment, chosen: str
) -> None:
    """GIVEN checkpoints of two slots, and a file that says one now WHEN reset THEN both are forgotten, and only for the
    partition that is there a choice is left."""
    said("source", "install", "--table", "orders", "-c", file)
    lease = held_elsewhere(deployment, source_lease("shop"))
    log_batches(deployment.log_folder("shop"), lease.epoch, 1, 2)
    deployment.heads.move("shop", 0, Head(1, lease.epoch, "000001", 1))
    for partition in (0, 1):
        deployment.checkpoints.save("shop", partition, Checkpoint("000001", 0, lease.epoch))
    deployment.leases.release(lease)
    heard = said("checkpoint", "reset", "shop", "--from", chosen, "--yes", "-c", file)
    assert "shop/1: forgotten; the source has no such partition now" in heard
    assert deployment.checkpoints.list("shop") == {}
    assert deployment.recoveries.current("shop", 0) is not None and deployment.recoveries.current("shop", 1) is None


def test_a_store_of_checkpoints_that_is_away_is_said_and_hides_nothing_else(file: Path) -> None:
    """GIVEN checkpoints in an etcd that does not answer WHEN asked THEN `status` tells the rest, `doctor` names the
    store, and `checkpoint list` says what is wrong; nothing waits for long."""
    section = f"reliability: {{checkpoint: {{backend: etcd, etcd: {{endpoints: 'http://127.0.0.1:{free_port()}'}}}}}}\n"
    file.write_text(file.read_text() + section)
    (source,) = told("status", "-c", file)["sources"]
    assert (source["source"], source["checkpoint"]) == ("shop", None)
    assert "in etcd at http://127.0.0.1" in refused("checkpoint", "list", "-c", file)
    result = invoke("doctor", "--json", "-c", file)
    found = {each["check"]: each for each in json.loads(result.stdout)["findings"] if each["source"] is None}
    assert (result.exit_code, found["checkpoints"]["grade"]) == (3, "wrong")


def test_a_store_of_leases_that_is_away_is_said_and_hides_nothing_else(file: Path) -> None:
    """GIVEN leases in an etcd that does not answer WHEN asked THEN `status` tells the rest, and of the owners that they
    are not known."""
    section = f"cluster: {{leases: {{backend: etcd, etcd: {{endpoints: 'http://127.0.0.1:{free_port()}'}}}}}}\n"
    file.write_text(file.read_text() + section)
    found = told("status", "-c", file)
    assert [(row["source"], row["owner"]) for row in found["sources"]] == [("shop", "unknown")]
    assert found["delivery"]["owner"] == "unknown"
    result = invoke("status", "-c", file)
    assert result.exit_code == 0 and "who owns what is not known: " in result.stderr


def test_a_bucket_that_is_away_is_said_and_hides_nothing_else(
    file: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a log in a bucket whose store does not answer WHEN asked for the status THEN all that State knows is told,
    and of what is in the log alone that it is not known."""
    park(deployment, 1, 2, 3)
    monkeypatch.setattr("evermark.storage.objects.RETRIES_MAX", 0)
    monkeypatch.setenv("S3_KEY", SECRET)
    keys = 'access_key: "${S3_KEY}", secret_key: "${S3_KEY}"'
    section = f"storage: {{endpoint: 'http://127.0.0.1:{free_port()}', {keys}}}\nlog: {{path: 's3://acme/shop'}}\n"
    file.write_text(file.read_text() + section)
    (billing,) = told("status", "-c", file)["subscriptions"]
    assert (billing["state"], billing["waiting"], billing["lag_events"]) == ("live", 3, None)
    result = invoke("status", "-c", file)
    assert result.exit_code == 0 and "how far subscriptions are behind is not known: the store of" in result.stderr


def test_instances_are_told_by_the_leases_they_hold(file: Path, deployment: Deployment) -> None:
    """GIVEN a holder, one that let go and one that is gone WHEN listed THEN only the first is there."""
    held_elsewhere(deployment, source_lease("shop"))
    deployment.leases.release(held_elsewhere(deployment, DELIVER_LEASE))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    mine = deployment.holder
    gone = Holder("shop", mine.host, mine.boot, ended.pid, "1")
    assert deployment.leases.acquire("source:gone", gone, 60.0) is not None
    (row,) = told("instance", "list", "-c", file)
    assert (row["host"], row["pid"], row["leases"]) == ("elsewhere", 4711, ["source:shop"])


def test_the_log_is_described_compacted_and_retained(
    file: Path, deployment: Deployment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN batches, some not passed by a reader WHEN retained early and late THEN only old and passed ones go."""
    park(deployment)
    log_batches(deployment.log_folder("shop"), 1, 1, 3)
    (row,) = told("log", "info", "-c", file)
    assert (row["files"], row["rows"], row["batch_min"], row["batch_max"]) == (3, 3, 1, 3)
    assert row["oldest"] <= row["newest"] and row["bytes"] > 0
    with deployment.state.connection() as conn:
        conn.execute("update cursors set batch = 2")
    assert "nothing to do" in said("log", "compact", "-c", file)
    assert "nothing to do" in said("log", "retain", "-c", file)
    in_90_days = partial(Maintenance, clock=lambda: time.time() + 90 * 86_400)
    monkeypatch.setattr("evermark.log.maintenance.Maintenance", in_90_days)
    (kept,) = told("log", "retain", "-c", file)
    assert kept["retained_out_rows"] == 2
    assert told("log", "info", "-c", file)[0]["batch_min"] == 3
    lease = held_elsewhere(deployment, source_lease("shop"))
    assert "elsewhere" in refused("log", "retain", "-c", file)
    deployment.leases.release(lease)


@pytest.mark.parametrize("words", [("delivery", "list", "-s"), ("replay", "show"), ("replay", "cancel")])
def test_a_name_that_is_not_utf_8_is_a_wrong_use(file: Path, words: tuple[str, ...]) -> None:
    """GIVEN a name with bytes that are no text WHEN State is asked for it THEN exit code 2, without a traceback."""
    result = invoke(*words, os.fsdecode(b"mail\xff"), "-c", file)
    assert result.exit_code == 2 and isinstance(result.exception, SystemExit), result.output
    assert "is not UTF-8 text" in result.stderr and "Traceback" not in result.stderr


def test_a_log_that_has_nothing_of_a_source_is_said_to_have_nothing(file: Path, deployment: Deployment) -> None:
    """GIVEN a source of the file, and no log WHEN its log is asked for THEN that is said, and not that the file has no
    such source; a name that neither has is no source."""
    forget = ("forget", "--yes", "--stream", "public.orders", "--key", "1")
    for words in (("info",), ("missing",), ("compact",), forget):
        error = refused("log", *words, "--source", "shop", "-c", file)
        assert "has nothing of shop" in error and "under `sources:`" not in error, error
        assert "no source is called 'shap'" in refused("log", *words, "--source", "shap", "-c", file)
    assert "has nothing yet" in refused("log", "missing", "-c", file)
    log_batches(deployment.log_folder("old"), 1, 1, 1)  # that the file names no more
    assert "has nothing of shop" in refused("log", "missing", "--source", "shop", "-c", file)
    assert "old: no file is missing" in said("log", "missing", "--source", "old", "-c", file)


def test_the_log_forgets_a_key_and_its_parked_deliveries(file: Path, deployment: Deployment) -> None:
    """GIVEN events and a parked delivery WHEN a key is forgotten THEN what has it is gone, and nothing else."""
    park(deployment, 1)
    (row,) = deployment.delivery.parked.rows()
    log_batches(deployment.log_folder("shop"), 1, 1, 3)
    asked = ("log", "forget", "--yes", "-c", file)
    nothing = told(*asked, "--stream", row.event.stream, "--key", "another key")
    assert (nothing["events_removed"], nothing["deliveries_dropped"]) == (0, 0)
    parked = told(*asked, "--stream", row.event.stream, "--key", "key 1")
    assert parked["deliveries_dropped"] == 1 and deployment.delivery.parked.rows() == []
    logged = told(*asked, "--stream", "public.orders", "--key", "order 2", "--key", "order 3")
    assert logged["events_removed"] == 2
    (left,) = told("log", "info", "-c", file)
    assert (left["rows"], left["batch_max"]) == (1, 1)


def test_a_kept_table_that_cannot_be_removed_is_said(file: Path, deployment: Deployment) -> None:
    """GIVEN a kept table that belongs to another user WHEN a key is forgotten THEN all else of it is gone, and the
    folder to delete is named."""
    park(deployment, 1)
    log_batches(deployment.log_folder("shop"), 1, 1, 3)
    stuck = deployment.log_folder("shop") / "_tables" / "ab" / "kept.json"
    assert isinstance(stuck, Path)
    stuck.mkdir(parents=True)
    (row,) = deployment.delivery.parked.rows()
    error = refused("log", "forget", "--yes", "-c", file, "--stream", row.event.stream, "--key", "key 1")
    assert f"{stuck.parent} cannot be removed" in error and "may be deleted" in error
    assert deployment.delivery.parked.rows() == []


def test_the_log_is_asked_in_sql(file: Path, deployment: Deployment) -> None:
    """GIVEN a log WHEN asked in SQL, badly and well THEN a clear error, and rows as JSON lines."""
    log_batches(deployment.log_folder("shop"), 1, 1, 3)
    bad, good = "select nothing from nowhere", "select event_id, batch, bytes from shop order by batch desc"
    code = f"""
import contextlib, sys
from evermark.cli.main import run
with contextlib.suppress(SystemExit):  # one process for both: starting the JVM is what takes long
    run(["log", "query", "{bad}", "-c", sys.argv[1]])
run(["log", "query", "{good}", "--limit", "2", "--json", "-c", sys.argv[1]])
"""
    ran = python(code, str(file))
    assert ran.returncode == 0 and "Traceback" not in ran.stderr, ran.stderr
    assert "error: query: " in ran.stderr and "nowhere" in ran.stderr and "the tables are shop" in ran.stderr
    lines = [json.loads(line) for line in ran.stdout.splitlines()]
    assert lines == [{"event_id": "e3", "batch": 3, "bytes": "AP8="}, {"event_id": "e2", "batch": 2, "bytes": "AP8="}]


def python(code: str, *args: str, **environ: str) -> subprocess.CompletedProcess[str]:
    """Code in a process of its own."""
    command = [sys.executable, "-c", code, *args]
    env = {**os.environ, **environ}
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=env)


def evermark(*args: str, file: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    """The program itself, in a process of its own."""
    return FORKED.run([*args, "-c", str(file)], {**os.environ, **environ})


def closed_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.mark.parametrize("command", [("status",), ("migrate",), ("delivery", "list")])
def test_an_unreachable_database_is_said_without_its_password(file: Path, command: tuple[str, ...]) -> None:
    """GIVEN a port nobody listens on WHEN state is needed THEN a clear error and hint, exit code 1, no password."""
    dsn = f"postgresql://shop:pw-do-not-show@127.0.0.1:{closed_port()}/shop"
    ran = evermark(*command, file=file, PG_DSN=dsn)
    assert ran.returncode == 1 and ran.stdout == ""
    assert "does not answer" in ran.stderr and "hint: " in ran.stderr
    assert "it is waited for" not in ran.stderr
    assert "Traceback" not in ran.stderr and "pw-do-not-show" not in ran.stderr


def test_up_says_at_once_that_state_is_unreachable_and_ends_when_it_has_waited(file: Path) -> None:
    """GIVEN a port nobody listens on WHEN it goes up THEN why it waits is said once, and when it has waited for long
    enough, of which a test has less than a person, a clear error and hint, exit code 1, no password."""
    dsn = f"postgresql://shop:pw-do-not-show@127.0.0.1:{closed_port()}/shop"
    code = """
import sys
from evermark.app import run
from evermark.cli.main import run as evermark
run._STATE_WAIT_S = 2.5  # three tries
evermark(["up", "--log-json", "-c", sys.argv[1]])
"""
    ran = python(code, str(file), PG_DSN=dsn)
    assert ran.returncode == 1 and ran.stdout == ""
    (said,) = (line for line in ran.stderr.splitlines() if "it is waited for" in line)
    assert "Connection refused" in json.loads(said)["error"] and json.loads(said)["hint"]
    error = ran.stderr[ran.stderr.index("error: ") :]
    assert "does not answer" in error and "hint: " in error and "state.dsn" in error
    assert "Traceback" not in ran.stderr and "pw-do-not-show" not in ran.stderr


def test_up_says_that_its_port_is_taken(file: Path) -> None:
    """GIVEN a port another program listens on WHEN started THEN it names server.listen, and ends with 1."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        file.write_text(FILE.replace("127.0.0.1:0", f"127.0.0.1:{port}"))
        ran = evermark("up", file=file)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert f"server.listen: cannot listen on 127.0.0.1:{port}" in ran.stderr and "hint: " in ran.stderr


def test_up_on_a_source_that_is_not_installed_says_how(file: Path) -> None:
    """GIVEN a database without the outbox WHEN started THEN it ends with 1 and names the command to run."""
    ran = evermark("up", "--log-json", file=file)
    assert ran.returncode == 1 and "Traceback" not in ran.stderr
    assert "evermark source install" in ran.stderr
    assert all(json.loads(line) for line in ran.stderr.splitlines() if line.startswith("{"))
