"""Why a connection could not be made: what a person must change ends `up`, everything else is waited for."""

from __future__ import annotations

import psycopg
import pytest

from evermark.error_policy import Action, action_for
from evermark.errors import BusyError, ConfigError, DeniedError, EvermarkError, SetupError, UnreachableError
from evermark.sources.postgres.failures import translate, unreachable
from evermark.state.driver_errors import from_driver

DSN = "postgresql://shop:secret@db.example/shop"
_AT = 'connection failed: connection to server at "10.0.0.7", port 5432 failed: '
MAY_COME_BACK = [
    f"{_AT}Connection refused\n\tIs the server running on that host and accepting TCP/IP connections?",
    f"{_AT}No route to host",
    f"{_AT}server closed the connection unexpectedly",
    f"{_AT}FATAL:  the database system is starting up",
    f"{_AT}FATAL:  the database system is shutting down",
    f"{_AT}FATAL:  the database system is not yet accepting connections",
    f"{_AT}FATAL:  the database system is in recovery mode",
    f"{_AT}session is read-only",
    "failed to resolve host 'db.example': [Errno -2] Name or service not known",
    "connection timeout expired",
    'connection is bad: connection to server on socket "/run/.s.PGSQL.5432" failed: No such file or directory',
    f'{_AT}FATAL:  Passwort-Authentifizierung für Benutzer "shop" fehlgeschlagen',
]
FULL = [
    f"{_AT}FATAL:  sorry, too many clients already",
    f"{_AT}FATAL:  remaining connection slots are reserved for roles with the SUPERUSER attribute",
    f'{_AT}FATAL:  too many connections for role "shop"',
]
DENIED = [
    f'{_AT}FATAL:  password authentication failed for user "shop"',
    f'{_AT}FATAL:  no pg_hba.conf entry for host "10.0.0.8", user "shop", database "shop", no encryption',
    f'{_AT}FATAL:  pg_hba.conf rejects connection for host "10.0.0.8", user "shop", database "shop"',
    f"{_AT}fe_sendauth: no password supplied",
    f'{_AT}FATAL:  role "shop" is not permitted to log in',
    f'{_AT}FATAL:  permission denied for database "shop"',
]
NOT_THERE = [
    f'{_AT}FATAL:  database "shop" does not exist',
    f'{_AT}FATAL:  role "shop" does not exist',
]
UNREADABLE = [
    'connection is bad: invalid integer value "x" for connection option "port"',
    "connection is bad: could not match 2 port numbers to 3 hosts",
]
TLS = [
    f"{_AT}server does not support SSL, but SSL was required",
    f"{_AT}SSL error: certificate verify failed",
]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((text, UnreachableError) for text in MAY_COME_BACK),
        *((text, BusyError) for text in FULL),
        *((text, DeniedError) for text in DENIED),
        *((text, SetupError) for text in [*NOT_THERE, *TLS]),
        *((text, ConfigError) for text in UNREADABLE),
    ],
)
def test_a_source_that_may_come_back_is_told_from_one_that_a_person_must_see_to(
    text: str, kind: type[EvermarkError]
) -> None:
    """As libpq says it, without a SQLSTATE: only its words are there."""
    error = unreachable(psycopg.OperationalError(text), DSN)
    assert type(error) is kind
    assert (action_for(error) is Action.RETRY) is (kind in (UnreachableError, BusyError))
    assert "db.example:5432/shop" in error.message and "secret" not in str(error) and error.hint


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        *((text, UnreachableError) for text in MAY_COME_BACK),
        *((text, BusyError) for text in FULL),
        *((text, DeniedError) for text in DENIED),
        *((text, SetupError) for text in NOT_THERE),
        *((text, ConfigError) for text in UNREADABLE),
    ],
)
def test_state_that_may_come_back_is_told_from_state_that_a_person_must_see_to(
    text: str, kind: type[EvermarkError]
) -> None:
    """The same words mean the same for State."""
    error = from_driver(psycopg.OperationalError(text), "state")
    assert type(error) is kind and error.hint


def test_a_server_whose_slots_are_all_in_use_is_tried_again() -> None:
    """Another program's slot may go soon: the three tries of a repair are not spent on that."""
    error = translate(
        psycopg.errors.ConfigurationLimitExceeded("all replication slots are in use"), DSN, "making a slot"
    )
    assert action_for(error) is Action.RETRY
    assert "max_replication_slots" in error.hint
