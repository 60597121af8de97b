"""Rows of a COPY in large numbers: psycopg asks for each by a generator of its own, which costs more than the row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
from psycopg import sql
from psycopg.errors import error_from_result
from psycopg.generators import fetch_many

_SIZE_END = -1


def copied_rows(connection: psycopg.Connection[Any], query: sql.Composed) -> Iterator[list[memoryview]]:
    """The messages of a COPY to stdout, in lists as they come; each message is a row of its text form.

    psycopg begins the COPY, waits, and cancels it if it is left early. What libpq has in its buffer is taken there.
    """
    with connection.cursor().copy(query) as copy:
        pgconn = connection.pgconn
        while first := copy.read():
            rows = [memoryview(first)]
            while (found := pgconn.get_copy_data(1))[0] > 0:
                rows.append(found[1])
            yield rows
            if found[0] == _SIZE_END:
                for result in connection.wait(fetch_many(pgconn)):
                    if result.error_message:
                        raise error_from_result(result, encoding=connection.info.encoding)
                return
