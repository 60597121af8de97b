"""The table of a small log, found by going through its events, is the table that the query finds."""

from __future__ import annotations

import os
import random
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import pyarrow.compute as pc
import pytest

from evermark import Log
from evermark.log import kept_table, small_table
from evermark.log.frames import files_frame
from evermark.log.implied_table import TABLE, implied_tables
from evermark.log.newest_rows import NotPlain
from evermark.log.read import LogReader
from tests.spark.log.test_frames import Filler, change, moved, pg, table
from tests.spark.log.test_kept_table import STREAM, Wanderer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.usefixtures("interpreted")
# How many histories; more in a night: EVERMARK_HISTORIES=2000
HISTORIES = int(os.environ.get("EVERMARK_HISTORIES", "60"))
ONE = "0123456789abcdef00000001"


class Transactions:
    """Records whose keys change, also within a transaction, as a program of ours tells them; and now and then anew."""

    def __init__(self, rng: random.Random, fill: Filler) -> None:
        self._rng, self._fill, self._lsn = rng, fill, 0

    def step(self) -> None:
        rng, events = self._rng, []
        self._lsn += 1
        for _ in range(rng.randint(1, 5)):
            events.append(self._event() | {"tx": str(self._lsn), "position": pg(self._lsn, len(events), ONE)})
        self._fill(*events)

    def _event(self) -> dict[str, Any]:
        rng = self._rng
        key, other = map(str, rng.sample(range(1, 5), 2))
        value = rng.choice(['"a"', '"b"', "1", "2", "true", "null", "1.50", "1.5", "[1]"])
        image = f'{{"id":{key},"v":{value}}}'
        before = rng.choice([f'{{"id":{other}}}', f'{{"id":{other},"v":{value}}}', None, "", "1"])
        kind = rng.random()
        if kind < 0.4:
            lacks: dict[str, Any] = {"flags": ["unknown:v"], "payload": f'{{"id":{key}}}'} if rng.random() < 0.3 else {}
            return moved(other, key, image, before) | lacks
        if kind < 0.5:
            return change("update", key, f'{{"id":{key}}}', flags=["unknown:v"])
        if kind < 0.6:
            return change("delete", key)
        if kind < 0.63:
            return change("truncate", "") | {"key": None}
        if kind < 0.7:
            was = rng.choice([f'{{"id":{key}}}', f'{{"id":{other}}}'])
            return change("update", key, image, before=was, schema_version=1)
        return change(rng.choice(["insert", "update", "read"]), key, image)


def test_a_walk_through_the_events_finds_the_table_of_the_query(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN many random histories, a stream each WHEN their events are gone through THEN there are the tables that one
    query over all of them finds, or it is said that it takes the query: of less than two thirds."""
    seed = random.randrange(10**9)
    rng, fill = random.Random(seed), Filler(tmp_path)
    only = rng.choice([None, 0])  # as a repair asks, which is of one partition
    for number in range(HISTORIES):
        wanderer = rng.choice([Wanderer, Transactions])(rng, cast("Filler", _Renamed(fill, f"s{number}")))
        for _ in range(rng.choice([1, 3, 9])):
            wanderer.step()
    events = small_table._events([file.path for file in LogReader(fill.folder).files()], None, only)
    found: dict[str, list[str]] = {}
    for stream in pc.unique(events["stream"]).to_pylist():
        with suppress(NotPlain):
            told = small_table._table(events.filter(pc.equal(events["stream"], stream)))
            found[stream] = sorted(map(str, told.to_pylist()))
    logged = files_frame(spark, [file.path for file in LogReader(fill.folder).files()])
    asked = "op <> 'poison'" if only is None else f"partition = {only} or op = 'truncate'"
    query = implied_tables(spark, logged.where(asked)).select("stream", *TABLE).toArrow()
    for stream, rows in found.items():
        mine = query.filter(pc.equal(query["stream"], stream)).drop_columns(["stream"])
        assert rows == sorted(map(str, mine.to_pylist())), f"seed {seed}, {stream}"
    assert HISTORIES / 3 <= len(found) < HISTORIES, f"seed {seed}"


class _Renamed:
    def __init__(self, fill: Filler, stream: str) -> None:
        self._fill, self._stream = fill, stream

    def __call__(self, *events: dict[str, Any], partition: int = 0) -> None:
        self._fill(*(event | {"stream": self._stream} for event in events), partition=partition)


def test_keys_that_were_swapped_or_left_and_truncates_need_no_query(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a small log with changed keys, a truncate and a left-out value WHEN its table is asked for THEN it is
    right, and no query was made; WHEN its values are more than may be held THEN the query finds the same."""
    fill = Filler(tmp_path)
    fill(change("insert", "0", '{"id":0}'), change("truncate", "") | {"key": None})
    fill(change("insert", "1", '{"id":1,"t":"large"}', tx="1"), change("insert", "2", '{"id":2,"t":"x"}', tx="1"))
    # Keys swapped in one transaction, where constraints are deferred.
    fill(
        moved("1", "2", '{"id":2,"t":"large"}', '{"id":1,"t":"large"}', tx="2"),
        moved("2", "1", '{"id":1,"t":"x"}', '{"id":2,"t":"x"}', tx="2"),
        change("update", "2", '{"id":2}', flags=["unknown:t"], tx="2"),
    )
    fill(change("insert", "3", '{"id":3}'), moved("3", "4", '{"id":4}'), change("delete", "4"))
    wanted = {"1": '{"id":1,"t":"x"}', "2": '{"id":2,"t":"large"}'}
    with monkeypatch.context() as patch:
        patch.setattr(kept_table, "implied_table", None)
        assert table(Log(tmp_path).table(spark, "shop", STREAM)) == wanted
    monkeypatch.setattr(small_table, "VALUES_BYTES_MAX", 40)
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == wanted
