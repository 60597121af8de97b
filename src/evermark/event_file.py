"""Events in a Parquet file, as the log keeps them; also in one that is written before its batch is known.

Such a file has **blanks** where it lacks something that all its events share: each of these columns is not compressed,
and says its value once for many rows. So the blanks are filled in while the file is copied, and no row is read again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq

from evermark.errors import FormatError
from evermark.event import EVENT

# Columns that repeat: a dictionary over ids and payloads costs time and saves nothing.
_DICTIONARY = ("source", "partition", "batch", "stream", "op", "tx", "origin", "ingested_at", "schema_version")
_STATISTICS = ["partition", "batch", "event_time"]
_GROUP_ROWS_MAX = 131_072
_GROUP_BYTES_MAX = 32 * 1024 * 1024
_COPIED_BYTES = 1024 * 1024
_FOOTER_END = 8  # the length of the footer, and four letters

# What stands in the blanks; times of the year 9 500. Nothing else in these columns, or in the footer, looks like it.
BLANKS = {
    "batch": 0x6B_5E_11_D7_9A_C3_F4_21,
    "event_time": 0x03_51_A7_62_F3_1C_E9_85,
    "ingested_at": 0x03_52_8E_5B_D2_07_A6_9C,
    "schema_version": 0x5C_92_E7_3F,
}
_WIDTHS = {"schema_version": 4}


class EventFileWriter:
    """EVENT rows in, gathered into row groups; `seen` is told of each group. `sink`: what a writer of pyarrow takes.

    `blanks`: the file may be filled in later. Its positions begin with what they lack (`Fill.position`).
    """

    def __init__(
        self,
        sink: Any,
        *,
        blanks: bool = False,
        about: Mapping[bytes, bytes] | None = None,
        seen: Callable[[pa.Table], None] = lambda _: None,
    ) -> None:
        self.rows = 0
        self._seen = seen
        self._waiting: list[pa.RecordBatch] = []
        self._rows_waiting = self._bytes_waiting = 0
        options: dict[str, Any] = {"compression": "zstd", "compression_level": 1, "use_dictionary": list(_DICTIONARY)}
        if blanks:
            columns = ["flags.list.element" if field.name == "flags" else field.name for field in EVENT]
            packed = [name for name in columns if name != "position" and name not in BLANKS]
            options = {
                "use_dictionary": [*_DICTIONARY, "event_time"],
                "compression": {name: "zstd" if name in packed else "none" for name in columns},
                "compression_level": dict.fromkeys(packed, 1),
                "column_encoding": {"position": "DELTA_BYTE_ARRAY"},  # what all have in common is written once a page
            }
        self._writer = pq.ParquetWriter(
            sink,
            EVENT,
            write_statistics=_STATISTICS,
            store_schema=False,
            **options,
        )
        if about:
            self._writer.add_key_value_metadata(about)

    def write(self, batch: pa.RecordBatch) -> None:
        if not batch.num_rows:
            return  # Parquet has no empty row groups
        self._waiting.append(batch)
        self._rows_waiting += batch.num_rows
        self._bytes_waiting += batch.nbytes
        if self._rows_waiting >= _GROUP_ROWS_MAX or self._bytes_waiting >= _GROUP_BYTES_MAX:
            self.flush()

    def flush(self) -> None:
        if not self._waiting:
            return
        group = pa.Table.from_batches(self._waiting, EVENT)
        self._waiting, self._rows_waiting, self._bytes_waiting = [], 0, 0
        self._seen(group)
        self._writer.write_table(group, row_group_size=group.num_rows)
        self.rows += group.num_rows

    def close(self) -> None:
        self._writer.close()


@dataclass(frozen=True)
class Fill:
    """What goes into the blanks. Times are in microseconds; `position`: what stands there, and what is to, as long."""

    numbers: Mapping[str, int]
    position: tuple[str, str]


@dataclass(frozen=True)
class WrittenEvents:
    """Events of one partition in a file with blanks, at most some ten megabytes; `fill` is what their source knows.
    They may be taken into the log as they are (`filled`), or row by row."""

    open: Callable[[], pa.NativeFile]
    source: str  # that the file names
    rows: int
    nbytes: int
    fill: Fill
    ends: tuple[str, str]  # the first and the last position
    batches: Callable[[], Iterator[pa.RecordBatch]]  # the same events, as TAKEN


Rows: TypeAlias = pa.RecordBatch | WrittenEvents


def as_batches(rows: Iterable[Rows]) -> Iterator[pa.RecordBatch]:
    """All of it row by row."""
    for some in rows:
        if isinstance(some, WrittenEvents):
            yield from some.batches()
        else:
            yield some


def filled(file: pa.NativeFile, fill: Fill) -> Iterator[bytes]:
    """The bytes of a file with its blanks filled in, piece by piece."""
    patches = _patches(file, fill)
    size, at, number = file.size(), 0, 0
    file.seek(0)
    while at < size:
        piece = bytearray(file.read(min(_COPIED_BYTES, size - at)))
        # A patch over the end of a piece is written in both.
        for place, text in patches[number:]:
            if place >= at + len(piece):
                break
            begin, end = max(place, at), min(place + len(text), at + len(piece))
            piece[begin - at : end - at] = text[begin - place : end - place]
            number += place + len(text) <= at + len(piece)
        at += len(piece)
        yield bytes(piece)


def _patches(file: pa.NativeFile, fill: Fill) -> list[tuple[int, bytes]]:
    about = pq.read_metadata(file)
    numbers = {name: (_number(name, BLANKS[name]), _number(name, value)) for name, value in fill.numbers.items()}
    wanted = {**numbers, "position": (fill.position[0].encode(), fill.position[1].encode())}
    found: dict[int, bytes] = {}
    size = file.size()
    file.seek(size - _FOOTER_END)
    footer = int.from_bytes(file.read(4), "little")
    ranges = [(name, size - _FOOTER_END - footer, footer) for name in numbers if name in _STATISTICS]
    where = {about.schema.column(index).path: index for index in range(about.num_columns)}
    for group in range(about.num_row_groups):
        for name in wanted:
            column = about.row_group(group).column(where[name])
            begin = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
            ranges.append((name, begin, column.total_compressed_size))
    for name, begin, length in ranges:
        blank, text = wanted[name]
        file.seek(begin)
        places = list(_places(file.read(length), blank))
        if not places or len(blank) != len(text):
            raise FormatError(f"a file of events that lacks its {name} has no blank for it", hint="report this")
        for place in places:
            found.setdefault(begin + place, text)
    return sorted(found.items())


def _number(name: str, value: int) -> bytes:
    return value.to_bytes(_WIDTHS.get(name, 8), "little", signed=True)


def _places(data: bytes, wanted: bytes) -> Iterator[int]:
    at = data.find(wanted)
    while at >= 0:
        yield at
        at = data.find(wanted, at + len(wanted))
