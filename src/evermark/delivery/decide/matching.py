"""Which subscription wants which event, without Spark: by stream and operation, and by predicates that mean the same
here as in Spark. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from evermark.delivery.model import SubscriptionSpec
from evermark.errors import ConfigError
from evermark.predicate import vetted, wanted_ops
from evermark.predicate.index import Filter
from evermark.predicate.matcher import Matcher, Wanted, matcher_of
from evermark.predicate.vectors import WORK_MAX

I64 = npt.NDArray[np.int64]

_KEPT_MAX = 8
# For so many subscriptions a matcher is made anew for each batch.
_FEW = 32

Asked = tuple[tuple[str, ...], tuple[str, ...], str | None]


def has_exact_steps(where: str | None) -> bool:
    """Whether there is a predicate, and it means the same without Spark."""
    try:
        return bool(where) and vetted(where).exact is not None
    except ConfigError:  # an earlier version took it: Spark's side says what becomes of it
        return False


def needs_spark(spec: SubscriptionSpec) -> bool:
    return bool(spec.where) and not has_exact_steps(spec.where)


def wanted_by(rows: pa.Table | pa.RecordBatch, specs: Sequence[SubscriptionSpec], work_max: int = WORK_MAX) -> Wanted:
    """Which of these rows the subscriptions want, whose predicates all have exact steps."""
    asked = tuple((spec.streams, spec.ops, spec.where) for spec in specs)
    return (_kept_matcher if len(asked) > _FEW else _matcher)(asked).wanted(rows, work_max)


def _matcher(asked: tuple[Asked, ...]) -> Matcher:
    return matcher_of([Filter(streams, ops, vetted(where)) for streams, ops, where in asked])


# The live group seldom changes, and its batches are many. Turns of those behind differ each time, and are small.
_kept_matcher = lru_cache(maxsize=_KEPT_MAX)(_matcher)


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
