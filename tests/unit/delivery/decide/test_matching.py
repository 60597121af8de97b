"""D11: streams and operations, where a subscription has no predicate. The task finds these without Spark."""

from __future__ import annotations

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from evermark.delivery.decide.matching import expanded
from evermark.event import UNDELIVERED_OPS, Op
from evermark.testing.contracts.scene import spec

STREAMS = ("public.orders", "public.users", "public.carts")
OPS = tuple(op.value for op in Op)
events = st.lists(st.tuples(st.sampled_from(STREAMS), st.sampled_from(OPS)), max_size=20)
wishes = st.lists(
    st.tuples(
        st.lists(st.sampled_from(STREAMS), unique=True, max_size=2),
        st.lists(st.sampled_from([op for op in OPS if Op(op) not in UNDELIVERED_OPS]), unique=True, max_size=2),
    ),
    min_size=1,
    max_size=4,
)


@given(events, wishes)
def test_d11_an_event_goes_to_whoever_named_its_stream_and_operation(
    rows: list[tuple[str, str]], asked: list[tuple[list[str], list[str]]]
) -> None:
    """GIVEN any events and wishes WHEN matched THEN each pair is there once, in log order; none named means all."""
    specs = [spec(f"s{n}", streams=tuple(streams), ops=tuple(ops)) for n, (streams, ops) in enumerate(asked)]
    streams = pa.chunked_array([pa.array([stream for stream, _ in rows], pa.string())])
    ops = pa.chunked_array([pa.array([op for _, op in rows], pa.string())])
    of, whose = expanded(streams, ops, specs)
    expected = [
        (row, number)
        for row, (stream, op) in enumerate(rows)
        for number, one in enumerate(specs)
        if (not one.streams or stream in one.streams) and (not one.ops or op in one.ops)
        if Op(op) not in UNDELIVERED_OPS
    ]
    assert list(zip(of.tolist(), whose.tolist(), strict=True)) == expected
