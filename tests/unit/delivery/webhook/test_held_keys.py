"""What is parked holds back later events of its key, and no other (D10). Two streams may use the same keys."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa

from evermark.delivery.model import SourcePartition
from evermark.delivery.run.post import held_lines, now_held
from evermark.testing.contracts.scene import P0, P1, event, spec
from tests.contract.webhook.webhook_receiver import events


def _rows(stream: str, keys: int = 2) -> pa.RecordBatch:
    return events(4, stream=stream, keys=keys).combine_chunks().to_batches()[0]


def test_d10_the_same_key_of_another_stream_is_not_held_back() -> None:
    """GIVEN order 1 parked WHEN user 1 comes next THEN it is sent: it is another record."""
    waiting = {(P0, "public.orders", "1"): 3, (P0, "public.orders", "7"): 1, (P1, "public.orders", "0"): 1}
    assert held_lines(_rows("public.orders"), waiting) == {("shop", "public.orders", "1"): 3}
    assert held_lines(_rows("public.users"), waiting) == {}
    assert held_lines(_rows("public.orders"), {}) == {}


def test_d10_a_change_of_a_key_is_held_back_by_either_key() -> None:
    """GIVEN a key that is parked WHEN a record leaves it THEN that line is found, as is that of the key it gets."""
    rows = _rows("public.orders")
    at = rows.schema.get_field_index("previous_key")
    rows = rows.set_column(at, rows.schema.field(at), pa.array([None, "9", None, None], pa.string()))
    waiting = {(P0, "public.orders", "9"): 2, (P0, "public.orders", "1"): 3, (P0, "public.orders", "8"): 1}
    assert held_lines(rows, waiting) == {("shop", "public.orders", "9"): 2, ("shop", "public.orders", "1"): 3}
    moved = replace(event(1, key="1"), previous_key="9")
    assert now_held(spec("a", ordered=True), [moved]) == {(P0, "orders", "1"): 1, (P0, "orders", "9"): 1}


def test_d10_what_a_chunk_parks_is_counted_by_key() -> None:
    """GIVEN events that were parked WHEN the next chunk comes THEN each key waits, with how many; only if ordered."""
    other, keyless = event(3, key="1", stream="users"), event(4)
    parked = [
        event(1, key="1"),
        event(2, key="1"),
        other,
        keyless,
        replace(event(5, key="1"), place=SourcePartition("crm", 0)),
    ]
    assert now_held(spec("a", ordered=True), parked) == {
        (P0, "orders", "1"): 2,
        (P0, "users", "1"): 1,
        (SourcePartition("crm", 0), "orders", "1"): 1,
    }
    assert not now_held(spec("a"), parked)
