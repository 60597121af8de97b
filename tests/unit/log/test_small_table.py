"""Going through the events of a small log: what it leaves to the query, and what it holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from evermark.log import small_table
from evermark.log.newest_rows import NotPlain
from evermark.log.read import LogReader
from evermark.log.small_table import small_tables
from tests.spark.log.test_frames import Filler, change, moved, pg


def tables(folder: Path) -> dict[str, dict[str | None, str]]:
    found = small_tables([file.path for file in LogReader(folder).files()])
    return {
        stream: dict(zip(rows["key"].to_pylist(), rows["payload"].to_pylist(), strict=True))
        for stream, rows in found.items()
    }


def test_each_stream_has_its_own_keys_truncates_and_order(tmp_path: Path) -> None:
    """GIVEN two streams with the same keys, and batches whose events lie in another order than their positions WHEN
    gone through THEN each has its own newest images."""
    fill = Filler(tmp_path)
    other = {"stream": "public.other"}
    fill(change("insert", "1", "a"), change("insert", "1", "b") | other, change("truncate", "") | other | {"key": None})
    fill(change("update", "1", "late", position=pg(9)), change("update", "1", "early", position=pg(8)))
    fill(change("insert", "2", "c"), change("delete", "2"), change("insert", "3", "d") | {"key": None})
    fill(change("schema", "9"), change("poison", "8", "x"))
    assert tables(fill.folder) == {"public.orders": {"1": "late", None: "d"}, "public.other": {}}


def test_a_large_value_is_that_of_the_record_and_of_no_record_before_it(tmp_path: Path) -> None:
    """GIVEN records whose images lack a value WHEN the one before under that key was deleted, or has another key now
    THEN the value stays unknown; WHEN the record itself had it, under whichever key THEN it has it."""
    fill = Filler(tmp_path)
    whole, lacks = '{"id":1,"v":"large"}', change("update", "1", '{"id":1}', flags=["unknown:v"])
    fill(change("insert", "1", whole), lacks | {"stream": "kept"}, change("insert", "1", whole) | {"stream": "kept"})
    fill(lacks | {"stream": "kept"}, change("delete", "1"), lacks)
    fill(
        change("insert", "1", whole) | {"stream": "moved"},
        moved("1", "2", '{"id":2}', flags=["unknown:v"]) | {"stream": "moved"},
    )
    fill(lacks | {"stream": "moved"})
    found = tables(fill.folder)
    assert found["public.orders"] == {"1": '{"id":1}'} and found["kept"] == {"1": whole}
    assert found["moved"] == {"1": '{"id":1}', "2": '{"id":2,"v":"large"}'}


def test_a_key_that_another_record_took_first_stays_until_that_one_leaves_it(tmp_path: Path) -> None:
    """GIVEN a transaction in which a record takes a key before another leaves it WHEN one more leaves it THEN nobody is
    there; in another transaction THEN the first to leave it leaves nobody there."""
    took = [change("insert", "k", '{"v":"a"}', tx="8"), moved("k", "x", '{"v":"b"}', '{"v":"b"}', tx="8")]
    fill = Filler(tmp_path)
    fill(*took)
    assert tables(fill.folder) == {"public.orders": {"k": '{"v":"a"}', "x": '{"v":"b"}'}}
    fill(moved("k", "y", '{"v":"c"}', '{"v":"c"}', tx="8"))
    assert tables(fill.folder)["public.orders"].keys() == {"x", "y"}
    fill(took[0], moved("k", "z", '{"v":"b"}', '{"v":"b"}', tx="9"))
    assert tables(fill.folder)["public.orders"].keys() == {"x", "y", "z"}


def test_an_update_that_found_the_row_as_it_was_left_changed_no_key(tmp_path: Path) -> None:
    """GIVEN an update of a program that told no key that was left WHEN its image before is that of the event before
    THEN no query is needed, whatever the images have of the key."""
    fill = Filler(tmp_path)
    fill(change("insert", "2", '{"n":1}', position=pg(1)))
    fill(change("update", "2", '{"n":2}', before='{"n":1}', schema_version=1, position=pg(2)))
    assert tables(fill.folder) == {"public.orders": {"2": '{"n":2}'}}


SWAP = [change("insert", "1", '{"v":1}', tx="7")]


@pytest.mark.parametrize(
    ("events", "why"),
    [
        ([moved("1", "1", "{}")], "not for another one"),
        ([change("update", "2", '{"id":2}', before='{"id":1}', schema_version=1, position=pg(1))], "may have changed"),
        ([*SWAP, moved("1", "2", "{}", '{"v":1.0}', tx="7")], "several ways"),
        ([*SWAP, moved("1", "2", "{}", '{"v":[1]}', tx="7")], "several ways"),
        ([*SWAP, moved("1", "2", "{}", "no object", tx="7")], "no objects"),
    ],
)
def test_what_the_events_alone_do_not_tell_is_left_to_the_query(
    tmp_path: Path, events: list[dict[str, Any]], why: str
) -> None:
    """GIVEN an event that means what only images or several events tell WHEN gone through THEN that is said."""
    fill = Filler(tmp_path)
    fill(*events)
    with pytest.raises(NotPlain, match=why):
        tables(fill.folder)


def test_streams_in_several_partitions_are_left_to_the_query(tmp_path: Path) -> None:
    """GIVEN a stream in two partitions WHEN gone through THEN that is said; of one of them the table is found."""
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a"))
    fill(change("insert", "1", "b") | {"stream": "public.other"}, partition=1)
    assert tables(fill.folder) == {"public.orders": {"1": "a"}, "public.other": {"1": "b"}}
    fill(change("insert", "2", "c"), partition=1)
    paths = [file.path for file in LogReader(fill.folder).files()]
    assert small_tables(paths, ["public.orders"], 0)["public.orders"]["key"].to_pylist() == ["1"]
    fill(change("truncate", "") | {"key": None}, partition=1)
    paths = [file.path for file in LogReader(fill.folder).files()]
    with pytest.raises(NotPlain, match="several partitions"):
        small_tables(paths, ["public.orders"], 0)
    with pytest.raises(NotPlain, match="several partitions"):
        tables(fill.folder)


@pytest.mark.parametrize(("rows", "chars"), [(5_000, 20_000), (100, 1_000_000)])
def test_values_are_counted_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int, chars: int
) -> None:
    """GIVEN values that are next to nothing in their file WHEN they are more than may be held THEN it is said before
    any of them is read."""
    fill = Filler(tmp_path)
    fill(*(change("insert", str(n), "x" * chars) for n in range(rows)))
    (file,) = LogReader(fill.folder).files()
    assert file.size < 300_000
    monkeypatch.setattr(small_table, "with_all_columns", None)
    with pytest.raises(NotPlain, match="32 MiB"):
        small_tables([file.path])


def test_values_of_a_file_that_another_program_wrote_are_counted_as_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN files whose description is of each text once WHEN texts come again and again THEN they are counted, too."""
    fill = Filler(tmp_path)
    for _ in range(3):
        fill(*(change("insert", str(n), "x" * 20_000) for n in range(100)))
    for file in LogReader(fill.folder).files():
        pq.write_table(pq.read_table(file.path), file.path, use_dictionary=["payload"])
    monkeypatch.setattr(small_table, "VALUES_BYTES_MAX", 3_000_000)
    with pytest.raises(NotPlain, match="2 MiB"):
        small_tables([file.path for file in LogReader(fill.folder).files()])


def test_an_event_that_stands_where_a_truncate_stands_is_left_to_the_query(tmp_path: Path) -> None:
    """GIVEN two events at one position, one of them a truncate WHEN gone through THEN neither comes first."""
    fill = Filler(tmp_path)
    fill(change("insert", "1", "a", position="5"), change("truncate", "", position="5") | {"key": None})
    with pytest.raises(NotPlain, match="stands"):
        tables(fill.folder)


def test_each_of_many_streams_has_its_row(tmp_path: Path) -> None:
    """GIVEN streams whose events lie between each other's WHEN gone through THEN each has its own."""
    fill = Filler(tmp_path)
    fill(*(change("insert", "1", "a") | {"stream": f"s{n % 300}"} for n in range(900)))
    found = tables(fill.folder)
    assert small_tables([file.path for file in LogReader(fill.folder).files()], ["another"]) == {}
    assert len(found) == 300 and set(map(str, found.values())) == {"{'1': 'a'}"}
