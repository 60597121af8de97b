"""`evermark instance drain`: what it waits for, and what it says of work that nobody takes over."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from evermark.app.build import Deployment, open_deployment
from evermark.cli.main import app
from evermark.cluster.base import Holder, Lease, LeaseRow
from evermark.cluster.fence import DELIVER_LEASE, source_lease
from evermark.cluster.members import Members
from evermark.cluster.postgres import PostgresLeases
from evermark.config import load
from evermark.testing.until import until

FILE = """
version: 1
name: shop
state: {dsn: "${PG_DSN}"}
sources:
  shop: {type: postgres, dsn: "${PG_DSN}", tables: [public.orders]}
"""
A, B, C = (Holder(name, "elsewhere", "boot", pid, "1") for pid, name in enumerate("abc", start=1))
READ = source_lease("shop")


@pytest.fixture
def file(tmp_path: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PG_DSN", pg_dsn)
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
def deployment(file: Path) -> Iterator[Deployment]:
    opened = open_deployment(load(file))
    yield opened
    opened.close()


@pytest.fixture
def members(deployment: Deployment) -> Members:
    """Three instances on machines we cannot look into: the first reads the source, the second delivers."""
    found = Members(deployment.state)
    for each in (A, B, C):
        found.beat(each, "1", [READ, DELIVER_LEASE])
    for lease, holder in ((READ, A), (DELIVER_LEASE, B)):
        assert deployment.leases.acquire(lease, holder, 60.0) is not None
    return found


def drained(file: Path, name: str, meanwhile: Callable[[], object]) -> str:
    """What the person is told who drains an instance, while this happens."""
    beside = threading.Thread(target=meanwhile)
    beside.start()
    result = CliRunner().invoke(app, ["instance", "drain", name, "-c", str(file)])
    beside.join()
    assert result.exit_code == 0, result.output
    return result.stderr


def let_go(deployment: Deployment, lease: str) -> None:
    deployment.leases.release(Lease(lease, deployment.leases.rows()[lease].epoch))


def test_each_of_three_drains_at_once_says_that_nobody_takes_the_work(
    file: Path, deployment: Deployment, members: Members
) -> None:
    """GIVEN three instances WHEN all are drained at once, none having let go yet THEN each drain says once that nobody
    takes what it leaves, and not the last alone."""

    def others_are_drained_too() -> None:
        until(lambda: members.all()["a"].draining, "the first is drained")
        members.drain("b")
        members.drain("c")
        let_go(deployment, READ)

    for name, meanwhile in (
        ("a", others_are_drained_too),
        ("b", lambda: let_go(deployment, DELIVER_LEASE)),
        ("c", lambda: None),
    ):
        said = drained(file, name, meanwhile)
        assert said.count("no other instance takes the work") == 1
        assert f"{name} has let go of everything" in said


def test_a_drain_ends_when_another_has_the_work(file: Path, deployment: Deployment, members: Members) -> None:
    """GIVEN an instance that has let go WHEN another takes the work THEN the drain ends, without a warning."""

    def another_takes_it() -> None:
        until(lambda: members.all()["a"].draining, "the first is drained")
        let_go(deployment, READ)
        assert deployment.leases.acquire(READ, C, 60.0) is not None

    said = drained(file, "a", another_takes_it)
    assert "a has handed over everything" in said and "no other" not in said
    held = deployment.leases.rows()[READ].holder
    assert held is not None and held.instance == "c"


def test_a_drain_says_so_when_those_that_were_to_take_the_work_are_drained_in_that_moment(
    file: Path, deployment: Deployment, members: Members, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN an instance that has let go, of work that nobody has taken yet WHEN the others are drained THEN its drain
    says that nobody takes it."""
    looked, rows = threading.Event(), PostgresLeases.rows

    def look(store: PostgresLeases) -> dict[str, LeaseRow]:
        found = rows(store)
        if not found[READ].held:
            looked.set()
        return found

    def others_are_drained() -> None:
        until(lambda: members.all()["a"].draining, "the first is drained")
        let_go(deployment, READ)
        assert looked.wait(60)
        members.drain("b")
        members.drain("c")

    monkeypatch.setattr(PostgresLeases, "rows", look)
    assert "no other instance takes the work" in drained(file, "a", others_are_drained)


def test_a_drain_names_the_part_of_the_work_that_nobody_takes(
    file: Path, deployment: Deployment, members: Members
) -> None:
    """GIVEN others that can read, and not deliver WHEN the one that delivers is drained THEN that alone is named."""
    members.beat(A, "1", [READ])
    members.beat(C, "1", [READ])
    said = drained(file, "b", lambda: let_go(deployment, DELIVER_LEASE))
    assert "no other instance takes deliver: " in said and "b has let go of everything" in said
