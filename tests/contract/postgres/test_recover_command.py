"""`evermark source recover`: what it shows, whom it asks, and the row it writes for whoever carries it out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner, Result

from evermark.app.build import Deployment, open_deployment
from evermark.checkpoints.base import Checkpoint
from evermark.cli.main import app
from evermark.cluster.base import Holder
from evermark.cluster.fence import source_lease
from evermark.config import load
from evermark.event import taken_batch
from evermark.ingest.repair.base import TRIES_MAX, Choice, Step
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.write import BatchWriter
from evermark.sources.postgres.lsn import Incarnation, Position

OTHER = Holder("shop", "elsewhere", "boot", 4711, "1")  # an instance on a machine we cannot look into
FILE = """
version: 1
name: shop
state: {dsn: "${PG_DSN}"}
sources:
  shop: {type: postgres, dsn: "${PG_DSN}", tables: [public.orders]}
"""


@pytest.fixture
def file(tmp_path: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A deployment whose state and source are the test's own database, installed, with an event in it."""
    monkeypatch.setenv("PG_DSN", pg_dsn)
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE + f"data: {tmp_path / 'data'}\n")
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("create table orders (id int primary key, total numeric)")
        assert invoke("install", "-c", path).exit_code == 0
        conn.execute("insert into orders values (1, 1)")
    return path


@pytest.fixture
def deployment(file: Path) -> Iterator[Deployment]:
    """The same deployment, open, with a checkpoint where the slot stands."""
    opened = open_deployment(load(file))
    checkpointed(opened, opened.sources["shop"].earliest(0))
    yield opened
    opened.close()


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, ["source", *[str(arg) for arg in args]])


def report(file: Path, code: int) -> dict[str, Any]:
    result = invoke("recover", "--json", "-c", file)
    assert result.exit_code == code, result.output
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def refused(*args: object) -> str:
    result = invoke(*args)
    assert result.exit_code == 1 and isinstance(result.exception, SystemExit), result.output
    assert "Traceback" not in result.output and "error: " in result.stderr and "\nhint: " in result.stderr
    return result.stderr


def checkpointed(deployment: Deployment, position: str) -> None:
    lease = deployment.leases.acquire(source_lease("shop"), deployment.holder, 60.0)
    assert lease is not None
    deployment.checkpoints.save("shop", 0, Checkpoint(position, 0, lease.epoch))
    deployment.leases.release(lease)


def lose(pg_dsn: str) -> None:
    """The slot is gone: a gap that can be closed."""
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("select pg_drop_replication_slot('evermark_shop_shop')")


def replace_server(deployment: Deployment) -> None:
    """As if the checkpoint were another server's: a person must choose."""
    here = Position.parse(deployment.checkpoints.load("shop", 0).position)
    there = Incarnation(here.incarnation.system_id - 1, here.incarnation.timeline)
    checkpointed(deployment, there.at(here.lsn))


def fail_repairs(deployment: Deployment, count: int) -> None:
    lease = deployment.leases.acquire(source_lease("shop"), deployment.holder, 60.0)
    assert lease is not None
    for _ in range(count):
        recovery = deployment.recoveries.open("shop", 0, "lost", "p", lease.epoch)
        deployment.recoveries.move(recovery, Step.FAILED, lease.epoch, error="no room", tried=True)
    deployment.leases.release(lease)


def test_a_healthy_source_is_said_to_be_and_not_recovered(file: Path, deployment: Deployment) -> None:
    """GIVEN nothing wrong WHEN asked THEN healthy, exit code 0; a choice is refused and writes nothing."""
    assert report(file, 0)["partitions"][0]["trouble"] is None
    people = invoke("recover", "-c", file)
    assert people.exit_code == 0 and "shop/0: healthy" in people.stderr
    for way in ("repair", "skip"):
        assert "nothing is wrong" in refused("recover", "--choice", way, "--yes", "-c", file)
    assert deployment.recoveries.past("shop") == []


def test_a_lost_slot_needs_nobody_and_may_be_hurried(file: Path, deployment: Deployment, pg_dsn: str) -> None:
    """GIVEN a lost slot WHEN asked THEN it repairs itself; with a choice the row is written with where we stopped."""
    lose(pg_dsn)
    found = report(file, 0)
    assert found["partitions"][0]["kind"] == "gap" and not found["needs_person"]
    assert found["events"]["count"] == 1 and found["events"]["younger"] is None
    people = invoke("recover", "-c", file).stderr
    assert "is gone" in people and "repair:" in people and "skip:" in people and "next `evermark up`" in people
    done = invoke("recover", "--choice", "repair", "-c", file)
    assert done.exit_code == 0 and "next `evermark up` carries it out" in done.stderr
    recovery = deployment.recoveries.current("shop", 0)
    assert recovery is not None and recovery.by_person
    assert (recovery.choice, recovery.step) == (Choice.REPAIR, Step.OPENED)
    assert recovery.left_at == deployment.checkpoints.load("shop", 0).position
    assert "is gone" in recovery.reason


def test_an_outbox_without_events_is_said_to_be_empty(file: Path, deployment: Deployment, pg_dsn: str) -> None:
    """GIVEN a lost slot and no event in the outbox WHEN the choices are explained THEN in words: no None in them."""
    lose(pg_dsn)
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("delete from pgstream.events")
    people = invoke("recover", "-c", file).stderr
    assert "look through `events` (it is empty now), take what the log lacks" in people
    assert "None" not in people


def test_another_server_waits_for_a_person_who_must_mean_it(file: Path, deployment: Deployment) -> None:
    """GIVEN another server WHEN asked THEN exit code 3; `skip` asks first, and only a yes writes it."""
    replace_server(deployment)
    found = report(file, 3)
    assert found["needs_person"] and found["partitions"][0]["kind"] == "identity"
    people = invoke("recover", "shop", "-c", file)
    assert people.exit_code == 3 and "--choice repair|skip" in people.stderr
    assert "not confirmed" in refused("recover", "--choice", "skip", "-c", file)
    assert deployment.recoveries.past("shop") == []
    assert invoke("recover", "--choice", "skip", "--yes", "-c", file).exit_code == 0
    recovery = deployment.recoveries.current("shop", 0)
    assert recovery is not None and recovery.choice is Choice.SKIP and recovery.by_person
    # AND now that somebody has chosen, nobody need choose any more
    assert not report(file, 0)["needs_person"]


def test_a_running_instance_need_not_be_stopped(file: Path, deployment: Deployment, pg_dsn: str) -> None:
    """GIVEN an instance that owns the source WHEN a person chooses THEN the row is its, and so is the lease still."""
    lose(pg_dsn)
    lease = deployment.leases.acquire(source_lease("shop"), OTHER, 60.0)
    assert lease is not None
    result = invoke("recover", "--choice", "repair", "--json", "-c", file)
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert document["owner"] == "elsewhere:4711" and document["asked"][0]["choice"] == "repair"
    deployment.leases.require(lease)  # raises if it was taken from the instance
    assert "elsewhere:4711 begins now" in invoke("recover", "--choice", "repair", "-c", file).stderr


def test_a_persons_word_replaces_what_was_under_way(file: Path, deployment: Deployment, pg_dsn: str) -> None:
    """GIVEN a repair of its own WHEN a person says skip THEN that is what is done, with its tries counted anew."""
    lose(pg_dsn)
    lease = deployment.leases.acquire(source_lease("shop"), OTHER, 60.0)
    assert lease is not None
    recovery = deployment.recoveries.open("shop", 0, "lost", "p", lease.epoch)
    deployment.recoveries.move(recovery, Step.OPENED, lease.epoch, error="no room", tried=True)
    assert "repair is under way: opened, 1 tries: no room" in invoke("recover", "-c", file).stderr
    assert invoke("recover", "--choice", "skip", "--yes", "-c", file).exit_code == 0
    now = deployment.recoveries.current("shop", 0)
    assert now is not None and (now.id, now.choice, now.tries) == (recovery.id, Choice.SKIP, 0)
    # AND a gap that is closed already is not opened again
    deployment.recoveries.close_gap(now, "q", lease.epoch)
    assert "closed already" in invoke("recover", "--choice", "repair", "-c", file).stderr
    now = deployment.recoveries.current("shop", 0)
    assert now is not None and (now.choice, now.step) == (Choice.SKIP, Step.CLOSED)


def test_a_slot_lost_again_and_again_needs_a_person_and_is_listed(
    file: Path, deployment: Deployment, pg_dsn: str
) -> None:
    """GIVEN three failed repairs within the hour WHEN asked THEN exit code 3, and all three are listed with why."""
    lose(pg_dsn)
    fail_repairs(deployment, TRIES_MAX)
    found = report(file, 3)
    assert [(r["step"], r["error"]) for r in found["past"]] == [("failed", "no room")] * TRIES_MAX
    people = invoke("recover", "-c", file)
    assert people.exit_code == 3 and people.stdout.count("no room") == TRIES_MAX
    assert invoke("recover", "--choice", "repair", "-c", file).exit_code == 0
    assert deployment.recoveries.current("shop", 0) is not None


def test_what_is_no_gap_is_not_recovered(file: Path, deployment: Deployment, pg_dsn: str) -> None:
    """GIVEN an outbox that is not installed, or no such partition WHEN a choice is made THEN a clear refusal."""
    assert "no partition 7" in refused("recover", "--partition", 7, "-c", file)
    assert "no source is called" in refused("recover", "nowhere", "-c", file)
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute("drop schema pgstream cascade")
    assert report(file, 3)["partitions"][0]["kind"] == "setup"
    people = invoke("recover", "-c", file)
    assert people.exit_code == 3 and "Choose" not in people.stderr
    assert "is not installed" in people.stderr and "there is nothing to choose before" in people.stderr
    assert "evermark source install" in refused("recover", "--choice", "repair", "-c", file)
    assert deployment.recoveries.past("shop") == []


def test_a_choice_is_offered_though_a_file_of_the_log_is_missing(
    file: Path, deployment: Deployment, pg_dsn: str
) -> None:
    """GIVEN a log without the file of its last event WHEN asked THEN that is said; AND with a lost slot the choices are
    offered, without the figures for which the file is needed, and may be made."""
    folder = Path(deployment.log_folder("shop"))
    log = DeltaLog(folder)
    event = {"event_id": ["e"], "position": ["1"], "stream": ["public.orders"], "op": ["insert"], "payload": ["{}"]}
    written = BatchWriter(folder, "shop", 0, 1).write_all([taken_batch(event, 1)])
    assert written is not None
    log.commit(Append(0, 1, 1, "1", "2", [written]))
    (lost,) = folder.glob("*.parquet")
    lost.unlink()
    missing = f"the file {lost} of the log is missing"
    found = report(file, 3)
    assert found["partitions"][0]["trouble"] == missing and not found["may_choose"] and found["events"] is None
    assert missing in refused("recover", "--choice", "skip", "-c", file)

    lose(pg_dsn)
    found = report(file, 0)
    assert found["partitions"][0]["kind"] == "gap" and found["may_choose"]
    assert found["events"]["younger"] is None and missing in found["events"]["unread"]
    people = invoke("recover", "-c", file).stderr
    assert "an unknown number of events are there" in people and f"unknown: {missing}; put it back" in people
    assert invoke("recover", "--choice", "repair", "-c", file).exit_code == 0
    assert deployment.recoveries.current("shop", 0) is not None


def test_a_source_nobody_ever_started_has_nothing_to_recover(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN no state WHEN asked THEN it says so, and makes none."""
    monkeypatch.setenv("PG_DSN", "postgresql://nobody@127.0.0.1:1/nowhere")
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE.replace('state: {dsn: "${PG_DSN}"}\n', "") + f"data: {tmp_path / 'data'}\n")
    assert "nothing was ever started" in refused("recover", "-c", path)
    assert not (tmp_path / "data").exists()
