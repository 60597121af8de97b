"""The newest event of every key, with the large values that it left out, without Spark."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from evermark.event import taken_batch
from evermark.log import newest_rows
from evermark.log.kept_table import images_of, write_kept
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
