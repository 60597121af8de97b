"""The outbox in the user's database: which versions of it this program knows, and its SQL with the names filled in."""

from __future__ import annotations

from importlib import resources

from evermark.sources.postgres.connect import Link, connect
from evermark.sources.postgres.failures import translated
from evermark.sources.postgres.target import PostgresTarget

SCHEMA_VERSION = 3
SCHEMA_VERSION_READ = 2  # the oldest installed version that is read on as it is, with a warning
# What an event is made of. The rest of its row is for us, in the database.
_PUBLISHED = (
    *("id", "created_at", "stream_id", "stream", "op", "key", "payload", "before", "schema_version", "previous_key"),
)


def script(name: str, target: PostgresTarget, *, role: str = "evermark") -> str:
    text = resources.files("evermark.sources.postgres.sql").joinpath(name).read_text(encoding="utf-8")
    return filled(text, target, role=role)


def filled(text: str, target: PostgresTarget, *, role: str = "evermark") -> str:
    # Names were checked by PostgresTarget: letters, digits and underscores only.
    quoted_role = '"' + role.replace('"', '""') + '"'
    for token, value in (
        ("@schema@", f'"{target.schema}"'),
        ("@schema_name@", target.schema),
        ("@publication@", f'"{target.publication}"'),
        ("@publication_literal@", f"'{target.publication}'"),
        ("@slot_literal@", f"'{target.slot}'"),
        ("@version@", str(SCHEMA_VERSION)),
        ("@published@", ", ".join(f"'{name}'" for name in _PUBLISHED)),
        ("@role@", quoted_role),
        ("@row_filter_text@", target.row_filter.replace("'", "''")),
    ):
        text = text.replace(token, value)
    return text


def schema_there(link: Link, target: PostgresTarget) -> bool:
    found = link.row("select 1 from pg_namespace where nspname = %s", (target.schema,), doing="looking for the schema")
    return found is not None


def installed_version(link: Link, target: PostgresTarget) -> int | None:
    found = link.row(filled("select version from @schema@.meta", target), doing="reading the installed version")
    return int(found[0]) if found else None


def create_publication(link: Link, target: PostgresTarget, *, again: bool = False) -> None:
    """Made if there is none. `again`: what others made of it is undone; only a new slot may read it then."""
    with translated(link.dsn, "creating the publication"):
        link.connection.execute(script("04_publication.sql", target).encode())
        if again:
            link.connection.execute(script("publication_again.sql", target).encode())


def maintain(target: PostgresTarget) -> tuple[int, int, int]:
    """Partitions made for the days ahead, dropped for days past retention, and partitions that have to wait."""
    query = filled("select * from @schema@.maintain(make_interval(secs => %s))", target)
    with connect(target.dsn) as link:
        created, dropped, waiting = link.one(query, (target.events_retention_s,), doing="maintaining partitions")
    return created, dropped, waiting
