"""An outbox as version 2 installed it. `outbox_v2/` holds its statements as they were; they do not change any more."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psycopg

V2 = Path(__file__).parent / "outbox_v2"


def install_v2(db: psycopg.Connection[Any], slot: str, publication: str, *tables: str) -> None:
    """On an autocommit connection."""
    words = {
        "@schema@": '"pgstream"',
        "@schema_name@": "pgstream",
        "@publication@": f'"{publication}"',
        "@publication_literal@": f"'{publication}'",
        "@slot_literal@": f"'{slot}'",
        "@version@": "2",
        "@row_filter_text@": "",
    }
    for script in sorted(V2.glob("*.sql")):
        text = script.read_text()
        for word, value in words.items():
            text = text.replace(word, value)
        db.execute(text.encode())
    for table in tables:
        db.execute("select pgstream.watch(%s::text::regclass)", (table,))
