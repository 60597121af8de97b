"""Which subscription wants which event, in one pass over the rows."""

from __future__ import annotations

from collections.abc import Sequence

from pyspark.sql import DataFrame

from evermark.delivery.base import SubscriptionSpec
from evermark.event import EVENT
from evermark.log.frames import with_paths
from evermark.predicate import match_sql, vet

SUBSCRIPTION = "_subscription"


def matched(frame: DataFrame, specs: Sequence[SubscriptionSpec]) -> DataFrame:
    """One row per (event, subscription that wants it); `_subscription` is the index into `specs`.

    JSON is parsed once and each path extracted once, however many predicates use them.
    """
    predicates = [vet(spec.where) for spec in specs]
    wide, alias = with_paths(frame, predicates)
    wanted = [
        f"if({match_sql(spec.streams, spec.ops, predicate, alias)}, {index}, null)"
        for index, (spec, predicate) in enumerate(zip(specs, predicates, strict=True))
    ]
    return wide.selectExpr(*EVENT.names, f"explode(array_compact(array({', '.join(wanted)}))) as {SUBSCRIPTION}")
