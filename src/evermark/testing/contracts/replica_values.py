"""What every store of replicated tables promises of values, columns and keys."""

from __future__ import annotations

import json
import math
import random
import struct

import pytest

from evermark.errors import (
    FormatError,
    SetupError,
)
from evermark.replicas.diff import differences
from evermark.replicas.sqlite import SqliteStore
from evermark.testing.contracts.replica_scene import (
    Direct,
    Make,
    ReplicaContract,
    ReplicaNode,
)


class ReplicaValuesContract(ReplicaContract):
    def test_values_of_every_kind_come_back_as_they_were(self, make: Make) -> None:
        """GIVEN values of every kind WHEN replicated THEN they are the same, down to the last digit."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.install()
        a.sql("insert into orders (id, what, amount, ok) values (1, 'ü''\"\\|\n', 0.1, true)")
        a.sql("insert into orders (id, what, amount, ok) values (-9223372036854775808, '', 1e300, false)")
        b.meet(a)
        assert b.rows() == a.rows()
        assert sorted(b.sql("select id, what, amount, ok from orders")) == sorted(
            a.sql("select id, what, amount, ok from orders")
        )

    @pytest.mark.parametrize("by", ["events", "snapshot"])
    def test_reals_are_the_same_to_the_last_bit(self, make: Make, by: str) -> None:
        """GIVEN reals of every size, and infinity WHEN they come by events or a snapshot THEN none has changed."""
        a, b = make("a"), make("b")
        chance = random.Random(5)
        values = [math.inf, -math.inf, 0.0, 5e-324, 1.7976931348623157e308]
        while len(values) < 400:
            made = struct.unpack("d", chance.randbytes(8))[0]
            values += [] if math.isnan(made) else [made, chance.random()]
        for node in (a, b):
            if by == "events":
                node.install()
        for key, value in enumerate(values):
            a.sql("insert into orders (id, amount) values (?, ?)", key, value)
        if by == "snapshot":
            for node in (a, b):
                node.install()
        assert b.meet(a).snapshots == (1 if by == "snapshot" else 0)
        assert [row[0] for row in b.sql("select amount from orders order by id")] == values
        assert differences(a.replica.node, Direct("a", b.replica), "orders") == ([], True)

    def test_a_column_is_added_on_both_sides(self, make: Make) -> None:
        """GIVEN events from before a column was replicated WHEN it is on both sides THEN a late peer takes a snapshot,
        another process that has the store open knows the column, and changes go on."""
        a, b, late = (make(name) for name in ("a", "b", "late"))
        for node in (a, b):
            node.install(columns=["id", "what"])
        a.put(1, "before")
        a.meet(b)
        a.put(2, "not sent yet")
        assert a.store.left_out("orders") == ["amount", "ok", "raw"]
        for node in (a, b, late):
            node.install(columns=["id", "what", "amount"])
        a.sql("update orders set amount = 2.5 where id = 1")
        assert b.meet(a).snapshots == 1 and late.meet(a).snapshots == 1
        assert a.rows() == b.rows() == late.rows() == [("1", "before", "2.5"), ("2", "not sent yet", None)]
        a.put(3, "after")
        assert b.meet(a).taken == 1

    def test_a_form_that_another_process_changed_is_seen(self, node: ReplicaNode) -> None:
        """GIVEN a node that has read its tables WHEN another process changes their forms THEN it knows at once."""
        assert "raw" in node.store.tables()["orders"].columns
        form = json.dumps({"columns": {"id": "integer", "what": "text"}, "key": ["id"]})
        node.sql("update replication_tables set form = ?", form)
        assert list(node.store.tables()["orders"].columns) == ["id", "what"]

    def test_tables_of_many_columns_are_replicated(self, make: Make) -> None:
        """GIVEN a table of 200 columns WHEN a row changes THEN the peer has all of them."""
        a, b = make("a"), make("b")
        columns = ", ".join(f"c{at} text" for at in range(199))
        for node in (a, b):
            node.sql(f"create table wide (id bigint primary key, {columns})")
            node.install("wide")
        a.sql("insert into wide (id, c0, c58, c59, c60, c198) values (1, '{', '}', '{}', '}{', ?)", '"}')
        b.meet(a)
        assert b.rows("wide") == a.rows("wide") and b.rows("wide")[0][59:62] == ("}", "{}", "}{")

    def test_a_key_that_is_equal_to_other_texts_is_refused(self, make: Make) -> None:
        """GIVEN a key whose equality is not that of its bytes WHEN it is to be replicated THEN that is refused."""
        node = make("a")
        kinds = ["", "text collate nocase"] if isinstance(node.store, SqliteStore) else ["char(10)"]
        for at, kind in enumerate(kinds):
            node.sql(f"create table odd{at} (id {kind} primary key, what text)")
            with pytest.raises(SetupError, match=f"odd{at}.id: keys that are equal"):
                node.install(f"odd{at}")

    def test_a_record_that_is_no_key_is_refused(self, node: ReplicaNode) -> None:
        """GIVEN a delete of a row that cannot be WHEN it comes from a peer THEN it is refused, whatever it says."""
        for record in ("abc", "007", "1|2", ""):
            with pytest.raises(FormatError, match="orders"):
                node.store.tables()["orders"].checked_record(record)
        assert node.store.tables()["orders"].checked_record("-7") == "-7"

    def test_keys_of_several_columns_are_replicated(self, make: Make) -> None:
        """GIVEN a key of two columns, with separators in them WHEN rows change THEN both nodes have the same."""
        a, b = make("a"), make("b")
        for node in (a, b):
            node.sql("create table parts (one text, two bigint, n bigint, primary key (one, two))")
            node.install("parts")
        for one in ("x|", "x", "\\|", ""):
            a.sql("insert into parts values (?, 1, 2)", one)
        a.sql("update parts set n = 3 where one = 'x|'")
        a.sql("delete from parts where one = 'x'")
        b.meet(a)
        assert sorted(b.sql("select * from parts")) == [("", 1, 2), ("\\|", 1, 2), ("x|", 1, 3)]
        assert differences(a.replica.node, Direct("a", b.replica), "parts") == ([], True)
