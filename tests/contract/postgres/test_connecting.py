"""Why a real server could not be connected to, by its own words."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg.conninfo import make_conninfo

from evermark.errors import BusyError, DeniedError, EvermarkError, SetupError, UnreachableError
from evermark.secrets import Plain
from evermark.sources.postgres.connect import connect
from evermark.testing.servers import PostgresServer

ROLES = {
    "may_not_log_in": "nologin password 'right'",
    "has_no_room": "login password 'right' connection limit 0",
    "is_well": "login password 'right'",
}


@pytest.fixture
def roles(pg_server: PostgresServer) -> Iterator[None]:
    with pg_server.admin() as admin:
        for name, options in ROLES.items():
            admin.execute(f"create role {name} {options}".encode())
        yield
        for name in ROLES:
            admin.execute(f"drop role {name}".encode())


@pytest.mark.usefixtures("roles")
@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"port": "1"}, UnreachableError),
        ({"host": "nowhere.invalid"}, UnreachableError),
        ({"user": "has_no_room", "password": "right"}, BusyError),
        ({"user": "is_well", "password": "wrong"}, DeniedError),
        ({"user": "is_well", "password": ""}, DeniedError),
        ({"user": "may_not_log_in", "password": "right"}, DeniedError),
        ({"user": "is_well", "password": "right", "dbname": "not_there"}, SetupError),
        ({"user": "is_well", "password": "right", "sslmode": "require"}, SetupError),
        ({"user": "is_well", "password": "right"}, None),
    ],
)
def test_what_the_server_says_at_the_door_is_understood(
    pg_dsn: str, changes: dict[str, str], kind: type[EvermarkError] | None
) -> None:
    """GIVEN each way in which a connection fails WHEN it is made THEN the error is of the kind that decides rightly."""
    given = {"passfile": "/dev/null"} | changes if "user" in changes else changes
    dsn = Plain(make_conninfo(pg_dsn, **given))
    if kind is None:
        connect(dsn).close()
        return
    with pytest.raises(kind) as error:
        connect(dsn)
    assert type(error.value) is kind and "right" not in str(error.value)


def test_a_database_that_a_role_may_not_enter_is_a_matter_for_a_person(pg_dsn: str) -> None:
    """GIVEN a role without the right to connect WHEN it does THEN that is said, and not waited for."""
    with psycopg.connect(pg_dsn, autocommit=True) as db:
        name = db.info.dbname
        db.execute(f"revoke connect on database {name} from public".encode())
        db.execute("create role outsider login password 'right'")
    try:
        dsn = Plain(make_conninfo(pg_dsn, user="outsider", password="right", passfile="/dev/null"))
        with pytest.raises(DeniedError):
            connect(dsn)
    finally:
        with psycopg.connect(pg_dsn, autocommit=True) as db:
            db.execute("drop role outsider")
