"""Which subscription wants which event, by stream and operation alone: for subscriptions without a predicate. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from evermark.delivery.base import SubscriptionSpec
from evermark.predicate import wanted_ops

I64 = npt.NDArray[np.int64]


def expanded(
    streams: pa.ChunkedArray,
    ops: pa.ChunkedArray,
    specs: Sequence[SubscriptionSpec],
    among: Mapping[int, frozenset[str]] | None = None,
) -> tuple[I64, I64]:
    """For each pair of an event and a subscription that wants it, in the order of the events: the event's row, and the
    number of the subscription. There are few pairs of stream and operation, however many events there are.
    `among`: by number, the streams of bots, which get no events of other streams.
    """
    rows = len(streams)
    if not rows:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    (stream_codes, stream_names), (op_codes, op_names) = _codes(streams), _codes(ops)
    pairs, which = np.unique(stream_codes * len(op_names) + op_codes, return_inverse=True)
    takers = [
        _takers(stream_names[pair // len(op_names)], op_names[pair % len(op_names)], specs, among or {})
        for pair in pairs
    ]
    counts = np.array([len(some) for some in takers])[which]
    starts = np.concatenate([[0], np.cumsum([len(some) for some in takers])[:-1]])[which]
    of = np.repeat(np.arange(rows), counts)
    nth = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    flat = np.concatenate([np.array(some, np.int64) for some in takers])
    return of, flat[np.repeat(starts, counts) + nth]


def _codes(column: pa.ChunkedArray) -> tuple[I64, list[str]]:
    encoded = column.combine_chunks().fill_null("").dictionary_encode()
    return encoded.indices.to_numpy().astype(np.int64), encoded.dictionary.to_pylist()


def _takers(stream: str, op: str, specs: Sequence[SubscriptionSpec], among: Mapping[int, frozenset[str]]) -> list[int]:
    return [
        number
        for number, spec in enumerate(specs)
        if (not spec.streams or stream in spec.streams) and op in wanted_ops(spec.ops)
        if number not in among or stream in among[number]
    ]
