"""How far behind every subscription is, in events and in time, by the statistics of the log's files.

One answer for the metrics, the API and the command line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache

from evermark.delivery.decide.backlog import distance
from evermark.delivery.decide.shards import FIRST
from evermark.delivery.model import BEGINNING, CursorVector, Group, SourcePartition, Subscription
from evermark.delivery.ports import DeliveryStore
from evermark.log.head import HeadStore
from evermark.log.read import FileRange

Heads = Mapping[SourcePartition, int]
Files = Callable[[str], Sequence[FileRange]]


@dataclass(frozen=True)
class Lag:
    """`events` counts all streams, wanted or not. Where batches were merged into one file, both are estimates."""

    events: int = 0
    oldest: datetime | None = None  # when the first of them happened


@dataclass(frozen=True)
class Account:
    subscription: Subscription
    lag_batches: int
    lag_events: int
    oldest: datetime | None  # when the oldest event happened that it has not got; None: it has all
    waiting: int
    dead: int


def account(store: DeliveryStore, name: str, heads: Heads, files: Files) -> Account:
    return accounts(store, heads, files, [store.subscription(name)])[name]


def accounts(
    store: DeliveryStore, heads: Heads, files: Files, wanted: Iterable[Subscription] | None = None
) -> dict[str, Account]:
    """By name, of all subscriptions unless some are given, in a number of queries that does not grow with them."""
    known = store.subscriptions().values() if wanted is None else wanted
    groups, outside = store.groups(), store.cursors_outside()
    live = {name: group.cursors for group in groups.values() for name in group.members}
    counts, since = store.parked.counts(), store.parked.oldest()
    listed = cache(files)
    lags: dict[object, tuple[Lag, int]] = {}  # by where they stand: nearly all where a group does
    found: dict[str, Account] = {}
    for one in known:
        # A subscription that joined between the two looks stands where its group does.
        cursors = outside[one.name] if one.name in outside else live.get(one.name, groups[FIRST].cursors)
        at = frozenset(cursors.items()) if one.name in outside else id(cursors)
        if at not in lags:
            lags[at] = lag_of(cursors, heads, listed), distance(cursors, heads)
        (lag, batches), parked = lags[at], counts.get(one.name, {})
        oldest = min((moment for moment in (lag.oldest, since.get(one.name)) if moment is not None), default=None)
        waiting, dead = parked.get("waiting", 0), parked.get("dead", 0)
        found[one.name] = Account(one, batches, lag.events, oldest, waiting, dead)
    return found


def durable_heads(heads: HeadStore, sources: Iterable[str]) -> dict[SourcePartition, int]:
    """How far the log may be read, per partition; looked up for all sources at once."""
    wanted = frozenset(sources)
    found = {SourcePartition(*place): head.batch for place, head in heads.load_all().items() if place[0] in wanted}
    return {place: batch for place, batch in found.items() if batch}


def kept_for(
    outside: Mapping[str, CursorVector], files: Mapping[str, Sequence[FileRange]], horizon: datetime
) -> dict[str, int]:
    """Per subscription outside the group: how many events taken before `horizon` the log keeps because of its cursor.

    Subscriptions with none are left out. `files` is by source; whole files count, as in retention.
    """
    kept: dict[str, int] = {}
    for source, some in files.items():
        old = [file for file in some if file.ingested_at_max is not None and file.ingested_at_max < horizon]
        for name, cursors in outside.items():
            rows = sum(
                file.rows
                for file in old
                if any(
                    cursors.get(SourcePartition(source, partition), BEGINNING).batch < file.batch_max
                    for partition in range(file.partition_min, file.partition_max + 1)
                )
            )
            if rows:
                kept[name] = kept.get(name, 0) + rows
    return kept


def least_cursors(groups: Iterable[Group], outside: Mapping[str, CursorVector], source: str) -> dict[int, int]:
    """Per partition of a source, the batch that every reader has passed; 0 where a reader has no cursor."""
    readers = [*(group.cursors for group in groups), *outside.values()]
    places = {place for cursors in readers for place in cursors if place.source == source}
    return {place.partition: min(cursors.get(place, BEGINNING).batch for cursors in readers) for place in places}


def lag_of(cursors: CursorVector, heads: Heads, files: Files) -> Lag:
    """The events between `cursors` and `heads`. A partition without a cursor counts whole."""
    events = 0.0
    moments: list[datetime] = []
    for place, head in heads.items():
        after = cursors.get(place, BEGINNING).batch
        if after >= head:
            continue
        for file in files(place.source):
            mine = file.partition_min <= place.partition <= file.partition_max
            if not mine or file.batch_max <= after or file.batch_min > head:
                continue
            batches = min(file.batch_max, head) - max(file.batch_min, after + 1) + 1
            share = batches / (file.batch_max - file.batch_min + 1)
            events += file.rows * share / (file.partition_max - file.partition_min + 1)
            if (first := _first(file, after)) is not None:
                moments.append(first)
    return Lag(round(events), min(moments, default=None))


def _first(file: FileRange, after: int) -> datetime | None:
    """When the first event after a batch happened, batches taken as evenly spread over the file's time."""
    if file.event_time_min is None or file.event_time_max is None:
        return file.ingested_at_max
    passed = max(0, after + 1 - file.batch_min) / (file.batch_max - file.batch_min + 1)
    return file.event_time_min + (file.event_time_max - file.event_time_min) * passed
