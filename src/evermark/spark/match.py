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


def wanted_by(frame: DataFrame, spec: SubscriptionSpec, more: str | None = None) -> tuple[DataFrame, str]:
    """The frame, perhaps widened, and the condition by which one subscription wants an event of it.

    `more` is one more predicate that has to hold.
    """
    predicate, and_also = vet(spec.where), vet(more)
    wide, alias = with_paths(frame, [predicate, and_also])
    wanted = match_sql(spec.streams, spec.ops, predicate, alias)
    return wide, f"{wanted} and coalesce({and_also.sql(alias)}, false)" if more else wanted
