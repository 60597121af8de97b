"""The public format `evermark`.

Options: `log` (the log's folder or url, required), `source` (one of its sources; default all), `stream`, `since` and
`until` (ISO times on event_time, batch reads only), `startingBatch` (`earliest`, the default, or `latest`; streams
only) and `maxBatchesPerTrigger` (of each partition, 1000 by default; streams only).

A stream that was away for longer than the log's retention fails with what is missing; it never skips in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxFiles, SupportsTriggerAvailableNow

from evermark.errors import ConfigError, GapError
from evermark.event import EVENT, with_all_columns
from evermark.log.frames import SCHEMA
from evermark.log.read import LogReader, moment_of, sources_at, within
from evermark.storage import place_of, readable

_OPTIONS = ("log", "source", "stream", "since", "until", "startingBatch", "maxBatchesPerTrigger")
_CHUNK_ROWS = 10_000


@dataclass
class _Piece(InputPartition):
    path: str
    partition: int | None = None
    after: int = 0
    to: int = 0
    stream: str | None = None
    since: str | None = None
    until: str | None = None


class DefaultSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "evermark"

    def schema(self) -> str:
        return SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        return _BatchReader(_checked(self.options))

    def streamReader(self, schema: Any) -> DataSourceStreamReader:  # noqa: N802
        return _StreamReader(_checked(self.options))


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


class _BatchReader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        return [
            _Piece(
                file.path,
                stream=self._options.get("stream"),
                since=self._options.get("since"),
                until=self._options.get("until"),
            )
            for source in _sources(self._options)
            for file in LogReader(place_of(self._options["log"]) / source).files()
            if within(file, *_window(self._options))
        ]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Piece)  # noqa: S101 - Spark hands back what `partitions` gave it
        return _rows(partition)


class _StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Offsets are `{"<source>/<partition>": batch}`: what was read up to and including that batch."""

    def __init__(self, options: dict[str, str]) -> None:
        self._options = options
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
            first = min((f.batch_min for f in files), default=to + 1)
            if first > after + 1:
                raise GapError(
                    f"batches {after + 1} to {first - 1} of {place} are no longer in the log at {self._options['log']}",
                    hint="retention passed this stream: start it with a new checkpoint to go on with what there is",
                )
            pieces += [_Piece(f.path, int(partition), after, to, self._options.get("stream")) for f in files]
        return pieces

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Piece)  # noqa: S101
        return _rows(partition)

    def _tails(self) -> dict[str, int]:
        return {
            place: self._reader(place.rpartition("/")[0]).tail_batch(int(place.rpartition("/")[2]))
            for place in self._begins()
        }

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


def _rows(piece: _Piece) -> Iterator[pa.RecordBatch]:
    for batch in pq.ParquetFile(readable(piece.path)).iter_batches(_CHUNK_ROWS):
        keep = _mask(batch, piece)
        kept = batch if keep is None else batch.filter(keep)
        if kept.num_rows:
            # By name alone: Spark takes a column that is never null for another one than it asked for.
            yield pa.RecordBatch.from_arrays(with_all_columns(kept, EVENT).columns, names=EVENT.names)


def _mask(batch: pa.RecordBatch, piece: _Piece) -> Any:
    masks: list[Any] = []
    if piece.partition is not None:
        masks += [
            pc.equal(batch["partition"], piece.partition),
            pc.greater(batch["batch"], piece.after),
            pc.less_equal(batch["batch"], piece.to),
        ]
    if piece.stream is not None:
        masks.append(pc.equal(batch["stream"], piece.stream))
    if piece.since is not None:
        masks.append(pc.fill_null(pc.greater_equal(batch["event_time"], _moment(piece.since)), fill_value=False))
    if piece.until is not None:
        masks.append(pc.fill_null(pc.less(batch["event_time"], _moment(piece.until)), fill_value=False))
    if not masks:
        return None
    keep = masks[0]
    for mask in masks[1:]:
        keep = pc.and_(keep, mask)
    return keep


def _moment(text: str) -> pa.Scalar:
    return pa.scalar(moment_of(text), pa.timestamp("us", tz="UTC"))


def _window(options: dict[str, str]) -> tuple[datetime | None, datetime | None]:
    since, until = options.get("since"), options.get("until")
    return moment_of(since) if since else None, moment_of(until) if until else None
