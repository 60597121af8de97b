"""Nodes whose triggers an older program made."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from evermark.errors import SetupError
from evermark.replicas import node as replica_node
from evermark.replicas.node import ReplicaNode, ReplicaService, now_ms
from evermark.replicas.settings import ReplicaFolder, ReplicaSettings
from evermark.secrets import Secret
from evermark.testing.until import until

_AT = 1700000000.1234567  # a cast to text writes 15 digits of it


def _installed(folder: ReplicaFolder, store: str) -> None:
    folder.save(ReplicaSettings("shop-1", "north", Secret(store)))
    replica = ReplicaNode(folder).claimed()
    replica.store.install("orders", None, now_ms())
    replica.store.close()


def _image(path: Path) -> str:
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("insert into orders (at) values (?)", [_AT])
        connection.commit()
        asked = 'select data from "orders_Events" order by origin_seq desc limit 1'
        return str(connection.execute(asked).fetchone()[0])


def test_triggers_of_an_older_program_are_renewed_when_a_node_starts(tmp_path: Path) -> None:
    """GIVEN triggers that cut a real to 15 digits, and an index that was not made then, WHEN the node starts THEN they
    are renewed, all digits kept, and the index is there."""
    path, folder = tmp_path / "shop.db", ReplicaFolder(tmp_path / "north")
    with closing(sqlite3.connect(path)) as connection:
        connection.execute("create table orders (id integer primary key, at datetime)")
    _installed(folder, str(path))
    with closing(sqlite3.connect(path)) as connection:
        asked = "select name, sql from sqlite_master where type = 'trigger'"
        for name, sql in connection.execute(asked).fetchall():
            start, end = sql.find('case when typeof(new."at")'), sql.find(" end)", sql.find('typeof(new."at")'))
            if start > 0:
                connection.execute(f'drop trigger "{name}"')
                connection.execute(sql[:start] + 'cast(new."at" as text)' + sql[end + 4 :])
        connection.execute("delete from replication_meta where key like 'capture::%'")
        connection.execute('drop index "orders_Versions_deleted"')
        connection.commit()
    assert repr(_AT) not in _image(path), "these are the old ones"
    ReplicaNode(folder).claimed().store.close()
    assert repr(_AT) not in _image(path), "a command changes no triggers"
    service = ReplicaService(ReplicaNode(folder), "127.0.0.1", 0, 3600.0)
    service.start()
    service.stop()
    image = _image(path)
    assert float(image.partition('"at":"')[2].partition('"')[0]) == _AT
    with closing(sqlite3.connect(path)) as connection:
        asked = "select 1 from sqlite_master where name = 'orders_Versions_deleted'"
        assert connection.execute(asked).fetchone() == (1,)
    again = ReplicaNode(folder).open()
    assert not again.store.renew_capture("orders"), "once is enough"
    again.store.close()


def test_triggers_that_the_role_may_not_renew_are_named(tmp_path: Path, pg_dsn: str) -> None:
    """GIVEN old triggers of a table in Postgres that another role owns THEN the start says what that runs."""
    folder = ReplicaFolder(tmp_path / "north")
    with psycopg.connect(pg_dsn, autocommit=True) as connection:
        connection.execute("create table orders (id bigint primary key, what text)")
        _installed(folder, pg_dsn)
        connection.execute("update replication_meta set value = 'older' where key = 'capture::orders'")
        replica = ReplicaNode(folder).open()
        assert replica.store.renew_capture("orders")
        connection.execute("update replication_meta set value = 'older' where key = 'capture::orders'")
        connection.execute("drop role if exists served")
        connection.execute("create role served")
        connection.execute("grant all on all tables in schema public to served")
        replica.store.connection.execute("set role served")  # type: ignore[attr-defined]
        with pytest.raises(SetupError, match="triggers of orders were made by an older evermark") as raised:
            replica.store.renew_capture("orders")
        assert "evermark replica init --table orders" in raised.value.hint
        replica.store.close()
        connection.execute("drop owned by served")
        connection.execute("drop role served")


def test_a_node_starts_with_old_triggers_while_its_table_is_in_use_and_renews_them_later(
    tmp_path: Path, pg_dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN old triggers, and a backup that reads the table, WHEN the node starts THEN it serves, commands work,
    changes are captured; and triggers are renewed when the backup is done."""
    monkeypatch.setattr(replica_node, "_UPKEEP_S", 0.2)
    folder = ReplicaFolder(tmp_path / "north")
    with psycopg.connect(pg_dsn, autocommit=True) as connection, psycopg.connect(pg_dsn) as backup:
        connection.execute("create table orders (id bigint primary key, what text)")
        _installed(folder, pg_dsn)
        connection.execute("update replication_meta set value = 'older' where key = 'capture::orders'")
        backup.execute("lock table orders in access share mode")
        service = ReplicaService(ReplicaNode(folder), "127.0.0.1", 0, 3600.0)
        service.start()
        try:
            ReplicaNode(folder).claimed().store.close()
            connection.execute("insert into orders values (1, 'a')")
            made = connection.execute('select count(*) from "orders_Events"').fetchone()
            assert made == (1,)
            asked = "select value from replication_meta where key = 'capture::orders'"
            assert connection.execute(asked).fetchone() == ("older",)
            backup.rollback()
            until(lambda: connection.execute(asked).fetchone() != ("older",), "the triggers are renewed")
        finally:
            service.stop()
