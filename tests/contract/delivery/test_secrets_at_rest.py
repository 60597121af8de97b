"""D12: secrets are encrypted at rest. Everything in State is read as a thief would, and no secret is found."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from psycopg import sql
from typer.testing import CliRunner

from evermark.app.build import Deployment, open_deployment
from evermark.cli.main import app
from evermark.cluster.base import Holder
from evermark.cluster.fence import DELIVER_LEASE
from evermark.config import load
from evermark.delivery.model import MadeBy
from evermark.delivery.webhook.signing import new_secret
from evermark.state.connection import State

FILE_SECRET, API_SECRET = new_secret(), new_secret()
FILE_HEADER, API_HEADER = "Bearer file-f4c1e0d2", "Bearer api-9b77a3c5"
FILE = """
version: 1
name: shop
state: {dsn: "${PG_DSN}"}
sources:
  shop: {type: postgres, dsn: "${PG_DSN}", tables: [public.orders]}
subscriptions:
  billing: {url: https://billing.example/, secret: "${SECRET}", headers: {Authorization: "${HEADER}"}}
"""


@pytest.fixture
def file(tmp_path: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in {"PG_DSN": pg_dsn, "SECRET": FILE_SECRET, "HEADER": FILE_HEADER}.items():
        monkeypatch.setenv(name, value)
    path = tmp_path / "evermark.yaml"
    path.write_text(FILE)
    return path


@pytest.fixture
def deployment(file: Path) -> Iterator[Deployment]:
    opened = open_deployment(load(file))
    yield opened
    opened.close()


def everything_in(state: State) -> str:
    """Every row of every table of State, as text."""
    with state.connection() as conn:
        named = conn.execute(
            "select table_name from information_schema.tables where table_schema = %s and table_type = 'BASE TABLE'",
            (state.schema,),
        )
        tables = [sql.Identifier(state.schema, row[0]) for row in named.fetchall()]
        rows = [conn.execute(sql.SQL("select t::text from {} t").format(table)).fetchall() for table in tables]
    return "\n".join(str(row) for found in rows for row in found)


def test_d12_no_secret_and_no_header_value_is_kept_in_the_clear(file: Path, deployment: Deployment) -> None:
    """GIVEN subscriptions by file and at run time, one rotated WHEN all of State is read THEN no secret is in it."""

    def run(*words: str) -> str:
        result = CliRunner().invoke(app, ["subscription", *words, "-c", str(file)])
        assert result.exit_code == 0, result.output
        return result.stdout.strip()

    lease = deployment.leases.acquire(DELIVER_LEASE, Holder("shop", "elsewhere", "boot", 4711, "1"), 60.0)
    assert lease is not None
    deployment.delivery.register(deployment.specs, MadeBy.FILE, {}, lease.epoch)
    run("add", "mail", "--url", "https://mail.example/", "--secret", API_SECRET, "--header", f"X-Key={API_HEADER}")
    made = run("rotate", "mail")
    run("set", "mail", "--header", f"X-Key={API_HEADER}2")

    kept = everything_in(deployment.state)
    assert "billing" in kept and "mail" in kept, "it was looked for in the right place"
    for secret in (FILE_SECRET, API_SECRET, made, FILE_HEADER, API_HEADER):
        assert secret.removeprefix("whsec_").removeprefix("Bearer ") not in kept

    specs = {name: found.spec for name, found in deployment.delivery.subscriptions().items()}
    opened = [deployment.box.open(sealed) for name in ("billing", "mail") for sealed in specs[name].secrets]
    assert opened == [FILE_SECRET, made, API_SECRET], "with the key they are all there"
    assert deployment.box.open(specs["mail"].headers["X-Key"]) == f"{API_HEADER}2"
