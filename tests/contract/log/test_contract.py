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
    def open_log(self, tmp_path: Path) -> Callable[[], AppendLog]:
        return lambda: DeltaLog(tmp_path / "shop", pause=lambda _: None)

    @pytest.fixture
    def make_file(self, tmp_path: Path) -> MakeFile:
        return lambda partition, batch: write(tmp_path / "shop", batch, partition=partition)

    @pytest.fixture
    def rows(self, tmp_path: Path) -> Callable[[], list[tuple[int, int]]]:
        def read() -> list[tuple[int, int]]:
            files = LogReader(tmp_path / "shop").files()
            tables = [pq.read_table(f.path, columns=["partition", "batch"]) for f in files]
            return sorted((row["partition"], row["batch"]) for table in tables for row in table.to_pylist())

        return read
