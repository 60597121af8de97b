"""What the tests of MongoDB sources share: a source over a database, and its rows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from evermark.event import TAKEN
from evermark.secrets import Plain
from evermark.sources.base import Limit
from evermark.sources.mongo.source import MongoChanges
from evermark.sources.mongo.target import MongoTarget
from evermark.testing.mongods import MongoReplicaSet
from evermark.testing.until import until

IMAGES: Mapping[str, Any] = {"changeStreamPreAndPostImages": {"enabled": True}}
WAIT_S = 60.0

Row = dict[str, Any]


@contextmanager
def source_of(servers: MongoReplicaSet, database: str | None, **more: Any) -> Iterator[MongoChanges]:
    # A test may take its time: it is not far behind then, unless it says so.
    source = MongoChanges(MongoTarget(Plain(servers.url), database, **{"far_s": 3600, **more}))
    try:
        yield source
    finally:
        source.close()


def read_all(source: MongoChanges, partition: int, start: str) -> tuple[list[Row], str]:
    """All there is to take from `start` on by asking, and where it ends."""
    rows: list[Row] = []
    while True:
        end = source.latest({partition: start}, Limit(wait_s=0.3))[partition]
        if end == start:
            return rows, end
        for piece in source.slices(partition, start, end):
            rows += pa.Table.from_batches(source.read(piece), TAKEN).to_pylist()
        start = end


def fed(source: MongoChanges, starts: Mapping[int, str], count: int) -> tuple[dict[int, list[Row]], dict[int, str]]:
    """The first `count` rows, or more, that feeds from these positions on give, and where each partition ends."""
    feeds = {partition: source.follow(partition, start, lambda: None) for partition, start in starts.items()}
    rows: dict[int, list[Row]] = {partition: [] for partition in starts}
    ends = dict(starts)

    def enough() -> bool:
        for partition, feed in feeds.items():
            some = feed.next()
            if some is not None:
                rows[partition] += pa.Table.from_batches(some.batches(), TAKEN).to_pylist()
                ends[partition] = some.end()
        return sum(map(len, rows.values())) >= count

    try:
        until(enough, f"{count} rows come", timeout_s=WAIT_S)
    finally:
        for feed in feeds.values():
            feed.close()
    return rows, ends


def told(row: Row) -> tuple[str, str | None, Any]:
    """Operation, key and payload, for a look at what happened."""
    return row["op"], row["key"], json.loads(row["payload"]) if row["payload"] else None
