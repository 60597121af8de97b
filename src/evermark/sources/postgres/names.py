"""The name of a table as SQL writes it, and the stream that its changes go to. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass

BYTES_MAX = 63  # what Postgres keeps of an identifier; a longer one would be another table's
_PART = r'(?:"((?:[^"]|"")+)"|([^".]+))'
_NAMES = re.compile(rf"(?:{_PART}\.)?{_PART}")
_PLAIN = re.compile(r"[a-z_\u0080-\U0010ffff][a-z0-9_$\u0080-\U0010ffff]*")


class TableNameError(ValueError):
    """Not the name of a table. `hint` repeats what was written, `str()` does not: it may stand in a log."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason)
        self.hint = hint


@dataclass(frozen=True)
class TableName:
    """A table, by the names its schema and itself have in the catalog."""

    schema: str
    table: str

    @property
    def sql(self) -> str:
        """As SQL writes it: quoted where it has to be."""
        return f"{_written(self.schema)}.{_written(self.table)}"

    @property
    def stream(self) -> str:
        """What its events call it: never quoted. Two tables may come to the same: a."b.c" and "a.b".c."""
        return f"{self.schema}.{self.table}"


def table_name(text: str) -> TableName:
    """Read a name as SQL does, `orders`, `public.orders`, `public."Orders"`, with one exception: capitals without
    quotes are refused. SQL would read them as small letters, and mean another table than the one a person sees."""
    parts = _split(text)
    names = [name for name, _ in parts]
    if len(names) == 1:
        names = ["public", *names]
    found = TableName(*names)
    for name, quoted in parts:
        if not name.isprintable():
            raise TableNameError("a table's name cannot have control characters")
        if len(name.encode()) > BYTES_MAX:
            raise TableNameError(f"a name in Postgres has at most {BYTES_MAX} bytes")
        if not quoted and name != name.lower():
            small = TableName(found.schema.lower(), found.table.lower())
            raise TableNameError(
                "capitals without quotes mean small letters in SQL: quote the name, or write it small",
                hint=f"{found.sql} is the table with capitals, {small.sql} the one without"
                " (in YAML, put the whole name in single quotes)",
            )
        if not quoted and not _PLAIN.fullmatch(name):
            raise TableNameError("a name like this needs double quotes, as in SQL", hint=f"write {found.sql}")
    return found


def _split(text: str) -> list[tuple[str, bool]]:
    """One or two names, and whether each was quoted."""
    found = _NAMES.fullmatch(text)
    if found is None:
        raise TableNameError('expected a table such as public.orders or public."Orders"')
    names = (found.group(1, 2), found.group(3, 4))
    parts = [(quoted.replace('""', '"'), True) if quoted is not None else (plain, False) for quoted, plain in names]
    return [(name, quoted) for name, quoted in parts if name is not None]


def _written(name: str) -> str:
    return name if _PLAIN.fullmatch(name) and name == name.lower() else '"' + name.replace('"', '""') + '"'
