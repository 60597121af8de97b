"""Changes of tables that cannot be read as they should: kept raw, and the stream goes on. Without a server (P3)."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evermark.sources.postgres.lsn import Incarnation, Position, WalPages
from evermark.sources.postgres.read.pgoutput import Relation
from evermark.sources.postgres.tables.catalog import Catalog, TableFacts
from evermark.sources.postgres.tables.rows import TablesDecoder
from evermark.sources.postgres.tables.table import columns_to_hash
from evermark.sources.postgres.tables.values import ValueType
from evermark.sources.postgres.tables.versions import TableVersion

HERE = Incarnation(7, 1)
RELATION = b"R" + struct.pack(">I", 5) + b"public\0t\0d" + struct.pack(">H", 2)
RELATION += b"\1id\0" + struct.pack(">Ii", 25, -1) + b"\0v\0" + struct.pack(">Ii", 25, -1)
BEGIN = b"B" + struct.pack(">QqI", 1000, 0, 9)
COMMIT = b"C\0" + struct.pack(">QQq", 1000, 1008, 0)


class OneTable(Catalog):
    def __init__(self) -> None: ...

    def table(self, relation: Relation) -> TableFacts:
        return TableFacts((ValueType("text"), ValueType("text")), frozenset(), published=True)

    def type_names(self, relation: Relation) -> list[str]:
        return ["text", "text"]


class NoVersions:
    def before(self, position: Position) -> dict[str, TableVersion]:
        return {}

    def keep(self, versions: Any) -> None: ...

    def close(self) -> None: ...


def insert(*values: bytes) -> bytes:
    cells = b"".join(b"t" + struct.pack(">I", len(value)) + value for value in values)
    return b"I" + struct.pack(">I", 5) + b"N" + struct.pack(">H", len(values)) + cells


def decoded(*messages: bytes, hashed: tuple[str, ...] = (), header: bytes = b"") -> list[dict[str, Any]]:
    found = TablesDecoder(
        Position(HERE, 0), Position(HERE, 2000),
        catalog=OneTable(), versions=NoVersions(), hashed={"public.t": hashed}, pages=WalPages(),
    )  # fmt: skip
    whole = [header + each for each in (BEGIN, RELATION, *messages, COMMIT)]
    (batch,) = found.batches(np.array([len(each) for each in whole], np.int64), b"".join(whole), len(header))
    rows: list[dict[str, Any]] = batch.to_pylist()
    return rows


@pytest.mark.parametrize(
    "bad",
    [
        insert(b"2", b"\xff"),
        insert(b"2"),
        insert(b"2", b"b")[:-1],
        insert(b"2", b"b") + b"x",
        b"D" + insert(b"2", b"b")[1:],
    ],
    ids=["no text", "a column less", "cut off", "too long", "no old row"],
)
def test_a_row_that_cannot_be_read_is_poison_and_keeps_its_place(bad: bytes) -> None:
    """With its bytes; the rows before and after it are as they would be without it."""
    rows = decoded(insert(b"1", b"a"), bad, insert(b"3", b"c"))
    assert [row["op"] for row in rows] == ["schema", "insert", "poison", "insert"]
    assert [row["position"][-8:] for row in rows] == ["00000000", "00000001", "00000003", "00000005"]
    assert rows[2]["bytes"] == bad and "reason" in rows[2]["payload"]
    assert [row["flags"] for row in rows] == [[], [], [], []]
    assert [rows[1]["key"], rows[3]["key"]] == ["1", "3"]


@given(row=st.integers(0, 4), at=st.integers(0, 60), byte=st.integers(0, 255), cut=st.integers(0, 20))
def test_a_damaged_row_never_reaches_into_its_neighbours(row: int, at: int, byte: int, cut: int) -> None:
    """Any byte changed, any end cut off: the other rows are read as ever, and the damaged one keeps its place."""
    messages = [insert(str(n).encode(), b"v" * n) for n in range(5)]
    damaged = bytearray(messages[row])
    damaged[5 + at % (len(damaged) - 5)] = byte  # the kind and the table stay
    messages[row] = bytes(damaged[: max(6, len(damaged) - cut)])
    rows = decoded(*messages)
    assert [found["position"][-8:] for found in rows[1:]] == [f"{2 * n + 1:08x}" for n in range(5)]
    good = [(found["key"], found["payload"]) for n, found in enumerate(rows[1:]) if n != row]
    assert good == [(str(n), f'{{"id":"{n}","v":"{"v" * n}"}}') for n in range(5) if n != row]


def test_what_stands_in_front_of_each_message_is_passed_over() -> None:
    """As a replication stream has it: the header of its own message belongs to none of ours."""
    plain = decoded(insert(b"1", b"a"), insert(b"2", b""))
    assert decoded(insert(b"1", b"a"), insert(b"2", b""), header=b"w" * 25) == plain


def test_poison_of_a_table_with_something_to_hide_has_no_bytes() -> None:
    """The bytes would hold what was to be hashed."""
    rows = decoded(insert(b"secret", b"\xff"), hashed=("id",))
    assert [row["op"] for row in rows] == ["schema", "poison"] and rows[1]["bytes"] is None


def test_a_message_of_an_unknown_kind_is_poison() -> None:
    """A newer server may send what we do not know."""
    rows = decoded(insert(b"1", b"a"), b"X12345")
    assert [row["op"] for row in rows] == ["schema", "insert", "poison"]


OLD = ("id", "city", "email", "note")


@pytest.mark.parametrize(
    ("columns", "hidden"),
    [
        (OLD, {"email"}),
        ((*OLD, "zip"), {"email"}),
        (("id", "email", "note"), {"email"}),
        (("id", "city", "email"), {"email"}),
        (("id", "city", "email", "zip"), {"email"}),
        (("id", "city", "mail", "note"), {"email", "mail"}),
        (("id", "city", "mail", "note", "email"), {"email", "mail"}),
        (("id", "email", "city", "note"), {"email", "city"}),
        (("id", "email", "mail", "note"), {"email", "mail"}),
        (("id", "city", "note", "email"), {"email", "note"}),
        (("id", "email", "note", "mail"), {"email", "note", "mail"}),
    ],
)
def test_what_may_be_a_hashed_column_under_another_name_is_hashed(columns: tuple[str, ...], hidden: set[str]) -> None:
    """Columns that are merely added or dropped are not; with nothing to hide, none is."""
    latest = TableVersion("public.t", 1, "", "", OLD, ("email",), ("email",))
    assert columns_to_hash(columns, ["email"], latest) == hidden
    assert columns_to_hash(columns, [], replace(latest, hashed=(), wanted=())) == set()


@pytest.mark.parametrize(
    ("known", "hidden"), [(("email",), {"email", "mail"}), (None, {"email", "mail"}), (("mail", "email"), {"email"})]
)
def test_what_was_hashed_stays_so_until_the_file_says_otherwise(
    known: tuple[str, ...] | None, hidden: set[str]
) -> None:
    """Also where it is not known what the file said before."""
    latest = TableVersion("public.t", 2, "", "", ("id", "mail", "email"), ("email", "mail"), known)
    for columns in (latest.columns, (*latest.columns, "zip")):
        assert columns_to_hash(columns, ["email"], latest) == hidden
