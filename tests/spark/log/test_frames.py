"""`evermark.Log`: the events, and the table they imply, as Spark sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest

from evermark import Log
from evermark.errors import ConfigError, FormatError, NotFoundError
from evermark.event import taken_batch
from evermark.log.append import DeltaLog
from evermark.log.base import Append
from evermark.log.frames import frame_of
from evermark.log.maintenance import Maintenance
from evermark.log.opened import PLAYBOOK
from evermark.log.write import BatchWriter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("interpreted")
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
        names = dict.fromkeys(name for row in rows for name in row)
        columns: dict[str, object] = {name: [row.get(name) for row in rows] for name in names}
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


@pytest.mark.parametrize("empty", [0, 1, 2, 3])
def test_a_table_of_several_pieces_keeps_its_rows(spark: SparkSession, empty: int) -> None:
    """GIVEN pieces without rows before others and between them WHEN Spark is given the table THEN it has each row."""
    piece = pa.table({"key": ["a", "b"]})
    rows = pa.concat_tables([*[piece[:0]] * empty, piece, *[piece[:0]] * empty, piece])
    assert sorted(row["key"] for row in frame_of(spark, rows).collect()) == ["a", "a", "b", "b"]


def test_many_files_are_listed_without_a_job(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """GIVEN a session as a person makes it and more files than Spark lists by itself WHEN the log is read THEN no job
    runs before somebody asks for rows, and the session's own setting is as it was."""
    setting = "spark.sql.sources.parallelPartitionDiscovery.threshold"
    spark.conf.set(setting, "3")
    for _ in range(5):
        fill({})
    spark.sparkContext.setJobGroup("reading", "the log is read")
    try:
        frame = Log(tmp_path).read(spark)
        assert list(spark.sparkContext.statusTracker().getJobIdsForGroup("reading")) == []
        assert frame.count() == 5
        assert len(spark.sparkContext.statusTracker().getJobIdsForGroup("reading")) > 0
        assert spark.conf.get(setting) == "3"
    finally:
        spark.conf.unset(setting)
        spark.sparkContext.setLocalProperty("spark.jobGroup.id", None)


def test_a_file_that_is_missing_is_named_with_what_to_do(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """GIVEN a file of the log that is missing WHEN something is read that needs it THEN the file and the remedy are
    told, and not Spark's own words; what does not need it is read."""
    for n in range(3):
        fill(change("insert", str(n), "x"))
    log = Log(tmp_path)
    victim = Path(sorted(log.files(), key=lambda file: file.batch_min)[1].path)
    victim.unlink()
    asked: list[Callable[[], DataFrame]] = [
        lambda: log.read(spark),
        lambda: log.read(spark, "shop", batches=(2, 3), where="op = 'insert'"),
        lambda: log.table(spark, "shop", "public.orders"),
        lambda: log.table(spark, "shop", "public.orders", as_of="2026-11-01T12:30Z"),
    ]
    for ask in asked:
        with pytest.raises(FormatError, match=rf"the file {victim} of the log is missing") as lost:
            ask()
        assert lost.value.hint.endswith(PLAYBOOK)
    assert found(log.read(spark, batches=(3, 3))) == ["shop-2"]


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
    assert Maintenance(fill.folder).run().compacted == 40
    assert table(log.table(spark, "shop", "public.orders")) == before
    assert before["6"] == "v34"


def pg(lsn: int, ordinal: int = 0, history: str = "0123456789abcdef00000001") -> str:
    """A position of a Postgres event."""
    return f"{history}:{lsn:016x}:{ordinal:08x}"


def moved(previous: str, key: str, payload: str, before: str | None = None, **more: Any) -> dict[str, Any]:
    """A change of the key."""
    return change("update", key, payload, previous_key=previous, before=before, **more)


def implied(spark: SparkSession, path: Path, as_of: str | None = None) -> dict[str | None, str]:
    return table(Log(path).table(spark, "shop", "public.orders", as_of=as_of))


def test_a_changed_key_leaves_no_ghost(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """GIVEN records whose keys change WHEN the table is asked for THEN each is there once, now and as of any time."""
    fill(change("insert", "1", "a"), change("insert", "2", "b"))
    fill(moved("1", "3", "a3"))
    fill(moved("3", "4", "a4"), change("delete", "2"))
    fill(change("insert", "1", "new"))  # a key that is free is used again
    fill(change("delete", "4"))
    now = "2026-11-01T{}:00Z"
    assert implied(spark, tmp_path) == {"1": "new"}
    assert implied(spark, tmp_path, now.format(13)) == {"1": "a", "2": "b"}
    assert implied(spark, tmp_path, now.format(14)) == {"2": "b", "3": "a3"}
    assert implied(spark, tmp_path, now.format(16)) == {"4": "a4"}
    assert implied(spark, tmp_path, now.format(17)) == {"4": "a4", "1": "new"}


def test_keys_swapped_in_one_transaction_are_swapped(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """By a key in between; and at once, where a constraint is checked only when the transaction ends."""
    fill(change("insert", "1", "a"), change("insert", "2", "b"))
    fill(moved("1", "t", "a", "a", tx="7"), moved("2", "1", "b", "b", tx="7"), moved("t", "2", "a", "a", tx="7"))
    assert implied(spark, tmp_path) == {"1": "b", "2": "a"}
    fill(moved("1", "2", "b2", "b", tx="8"), moved("2", "1", "a1", "a", tx="8"))
    assert implied(spark, tmp_path) == {"1": "a1", "2": "b2"}
    # AND a whole table renumbered, twice
    for tx, first, second, third in (("9", "1", "2", "3"), ("10", "2", "3", "4")):
        fill(moved(first, second, "a1", "a1", tx=tx), moved(second, third, "b2", "b2", tx=tx))
    assert implied(spark, tmp_path) == {"3": "a1", "4": "b2"}
    # AND a source that gives no images from before is believed in the order it gives
    fill(change("insert", "5", "c", tx="11"), moved("5", "6", "c6", tx="11"))
    assert implied(spark, tmp_path) == {"3": "a1", "4": "b2", "6": "c6"}


def test_a_truncate_ends_changed_keys_too(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """Before it both keys are gone; what comes after it stays."""
    fill(change("insert", "1", "a"), change("insert", "2", "b"))
    fill(moved("1", "3", "a3"), change("truncate", ""), change("insert", "1", "c"), moved("1", "5", "c5"))
    assert implied(spark, tmp_path) == {"5": "c5"}


def test_a_key_that_moves_between_slots_leaves_no_ghost(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """GIVEN a long transaction that began early and two partitions WHEN it takes a key away THEN its commit counts."""
    late = NOON + timedelta(days=9)
    fill(change("insert", "1", "a", position=pg(10)), partition=0)
    fill(change("update", "1", "b", position=pg(20), event_time=late), partition=0)
    fill(moved("1", "2", "b", position=pg(30), event_time=NOON), partition=1)
    assert implied(spark, tmp_path) == {"2": "b"}
    # AND a swap in one transaction, whose events stand in both
    fill(change("insert", "3", "c", position=pg(40)), partition=0)
    swap = [
        moved("2", "t", "b", event_id="x1", position=pg(50, 0)),
        moved("3", "2", "c", event_id="x2", position=pg(50)),
    ]
    fill(swap[0], moved("t", "3", "b", event_id="x3", position=pg(50, 1)), partition=1)
    fill(swap[1], partition=0)
    assert implied(spark, tmp_path) == {"2": "c", "3": "b"}
    # AND a truncate, which is in one partition, ends what is in both
    fill(change("truncate", "", position=pg(60)), partition=1)
    fill(change("insert", "9", "z", position=pg(70)), partition=0)
    assert implied(spark, tmp_path) == {"9": "z"}


def captured(key: str, payload: str, before: str, **more: Any) -> dict[str, Any]:
    """An update as the trigger wrote it before it knew `previous_key`."""
    return change("update", key, payload, before=before, schema_version=1, **more)


@pytest.mark.parametrize(
    ("old_key", "key", "before", "payload", "proven"),
    [
        ("1", "2", '{"id": 1, "n": 5}', '{"id": 2, "n": 5}', True),
        ("a", "b", '{"id": "a", "n": null}', '{"id": "b", "n": null}', True),
        ("1", "2", '{"id": 1, "same": "1"}', '{"id": 2, "same": "2"}', True),  # both columns agree on what was before
        ("1", "2", '{"id": 1, "n": 2}', '{"id": 2, "n": 2}', False),  # either may be the key
        ("2", "2", '{"id": 2, "n": 1}', '{"id": 2, "n": 2}', False),
        ("1.50", "2.50", '{"id": 1.50}', '{"id": 2.50}', False),
        (
            '{"nth": 1, "shop": "é\\"q"}',
            '{"nth": 2, "shop": "é\\"q"}',
            '{"v": 0, "nth": 1, "shop": "é\\"q"}',
            '{"v": 0, "nth": 2, "shop": "é\\"q"}',
            True,
        ),
        # A text that looks like the object of two columns: either may be the key.
        (
            "old",
            '{"a": 1, "b": 2}',
            '{"id": "old", "a": 1, "b": 2}',
            '{"id": "{\\"a\\": 1, \\"b\\": 2}", "a": 1, "b": 2}',
            False,
        ),
    ],
)
def test_an_older_change_of_a_key_is_concluded_where_it_is_proven(
    spark: SparkSession, tmp_path: Path, fill: Filler, old_key: str, key: str, before: str, payload: str, proven: bool
) -> None:
    """GIVEN a log from before `previous_key` WHEN images prove the old key THEN it is gone; else nothing is guessed."""
    fill(change("insert", old_key, before, position=pg(1)), change("insert", "other", "{}", position=pg(2)))
    fill(captured(key, payload, before, position=pg(3)))
    expected = {"other", key} | (set() if proven else {old_key})
    assert implied(spark, tmp_path).keys() == expected


def test_nothing_is_concluded_of_what_no_trigger_of_ours_wrote(
    spark: SparkSession, tmp_path: Path, fill: Filler
) -> None:
    """A source of your own may make its keys of anything."""
    fill(change("insert", "1", '{"id": 1}'))
    fill(captured("2", '{"id": 2}', '{"id": 1}'))
    assert implied(spark, tmp_path).keys() == {"1", "2"}


def test_a_filter_may_ask_for_the_key_that_was_left(spark: SparkSession, tmp_path: Path, fill: Filler) -> None:
    """GIVEN a record that leaves a key WHEN that key is asked for THEN its leaving is found, and nothing else is."""
    fill(change("insert", "1", "{}"), moved("1", "2", "{}"), change("update", "2", "{}"))
    assert found(Log(tmp_path).read(spark, where="key = '1' or previous_key = '1'")) == ["shop-0", "shop-1"]
    assert found(Log(tmp_path).read(spark, where="previous_key is not null")) == ["shop-1"]
