"""The public format `evermark`.

Options: `log` (the log's folder or url, required), `source` (one of its sources; default all), `stream`, `columns`
(names with commas; default all: Spark does not tell a format which ones it needs), `since` and `until` (ISO times on
event_time, batch reads only), `startingBatch` (`earliest`, the default, or `latest`; streams only) and
`maxBatchesPerTrigger` (of each partition, 1000 by default; streams only).

With `spark.sql.python.filterPushdown.enabled`, conditions of a batch read on stream, op, key, batch, partition and
times leave out files and row groups; without it, only the options do.

A stream that was away for longer than the log's retention fails with what is missing; it never skips in silence.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyarrow.fs import LocalFileSystem
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    InputPartition,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow

from evermark.errors import ConfigError, GapError
from evermark.event import EVENT, with_all_columns
from evermark.log.frames import schema_text
from evermark.log.opened import damage_is_said, opened
from evermark.log.read import LogReader, moment_of, sources_at
from evermark.storage import place_of, readable
from pyspark_evermark.conditions import Comparison, Condition, expression, is_usable, may_hold, packed

if TYPE_CHECKING:
    import pyarrow.compute as pc

_OPTIONS = ("log", "source", "stream", "columns", "since", "until", "startingBatch", "maxBatchesPerTrigger")
_CHUNK_ROWS = 10_000
_READERS_MAX = 100
_COMPARISONS: dict[type[Filter], Comparison] = {
    EqualTo: "=",
    LessThan: "<",
    LessThanOrEqual: "<=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    In: "in",
}


@dataclass
class _Files(InputPartition):
    """What one task reads."""

    paths: tuple[str, ...]
    columns: tuple[str, ...]
    conditions: tuple[Condition, ...]


class DefaultSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "evermark"

    def schema(self) -> str:
        return schema_text(_columns(self.options.get("columns")))

    def reader(self, schema: Any) -> DataSourceReader:
        return _BatchReader(_checked(self.options), _known(schema.names))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
        return _StreamReader(_checked(self.options), _known(schema.names))


def _columns(text: str | None) -> tuple[str, ...]:
    return _known([name.strip() for name in text.split(",")]) if text is not None else tuple(EVENT.names)


def _known(names: Sequence[str]) -> tuple[str, ...]:
    for name in names:
        if name not in EVENT.names:
            raise ConfigError(f"an event has no column {name!r}", hint=f"it has {', '.join(EVENT.names)}")
    return tuple(names)


def _checked(options: Any) -> dict[str, str]:
    known = {name.lower(): name for name in _OPTIONS}
    given: dict[str, str] = {}
    for key, value in options.items():
        if key.lower() not in known and key.lower() != "path":
            raise ConfigError(f"option {key!r} is not known to the evermark format", hint=f"use {', '.join(_OPTIONS)}")
        given[known.get(key.lower(), "log")] = str(value)
    if "log" not in given:
        raise ConfigError("the evermark format needs the option `log`", hint='.option("log", "/data/evermark/log")')
    names = sources_at(place_of(given["log"]))
    if "source" in given and given["source"] not in names:
        raise ConfigError(
            f"the log at {given['log']} has no source {given['source']!r}",
            hint=f"it has {', '.join(names) or 'none yet'}",
        )
    return given


def _sources(options: dict[str, str]) -> list[str]:
    return [options["source"]] if "source" in options else sources_at(place_of(options["log"]))


@lru_cache(_READERS_MAX)
def _kept_reader(log: str, source: str) -> LogReader:
    """Spark plans one query after another in the same Python process: only commits that have come since are read."""
    return LogReader(place_of(log) / source)


class _BatchReader(DataSourceReader):
    def __init__(self, options: dict[str, str], columns: tuple[str, ...]) -> None:
        self._options, self._columns = options, columns
        self._pushed: list[Condition] = []
        self.pushFilters = _PushFilters(self._pushed)  # type: ignore[method-assign]

    def partitions(self) -> Sequence[InputPartition]:
        wanted = (*_asked(self._options), *self._pushed)
        files = [
            file
            for source in _sources(self._options)
            for file in _kept_reader(self._options["log"], source).files()
            if may_hold(file, wanted)
        ]
        # One at least: without any Spark would have us read None.
        return [_Files(tuple(f.path for f in some), self._columns, wanted) for some in packed(files) or [[]]]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Files)  # noqa: S101 - Spark hands back what `partitions` gave it
        return _rows(partition)


class _PushFilters:
    """Notes the conditions that can be used, and gives Spark all of them back: it looks at every row again.

    Spark refuses a reader that has a method of its own for this unless a setting is on that is off by itself. So this
    says that it is Spark's own method: where the setting is off nobody calls it, where it is on it is called.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, pushed: list[Condition]) -> None:
        self._pushed = pushed

    def __call__(self, filters: list[Filter]) -> Iterable[Filter]:
        self._pushed += filter(is_usable, map(_condition, (each for each in filters if type(each) in _COMPARISONS)))
        return filters


def _condition(given: Any) -> Condition:
    return Condition(".".join(given.attribute), _COMPARISONS[type(given)], given.value)


def _asked(options: dict[str, str]) -> Iterator[Condition]:
    """By options."""
    if "stream" in options:
        yield Condition("stream", "=", options["stream"])
    if "since" in options:
        yield Condition("event_time", ">=", moment_of(options["since"]))
    if "until" in options:
        yield Condition("event_time", "<", moment_of(options["until"]))


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are `{"<source>/<partition>": batch}`: what was read up to and including that batch."""

    def __init__(self, options: dict[str, str], columns: tuple[str, ...]) -> None:
        self._options, self._columns = options, columns
        self._readers: dict[str, LogReader] = {}
        self._step = _whole_number(options, "maxBatchesPerTrigger", 1000)
        self._available: dict[str, int] | None = None
        if options.get("startingBatch", "earliest") not in ("earliest", "latest"):
            raise ConfigError("startingBatch is neither earliest nor latest", hint="leave it out to read everything")

    def initialOffset(self) -> dict[str, int]:  # noqa: N802
        return self._tails() if self._options.get("startingBatch") == "latest" else self._begins()

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxFiles(self._step)  # Spark has no word for batches

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._available = self._tails()

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:  # noqa: N802
        tails = self._available if self._available is not None else self._tails()
        # A partition of which retention left nothing: what it had after `start` is missed now, not with its next event.
        there = _sources(self._options)
        tails |= {p: self._tail(p) for p in start if p not in tails and p.rpartition("/")[0] in there}
        begins: dict[str, int] | None = None
        end = dict(start)
        for place, tail in tails.items():
            if place not in start:  # a source or partition that came since; retention may have been there before us
                begins = self._begins() if begins is None else begins
            after = start[place] if place in start else (begins or {}).get(place, 0)
            end[place] = max(after, min(tail, after + limit.max_files) if isinstance(limit, ReadMaxFiles) else tail)
        return end

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> Sequence[InputPartition]:
        pieces: list[InputPartition] = []
        for place, to in end.items():
            source, _, partition = place.rpartition("/")
            after = start[place] if place in start else self._begins().get(place, 0)
            if to <= after:
                continue
            files = self._reader(source).files_of(int(partition), after, to)
            # Retention takes the oldest. A hole behind what is left is of a batch without events, or forgotten ones.
            there = self._reader(source).files_of(int(partition), 0, to)
            first = min((f.batch_min for f in there), default=to + 1)
            if first > after + 1:
                raise GapError(
                    f"batches {after + 1} to {first - 1} of {place} are no longer in the log at {self._options['log']}",
                    hint="retention passed this stream: start it with a new checkpoint to go on with what there is",
                )
            place_and_batches = (
                Condition("partition", "=", int(partition)),
                Condition("batch", ">", after),
                Condition("batch", "<=", to),
            )
            wanted = (*place_and_batches, *(one for one in _asked(self._options) if one.column == "stream"))
            pieces += [_Files(tuple(f.path for f in some), self._columns, wanted) for some in packed(files)]
        return pieces

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Files)  # noqa: S101
        return _rows(partition)

    def _tails(self) -> dict[str, int]:
        return {place: self._tail(place) for place in self._begins()}

    def _tail(self, place: str) -> int:
        source, _, partition = place.rpartition("/")
        return self._reader(source).tail_batch(int(partition))

    def _begins(self) -> dict[str, int]:
        """Per place, the batch before the first one that is still there."""
        begins: dict[str, int] = {}
        for source in _sources(self._options):
            for file in self._reader(source).files():
                for partition in range(file.partition_min, file.partition_max + 1):
                    place = f"{source}/{partition}"
                    begins[place] = min(begins.get(place, file.batch_min - 1), file.batch_min - 1)
        return begins

    def _reader(self, source: str) -> LogReader:
        if source not in self._readers:
            self._readers[source] = LogReader(place_of(self._options["log"]) / source)
        return self._readers[source]


def _whole_number(options: dict[str, str], name: str, default: int) -> int:
    text = options.get(name, str(default))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name} is {text!r}", hint="use a whole number from 1 on")
    return int(text)


def _rows(wanted: _Files) -> Iterator[pa.RecordBatch]:
    condition = expression(wanted.conditions)
    for path in wanted.paths:
        for batch in _all_rows(path, wanted.columns) if condition is None else _some_rows(path, wanted, condition):
            if batch.num_rows:
                # By name alone: Spark takes a column that is never null for another one than it asked for.
                yield pa.RecordBatch.from_arrays(batch.columns, names=list(wanted.columns))


def _all_rows(path: str, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """By the reader of Parquet: a scanner takes half as long again, of one column three times as long."""
    wanted = pa.schema([EVENT.field(name) for name in columns])
    with opened(path) as file:
        known = file.schema_arrow.names  # asked once: each time Parquet's schema is turned into Arrow's
        there = [name for name in columns if name in known]
        for batch in file.iter_batches(_CHUNK_ROWS, columns=there, use_threads=False):
            rows = with_all_columns(batch, wanted)
            yield rows if rows.schema.types == wanted.types else rows.cast(wanted)


def _some_rows(path: str, wanted: _Files, condition: pc.Expression) -> Iterator[pa.RecordBatch]:
    import pyarrow.dataset as ds  # here: it loads pandas

    with damage_is_said(path):
        file = readable(path)
        scanner = ds.Scanner.from_fragment(
            ds.ParquetFileFormat().make_fragment(file, LocalFileSystem() if isinstance(file, str) else None),
            schema=EVENT,  # a file from before a column was added has nulls in it
            columns=list(wanted.columns),
            filter=condition,
            batch_size=_CHUNK_ROWS,
            use_threads=False,
        )
        yield from scanner.to_batches()
