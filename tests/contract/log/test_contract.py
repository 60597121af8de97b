"""The contract of the append log over its backends."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from evermark.log.append import DeltaLog
from evermark.log.base import AppendLog, LogFile
from evermark.log.memory import MemoryLog
from evermark.log.read import LogReader
from evermark.storage import Place, readable
from evermark.testing.contracts.log import LogContract, MakeFile
from tests.contract.log.log_scene import write


class TestMemoryLog(LogContract):
    @pytest.fixture
    def memory(self) -> MemoryLog:
        return MemoryLog()

    @pytest.fixture
    def open_log(self, memory: MemoryLog) -> Callable[[], AppendLog]:
        return lambda: memory

    @pytest.fixture
    def make_file(self) -> MakeFile:
        numbers = itertools.count()
        return lambda partition, batch: LogFile(f"p{partition}-b{batch}-{next(numbers)}", 1, 1)

    @pytest.fixture
    def rows(self, memory: MemoryLog) -> Callable[[], list[tuple[int, int]]]:
        return lambda: sorted((a.partition, a.batch) for a in memory.commits for _ in a.files)


class TestDeltaLog(LogContract):
    @pytest.fixture
    def folder(self, tmp_path: Path) -> Place:
        return tmp_path / "shop"

    @pytest.fixture
    def open_log(self, folder: Place) -> Callable[[], AppendLog]:
        return lambda: DeltaLog(folder, pause=lambda _: None)

    @pytest.fixture
    def make_file(self, folder: Place) -> MakeFile:
        return lambda partition, batch: write(folder, batch, partition=partition)

    @pytest.fixture
    def rows(self, folder: Place) -> Callable[[], list[tuple[int, int]]]:
        def read() -> list[tuple[int, int]]:
            files = LogReader(folder).files()
            tables = [pq.read_table(readable(f.path), columns=["partition", "batch"]) for f in files]
            return sorted((row["partition"], row["batch"]) for table in tables for row in table.to_pylist())

        return read


class TestDeltaLogInS3(TestDeltaLog):
    @pytest.fixture
    def folder(self, s3_place: Place) -> Place:
        return s3_place / "shop"
