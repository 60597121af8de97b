"""The newest event of every key, with the large values that it left out, without Spark."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from evermark.event import taken_batch
from evermark.log import kept_shelf, newest_rows
from evermark.log.kept_keys import KeyCheck
from evermark.log.kept_shelf import images_of, write_kept
from evermark.log.newest_rows import NewestRows, NotPlain, Wanted, parts_of, runs_of
from evermark.log.write import BatchWriter

STREAM = "public.orders"


class Written:
    """A log's files, and what the table has to be, told event by event."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        self._folder, self._events = folder, 0
        self.paths: list[str] = []
        self.table: dict[str, dict[str, Any]] = {}

    def batch(self, *events: tuple[str, str, dict[str, Any] | None]) -> None:
        rows = []
        for op, key, values in events:
            self._events += 1
            flags: list[str] = []
            if op == "update" and values is not None:
                flags = [f"unknown:{name}" for name in "tu" if name not in values]
                before = self.table.get(key, {})
                self.table[key] = values | {
                    name: before[name] for name in "tu" if name not in values and name in before
                }
            elif op == "delete":
                self.table.pop(key, None)
            elif values is not None:
                self.table[key] = values
            payload = None if values is None else json.dumps(values)
            rows.append((f"e{self._events:04}", f"{self._events:06}", STREAM, key, op, payload, flags))
        names = ("event_id", "position", "stream", "key", "op", "payload", "flags")
        taken = taken_batch(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)), len(rows))
        file = BatchWriter(self._folder, "shop", 0, len(self.paths) + 1).write_all([taken])
        assert file is not None
        self.paths.append(str(self._folder / file.path))


def found(paths: list[str], below: list[Path] | None = None) -> dict[str, dict[str, Any]]:
    rows = NewestRows(Wanted(STREAM, {}), lambda keys: images_of(keys, below or []))
    kept = [row for table in rows.batches(runs_of(parts_of(paths))) for row in table.to_pylist()]
    assert len(kept) == len({row["row_key"] for row in kept})
    return {row["row_key"]: json.loads(row["payload"]) for row in kept if not row["gone"]}


def most_held(tables: Iterator[pa.Table], path: Path) -> int:
    """The most bytes that are held while these are written: by Python at any time, by Arrow when a table is made."""
    at_first, by_arrow = pa.total_allocated_bytes(), [0]

    def watched() -> Iterator[pa.Table]:
        for table in tables:
            by_arrow.append(pa.total_allocated_bytes() - at_first)
            yield table

    tracemalloc.start()
    try:
        write_kept(path, watched())
        return max(by_arrow) + tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def random_events(rng: random.Random) -> list[tuple[str, str, dict[str, Any] | None]]:
    events: list[tuple[str, str, dict[str, Any] | None]] = []
    for _ in range(rng.randint(1, 6)):
        op, key = rng.choice(["insert", "update", "update", "update", "delete"]), rng.choice("abcde")
        told = "tu" if op == "insert" else rng.sample("tu", rng.randint(0, 2))
        values = {"n": rng.randint(1, 99)} | {name: rng.randint(1, 99) for name in told}
        events.append((op, key, None if op == "delete" else values))
    return events


@pytest.mark.parametrize("run_rows", [1, 4, 1_000_000])
def test_values_that_were_left_out_are_those_told_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run_rows: int
) -> None:
    """GIVEN updates at random, most of which leave values out WHEN the newest event of every key is found, in one look
    or in many, all at once or over what was kept of the beginning THEN it has the values that were told last."""
    monkeypatch.setattr(newest_rows, "RUN_ROWS", run_rows)
    for seed in range(12):
        rng = random.Random(seed)
        written = Written(tmp_path / str(seed))
        cut = rng.randint(1, 8)
        kept = tmp_path / f"{seed}.parquet"
        for number in range(1, 9):
            written.batch(*random_events(rng))
            if number == cut:
                early = NewestRows(Wanted(STREAM, {}))
                write_kept(kept, list(early.batches(runs_of(parts_of(written.paths)))))
        assert found(written.paths) == written.table, seed
        late = found(written.paths[cut:], [kept])
        assert late == {key: written.table[key] for key in late}, seed


def test_images_that_were_kept_are_held_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN small updates of many records that leave large values out WHEN the values are taken from what was kept
    THEN a few of them are in memory at a time, and each record has its own; so where a newer file has some of them."""
    written, records = Written(tmp_path), 400
    values = [random.Random(n).randbytes(20_000).hex() for n in range(records)]  # nothing makes them smaller
    written.batch(*(("insert", f"k{n}", {"t": value, "u": n}) for n, value in enumerate(values)))
    oldest, newer = tmp_path / "oldest.parquet", tmp_path / "newer.parquet"
    write_kept(oldest, list(NewestRows(Wanted(STREAM, {})).batches(runs_of(parts_of(written.paths)))))
    written.batch(
        *(("update", f"k{n}", {"t": f"new{n}", "u": n}) for n in range(0, records, 7)),
        *(("delete", f"k{n}", None) for n in range(3, records, 7)),
    )
    write_kept(newer, list(NewestRows(Wanted(STREAM, {})).batches(runs_of(parts_of(written.paths[1:])))))
    written.batch(*(("update", f"k{n}", {"n": n}) for n in range(records)), ("update", "none", {"n": 1}))
    monkeypatch.setattr(kept_shelf, "IMAGES_BYTES", 1_000_000)
    rows = NewestRows(Wanted(STREAM, {}), lambda keys: images_of(keys, [newer, oldest]))
    held = most_held(rows.batches(runs_of(parts_of(written.paths[2:]))), tmp_path / "now.parquet")
    assert held < 12_000_000 < sum(map(len, values))
    found = {row["row_key"]: row["payload"] for row in pq.read_table(tmp_path / "now.parquet").to_pylist()}
    assert {key: json.loads(payload) for key, payload in found.items()} == written.table


def test_payloads_are_held_a_few_files_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN newest events whose payloads are large, some of them twice in a batch WHEN they are found THEN those of a
    few files are in memory at a time, and the last of each key is found."""
    written = Written(tmp_path)
    values = [random.Random(n).randbytes(20_000).hex() for n in range(400)]
    for n in range(0, 400, 10):
        events = [("insert", f"k{i}", {"t": values[i], "u": i}) for i in range(n, n + 10)]
        written.batch(*events, ("update", f"k{n}", {"t": "again", "u": 1}), ("delete", f"k{n + 1}", None))
    monkeypatch.setattr(newest_rows, "_GROUP_BYTES", 1_000_000)
    rows = NewestRows(Wanted(STREAM, {})).batches(runs_of(parts_of(written.paths)))
    assert most_held(rows, tmp_path / "now.parquet") < 8_000_000 < sum(map(len, values))
    found = {row["row_key"]: row for row in pq.read_table(tmp_path / "now.parquet").to_pylist()}
    assert len(found) == 400
    standing = {key: json.loads(row["payload"]) for key, row in found.items() if not row["gone"]}
    assert standing == written.table


def test_many_updates_that_left_values_out_are_left_to_spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN more events of such records, or larger ones, than are held in memory WHEN looked at THEN it says so."""
    written = Written(tmp_path)
    written.batch(("insert", "a", {"t": "x" * 1000, "u": 1}), *(("update", "a", {"n": n}) for n in range(9)))
    assert found(written.paths) == written.table
    for bound in ("UNFINISHED_MAX", "UNFINISHED_BYTES_MAX"):
        with monkeypatch.context() as patch:
            patch.setattr(newest_rows, bound, 9)
            with pytest.raises(NotPlain, match="left out large values"):
                found(written.paths)


def test_each_bucket_looks_at_the_updates_of_its_own_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN updates that tell both images, one of which took another's key WHEN keys are split into buckets THEN each
    update is looked at once, and that one is found; of another stream none is."""
    looked_at: list[str] = []
    all_kept = KeyCheck.all_kept

    def seen(check: KeyCheck, key: pa.Array, *images: pa.Array) -> bool:
        looked_at.extend(key.to_pylist())
        return all_kept(check, key, *images)

    monkeypatch.setattr(KeyCheck, "all_kept", seen)
    keys = [str(n) for n in range(40)]
    images = [json.dumps({"n": 1, "id": key}) for key in keys]

    def batch(number: int, before: list[str]) -> str:
        columns = {
            "event_id": [f"{number}-{key}" for key in keys] * 2,
            "position": [f"{n:06}" for n in range(80)],
            "stream": [STREAM] * 40 + ["public.other"] * 40,
            "key": keys * 2,
            "op": ["update"] * 80,
            "payload": images * 2,
            "before": before * 2,
            "schema_version": [1] * 80,
        }
        file = BatchWriter(tmp_path, "shop", 0, number).write_all([taken_batch(columns, 80)])
        assert file is not None
        return str(tmp_path / file.path)

    def newest(path: str) -> int:
        runs = runs_of(parts_of([path]))
        return sum(t.num_rows for n in range(4) for t in NewestRows(Wanted(STREAM, {}, n, 4)).batches(runs))

    assert newest(batch(1, images)) == 40
    assert sorted(looked_at) == sorted(keys)
    with pytest.raises(NotPlain, match="without saying so"):
        newest(batch(2, [*images[:20], images[0], *images[21:]]))
