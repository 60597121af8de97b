"""`evermark.Log`: the events, and the table they imply, as Spark sees them."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from evermark import Log
from evermark.errors import ConfigError, NotFoundError
from evermark.event import taken_batch
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.care import Care
from evermark.log.write import BatchWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


class Filler:
    """Commits one batch per call; each event is an hour younger than the one before."""

    def __init__(self, path: Path, source: str = "shop") -> None:
        self.folder = path / source
        self._source = source
        self._log = DeltaLog(self.folder)
        self._batches: dict[int, int] = {}
        self._events = 0

    def __call__(self, *events: Mapping[str, Any], partition: int = 0, prefix: str = "") -> None:
        batch = self._batches[partition] = self._batches.get(partition, 0) + 1
        rows = []
        for event in events:
            at = NOON + timedelta(hours=self._events)
            defaults = {"stream": "public.orders", "op": "insert", "event_time": at, "key": None, "payload": None}
            named = {"event_id": f"{self._source}-{self._events}", "position": f"{prefix}{self._events:06}"}
            rows.append({**defaults, **named, **event})
            self._events += 1
        columns: dict[str, object] = {name: [row[name] for row in rows] for name in rows[0]}
        file = BatchWriter(self.folder, self._source, partition, batch).write_all([taken_batch(columns, len(rows))])
        assert file is not None
        self._log.commit(Append(partition, batch, 1, "", "", (file,)))


@pytest.fixture
def fill(tmp_path: Path) -> Filler:
    return Filler(tmp_path)


def found(frame: DataFrame) -> list[str]:
    return sorted(row["event_id"] for row in frame.select("event_id").collect())


def table(frame: DataFrame) -> dict[str | None, str]:
    rows = frame.select("key", "payload").collect()
    assert len(rows) == len({row["key"] for row in rows})
    return {row["key"]: row["payload"] for row in rows}


def change(op: str, key: str, payload: str | None = None, **more: Any) -> dict[str, Any]:
    return {"op": op, "key": key, "payload": payload, **more}


def test_reading_by_everything_there_is(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """Source, stream, time, batches and predicate, alone and together."""
    fill({}, {"stream": "public.users"})
    fill({"payload": '{"total": 5}'}, {"payload": '{"total": 500}'})
    Filler(tmp_path, "other")({})
    log = Log(tmp_path)
    assert log.sources() == ["other", "shop"]
    assert found(log.read(spark)) == ["other-0", "shop-0", "shop-1", "shop-2", "shop-3"]
    assert found(log.read(spark, source="shop", stream="public.users")) == ["shop-1"]
    assert found(log.read(spark, "shop", since="2026-11-01T13:00Z")) == ["shop-1", "shop-2", "shop-3"]
    assert found(log.read(spark, "shop", since="2026-11-01T15:00+02:00", until="2026-11-01 15:00")) == [
        "shop-1",
        "shop-2",
    ]
    assert found(log.read(spark, "shop", batches=(2, 2))) == ["shop-2", "shop-3"]
    assert found(log.read(spark, "shop", where="data.total > 100")) == ["shop-3"]
    assert log.read(spark, "shop", where="data.total > 100").columns == log.read(spark).columns
    assert found(log.read(spark, "shop", since="2030-01-01")) == []
    with pytest.raises(NotFoundError, match="it has other, shop"):
        log.read(spark, source="sop")
    with pytest.raises(ConfigError, match="is not a time"):
        log.read(spark, since="yesterday")


def test_the_table_the_log_implies(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """The newest image of each key; deleted keys are gone, and come back when inserted again."""
    fill(change("read", "1", "a"), change("read", "2", "b"), change("read", "3", "c"))
    fill(change("update", "1", "a2"), change("delete", "2"), change("insert", "4", "d"))
    fill(change("delete", "3"), change("insert", "3", "c2"), change("schema", "1", "x"), change("message", "9", "m"))
    log = Log(tmp_path)
    assert table(log.table(spark, "shop", "public.orders")) == {"1": "a2", "3": "c2", "4": "d"}
    assert table(log.table(spark, "shop", "public.orders", as_of="2026-11-01T15:00Z")) == {
        "1": "a2",
        "2": "b",
        "3": "c",
    }
    assert table(log.table(spark, "shop", "public.none")) == {}


def test_a_truncate_ends_what_was_before_it(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """Also within one batch, and only from the moment it happened."""
    fill(change("insert", "1", "a"))
    fill(change("insert", "2", "b"), change("truncate", ""), change("insert", "3", "c"))
    log = Log(tmp_path)
    assert table(log.table(spark, "shop", "public.orders")) == {"3": "c"}
    assert table(log.table(spark, "shop", "public.orders", as_of="2026-11-01T13:00Z")) == {"1": "a", "2": "b"}


def test_the_table_follows_batches_and_not_positions_of_two_incarnations(
    spark: SparkSession, tmp_path: Path, fill: Filler
) -> None:
    """A restored source may count from lower positions: what was taken later is newer."""
    fill(change("insert", "1", "old"), prefix="b:")
    fill(change("update", "1", "new"), prefix="a:")
    fill(change("truncate", ""), change("insert", "2", "x"), prefix="0:")
    log = Log(tmp_path)
    assert table(log.table(spark, "shop", "public.orders", as_of="2026-11-01T13:00Z")) == {"1": "new"}
    assert table(log.table(spark, "shop", "public.orders")) == {"2": "x"}


def test_rows_without_key_or_time_are_rows(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """A table without a key keeps all its rows; a copied row without a time counts from when it was taken."""
    fill({"payload": "a"}, {"payload": "b"}, change("read", "1", "c", event_time=None))
    now = Log(tmp_path).table(spark, "shop", "public.orders")
    assert sorted(row["payload"] for row in now.collect()) == ["a", "b", "c"]
    later = Log(tmp_path).table(spark, "shop", "public.orders", as_of="2200-01-01")
    assert sorted(row["payload"] for row in later.collect()) == ["a", "b", "c"]


def test_the_table_is_the_same_after_compaction(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """Neither rows nor their order depend on the files they lie in."""
    for i in range(40):
        fill(change("update", str(i % 7), f"v{i}"))
    log = Log(tmp_path)
    before = table(log.table(spark, "shop", "public.orders"))
    assert Care(fill.folder).run().compacted == 40
    assert table(log.table(spark, "shop", "public.orders")) == before
    assert before["6"] == "v34"
