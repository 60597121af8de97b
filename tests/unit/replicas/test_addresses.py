"""Addresses of a node's own Postgres that cannot be read: half of a password must not stand in the error."""

from __future__ import annotations

import traceback

import pytest

from evermark.errors import ConfigError
from evermark.replicas.node import open_store
from evermark.replicas.postgres import PostgresStore
from evermark.replicas.settings import ReplicaSettings, is_dsn, resolved
from evermark.secrets import Secret


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:SECRET%zzHALF@127.0.0.1/db",
        "postgresql://u:12/SECRET?HALF@127.0.0.1:1/db",
        "postgresql://u:SECRET@HALF@127.0.0.1:1/db",
        "host=127.0.0.1 password=SECRET HALF",
    ],
)
def test_an_address_that_cannot_be_read_is_refused_without_its_password(dsn: str) -> None:
    """GIVEN a password with a character that has to be escaped WHEN the store is opened THEN it says how to write it,
    and no piece of it is said."""
    with pytest.raises(ConfigError) as caught:
        PostgresStore(dsn)
    said = "".join(traceback.format_exception(caught.value)) + str(caught.value.hint)
    assert "SECRET" not in said and "HALF" not in said
    assert "write @ as %40" in str(caught.value.hint)


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "Postgres", "POSTGRESQL", "mysql", "sqlite"])
def test_an_address_of_another_kind_is_no_path_and_is_not_said(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """GIVEN an address with a scheme that is not ours, given by hand or in a variable THEN it is refused without a word
    of it; addresses of Postgres, and paths, are known as what they are."""
    address = f"{scheme}://u:SECRET@127.0.0.1:1/db"
    monkeypatch.setenv("SHOP_DSN", address)
    for refused in (
        lambda: resolved(address),
        lambda: open_store(ReplicaSettings("shop-1", "a", Secret(address))),
        lambda: open_store(ReplicaSettings("shop-1", "a", Secret("env:SHOP_DSN"))),
    ):
        with pytest.raises(ConfigError, match="neither a path nor one of Postgres") as caught:
            refused()
        assert "SECRET" not in "".join(traceback.format_exception(caught.value)) + str(caught.value.hint)
    assert [is_dsn(each) for each in ("postgres://h/d", "postgresql://h/d", "dbname=x password=a://b", "a/b.db")] == [
        True,
        True,
        True,
        False,
    ]
