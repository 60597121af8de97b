"""The table that is kept beside the log is the one that all of the log implies, step by step, whatever came."""

from __future__ import annotations

import json
import os
import random
import shutil
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from evermark import Log
from evermark.log import kept_table, maintenance
from evermark.log.forget import Forgotten
from evermark.log.implied_table import implied_table, implied_tables
from evermark.log.kept_shelf import FOLDER, Shelf
from evermark.log.kept_table import KeptTable
from evermark.log.maintenance import Maintenance
from evermark.log.read import LogReader, moment_of
from tests.spark.log.test_frames import NOON, Filler, change, moved, pg, table

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = pytest.mark.usefixtures("interpreted")
STREAM = "public.orders"
# How many histories; more in a night: EVERMARK_HISTORIES=200
HISTORIES = int(os.environ.get("EVERMARK_HISTORIES", "1"))


@pytest.fixture(autouse=True)
def small_logs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_table, "KEPT_FROM_ROWS", 0)


class Wanderer:
    """Events without sense, about few keys: what they mean together is what is asked."""

    def __init__(self, rng: random.Random, fill: Filler) -> None:
        self._rng, self._fill = rng, fill
        self._partitions = rng.choice([1, 1, 2, 3])
        # A stream has updates that tell no key that was left, or updates that lack a value, never both.
        other = rng.choice(["untold", "lacking", "lacking"])
        kinds = [
            ("plain",),
            ("plain", "whole"),
            ("plain", "moved"),
            ("plain", other),
            ("plain", "whole", "moved", other),
        ]
        self._kinds = rng.choice(kinds)
        self._postgres = rng.random() < 0.7
        self._truncates = rng.choice([0.0, 0.0, 0.03])
        self._lsn = 0

    def step(self) -> None:
        # A second partition may come late.
        count = self._partitions if self._lsn else 1
        for partition in range(count):
            if self._rng.random() < 0.8:
                events = [self._event() for _ in range(self._rng.choice([1, 3, 8]))]
                self._fill(*events, partition=partition)

    def _event(self) -> dict[str, Any]:
        rng = self._rng
        self._lsn += rng.choice([0, 1, 1])
        place: dict[str, Any] = {"event_time": NOON + timedelta(hours=rng.randint(0, 20)), "tx": str(self._lsn)}
        place["event_id"] = f"{rng.getrandbits(64):016x}"
        if self._postgres:
            history = rng.choice(["0123456789abcdef00000001"] * 9 + ["0123456789abcdef00000002"])
            place["position"] = pg(self._lsn, rng.getrandbits(31), history)
        else:
            place["position"] = f"{self._lsn:08}{rng.getrandbits(64):016x}"
        if rng.random() < 0.1:
            place["flags"] = [rng.choice(["repaired", "recovered"])]
        if rng.random() < 0.05:
            place["event_time"] = None
        if rng.random() < self._truncates:
            return {**change("truncate", ""), **place, "key": None}
        if rng.random() < 0.1:
            return {**change("insert", "1", "{}"), **place, "stream": "public.other"}
        record = self._record(rng.choice(self._kinds))
        if "lacking" in self._kinds and record["op"] == "update":
            record = self._lacking(record)
            place["flags"] = [*place.get("flags", []), *record["flags"]]
        return {**record, **place}

    def _lacking(self, record: dict[str, Any]) -> dict[str, Any]:
        """Of two large values each may be told, or left out."""
        told = self._rng.sample(["t", "u"], self._rng.randint(0, 2))
        large = {name: [self._rng.randint(1, 99), {"t": 1.10}, 'a,"b"'] for name in told}
        payload = json.dumps({**json.loads(record["payload"]), **large}, separators=(",", ":"))
        return {**record, "payload": payload, "flags": [f"unknown:{name}" for name in "tu" if name not in told]}

    def _record(self, kind: str) -> dict[str, Any]:
        rng = self._rng
        key, other = map(str, rng.sample(range(1, 6), 2))
        image, before = (json.dumps({"id": int(name), "n": rng.randint(1, 2)}) for name in (key, other))
        if kind == "moved" and rng.random() < 0.4:
            return moved(other, key, image, rng.choice([before, None]))
        if kind == "untold" and rng.random() < 0.7:
            was = rng.choice([before, json.dumps({"id": int(key), "n": rng.randint(1, 2)})])
            return change("update", key, image, before=was, schema_version=1)
        if kind == "whole":  # as an outbox has it: the image before tells that the key stayed
            was = json.dumps({"id": int(key), "n": rng.randint(1, 2)})
            return change("update", key, image, before=was, schema_version=1)
        if rng.random() < 0.05:
            return change("insert", key, image) | {"key": None}
        if rng.random() < 0.25:
            return change("delete", key, rng.choice([None, None, image]))
        return change(rng.choice(["insert", "update", "read"]), key, image)


def rows(frame: DataFrame) -> list[str]:
    return sorted(str(row) for row in frame.collect())


def from_scratch(spark: SparkSession, folder: Path, as_of: str | None = None) -> list[str]:
    whole = KeptTable(spark, folder, STREAM, LogReader(folder).files())
    events = whole._events(whole.files, (), moment_of(as_of) if as_of else None)
    return rows(implied_table(spark, events))


def kept(spark: SparkSession, folder: Path, as_of: str | None = None) -> list[str]:
    return rows(Log(folder.parent).table(spark, "shop", STREAM, as_of=as_of))


@pytest.mark.parametrize("number", range(HISTORIES))
def test_the_kept_table_is_the_table_from_scratch_at_every_step(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """GIVEN a random history of partitions, keys, truncates and times WHEN the table is asked for after each step THEN
    it is the one that all events imply, now and as of any time, with and without a folder that can be written."""
    seed = random.randrange(10**9) if HISTORIES == 1 else number
    print(f"seed {seed}")
    rng = random.Random(seed)
    monkeypatch.setattr(kept_table, "SMALL_ROWS", rng.choice([0, 10**6]))
    monkeypatch.setattr(kept_table, "LAYERS_MAX", rng.choice([1, 3]))
    monkeypatch.setattr(kept_table, "HERE_ROWS_MAX", rng.choice([0, 10**6]))
    fill = Filler(tmp_path)
    wanderer = Wanderer(rng, fill)
    for _ in range(5):
        for _ in range(rng.choice([1, 2])):
            wanderer.step()
        if not fill._events:
            continue
        if rng.random() < 0.2:
            for _ in range(32):
                wanderer.step()
            Maintenance(fill.folder).run()
        assert kept(spark, fill.folder) == from_scratch(spark, fill.folder), f"seed {seed}"
        if rng.random() < 0.4:
            as_of = (NOON + timedelta(hours=rng.randint(-1, 25))).isoformat()
            assert kept(spark, fill.folder, as_of) == from_scratch(spark, fill.folder, as_of), f"seed {seed}"
        if rng.random() < 0.3:
            wanderer.step()
            with monkeypatch.context() as patch:
                patch.setattr(Shelf, "open", lambda _: False)
                assert kept(spark, fill.folder) == from_scratch(spark, fill.folder), f"seed {seed}"


def test_the_tables_of_many_streams_by_one_query_are_the_tables_one_by_one(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN two streams that have the same keys, positions and transactions, one of them without its truncates WHEN
    their tables are made by one query THEN each is the table that its own events imply."""
    seed = random.randrange(10**9)
    fill = Filler(tmp_path)
    wanderer = Wanderer(random.Random(seed), fill)
    for _ in range(6):
        wanderer.step()
    late = {"event_time": NOON + timedelta(days=30)}  # than a truncate in any partition
    fill(change("truncate", "") | {"key": None}, change("insert", "after", "{}") | late)
    whole = KeptTable(spark, fill.folder, STREAM, LogReader(fill.folder).files())
    one = whole._events(whole.files, (), None)
    other = one.where("op <> 'truncate'").selectExpr(
        *("'other' as stream" if name == "stream" else name for name in one.columns)
    )
    both = implied_tables(spark, one.unionByName(other)).cache()
    for name, events in ((STREAM, one), ("other", other)):
        assert rows(both.where(both["stream"] == name).drop("stream")) == rows(implied_table(spark, events)), seed
    assert both.where("stream = 'other'").count() > both.where("stream <> 'other'").count() > 0


def test_what_events_ask_of_those_before_them_is_kept(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN events that mean something else if those before them are forgotten WHEN a table is kept between THEN they
    mean the same."""
    fill = Filler(tmp_path)
    # One record takes key k before another leaves it, in a transaction: k is not gone.
    fill(change("insert", "k", "a", tx="8"), moved("k", "x", "b", "b", tx="8"))
    # A record had key 2, and left it.
    fill(change("insert", "1", "z", position=pg(1)), change("insert", "2", '{"id": 1}', position=pg(2)))
    fill(moved("2", "9", "{}", position=pg(3)))
    assert kept(spark, fill.folder) == from_scratch(spark, fill.folder)
    # The second to leave k in that transaction leaves nobody there; nothing proves that key 1 became key 2.
    fill(moved("k", "y", "c", "c", tx="8"))
    fill(change("update", "2", '{"id": 2}', before='{"id": 1}', schema_version=1, position=pg(4)))
    assert table(Log(tmp_path).table(spark, "shop", STREAM)).keys() == {"x", "y", "1", "2", "9"}
    assert [layer.rows for layer in shelf(fill.folder).layers()] == [5, 3]


def shelf(folder: Path) -> Shelf:
    return Shelf(folder, STREAM)


def test_what_was_kept_is_read_instead_of_the_log(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN a kept table WHEN events come THEN a small layer is written, and only new files of the log are read."""
    fill = Filler(tmp_path)
    fill(*(change("insert", str(n), f"v{n}") for n in range(100)))
    assert len(table(Log(tmp_path).table(spark, "shop", STREAM))) == 100
    fill(change("update", "7", "new"), change("delete", "8"))
    now = Log(tmp_path).table(spark, "shop", STREAM)
    assert [layer.rows for layer in shelf(fill.folder).layers()] == [100, 2]
    assert not [path for path in now.inputFiles() if FOLDER not in path]
    found = table(now)
    assert found["7"] == "new" and "8" not in found and len(found) == 99
    # AND asked again without news, nothing is written
    before = shelf(fill.folder).layers()
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == found
    assert shelf(fill.folder).layers() == before


def damaged(file: Path) -> None:
    body = bytearray(file.read_bytes())
    body[len(body) // 2] ^= 0xFF
    file.write_bytes(bytes(body))


def foreign(file: Path) -> None:
    manifest = file.parent / "kept.json"
    manifest.write_text(manifest.read_text().replace(STREAM, "public.users"))


def newer(file: Path) -> None:
    manifest = file.parent / "kept.json"
    manifest.write_text(manifest.read_text().replace('"format": 2', '"format": 3'))


@pytest.mark.parametrize(
    "harm",
    [
        damaged,
        foreign,
        newer,
        Path.unlink,
        lambda file: file.write_bytes(b""),
        lambda file: (file.parent / "kept.json").write_text('{"format": 2, "str'),
        lambda file: (file.parent / "kept.json").write_text("[]"),
        lambda file: shutil.rmtree(file.parent),
    ],
)
def test_a_kept_table_that_is_damaged_or_foreign_is_not_used(spark: SparkSession, tmp_path: Path, harm: Any) -> None:
    """GIVEN files that are not as they were written WHEN the table is asked for THEN it is right, and kept anew."""
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a"), change("insert", "2", "b"))
    table(Log(tmp_path).table(spark, "shop", STREAM))
    (layer,) = shelf(fill.folder).layers()
    harm(shelf(fill.folder).folder / layer.files[0].name)
    assert shelf(fill.folder).layers() == []
    fill(change("update", "2", "b2"))
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == {"1": "a", "2": "b2"}
    assert [layer.rows for layer in shelf(fill.folder).layers()] == [2]


def test_the_kept_table_of_another_log_is_not_used(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN a log that was made anew WHEN what was kept of the old one lies in it THEN it is ignored."""
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a"))
    table(Log(tmp_path).table(spark, "shop", STREAM))
    shutil.move(fill.folder / FOLDER, tmp_path / "left")
    shutil.rmtree(fill.folder)
    again = Filler(tmp_path)
    again(change("insert", "1", "other"))
    again(change("insert", "2", "b"))
    shutil.move(tmp_path / "left", again.folder / FOLDER)
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == {"1": "other", "2": "b"}


def test_what_retention_removed_is_in_no_table(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN a kept table WHEN retention removes events it was made of THEN their rows are gone, as from scratch."""
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a"))
    fill(change("insert", "2", "b"))
    assert len(table(Log(tmp_path).table(spark, "shop", STREAM))) == 2
    first = min(LogReader(fill.folder).files(), key=lambda file: file.batch_min)
    care = Maintenance(fill.folder, retention=timedelta(days=1), clock=lambda: 4e9)
    care.run(lambda: {0: first.batch_max})
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == {"2": "b"}
    fill(change("insert", "3", "c"))
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == {"2": "b", "3": "c"}


def test_a_table_that_was_asked_for_before_events_were_forgotten_is_not_kept(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a table that is being made WHEN a key is forgotten meanwhile THEN it is not kept, and the next one has
    nothing of it, and is kept."""
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a"), change("insert", "2", "b"))
    keep = Shelf.keep

    def late(*given: Any) -> None:
        monkeypatch.undo()
        monkeypatch.setattr(kept_table, "KEPT_FROM_ROWS", 0)
        Maintenance(fill.folder).forget(Forgotten(STREAM, frozenset({"1"})))
        keep(*given)

    monkeypatch.setattr(Shelf, "keep", late)
    Log(tmp_path).table(spark, "shop", STREAM)
    assert not (shelf(fill.folder).folder / "kept.json").exists()
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == {"2": "b"}
    assert [layer.rows for layer in Shelf(fill.folder, STREAM, forgotten=1).layers()] == [1]


def test_a_kept_table_that_nobody_lived_to_remove_has_no_forgotten_record(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a kept table WHEN a key is forgotten by an event that stays, as a delete of the key before, and the process
    dies before it removes the table THEN the table is not used, though the log has as many events as before."""
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a"), moved("1", "2", "a2"), change("insert", "3", "c"))
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == {"2": "a2", "3": "c"}
    monkeypatch.setattr(maintenance, "forget_kept", lambda _: [])
    Maintenance(fill.folder).forget(Forgotten(STREAM, frozenset({"2"})))
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == {"3": "c"}
    assert shelf(fill.folder).layers() == []


def test_of_files_that_were_replaced_since_nothing_is_kept(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN a list of files from before a key was forgotten WHEN a table is made of them THEN it is not kept."""
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a"), change("insert", "2", "b"))
    files = LogReader(fill.folder).files()
    Maintenance(fill.folder).forget(Forgotten(STREAM, frozenset({"1"})))
    assert table(KeptTable(spark, fill.folder, STREAM, files).table()) == {"1": "a", "2": "b"}
    assert not (fill.folder / FOLDER).exists()


def test_maintenance_leaves_the_kept_table_alone(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN kept files of any age WHEN maintenance removes orphans THEN they stay, until no layer names them."""
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a"))
    table(Log(tmp_path).table(spark, "shop", STREAM))
    place = shelf(fill.folder)
    (old,) = (place.folder / layer.files[0].name for layer in place.layers())
    care = Maintenance(fill.folder, clock=lambda: 4e9)
    care.run()
    care.clock = lambda: 5e9
    care.run()
    assert old.exists()
    # AND a file that no layer names any more stays for an hour
    layers = place.layers()
    place.keep([])
    assert old.exists()
    os.utime(old, (0, 0))
    place.keep([])
    assert not old.exists() and layers


def test_updates_that_kept_their_key_need_no_sql(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN updates with whole images, as of an outbox, or without a large value WHEN the table is asked for THEN it is
    found without SQL, until one of them may have left a key."""
    by_sql = Mock(side_effect=KeptTable._by_sql)
    monkeypatch.setattr(KeptTable, "_by_sql", lambda *given: by_sql(*given))  # noqa: PLW0108 - a mock is no method
    fill = Filler(tmp_path)
    fill(
        change("insert", "1", '{"id":1,"n":1}', position=pg(1)), change("insert", "2", '{"id":2,"t":1}', position=pg(2))
    )
    whole = {"schema_version": 1, "before": '{"id":1,"n":1}'}
    fill(change("update", "1", '{"id":1,"n":2}', **whole, position=pg(3)))
    assert kept(spark, fill.folder) == from_scratch(spark, fill.folder)
    fill(change("update", "1", '{"id":1,"n":3}', **whole, position=pg(4)))
    assert kept(spark, fill.folder) == from_scratch(spark, fill.folder)
    fill(change("update", "2", '{"id":2}', flags=["unknown:t"], position=pg(5)))
    assert kept(spark, fill.folder) == from_scratch(spark, fill.folder)
    by_sql.assert_not_called()
    fill(change("update", "3", '{"id":3,"n":3}', **whole, position=pg(6)))
    assert table(Log(tmp_path).table(spark, "shop", STREAM)).keys() == {"2", "3"}
    by_sql.assert_called_once()


def test_the_table_of_a_small_log_needs_no_sql_and_no_folder(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a small log WHEN its table is asked for THEN it is what SQL makes of it, in values and types, without SQL
    and without a kept file, until its events are in several partitions."""
    monkeypatch.setattr(kept_table, "KEPT_FROM_ROWS", 50_000)
    by_sql = Mock(side_effect=implied_table)
    monkeypatch.setattr(kept_table, "implied_table", by_sql)
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a"), change("insert", "2", "b"), change("read", "3", "c", event_time=None))
    fill(
        change("update", "1", "a2", schema_version=3), change("delete", "2"), change("insert", "", "d") | {"key": None}
    )
    found = Log(tmp_path).table(spark, "shop", STREAM)
    assert rows(found) == from_scratch(spark, fill.folder) and len(rows(found)) == 3
    whole = KeptTable(spark, fill.folder, STREAM, LogReader(fill.folder).files())
    assert found.dtypes == implied_table(spark, whole._events(whole.files, (), None)).dtypes
    assert Log(tmp_path).table(spark, "shop", "public.none").collect() == []
    by_sql.assert_not_called()
    assert not (fill.folder / FOLDER).exists()
    fill(change("truncate", "") | {"key": None}, change("insert", "4", "e"))
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == {"4": "e"}
    by_sql.assert_not_called()
    fill(change("insert", "5", "f"), partition=1)
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == {"4": "e", "5": "f"}
    by_sql.assert_called_once()
    monkeypatch.setattr(kept_table, "SMALL_LOG_BYTES", 0)
    assert table(Log(tmp_path).table(spark, "shop", "public.none")) == {}
    assert by_sql.call_count == 2


def test_a_row_group_that_is_large_in_memory_is_read_by_a_task(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN few new events in a row group that is too large for this process WHEN the table is brought up THEN a task
    of Spark's reads it."""
    by_tasks = Mock(side_effect=KeptTable._by_tasks)
    monkeypatch.setattr(KeptTable, "_by_tasks", lambda *given: by_tasks(*given))  # noqa: PLW0108 - a mock is no method
    payload = json.dumps({"t": "template " * 2_000})
    fill = Filler(tmp_path)
    fill(*(change("insert", str(n), payload) for n in range(5)))
    assert len(kept(spark, fill.folder)) == 5
    by_tasks.assert_not_called()
    monkeypatch.setattr(kept_table, "HERE_GROUP_BYTES_MAX", 4 * len(payload))
    fill(*(change("update", str(n), payload) for n in range(5)))
    assert kept(spark, fill.folder) == from_scratch(spark, fill.folder)
    by_tasks.assert_called_once()


def test_workers_that_do_not_have_this_program_are_not_needed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a session whose Python workers fail WHEN the table is asked for THEN SQL alone finds it."""
    monkeypatch.setattr(kept_table, "HERE_ROWS_MAX", 0)

    def fail(_: object) -> None:
        raise RuntimeError("no module named evermark")

    monkeypatch.setattr(kept_table._Newest, "__getstate__", fail, raising=False)
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a"), change("insert", "2", "b"))
    fill(change("delete", "1"))
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == {"2": "b"}
    assert [layer.rows for layer in shelf(fill.folder).layers()] == [1]


def test_a_large_value_that_was_left_out_is_that_of_the_image_before(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN updates that lack large values, and changes of keys among them WHEN the table is asked for, kept or not
    THEN each row has them as they were last told, character by character; one that was never told is absent."""
    fill = Filler(tmp_path)

    def lacking(key: str, payload: str, *columns: str, **more: Any) -> dict[str, Any]:
        return change("update", key, payload, flags=[f"unknown:{column}" for column in columns], **more)

    large = r'{"id":1,"t":"a,\"u\":} ","u":{"t": [1.10, "]"]},"n":1}'
    fill(
        change("insert", "1", large), change("insert", "2", '{"id":2,"gone":1,"t":"two"}'), change("insert", "3", "{}")
    )
    fill(lacking("1", '{"id":1,"n":2}', "t", "u"), lacking("2", '{"id":2,"new":5}', "t"), lacking("3", '{"id":3}', "t"))
    wanted = {
        "1": r'{"id":1,"t":"a,\"u\":} ","u":{"t": [1.10, "]"]},"n":2}',
        "2": '{"id":2,"t":"two","new":5}',
        "3": '{"id":3}',
    }
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == wanted
    # Through three keys, one of which another record takes and leaves; and a record that is new under an old key.
    fill(lacking("9", '{"id":9,"u":7,"n":3}', "t", previous_key="1", tx="5", before='{"id":1}'))
    fill(lacking("8", '{"id":8,"n":4}', "t", "u", previous_key="9", tx="5", before='{"id":9}'))
    fill(
        lacking("1", '{"id":1,"new":5}', "t", previous_key="2"),
        change("delete", "3"),
        change("insert", "3", '{"id":3}'),
    )
    fill(lacking("3", '{"id":3,"n":1}', "t"))
    wanted = {
        "8": r'{"id":8,"t":"a,\"u\":} ","u":7,"n":4}',
        "1": '{"id":1,"t":"two","new":5}',
        "3": '{"id":3,"n":1}',
    }
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == wanted
    assert rows(Log(tmp_path).table(spark, "shop", STREAM)) == from_scratch(spark, fill.folder)


def test_a_key_that_a_record_took_and_left_in_one_transaction_is_gone(spark: SparkSession, tmp_path: Path) -> None:
    """GIVEN changes of keys that tell the key's columns alone of the row before WHEN a record goes through a key within
    a transaction THEN nothing is left there; but another record that took the key meanwhile is."""
    fill = Filler(tmp_path)
    fill(change("insert", "1", '{"id":1,"n":1}'), change("insert", "5", '{"id":5,"n":5}'))
    fill(moved("1", "2", '{"id":2,"n":1}', '{"id":1}', tx="7"), moved("2", "3", '{"id":3,"n":1}', '{"id":2}', tx="7"))
    # Whole rows tell the two records apart that have key 5 until the transaction ends.
    fill(moved("3", "5", '{"id":5,"n":1}', '{"id":3,"n":1}', tx="8"))
    fill(moved("5", "6", '{"id":6,"n":5}', '{"id":5,"n":5}', tx="8"))
    wanted = {"5": '{"id":5,"n":1}', "6": '{"id":6,"n":5}'}
    assert table(Log(tmp_path).table(spark, "shop", STREAM)) == wanted
    assert kept(spark, fill.folder) == from_scratch(spark, fill.folder)
