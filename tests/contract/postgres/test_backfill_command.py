"""`evermark source backfill`: what it notes for whoever carries it out, what it refuses, what `status` shows of it."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from typer.testing import CliRunner, Result

from evermark.app.build import open_deployment
from evermark.cli.main import app
from evermark.cluster.fence import source_lease
from evermark.config import load

FILE = """
version: 1
name: shop
state: {dsn: "${PG_DSN}"}
sources:
  box: {type: postgres, dsn: "${PG_DSN}", tables: [public.a]}
  shop: {type: postgres, dsn: "${PG_DSN}", mode: tables, start: copy, tables: [public.a, 'public."B"']}
"""


@pytest.fixture
def file(tmp_path: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PG_DSN", pg_dsn)
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE + f"data: {tmp_path / 'data'}\n")
    return path


def invoke(*args: object) -> Result:
    return CliRunner().invoke(app, [str(arg) for arg in args])


def copies(file: Path) -> list[dict[str, Any]]:
    result = invoke("status", "--json", "-c", file)
    assert result.exit_code == 0, result.output
    found: list[dict[str, Any]] = json.loads(result.stdout)["copies"]
    return found


def test_a_request_is_noted_once_and_shown(file: Path) -> None:
    """GIVEN nobody runs WHEN a person asks, twice THEN one request for each table and condition waits, and is shown."""
    assert copies(file) == []
    assert invoke("source", "backfill", "shop", "-c", file).exit_code == 0
    assert sorted(row["stream"] for row in copies(file)) == ["public.B", "public.a"]
    assert invoke("source", "backfill", "shop", "-c", file).exit_code == 0
    only = ("source", "backfill", "shop", "--table", 'public."B"', "--where", "id > 3", "-c", file)
    said = invoke(*only)
    assert said.exit_code == 0 and "public.B is planned" in said.output
    rows = copies(file)
    assert len(rows) == 3
    assert (rows[0]["stream"], rows[0]["condition"], rows[0]["state"]) == ("public.B", "id > 3", "planned")
    shown = invoke("status", "-c", file).output
    assert rows[0]["copy"] in shown
    ended = invoke("source", "backfill", "--cancel", rows[0]["copy"], "-c", file)
    assert ended.exit_code == 0 and "public.B is cancelled" in ended.output
    assert (copies(file)[0]["state"], copies(file)[0]["error"]) == ("failed", "cancelled")


def test_a_failed_copy_of_a_table_that_left_the_file_is_said_to_have_left(file: Path) -> None:
    """GIVEN a copy that failed, one that is planned and one of another source WHEN the file is without their tables
    THEN that is the state of those that nobody carries out, which a glance does not show; back in the file it does."""
    assert invoke("source", "backfill", "shop", "-c", file).exit_code == 0
    by_stream = {row["stream"]: row["copy"] for row in copies(file)}
    with closing(open_deployment(load(file))) as deployment:
        lease = deployment.leases.acquire(source_lease("shop"), deployment.holder, 60.0)
        assert lease is not None
        deployment.copies.trouble(by_stream["public.a"], "no such table", lease.epoch, failed=True)
        deployment.leases.release(lease)
    whole = file.read_text()

    def states() -> dict[str, str]:
        return {row["stream"]: row["state"] for row in copies(file)}

    assert states() == {"public.a": "failed", "public.B": "planned"}
    file.write_text(whole.replace("tables: [public.a, 'public.\"B\"']", "tables: [public.c]"))
    assert states() == {"public.a": "left the file", "public.B": "planned"}
    shown = invoke("status", "-c", file).output
    assert by_stream["public.a"] not in shown and by_stream["public.B"] in shown
    file.write_text(whole.replace("  shop: {type", "  other: {type"))
    assert states() == {"public.a": "left the file", "public.B": "left the file"}
    file.write_text(whole)
    assert states() == {"public.a": "failed", "public.B": "planned"}


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (("box",), "cannot be copied from"),
        (("shop", "--table", "public.c"), "does not stand in the file"),
        (("shop", "--table", "public.B"), "capitals"),
        (("shop", "--where", "id = 1"), "for one table"),
        ((), "which source?"),
        (("--cancel", "0123456789abcdef"), "there is no copy 0123456789abcdef"),
        (("shop", "--cancel", "0123456789abcdef"), "it goes alone"),
        (("nothing",), "no source is called"),
    ],
)
def test_what_cannot_be_copied_is_refused(file: Path, given: tuple[str, ...], told: str) -> None:
    """GIVEN a request that nobody could carry out WHEN it is made THEN it is refused, and nothing is noted."""
    result = invoke("source", "backfill", *given, "-c", file)
    assert result.exit_code != 0
    assert told in " ".join((result.output + str(result.exception)).split())
    assert copies(file) == []


def test_install_refuses_to_copy_a_table_without_a_key(file: Path, pg_dsn: str) -> None:
    """GIVEN `start: copy` and a table without a key WHEN installed THEN the line to run is told."""
    with psycopg.connect(pg_dsn, autocommit=True) as conn:
        conn.execute(
            'create table a (id int); alter table a replica identity full; create table "B" (id int primary key)'
        )
    refused = invoke("source", "install", "shop", "-c", file)
    said = " ".join((refused.output + str(refused.exception)).split())
    assert refused.exit_code != 0 and "public.a has no key" in said and "alter table public.a add primary key" in said
    deployment = open_deployment(load(file))
    try:
        copying = deployment.sources["shop"].copying()
        assert copying is not None and list(copying.wanted) == ["public.a", "public.B"]
        assert deployment.sources["box"].copying() is None
    finally:
        deployment.close()
